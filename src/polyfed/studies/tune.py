"""tune: one numeric setting of a method by validation. The warm-up path of FPFC (arXiv 2211.04218, section "Warmup"),
which starts every lambda from the solution of the last one, or separate tuning, with every value from the common start.
Test data are never looked at before the value is chosen.
"""

import contextlib
import csv
import dataclasses
import math
import os
import shutil
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import pandas as pd
import tomli_w
from sklearn.metrics import (  # pyright: ignore[reportMissingTypeStubs]
    adjusted_rand_score,  # pyright: ignore[reportUnknownVariableType]
)
from torch import nn

from polyfed import report
from polyfed.algorithms.fpfc import FPFC
from polyfed.base.arguments import checked
from polyfed.base.errors import ConfigError, Diverged, RunError, closest
from polyfed.base.settings import is_mapping, settings_of
from polyfed.compute.split import Split
from polyfed.core.algorithm import Contender
from polyfed.data.federation import LEARNT, Federation
from polyfed.metrics.metric import Metric, having, mean_of
from polyfed.metrics.scores import LOSS
from polyfed.report.words import LEVELLED
from polyfed.runs import schema as reading
from polyfed.runs.config import Method
from polyfed.runs.fit import fit
from polyfed.runs.folder import RunFolder
from polyfed.runs.ownership import flush, locked, sealed, unsealed
from polyfed.runs.result import Result
from polyfed.runs.resume import digest
from polyfed.runs.training import Search, Training, training_of
from polyfed.runs.watching import Callback, Progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Regime = Literal["warm", "cold"]
REGIMES: tuple[Regime, ...] = ("warm", "cold")
GRIDS: dict[tuple[str, str], dict[Regime, tuple[float, ...]]] = {  # the first setting of a method is its default
    ("fpfc", "lam"): {  # the paper's for its synthetic data, and a finer one: from a common start values are lower
        "warm": (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5),
        "cold": (0.0, 0.2, 0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 1.0),
    },
    ("fedacs", "quantile"): {"cold": (0.0, 1 / 2, 2 / 3, 3 / 4, 4 / 5, 5 / 6, 9 / 10)},  # 1 - 1/G: G groups of one size
}
LEGS = "legs"  # folder of the legs of a search that is not over
OVER = ".legs-over"  # the same while they are removed
SEARCH = "tune.toml"  # what the search is, so that the same one is continued
VALIDATION = 0.2  # share of the training samples, where the federation holds out none
LEAKED = (
    "validation samples were held out after inputs had been scaled or filled in by them; "
    "partition(validation_fraction=0.2) holds them out before"
)


@dataclass(eq=False)
class Tuned:
    """What `tune` found.

    Parameters
    ----------
    setting : str
        The name of what was tuned.
    metric : Metric
        The leading metric.
    rows : list of dict
        One per value and regime, in the order of training: regime; an entry named as the setting; validation: the
        metric, mean over clients; clusters: how many (None where the method has none); ari: agreement with the
        federation's own clusters, where it has some (not used for choosing); rounds, bytes, seconds: of this leg alone;
        ended: "tolerance", "rounds", "diverged" or "interrupted"; best: whether it is the chosen one.
    run : Result or None
        The chosen model, trained on; None when no leg was finished or there was no further training.
    status : str
        "finished" or "interrupted".
    folder : Path or None
        Where it is kept.
    """

    setting: str = "lam"
    metric: Metric = LOSS
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    run: Result | None = None
    status: str = "finished"
    folder: Path | None = None

    @property
    def table(self) -> pd.DataFrame:
        """One row per value and regime."""
        return pd.DataFrame(self.rows)

    @property
    def best(self) -> dict[str, Any]:
        """The chosen row. Raises KeyError when no leg was finished."""
        found = [row for row in self.rows if row["best"]]
        if not found:
            raise KeyError(f"no {self.setting} was trained to its end")
        return found[0]

    @property
    def costs(self) -> dict[str, dict[str, float]]:
        """Per regime: rounds, bytes and seconds that its search took."""
        return {
            name: {k: sum(row[k] for row in self.rows if row["regime"] == name) for k in ("rounds", "bytes", "seconds")}
            for name in dict.fromkeys(row["regime"] for row in self.rows)
        }

    def figure(self) -> "Figure":
        """Validation metric and number of clusters against the setting, a line per regime."""
        return report.tune_figure(self.rows, self.metric, self.setting)


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
    model: nn.Module,
    federation: Federation,
    algorithm: Contender | None = None,
    training: Training | None = None,
    search: Search | None = None,
    *,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    watch: Watch | None = None,
    describe: Callable[[Contender], dict[str, Any]] | None = None,
    **settings: Any,
) -> Tuned:
    """Choose one numeric setting of a method by validation data, then train the chosen model on.

    A federation without validation samples has `VALIDATION` of each client's training samples held out, keyed by (seed,
    client); where inputs were scaled or filled in by training samples, a note of the run says that these had a part in
    it, and ``partition(validation_fraction=0.2)`` holds them out before. The metric is the mean over clients on
    validation data; the federation that is trained on while tuning has no test samples at all, they come back for the
    final run. A leg that diverges is a row without a metric, and ends a
    warm path. After Ctrl-C the status is "interrupted", and the table holds what is done; with a folder, every leg is a
    run folder in `out`/legs until the search is over.

    A warm path starts each value from the solution of the last one, the method's state kept; a cold one starts each
    from the common start. With both, the best value of each is trained on to equal numbers of rounds (or until it
    settles) before they are compared. A value is done when the metric changes by less than `tolerance` at `patience`
    looks in a row. A warm path ends at a value that is worse than the best before it by more than two standard errors,
    paired over the clients, and goes on by the grid's last step while its last value is the best. "simplest" chooses
    the fewest clusters among the values whose metric is within one standard error of the best.

    Parameters
    ----------
    model : nn.Module
        As for `fit`.
    federation : Federation
        As for `fit`.
    algorithm : Algorithm, Yardstick or None
        A method, such as FPFC(nu=0.5), which is the default; its own value of the setting is not used.
    training : Training or None
        As for `fit`.
    search : Search or None
        How values are tried.
    seed : int
        As for `fit`.
    out : str, Path or None
        Folder for the final run, with tune.csv and tune.svg among its files.
    resume : bool
        Go on with the interrupted search in `out`, if there is one: finished values are read back, the one in hand is
        continued; of a search that is over the table is read back, without `run`.
    watch : Watch or None
        Called as the search proceeds.
    describe : callable or None
        The method with its value -> further tables for config.toml.
    **settings
        Those of `Search` and of `Training` by keyword, such as grid=[0, 0.5, 1], fraction=0.3; `rounds` is the largest
        number for one value.

    Returns
    -------
    Tuned
        The table of values, and the final run.

    Raises
    ------
    ConfigError
        A setting is wrong; nothing has been trained yet. Then all that `fit` raises.
    """
    algorithm = algorithm if algorithm is not None else FPFC()
    known = [s.name for s in settings_of(Search)]
    how = training_of(training, {k: v for k, v in settings.items() if k not in known})
    if "evaluate_every" in settings:
        raise ConfigError("evaluate_every: set by tune; leave it out")
    search = dataclasses.replace(search or Search(), **{k: v for k, v in settings.items() if k in known})
    setting = search.setting or default_setting(algorithm)
    regime = search.regime or ("both" if "warm" in GRIDS.get((algorithm.name, setting), {}) else "cold")
    paths = {name: _methods(algorithm, setting, search.grid, name) for name in _regimes(regime)}
    federation = held_out(federation, seed)
    test = federation.test
    blind = dataclasses.replace(federation, test=Split(test.x[:0], test.y[:0], np.zeros_like(test.offsets)))
    tuned = Tuned(setting, folder=Path(out) if out is not None else None)
    about = {
        **search.dump(), "setting": setting, "algorithm": Method(algorithm).table(), "seed": seed,
        "grid": {name: [float(getattr(m, setting)) for m in methods] for name, methods in paths.items()},
        "settings": {k: v for k, v in how.dump().items() if k in Training.deciding() and k != "seed"},
        "model": {"name": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters())},
        "data": digest(federation),
    }  # fmt: skip
    with locked(tuned.folder) if tuned.folder is not None else contextlib.nullcontext():
        if tuned.folder is not None and resume and is_over(tuned.folder):
            _same_search(tuned.folder, about)
            return _read_back(tuned)
        how = dataclasses.replace(how, seed=seed, evaluate_every=search.check_every)
        legs = _Legs(model, blind, tuned, search, watch or Watch(), _known(tuned, resume, about), how)
        legs.all(paths)
        if legs.kept and legs.chosen.mean == -math.inf:
            lead = legs.chosen.run.metric
            raise ConfigError(
                f"metrics: no client has {lead} on its validation samples ({lead.lacks}); choose by another"
            )
        if tuned.status == "finished":
            _train_on(tuned, legs, federation, describe, resume)
    return tuned


def held_out(federation: Federation, seed: int) -> Federation:
    """A federation with validation samples: its own, or `VALIDATION` of its training samples.

    Parameters
    ----------
    federation : Federation
        The clients and their data.
    seed : int
        Of the draw.

    Returns
    -------
    Federation
        With a note where what is held out had a part in preparing the inputs.
    """
    if federation.validation is not None and len(federation.validation.x):
        return federation
    cut = dataclasses.replace(federation, validation=None).with_validation(VALIDATION, seed)
    leaked = any(key in cut.meta for key in LEARNT)
    return dataclasses.replace(cut, meta={**cut.meta, "notes": [*cut.notes, LEAKED]}) if leaked else cut


def _train_on(
    tuned: Tuned,
    search: "_Legs",
    federation: Federation,
    describe: Callable[[Contender], dict[str, Any]] | None,
    resume: bool,
) -> None:
    """The chosen model, and what the folder no longer needs."""
    rounds = search.search.train_on
    if rounds and search.kept:
        search.watch.begin("final", tuned.best[tuned.setting], search.total, search.total)
        start = search.chosen.run
        tables = describe(start.algorithm) if describe is not None else None
        more = {"out": tuned.folder, "resume": resume, "describe": tables}
        tuned.run = search.fit(federation, start.algorithm, rounds, start, **more)[0]
        tuned.status = tuned.run.status
    if tuned.folder is not None and tuned.status == "finished":
        legs = tuned.folder / LEGS
        with contextlib.suppress(FileNotFoundError):
            os.replace(legs, tuned.folder / OVER)  # at once: a part of the legs is no search that can go on
        shutil.rmtree(tuned.folder / OVER, ignore_errors=True)


class _Kept(NamedTuple):
    """A leg that may still be chosen. scores: [n] the metric per client, higher is better.

    The rule of one standard error: with d_i = scores_i of the best leg minus those of another one, validation cannot
    tell the two when mean(d) <= std(d) / sqrt(n), paired over the n clients. Among such legs, the fewest clusters. Legs
    that another one beats in both the mean and the number of clusters are not kept.

    The rule is blind to a loss of one client alone, however large: then both sides are d_i / n. Where single clients
    may be clusters of their own, choose the best.
    """

    row: dict[str, Any]
    scores: np.ndarray
    run: Result

    @property
    def mean(self) -> float:
        mean = mean_of(self.scores)
        return -math.inf if math.isnan(mean) else mean  # no client has the metric

    @property
    def clusters(self) -> int:
        return self.row["clusters"] or 0  # a method either reports clusters at every leg, or at none

    def beats(self, other: "_Kept") -> bool:
        return self.mean >= other.mean and self.clusters <= other.clusters

    def like(self, best: "_Kept", errors: float = 1.0) -> bool:
        """Whether this leg is worse than the best one by at most this many standard errors."""
        d = best.scores - self.scores
        d = d[~np.isnan(d)]
        return len(d) > 0 and d.mean() <= errors * (d.std(ddof=1) / math.sqrt(len(d)) if len(d) > 1 else 0.0)


class _Legs:
    """The legs of one call of `tune`, and those that may be chosen."""

    def __init__(
        self,
        model: nn.Module,
        federation: Federation,
        tuned: Tuned,
        search: Search,
        watch: Watch,
        known: dict[tuple[str, float], dict[str, Any]] | None,
        training: Training,
    ):
        self.model, self.federation, self.search, self.watch, self.training = model, federation, search, watch, training
        self.rounds, self.simplest = search.rounds, search.choose == "simplest"
        self.tuned, self.known, self.total = tuned, known, 0
        self.kept: list[_Kept] = []
        self.leaders: dict[str, _Kept] = {}  # the best leg of each regime
        self._first: tuple[float, tuple[Result, str]] | None = None  # a leg of both regimes

    @property
    def chosen(self) -> _Kept:
        """The leg that was found."""
        return self._by_rule(self.kept)

    def _by_rule(self, legs: Sequence[_Kept]) -> _Kept:
        """The best leg, or the simplest that validation cannot tell from it; the first of equals."""
        best = max(legs, key=lambda k: k.mean)
        if not self.simplest:
            return best
        return min((k for k in legs if k is best or k.like(best)), key=lambda k: k.clusters)

    def all(self, paths: Mapping[str, Sequence[Contender]]) -> None:
        """Every regime's values, then their best on equal terms."""
        self.total = sum(map(len, paths.values()))
        for name, methods in paths.items():
            self.path(name, methods)
            if self.tuned.status == "interrupted":
                return
        self.level()

    def path(self, regime: str, methods: Sequence[Contender]) -> None:
        """Every value of one regime, one after another, and a warm path beyond the last while that is the best."""
        setting, before, extend = self.tuned.setting, None, self.search.extend
        highest: _Kept | None = None
        ahead = list(methods)
        values = [getattr(method, setting) for method in methods]
        step = values[-1] - values[-2] if len(values) > 1 else values[-1]
        while ahead:
            method = ahead.pop(0)
            value = getattr(method, setting)
            self.watch.begin(regime, value, len(self.tuned.rows), self.total)
            start = before if regime == "warm" else None
            try:
                run, ended = self._leg(regime, method, value, start)
            except Diverged:
                self._add(regime, value, None, "diverged", start)
                if regime == "warm":
                    return
                continue
            row = self._add(regime, value, run, ended, start)
            if ended == "interrupted":
                self.tuned.status = "interrupted"
                return
            leg = self._leg_of(row, run)
            if regime == "warm" and self.search.stop_at_drop and highest is not None and not leg.like(highest, 2):
                return
            before = run
            if highest is None or leg.mean > highest.mean:
                highest = self.leaders[regime] = leg
            leads = highest is leg and leg.mean >= max(k.mean for k in self.kept)
            if regime == "warm" and not ahead and leads and extend and step > 0:
                ahead.append(dataclasses.replace(method, **{setting: value + step}))
                extend, self.total = extend - 1, self.total + 1

    def level(self) -> None:
        """Train one leg of each regime, by the rule, on to as many rounds as the other, or until it settles, before one
        is chosen: the rounds of a warm path add up, those of a cold leg do not.
        """
        legs = {
            regime: self._by_rule([best, *(k for k in self.kept if k is not best and k.row["regime"] == regime)])
            for regime, best in self.leaders.items()
        }
        most = max((leg.run.rounds for leg in legs.values()), default=0)
        for regime, leg in legs.items():
            before = leg.run
            value = leg.row[self.tuned.setting]
            if before.rounds == most or leg.row["ended"] == "tolerance":
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

    def _leg(self, regime: str, method: Contender, value: float, start: Result | None) -> tuple[Result, str]:
        """One value trained, or read back."""
        if start is None and self._first is not None and self._first[0] == value:
            return self._first[1]
        done = (self.known or {}).get((regime, value), {})
        if done.get("ended") == "diverged":
            raise Diverged
        more: dict[str, Any] = {}
        if self.tuned.folder is not None:
            more = {"out": self.tuned.folder / LEGS / f"{regime}-{value!r}", "resume": self.known is not None}
        settled = done.get("ended") == "tolerance"
        run, ended = self.fit(self.federation, method, done["rounds"] if settled else self.rounds, start, **more)
        found = run, "tolerance" if settled else ended
        self._first = self._first or (value, found)
        return found

    def fit(
        self, federation: Federation, method: Contender, rounds: int, start: Result | None, **more: Any
    ) -> tuple[Result, str]:
        """Train until the validation metric has settled, and say what ended it."""
        settled = _Settled(self.search.tolerance, self.search.patience)
        callbacks = (*self.watch.callbacks(), settled)
        how = dataclasses.replace(self.training, rounds=rounds)
        run = fit(self.model, federation, method, how, start=start, callbacks=callbacks, **more)
        if run.ended:
            settled.look(run)  # a leg that had settled before it was resumed asks no callback
        return run, "interrupted" if run.status == "interrupted" else "tolerance" if settled.done else "rounds"

    def _leg_of(self, row: dict[str, Any], run: Result) -> _Kept:
        return _Kept(row, run.metric.merit(having(run.metric, run.final["validation"])), run)

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
            found = run.clusters
            if found is not None:
                row["clusters"] = len(set(found.tolist()))
                if self.federation.clusters is not None:
                    row["ari"] = float(adjusted_rand_score(self.federation.clusters, found))
            done = run.rounds - (start.rounds if start is not None else 0)
            row |= {"rounds": done, "bytes": sum(run.trained.ledger.totals()), "seconds": run.seconds}
        row |= {"ended": ended, "best": False}
        rows = self.tuned.rows
        rows.append(row)
        if run is not None and ended != "interrupted":
            new = self._leg_of(row, run)
            if not any(k.beats(new) for k in self.kept):
                self.kept = [k for k in self.kept if not new.beats(k)] + [new]
            chosen = self.chosen.row
            for r in rows:
                r["best"] = r is chosen
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
        values = [float(r[run.metric.name]) for r in run.records if r["split"] == "validation"]
        still = np.abs(np.diff(values[-self.patience - 1 :])) < self.tolerance
        self.done = len(still) == self.patience and bool(still.all())


def _known(tuned: Tuned, resume: bool, about: dict[str, Any]) -> dict[tuple[str, float], dict[str, Any]] | None:
    """The finished rows of the interrupted search in the folder; None for a new one. Refuses a used folder."""
    folder = tuned.folder
    if folder is None:
        if resume:
            raise ConfigError("resume: needs the folder (out=...) of an interrupted search")
        return None
    if not resume or not (folder / SEARCH).exists():
        RunFolder(folder).refuse_used()
        if any((folder / name).exists() for name in (LEGS, SEARCH, "tune.csv")):
            raise RunError(f"{folder} holds a search; resume=True continues it, or give another folder")
        _begin(folder, about)
        return {} if resume else None
    _same_search(folder, about)
    if not (folder / "tune.csv").is_file():
        return {}  # it did not come to the end of its first value
    rows = [row for row in _rows(folder) if row["ended"] not in ("interrupted", LEVELLED)]
    if rows and tuned.setting not in rows[0]:
        raise RunError(f"cannot resume {folder}: {tuned.setting} is not what was tuned there")
    return {(r["regime"], float(r[tuned.setting])): {"ended": r["ended"], "rounds": int(r["rounds"])} for r in rows}


def _begin(folder: Path, about: dict[str, Any]) -> None:
    RunFolder(folder).write(SEARCH, sealed(tomli_w.dumps(about)))
    flush(folder)


def _same_search(folder: Path, about: dict[str, Any]) -> None:
    """Refuse to continue a search with other settings."""
    before, now = unsealed(folder / SEARCH), tomllib.loads(tomli_w.dumps(about))
    for key in {**before, **now}:
        if before.get(key) != now.get(key):
            raise RunError(
                f"cannot continue the search in {folder}: {key} is {now.get(key)!r} and was {before.get(key)!r}; "
                "choose another folder"
            )


def is_over(folder: Path) -> bool:
    """Whether the search in the folder is finished; its legs are then gone."""
    return (folder / SEARCH).exists() and (folder / "tune.csv").exists() and not (folder / LEGS).exists()


def _rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "tune.csv").open(newline="") as f:
        return list(csv.DictReader(f))


def _read_back(tuned: Tuned) -> Tuned:
    """The table of a search that is over, and its figure where that is missing. Without the final Run."""
    assert tuned.folder is not None
    shutil.rmtree(tuned.folder / OVER, ignore_errors=True)
    numbers = {"validation": float, tuned.setting: float, "rounds": int, "bytes": int, "seconds": float, "ari": float}
    for row in _rows(tuned.folder):
        typed: dict[str, Any] = dict(row)
        typed |= {k: read(row[k] or "nan") for k, read in numbers.items() if k in row}
        typed |= {"clusters": int(float(row["clusters"])) if row["clusters"] else None, "best": row["best"] == "True"}
        tuned.rows.append(typed)
    with contextlib.suppress(RunError):
        tuned.metric = reading.summary(tuned.folder).leads
    if not (tuned.folder / "tune.svg").exists():
        write(tuned, tuned.folder)
    return tuned


def default_setting(algorithm: Contender) -> str:
    """The setting that is tuned where none is named."""
    return next((setting for method, setting in GRIDS if method == algorithm.name), "lam")


def _regimes(regime: str) -> tuple[Regime, ...]:
    if regime == "both":
        return REGIMES
    if regime not in REGIMES:
        raise ConfigError(f"regime: found {regime!r}, expected warm, cold or both")
    return tuple(r for r in REGIMES if r == regime)


def _methods(algorithm: Contender, setting: str, grid: Any, regime: Regime) -> list[Contender]:
    """The method once per value of the regime's grid, which makes it check them all."""
    types = {f.name: f.type for f in dataclasses.fields(algorithm)}
    if setting not in types:
        raise ConfigError(f"algorithm: {algorithm.name} has no setting {setting} to tune{closest(setting, types)}")
    kinds = get_args(types[setting]) or (types[setting],)
    if not {int, float} & set(kinds):
        raise ConfigError(f"setting: {setting} of {algorithm.name} is not a number")
    given: Any = grid.get(regime) if is_mapping(grid) else grid
    usual: tuple[Any, ...] | None = GRIDS.get((algorithm.name, setting), {}).get(regime)
    values = usual if given is None else tuple(given)
    if values is None:
        raise ConfigError(f"grid: {setting} of {algorithm.name} has no default for a {regime} start; give one")
    if not values or any(isinstance(v, bool) or not isinstance(v, int | float) for v in values):
        raise ConfigError(f"grid: found {list(values)!r} for {regime}, expected one number or more")
    if list(values) != sorted(set(values)):
        raise ConfigError(f"grid: found {list(values)!r} for {regime}, expected rising values")
    if float not in kinds and any(v != int(v) for v in values):
        raise ConfigError(f"grid: found {list(values)!r} for {regime}, expected integers")
    kind = float if float in kinds else int
    return [dataclasses.replace(algorithm, **{setting: kind(v)}) for v in values]


def write(tuned: Tuned, folder: Path) -> None:
    """tune.csv, and tune.svg once two legs have a metric."""
    RunFolder(folder).write("tune.csv", tuned.table.to_csv(index=False))
    flush(folder)
    if sum(math.isfinite(row["validation"]) for row in tuned.rows) > 1:
        report.save(tuned.figure(), folder / "tune.svg")
