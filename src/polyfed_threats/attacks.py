"""Attackers: a fixed subset of the clients that forge what they send, or train on false labels. Every draw is keyed
by (seed, round, exchange, client): forged numbers are drawn afresh for every upload, by nothing but the seed and the
client's name."""

from dataclasses import dataclass, replace
from math import floor
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from polyfed.base.arguments import checked
from polyfed.base.errors import ConfigError, DataError
from polyfed.base.randomness import client_keys, generator
from polyfed.base.settings import setting
from polyfed.core.algorithm import State
from polyfed.core.schedule import sample
from polyfed.runs import threats
from polyfed.runs.threats import ATTACKS

if TYPE_CHECKING:
    from polyfed.data.federation import Federation


@dataclass(frozen=True)
class Attack(threats.Attack):
    """Base of the attacks: some of the clients attack throughout, and forge tensors of their uplink.

    A subclass is registered under its name: `class Mine(Attack, name="mine")`.
    """

    scale: float = setting(1.0, doc="The attack's strength.")
    ratio: float = setting(0.2, ge=0, le=1, doc="Share of the clients that attack, rounded down.")
    tensors: tuple[str, ...] = setting((), doc="Which tensors of the uplink; empty: all of floats.")
    others: Literal["honest", "received"] = setting(
        "honest",
        doc='"honest": the tensors that are not forged are sent as trained; "received": as received, where the '
        "client received one of the same name and shape.",
    )

    def __init_subclass__(cls, name: str, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        cls.name = name
        ATTACKS.add(name, cls)

    def attackers(self, seed: int, keys: np.ndarray) -> np.ndarray:
        """The attackers. A client attacks under any numbering of the clients.

        Parameters
        ----------
        seed : int
            Of the draw.
        keys : array
            [n] client keys.

        Returns
        -------
        array
            [n] bool.
        """
        attackers = np.zeros(len(keys), dtype=bool)
        m = floor(self.ratio * len(keys) + 1e-9)
        attackers[sample(seed, "attackers", 0, keys, m)] = True
        return attackers

    def attacked(self, up: State) -> list[str]:
        """The tensors of an uplink that are forged.

        Parameters
        ----------
        up : dict
            The uplink, by name.

        Returns
        -------
        list of str
            Their names.
        """
        floats = [name for name, t in up.items() if t.is_floating_point()]
        for name in self.tensors:
            if name not in floats:
                raise ConfigError(f"attack.tensors: found {name!r}, expected some of {', '.join(floats) or 'none'}")
        return sorted(self.tensors or floats)

    def forge(self, value: Tensor, received: Tensor | None, rng: np.random.Generator) -> Tensor:
        """The tensor that one attacker sends in place of its own.

        Parameters
        ----------
        value : Tensor
            [...] the honest one.
        received : Tensor or None
            [...] the received tensor of the same name and shape, where there is one.
        rng : Generator
            This upload's own, one for all of its tensors.

        Returns
        -------
        Tensor
            [...] the forged one.
        """
        return value

    def poison(self, federation: "Federation", seed: int) -> "Federation":
        """The federation to train on: an attack on the data changes the attackers' samples here.

        Parameters
        ----------
        federation : Federation
            The honest data.
        seed : int
            Of the draws.

        Returns
        -------
        Federation
            The same, where the attack leaves the data alone.
        """
        return federation


@dataclass(frozen=True)
class SameValue(Attack, name="same-value"):
    """c * (1, ..., 1) instead of a tensor, c ~ N(0, scale^2) (Yu et al., arXiv 2211.04218, section 6, attack a)."""

    scale: float = setting(100.0, ge=0, doc="Standard deviation of c.")

    def forge(self, value: Tensor, received: Tensor | None, rng: np.random.Generator) -> Tensor:
        return torch.full_like(value, float(rng.normal(0, self.scale)))


@dataclass(frozen=True)
class SignFlip(Attack, name="sign-flip"):
    """-|c| times the honest tensor, c ~ N(0, scale^2) (arXiv 2211.04218, section 6, attack b)."""

    scale: float = setting(10.0, ge=0, doc="Standard deviation of c.")

    def forge(self, value: Tensor, received: Tensor | None, rng: np.random.Generator) -> Tensor:
        return -abs(float(rng.normal(0, self.scale))) * value


@dataclass(frozen=True)
class GaussianNoise(Attack, name="gaussian"):
    """Pure noise N(0, scale^2 I) instead of a tensor (arXiv 2211.04218, section 6, attack c)."""

    scale: float = setting(100.0, ge=0, doc="Standard deviation of every number.")

    def forge(self, value: Tensor, received: Tensor | None, rng: np.random.Generator) -> Tensor:
        noise = torch.as_tensor(rng.standard_normal(value.numel())).view(value.shape)
        return (self.scale * noise).to(value)


@dataclass(frozen=True)
class ScaledUpdate(Attack, name="scaled-update"):
    """The honest update times `scale`: x + scale (w - x), where x is the model that was received.

    Where no tensor of the same name was received, as for methods that send updates, the tensor itself is scaled.
    """

    scale: float = setting(10.0, doc="Factor; with 1/ratio and more, the attackers alone can decide a mean.")

    def forge(self, value: Tensor, received: Tensor | None, rng: np.random.Generator) -> Tensor:
        return self.scale * value if received is None else received + self.scale * (value - received)


@dataclass(frozen=True)
class LabelFlip(Attack, name="label-flip"):
    """The attackers train honestly on false labels, y -> C - 1 - y; test data are left as they are.

    Nothing is forged: `tensors` and `others` are not used.
    """

    scale: float = setting(1.0, ge=0, le=1, doc="Share of an attacker's training samples that get a false label.")

    def attacked(self, up: State) -> list[str]:
        return []

    def poison(self, federation: "Federation", seed: int) -> "Federation":
        who = self.attackers(seed, client_keys(federation.names))
        return flip_labels(federation, who, self.scale, seed)


@checked
def flip_labels(federation: "Federation", attackers: np.ndarray, share: float = 1.0, seed: int = 0) -> "Federation":
    """The federation with labels y of some clients' training samples replaced by C - 1 - y.

    Parameters
    ----------
    federation : Federation
        Stays as it is.
    attackers : array
        [n] bool: the clients.
    share : float
        Of their training samples, drawn with keys of (seed, client name).
    seed : int
        Of the draw.

    Returns
    -------
    Federation
        With the false labels.
    """
    if federation.classes is None:
        raise DataError("label flipping needs classes, the targets of this federation are numbers")
    train, y = federation.train, federation.train.y.clone()
    for i in np.flatnonzero(attackers):
        a, count = int(train.offsets[i]), int(train.counts[i])
        rng = generator(seed, "flip labels", 0, int(client_keys([federation.names[i]])[0]))
        at = torch.as_tensor(a + rng.permutation(count)[: round(share * count)])
        y[at] = federation.classes - 1 - y[at]
    return replace(federation, train=replace(train, y=y))
