"""Result of `admit`, with its figure and its table."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor, nn

from polyfed import report
from polyfed.base.arguments import checked
from polyfed.compute.task import Task
from polyfed.metrics.metric import Metric
from polyfed.report import words
from polyfed.report.style import BLUE, QUIET, canvas, legend_name, styled
from polyfed.report.table import Cell, Table
from polyfed.runs.folder import RunFolder, csv_text, distinct
from polyfed.runs.result import position

MANY = 6  # newcomers with a column of their own
LINES = 12  # exchanges that the table shows


@checked
@dataclass(eq=False)
class Admission:
    """Result of `admit`.

    Parameters
    ----------
    names : tuple of str
        [m] the newcomers.
    table : DataFrame
        One row per exchange and newcomer: exchange (0: at entry), client, the metric, alone (the metric of Local after
        as many rounds of the same local work), down_bytes and up_bytes so far.
    metric : Metric
        The leading metric.
    split : str
        The split measured: "test", or "train" without test samples.
    personal : Tensor
        [m, p] the newcomers' models.
    clusters : array or None
        [m] the label in `run.clusters` of each newcomer's group, -1 without one; None for a method without clusters.
    task : Task
        The run's model and loss.
    label : str
        The method's name.
    """

    names: tuple[str, ...]
    table: pd.DataFrame
    metric: Metric
    split: str
    personal: Tensor
    clusters: np.ndarray | None
    task: Task
    label: str

    def model(self, client: int | str) -> nn.Module:
        """One newcomer's model.

        Parameters
        ----------
        client : int or str
            Position or name.

        Returns
        -------
        nn.Module
            A copy of the model.
        """
        return self.task.module(self.personal[position(client, self.names, "newcomer")])

    @property
    def history(self) -> pd.DataFrame:
        """One row per exchange: the mean over newcomers of the metric and of `alone`, bytes of all of them so far."""
        columns = {self.metric.name: "mean", "alone": "mean", "down_bytes": "sum", "up_bytes": "sum"}
        return self.table.groupby("exchange").agg(columns).reset_index()

    def summary(self) -> Table:
        """The metric after each exchange: each newcomer's (if few), their mean, and what they reach alone."""
        scale, history, metric = words.Scale(self.metric), self.history.to_dict("records"), self.metric.name
        each = self.names if 1 < len(self.names) <= MANY else ()
        own = {(r["exchange"], r["client"]): r for r in self.table.to_dict("records")}
        last, rows = len(history) - 1, list[tuple[Cell, ...]]()
        for k in [*range(0, last, -(-last // LINES) or 1), last]:
            row = history[k]
            scores = [*(own[k, name][metric] for name in each), row[metric], row["alone"]]
            sizes = (words.size(row[key]) for key in ("down_bytes", "up_bytes"))
            rows.append(tuple(map(Cell, (str(k), *map(scale.number, scores), *sizes))))
        pairs = {n: (own[last, n][metric], own[last, n]["alone"]) for n in self.names}
        both = {n: (self.metric.merit(a), self.metric.merit(b)) for n, (a, b) in pairs.items() if math.isfinite(a + b)}
        notes = ["Nothing was held out, so these scores are of training samples."] * (self.split == "train")
        notes += [
            "alone: the same number of rounds of local training, without the others",
            f"better off than alone after {words.count(last, 'exchange')}: {sum(a > b for a, b in both.values())} of "
            f"{len(both)}",
        ]
        if lacking := [n for n in self.names if n not in both]:
            notes.append(f"no {scale.name}: {words.listed(lacking)} ({self.metric.lacks})")
        if self.clusters is not None:
            places = [f"{n}: {'none' if c < 0 else c}" for n, c in zip(self.names, self.clusters, strict=True)]
            notes.append(f"cluster of the run: {', '.join(places[:20])}{', ...' if len(places) > 20 else ''}")
        columns = ("exchange", *each, self.label if len(each) < 2 else "mean", "alone", "down", "up")
        return Table(f"Newcomers to {self.label}, {self.split} {scale.header}", columns, tuple(rows), tuple(notes))

    def figure(self) -> Figure:
        """The metric against the number of exchanges: the mean, every newcomer as a thin line, and Local."""
        scale, history, metric = words.Scale(self.metric), self.history, self.metric.name
        with styled():
            figure, (axes,) = canvas()
            for _, rows in self.table.groupby("client"):
                axes.plot(rows["exchange"], scale.factor * rows[metric], color=BLUE, linewidth=0.7, alpha=0.35)
            x = history["exchange"]
            axes.plot(x, scale.factor * history[metric], "o-", color=BLUE, label=legend_name(self.label))
            axes.plot(x, scale.factor * history["alone"], "x--", color=QUIET, label="alone")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.set_xlabel("exchanges")
            axes.set_ylabel(f"{self.split} {scale.header} of newcomers")
            figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=2)
        return figure

    def save(self, folder: str | Path) -> Path:
        """Write admission.csv, admission.svg and models/<name>.safetensors.

        Parameters
        ----------
        folder : str or Path
            The folder, made if need be.

        Returns
        -------
        Path
            The folder.
        """
        out = RunFolder(Path(folder))
        with out.locked():
            (out.path / "models").mkdir(exist_ok=True)
            for name, w in zip(distinct(self.names), self.personal, strict=True):
                out.write_bytes(f"models/{name}.safetensors", self.task.layout.named(w))
            report.save(self.figure(), out.path / "admission.svg")
            out.write("admission.csv", csv_text(self.table))  # it says that all else is there
        return out.path
