"""Clients and methods side by side, each a matplotlib Figure, or None where the runs lack what it shows."""

import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from polyfed.base.arguments import checked
from polyfed.report import words
from polyfed.report.forest import limits, said
from polyfed.report.style import (
    GREEN,
    INK,
    NAMED,
    PAPER,
    QUIET,
    VERMILLION,
    canvas,
    hover,
    legend,
    legend_name,
    looks,
    short,
    styled,
)
from polyfed.report.verdicts import Study

FEW = 8  # most clients drawn without a box: quartiles of so few mean little
POINTS = 400  # most dots that are drawn one by one; more become one picture inside the SVG


@checked
def spread_figure(study: Study) -> Figure | None:
    """The scores of each method's clients, the best method on top.

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
    scores = {k: {n: v for n, v in grids[k].per_client().items() if np.isfinite(v)} for k in order if k in grids}
    drawn = {k: np.array([*v.values()]) for k, v in scores.items() if v}
    if not drawn or max(map(len, drawn.values())) < 2:
        return None
    scale, look = words.Scale(study.metric), looks(order, study.verdicts.roles)
    with styled():
        figure, (axes,) = canvas(height=1.1 + 0.42 * len(drawn))
        for i, (label, values) in enumerate(drawn.items()):
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
            if not many:
                texts = [f"{n}, {label}: {scale.number(x)}{scale.unit}" for n, x in scores[label].items()]
                hover(axes, [*v], [*(i + offset)], texts)
        axes.set_yticks(range(len(drawn)), [legend_name(k) for k in drawn])
        axes.set_ylim(len(drawn) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(f"{study.split} {scale.header} (one dot per client)")
    return figure


@checked
def gain_figure(study: Study, method: str | None = None) -> Figure | None:
    """The gain of every client over its own model (or the common one), the largest on top.

    A forest plot: a dot per client with its 95 % interval, filled and in colour where clear jointly over clients, and
    below them a diamond for the mean over clients, whose interval is whole. An arrow: the interval goes on beyond the
    axis. Up to 30 clients are named, each with its verdict; up to 400 have their intervals drawn.

    Parameters
    ----------
    study : Study
        From `read`.
    method : str or None
        The method; None: the best one.

    Returns
    -------
    Figure or None
        None without a comparison.
    """
    first = study.verdicts.lead
    if first is None:
        return None
    scale, label, reference = words.Scale(study.metric), method or first[0], first[1]
    gains = {n: g for n, g in study.verdicts.gains(label, reference).items() if np.isfinite(g.mean)}
    if not gains:
        return None
    names = sorted(gains, key=lambda n: gains[n].mean)
    overall = study.verdicts.mean_gain(label, reference, max(len(study.verdicts.mean.gains), 1))
    mean, low, high = (np.array([getattr(gains[n], k) for n in names]) * scale.factor for k in ("mean", "low", "high"))
    clear = np.array([gains[n].sign or 0 for n in names])
    colour = np.where(clear > 0, GREEN, np.where(clear < 0, VERMILLION, QUIET))
    place = np.arange(len(names))
    named = len(names) <= NAMED
    left, right = (scale.factor * end for end in limits([*gains.values()], [overall] * (len(names) > 1)))
    with styled():
        figure, (axes,) = canvas(height=1.5 + 0.2 * len(names) if named else 3.6)
        if many := len(names) > POINTS:  # their intervals would be one solid block
            low = high = mean
        spans = np.isfinite(low) & (low < high)
        line: dict[str, Any] = {"linewidth": 1.2} if named else {"linewidth": 0.9, "alpha": 0.55}
        draw = axes.hlines if named else axes.vlines
        draw(place[spans], low[spans], high[spans], colors=list(colour[spans]), zorder=2, **line)
        face = np.where(clear != 0, colour, PAPER)
        x, y = (mean, place) if named else (place, mean)
        look = {"s": 26 if named else 9, "linewidth": 1.1, "zorder": 3, "rasterized": many}
        axes.scatter(x, y, c=list(face), edgecolors=list(colour), **look)
        if not many:
            hover(axes, [*x], [*y], [f"{n}: {said(gains[n], scale)}" for n in names])
        text = f"gain of {label} over {reference}, {'points' if scale.percent else scale.name}"
        if named:
            axes.axvline(0, color=INK, linewidth=1)
            rows = [-1.4] * (len(names) > 1)  # of the mean, a diamond
            tint = {1: GREEN, -1: VERMILLION}.get(overall.sign or 0, INK)
            ends = [[scale.factor * x] * len(rows) for x in (overall.low, overall.high, overall.mean)]
            axes.hlines(rows, ends[0], ends[1], color=tint, linewidth=1.8, zorder=2)
            axes.scatter(ends[2], rows, marker="D", s=34, color=tint, zorder=3)
            hover(axes, ends[2], rows, [f"mean over {study.whom}: {said(overall, scale)}"] * len(rows))
            cut = ((left, "<", spans & (low < left)), (right, ">", spans & (high > right)))
            for end, arrow, beyond in cut:
                axes.plot(np.full(beyond.sum(), end), place[beyond], arrow, color=QUIET, markersize=5, clip_on=False)
            if any(beyond.any() for *_, beyond in cut):
                text += "\nan arrow: the interval goes on"
            axes.set_yticks(np.r_[rows, place], [*([f"mean over {study.whom}"] * len(rows)), *map(short, names)])
            axes.set_ylim(min(rows, default=0) - 0.7, len(names) - 0.3)
            verdicts = axes.secondary_yaxis("right")  # beside each interval
            verdicts.set_yticks(np.r_[rows, place], [overall.word] * len(rows) + [gains[n].word for n in names])
            verdicts.tick_params(length=0, labelcolor=QUIET)
            verdicts.spines["right"].set_visible(False)
            axes.grid(axis="y", visible=False)
            axes.set_xlim(left, right)
            axes.xaxis.set_major_locator(MaxNLocator(5))
            axes.set_xlabel(text)
        else:
            axes.axhline(0, color=INK, linewidth=1)
            axes.set_xlabel(f"client, in order of gain ({len(names)})")
            axes.set_ylabel(text)
            axes.set_ylim(left, right)
    return figure


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
    look, scores = looks(order, study.verdicts.roles), {k: grids[k].per_client() for k in order if k in grids}
    names = [n for n in study.names if any(math.isfinite(v[n]) for v in scores.values())]
    if len(scores) < 2 or not 0 < len(names) <= NAMED:
        return None
    values = {k: np.array([v[n] for n in names]) * scale.factor for k, v in scores.items()}
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
            texts = [f"{n}, {label}: {scale.number(scores[label][n])}{scale.unit}" for n in names]
            hover(axes, [*v], [*place], texts)
        axes.set_yticks(place, [short(n) for n in names])
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlabel(f"{study.split} {scale.header}")
        legend(figure, axes, look)
    return figure


# rows: name, before, after, change and clear of every client
