"""Threatened: an engine around another one. Attackers forge their uplinks after they have trained; a robust rule then
puts one value in the place of every client's, or of every one's in a cluster, so that whatever mean the method takes
returns that value.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from polyfed.core.algorithm import Algorithm, Round, State
from polyfed.core.errors import ConfigError
from polyfed.core.randomness import generator
from polyfed.core.rounds import Engine
from polyfed.core.rows import Rows
from polyfed.core.worker import Reply
from polyfed.threats.aggregation import Rule
from polyfed.threats.attacks import Attack


class Inner(Engine, Protocol):
    """What `Threatened` wraps: an engine that can be closed."""

    def close(self) -> None: ...


class Threatened:
    """An engine some of whose clients attack, and whose uplinks are made robust before the server sees them.

    keys: [n] client keys     seed: of the attackers and of what they draw

    Clients train honestly and keep honest private states; only what they send is forged, and bytes stay what they were.
    """

    def __init__(
        self, engine: Inner, keys: np.ndarray, seed: int, attack: Attack | None = None, robust: Rule | None = None
    ):
        self.engine, self.keys, self.seed, self.attack, self.robust = engine, keys, seed, attack, robust
        self.workers = engine.workers
        self.attackers = np.zeros(len(keys), dtype=bool) if attack is None else attack.attackers(seed, keys)
        self._held: tuple[Tensor, State] | None = None  # whom a round has asked so far, and what they received

    def exchange(self, algorithm: Algorithm, rows: Rows, down: State, round: Round) -> Reply:
        """One exchange with the clients `round.ids`."""
        reply = self.engine.exchange(algorithm, rows, down, round)
        up, down = dict(reply.up), self._received(down, round)
        self._forge(up, down, round)
        self._defend(algorithm, up, down)
        return reply._replace(up=up)

    def _received(self, down: State, round: Round) -> State:
        """With what the same clients received earlier in the round: a model may be answered an exchange later."""
        if round.phase and self._held is not None and torch.equal(self._held[0], round.ids):
            down = self._held[1] | down
        self._held = round.ids, down
        return down

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """`function` of every item, as the engine inside does it."""
        return self.engine.map(function, items)

    def close(self) -> None:
        self.engine.close()

    def _forge(self, up: State, down: State, round: Round) -> None:
        ids = round.ids.cpu().numpy()
        rows = np.flatnonzero(self.attackers[ids])
        if self.attack is None or not len(rows) or not up:
            return
        names = self.attack.attacked(up)
        for name in names:
            up[name] = up[name].clone()
        for row in rows.tolist():
            rng = generator(self.seed, f"attack {round.phase}", round.t, int(self.keys[ids[row]]))
            for name in names:
                sent = received(name, up[name], down)
                up[name][row] = self.attack.forge(up[name][row], None if sent is None else sent[row], rng)

    def _defend(self, algorithm: Algorithm, up: State, down: State) -> None:
        if self.robust is None:
            return
        check(algorithm, self.robust)
        for name in set(averages(algorithm)) & up.keys():
            values, sent = up[name], received(name, up[name], down)
            base = sent[0] if sent is not None and sent.stride(0) == 0 else None  # one model for all
            flat = (values if base is None else values - base).flatten(1)
            if algorithm.within:
                groups, which = up[algorithm.within].unique(return_inverse=True)
                one = torch.stack([self.robust(flat[which == g]) for g in range(len(groups))])[which].view_as(values)
            else:
                one = self.robust(flat).view(values.shape[1:])
            up[name] = (one if base is None else base + one).expand_as(values)


def received(name: str, value: Tensor, down: State) -> Tensor | None:
    """The tensor of the same name and shape as an uplink tensor [s, ...] in what its clients received, or None."""
    return down[name] if name in down and down[name].shape == value.shape else None


def averages(algorithm: Algorithm) -> tuple[str, ...]:
    """The uplink tensors that the method's server uses through their mean only, or their means `within` clusters."""
    return algorithm.averages


def check(algorithm: Algorithm, robust: Rule | None) -> None:
    """Raise ConfigError when a robust rule has no mean to take the place of."""
    if robust is not None and not averages(algorithm):
        raise ConfigError(
            f"robust: {algorithm.name} as it is set uses no upload through its mean alone, so {robust.name} has "
            "nothing to replace; expected a method such as fedavg"
        )


def summary(part: Any) -> dict[str, Any] | None:
    """An attack or rule as a table of settings, for config.toml."""
    if part is None:
        return None
    return {"name": part.name} | {k: list(v) if isinstance(v, tuple) else v for k, v in vars(part).items()}
