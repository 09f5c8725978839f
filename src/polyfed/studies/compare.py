"""compare: several methods on the same data, seed by seed: one partition, test split and initial model for all methods.

A comparison folder holds comparison.toml, runs/<label>-seed<k>/ and report.html; it can be interrupted and resumed.
"""

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from torch import nn

from polyfed import report as reports
from polyfed.base.arguments import answer, checked
from polyfed.base.errors import ConfigError
from polyfed.base.settings import found
from polyfed.base.system import DEVICE
from polyfed.core.algorithm import Contender
from polyfed.data.federation import Federation
from polyfed.metrics.metric import Metric, mean_of
from polyfed.metrics.scores import LOSS
from polyfed.models.start import Start, drawn
from polyfed.runs.config import Method, label
from polyfed.runs.folder import RunFolder
from polyfed.runs.ownership import locked
from polyfed.runs.rehearsal import sending
from polyfed.runs.released import each_as_released
from polyfed.runs.result import Result
from polyfed.runs.trainer import prepare
from polyfed.runs.training import MANY, SEED, Training, training_of
from polyfed.runs.watching import Callback
from polyfed.studies.jobs import Done, Job, Watch, execute, job_of

LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=,-]*")


@dataclass(eq=False)
class Comparison:
    """The results of `compare`, one per method and seed.

    Parameters
    ----------
    results : list of Done
        The results, in the order of training.
    status : str
        "finished" or "interrupted".
    folder : Path or None
        The comparison folder.
    """

    results: list[Done] = field(default_factory=list[Done])
    status: str = "finished"
    folder: Path | None = None

    def __repr__(self) -> str:
        labels = dict.fromkeys(r.label for r in self.results)
        return f"<Comparison of {', '.join(labels)}: {len(self.results)} runs, {self.status}>"

    def _repr_html_(self) -> str:
        """Show in a notebook the answer, where the comparison has a folder, and the table of methods."""
        answer = (
            ""
            if self.folder is None or not self.finished
            else f"<p>{escape(reports.answer(reports.read(self.folder)))}</p>"
        )
        return f"<div><p><b>{escape(repr(self)[1:-1])}</b></p>{answer}{self.table.to_html(index=False, border=0)}</div>"

    @property
    def runs(self) -> dict[tuple[str, int], Result]:
        """(label, seed) -> its Result, for the runs that were trained (and kept) by this call."""
        return {(r.label, r.seed): r.run for r in self.results if r.run is not None}

    @property
    def failures(self) -> list[Done]:
        """The runs that diverged."""
        return [r for r in self.results if r.status == "diverged"]

    @property
    def finished(self) -> list[Done]:
        """The runs that were finished."""
        return [r for r in self.results if r.status == "finished" and r.clients is not None]

    @property
    def metric(self) -> Metric:
        """The metric that leads."""
        return next((r.summary.leads for r in self.finished if r.summary), LOSS)

    @property
    def split(self) -> str:
        """The split that methods are judged on: test, or the nearest thing there is."""
        return next((r.summary.split for r in self.finished if r.summary), "test")

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
        """One row per method: runs, mean and std over seeds of the clients' mean (none where a run diverged), the worst
        client, bytes, seconds.
        """
        rows: list[dict[str, Any]] = []
        split = self.split
        for name in dict.fromkeys(r.label for r in self.results):
            runs = [r.summary for r in self.finished if r.label == name and r.summary is not None]
            ends = {k: [getattr(s.final[split], k) for s in runs if split in s.final] for k in ("mean", "worst")}
            everywhere = [s.final["global"].mean for s in runs if "global" in s.final]
            failed = sum(r.label == name for r in self.failures)  # seeds on which it diverged do not leave its mean
            means = np.array([v for v in ends["mean"] if np.isfinite(v)] if not failed else [])
            rows.append(
                {
                    "label": name,
                    "runs": len(runs),
                    "diverged": failed,
                    f"{'train_' * (split == 'train')}{self.metric.name}": means.mean() if len(means) else np.nan,
                    "std": means.std(ddof=1) if len(means) > 1 else np.nan,
                    "worst_client": mean_of(np.array(ends["worst"])) if runs and not failed else np.nan,
                    **({f"global_{self.metric.name}": mean_of(np.array(everywhere))} if everywhere else {}),
                    "down_bytes": np.mean([s.down_bytes for s in runs]) if runs else np.nan,
                    "up_bytes": np.mean([s.up_bytes for s in runs]) if runs else np.nan,
                    "seconds": np.mean([s.seconds for s in runs]) if runs else np.nan,
                }
            )
        return pd.DataFrame(rows)


@checked
def compare(
    model: Start,
    federation: Federation | Callable[[int], Federation],
    algorithms: Sequence[Contender] | Mapping[str, Contender],
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
    """Train every algorithm with every seed, on the same data and from the same start, after checking all settings.

    A run that diverges does not stop the others; it is in `failures`. Ctrl-C finishes and saves the round in hand.

    Parameters
    ----------
    model : nn.Module or callable
        As for `fit`; a class or a function is called for every seed, a module is the start of all.
    federation : Federation or callable
        As for `fit`, or a function of the seed, such as its partition.
    algorithms : sequence of Algorithm or Yardstick, or dict
        A list, or {label: algorithm}.
    training : Training or None
        As for `fit`; its seed is not used.
    callbacks : sequence of callable
        As for `fit`.
    seeds : int or sequence of int
        Their number (0, 1, ...), or the seeds.
    out : str, Path or None
        The comparison folder; without it nothing is written.
    resume : bool
        Read back finished runs in `out`, and continue an unfinished one.
    keep : bool
        Keep every Run. False: keep only its numbers; then runs of one thread each are trained side by side, a process
        per core (on Linux, in a folder, without callbacks).
    watch : Watch or None
        Callbacks for the progress of the comparison.
    config : dict or None
        Contents of comparison.toml.
    describe : callable or None
        label -> further tables of that run's config.toml.
    report : bool
        Write report.html into the folder.
    **settings
        Settings for `fit`, such as rounds=100, batch_size=None.

    Returns
    -------
    Comparison
        The results, trained or read back.
    """
    methods = _labelled(algorithms)
    which = seeds_of(seeds)
    watch = watch or Watch()
    folder = Path(out) if out is not None else None
    how = training_of(training, settings)
    if how.privacy is not None:
        how = replace(how, privacy=how.privacy.shared(len(which) * sum(map(sending, methods.values()))))
    pairs = each_as_released(methods, how)
    made = Cached(model, federation)

    def job(label: str, seed: int, algorithm: Contender, how: Training) -> Job:
        def tables() -> Mapping[str, Any] | None:
            return dict(answer("describe", describe, label, takes=Mapping[str, Any])) if describe else None

        parts = partial(made, seed)  # all methods of a seed have the same start
        return job_of(folder, label, seed, parts, algorithm, how, resume, callbacks, tables)

    jobs = [job(label, seed, *pair) for seed in which for label, pair in pairs.items()]
    results: dict[Job, Done] = {}
    for algorithm, its in pairs.values() if folder is None or not folder.exists() else ():
        prepare(*made(which[0]), algorithm, replace(its, seed=which[0]))  # refused before a folder is made
    alone = folder is None or bool(callbacks) or how.engine != "local"
    with locked(folder) if folder is not None else contextlib.nullcontext():
        if folder is not None:
            head = config or config_of(methods, which, how.dump())
            RunFolder(folder).head("comparison.toml", dict(head), "runs")
        with contextlib.suppress(KeyboardInterrupt):
            for one, done in execute(jobs, watch, resume, how.rounds, keep, alone):
                results[one] = done
        comparison = Comparison([results[job] for job in jobs if job in results], folder=folder)
        if len(results) < len(jobs) or any(r.status == "interrupted" for r in comparison.results):
            comparison.status = "interrupted"
        elif report and folder is not None and comparison.finished:
            reports.write_report([folder], folder / "report.html")
    return comparison


class Cached:
    """Model and federation of the present seed."""

    def __init__(self, model: Any, federation: Any):
        self.model, self.federation = model, federation
        self.seed: int | None = None

    def __call__(self, seed: int) -> tuple[nn.Module, Federation]:
        if self.seed != seed:
            f, m = self.federation, self.model
            self._federation = f if isinstance(f, Federation) else answer("federation", f, seed, takes=Federation)
            self._model = drawn(m, seed)
            self.seed = seed
        return self._model, self._federation


def seeds_of(seeds: int | Sequence[int]) -> list[int]:
    """Read seeds: how many (0, 1, ...), or which. Raises ConfigError for none, and for one that is given twice."""
    which = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not which or len(set(which)) < len(which):
        raise ConfigError(f"seeds: {found(seeds, 'a number of at least 1, or a list of distinct integers')}")
    return which


def _labelled(algorithms: Sequence[Contender] | Mapping[str, Contender]) -> dict[str, Contender]:
    if isinstance(algorithms, Mapping):
        for name in algorithms:
            if not LABEL.fullmatch(name) or DEVICE.fullmatch(f"{name}-seed0"):
                raise ConfigError(f"label {name!r}: expected letters, digits and . _ + = , - (it names a folder)")
        out = dict(algorithms)
    else:
        out = {m.label: m.algorithm for m in label([Method(a) for a in algorithms])}
    if len({name.lower() for name in out}) < max(1, len(out)):
        raise ConfigError(f"labels: found {', '.join(out) or 'none'}, expected some that differ in more than case")
    return out


def config_of(methods: Mapping[str, Contender], seeds: list[int], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Contents of comparison.toml for a comparison made from Python; settings: by the keys of a file."""
    return {**settings, "seeds": seeds, "algorithms": [Method(a).table() | {"label": n} for n, a in methods.items()]}
