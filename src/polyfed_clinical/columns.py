"""Columns before the first Newton step: their design, the units of coefficients, and a start."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from polyfed.base.errors import ConfigError, DataError, closest
from polyfed.report import words
from polyfed_clinical.models import Model
from polyfed_clinical.sites import Design, pooled
from polyfed_clinical.splines import Knots


class Units(NamedTuple):
    """Units of coefficients: names with the unit, of the columns that have one, and `sizes` [columns]."""

    names: dict[str, str]
    sizes: Tensor

    def of(self, intercepts: int) -> Tensor:
        """[p]: of all coefficients, intercepts first."""
        return torch.cat([self.sizes.new_ones(intercepts), self.sizes])

    @classmethod
    def read(cls, per: Mapping[str, float | str], labels: Sequence[str], knots: Knots, deviation: Tensor) -> "Units":
        """The units asked for; `deviation` [columns] is that of the pooled rows. Raises ConfigError."""
        names, sizes = dict[str, str](), torch.ones(len(labels), dtype=torch.float64)
        for name, unit in per.items():
            if name in knots:
                raise ConfigError(f"per: {name} is a spline, whose terms have no unit")
            if name not in labels:
                raise ConfigError(f"per: no column {name!r}{closest(name, labels)}; there are {', '.join(labels)}")
            if unit != "sd" and not (isinstance(unit, int | float) and 0 < unit < math.inf):
                raise ConfigError(f"per: {name}: found {unit!r}, expected a number above 0, or 'sd'")
            size = float(deviation[labels.index(name)]) if unit == "sd" else float(unit)
            sizes[labels.index(name)] = size
            names[name] = f"{name} per SD ({words.figures(size)})" if unit == "sd" else f"{name} per {size:g}"
        return cls(names, sizes)


def designed(kind: Model, labels: Sequence[str], each: Mapping[str, Tensor]) -> tuple[Design, Tensor, list[str]]:
    """(means and deviations, sample deviations, each site's words if its outcomes are all alike), from `Site.sums`."""
    total, events = each["n"].sum(), each["target"][:, 0 if kind.intercept else 1]
    if kind.name != "linear" and not events.sum() > 0:
        raise DataError("no site has an event; at least one is needed")
    if kind.name == "logistic" and events.sum() == total:
        raise DataError("every target is 1 at every site; both 0 and 1 are needed")
    mean, scale = pooled(each["n"], each["x"], each["squares"])
    if kind.intercept and bool((still := scale == 0).any()):
        raise DataError(f"column {labels[int(still.nonzero()[0])]!r} is constant over all sites; leave it out")
    unit = torch.zeros(0, dtype=torch.float64)
    if kind.name == "linear":
        unit = torch.cat(pooled(each["n"], each["target"][:, :1], each["target squares"]))
        unit[1] = unit[1] if unit[1] > 0 else 1.0
    alike = [""] * len(events)
    if kind.name != "linear":
        only = events == each["n"] if kind.name == "logistic" else events < 0
        alike = ["no event" if e == 0 else "events only" if o else "" for e, o in zip(events, only, strict=True)]
    design = Design(mean, torch.where(scale > 0, scale, 1.0), unit)
    return design, scale * (total / (total - 1)).sqrt(), alike


def started(model: Model, target: Tensor, p: int) -> Tensor:
    """Zero, except for an intercept that fits the mean; `target` [2] holds its sums."""
    beta = torch.zeros(p, dtype=torch.float64)
    mean = target[0] / target[1]
    if model.name == "logistic":
        beta[0] = mean.logit()
    if model.name == "poisson":
        beta[0] = mean.log()
    return beta
