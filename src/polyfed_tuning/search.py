"""Settings of a search."""

from dataclasses import dataclass
from typing import Any, Literal

from polyfed.base.settings import setting
from polyfed.base.values import COUNTED
from polyfed.runs.training import Table


@dataclass(frozen=True)
class Search(Table):
    """Settings of how `tune` tries values of one numeric setting of a method."""

    regime: Literal["warm", "cold", "both"] | None = setting(
        None,
        doc="warm: each value from the last solution; cold: from the common start; both. Default: both for fpfc's lam, "
        "else cold.",
    )
    grid: Any = setting(None, doc="Values, rising: 0,0.5,1.")
    rounds: int = setting(1000, ge=1, le=COUNTED, doc="Maximum per value.")
    check_every: int = setting(10, ge=1, le=COUNTED, doc="Rounds between checks of the validation metric.")
    tolerance: float = setting(1e-4, ge=0, doc="Changes of the validation metric below this count as small.")
    patience: int = setting(3, ge=1, le=COUNTED, doc="Stop after N small changes in a row.")
    stop_at_drop: bool = setting(True, doc="End a warm path once a value is worse by two standard errors.")
    extend: int = setting(
        6, ge=0, le=COUNTED, doc="Try up to N values beyond the grid while its first (cold) or last one is best."
    )
    train_on: int = setting(2000, ge=0, le=COUNTED, doc="Maximum extra rounds for the chosen model.")
    setting: str | None = setting(None, doc="The numeric setting to tune; lam unless given, for fedacs quantile.")
