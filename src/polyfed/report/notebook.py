"""A run as a notebook shows it: one sentence, a table, the history as a figure. Takes tables, not a run."""

import zlib
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np
import pandas as pd

from polyfed.metrics.metric import Metric
from polyfed.report import words
from polyfed.report.style import SERIES, VARIABLES, canvas, styled, to_svg

Final = Mapping[str, Mapping[str, np.ndarray]]


def sentence(name: str, status: str, rounds: int, clients: Sequence[str], final: Final, metric: Metric) -> str:
    """Result in a line: `ditto, 4 clients, finished after 60 rounds: test accuracy 81.3 %, worst 70.1 % (va)`."""
    ended = f"{name}, {words.count(len(clients), 'client')}, {status} after {words.count(rounds, 'round')}"
    split = next((s for s in ("test", "validation") if s in final), None)
    extremes = None if split is None else _extremes(final[split][metric.name], clients, metric)
    scale = words.Scale(metric)
    if extremes is None:
        untested = f"{ended}: no samples were held out" if "train" in final else ended
        return untested if split is None else f"{ended}: no {split} {scale.name} ({metric.lacks})"
    mean, worst, _ = extremes
    value, who = f"{scale.number(mean)}{scale.unit}", f"{scale.number(worst[0])}{scale.unit} ({worst[1]})"
    return f"{ended}: {split} {scale.name} {value}, worst {who}"


def cell(text: str, clients: Sequence[str], final: Final, metric: Metric, history: pd.DataFrame) -> str:
    """The sentence, mean, worst and best client per split, and the mean of the metric over the rounds, as HTML."""
    scale, rows = words.Scale(metric), []
    for split, metrics in final.items():
        extremes = _extremes(metrics[metric.name], clients, metric)
        if extremes is not None:
            mean, *ends = extremes
            cells = [split, scale.number(mean), *(f"{scale.number(value)} ({who})" for value, who in ends)]
            rows.append("".join(f"<td>{escape(cell)}</td>" for cell in cells))
    head = "".join(f"<th>{escape(h)}</th>" for h in ("", f"mean {scale.header}", "worst client", "best client"))
    table = f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>" if rows else ""
    colours = ";".join(f"{variable}:{colour}" for colour, variable in VARIABLES.items())
    return (
        f'<div style="{colours}"><p><b>{escape(text)}</b></p>{table}'
        f'<div style="max-width:30em;background:#fefefe">{_figure(history, metric, text)}</div></div>'
    )


def _extremes(
    values: np.ndarray, clients: Sequence[str], metric: Metric
) -> tuple[float, tuple[float, str], tuple[float, str]] | None:
    """(mean, worst and who, best and who) over the clients that have a value; None if none has."""
    finite = np.flatnonzero(np.isfinite(values))
    if not len(finite):
        return None
    order = finite[np.argsort(metric.merit(values[finite]), kind="stable")]
    worst, best = ((float(values[i]), str(clients[i])) for i in order[[0, -1]])
    return float(values[finite].mean()), worst, best


def _figure(history: pd.DataFrame, metric: Metric, text: str) -> str:
    """The mean of the metric over the rounds, a line per split; empty for fewer than two rounds."""
    if metric.name not in history or len(set(history["round"])) < 2:
        return ""
    scale = words.Scale(metric)
    with styled():
        figure, (axes,) = canvas(4.7, 2.6)
        for colour, (split, rows) in zip(SERIES, history.groupby("split", sort=False), strict=False):
            axes.plot(rows["round"], scale.factor * rows[metric.name], color=colour, label=str(split))
        axes.set_xlabel("round")
        axes.set_ylabel(scale.header)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=3)
    name = (
        f"run-{zlib.crc32(f'{text}{history.to_csv()}'.encode()):08x}"  # so that two runs in one notebook share no ids
    )
    return to_svg(figure, name, f"mean {scale.name} over the rounds", text)
