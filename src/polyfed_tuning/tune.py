"""tune: one numeric setting of a method by validation data, separately or on FPFC's warm-up path (arXiv 2211.04218,
"Warmup"), which starts every lambda from the last solution. Test data are never seen before the choice.
"""

import contextlib
import dataclasses
import math
import shutil
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sklearn.metrics import adjusted_rand_score
from torch import nn

from polyfed.algorithms.fpfc import FPFC
from polyfed.base.arguments import checked
from polyfed.base.errors import ConfigError, Diverged
from polyfed.base.settings import settings_of
from polyfed.base.system import move
from polyfed.compute.split import Split
from polyfed.core.algorithm import Contender
from polyfed.data.federation import Federation
from polyfed.data.validation import validated
from polyfed.face import Run
from polyfed.metrics.metric import mean_of
from polyfed.models.start import Start, drawn
from polyfed.report.words import LEVELLED
from polyfed.runs.config import Method
from polyfed.runs.ownership import locked
from polyfed.runs.privacy import refuse_private
from polyfed.runs.result import Result
from polyfed.runs.resume import digest
from polyfed.runs.trainer import fit, prepare
from polyfed.runs.training import Training, training_of
from polyfed.runs.watching import Callback, Progress
from polyfed_tuning.grids import GRIDS, REGIMES, default_setting, methods_of
from polyfed_tuning.ladder import Ladder
from polyfed_tuning.search import Search
from polyfed_tuning.tuned import LEGS, OVER, Tuned, begun, is_over, read_back, same_search, write

Describe = Callable[[Contender], dict[str, Any]]


class Watch:
    """Hooks into `tune`. Override what you need."""

    def begin(self, regime: str, value: float, done: int, total: int) -> None:
        """A leg starts, after `done` of at most `total`; regime "final" is the chosen model's."""

    def callbacks(self) -> Sequence[Callback]:
        """Passed on to `fit` for every leg."""
        return ()

    def end(self, row: Mapping[str, Any]) -> None:
        """A leg is over; row: as in `Tuned.table`."""


@checked
def tune(
    model: Start,
    federation: Federation,
    algorithm: Contender | None = None,
    training: Training | None = None,
    search: Search | None = None,
    *,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    watch: Watch | None = None,
    describe: Describe | None = None,
    **settings: Any,
) -> Tuned:
    """Choose one numeric setting of a method by validation data, then train the chosen model on.

    Without validation samples, `VALIDATION` of each client's training samples are held out, keyed by (seed, client);
    ``partition(validation_fraction=0.2)`` holds them out before inputs are scaled or filled in. The metric is the mean
    over clients. Test samples come back for the final run. A leg that diverges is a row without a metric and ends a
    warm path. After Ctrl-C the table holds the finished legs; with a folder, every leg is a run folder in `out`/legs
    until the search is over.

    A warm path starts each value from the last solution, with the method's state; a cold one from the common start.
    With both, the best value of each is trained on to equal numbers of rounds (or until it settles) before they are
    compared. A value is done when the metric changes by less than `tolerance` at `patience` looks in a row, or with
    `stop` when that says so, and counts with its best round. A warm path
    ends at a value worse than the best before it by more than two standard errors, paired over clients. While the best
    value of a regime is the first or the last, the search goes on beyond it, by at most `extend` values; a warm path
    only upwards.

    Parameters
    ----------
    model : nn.Module or callable
        As for `fit`.
    federation : Federation
        As for `fit`.
    algorithm : Algorithm, Yardstick or None
        The method, by default FPFC(nu=0.5); its own value of the setting is not used.
    training : Training or None
        As for `fit`.
    search : Search or None
        Settings of the search.
    seed : int
        As for `fit`.
    out : str, Path or None
        Folder for the final run, with tune.csv and tune.svg among its files.
    resume : bool
        Go on with the search in `out`: finished values are read back, the one in hand is continued; the table of a
        finished search is read back without `run`.
    watch : Watch or None
        Callbacks for the progress of the search.
    describe : callable or None
        The method with its value -> further tables for config.toml.
    **settings
        Settings of `Search` and of `Training`, such as grid=[0, 0.5, 1], fraction=0.3; `rounds` is the most for one
        value.

    Returns
    -------
    Tuned
        The table of values, and the final run.
    """
    algorithm = algorithm if algorithm is not None else FPFC()
    names = [s.name for s in settings_of(Search)]
    how = training_of(training, {k: v for k, v in settings.items() if k not in names})
    refuse_private(how.privacy, "tune")
    if "evaluate_every" in settings:
        raise ConfigError("evaluate_every: set by tune; leave it out")
    search = dataclasses.replace(search or Search(), **{k: v for k, v in settings.items() if k in names})
    setting = search.setting or default_setting(algorithm)
    regime = search.regime or ("both" if "warm" in GRIDS.get((algorithm.name, setting), {}) else "cold")
    paths = {name: methods_of(algorithm, setting, search.grid, name) for name in REGIMES if regime in (name, "both")}
    model, federation = drawn(model, seed), validated(federation, seed)
    test = federation.test
    blind = dataclasses.replace(federation, test=Split(test.x[:0], test.y[:0], np.zeros_like(test.offsets)))
    ladders = {name: Ladder.of(ms[0], setting, [getattr(m, setting) for m in ms]) for name, ms in paths.items()}
    tuned = Tuned(setting, folder=Path(out) if out is not None else None, ladders=ladders)
    about = {
        **search.dump(), "setting": setting, "algorithm": Method(algorithm).table(), "seed": seed,
        "grid": {name: [float(getattr(m, setting)) for m in methods] for name, methods in paths.items()},
        "settings": {k: v for k, v in how.dump().items() if k in Training.deciding() and k != "seed"},
        "model": {"name": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters())},
        "data": digest(federation),
    }  # fmt: skip
    with locked(tuned.folder) if tuned.folder is not None else contextlib.nullcontext():
        if tuned.folder is not None and resume and is_over(tuned.folder):
            same_search(tuned.folder, about)
            return read_back(tuned)
        how = dataclasses.replace(how, seed=seed, evaluate_every=search.check_every)
        for method in (m for ms in paths.values() for m in ms):
            prepare(model, blind, method, how)  # refused before any value is trained
        legs = _Legs(model, blind, tuned, search, watch or Watch(), begun(tuned, resume, about), how)
        legs.all(paths)
        if legs.best is not None and legs.best.mean == -math.inf:
            lead = legs.best.run.metric
            raise ConfigError(
                f"metrics: no client has {lead} on its validation samples ({lead.lacks}); choose by another"
            )
        if tuned.status == "finished":
            legs.train_on(federation, {"out": tuned.folder, "resume": resume}, describe)
    return tuned


class _Leg(NamedTuple):
    """A leg that was trained to its end, with the metric of each client, higher is better."""

    row: dict[str, Any]
    scores: np.ndarray
    run: Result

    @property
    def mean(self) -> float:
        mean = mean_of(self.scores)
        return -math.inf if math.isnan(mean) else mean  # no client has the metric

    def drops(self, best: "_Leg") -> bool:
        """True where this leg is worse than the best one by more than two standard errors, paired over the clients."""
        d = best.scores - self.scores
        d = d[~np.isnan(d)]
        return not len(d) or d.mean() > 2 * (d.std(ddof=1) / math.sqrt(len(d)) if len(d) > 1 else 0.0)


@dataclasses.dataclass(eq=False)
class _Legs:
    """The legs of one call of `tune`, and the best of them."""

    model: nn.Module
    federation: Federation
    tuned: Tuned
    search: Search
    watch: Watch
    earlier: dict[tuple[str, float], dict[str, Any]] | None
    training: Training
    total: int = 0
    best: _Leg | None = None  # the first of equals
    leaders: dict[str, _Leg] = dataclasses.field(default_factory=dict[str, _Leg])  # the best leg of each regime
    first: tuple[float, tuple[Result, str]] | None = None  # value and leg that both regimes have

    def all(self, paths: Mapping[Any, Sequence[Contender]]) -> None:
        """Every regime's values, then their best on equal terms."""
        self.total = sum(map(len, paths.values()))
        for name, methods in paths.items():
            self.path(name, methods)
            if self.tuned.status == "interrupted":
                return
        self.level()

    def path(self, regime: str, methods: Sequence[Contender]) -> None:
        """Every value of one regime, one after another, and on beyond the first and the last while that is the best."""
        setting, before = self.tuned.setting, None
        ahead, tried = list(methods), list[float]()
        while ahead:
            method = ahead.pop(0)
            value = getattr(method, setting)
            insort(tried, value)
            self.watch.begin(regime, value, len(self.tuned.rows), self.total)
            start = before if regime == "warm" else None
            highest = self.leaders.get(regime)
            try:
                run, ended = self._leg(regime, method, value, start)
            except Diverged:
                self._add(regime, value, None, "diverged", start)
                if regime == "warm":
                    return
            else:
                row = self._add(regime, value, run, ended, start)
                if ended == "interrupted":
                    self.tuned.status = "interrupted"
                    return
                leg = self._leg_of(row, run)
                if regime == "warm" and self.search.stop_at_drop and highest is not None and leg.drops(highest):
                    return
                before = run
                if highest is None or leg.mean > highest.mean:
                    self.leaders[regime] = leg
            if not ahead and len(tried) < len(methods) + self.search.extend:
                ahead = self._beyond(regime, methods, tried)
                self.total += len(ahead)

    def _beyond(self, regime: str, methods: Sequence[Contender], tried: Sequence[float]) -> list[Contender]:
        """The method at a value beyond all that were tried, if the best of them is the first or the last."""
        setting, leader, ladder = self.tuned.setting, self.leaders.get(regime), self.tuned.ladders[regime]
        for up in (True,) if regime == "warm" else (True, False):
            if leader is not None and leader.row[setting] == tried[-1 if up else 0]:
                value = ladder.beyond(tried, up)
                if value is None:
                    return []
                with contextlib.suppress(ConfigError):  # no value of the method, or for these clients: it ends here
                    method = dataclasses.replace(methods[0], **{setting: value})
                    prepare(self.model, self.federation, method, self.training)
                    return [method]
        return []

    def level(self) -> None:
        """Train the best leg of each regime on to as many rounds as the other, or until it settles."""
        # the rounds of a warm path add up, those of a cold leg do not
        most = max((leg.run.rounds for leg in self.leaders.values()), default=0)
        for regime, leg in self.leaders.items():
            before = leg.run
            value = leg.row[self.tuned.setting]
            if before.rounds == most or leg.row["ended"] in ("tolerance", "stop"):
                continue
            self.watch.begin(regime, value, len(self.tuned.rows), self.total)
            try:
                run, ended = self.fit(self.federation, before.algorithm, most - before.rounds, before)
            except Diverged:
                continue
            self._add(regime, value, run, ended if ended == "interrupted" else LEVELLED, before)
            if ended == "interrupted":
                self.tuned.status = "interrupted"
                return

    def train_on(self, federation: Federation, more: dict[str, Any], describe: Describe | None) -> None:
        """The chosen model, and what the folder no longer needs."""
        tuned, folder = self.tuned, self.tuned.folder
        if self.search.train_on and self.best is not None:
            self.watch.begin("final", tuned.best[tuned.setting], self.total, self.total)
            start = self.best.run
            more |= {"describe": describe and describe(start.algorithm)}
            tuned.run = Run.of(self.fit(federation, start.algorithm, self.search.train_on, start, **more)[0])
            tuned.status = tuned.run.status
        if folder is not None and tuned.status == "finished":
            with contextlib.suppress(FileNotFoundError):
                move(folder / LEGS, folder / OVER)  # at once: a part of the legs is no search that can go on
            shutil.rmtree(folder / OVER, ignore_errors=True)

    def _leg(self, regime: str, method: Contender, value: float, start: Result | None) -> tuple[Result, str]:
        """One value trained, or read back."""
        if start is None and self.first is not None and self.first[0] == value:
            return self.first[1]
        done = (self.earlier or {}).get((regime, value), {})
        if done.get("ended") == "diverged":
            raise Diverged
        more: dict[str, Any] = {}
        if self.tuned.folder is not None:
            more = {"out": self.tuned.folder / LEGS / f"{regime}-{value!r}", "resume": self.earlier is not None}
        settled = done.get("ended") == "tolerance"
        run, ended = self.fit(self.federation, method, done["rounds"] if settled else self.search.rounds, start, **more)
        leg = run, "tolerance" if settled else ended
        self.first = self.first or (value, leg)
        return leg

    def fit(
        self, federation: Federation, method: Contender, rounds: int, start: Result | None, **more: Any
    ) -> tuple[Result, str]:
        """Train until the validation metric has settled, and say what ended it."""
        settled, early = _Settled(self.search.tolerance, self.search.patience), self.training.stop is not None
        callbacks = (*self.watch.callbacks(), *(() if early else (settled,)))
        how = dataclasses.replace(self.training, rounds=rounds)
        run = fit(self.model, federation, method, how, start=start, callbacks=callbacks, **more)
        if run.ended and not early:
            settled.look(run)  # a leg that had settled before it was resumed asks no callback
        if run.status == "interrupted":
            return run, "interrupted"
        return run, "stop" if early and run.ended else "tolerance" if settled.done else "rounds"

    def _leg_of(self, row: dict[str, Any], run: Result) -> _Leg:
        return _Leg(row, run.metric.merit(run.final["validation"][run.metric.name]), run)

    def _add(self, regime: str, value: float, run: Result | None, ended: str, start: Result | None) -> dict[str, Any]:
        """A row of the table; keeps the run while it may be chosen."""
        row: dict[str, Any] = {"regime": regime, self.tuned.setting: value, "validation": math.nan, "clusters": None}
        if self.federation.clusters is not None:
            row["ari"] = math.nan
        if run is None:
            row |= {"rounds": 0, "bytes": 0, "seconds": 0.0}
        else:
            self.tuned.metric = run.metric
            row["validation"] = mean_of(run.final["validation"][run.metric.name])
            clusters = run.clusters
            if clusters is not None:
                row["clusters"] = len(set(clusters.tolist()))
                if self.federation.clusters is not None:
                    row["ari"] = float(adjusted_rand_score(self.federation.clusters, clusters))
            done = run.rounds - (start.trained.t if start is not None else 0)
            row |= {"rounds": done, "bytes": sum(run.trained.ledger.totals()), "seconds": run.seconds}
        row |= {"ended": ended, "best": False}
        rows = self.tuned.rows
        rows.append(row)
        if run is not None and ended != "interrupted":
            new = self._leg_of(row, run)
            if self.best is None or new.mean > self.best.mean:
                self.best = new
                for r in rows:
                    r["best"] = r is row
        if self.tuned.folder is not None:
            write(self.tuned, self.tuned.folder)
        self.watch.end(row)
        return row


class _Settled:
    """A callback that ends a run when the validation metric stands still."""

    def __init__(self, tolerance: float, patience: int):
        self.tolerance, self.patience, self.done = tolerance, patience, False

    def __call__(self, progress: Progress) -> bool:
        if progress.records:
            self.look(progress.run)
        return self.done

    def look(self, run: Result) -> None:
        """At all looks of the run, for it may be one that was resumed."""
        values = [float(r[run.metric.name]) for r in run.records if r.split == "validation"]
        still = np.abs(np.diff(values[-self.patience - 1 :])) < self.tolerance
        self.done = len(still) == self.patience and bool(still.all())
