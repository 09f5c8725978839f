"""The rule by which `tune` and every recipe choose settings by a score of validation data.

Given values are the beginning: the search goes beyond an end while that is the best, up to the end of the setting.
"""

import dataclasses
import math
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, get_args

from polyfed.base.settings import Setting
from polyfed.base.values import FREE, Limits

At = tuple[float, ...]


@dataclass(frozen=True)
class Ladder:
    """The values of one setting and their continuation beyond either end."""

    values: tuple[float, ...]  # rising
    limits: Limits = FREE  # a value at a limit (a share of 1, no penalty, one cluster) is at no edge
    whole: bool = False  # integers alone

    @classmethod
    def of(cls, method: Any, setting: str, values: Sequence[float]) -> "Ladder":
        """The ladder of a method's numeric setting, which ends where the method says."""
        field = next(f for f in dataclasses.fields(method) if f.name == setting)
        described = field.metadata.get("setting", Setting())
        limits = described.limits
        if (described.step_size or setting == "lr") and limits == FREE:
            limits = Limits(gt=0)  # a step of 0 learns nothing
        return cls(tuple(values), limits, float not in (get_args(field.type) or (field.type,)))

    @classmethod
    def options(cls, count: int) -> "Ladder":
        """The numbers of `count` options, all of which are tried and beyond which there is nothing."""
        return cls(tuple(range(count)), Limits(ge=0, le=count - 1), True)

    def beyond(self, tried: Sequence[float], up: bool) -> float | None:
        """The value to try next above (`up`) or below all that were tried, rising; None where the setting ends."""
        end, *inner = tried[::-1][:3] if up else tried[:3]
        taken, bound = (self.limits.le, self.limits.lt) if up else (self.limits.ge, self.limits.gt)
        if not inner or end == taken:
            return None
        # the last step again, or the last ratio where ratios are the steadier ones
        ratio = len(inner) == 2 and by_ratio(end, *inner)
        value = float(f"{end * end / inner[0] if ratio else 2 * end - inner[0]:.6g}")
        # ratios never come to 0: it is next after one of them
        never = ratio and taken == 0 and end not in self.values
        if taken is not None and (never or (value > taken if up else value < taken)):
            value = taken
        if bound is not None and not (value < bound if up else value > bound):
            value = (end + bound) / 2  # the bound itself cannot be taken
        if self.whole:
            value = math.ceil(value) if up else math.floor(value)
        return value

    def at_edge(self, tried: Sequence[float], value: float) -> bool:
        """True where nothing above or nothing below a value has been tried, and the setting does not end there."""
        if len(self.values) < 2:
            return False
        above, below = any(v > value for v in tried), any(v < value for v in tried)
        return not (above or value == self.limits.le) or not (below or value == self.limits.ge)


def by_ratio(end: float, a: float, b: float) -> bool:
    """True where the ratios of b, a, end differ by less than their steps do."""
    if min(end, a, b) <= 0:
        return False
    steps, ratios = sorted((abs(end - a), abs(a - b))), sorted((abs(math.log(end / a)), abs(math.log(a / b))))
    return ratios[1] / ratios[0] < steps[1] / steps[0]


@dataclass(frozen=True)
class Climbed:
    """Result of `climb`."""

    best: At
    tried: dict[At, float]  # scores, in the order of the trials
    edges: int  # settings whose choice is at an edge, as the trials were too few


def middle(ladders: Sequence[Ladder]) -> At:
    """Where a climb begins."""
    return tuple(ladder.values[len(ladder.values) // 2] for ladder in ladders)


def climb(score: Callable[[At], float], ladders: Sequence[Ladder], trials: int) -> Climbed:
    """Find the best values of settings in `trials` different ones; higher scores are better, NaN diverged."""
    # Each ladder in full, other settings at their middle or best; then to where no neighbour is better, beyond the
    # ladders if need be; then with halved steps.
    way = _Way(score, ladders, trials)
    for k, ladder in enumerate(ladders):
        way.line(k, ladder.values)
    rested: At | None = None
    while way.rest():
        rested = way.at
        if not way.refined():
            break
    if rested is not None and way.edges():  # trials ran out: back to the place all of whose neighbours were tried
        way.at = rested
    return Climbed(way.at, way.tried, way.edges())


class _Way:
    """The place of a climb and its trials; `rungs` are the rising values of each setting that it may step on."""

    def __init__(self, score: Callable[[At], float], ladders: Sequence[Ladder], trials: int):
        self.ladders, self.trials = ladders, trials
        self.score: Callable[[At], float] = lambda at: -math.inf if math.isnan(value := score(at)) else value
        self.rungs = [list(ladder.values) for ladder in ladders]
        self.at = middle(ladders)
        self.tried: dict[At, float] = {self.at: self.score(self.at)}

    def better(self, k: int, value: float) -> bool:
        """Go to another value of setting k if it is better; a value that there is no trial left for is not."""
        place = (*self.at[:k], value, *self.at[k + 1 :])
        if place not in self.tried:
            if len(self.tried) >= self.trials:
                return False
            self.tried[place] = self.score(place)
        if self.tried[place] <= self.tried[self.at]:
            return False
        self.at = place
        return True

    def line(self, k: int, values: Sequence[float]) -> None:
        """All values of setting k."""
        for value in values:
            self.better(k, value)

    def rest(self) -> bool:
        """Step to better neighbours while there are any. Returns whether trials are left."""
        while any(self.step(k, up) for k in range(len(self.ladders)) for up in (True, False)):
            pass
        return len(self.tried) < self.trials

    def step(self, k: int, up: bool) -> bool:
        """Go to the neighbour of setting k above or below if it is better; a new rung where there is none."""
        rungs = self.rungs[k]
        here = rungs.index(self.at[k])
        if here == (len(rungs) - 1 if up else 0):
            value = self.ladders[k].beyond(rungs, up)
            if value is None:
                return False
            insort(rungs, value)
        else:
            value = rungs[here + (1 if up else -1)]
        return self.better(k, value)

    def refined(self) -> bool:
        """Halve the steps around the place. Returns whether there was one to halve."""
        halved = False
        for k, ladder in enumerate(self.ladders):
            rungs = self.rungs[k]
            here = rungs.index(self.at[k])
            for a, b in pairwise(rungs[max(here - 1, 0) : here + 2]):
                value = float(f"{(a + b) / 2:.6g}")
                if not ladder.whole and a < value < b:
                    insort(rungs, value)
                    halved = True
        return halved

    def edges(self) -> int:
        """Number of settings with the place at an edge."""
        return sum(map(self.edge, range(len(self.ladders))))

    def edge(self, k: int) -> bool:
        """True where the place is at an edge of setting k."""
        others = (*self.at[:k], *self.at[k + 1 :])
        line = [place[k] for place in self.tried if (*place[:k], *place[k + 1 :]) == others]
        return self.ladders[k].at_edge(line, self.at[k])
