"""FPFC's figures: panels of curves, and bars."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from polyfed.report.style import legend_name, looks, styled

Series = Mapping[str, tuple[Sequence[float], Sequence[Sequence[float]]]]  # label -> (x, [seed][point])


class Panel(NamedTuple):
    """One panel: its title, axes and lines."""

    title: str
    x: str
    y: str
    series: Series
    log_x: bool = False


def curve_panels(parts: Sequence[Panel], columns: int, height: float = 2.3, names: int = 5) -> Figure:
    """Panels row by row, a line per label (mean over seeds, range as a band); the last labels are in colour."""
    labels = list(dict.fromkeys(label for part in parts for label in part.series))
    look = looks(labels[::-1], {label: "own" if label == "Local" else "method" for label in labels})
    with styled():
        rows = -(-len(parts) // columns)
        size = (max(4.7, 2.75 * columns), height * rows + 0.75)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False)
        handles = {}
        for ax, part in zip(axes.flat, parts, strict=False):
            for label, (at, values) in part.series.items():
                v, (colour, marker, line) = np.array(values, dtype=float), look[label]
                v[:, np.isnan(v).all(0)] = -np.inf  # not drawn, and no warning of an empty mean
                (handles[label],) = ax.plot(
                    at, np.nanmean(v, 0), color=colour, linestyle=line, label=legend_name(label),
                    marker=None if len(at) > 25 else marker,
                )  # fmt: skip
                if len(v) > 1:
                    ax.fill_between(at, np.nanmin(v, 0), np.nanmax(v, 0), color=colour, alpha=0.12, linewidth=0)
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
    from polyfed.report.style import BLUE, VERMILLION

    with styled():
        figure = Figure(figsize=(max(4.7, 3.7 * len(parts)), 2.9), layout="constrained")
        axes = figure.subplots(1, len(parts), squeeze=False, sharex=True)[0]
        for ax, (title, values) in zip(axes, parts.items(), strict=True):
            names = list(values)
            ax.barh(names, [values[n] for n in names], color=[VERMILLION if n == "FPFC" else BLUE for n in names])
            ax.invert_yaxis()
            ax.grid(axis="y", visible=False)
            ax.set(title=title, xlabel=y)
    return figure
