"""Learning curves: the metric over rounds, bytes or time."""

import math
from typing import Literal

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from polyfed.base.arguments import checked
from polyfed.report import pairs, words
from polyfed.report.style import QUIET, canvas, hover, legend, legend_name, looks, styled
from polyfed.report.verdicts import Study
from polyfed.runs.numbers import finite

BANDS = 4  # most curves that are drawn with a band

Against = Literal["rounds", "bytes", "seconds", "virtual-time"]
AXES: dict[str, tuple[str, str]] = {
    "rounds": ("round", "communication round"),
    "bytes": ("bytes", "bytes per client, down and up"),
    "seconds": ("seconds", "time, s"),
    "virtual-time": ("virtual_time", "virtual time of the schedule"),
}


@checked
def metric_figure(study: Study, against: Against = "rounds") -> Figure | None:
    """The learning curves: the metric (mean over clients) over rounds, bytes or time.

    One line per method: the mean over seeds, for up to 4 methods in a band of ± one sample standard deviation; the six
    best in colour. A method that sends nothing is level over bytes. The axis starts where the curves differ.

    Parameters
    ----------
    study : Study
        From `read`.
    against : str
        "rounds", "bytes" (per client, down and up), "seconds" or "virtual-time" (of an asynchronous schedule).

    Returns
    -------
    Figure or None
        None if no run was evaluated twice, or the runs lack that axis.
    """
    scale, column, order = words.Scale(study.metric), AXES[against][0], study.verdicts.ranked
    curves = {label: c for label in order if (c := _curve(study, label, column)) is not None}
    if not curves or not any(np.ptp(c["x"]) > 0 for c in curves.values()):
        return None
    look, most = looks(order, study.verdicts.roles), scale.factor * study.metric.span
    with styled():
        figure, (axes,) = canvas()
        for label, curve in curves.items():
            x, y, s = curve["x"], curve["mean"], curve["std"]
            colour, marker, line = look[label]
            grey = colour == QUIET
            if np.ptp(x) == 0:
                axes.axhline(y[-1], color=colour, linestyle=line, label=legend_name(label))
                continue
            axes.plot(
                x, y, color=colour, linestyle=line, label=legend_name(label), markevery=max(1, len(x) // 8),
                marker="" if grey else marker, linewidth=0.9 if grey else 1.6, zorder=1.5 if grey else 2,
            )  # fmt: skip
            at = range(0, len(x), max(1, len(x) // 8))
            unit = words.size if against == "bytes" else "{:g}".format
            hover(axes, x[at], y[at], [f"{label}, {AXES[against][0]} {unit(x[k])}: {y[k]:.4g}{scale.unit}" for k in at])
            if np.isfinite(s).any() and len(curves) <= BANDS:
                low, high = (np.clip(y + k * s, 0, most) if math.isfinite(most) else y + k * s for k in (-1, 1))
                axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.set_xlabel(AXES[against][1])
        axes.set_ylabel(f"{study.split} {scale.header}")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=against == "rounds"))
        if against == "bytes":
            axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: words.size(v)))
        axes.margins(x=0.02)
        if frame := _frame(list(curves.values())):
            axes.set_ylim(frame)
        legend(figure, axes, look)
    return figure


def _frame(curves: list[dict[str, np.ndarray]]) -> tuple[float, float] | None:
    """The range of the curves after a quarter of their points; None where the start hardly adds to it."""
    if len(curves) < 2 or max(len(c["x"]) for c in curves) < 4:
        return None
    spans = [np.concatenate([c["mean"] + k * np.nan_to_num(c["std"]) for k in (-1, 1)]).reshape(2, -1) for c in curves]
    whole = [v for span in spans for v in (span.min(), span.max())]
    late = [
        v for span in spans for v in (span[:, -(-span.shape[1] // 4) :].min(), span[:, -(-span.shape[1] // 4) :].max())
    ]
    low, high = min(late), max(late)
    if not low < high or max(whole) - min(whole) < 1.3 * (high - low):
        return None
    pad = 0.05 * (high - low)
    return low - pad, high + pad


def _curve(study: Study, label: str, column: str) -> dict[str, np.ndarray] | None:
    """x, mean and std over seeds at the rounds that every seed of one method has evaluated."""
    runs = study.counted(label) or study.of(label)
    needed = {study.metric.name, "down_bytes", "up_bytes"} if column == "bytes" else {study.metric.name, column}
    points: dict[int, list[tuple[float, float]]] = {}
    for r in runs:
        rows = [row.table() for row in r.records if row.split == r.split]
        if not needed <= {key for row in rows for key in row}:
            continue
        for row in rows:
            costs = ("down_bytes", "up_bytes") if column == "bytes" else (column,)
            x = sum(finite(row.get(key)) for key in costs) / (r.n if column == "bytes" else 1)
            y = finite(row.get(study.metric.name)) * words.Scale(study.metric).factor
            if math.isfinite(x + y):
                points.setdefault(row["round"], []).append((x, y))
    whole = [np.array(points[t]) for t in sorted(points) if len(points[t]) == len(runs)]
    if len(whole) < 2:
        return None
    x, y = (np.array([p[:, k].mean() for p in whole]) for k in (0, 1))
    return {"x": x, "mean": y, "std": np.array([pairs.sample_std(p[:, 1]) for p in whole])}
