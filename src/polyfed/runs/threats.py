"""Attacks and robust rules as a run names them; polyfed_threats has them, and is imported when one is named."""

from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from polyfed.base.registry import Registry
from polyfed.base.settings import Configured
from polyfed.data.federation import Federation


class Threat(Configured):
    """An attack or a robust rule."""

    name: ClassVar[str]

    def dump(self) -> dict[str, Any]:
        """Name and settings, as config.toml has them."""
        return {"name": self.name} | {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}


class Attack(Threat):
    """An attack, as far as a run knows it."""

    table: ClassVar[str] = "attack"

    @property
    def ratio(self) -> float:
        raise NotImplementedError

    def attackers(self, seed: int, keys: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def poison(self, federation: Federation, seed: int) -> Federation:
        raise NotImplementedError


class Rule(Threat):
    """A robust rule, as far as a run knows it."""

    table: ClassVar[str] = "robust"

    def __call__(self, values: Tensor) -> Tensor:
        raise NotImplementedError

    def idle(self, s: int) -> str:
        raise NotImplementedError


ATTACKS: Registry[type[Attack]] = Registry("attack.name")
RULES: Registry[type[Rule]] = Registry("robust.name")
ATTACKS.offer(
    dict.fromkeys(("samevalue", "signflip", "gaussian", "scaledupdate", "labelflip"), "polyfed_threats.attacks")
)
RULES.offer(
    dict.fromkeys(
        ("median", "trimmedmean", "krum", "multikrum", "geometricmedian", "normclipping"), "polyfed_threats.aggregation"
    )
)
