"""Footnote 2, which the paper leaves to later work: an uplink of the largest changes alone."""

from polyfed.report.table import Cell, Table
from polyfed_papers.fedslr import few, gigabytes, last, method, train
from polyfed_papers.fedslr.stated import RUNS, settings, several
from polyfed_papers.recipes.recipe import Bench, Outcome, metric_of, recipe
from polyfed_papers.recipes.said import Setting, ours, points

KEEPS = (1.0, 0.3, 0.1, 0.03)


@recipe("fedslr/sparse", "Footnote 2: a sparse uplink", minutes=(1, several(4)), **RUNS,
        settings=settings(
            Setting("uplink", "of w_i - w the largest entries, with their positions; a share of 1: all", "ours"),
        ))  # fmt: skip
def sparse(bench: Bench) -> Outcome:
    """What do the largest entries alone cost in accuracy, and what do they save?"""
    labels = {v: f"keep-{v:g}" for v in few(bench, KEEPS)}
    runs = train(bench, "runs", {k: method(bench, keep=None if v == 1 else v) for v, k in labels.items()})
    rows = [
        (Cell(f"{v:g}"), ours(last(runs, k), 100), ours(metric_of(runs, k), 100),
         *(ours(gigabytes(runs, k, way), 1e3) for way in ("up", "down")))
        for v, k in labels.items()
    ]  # fmt: skip
    (_, all_of), *others = labels.items()
    claims = [
        points(f"the {model} is better with all entries than with {v:g} of them", value(runs, all_of), value(runs, k))
        for model, value in (("GKR", last), ("mixed model", metric_of))
        for v, k in others
    ]
    table = Table("A sparse uplink", ("share", "GKR, %", "mixed, %", "up, MB", "down, MB"), tuple(rows))
    return Outcome([table], claims=claims)
