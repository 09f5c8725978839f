"""compare: several methods on the same data, seed by seed. One seed means one partition, one test split and one
initial model for all methods, so that their differences are paired.

A comparison folder holds comparison.toml, runs/<label>-seed<k>/ and report.html; it can be interrupted and resumed.
Runs that are too small for two threads are trained side by side, which changes only how long they take.
"""

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import tomli_w
from torch import nn

from polyfed.base import checkpoint
from polyfed.base.arguments import answer, checked
from polyfed.base.errors import ConfigError, Diverged, RunError
from polyfed.base.settings import found
from polyfed.core.algorithm import Algorithm
from polyfed.data.federation import Federation
from polyfed.metrics.metric import Metric, mean_of
from polyfed.metrics.scores import LOSS, read
from polyfed.report.read import finite
from polyfed.runs import schema as reading
from polyfed.runs.config import Method, label
from polyfed.runs.fit import fit
from polyfed.runs.folder import RunFolder, summary
from polyfed.runs.ownership import flush, locked, sealed
from polyfed.runs.result import Run
from polyfed.runs.trainer import prepare
from polyfed.runs.training import MANY, SEED, Training, training_of
from polyfed.runs.watching import Callback
from polyfed.studies import parallel

LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=,-]*")


@dataclass(frozen=True, eq=False)
class Result:
    """One run of a comparison.

    status: "finished", "diverged" or "interrupted"     message: why it did not finish
    summary, clients: what summary.json and clients.csv of a run folder hold; None when there is nothing
    run: the Run itself, unless it was finished before and only read back, or not kept
    """

    label: str
    seed: int
    status: str
    summary: Mapping[str, Any] | None = None
    clients: pd.DataFrame | None = None
    message: str = ""
    folder: Path | None = None
    run: Run | None = None


class Watch:
    """Hooks into a comparison. Override what you need."""

    def start(self, total: int) -> None:
        """A comparison of `total` runs starts."""

    def begin(self, label: str, seed: int) -> None:
        """A run starts; others may not be over."""

    def callbacks(self) -> Sequence[Callback]:
        """Passed on to `fit` for every run that is trained in this process."""
        return ()

    def end(self, result: Result, resumed: bool) -> None:
        """A run is over. resumed: it had been finished earlier and was only read back."""


@dataclass(eq=False)
class Comparison:
    """The results of `compare`, one per method and seed.

    Parameters
    ----------
    results : list of Result
        In the order of training.
    status : str
        "finished" or "interrupted".
    folder : Path or None
        Where they are kept.
    """

    results: list[Result] = field(default_factory=list[Result])
    status: str = "finished"
    folder: Path | None = None

    def __repr__(self) -> str:
        labels = dict.fromkeys(r.label for r in self.results)
        return f"<Comparison of {', '.join(labels)}: {len(self.results)} runs, {self.status}>"

    @property
    def runs(self) -> dict[tuple[str, int], Run]:
        """(label, seed) -> Run, for the runs that were trained (and kept) by this call."""
        return {(r.label, r.seed): r.run for r in self.results if r.run is not None}

    @property
    def failures(self) -> list[Result]:
        """The runs that diverged."""
        return [r for r in self.results if r.status == "diverged"]

    @property
    def finished(self) -> list[Result]:
        """The runs that were finished."""
        return [r for r in self.results if r.status == "finished" and r.clients is not None]

    @property
    def metric(self) -> Metric:
        """The metric that leads."""
        return next((read(r.summary) for r in self.finished if r.summary), LOSS)

    @property
    def split(self) -> str:
        """The split that methods are judged on: test, or the nearest thing there is."""
        found = [r.summary for r in self.finished if r.summary]
        final: dict[str, Any] = found[0]["final"] if found else {}
        return next((s for s in ("test", "validation", "train") if s in final), "test")

    @cached_property
    def clients(self) -> pd.DataFrame:
        """One row per run and client: label, seed, and the columns of `Run.clients`."""
        parts = [
            pd.concat([pd.DataFrame({"label": r.label, "seed": r.seed}, index=c.index), c], axis=1)
            for r in self.finished
            if (c := r.clients) is not None
        ]
        return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per method: runs, mean and std over seeds of the clients' mean, the worst client, bytes, seconds."""
        rows: list[dict[str, Any]] = []
        split = self.split
        for name in dict.fromkeys(r.label for r in self.results):
            runs = [r.summary for r in self.finished if r.label == name and r.summary is not None]
            ends = {k: [finite(s["final"].get(split, {}).get(k)) for s in runs] for k in ("mean", "worst")}
            means = np.array([v for v in ends["mean"] if np.isfinite(v)])
            rows.append(
                {
                    "label": name,
                    "runs": len(runs),
                    "diverged": sum(r.label == name for r in self.failures),
                    self.metric.name: means.mean() if len(means) else np.nan,
                    "std": means.std(ddof=1) if len(means) > 1 else np.nan,
                    "worst_client": mean_of(np.array(ends["worst"])) if runs else np.nan,
                    "down_bytes": np.mean([s["down_bytes"] for s in runs]) if runs else np.nan,
                    "up_bytes": np.mean([s["up_bytes"] for s in runs]) if runs else np.nan,
                    "seconds": np.mean([s["seconds"] for s in runs]) if runs else np.nan,
                }
            )
        return pd.DataFrame(rows)


@checked
def compare(
    model: nn.Module | Callable[[int], nn.Module],
    federation: Federation | Callable[[int], Federation],
    algorithms: Sequence[Algorithm] | Mapping[str, Algorithm],
    training: Training | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    seeds: MANY | Sequence[SEED] = 5,
    out: str | Path | None = None,
    resume: bool = False,
    keep: bool = True,
    watch: Watch | None = None,
    config: Mapping[str, Any] | None = None,
    describe: Callable[[str], Mapping[str, Any]] | None = None,
    report: bool = True,
    **settings: Any,
) -> Comparison:
    """Train every algorithm with every seed, on the same data and from the same start.

    A run that diverges does not stop the others; it is in `failures`. After Ctrl-C the round in hand is finished and
    saved, and the status is "interrupted".

    Parameters
    ----------
    model : nn.Module or callable
        As for `fit`, or a function of the seed.
    federation : Federation or callable
        As for `fit`, or a function of the seed, which is how the partition comes to vary with the seed.
    algorithms : sequence of Algorithm, or dict
        A list, or {label: algorithm}.
    training : Training or None
        As for `fit`; its seed is not used.
    callbacks : sequence of callable
        As for `fit`.
    seeds : int or sequence of int
        How many (0, 1, ...), or which.
    out : str, Path or None
        The comparison folder; without it nothing is written.
    resume : bool
        Runs that are finished in `out` are read back, an unfinished one is continued.
    keep : bool
        Keep every Run. False: keep only its numbers; then runs that take one thread each are trained side by
        side, in as many processes as there are cores (on Linux, in a folder, without callbacks).
    watch : Watch or None
        Called as the comparison proceeds.
    config : dict or None
        Contents of comparison.toml.
    describe : callable or None
        label -> further tables of that run's config.toml.
    report : bool
        Whether to write report.html into the folder.
    **settings
        Passed to `fit`, such as rounds=100, batch_size=None.

    Returns
    -------
    Comparison
        What has been trained or read back.

    Raises
    ------
    ConfigError
        A setting is wrong; nothing has been trained yet.
    """
    methods = _labelled(algorithms)
    which = seeds_of(seeds)
    watch = watch or Watch()
    folder = Path(out) if out is not None else None
    how = training_of(training, settings)
    common = _Common(Cached(model, federation), resume, describe, how, tuple(callbacks))
    jobs = [
        _Job(name, seed, algorithm, folder / "runs" / f"{name}-seed{seed}" if folder is not None else None)
        for seed in which
        for name, algorithm in methods.items()
    ]
    found: dict[_Job, Result] = {}
    for algorithm in methods.values() if folder is None or not folder.exists() else ():
        prepare(*common.made(which[0]), algorithm, replace(how, seed=which[0]))  # refused before a folder is made
    with locked(folder) if folder is not None else contextlib.nullcontext():
        if folder is not None:
            _begin(folder, config or config_of(methods, which, how.dump()))
        with contextlib.suppress(KeyboardInterrupt):
            _all(jobs, found, common, keep, watch)
        comparison = Comparison([found[job] for job in jobs if job in found], folder=folder)
        if len(found) < len(jobs) or any(r.status == "interrupted" for r in comparison.results):
            comparison.status = "interrupted"
        elif report and folder is not None and comparison.finished:
            from polyfed.report import write_report

            write_report([folder], folder / "report.html")
    return comparison


class _Job(NamedTuple):
    """One run of a comparison."""

    label: str
    seed: int
    algorithm: Algorithm
    place: Path | None


def _all(jobs: Sequence[_Job], found: dict[_Job, Result], common: "_Common", keep: bool, watch: Watch) -> None:
    """Every job read back or trained: one after another, until one shows that the others may run side by side."""

    def begin(job: _Job) -> None:
        common.made(job.seed)  # here, so that all methods of a seed have the same start also side by side
        watch.begin(job.label, job.seed)

    def end(job: _Job, result: Result, resumed: bool = False) -> None:
        found[job] = result if keep else replace(result, run=None)
        watch.end(found[job], resumed)

    watch.start(len(jobs))
    for job in jobs:
        if (before := common.before(job)) is not None:
            end(job, before, resumed=True)
    todo, room = [job for job in jobs if job not in found], 1
    alone = keep or common.callbacks or any(job.place is None for job in jobs)
    while todo and room == 1:
        job = todo.pop(0)
        begin(job)
        result = common.here(job, watch.callbacks())
        end(job, result)
        if result.status == "interrupted":
            return
        alone = alone or common.training.engine != "local"
        if result.run is not None and not alone and result.run.loop.engine.plan.workers == 1:
            room = parallel.room(result.run.loop.task.device.type)
    tasks = [partial(common.apart, job) for job in todo]
    side_by_side = parallel.side_by_side(tasks, room, lambda k: begin(todo[k]), needs=lambda k: todo[k].seed)
    for which, told in side_by_side:
        end(todo[which], common.result(todo[which], *told))


class Cached:
    """Model and federation of the present seed."""

    def __init__(self, model: Any, federation: Any):
        self.model, self.federation, self.seed = model, federation, None

    def __call__(self, seed: int) -> tuple[nn.Module, Federation]:
        if self.seed != seed:
            f, m = self.federation, self.model
            self._federation = f if isinstance(f, Federation) else answer("federation", f, seed, takes=Federation)
            self._model = m if isinstance(m, nn.Module) else answer("model", m, seed, takes=nn.Module)
            self.seed = seed
        return self._model, self._federation


@dataclass
class _Common:
    """What the jobs of a comparison have in common."""

    made: Cached
    resume: bool
    describe: Callable[[str], Mapping[str, Any]] | None
    training: Training
    callbacks: tuple[Callback, ...]

    def before(self, job: _Job) -> Result | None:
        """The result of a job that was finished earlier."""
        if not self.resume or job.place is None:
            return None
        return read_result(job.place, job.label, job.seed, self.training.rounds)

    def train(self, job: _Job, callbacks: Sequence[Callback] = ()) -> Run:
        """Train one job."""
        model, federation = self.made(job.seed)
        tables = self.describe and dict(answer("describe", self.describe, job.label, takes=Mapping[str, Any]))
        return fit(
            model, federation, job.algorithm, replace(self.training, seed=job.seed), out=job.place, resume=self.resume,
            callbacks=(*self.callbacks, *callbacks), describe=tables,
        )  # fmt: skip

    def here(self, job: _Job, callbacks: Sequence[Callback]) -> Result:
        """Train one job in this process."""
        told = partial(Result, job.label, job.seed, folder=job.place)
        try:
            run = self.train(job, callbacks)
        except Diverged as e:
            return told("diverged", message=str(e))
        except KeyboardInterrupt:
            return told("interrupted")
        return told(run.status, summary=summary(run), clients=run.clients, run=run)

    def apart(self, job: _Job) -> tuple[str, str]:
        """Train one job in a process of its own: what its folder does not hold, (status, message)."""
        try:
            run = self.train(job)
        except Diverged as e:
            return "diverged", str(e)
        if run.status == "interrupted":
            raise KeyboardInterrupt  # the others stop too
        return run.status, ""

    def result(self, job: _Job, status: str, message: str) -> Result:
        """What `apart` left."""
        if status == "finished" and job.place is not None and (found := read_result(job.place, job.label, job.seed)):
            return found
        return Result(job.label, job.seed, status, message=message, folder=job.place)


def read_result(place: Path, name: str, seed: int, rounds: int | None = None) -> Result | None:
    """The result of a run folder whose run is over, or None when it has to be (re)started or continued."""
    try:
        found = reading.summary(place)
        if found["status"] not in ("finished", "diverged"):
            return None
        if found["status"] == "diverged":
            return Result(name, seed, "diverged", found, None, f"diverged after round {found['rounds']}", place)
        if rounds is not None and found["rounds"] < rounds and found.get("deploys") != "yardstick":  # which has none
            return None
        names = [c["name"] for c in reading.federation(place)["clients"]]
        return Result(name, seed, "finished", found, reading.clients(place, names), folder=place)
    except RunError:
        return None


def seeds_of(seeds: int | Sequence[int]) -> list[int]:
    """How many (0, 1, ...), or which. Raises ConfigError for none, and for one that is given twice."""
    which = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not which or len(set(which)) < len(which):
        raise ConfigError(f"seeds: {found(seeds, 'a number of at least 1, or a list of distinct integers')}")
    return which


def _labelled(algorithms: Sequence[Algorithm] | Mapping[str, Algorithm]) -> dict[str, Algorithm]:
    if isinstance(algorithms, Mapping):
        for name in algorithms:
            if not LABEL.fullmatch(name):
                raise ConfigError(f"label {name!r}: expected letters, digits and . _ + = , - (it names a folder)")
        out = dict(algorithms)
    else:
        out = {m.label: m.algorithm for m in label([Method(a) for a in algorithms])}
    if not out:
        raise ConfigError("algorithms: found none, expected at least one")
    return out


def config_of(methods: Mapping[str, Algorithm], seeds: list[int], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Contents of comparison.toml for a comparison made from Python; settings: by the keys of a file."""
    return {**settings, "seeds": seeds, "algorithms": [Method(a).table() | {"label": n} for n, a in methods.items()]}


def _begin(folder: Path, config: Mapping[str, Any]) -> None:
    try:
        (folder / "runs").mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise RunError(f"cannot make the folder {folder}: {checkpoint.reason(e)}") from e
    RunFolder(folder).write("comparison.toml", sealed(tomli_w.dumps(dict(config))))
    flush(folder)
