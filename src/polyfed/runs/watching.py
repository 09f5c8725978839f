"""Watching a run: what callbacks receive; in a notebook one line that is written over, where none were given."""

import multiprocessing
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from polyfed.metrics.metric import short
from polyfed.runs.result import Result
from polyfed.runs.schema import Record

EVERY = 0.2  # seconds between lines
BAR = 20  # signs of a bar


class Progress(NamedTuple):
    """State of a run that a callback receives after every round.

    Attributes
    ----------
    round : int
        Rounds done.
    rounds : int
        Rounds in all.
    records : list of dict
        This round's evaluations; empty when none was due.
    run : Result
        The run so far.
    """

    round: int
    rounds: int
    records: list[Record]
    run: Result


Callback = Callable[[Progress], Any]


def watchers() -> tuple[Callback, ...]:
    """The callbacks of a `fit` that was given none: in a cell of a notebook or at IPython's prompt a line; not in a
    process that was started from one."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    notebook = get_ipython is not None and get_ipython() is not None and multiprocessing.parent_process() is None
    return (Line(),) if notebook else ()


def noted(step: Progress) -> str:
    """`test accuracy 0.81`, of the last evaluation; the loss where nothing was held out, as a score would be of rows
    that the models have seen."""
    record, name = step.records[-1], step.run.metric.name
    name = "loss" if record.split == "train" else name
    return f"{record.split} {name} {short(record[name])}"


class Line:
    """A bar, the round, the last evaluation, and how many seconds the other rounds will take."""

    def __init__(self) -> None:
        self.note, self.told = "", 0.0
        self.first: tuple[int, float] | None = None  # a round, and when it was over

    def __call__(self, step: Progress) -> None:
        if step.records:
            self.note = noted(step)
        over, now = step.round == step.rounds, time.monotonic()
        first, since = self.first = self.first or (step.round, now)
        if over or now - self.told > EVERY:
            self.told = now
            rest = (now - since) / max(step.round - first, 1) * (step.rounds - step.round)
            left = f"  {rest:.0f} s left" if rest > 1 else ""
            done = BAR * step.round // max(step.rounds, 1)
            bar = f"{'█' * done}{'░' * (BAR - done)}"
            line = f"{step.run.algorithm.name}: {bar} round {step.round}/{step.rounds}  {self.note}{left}"
            print(f"\r{line:<96}", end="\n" if over else "", flush=True)
