"""Remarks on the yardsticks: which methods do not beat what costs nothing, and what is an oracle."""

import math

from polyfed.report import words
from polyfed.report.pairs import mean_of, sample_std
from polyfed.report.read import ALONE, Study


def oracles(study: Study) -> list[str]:
    """Note under every table with an oracle in it."""
    found = [label for label in study.labels if study.role(label) == "oracle"]
    if not found:
        return []
    return [f"{words.listed(found)}: trained on everybody's data in one place; not available in practice."]


def compared(study: Study) -> list[str]:
    """Sentences for the answer: which personalised methods do not beat FedAvg recalibrated at every client, which do
    not beat what a client reaches without the others, and what everybody's data in one place would give.

    All these comparisons hold jointly, for the mean over clients.
    """
    return [*_free(study), *_everybody(study)]


def _free(study: Study) -> list[str]:
    mean, role = study.verdicts.mean, study.verdicts.roles
    if mean.reference is None or role[mean.reference] not in ALONE:
        return []
    special = [k for k in mean.gains if role[k] == "personalised"]
    simple = [k for k in special if study.of(k)[0].summary.algorithm == "recalibrated"]
    yards = {k: [m for m in special if m not in simple] for k in simple}
    yards |= {k: special or list(mean.gains) for k in role if role[k] == "yardstick" and k != mean.reference}
    many = sum(map(len, yards.values()))
    parts = [_beaten(study, yard, methods, many) for yard, methods in yards.items() if methods]
    text = "; ".join(p for p in parts if p)
    return [f"Against what costs no message of its own: {text}."] if text else []


def _beaten(study: Study, yard: str, methods: list[str], many: int) -> str:
    """One clause: the methods that do not beat a yardstick, with the interval of the best of them, or that all do."""
    scale = words.Scale(study.metric)
    found = {m: study.verdicts.mean_gain(m, yard, many) for m in methods}
    known = {m: g for m, g in found.items() if g.sign is not None and math.isfinite(g.mean)}
    below = {m: g for m, g in known.items() if g.sign != 1}
    if not known:
        return ""
    if not below:
        verb = "beats" if len(known) == 1 else "beat"
        return f"{words.listed(list(known))} {verb} {yard}"
    best = max(below, key=lambda m: below[m].mean)
    g, name = below[best], f"{best}: " if len(below) > 1 else ""
    verb = f"{'does' if len(below) == 1 else 'do'} not{' clearly' if g.mean > 0 else ''} beat"
    gap = f"{scale.signed(g.mean)}{scale.difference_unit}, 95 % interval {scale.range(g.low, g.high)}"
    return f"{words.listed(list(below))} {verb} {yard} ({name}{gap})"


def _everybody(study: Study) -> list[str]:
    scale, found = words.Scale(study.metric), []
    for label, grid in study.verdicts.grids.items():
        if study.role(label) == "oracle":
            each = list(grid.per_seed().values())
            level = f"{scale.spread(mean_of(each), sample_std(each))}{scale.unit}"
            found.append(
                f"With everybody's data in one place, which is not available in practice, one model ({label}) reaches "
                f"{level}."
            )
    return found
