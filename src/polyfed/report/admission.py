"""Results of `admit`, as a figure and a table."""

import math
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from polyfed.report import words
from polyfed.report.style import BLUE, QUIET, canvas, legend_name, styled
from polyfed.report.table import Cell, Table

if TYPE_CHECKING:
    from polyfed.studies.admit import Admission

MANY = 6  # newcomers with a column of their own
LINES = 12  # exchanges that the table shows


def admission_figure(found: "Admission") -> Figure:
    """The metric against the number of exchanges: the mean, every newcomer as a thin line, and Local."""
    scale, history = words.Scale(found.metric), found.history
    with styled():
        figure, (axes,) = canvas()
        for _, rows in found.table.groupby("client"):
            axes.plot(rows["exchange"], scale.factor * rows[found.metric.name], color=BLUE, linewidth=0.7, alpha=0.35)
        x = history["exchange"]
        axes.plot(x, scale.factor * history[found.metric.name], "o-", color=BLUE, label=legend_name(found.label))
        axes.plot(x, scale.factor * history["alone"], "x--", color=QUIET, label="alone")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("exchanges")
        axes.set_ylabel(f"{found.split} {scale.header} of newcomers")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=2)
    return figure


def admission_table(found: "Admission") -> Table:
    """The metric after each exchange: of every newcomer (up to 6), their mean, and what they reach alone."""
    scale, history = words.Scale(found.metric), found.history.to_dict("records")
    each = found.names if 1 < len(found.names) <= MANY else ()
    own = {(r["exchange"], r["client"]): r for r in found.table.to_dict("records")}
    last = len(history) - 1
    step = -(-last // LINES) or 1
    rows = []
    for k in [*range(0, last, step), last]:
        row = history[k]
        texts = [
            str(k), *(scale.number(own[k, name][found.metric.name]) for name in each),
            scale.number(row[found.metric.name]), scale.number(row["alone"]),
            words.size(row["down_bytes"]), words.size(row["up_bytes"]),
        ]  # fmt: skip
        rows.append(tuple(Cell(text) for text in texts))
    merit, name = found.metric.merit, found.metric.name
    known = [n for n in found.names if math.isfinite(own[last, n][name] + own[last, n]["alone"])]
    better = sum(merit(own[last, n][name]) > merit(own[last, n]["alone"]) for n in known)
    notes = [
        "alone: the same number of rounds of local training, without the others",
        f"better off than alone after {words.count(last, 'exchange')}: {better} of {len(known)}",
    ]
    if lacking := [n for n in found.names if n not in known]:
        notes.append(f"no {scale.name}: {words.listed(lacking)} ({found.metric.lacks})")
    if found.clusters is not None:
        places = [f"{n}: {'none' if c < 0 else c}" for n, c in zip(found.names, found.clusters, strict=True)]
        notes.append(f"cluster of the run: {', '.join(places[:20])}{', ...' if len(places) > 20 else ''}")
    columns = ("exchange", *each, found.label if len(each) < 2 else "mean", "alone", "down", "up")
    return Table(f"Newcomers to {found.label}, {found.split} {scale.header}", columns, tuple(rows), tuple(notes))
