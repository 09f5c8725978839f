"""What is known of a combination of one client's scores in several runs of the same splits: what a leaving costs, a
gain in a coalition, a Shapley value. As `pairs` for two methods, but the runs need not have the same clients.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from polyfed.metrics.metric import Metric
from polyfed.report import intervals
from polyfed.report.pairs import Added, Evidence, Interval, floor, sampled
from polyfed.report.read import finite
from polyfed.runs import schema as files


@dataclass(frozen=True, eq=False)
class Tested:
    """The results of one run folder, by client.

    values: {split: {client: the metric that leads}}     added: {client: its test samples, what each adds to the metric,
    NaN where that is not known}
    samples: {client: (share of its samples that is tested, how many it has)}     moved: {client: bytes down and up}
    """

    metric: Metric
    values: Mapping[str, Mapping[str, float]]
    added: Mapping[str, Added]
    samples: Mapping[str, tuple[float, int]]
    moved: Mapping[str, int]


def tested(folder: Path) -> Tested:
    """Read a finished run folder. Raises RunError for one that is not."""
    clients, metric = files.federation(folder).clients, files.summary(folder).leads
    names = [c.name for c in clients]
    table = files.clients(folder, names)
    columns = {s: table.get(f"{s}_{metric.name}") for s in ("train", "validation", "test")}
    values = {s: dict(zip(names, map(finite, c.tolist()), strict=True)) for s, c in columns.items() if c is not None}
    held, added = files.scores(folder), {}
    if held is not None and len(held["counts"]) == len(names):
        at, ids, each = np.r_[0, np.cumsum(held["counts"])], files.samples(held), files.added(held, metric)
        added = {n: (ids[a:b], each[a:b]) for n, a, b in zip(names, at, at[1:], strict=False) if b > a}
    samples = {c.name: (min(c.test / max(c.total, 1), 0.9), c.total) for c in clients}
    moved = dict(zip(names, (table["down_bytes"] + table["up_bytes"]).tolist(), strict=True))
    return Tested(metric, values, added, samples, moved)


def evidence(
    metric: Metric, means: Sequence[float], parts: Sequence[Added] | None, samples: tuple[float, int], level: float
) -> Evidence:
    """What is known of a combination of scores of one client, positive when better.

    means: [S] its value in every split, NaN where there is none     parts: what each test sample adds in those splits
    that have a value, NaN where that is not known, or None where the samples are not
    level: typical size of the metric, where it has no bounds
    """
    known, span = np.array([m for m in means if math.isfinite(m)]), metric.span
    whole = parts if parts is not None and len(parts) == len(known) else ()
    spread, fixed = sampled(metric, known, whole, floor(metric, *samples))
    return Evidence(spread, None if fixed else samples[0], samples[1], span if math.isfinite(span) else level, span)


def together(found: Sequence[Evidence]) -> Evidence:
    """What is known of the mean over clients, all of whom have a value in the same splits."""
    whole = intervals.mean_spread([e.spread for e in found])
    drawn = [e.share for e in found if e.share is not None]
    share = float(np.mean(drawn)) if drawn else None
    return Evidence(whole, share, sum(e.samples for e in found), found[0].unit, found[0].range)


def jointly(found: Sequence[Interval]) -> list[Interval]:
    """Intervals with `clear` decided for all of them together (Holm)."""
    clear = intervals.holm(np.array([g.p for g in found]))
    return [replace(g, clear=bool(c)) for g, c in zip(found, clear, strict=True)]
