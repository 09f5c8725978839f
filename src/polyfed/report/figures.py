"""The figures of a report, from run folders alone: each a matplotlib Figure, or None where the runs lack what it shows.
`save` writes one to a file."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from polyfed.base.arguments import checked
from polyfed.metrics.metric import Metric
from polyfed.report import pairs, words
from polyfed.report.read import Study
from polyfed.report.style import (
    BLUE,
    GREEN,
    INK,
    PAPER,
    QUIET,
    VERMILLION,
    Look,
    canvas,
    categories,
    legend_name,
    looks,
    styled,
)
from polyfed.runs.numbers import Numbers, finite

NAMED = 30  # most clients that are named on an axis
FEW = 8  # most clients drawn without a box: quartiles of so few mean little
BANDS = 4  # most curves that are drawn with a band
BUBBLES = 700  # most bubbles, one per client and class that it holds; more become a heat map
BARS = 400  # most clients with a bar each; more are drawn as one outline
POINTS = 400  # most dots that are drawn one by one; more become one picture inside the SVG

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
    best in colour.
    Over bytes, a method that sends nothing is a level line. The axis starts where the curves differ, so the first
    rounds may lie outside.

    Parameters
    ----------
    study : Study
        From `read`.
    against : str
        "rounds", "bytes" (per client, down and up), "seconds" or "virtual-time" (of an asynchronous schedule).

    Returns
    -------
    Figure or None
        None where no run was evaluated twice, or the runs lack that axis.
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
        _legend(figure, axes, look)
    return figure


def _frame(curves: list[dict[str, np.ndarray]]) -> tuple[float, float] | None:
    """The heights that the curves take after a quarter of their points; None where the start hardly adds to them, and
    for one curve or very short ones."""
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


@checked
def spread_figure(study: Study) -> Figure | None:
    """Draw how unequally a method serves the clients, the best method on top.

    A dot per client (mean over seeds), the median a thick line; above 8 clients a box of the quartiles, with whiskers
    to the ends of the range.

    Parameters
    ----------
    study : Study
        From `read`.

    Returns
    -------
    Figure or None
        None for fewer than two clients with results.
    """
    order, grids = study.verdicts.ranked, study.verdicts.grids
    found = {k: [v for v in grids[k].per_client().values() if np.isfinite(v)] for k in order if k in grids}
    found = {k: np.array(v) for k, v in found.items() if v}
    if not found or max(map(len, found.values())) < 2:
        return None
    scale, look = words.Scale(study.metric), looks(order, study.verdicts.roles)
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


@checked
def gain_figure(study: Study, method: str | None = None) -> Figure | None:
    """Draw what every client gains over its own model (or the common one), the largest gain on top.

    A dot per client with its 95 % interval, filled and in colour where clear jointly over clients. Up to 30 clients are
    named; up to 400 have their intervals drawn.

    Parameters
    ----------
    study : Study
        From `read`.
    method : str or None
        Whose gain; None: that of the best method.

    Returns
    -------
    Figure or None
        None where there is nothing to compare.
    """
    first = study.verdicts.lead
    if first is None:
        return None
    scale, label, reference = words.Scale(study.metric), method or first[0], first[1]
    found = {n: g for n, g in study.verdicts.gains(label, reference).items() if np.isfinite(g.mean)}
    if not found:
        return None
    names = sorted(found, key=lambda n: found[n].mean)
    mean, low, high = (np.array([getattr(found[n], k) for n in names]) * scale.factor for k in ("mean", "low", "high"))
    clear = np.array([found[n].sign or 0 for n in names])
    colour = np.where(clear > 0, GREEN, np.where(clear < 0, VERMILLION, QUIET))
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
            axes.set_xlim(*_limits(mean, low, high))
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


@checked
def client_figure(study: Study) -> Figure | None:
    """The methods side by side for every client: a dot each (mean over seeds), the six best methods in colour.

    Parameters
    ----------
    study : Study
        From `read`.

    Returns
    -------
    Figure or None
        None for one method alone, and for more than 30 clients.
    """
    scale, order, grids = words.Scale(study.metric), study.verdicts.ranked, study.verdicts.grids
    look, found = looks(order, study.verdicts.roles), {k: grids[k].per_client() for k in order if k in grids}
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
            grey = colour == QUIET
            axes.plot(
                v, place, linestyle="none", color=colour, marker=marker, label=legend_name(label),
                markersize=3.5 if grey else 5.5, zorder=1.5 if grey else 2,
            )  # fmt: skip
        axes.set_yticks(place, [_short(n) for n in names])
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlabel(f"{study.split} {scale.header}")
        _legend(figure, axes, look)
    return figure


def _short(name: str, limit: int = 22) -> str:
    return legend_name(name if len(name) <= limit else name[: limit - 1] + "…")


def _legend(figure: Figure, axes: Axes, look: dict[str, Look]) -> None:
    """A key of the methods; those in grey share an entry where they are several."""
    entries = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    grey = [k for label, of in look.items() if of.color == QUIET and (k := legend_name(label)) in entries]
    if len(grey) > 1:
        entries[f"{len(grey)} others"] = entries[grey[0]]
        entries = {k: v for k, v in entries.items() if k not in grey}
    if len(entries) > 1:
        names = [_short(k, 26) for k in entries]
        columns = min(len(names), 4, max(1, 56 // (5 + max(map(len, names)))))
        figure.legend(
            entries.values(), names, loc="outside upper left", ncols=columns, handlelength=2.4, columnspacing=1.2
        )


def slope_figure(rows: Sequence[Mapping[Any, Any]], metric: Metric, split: str) -> Figure:
    """A line per client from its score before to its score after; in colour where the change is clear.

    rows: name, before, after, change and clear of every client
    """
    scale = words.Scale(metric)
    with styled():
        figure, (axes,) = canvas(height=3.4)
        for row in rows:
            colour = QUIET if not row["clear"] else GREEN if row["change"] > 0 else VERMILLION
            ends = [scale.factor * row["before"], scale.factor * row["after"]]
            axes.plot([0, 1], ends, "o-", color=colour, linewidth=2 if row["clear"] else 1.2)
        low, high = axes.get_ylim()
        place = -math.inf
        for row in sorted(rows, key=lambda row: row["after"]) if len(rows) <= NAMED else ():
            place = max(scale.factor * row["after"], place + 0.055 * (high - low))
            axes.text(1.05, place, _short(str(row["client"])), va="center", size=8.5)
        axes.set_xlim(-0.1, 1.5)
        axes.set_xticks([0, 1], ["before", "after"])
        axes.grid(axis="x", visible=False)
        axes.set_ylabel(f"{split} {scale.header}")
    return figure


def representative(study: Study, key: str) -> Numbers | None:
    """The run to show one of: the leading method's first counted run whose report holds `key`, else any that does."""
    first = study.verdicts.lead
    order = sorted(study.labels, key=lambda k: first is None or k != first[0])
    return next(
        (r for label in order for r in study.counted(label) or study.of(label) if getattr(r.findings, key)), None
    )


@checked
def partition_figure(study: Study, seed: int | None = None) -> Figure | None:
    """Draw what each client holds: training samples per class, under all its samples; for regression those alone.

    Parameters
    ----------
    study : Study
        From `read`.
    seed : int or None
        Whose split; None: the first run's.

    Returns
    -------
    Figure or None
        A bubble per client and class whose area is the number of samples, or a heat map for more than 700 of them.
    """
    run = next((r for r in study.runs if seed is None or r.seed == seed), study.first)
    counts, train, test = run.labels, run.samples("train"), run.samples("test")
    x, names = np.arange(run.n), run.about.names
    with styled():
        if counts is None:
            figure, (top,) = canvas(height=2.9)
            last = top
        else:
            tall = min(0.17 * counts.shape[1] + 0.7, 3.2)
            figure, (top, last) = canvas(height=1.2 + tall + 0.4, rows=2, sharex=True, height_ratios=[1.2, tall])
            _classes(figure, last, counts)
        parts = [(train, 0 * train, BLUE, "train"), (test, train, VERMILLION, "test")]
        for height, bottom, color, label in parts[: 1 + test.any()]:
            if run.n <= BARS:
                top.bar(x, height, width=0.85, bottom=bottom, color=color, label=label, linewidth=0)
            else:
                look = {"color": color, "label": label, "linewidth": 0, "rasterized": True}
                top.fill_between(x, bottom, bottom + height, step="mid", **look)
        if test.any():
            figure.legend(*top.get_legend_handles_labels(), loc="outside upper left", ncols=2)
        top.set_ylabel("samples")
        top.yaxis.set_major_locator(MaxNLocator(3, integer=True))
        top.grid(axis="x", visible=False)
        top.set_xlim(-0.7, run.n - 0.3)
        if run.n <= NAMED:
            turned = run.n > 5 or max(map(len, names)) > 8
            last.set_xticks(x, [_short(n, 16) for n in names], rotation=90 if turned else 0)
        else:
            last.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        last.set_xlabel("client" if run.n <= NAMED else f"client, by position ({run.n})")
    return figure


def _classes(figure: Figure, axes, counts: np.ndarray) -> None:
    n, classes = counts.shape
    if np.count_nonzero(counts) <= BUBBLES:
        who, label = np.nonzero(counts)
        biggest = min(4.2 * 72 / n, 14.0) * 1.05  # points: a bubble may just touch its neighbour
        axes.scatter(who, label, s=counts[who, label] / counts.max() * biggest**2, color=BLUE, linewidth=0, alpha=0.85)
        axes.set_ylim(classes - 0.3, -0.7)
    else:
        shown = axes.imshow(counts.T, aspect="auto", cmap="viridis", vmin=0)
        figure.colorbar(shown, ax=axes, label="samples", pad=0.02, aspect=12).outline.set_visible(False)
        axes.grid(visible=False)
    if classes <= 12:
        axes.set_yticks(range(classes))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set_ylabel("class")


def cluster_figure(run: Numbers) -> Figure | None:
    """The clusters that a method found: counted against the true ones, or their sizes where those are unknown."""
    found, true = run.findings.clusters, run.about.clusters
    if not found or len(found) != run.n:
        return None
    columns, assigned = np.unique(np.array(found), return_inverse=True)
    with styled():
        if not true or len(true) != len(found):
            sizes = np.bincount(assigned)
            figure, (axes,) = canvas(height=2.6)
            axes.bar(np.arange(len(sizes)), sizes, color=categories(len(sizes)) if len(sizes) <= 6 else BLUE, width=0.8)
            axes.set_ylabel("clients")
            axes.set_xlabel("cluster found")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(axis="x", visible=False)
            return figure
        rows, actual = np.unique(np.array(true), return_inverse=True)
        table = np.zeros((len(rows), len(columns)), dtype=int)
        np.add.at(table, (actual, assigned), 1)
        order = np.argsort(table.argmax(0), kind="stable")  # found clusters beside the true one they hold most of
        table = table[:, order]
        figure, (axes,) = canvas(height=min(1.3 + 0.36 * len(rows), 4.5))
        axes.imshow(table, cmap=_blues(), aspect="auto", vmin=0)
        if table.size <= 200:
            for (i, j), k in np.ndenumerate(table):
                if k:
                    axes.text(j, i, str(k), ha="center", va="center", color="white" if k > table.max() / 2 else "black")
        axes.set_xticks(*_ticks([str(columns[k]) for k in order]))
        axes.set_yticks(*_ticks([str(r) for r in rows]))
        axes.set_xlabel("cluster found (number: clients)")
        axes.set_ylabel("true cluster")
        axes.grid(visible=False)
    return figure


def mixing_figure(run: Numbers) -> Figure | None:
    """The mixing matrix: how much client i (row) takes from client j (column); rows sum to one. None for equal weights,
    which show nothing."""
    mixing = run.findings.mixing
    if not mixing:
        return None
    m = np.array(mixing, dtype=float)
    if m.ndim != 2 or m.shape[0] != m.shape[1] or not np.isfinite(m).any() or np.nanmax(m) - np.nanmin(m) < 1e-3:
        return None
    true = run.about.clusters
    order = np.argsort(true, kind="stable") if true and len(true) == len(m) else np.arange(len(m))
    names = [run.about.names[i] for i in order] if len(m) == run.n else [str(i) for i in order]
    m = m[np.ix_(order, order)]
    with styled():
        figure, (axes,) = canvas(height=4.2)
        shown = axes.imshow(m, cmap="viridis", vmin=0)
        figure.colorbar(shown, ax=axes, label="weight", pad=0.02, aspect=24).outline.set_visible(False)
        if true and len(true) == len(m):
            for edge in np.flatnonzero(np.diff(np.array(true)[order])) + 0.5:
                axes.axhline(edge, color="white", linewidth=0.8)
                axes.axvline(edge, color="white", linewidth=0.8)
        if len(m) <= NAMED:
            axes.set_xticks(np.arange(len(m)), [_short(n, 12) for n in names], rotation=90)
            axes.set_yticks(np.arange(len(m)), [_short(n, 12) for n in names])
        tail = ", by true cluster" if true else ""
        axes.set_xlabel(f"from client{tail}")
        axes.set_ylabel(f"into the model of client{tail}")
        axes.grid(visible=False)
        axes.tick_params(colors=INK)
    return figure


def _ticks(names: list[str]) -> tuple[list[int], list[str]]:
    step = -(-len(names) // 16)
    return list(range(0, len(names), step)), names[::step]


def _blues() -> ListedColormap:
    """White to blue, readable under black and white digits."""
    t = np.linspace(0, 1, 256)[:, None]
    return ListedColormap(np.array([[0.90, 0.94, 0.97]]) * (1 - t) + np.array([[0.0, 0.36, 0.58]]) * t)
