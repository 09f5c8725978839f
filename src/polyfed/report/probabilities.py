"""Calibration and decision curves of a binary outcome's probabilities, from the test samples of all clients and seeds.

Net benefit: Vickers and Elkin, Medical Decision Making 26 (2006).
"""

import numpy as np
from matplotlib.figure import Figure

from polyfed.report.style import INK, NAMED, PAPER, QUIET, canvas, hover, legend, legend_name, looks, styled
from polyfed.report.verdicts import Study

GROUPS, LEAST = 10, 20  # of a calibration curve: groups, and fewest samples in each
MOST = 4  # methods drawn
THRESHOLDS = np.arange(1, 100) / 100

Told = dict[str, tuple[np.ndarray, np.ndarray]]  # {name: (probabilities, outcomes)}


def told(study: Study) -> Told:
    """{method: ([N] probabilities, [N] outcomes)} of the methods drawn, the best first; may be empty."""
    ranked = [k for k in study.verdicts.ranked if study.role(k) not in ("yardstick", "oracle")]
    first = [*dict.fromkeys([*(study.verdicts.lead or ()), *ranked])][:MOST]
    joined = {label: _joined(study, label) for label in ranked if label in first}
    return {label: of for label, of in joined.items() if len(of[0]) >= 2 * LEAST}


def _joined(study: Study, label: str) -> tuple[np.ndarray, np.ndarray]:
    pairs = [pair for run in study.counted(label) for pair in run.probabilities.values()]
    if not pairs:
        return np.zeros(0), np.zeros(0)
    p, y = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    return p, y.astype(float)


def calibration_figure(study: Study) -> Figure | None:
    """Observed against predicted probability by tenths of the samples; hollow: the leading method at every client."""
    curves = told(study)
    if not curves:
        return None
    look = looks(study.verdicts.ranked, study.verdicts.roles)
    with styled():
        figure, (axes,) = canvas(height=3.9)
        axes.plot([0, 100], [0, 100], color=INK, linewidth=0.9)
        for label, (p, y) in curves.items():
            groups = np.array_split(np.argsort(p, kind="stable"), max(2, min(GROUPS, len(p) // LEAST)))
            x, observed = (100 * np.array([v[g].mean() for g in groups]) for v in (p, y))
            colour, marker, line = look[label]
            axes.plot(x, observed, color=colour, marker=marker, linestyle=line, label=legend_name(label), markersize=5)
            texts = [
                f"{label}: predicted {a:.1f} %, seen {b:.1f} % of {len(g):,}"
                for a, b, g in zip(x, observed, groups, strict=True)
            ]
            hover(axes, x, observed, texts)
        first = study.verdicts.lead[0] if study.verdicts.lead else next(iter(curves))
        sites = {n: pair for n in study.names if len((pair := _at(study, first, n))[0])}
        if 1 < len(sites) <= NAMED:
            x, observed = (100 * np.array([pair[k].mean() for pair in sites.values()]) for k in (0, 1))
            axes.scatter(x, observed, s=42, facecolor=PAPER, edgecolor=look[first].color, marker="D", zorder=3)
            texts = [
                f"{n}, {first}: predicted {a:.1f} % on average, seen {b:.1f} %"
                for n, a, b in zip(sites, x, observed, strict=True)
            ]
            hover(axes, x, observed, texts)
        axes.set_xlim(-3, 103)
        axes.set_ylim(-3, 103)
        axes.set_xlabel("predicted, %")
        axes.set_ylabel("seen, %")
        legend(figure, axes, look)
    return figure


def _at(study: Study, label: str, client: str) -> tuple[np.ndarray, np.ndarray]:
    pairs = [r.probabilities[client] for r in study.counted(label) if client in r.probabilities]
    p, y = (np.concatenate([pair[k] for pair in pairs]) if pairs else np.zeros(0) for k in (0, 1))
    return p, y


def benefit(p: np.ndarray, y: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Net benefit of acting from each threshold on: right alarms, less false ones at the threshold's odds."""
    acted = p[:, None] >= thresholds
    right, false = (acted * y[:, None]).mean(0), (acted * (1 - y[:, None])).mean(0)
    return right - false * thresholds / (1 - thresholds)


def benefit_figure(study: Study) -> Figure | None:
    """Decision curves: net benefit over the probability from which one acts, beside acting on all and on none."""
    curves = told(study)
    if not curves:
        return None
    look, x = looks(study.verdicts.ranked, study.verdicts.roles), 100 * THRESHOLDS
    _, outcomes = next(iter(curves.values()))
    share = float(outcomes.mean())
    with styled():
        figure, (axes,) = canvas()
        axes.axhline(0, color=INK, linewidth=0.9)
        everybody = benefit(np.ones(len(outcomes)), outcomes, THRESHOLDS)
        axes.plot(x, everybody, color=QUIET, linewidth=0.9)
        some = [t for t in (0, 30, 60) if everybody[t] > 0]
        hover(axes, x[some], everybody[some], [f"acting on all: {everybody[t]:.3f} from {x[t]:.0f} %" for t in some])
        for label, (p, y) in curves.items():
            value = benefit(p, y, THRESHOLDS)
            colour, _, line = look[label]
            axes.plot(x, value, color=colour, linestyle=line, label=legend_name(label))
            some = slice(4, None, 5)
            texts = [f"{label}, acting from {a:.0f} %: {b:.3f}" for a, b in zip(x[some], value[some], strict=True)]
            hover(axes, x[some], value[some], texts)
        axes.set_xlim(0, 100)
        axes.set_ylim(-0.08 * max(share, 0.1), 1.08 * share)
        axes.set_xlabel("acting from a probability of, %")
        axes.set_ylabel("net benefit")
        legend(figure, axes, look)
    return figure
