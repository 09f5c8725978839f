"""The cost of privacy: a comparison of runs without it and at several epsilons, in a line per site and as a figure."""

import math

import numpy as np
from matplotlib.figure import Figure

from polyfed.report import words
from polyfed.report.pairs import Interval
from polyfed.report.style import INK, QUIET, canvas, hover, styled
from polyfed.report.verdicts import Study

OPEN, AT = "open", "epsilon-"


def label_of(epsilon: float) -> str:
    """The label of a method at an epsilon."""
    return f"{AT}{epsilon:g}"


def epsilons(study: Study) -> list[float]:
    """The epsilons that are compared with a run without one, the largest first; none in other studies."""
    if OPEN not in study.labels:
        return []
    return sorted((float(label.removeprefix(AT)) for label in study.labels if label.startswith(AT)), reverse=True)


# study: of the labels "open", "epsilon-8", ...
def sentences(study: Study) -> list[str]:
    """The cost of privacy on average, then at each site, with paired 95 % intervals."""
    levels, scale, v = epsilons(study), words.Scale(study.metric), study.verdicts
    sites = {"mean over sites": [v.mean_gain(label_of(e), OPEN) for e in levels]}
    for name in study.names:
        sites[name] = [v.gains(label_of(e), OPEN)[name] for e in levels]
    return [
        f"{name}: " + ", ".join(said(e, g, scale) for e, g in zip(levels, gains, strict=True))
        for name, gains in sites.items()
    ]


def said(epsilon: float, gain: Interval, scale: words.Scale) -> str:
    """Say what an epsilon changes."""
    limits = f" ({scale.range(gain.low, gain.high)})" if gain.known else ""
    return f"epsilon {epsilon:g} {scale.signed(gain.mean)}{scale.difference_unit}{limits}"


def privacy_figure(study: Study) -> Figure | None:
    """The cost of each epsilon against no privacy: the mean over sites with its 95 % interval, a thin line per site."""
    if not (levels := epsilons(study)):
        return None
    scale, place = words.Scale(study.metric), np.arange(len(levels))
    means = [study.verdicts.mean_gain(label_of(e), OPEN) for e in levels]
    with styled():
        figure, (axes,) = canvas(height=3.2)
        last = dict[str, float]()
        for name in study.names:
            gains = [study.verdicts.gains(label_of(e), OPEN)[name].mean * scale.factor for e in levels]
            axes.plot(place, gains, color=QUIET, linewidth=0.8, zorder=1)
            last[name] = gains[-1]
        mean, low, high = (np.array([getattr(g, k) for g in means]) * scale.factor for k in ("mean", "low", "high"))
        axes.plot(place, mean, color=INK, linewidth=1.6, zorder=3, marker="o")
        axes.vlines(place, low, high, color=INK, linewidth=1.2, zorder=2)
        hover(axes, [*place], [*mean], [said(e, g, scale) for e, g in zip(levels, means, strict=True)])
        axes.axhline(0, color=INK, linewidth=0.8)
        (bottom, top), at = axes.get_ylim(), -math.inf
        for name in sorted((n for n, gain in last.items() if math.isfinite(gain)), key=lambda n: last[n]):
            at = max(last[name], at + 0.06 * (top - bottom))  # no name on another
            axes.annotate(name, (place[-1], at), (4, 0), textcoords="offset points", color=QUIET, va="center")
        axes.set_xticks(place, [f"{e:g}" for e in levels])
        axes.set_xlim(-0.3, len(levels) - 0.5)
        axes.set_xlabel("epsilon")
        axes.set_ylabel(f"against no privacy, {'points' if scale.percent else scale.name}")
    return figure
