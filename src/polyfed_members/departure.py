"""Cost of a leaving for those who stay, as a table and as a page."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from polyfed.metrics.metric import Metric
from polyfed.report import words
from polyfed.report.forest import Row, chart, said
from polyfed.report.page import Drawing, answer, figure, page, table
from polyfed.report.pairs import Interval
from polyfed.report.style import GREEN, NAMED, QUIET, VERMILLION, canvas, hover, short, styled
from polyfed.report.table import Cell, Table
from polyfed.report.verdicts import LEAST
from polyfed.runs.folder import csv_text
from polyfed.runs.ownership import put_out

MEAN = "mean"  # the row that is no client
SLOPE = "A line per client that stays, with the 95 % interval of its change; in colour: clear jointly over the clients."


@dataclass(frozen=True, eq=False)
class Departure:
    """The cost for the other clients when some leave.

    table: one row per method and client that stays, and one for the mean over those that test ten samples: method,
    client, before and after (the metric), change (positive when better without the others), low, high (95 %), clear
    (jointly over clients), seeds, bytes_before, bytes_after (NaN where not available in practice)
    """

    left: tuple[str, ...]  # who left
    folder: Path  # of the runs without them
    table: pd.DataFrame
    metric: Metric  # the leading one
    split: str  # the one measured
    lead: str | None = None  # the leading method with everyone; None for a run alone, or without one
    apart: tuple[str, ...] = ()  # who stays and tests too few samples to count in the mean

    @cached_property
    def _rows(self) -> dict[str, list[dict[Any, Any]]]:
        """The rows of each method: the one in the lead, others that send messages, the rest, each by its mean."""
        rows: dict[str, list[dict[Any, Any]]] = {}
        for row in self.table.to_dict("records"):
            rows.setdefault(row["method"], []).append(row)

        def rank(method: str) -> tuple[bool, bool, float]:
            of = next((r for r in rows[method] if r["client"] == MEAN), None)
            if of is None:
                return False, False, -math.inf
            return method == self.lead, of["bytes_before"] > 0, self.metric.merit(of["before"])

        return {method: rows[method] for method in sorted(rows, key=rank, reverse=True)}

    @property
    def answer(self) -> str:
        """What the leaving changes, with the method in the lead."""
        return self.sentence(next(iter(self._rows)))

    def summary(self) -> Table:
        """One row per client that stays, of each method that sends messages: score and bytes before and after."""
        scale, rows = words.Scale(self.metric), list[tuple[Cell, ...]]()
        sent = {k: of for k, of in self._rows.items() if any(r["bytes_before"] > 0 for r in of)} or self._rows
        several = len(sent) > 1
        kinds = ("before", "after")
        columns = ("client<", *["method<"] * several, *(f"{k}, %" if scale.percent else k for k in kinds))
        columns += (f"change{scale.points}", "95 % interval", *(f"bytes {k}" for k in kinds))
        for r in (row for of in sent.values() for row in of):
            mark = ("gain" if r["change"] > 0 else "loss") if r["clear"] else ""
            limits = scale.range(r["low"], r["high"]) if math.isfinite(r["low"]) else "–"
            sizes = {key: r[key] for key in (f"bytes_{k}" for k in kinds)}
            rows.append((
                Cell(str(r["client"])), *[Cell(str(r["method"]))] * several,
                *(Cell(scale.number(r[k])) for k in kinds),
                Cell(scale.signed(r["change"]), {"change": r["change"]}, mark),
                Cell(limits, {"low": r["low"], "high": r["high"]}),
                *(Cell(words.size(n) if math.isfinite(n) else "–", {key: n}) for key, n in sizes.items()),
            ))  # fmt: skip
        who, seeds = words.listed(list(self.left)), int(self.table["seeds"].max())
        over = f"Paired over {words.count(seeds, 'seed')}" if seeds > 1 else "One seed: paired over the test samples"
        notes = (
            f"{self.split.capitalize()} {scale.header}; change: without {who}, positive when better. {over}; "
            "colour: clear jointly over the clients.",
            f"Before: trained with {who}. After: trained anew without, from the initial model; polyfed verify repeats "
            "it.",
        )
        if self.apart:
            notes += (f"The mean leaves out {words.listed(list(self.apart))}: fewer than {LEAST} samples are tested.",)
        if len(sent) < len(self._rows):
            silent = words.listed([k for k in self._rows if k not in sent])
            notes += (f"Not listed, as they send nothing and change by the scaling of inputs alone: {silent}.",)
        return Table(f"What the leaving of {who} costs", columns, tuple(rows), notes)

    def page(self) -> str:
        """The page: what changes for those who stay, on average and for whom clearly, then the table."""
        scale, who = words.Scale(self.metric), words.listed(list(self.left))
        lead, *others = self._rows
        rows, seeds = self._rows[lead], int(self.table["seeds"].max())
        shown = [r for r in rows if r["client"] != MEAN and math.isfinite(r["before"] + r["after"])]
        drawn = Drawing("leave", _slopes(shown, self.metric, self.split), f"Before and after, {lead}", SLOPE)
        bars = []
        for r in rows:
            change, mean = _change(r), r["client"] == MEAN
            levels = f"from {scale.number(r['before'])} to {scale.number(r['after'])}{scale.unit}"
            name = "mean of those who stay" if mean else str(r["client"])
            bars.append(Row(name, change.word, change, f"{said(change, scale)}; {levels}", mean))
        axis = f"{scale.gained(self.split)} with {lead}; positive: better without {who}"
        shape = chart(bars, scale, axis) if shown else ""
        top = answer(self.answer, shape, [f"{k}: {self.sentence(k)}" for k in others])
        stay = words.count(len({*self.table["client"]} - {MEAN}), "client")
        about = f"{stay} {'stays' if stay[:2] == '1 ' else 'stay'} · {words.count(seeds, 'seed')}"
        whole = f'<div class="beside">{figure(drawn) if shown else ""}{table(self.summary(), "leave")}</div>'
        return page(
            f"What does it cost those who stay if {who} {'leave' if len(self.left) > 1 else 'leaves'}?",
            about,
            top,
            [("Those who stay", whole)],
            "polyfed leave",
        )

    def sentence(self, method: str) -> str:
        """What the leaving changes on average for those who stay, and for whom clearly."""
        scale, who, rows = words.Scale(self.metric), words.listed(list(self.left)), self._rows[method]
        mean = next((_change(r) for r in rows if r["client"] == MEAN), Interval(math.nan, math.nan, math.nan, 0))
        head = {1: "Those who stay are better off", -1: "Those who stay are worse off"}.get(
            mean.sign or 0, "No clear change for those who stay"
        )
        text = (
            f"{head} without {who}: mean {self.split} {scale.name} with {method} changes by {scale.signed(mean.mean)}"
        )
        limits = f" (95 % interval {scale.range(mean.low, mean.high)})" if mean.known else ""
        gain, lose = ([r["client"] for r in rows if r["client"] != MEAN and _change(r).sign == s] for s in (1, -1))
        each = [f"{words.listed(names)} clearly {verb}{'s' * (len(names) == 1)}"
                for names, verb in ((gain, "gain"), (lose, "lose")) if names]  # fmt: skip
        untested = "Nothing was held out, so this is of training samples. " * (self.split == "train")
        each = " and ".join(each) or "No client clearly gains or loses"
        return f"{untested}{text}{scale.difference_unit}{limits}. {each}."

    # beside that folder, not in it: the scores of before are those of models trained with the clients that left
    def save(self) -> Path:
        """Write FOLDER-cost.csv and FOLDER-cost.html beside the folder of the runs without those who left."""
        files = {"csv": csv_text(self.table), "html": self.page()}
        places = {kind: self.folder.with_name(f"{self.folder.resolve().name}-cost.{kind}") for kind in files}
        for kind, text in files.items():
            put_out(places[kind], text.encode())
        return places["html"]


def _change(row: Mapping[Any, Any]) -> Interval:
    """The change of a row, positive when better without those who left."""
    return Interval(row["change"], row["low"], row["high"], int(row["seeds"]), clear=bool(row["clear"]))


def _slopes(rows: Sequence[Mapping[Any, Any]], metric: Metric, split: str) -> Figure:
    """A line per client from its score before to its score after, in colour where the change is clear."""
    scale = words.Scale(metric)
    with styled():
        figure, (axes,) = canvas(height=3.4)
        for row in rows:
            colour = QUIET if not row["clear"] else GREEN if row["change"] > 0 else VERMILLION
            ends = [scale.factor * row["before"], scale.factor * row["after"]]
            axes.plot([0, 1], ends, "o-", color=colour, linewidth=2 if row["clear"] else 1.2)
            if metric.sign and math.isfinite(row["low"]):
                span = [ends[0] + metric.sign * scale.factor * row[k] for k in ("low", "high")]
                span = [min(max(x, 0.0), 100.0) for x in span] if scale.percent else span
                axes.plot([1, 1], span, color=colour, linewidth=4, alpha=0.3, solid_capstyle="butt")
            texts = [f"{row['client']} {when}: {scale.number(row[when])}{scale.unit}" for when in ("before", "after")]
            hover(axes, [0, 1], ends, texts)
        low, high = axes.get_ylim()
        place = -math.inf
        for row in sorted(rows, key=lambda row: row["after"]) if len(rows) <= NAMED else ():
            place = max(scale.factor * row["after"], place + 0.055 * (high - low))
            axes.text(1.05, place, short(str(row["client"])), va="center", size=8.5)
        axes.set_xlim(-0.1, 1.5)
        axes.set_xticks([0, 1], ["before", "after"])
        axes.grid(axis="x", visible=False)
        axes.set_ylabel(f"{split} {scale.header}")
    return figure
