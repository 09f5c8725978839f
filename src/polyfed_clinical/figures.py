"""Pictures of a regression: every coefficient, every site's own beside the pooled one, and the curve of a spline."""

from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullFormatter, NullLocator
from scipy import stats

from polyfed.report import words
from polyfed.report.style import BLUE, INK, QUIET, canvas, hover, legend_name, styled
from polyfed_clinical.splines import basis, terms_of
from polyfed_clinical.summary import ClinicalFit

DRAWN = 60  # most coefficients in the figure of all
SITES = 60  # most sites in the figure of one coefficient
STEPS = ((1,), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8))  # of a logarithmic axis
NAMES = {"estimate": "ratio", "lower": "ratio_lower", "upper": "ratio_upper"}


def forest_figure(fit: ClinicalFit) -> Figure | None:
    """Every coefficient, or ratio on a logarithmic axis, with its interval and meta-analysis; None for over 60."""
    keys = [NAMES[k] if fit.ratio else k for k in NAMES]
    fits = [of.loc[fit.single, keys] for of in (fit.coefficients, fit.meta)]
    names = [str(n) for n in fits[0].index]
    if not 0 < len(names) <= DRAWN or not _finite(fits[0]).any():
        return None
    with styled():
        drawn, (axes,) = canvas(height=1.3 + 0.3 * len(names))
        for k, (of, colour, label, face) in enumerate(
            zip(fits, (BLUE, QUIET), ("federated", "meta-analysis"), ("", "none"), strict=True)
        ):
            shown = _finite(of)
            place = np.flatnonzero(shown) + (0.0 if k == 0 else 0.28)
            value, low, high = (of[key].to_numpy(dtype=float)[shown] for key in keys)
            tint = [colour if c else INK for c in _clear(fit, low, high)] if k == 0 else [colour] * len(place)
            axes.hlines(place, low, high, colors=tint, linewidth=1.6 - 0.6 * k)
            axes.scatter(value, place, s=26 - 8 * k, edgecolors=tint, c=face if k else tint, label=label, zorder=3)
            texts = [
                f"{names[round(y)]}, {label}: {_interval(*v)}" for y, *v in zip(place, value, low, high, strict=True)
            ]
            hover(axes, [*value], [*place], texts)
        _finish(axes, fit, names)
        axes.set_xlabel(fit.ratio or "coefficient")
        drawn.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=2)
    return drawn


def site_figure(fit: ClinicalFit, coefficient: str) -> Figure | None:
    """A forest plot of one coefficient: sites' own fits, meta-analysis and federated fit; None for over 60 sites."""
    own = [fit.own[key].unstack("coefficient", sort=False)[coefficient].to_dict() for key in ("estimate", "se")]
    rows = [(str(site), float(b), float(own[1][site])) for site, b in own[0].items()]
    if not 1 < len(rows) <= SITES or not any(np.isfinite(se) for _, _, se in rows):
        return None
    z = stats.norm.ppf(0.5 + fit.level / 2)
    patients = fit.sites["patients"].to_dict()
    each: list[tuple[str, Any, Any, Any]] = [
        (f"{site} ({patients[site]:,})", b, b - z * se, b + z * se) for site, b, se in rows
    ]
    for name, of in (("meta-analysis", fit.meta), ("federated", fit.coefficients)):
        estimate, lower, upper = (float(of[k][coefficient]) for k in NAMES)
        each.append((name, estimate, lower, upper))
    value, low, high = np.array([e[1:] for e in each], dtype=float).T
    # of an axis that one site cannot stretch, and on which the last two are whole
    reach = 4 * np.nanmedian(high - low) + np.nanmax(value) - np.nanmin(value)
    left, right = np.nanmin([*low[-2:], np.nanmin(value) - reach]), np.nanmax([*high[-2:], np.nanmax(value) + reach])
    cut = {"<": low < left, ">": high > right}
    low, high = low.clip(left), high.clip(max=right)
    if fit.ratio:
        value, low, high = (np.exp(v) for v in (value, low, high))
    place, shown = np.arange(len(each)) + np.r_[np.zeros(len(rows)), 0.5, 0.5], np.isfinite(value + low + high)
    colours = np.array([QUIET] * len(rows) + [INK, BLUE if _clear(fit, low, high)[-1] else INK])
    with styled():
        drawn, (axes,) = canvas(height=0.95 + 0.22 * len(each))
        axes.hlines(place[shown], low[shown], high[shown], colors=list(colours[shown]), linewidth=1.4)
        for (arrow, beyond), end in zip(cut.items(), (low, high), strict=True):
            axes.plot(end[beyond & shown], place[beyond & shown], arrow, color=QUIET, markersize=5)
        for marker, which in (("s", slice(0, len(rows))), ("D", slice(len(rows), None))):
            axes.scatter(value[which], place[which], s=24, c=list(colours[which]), marker=marker, zorder=3)
        texts = [f"{e[0]}: {_interval(*v)}" for e, *v in zip(each, value, low, high, strict=True)]
        hover(axes, [*value], [*place], texts)
        _finish(axes, fit, [e[0] + ("" if ok else ": no fit") for e, ok in zip(each, shown, strict=True)], place)
        axes.set_xlabel(f"{fit.ratio or 'coefficient'} of {coefficient}")
    return drawn


def curve_figure(fit: ClinicalFit, column: str) -> Figure:
    """A spline against the value at its middle knot, with the interval at every place; triangles: the knots."""
    knots, terms = fit.knots[column], terms_of(column, fit.knots[column])
    pad = 0.1 * (knots[-1] - knots[0])
    x = np.linspace(knots[0] - pad, knots[-1] + pad, 121)
    middle = knots[len(knots) // 2]
    gap = (basis(torch.as_tensor(x), knots) - basis(torch.tensor([middle], dtype=torch.float64), knots)).numpy()
    estimate = gap @ fit.coefficients["estimate"][terms].to_numpy()
    se = np.sqrt(np.einsum("np,pq,nq->n", gap, fit.covariance.loc[terms, terms].to_numpy(), gap))
    ends = [estimate + k * stats.norm.ppf(0.5 + fit.level / 2) * se for k in (-1, 1)]
    y, low, high = (np.exp(v) if fit.ratio else v for v in (estimate, *ends))
    with styled():
        drawn, (axes,) = canvas(height=2.8)
        axes.fill_between(x, low, high, color=BLUE, alpha=0.15, linewidth=0)
        axes.plot(x, y, color=BLUE)
        axes.axhline(1 if fit.ratio else 0, color=INK, linewidth=0.9)
        if fit.ratio:
            _logarithmic(axes, "y", float(low.min()), float(high.max()))
        axes.plot(knots, np.full(len(knots), axes.get_ylim()[0]), "^", color=QUIET, clip_on=False, markersize=5)
        some = slice(None, None, 5)
        hover(axes, [*x[some]], [*y[some]], [
            f"{column} {a:.4g}: {_interval(*v)}" for a, *v in zip(x[some], y[some], low[some], high[some], strict=True)
        ])  # fmt: skip
        axes.set_xlabel(column)
        axes.set_ylabel(f"{fit.ratio or 'difference'} against {middle:g}")
    return drawn


def _clear(fit: ClinicalFit, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Where an interval leaves out that there is no effect."""
    return (low > (none := 1 if fit.ratio else 0)) | (high < none)


def _interval(value: float, low: float, high: float) -> str:
    return f"{words.figures(value)} ({words.figures(low)} to {words.figures(high)})"


def _finish(axes: Axes, fit: ClinicalFit, names: list[str], place: Any = None) -> None:
    """Rows with their names, and the line of no effect."""
    rows = np.arange(len(names)) if place is None else place
    axes.axvline(1 if fit.ratio else 0, color=INK, linewidth=0.9)
    if fit.ratio:
        _logarithmic(axes, "x", *axes.dataLim.intervalx)
    axes.set_yticks(rows, [legend_name(n) for n in names])
    axes.set_ylim(rows[-1] + 0.6, -0.6)
    axes.grid(axis="y", visible=False)


def _logarithmic(axes: Axes, which: str, low: float, high: float) -> None:
    """A logarithmic axis with four ticks or more where its range allows."""
    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    ticks = list[float]()
    for steps in STEPS:
        ticks = [s * 10.0**k for k in decades for s in steps if low <= s * 10.0**k <= high]
        if len(ticks) >= 4:
            break
    else:
        ticks = [float(t) for t in MaxNLocator(4).tick_values(low, high) if low <= t <= high]
    getattr(axes, f"set_{which}scale")("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda v, _: f"{v:g}")
    axis.set_minor_formatter(NullFormatter())


def _finite(of: Any) -> np.ndarray:
    values = of.to_numpy(dtype=float)
    return np.isfinite(values).all(1) & (np.abs(values) < 1e4).all(1) & (np.abs(values) > 1e-4).any(1)
