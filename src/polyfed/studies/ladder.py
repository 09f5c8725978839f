"""The rule by which `tune` and every recipe choose settings.

A score of validation data decides. The values that are given are where a search begins: while the best is the first or
the last that was tried, the search goes on beyond it, until both neighbours are no better or the setting ends there
(a share of 0 or 1, no penalty at all, one cluster). Methods that stand in one table get the same number of trials.
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
    """The values of one setting, and how they go on beyond either end.

    values: rising     limits: where the setting ends: a choice of that value is not at an edge
    whole: whether it takes integers alone
    """

    values: tuple[float, ...]
    limits: Limits = FREE
    whole: bool = False

    @classmethod
    def of(cls, method: Any, setting: str, values: Sequence[float]) -> "Ladder":
        """The ladder of a method's numeric setting, which ends where the method says."""
        field = next(f for f in dataclasses.fields(method) if f.name == setting)
        known = field.metadata.get("setting", Setting())
        limits = known.limits
        if (known.step_size or setting == "lr") and limits == FREE:
            limits = Limits(gt=0)  # a step of 0 learns nothing
        return cls(tuple(values), limits, float not in (get_args(field.type) or (field.type,)))

    @classmethod
    def options(cls, count: int) -> "Ladder":
        """The numbers of `count` options, all of which are tried and beyond which there is nothing."""
        return cls(tuple(range(count)), Limits(ge=0, le=count - 1), True)

    def beyond(self, tried: Sequence[float], up: bool) -> float | None:
        """The value to try next above (`up`) or below all that were tried, rising; None where the setting ends.

        By the last step, or by the last ratio where ratios are the steadier ones. Half the way to a bound that cannot
        be taken itself; and where ratios would never come to the setting's end, that end after one of them.
        """
        end, *inner = tried[::-1][:3] if up else tried[:3]
        taken, bound = (self.limits.le, self.limits.lt) if up else (self.limits.ge, self.limits.gt)
        if not inner or end == taken:
            return None
        ratio = len(inner) == 2 and by_ratio(end, *inner)
        value = float(f"{end * end / inner[0] if ratio else 2 * end - inner[0]:.6g}")
        never = ratio and taken == 0 and end not in self.values
        if taken is not None and (never or (value > taken if up else value < taken)):
            value = taken
        if bound is not None and not (value < bound if up else value > bound):
            value = (end + bound) / 2
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
    """Result of `climb`.

    best: the values of the best trial     tried: {values: score} in the order of the trials
    edges: at how many settings the choice is at an edge; more than none where the trials were too few
    """

    best: At
    tried: dict[At, float]
    edges: int


def climb(score: Callable[[At], float], ladders: Sequence[Ladder], trials: int) -> Climbed:
    """Find the best values of one setting or several, in `trials` trials where there are as many values.

    Setting by setting all values of its ladder are tried, the others at the middle and then at the best of theirs. From
    the best the search goes on to where no neighbour is better, beyond the ladders if need be; the trials that are left
    halve the steps around the best. Where they run out before the neighbours of the latest place are tried, the choice
    is the place before, all of whose neighbours were.

    score: values, one per ladder -> what validation says of them, the higher the better; minus infinity, NaN: diverged
    ladders: one per setting     trials: how many different values are tried
    Returns the choice, the trials, and how many edges are left.
    """
    way = _Way(score, ladders, trials)
    for k, ladder in enumerate(ladders):
        way.line(k, ladder.values)
    rested: At | None = None
    while way.rest():
        rested = way.at
        if not way.refined():
            break
    if rested is not None and way.edges():
        way.at = rested
    return Climbed(way.at, way.tried, way.edges())


class _Way:
    """Where a climb is, and what it has tried. rungs: [setting] the values that it may step on, rising"""

    def __init__(self, score: Callable[[At], float], ladders: Sequence[Ladder], trials: int):
        self.ladders, self.trials = ladders, trials
        self.score: Callable[[At], float] = lambda at: -math.inf if math.isnan(said := score(at)) else said
        self.rungs = [list(ladder.values) for ladder in ladders]
        self.at = tuple(values[len(values) // 2] for values in self.rungs)
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
        found = False
        for k, ladder in enumerate(self.ladders):
            rungs = self.rungs[k]
            here = rungs.index(self.at[k])
            for a, b in pairwise(rungs[max(here - 1, 0) : here + 2]):
                value = float(f"{(a + b) / 2:.6g}")
                if not ladder.whole and a < value < b:
                    insort(rungs, value)
                    found = True
        return found

    def edges(self) -> int:
        """At how many settings the place is at an edge."""
        return sum(map(self.edge, range(len(self.ladders))))

    def edge(self, k: int) -> bool:
        """True where the place is at an edge of setting k."""
        others = (*self.at[:k], *self.at[k + 1 :])
        line = [place[k] for place in self.tried if (*place[:k], *place[k + 1 :]) == others]
        return self.ladders[k].at_edge(line, self.at[k])
