"""The figures of a report, from run folders alone. Each function returns a matplotlib Figure, or None where the runs
do not hold what it would show; `to_svg` and `save` bring it out."""

import math
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from polyfed.report import pairs, words
from polyfed.report.clients import lead
from polyfed.report.read import RunFiles, Study, finite
from polyfed.report.style import GREEN, INK, PAPER, QUIET, VERMILLION, canvas, legend_name, looks, styled

NAMED = 30  # up to so many clients are named on an axis
FEW = 8  # up to so many clients, quartiles mean little: dots and a median are drawn alone
POINTS = 400  # more dots than this are drawn as one picture inside the SVG

Against = Literal["rounds", "bytes", "seconds", "virtual-time"]
AXES: dict[str, tuple[str, str]] = {
    "rounds": ("round", "communication round"),
    "bytes": ("bytes", "bytes per client, down and up"),
    "seconds": ("seconds", "time, s"),
    "virtual-time": ("virtual_time", "virtual time of the schedule"),
}


def metric_figure(study: Study, against: Against = "rounds") -> Figure | None:
    """The metric (mean over clients) against rounds, bytes per client, seconds or virtual time.

    One line per method: the mean over seeds, with a band of ± one sample standard deviation. Against bytes, a method
    that sends nothing is a horizontal line at its final value.
    """
    scale, column = words.Scale(study.metric), AXES[against][0]
    curves = {label: c for label in study.labels if (c := _curve(study, label, column)) is not None}
    if not curves or not any(np.ptp(c["x"]) > 0 for c in curves.values()):
        return None
    look = looks(study.labels, pairs.roles(study))
    with styled():
        figure, (axes,) = canvas()
        for label, curve in curves.items():
            x, y, s = curve["x"], curve["mean"], curve["std"]
            colour, marker, line, name = *look[label], legend_name(label)
            if np.ptp(x) == 0:
                axes.axhline(y[-1], color=colour, linestyle=line, label=name)
                continue
            every = max(1, len(x) // 8)
            axes.plot(x, y, color=colour, marker=marker, linestyle=line, label=name, markevery=every)
            if np.isfinite(s).any():
                axes.fill_between(x, y - s, y + s, color=colour, alpha=0.18, linewidth=0)
        axes.set_xlabel(AXES[against][1])
        axes.set_ylabel(f"{study.split} {scale.header}")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=against == "rounds"))
        if against == "bytes":
            axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: words.size(v)))
        axes.margins(x=0.02)
        _legend(figure, axes, len(curves))
    return figure


def _curve(study: Study, label: str, column: str) -> dict[str, np.ndarray] | None:
    """x, mean and std over seeds at the rounds that every seed of one method has evaluated."""
    runs = study.counted(label) or study.of(label)
    needed = {study.metric.name, "down_bytes", "up_bytes"} if column == "bytes" else {study.metric.name, column}
    points: dict[int, list[tuple[float, float]]] = {}
    for r in runs:
        if not needed <= set(r.metrics.columns):
            continue
        for row in r.records(r.split):
            x = (
                (finite(row["down_bytes"]) + finite(row["up_bytes"])) / r.n
                if column == "bytes"
                else finite(row[column])
            )
            y = finite(row[study.metric.name]) * words.Scale(study.metric).factor
            if math.isfinite(x + y):
                points.setdefault(int(row["round"]), []).append((x, y))
    whole = [np.array(points[t]) for t in sorted(points) if len(points[t]) == len(runs)]
    if len(whole) < 2:
        return None
    x, y = (np.array([p[:, k].mean() for p in whole]) for k in (0, 1))
    return {"x": x, "mean": y, "std": np.array([pairs.sample_std(p[:, 1]) for p in whole])}


def spread_figure(study: Study) -> Figure | None:
    """How unequally a method serves the clients: every client's metric (mean over seeds) as a dot, the median a thick
    line, and above 8 clients a box of the quartiles with whiskers to the ends of the range."""
    found = {k: [v for v in g.per_client().values() if np.isfinite(v)] for k, g in pairs.grids(study).items()}
    found = {k: np.array(v) for k, v in found.items() if v}
    if not found or max(map(len, found.values())) < 2:
        return None
    scale, look = words.Scale(study.metric), looks(study.labels, pairs.roles(study))
    with styled():
        figure, (axes,) = canvas(height=1.1 + 0.42 * len(found))
        for i, (label, values) in enumerate(found.items()):
            v, colour = values * scale.factor, look[label].color
            offset = (np.arange(len(v)) * 0.618034 % 1 - 0.5) * 0.44  # spread evenly, and the same every time
            if len(v) <= FEW:
                offset *= 0
                axes.plot([np.median(v)] * 2, [i - 0.3, i + 0.3], color=INK, linewidth=2)
                axes.plot([v.min(), v.max()], [i, i], color=QUIET, linewidth=0.9, zorder=1)
            else:
                line = {"color": INK, "linewidth": 0.9}
                axes.boxplot(
                    v, positions=[i], widths=0.5, orientation="horizontal", whis=(0, 100), manage_ticks=False, zorder=3,
                    medianprops={"color": INK, "linewidth": 2}, boxprops=line, whiskerprops=line, capprops=line,
                    showfliers=False,
                )  # fmt: skip
            size = 34 if len(v) <= FEW else 14 if len(v) <= 60 else 6
            edge = {"edgecolors": PAPER, "linewidth": 0.8 if len(v) <= FEW else 0}
            many = len(v) > POINTS
            axes.scatter(v, i + offset, s=size, color=colour, alpha=0.85, zorder=2.5, rasterized=many, **edge)
        axes.set_yticks(range(len(found)), [legend_name(k) for k in found])
        axes.set_ylim(len(found) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(f"{study.split} {scale.header} (one dot per client)")
    return figure


def gain_figure(study: Study, method: str | None = None) -> Figure | None:
    """What every client gains over its own model (or the common one): a dot per client with its 95 % interval, sorted.

    method: None for the method in the lead. Filled dots: clear jointly over clients. Up to 30 clients are named, up to
    400 have their intervals drawn.
    """
    first = lead(study)
    if first is None:
        return None
    scale, label, reference = words.Scale(study.metric), method or first[0], first[1]
    found = {n: g for n, g in pairs.gains(study, label, reference).items() if np.isfinite(g.mean)}
    if not found:
        return None
    names = sorted(found, key=lambda n: found[n].mean)
    mean, low, high = (np.array([getattr(found[n], k) for n in names]) * scale.factor for k in ("mean", "low", "high"))
    clear = np.array([found[n].sign or 0 for n in names])
    colour = np.where(mean > 0, GREEN, VERMILLION)
    place = np.arange(len(names))
    named = len(names) <= NAMED
    with styled():
        figure, (axes,) = canvas(height=1.2 + 0.2 * len(names) if named else 3.6)
        if many := len(names) > POINTS:  # their intervals would be one solid block
            low = high = mean
        spans = np.isfinite(low) & (low < high)
        line = {"linewidth": 1.2, "zorder": 2} if named else {"linewidth": 0.9, "alpha": 0.55, "zorder": 2}
        draw = axes.hlines if named else axes.vlines
        draw(place[spans], low[spans], high[spans], colors=list(colour[spans]), **line)
        face = np.where(clear != 0, colour, PAPER)
        x, y = (mean, place) if named else (place, mean)
        look = {"s": 26 if named else 9, "linewidth": 1.1, "zorder": 3, "rasterized": many}
        axes.scatter(x, y, c=list(face), edgecolors=list(colour), **look)
        text = f"gain of {label} over {reference}, {'points' if scale.percent else scale.name}"
        if named:
            axes.axvline(0, color=INK, linewidth=1)
            axes.set_yticks(place, [_short(n) for n in names])
            axes.set_ylim(-0.7, len(names) - 0.3)
            axes.set_xlabel(text)
        else:
            axes.axhline(0, color=INK, linewidth=1)
            axes.set_xlabel(f"client, in order of gain ({len(names)})")
            axes.set_ylabel(text)
            axes.set_ylim(*_limits(mean, low, high))
    return figure


def _limits(mean: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[float, float]:
    """A range that a few very wide intervals (two seeds) cannot stretch beyond three times the range of the means."""
    reach = 3 * max(float(np.abs(mean).max()), 1e-12)
    bottom = max(float(np.nanmin(np.append(low, mean.min()))), -reach)
    top = min(float(np.nanmax(np.append(high, mean.max()))), reach)
    pad = 0.05 * (top - bottom or 1.0)
    return min(bottom, 0) - pad, max(top, 0) + pad


def client_figure(study: Study) -> Figure | None:
    """The methods side by side for every client, each a dot (mean over seeds), joined by a line; up to 30 clients."""
    scale, look = words.Scale(study.metric), looks(study.labels, pairs.roles(study))
    found = {k: g.per_client() for k, g in pairs.grids(study).items()}
    names = [n for n in study.names if any(math.isfinite(v[n]) for v in found.values())]
    if len(found) < 2 or not 0 < len(names) <= NAMED:
        return None
    values = {k: np.array([v[n] for n in names]) * scale.factor for k, v in found.items()}
    low, high = (end(np.array(list(values.values())), axis=0) for end in (np.nanmin, np.nanmax))
    place = np.arange(len(names))
    with styled():
        figure, (axes,) = canvas(height=1.4 + 0.24 * len(names))
        axes.hlines(place, low, high, color=QUIET, linewidth=1, alpha=0.5, zorder=1)
        for label, v in values.items():
            colour, marker, _ = look[label]
            axes.plot(
                v, place, linestyle="none", color=colour, marker=marker, markersize=5.5,
                label=legend_name(label),
            )  # fmt: skip
        axes.set_yticks(place, [_short(n) for n in names])
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlabel(f"{study.split} {scale.header}")
        _legend(figure, axes, len(values))
    return figure


def _short(name: str, limit: int = 22) -> str:
    return legend_name(name if len(name) <= limit else name[: limit - 1] + "…")


def _legend(figure: Figure, axes: Axes, entries: int) -> None:
    if entries > 1:
        handles, labels = axes.get_legend_handles_labels()
        columns = max(1, min(entries, 4, 54 // (4 + max(map(len, labels)))))
        figure.legend(handles, labels, loc="outside upper left", ncols=columns, handlelength=2.4, columnspacing=1.2)


def representative(study: Study, key: str) -> RunFiles | None:
    """The run to show one of: the leading method's first counted run whose report holds `key`, else any that does."""
    first = lead(study)
    order = sorted(study.labels, key=lambda k: first is None or k != first[0])
    return next((r for label in order for r in study.counted(label) or study.of(label) if r.findings.get(key)), None)
