"""One table for a paper: a row per method, a group of columns per data set."""

import math
from collections.abc import Sequence

import numpy as np

from polyfed.base.arguments import checked
from polyfed.base.errors import RunError
from polyfed.metrics.metric import Metric
from polyfed.report import words
from polyfed.report.pairs import mean_of, sample_std
from polyfed.report.table import Cell, Table
from polyfed.report.tables import tally, worst
from polyfed.report.verdicts import ALONE, Study


@checked
def paper_table(studies: Sequence[Study]) -> Table:
    """Several data sets in one table.

    Parameters
    ----------
    studies : sequence of Study
        One per data set (or partition of it), from `read`. A method has the same name in all of them.

    Returns
    -------
    Table
        A row per method, by mean rank over the data sets that have it. Per data set: the metric (mean over clients, ±
        sample standard deviation over seeds), the worst client, and the numbers of clients that clearly gain and lose.
    """
    names = _titles(studies)
    merit = [s.verdicts.means for s in studies]
    order = [sorted(of, key=lambda k, of=of: -of[k]) for of in merit]
    rank = {k: np.mean([o.index(k) / len(o) for o in order if k in o]) for o in order for k in o}
    if not rank:
        raise RunError("no run has finished, so there is nothing to put into a table")
    rows = [
        (
            Cell(k, {"method": k}),
            *(c for s, o, n in zip(studies, order, names, strict=True) for c in _cells(s, k, o, n)),
        )
        for k in sorted(rank, key=lambda k: rank[k])
    ]
    columns = ["method<"] + [c for s in studies for c in (words.Scale(s.metric).mean, "worst client", *_gains(s))]
    groups = [("", 1), *((n, 2 + len(_gains(s))) for s, n in zip(studies, names, strict=True))]
    return Table("Methods by data set", tuple(columns), tuple(rows), tuple(_notes(studies, names)), tuple(groups))


def _titles(studies: Sequence[Study]) -> list[str]:
    """Titles that tell the studies apart: the data set, and the partition or the metric where it takes them."""
    about = [(s.first.about.dataset or "own data", s.first.about.partition or "", s.metric.name) for s in studies]
    for used in (1, 2, 3):
        titles = [", ".join(filter(None, a[:used])) for a in about]
        if titles and len({*titles}) == len(titles):
            return titles
    raise RunError("a paper table takes runs on different data sets, partitions or metrics, and at least one of them")


def _gains(study: Study) -> list[str]:
    first = study.verdicts.lead
    return ["gain / lose"] if first is not None and study.role(first[1]) in ALONE else []


def _cells(study: Study, label: str, order: list[str], name: str) -> list[Cell]:
    scale, metric, grids = words.Scale(study.metric), study.metric, study.verdicts.grids
    keys = [f"{name}: {k}" for k in (f"{metric}_mean", f"{metric}_std", "worst_mean", "worst_std", "gain", "lose")]
    if label not in order:
        empty = [Cell("–", dict.fromkeys(keys[:2])), Cell("–", dict.fromkeys(keys[2:4]))]
        return [*empty, *[Cell("–", dict.fromkeys(keys[4:]))] * len(_gains(study))]
    mean = list(grids[label].per_seed().values())
    least = [_worst(row, metric) for row in grids[label].bearing]
    cells = []
    for values, two, best in ((mean, keys[:2], label == order[0] and len(order) > 1), (least, keys[2:4], False)):
        pair = (mean_of(values), sample_std(values))
        cells.append(Cell(scale.spread(*pair), dict(zip(two, pair, strict=True)), "best" if best else ""))
    first = study.verdicts.lead
    if first is not None and _gains(study):
        own = label == first[1]
        counts = None if own else tally(study.verdicts.gains(label, first[1]).values())
        text = "–" if counts is None else f"{counts[0]} / {counts[1]}"
        cells.append(Cell(text, dict(zip(keys[4:], counts or (None, None), strict=False))))
    return cells


def _worst(values: np.ndarray, metric: Metric) -> float:
    finite = values[np.isfinite(values)]
    return float(worst(finite, metric)) if len(finite) else math.nan


def _notes(studies: Sequence[Study], names: Sequence[str]) -> list[str]:
    notes = ["Mean over clients, ± sample standard deviation over seeds. Methods by mean rank."]
    for study, name in zip(studies, names, strict=True):
        first = study.verdicts.lead
        against = f", gains over {first[1]}" if first is not None and _gains(study) else ""
        seeds, clients = (words.count(len(x), k) for x, k in ((study.seeds, "seed"), (study.names, "client")))
        notes.append(f"{name}: {clients}, {seeds}, {study.split} samples{against}.")
    return notes
