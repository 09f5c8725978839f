"""Results of `tune`, as a figure."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from polyfed.metrics.metric import Metric
from polyfed.report import words
from polyfed.report.style import INK, canvas, looks, styled
from polyfed.report.words import LEVELLED


def tune_figure(rows: Sequence[Mapping[str, Any]], metric: Metric, setting: str = "lam") -> Figure:
    """Validation metric and number of clusters over the setting, a line per regime, a ring for the choice."""
    scale, regimes = words.Scale(metric), list(dict.fromkeys(str(row["regime"]) for row in rows))
    look = looks(regimes, dict.fromkeys(regimes, "method"))
    panels = {"validation": (f"validation {scale.header}", scale.factor), "clusters": ("clusters", 1.0)}
    shown = [k for k in panels if any(row[k] is not None for row in rows)]
    with styled():
        figure, axes = canvas(height=1.0 + 1.9 * len(shown), rows=len(shown), sharex=True)
        for ax, column in zip(axes, shown, strict=True):
            text, factor = panels[column]
            for regime in regimes:
                of = [row for row in rows if row["regime"] == regime and row[column] is not None]
                part = [row for row in of if row["ended"] != LEVELLED]
                colour, marker, line = look[regime]
                for row in (row for row in of if row["ended"] == LEVELLED):
                    ax.plot(row[setting], factor * row[column], color=colour, marker="*", markersize=9)
                x, y = [row[setting] for row in part], [factor * row[column] for row in part]
                ax.plot(x, y, color=colour, marker=marker, linestyle=line, label=f"{regime} start")
            for row in rows:
                if row["best"]:
                    ax.plot(row[setting], factor * row[column], "o", markersize=11, fillstyle="none", color=INK)
            ax.set_ylabel(text)
        if "clusters" in shown:
            axes[-1].set_ylim(bottom=0)
            axes[-1].yaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes[-1].set_xlabel({"lam": "λ"}.get(setting, setting))
        if len(regimes) > 1:
            handles, labels = axes[0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside upper left", ncols=len(regimes))
    return figure
