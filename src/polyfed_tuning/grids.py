"""The values that a search tries: of which setting, from which start, and what each default is."""

import dataclasses
from typing import Any, Literal, get_args

from polyfed.base.errors import ConfigError, closest
from polyfed.base.settings import hinges, is_mapping
from polyfed.core.algorithm import Contender

Regime = Literal["warm", "cold"]
REGIMES: tuple[Regime, ...] = ("warm", "cold")
GRIDS: dict[tuple[str, str], dict[Regime, tuple[float, ...]]] = {
    ("fpfc", "lam"): {  # the paper's for its synthetic data, and a finer one: from a common start values are lower
        "warm": (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5),
        "cold": (0.0, 0.2, 0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 1.0),
    },
    ("fedacs", "quantile"): {"cold": (0.0, 1 / 2, 2 / 3, 3 / 4, 4 / 5, 5 / 6, 9 / 10)},  # 1 - 1/G: G groups of one size
}


def default_setting(algorithm: Contender) -> str:
    """The setting that is tuned where none is named."""
    return next((f.name for f in hinges(algorithm)), "lam")


def methods_of(algorithm: Contender, setting: str, grid: Any, regime: Regime) -> list[Contender]:
    """The method once per value of the regime's grid, which makes it check them all."""
    types = {f.name: f.type for f in dataclasses.fields(algorithm)}
    if setting not in types:
        raise ConfigError(f"algorithm: {algorithm.name} has no setting {setting} to tune{closest(setting, types)}")
    kinds = get_args(types[setting]) or (types[setting],)
    if not {int, float} & set(kinds):
        raise ConfigError(f"setting: {setting} of {algorithm.name} is not a number")
    given: Any = grid.get(regime) if is_mapping(grid) else grid
    usual: tuple[Any, ...] | None = GRIDS.get((algorithm.name, setting), {}).get(regime)
    values = usual if given is None else tuple(given)
    if values is None:
        raise ConfigError(f"grid: {setting} of {algorithm.name} has no default for a {regime} start; give one")
    if not values or any(isinstance(v, bool) or not isinstance(v, int | float) for v in values):
        raise ConfigError(f"grid: found {list(values)!r} for {regime}, expected one number or more")
    if list(values) != sorted(set(values)):
        raise ConfigError(f"grid: found {list(values)!r} for {regime}, expected rising values")
    if float not in kinds and any(v != int(v) for v in values):
        raise ConfigError(f"grid: found {list(values)!r} for {regime}, expected integers")
    kind = float if float in kinds else int
    return [dataclasses.replace(algorithm, **{setting: kind(v)}) for v in values]
