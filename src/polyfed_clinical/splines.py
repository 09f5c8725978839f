"""Restricted cubic splines, cubic between knots and straight beyond, with the scaling and knots of Harrell, "Regression
Modeling Strategies" (2015), 2.4.5. Knots are quantiles of the pooled rows, from a histogram summed over sites.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from polyfed.base.errors import ConfigError, DataError, closest
from polyfed.core.algorithm import State
from polyfed_clinical.sites import Site, Wire

QUANTILES = {
    3: (0.1, 0.5, 0.9),
    4: (0.05, 0.35, 0.65, 0.95),
    5: (0.05, 0.275, 0.5, 0.725, 0.95),
    6: (0.05, 0.23, 0.41, 0.59, 0.77, 0.95),
    7: (0.025, 0.1833, 0.3417, 0.5, 0.6583, 0.8167, 0.975),
}
BINS, REACH = 64, 4.0  # of the histogram: bins, and deviations to both sides of the mean

Knots = Mapping[str, tuple[float, ...]]


def basis(x: Tensor, knots: Sequence[float]) -> Tensor:
    """[N] -> [N, k - 1]: x itself, then k - 2 terms that are 0 below the first knot."""
    *inner, before, last = knots
    unit = (last - knots[0]) ** 2

    def cube(at: float) -> Tensor:
        return (x - at).clamp(min=0) ** 3

    terms = [
        cube(t) - cube(before) * (last - t) / (last - before) + cube(last) * (before - t) / (last - before)
        for t in inner
    ]
    return torch.stack([x, *(t / unit for t in terms)], 1)


def terms_of(column: str, knots: Sequence[float]) -> list[str]:
    """Names of a column's terms: age, age', age''."""
    return [column + "'" * k for k in range(len(knots) - 1)]


def placed(wire: Wire, columns: Sequence[str], wanted: Mapping[str, int | Sequence[float]]) -> Knots:
    """The knots of every column of `wanted`, as given or as many as asked for."""
    for name, knots in wanted.items():
        if name not in columns:
            raise ConfigError(f"splines: no column {name!r}{closest(name, columns)}; there are {', '.join(columns)}")
        rising = not isinstance(knots, int) and len(knots) > 2 and list(knots) == sorted(set(knots))
        if not rising and (not isinstance(knots, int) or knots not in QUANTILES):
            raise ConfigError(f"splines: {name}: found {knots}, expected 3 to 7 knots, or three places or more, rising")
    counted = {name: knots for name, knots in wanted.items() if isinstance(knots, int)}
    places: dict[str, tuple[float, ...]] = {
        name: tuple(map(float, knots)) for name, knots in wanted.items() if not isinstance(knots, int)
    }
    if not counted:
        return places
    which = [columns.index(name) for name in counted]

    def histogram(site: Site, edges: Tensor) -> State:
        x = site.x[:, which].T.contiguous()
        bins = torch.searchsorted(edges.view(len(which), -1).contiguous(), x)
        return {"counts": torch.stack([b.bincount(minlength=BINS + 2) for b in bins])}

    _, mean, scale = wire.moments(lambda site: site.x[:, which])
    edges = mean[:, None] + scale[:, None] * torch.linspace(-REACH, REACH, BINS + 1, dtype=torch.float64)
    counts = wire.total(histogram, edges.flatten())["counts"]
    for name, count, edge in zip(counted, counts.double(), edges, strict=True):
        below = count.cumsum(0)[:-1] / count.sum()  # at every edge
        at = np.interp(QUANTILES[counted[name]], below.numpy(), edge.numpy())
        width = float(edge[-1] - edge[0]) / (2 * REACH)  # a deviation
        knots = tuple(round(float(t), 2 - math.floor(math.log10(width))) for t in at) if width > 0 else ()
        if len(set(knots)) < len(at):
            raise DataError(f"splines: {name}: too few distinct values for {len(at)} knots; name their places")
        places[name] = knots
    return {name: places[name] for name in wanted}


def bent(site: Site, columns: Sequence[str], knots: Knots) -> Site:
    """The site with the terms of its splines in the place of their columns."""
    parts = [basis(x, knots[c]) if c in knots else x[:, None] for c, x in zip(columns, site.x.T, strict=True)]
    return replace(site, x=torch.cat(parts, 1))
