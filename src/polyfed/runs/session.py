"""Session: a run under way. It steps the loop, evaluates, calls callbacks, saves, and yields the Result."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from polyfed.base import checkpoint
from polyfed.base.errors import ConfigError, Diverged, RunError
from polyfed.base.typed import plain
from polyfed.core.algorithm import Contender
from polyfed.core.engine import Silent
from polyfed.core.rounds import Loop
from polyfed.data.federation import Federation
from polyfed.data.shared import NAME
from polyfed.metrics.metric import mean_of
from polyfed.runs.folder import RunFolder, fingerprint
from polyfed.runs.result import Live, Result, splits
from polyfed.runs.resume import check_same, versions_since
from polyfed.runs.schema import Config, Record, Scores, Spread
from polyfed.runs.stop import interruptible
from polyfed.runs.trained import Judged, Trained
from polyfed.runs.training import stop_of
from polyfed.runs.watching import Callback, Progress

Saved = tuple[dict[str, Any], dict[str, Any], list[str]]  # a checkpoint: tensors, what is said of them, warnings


@dataclass(eq=False)
class Session:
    """A run under way: training, evaluation, history, checkpoints.

    settings: of config.toml     every: rounds between evaluations     attackers: [n] bool, who has no metrics
    algorithm: a yardstick, of which the loop knows nothing     measure: what fits it, in place of rounds; it says what
    was measured     judged: the same before
    """

    loop: Loop
    federation: Federation
    settings: Config
    every: int
    attackers: np.ndarray
    store: RunFolder | None
    callbacks: Sequence[Callback] = ()
    looks: Sequence[str] | None = None  # the splits that are evaluated, where not all
    measure: "Callable[[Session], Judged] | None" = None
    judged: Judged | None = None
    algorithm: Contender | None = None
    records: list[Record] = field(default_factory=list[Record])
    seconds: float = 0.0
    ended: bool = False

    def __post_init__(self) -> None:
        self.first, self.rounds = self.loop.t, self.settings.rounds  # first: done by the run that it starts from
        self.stop = None if self.settings.stop is None else stop_of(self.settings.stop)
        self.done = 0  # rounds, where the loop has gone back to the best one
        self.final: Scores = {}
        self.status = "finished"
        there = [name for name in splits(self.federation) if self.looks is None or name in self.looks]
        self.watched = watched(there)
        self.all_of_them = [*dict.fromkeys([*self.watched, *there])]  # in this order, whatever was evaluated before
        self.evaluated: dict[str, int] = {}  # a split -> when it was, last

    def result(self) -> Result:
        """Result of what has been reached so far."""
        reached = Trained.of(self.loop)
        return Result(
            self.settings, self.federation, [*self.records], {**self.final}, self.loop.task.scores, self.status,
            max(self.loop.t, self.done), self.seconds, self.ended, self.store.path if self.store else None,
            Live(reached, self.federation, self.judged or reached, self.algorithm or reached.algorithm),
        )  # fmt: skip

    def restore(self, store: RunFolder, saved: Saved) -> None:
        """Go on from a checkpoint, after checking that it belongs to the same experiment on the same data."""
        tensors, meta, warnings = saved
        for line in warnings:
            store.log(line)
        check_same(store.path, fingerprint(self.settings, self.loop.task), meta["fingerprint"])
        self.loop.restore(tensors, meta)
        if self.loop.t > self.rounds:
            raise RunError(
                f"cannot resume {store.path}: it has {self.loop.t} rounds already, more than rounds = {self.rounds}"
            )
        checkpoint.forget(store.path / "checkpoint", len(warnings))
        self.records = [Record.model_validate(r) for r in meta["records"]]
        self.seconds, self.ended = meta["seconds"], meta["ended"] or self._stops()
        over = self.ended or self.loop.t >= self.rounds
        versions, lines = versions_since(meta["versions"], self.settings.versions, self.loop.t)
        self.settings = self.settings.model_copy(update={"versions": meta["versions"] if over else versions})
        for line in () if over else lines:
            store.log(line)

    def run(self) -> Result:
        """Train until the last round, a callback or Ctrl-C ends it. What was reached is saved whatever happens."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # what is written at the end, too, has the bits of one thread
        try:
            return self._run()
        finally:
            torch.set_num_threads(threads)

    def _run(self) -> Result:
        loop, store = self.loop, self.store
        begun = loop.t
        if store is not None:
            loop.say = store.log
        try:
            self._rounds()
            self.done = loop.t
            if loop.best is not None and loop.best[1]["t"] < loop.t:
                loop.back()
            self._evaluate([name for name in self.all_of_them if self.evaluated.get(name) != loop.t])
            if (rows := self.federation.shared) is not None:
                self.final[NAME] = self._honest((self.judged or Trained.of(loop)).shared(rows))
        except Diverged as e:
            raise Diverged(f"{e}{self._diverged()}") from e
        except Exception as e:
            kept = isinstance(e, Silent) or not isinstance(e, RunError)  # else it could not be written now either
            if store is not None and kept and loop.whole and loop.t > begun:
                store.rescue(self.result(), e)
            raise
        finally:
            loop.engine = loop.engine.close()
        self.status = "finished" if self.done >= self.rounds or self.ended else "interrupted"
        result = self.result()
        if store is not None:
            store.finish(result)
        return result

    def _rounds(self) -> None:
        loop, store = self.loop, self.store
        if self.measure is not None:
            self.judged = self.measure(self)
            self.rounds = loop.t if self.judged.deploys == "yardstick" else self.rounds
            if loop.t >= self.rounds and all(r.round != loop.t for r in self.records):  # and not resumed after it
                self._tell(self._evaluate(self.watched))
            return

        def due() -> bool:
            return loop.t == self.rounds or (self.every > 0 and loop.t % self.every == 0)

        with interruptible(terminable=store is not None) as interrupted:
            begins = loop.t == self.first or due()  # or goes on where an error had ended the evaluation
            if self.every > 0 and begins and all(r.round != loop.t for r in self.records):
                self.ended = self._tell(self._evaluate(self.watched))
            while loop.t < self.rounds and not self.ended and not interrupted.is_set():
                start = time.perf_counter()
                loop.step()
                self.seconds += time.perf_counter() - start
                if due() and not loop.finite:
                    raise Diverged(loop.exploded())
                self.ended = self._tell(self._evaluate(self.watched) if due() else [])
                if store is not None and loop.t < self.rounds and store.due(loop.t):
                    store.checkpoint(self.result())

    def _honest(self, scores: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Scores [n] without those of attackers, who have no metrics."""
        return {k: np.where(self.attackers, np.nan, v) for k, v in scores.items()}

    def _evaluate(self, splits: list[str]) -> list[Record]:
        """The records of this round. Raises Diverged where a model has no finite score."""
        judged, records = self.judged or Trained.of(self.loop), list[Record]()
        for name in splits:
            self.final[name] = self._honest(judged.scored(name))
            self.evaluated[name] = self.loop.t
            records.append(record(self.result(), name))
        for name in splits:
            self.loop.refuse_diverged(self.final[name], name)
        if records:
            records[0] = records[0].model_copy(update=grouping(self.result()))
        return records

    def _tell(self, records: list[Record]) -> bool:
        """Keep the records and call the callbacks; whether one of them ends the run."""
        self.records += records
        if self.store is not None and records:
            self.store.record(records)
        stops = bool(records) and self._stops(keep=True)
        run = self.result()
        answers = [callback(Progress(self.loop.t, self.rounds, records, run)) for callback in self.callbacks]
        return stops or any(answer is True or answer is np.True_ for answer in answers)

    def _stops(self, keep: bool = False) -> bool:
        """Whether the best round is too long ago; the present one is kept where it is the best."""
        if self.stop is None or self.measure is not None:
            return False
        metric = self.loop.task.scores[0]
        looks = [(r.round, metric.merit(r[metric.name])) for r in self.records if r.split == "validation"]
        best = self.stop.best(looks)
        if looks and best is None:
            why = f"no client has {metric} on its validation samples ({metric.lacks})"
            raise ConfigError(f"metrics: {why}; stop goes by the first of them")
        if keep and best == self.loop.t:
            self.loop.keep()
        return best is not None and looks[-1][0] - best >= self.stop.rounds

    def _diverged(self) -> str:
        """Save the last finite state; where it is."""
        self.status = "diverged"
        if self.store is None:
            return ""
        if self.loop.whole:
            self.store.checkpoint(self.result(), force=True)
        with suppress(Diverged):
            self._evaluate(self.all_of_them)
        self.store.finish(self.result())
        saved = checkpoint.checkpoints(self.store.path / "checkpoint")
        return f"; the last finite state is {saved[-1]}" if saved else ""


def watched(data: Any) -> list[str]:
    """The splits, of these, that are evaluated on the way."""
    return [name for name in data if name != "train"] or [*data]


def record(run: Result, split: str) -> Record:
    """One line of the history: the mean over clients of every metric, its spread, and the cost so far."""
    metrics, metric = run.final[split], run.metric
    values = metrics[metric.name]
    down, up = run.trained.ledger.totals()
    spread = Spread.of(metric, values)
    counts = np.where(np.isnan(values), 0, splits(run.federation)[split].counts)
    pooled = float(np.nansum(counts * values) / counts.sum()) if counts.any() else float("nan")
    return Record.model_validate({
        "round": run.rounds,
        "split": split,
        **{name: mean_of(v) for name, v in metrics.items()},
        "std": spread.std,
        "worst": spread.worst,
        **({"pooled": pooled} if metric.pooled else {}),
        "down_bytes": down,
        "up_bytes": up,
        "seconds": run.seconds,
        **({"virtual_time": run.trained.clock} if run.trained.clock else {}),
    })  # fmt: skip


def grouping(run: Result) -> dict[str, Any]:
    """Number of clusters that the method sees now and, where it has changed, the label of every client; or the error of
    its means of factors."""
    shown = run.trained.algorithm.describe(run.kept.server)
    error, groups = shown.findings.get("aggregation_error"), shown.clusters
    if groups is None:
        return {} if error is None else {"aggregation_error": float(error)}
    before = next((r.assigned for r in reversed(run.records) if r.assigned is not None), None)
    labels: list[int] = plain(torch.as_tensor(groups))
    return {"clusters": len(set(labels))} | ({"assigned": labels} if labels != before else {})
