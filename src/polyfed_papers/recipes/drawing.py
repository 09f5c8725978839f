"""Figures of recipes in the report's style: curves, alone and in panels, and bars."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from polyfed.report.style import BLUE, VERMILLION, legend_name, looks, styled

Series = Mapping[str, tuple[Sequence[float], Sequence[Sequence[float]]]]  # label -> (x, [seed][point])


class Panel(NamedTuple):
    """One panel: its title, axes and lines."""

    title: str
    x: str
    y: str
    series: Series
    log_x: bool = False


@contextmanager
def panes(width: float, height: float, rows: int = 1, columns: int = 1, **share: Any) -> Generator[tuple[Figure, Any]]:
    """A figure of this size in inches and its axes, [rows, columns]; inside, all is drawn in the report's style."""
    with styled():
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, figure.subplots(rows, columns, squeeze=False, **share)


def draw(ax: Axes, series: Series, look: Mapping[str, Any], alpha: float, log: bool = False) -> dict[str, Any]:
    """A line per label: the mean over seeds (of logarithms if log), in their range."""
    drawn = {}
    for label, (at, values) in series.items():
        v, (colour, marker, line) = np.array(values, dtype=float), look[label]
        if not log:
            v[:, np.isnan(v).all(0)] = -np.inf  # not drawn, and no warning of an empty mean
        middle = np.exp(np.nanmean(np.log(v), axis=0)) if log else np.nanmean(v, axis=0)
        (drawn[label],) = ax.plot(at, middle, color=colour, linestyle=line, label=legend_name(label),
                                  marker=None if len(at) > 25 else marker)  # fmt: skip
        if len(v) > 1:
            ax.fill_between(at, np.nanmin(v, axis=0), np.nanmax(v, axis=0), color=colour, alpha=alpha, linewidth=0)
    return drawn


def curve_figure(
    series: Series, x: str, y: str, *, log: bool = False, width: float = 4.7, height: float = 3.3
) -> Figure:
    """A line per label, the first the most vivid."""
    look = looks(list(series), {label: "own" if label.lower() == "local" else "method" for label in series})
    with panes(width, height) as (figure, axes):
        ax = axes[0, 0]
        draw(ax, series, look, 0.15, log)
        if log:
            ax.set_yscale("log")
            ax.yaxis.set_major_formatter(lambda v, _: f"1e{round(np.log10(v)):d}" if v > 0 else "0")
        ax.set(xlabel=x, ylabel=y)
        if len(series) > 1:
            figure.legend(loc="outside upper left", ncols=min(3, len(series)))
    return figure


def curve_panels(parts: Sequence[Panel], columns: int, height: float = 2.3, names: int = 5) -> Figure:
    """Panels row by row; the last labels are in colour."""
    labels = list(dict.fromkeys(label for part in parts for label in part.series))
    look, handles = looks(labels[::-1], {label: "own" if label == "Local" else "method" for label in labels}), {}
    rows = -(-len(parts) // columns)
    with panes(max(4.7, 2.75 * columns), height * rows + 0.75, rows, columns) as (figure, axes):
        for ax, part in zip(axes.flat, parts, strict=False):
            handles |= draw(ax, part.series, look, 0.12)
            ax.set(title=part.title, xlabel=part.x, ylabel=part.y)
            if part.log_x:
                ticks = sorted({v for at, _ in part.series.values() for v in at})
                ax.set_xscale("log")
                ax.set_xticks(ticks, [f"{v:g}" for v in ticks])
                ax.minorticks_off()
        for ax in axes.flat[len(parts) :]:
            ax.set_visible(False)
        if len(labels) > 1:
            figure.legend(handles=list(handles.values()), loc="outside upper left", ncols=min(names, len(labels)))
    return figure


def bars(parts: Mapping[str, Mapping[str, float]], y: str) -> Figure:
    """A panel per part, a bar per label."""
    with panes(max(4.7, 3.7 * len(parts)), 2.9, 1, len(parts), sharex=True) as (figure, axes):
        for ax, (title, values) in zip(axes[0], parts.items(), strict=True):
            names = list(values)
            ax.barh(names, [values[n] for n in names], color=[VERMILLION if n == "FPFC" else BLUE for n in names])
            ax.invert_yaxis()
            ax.grid(axis="y", visible=False)
            ax.set(title=title, xlabel=y)
    return figure
