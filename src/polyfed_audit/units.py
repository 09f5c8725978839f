"""Units: a site whose numbers are a factor times those of the others, and which units would explain it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from polyfed.base.part import Flag, Part
from polyfed_audit.codes import site_key
from polyfed_audit.parts import LEAST

FACTOR, DEVIATIONS, WIDTHS = 1.8, 5.0, 2.0  # least ratio of medians; its logarithm in errors, in widths of the column


class Units(NamedTuple):
    """Units in which one site's numbers are `factor` times another's; `of` lists parts of the names of such columns."""

    factor: float
    words: str
    of: tuple[str, ...]


UNITS = (
    Units(18.02, "mg/dl and mmol/l of glucose", ("gluc", "gluk", "glc", "sugar", "zucker")),
    Units(88.4, "µmol/l and mg/dl of creatinine", ("crea", "krea")),
    Units(38.67, "mg/dl and mmol/l of cholesterol", ("chol", "ldl", "hdl")),
    Units(88.57, "mg/dl and mmol/l of triglycerides", ("trig",)),
    Units(17.1, "µmol/l and mg/dl of bilirubin", ("bili",)),
    Units(7.501, "mmHg and kPa", ("press", "trestbps", "bp", "pco2", "po2")),
    Units(1 / 0.4536, "lb and kg", ("weight", "gewicht", "mass")),
    Units(2.54, "cm and inches", ("height", "waist", "length", "size", "grösse", "größe")),
    Units(100.0, "cm and m, or per cent and shares", ("height", "share", "fraction", "hba1c", "sat")),
    Units(10.0, "g/l and g/dl, or mm and cm", ()),
    Units(12.0, "months and years", ("age", "alter", "month", "duration", "year")),
    Units(365.25, "days and years", ("age", "alter", "day", "duration", "time", "survival")),
    Units(1000.0, "thousands and units, or g and kg", ()),
)


def units(name: str, at: Mapping[str, Part]) -> Iterator[Flag]:
    sites = {s: p for s, p in at.items() if p.quantiles and p.quantiles[0] > 0 and p.there >= LEAST and p.distinct > 2}
    of = {s: p.quantiles for s, p in sites.items() if p.quantiles}
    medians, errors = {s: q[2] for s, q in of.items()}, {s: _error(q, sites[s].there) for s, q in of.items()}
    for site, mine in of.items():
        others = sorted((s for s in sites if s != site), key=lambda s: medians[s])
        if not others:
            continue
        like = others[(len(others) - 1) // 2]
        theirs = of[like]
        ratio = math.log(mine[2] / theirs[2])
        error = math.hypot(errors[site], errors[like])
        if len(others) > 2:
            error = math.hypot(error, _scatter([math.log(medians[s]) for s in others]))
        apart = mine[1] > theirs[3] or mine[3] < theirs[1]
        wide = max(math.log(q[3] / q[1]) / 1.349 for q in (mine, theirs))
        if not apart or abs(ratio) < max(math.log(FACTOR), DEVIATIONS * error, WIDTHS * wide):
            continue
        if len(others) == 1 and ratio < 0:
            continue  # said of the other one
        times = f"{math.exp(abs(ratio)):.3g} times" if ratio > 0 else f"1/{math.exp(abs(ratio)):.3g} of"
        whose = "other sites" if len(others) > 1 else like
        fitting = _fitting(name, site, mine, theirs, abs(ratio), error, ratio > 0)
        text = f"the median of {name} is {mine[2]:.4g}, {times} that of {whose} ({theirs[2]:.4g}){fitting}"
        yield Flag(site, name, text)


def _error(q: Sequence[float], n: int) -> float:
    """Standard error of the logarithm of a median, from the quartiles of its logarithms."""
    return 1.2533 * math.log(q[3] / q[1]) / 1.349 / math.sqrt(n)


def _scatter(logs: Sequence[float]) -> float:
    """Distance between the sites' medians, robust: half of the sites may use another unit."""
    ordered = np.sort(np.array(logs))
    half = len(ordered) // 2 + 1
    return float(min(ordered[half - 1 :] - ordered[: len(ordered) - half + 1])) / 1.349


def _fitting(
    name: str, site: str, mine: Sequence[float], theirs: Sequence[float], ratio: float, error: float, more: bool
) -> str:
    """Units that would explain a factor, and the repair."""
    warm, cold = (mine, theirs) if more else (theirs, mine)
    if all(abs(f - (1.8 * c + 32)) < 0.03 * f for f, c in zip(warm[1:4], cold[1:4], strict=True)):
        repair = "(x - 32) / 1.8" if more else "x * 1.8 + 32"
        return f', as °F and °C would; {site_key(site)} {name} = "{repair}"'
    far = {u: abs(math.log(u.factor) - ratio) for u in UNITS}
    named = [u for u in UNITS if any(part in name.casefold() for part in u.of) and far[u] < max(0.35, 3 * error)]
    likely = named or [u for u in UNITS if not u.of and far[u] < 0.1]
    best = sorted(likely, key=lambda u: far[u])[:2]
    if not best:
        return ", in other units?"
    words = " or ".join(f"{u.words} ({u.factor:.5g})" for u in best)
    return f', as {words} would; {site_key(site)} {name} = "x {"/" if more else "*"} {best[0].factor:.5g}"'
