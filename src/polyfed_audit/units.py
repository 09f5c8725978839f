"""Units: a site whose numbers are a factor times those of the others, and the unit that explains it.

Hospitals differ too: how far the second of a site's other columns lies from other sites says how strange its patients
are, and a factor counts only beyond that. A unit explains every quartile within the medians' error, or is not proposed.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import NamedTuple

import numpy as np

from polyfed.base.errors import ConfigError
from polyfed.base.part import Flag, Part, Parts
from polyfed_audit.changes import Change, change
from polyfed_audit.codes import at_site
from polyfed_audit.parts import LEAST

FACTOR, DEVIATIONS, WIDTHS = 1.8, 5.0, 4.0  # least ratio of medians; its logarithm in errors, in a site's strangeness
NAMED = 3.0  # the same of a unit's own factor, where a unit explains it
LIKE, NEAR = 0.5, 0.1  # widths that like sites differ by, and least error of a unit's factor
STEP = 0.03  # of a quantile that leaves a site in two digits
SHARE = 0.12  # of the logarithm of a unit's factor, that may be left
# of any column
POWERS = [(f"x {s} {k}", Change(k**p)) for k in (10, 100, 1000) for s, p in (("/", -1), ("*", 1))]
UNITS = {  # units that are mixed, by parts of the names of their columns
    "gluc gluk glc sugar zucker lact lakt chol ldl hdl trig urea harnstoff bun calc kalz magn phos": "mg/dl mmol/l",
    "crea krea bili uric urate harnsäure": "mg/dl µmol/l",
    "hb hgb haemoglobin hemoglobin hämoglobin": "g/l g/dl mmol/l",
    "alb protein eiweiss eiweiß": "g/l g/dl",
    "crp": "mg/l mg/dl",
    "a1c": "% mmol/mol",
    "vitd vit_d vitamin_d vitamind 25oh": "ng/ml nmol/l",
    "iron eisen ferrum": "µg/dl µmol/l",
    "press trestbps sbp dbp rr_ pco2 po2": "mmHg kPa",
    "temp fever fieber": "°C °F",
    "weight gewicht mass wt kg": "kg lb g",
    "height waist length size grösse größe hip": "cm m in mm",
    "age alter": "years months days",
    "time day tage dauer duration surv follow month monat week woche year jahr stay los": "days weeks months years h",
    "share fraction sat spo2 percent hematocrit hct": "% 1",
}


class Shift(NamedTuple):
    """A column's distance between a site and the others, in logarithms of medians."""

    by: float
    error: float  # of the medians
    wide: float  # the column's deviation, the larger of both
    narrow: float  # in the middle of both
    mine: Sequence[float]
    theirs: Sequence[float]
    whose: str
    units: tuple[str, Change] | None  # that explain it, as a repair

    @property
    def strange(self) -> float:
        """Widths that no unit explains."""
        return abs(self.by - (self.left if self.units else 0.0)) / math.hypot(self.narrow, self.error)

    @property
    def left(self) -> float:
        """The logarithm of the units' factor."""
        scale, shift = self.units[1] if self.units else Change(1.0)
        return math.log(self.mine[2] / (scale * self.mine[2] + shift))


def units(parts: Parts) -> Iterator[Flag]:
    """Sites whose numbers are in other units."""
    shifts = {name: dict(_shifts(name, at)) for name, at in parts.items()}
    for name, at in shifts.items():
        for site, s in at.items():
            others = sorted(o[site].strange for n, o in shifts.items() if n != name and site in o)
            like = max(LIKE, others[-2] if len(others) > 1 else 0.0) * s.wide
            apart = s.mine[1] > s.theirs[3] or s.mine[3] < s.theirs[1]
            widths = NAMED if s.units else WIDTHS * (2 if _known(name) else 1)
            least = max(DEVIATIONS * s.error, widths * like, 0 if s.units else math.log(FACTOR))
            if not apart or abs(s.left if s.units else s.by) < least:
                continue
            if s.whose != "other sites" and s.by < 0:
                continue  # said of the other one
            times = f"{math.exp(abs(s.by)):.3g} times" if s.by > 0 else f"1/{math.exp(abs(s.by)):.3g} of"
            text = f"the median of {name} is {s.mine[2]:.4g}, {times} that of {s.whose} ({s.theirs[2]:.4g})"
            if s.units is None:
                yield Flag(site, name, f"{text}, in other units?")
            else:
                a, arrow, b = s.units[0].partition(" -> ")
                then = f", as {a} in place of {b} would" if arrow else ", in other units?"
                yield Flag(site, name, f"{text}{then}", at_site(site, name, s.units[0]))


def _shifts(name: str, at: Mapping[str, Part]) -> Iterator[tuple[str, Shift]]:
    sites = {s: p for s, p in at.items() if p.quantiles and p.quantiles[0] > 0 and p.there >= LEAST and p.distinct > 2}
    of = {s: p.quantiles for s, p in sites.items() if p.quantiles}
    errors = {s: _error(q, sites[s].there) for s, q in of.items()}
    for site, mine in of.items():
        others = sorted((s for s in of if s != site), key=lambda s: of[s][2])
        if not others:
            continue
        middle = {others[(len(others) - 1) // 2], others[len(others) // 2]}
        like = min(middle, key=lambda s: (abs(math.log(mine[2] / of[s][2])), s))
        theirs, error = of[like], math.hypot(errors[site], errors[like])
        widths = [max(STEP, math.log(q[3] / q[1]) / 1.349) for q in (mine, theirs)]
        apart = scatter([math.log(of[s][2]) for s in others]) if len(others) > 2 else 0.0
        by, whose = math.log(mine[2] / theirs[2]), "other sites" if len(others) > 1 else like
        near = min(max(NEAR, 3 * math.hypot(error, apart)), 0.22)
        units, middle = _units(name, mine, theirs, near), math.sqrt(widths[0] * widths[1])
        yield site, Shift(by, math.hypot(error, apart), max(widths), middle, mine, theirs, whose, units)


def _units(name: str, mine: Sequence[float], theirs: Sequence[float], near: float) -> tuple[str, Change] | None:
    """The change of units after which a site's quartiles are the others'; of any column a power of ten."""
    named = [(f"{a} -> {b}", _change(a, b, name)) for units in _known(name) for a, b in permutations(units, 2)]
    wide = math.log(theirs[3] / theirs[1])
    for changes in (named, POWERS):
        fitting = list[tuple[float, str, Change]]()
        for text, c in changes:
            new = [] if c is None else [c.scale * v + c.shift for v in mine[1:4]]
            if c is None or min(new) <= 0:
                continue
            off = [abs(math.log(v / t)) for v, t in zip(new, theirs[1:4], strict=True)]
            most = max(near if changes is named else NEAR, SHARE * abs(math.log(new[1] / mine[2])))
            if off[1] < most and max(off) < most + wide / 4:
                fitting.append((off[1], text, c))
        if fitting:
            return min(fitting)[1:]
    return None


def _known(name: str) -> list[list[str]]:
    """Units of a column of this name."""
    return [units.split() for words, units in UNITS.items() if any(word in name.casefold() for word in words.split())]


def _change(a: str, b: str, name: str) -> Change | None:
    try:
        return change(f"{a} -> {b}", name)
    except ConfigError:  # of a substance that the name does not say
        return None


def _error(q: Sequence[float], n: int) -> float:
    """Standard error of the logarithm of a median, from the quartiles of its logarithms."""
    return 1.2533 * math.log(q[3] / q[1]) / 1.349 / math.sqrt(n)


def scatter(logs: Sequence[float]) -> float:
    """Distance between the sites' medians, robust: half of the sites may use another unit."""
    ordered = np.sort(np.array(logs))
    half = len(ordered) // 2 + 1
    return float(min(ordered[half - 1 :] - ordered[: len(ordered) - half + 1])) / 1.349
