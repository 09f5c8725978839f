"""Run folders read back: every report starts here, from files alone."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from polyfed.base.arguments import checked
from polyfed.base.errors import ConfigError, RunError, closest
from polyfed.metrics.metric import Metric
from polyfed.report.verdicts import Verdicts
from polyfed.runs.numbers import Numbers

ALONE = ("own", "yardstick")  # the roles of what a site has without the others
SEEDED = re.compile(r"(?P<label>.+)-seed(?P<seed>-?\d+)")


@checked
@dataclass(frozen=True, eq=False)
class Study:
    """Runs that belong together: one data set, any number of methods and seeds. `read` makes one.

    Parameters
    ----------
    runs : sequence of Numbers
        The runs, in the order read.
    paths : sequence of Path
        The folders asked for.
    """

    runs: Sequence[Numbers]
    paths: Sequence[Path] = field(default_factory=tuple)

    @cached_property
    def labels(self) -> list[str]:
        """The methods: own models first, then the common ones, the personalised ones, and what they are measured by."""
        order = ("own", "common", "personalised", "yardstick", "oracle")
        return sorted(dict.fromkeys(r.label for r in self.runs), key=lambda label: order.index(self.role(label)))

    def of(self, label: str) -> list[Numbers]:
        """All runs of one method.

        Parameters
        ----------
        label : str
            The method, one of `labels`.

        Returns
        -------
        list of Numbers
            The runs, by seed.
        """
        return sorted((r for r in self.runs if r.label == label), key=lambda r: r.seed)

    def counted(self, label: str) -> list[Numbers]:
        """The runs that enter means.

        Parameters
        ----------
        label : str
            The method, one of `labels`.

        Returns
        -------
        list of Numbers
            The finished ones, or where none is, all that have results per client and did not diverge.
        """
        runs = [r for r in self.of(label) if r.clients is not None]
        finished = [r for r in runs if r.status == "finished"]
        return finished or [r for r in runs if r.status != "diverged"]

    def role(self, label: str) -> str:
        """The kind of model that a client deploys.

        Parameters
        ----------
        label : str
            The method, one of `labels`.

        Returns
        -------
        str
            "own" (trained alone), "common" (one for all) or "personalised"; of a finished run where there is one.
        """
        runs = self.counted(label) or self.of(label)
        if not runs:
            known = sorted({run.label for run in self.runs})
            raise ConfigError(f"no method {label!r}{closest(label, known)}; there are {', '.join(known)}")
        return runs[0].role

    @cached_property
    def verdicts(self) -> Verdicts:
        """Gains, intervals, who gains, and what would be enough to tell: each worked out once."""
        return Verdicts(self)

    @property
    def first(self) -> Numbers:
        """The first run."""
        return self.runs[0]

    @property
    def metric(self) -> Metric:
        """The metric that leads."""
        return self.first.summary.leads

    @property
    def metrics(self) -> list[Metric]:
        """All metrics that the runs were judged by, the one that leads first."""
        return self.first.summary.judges

    @property
    def split(self) -> str:
        """The split that the runs are judged on: test, or else validation, or else train."""
        return self.first.split

    @property
    def seeds(self) -> list[int]:
        """The seeds of all runs, sorted."""
        return sorted({r.seed for r in self.runs})

    @cached_property
    def names(self) -> list[str]:
        """The clients' names, in the federation's order."""
        return list(dict.fromkeys(name for r in self.runs for name in r.about.names))

    @cached_property
    def redrawn(self) -> bool:
        """True where the partition was redrawn: clients of one name hold other data under another seed."""
        drawn = list({r.seed: r for r in self.runs}.values())
        total = [r.samples("train") + r.samples("validation") + r.samples("test") for r in drawn]
        if any(len(t) != len(total[0]) or (t != total[0]).any() for t in total):
            return True
        shares = [labels / labels.sum(1, keepdims=True).clip(1) for r in drawn if (labels := r.labels) is not None]
        return any(float(np.abs(s - shares[0]).sum(1).mean()) / 2 > 0.25 for s in shares)


@checked
def read(paths: str | Path | Iterable[str | Path]) -> Study:
    """Read a run folder, a comparison folder, or several of either.

    Parameters
    ----------
    paths : path or iterable of paths
        The folders.

    Returns
    -------
    Study
        Their runs.

    Raises
    ------
    RunError
        A folder or file is missing or damaged, or the runs do not belong together: another data set, another metric, or
        other clients or samples under the same seed.
    """
    asked = [Path(p) for p in ([paths] if isinstance(paths, str | Path) else paths)]
    if not asked:
        raise RunError("no run folder was given")
    folders = [f for p in asked for f in _folders(p)]
    runs = [_run(f) for f in dict.fromkeys(folders)]
    study = Study(_apart(runs), asked)
    _check(study)
    return study


def _folders(path: Path) -> list[Path]:
    if not path.is_dir():
        raise RunError(f"{path}: there is no such folder")
    if (path / "config.toml").exists():
        return [path]
    if (path / "comparison.toml").exists() or (path / "runs").is_dir():
        inside = path / "runs"
        found = sorted((f for f in inside.iterdir() if f.is_dir()), key=_natural) if inside.is_dir() else []
        if not found:
            raise RunError(f"{path}: a comparison without a single run in {inside}")
        return found
    raise RunError(f"{path}: neither a run folder (no config.toml) nor a comparison folder (no runs/)")


def _natural(folder: Path) -> list[Any]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", folder.name) if part]


def _run(folder: Path) -> Numbers:
    named = SEEDED.fullmatch(folder.name)
    return Numbers.of(folder, named["label"] if named else None)


def _apart(runs: list[Numbers]) -> list[Numbers]:
    """Give runs that would share label and seed their folder's name as label."""
    seen: dict[tuple[str, int], int] = {}
    for r in runs:
        seen[r.label, r.seed] = seen.get((r.label, r.seed), 0) + 1
    taken = {r.label for r in runs}
    renamed = []
    for r in runs:
        label = r.label
        if seen[r.label, r.seed] > 1:
            label = r.folder.name if r.folder.name not in taken else f"{r.folder.parent.name}/{r.folder.name}"
        renamed.append(replace(r, label=label))
    return renamed


def _check(study: Study) -> None:
    first, seeds = study.first, {}
    for r in study.runs:
        if (r.about.dataset, r.summary.metric) != (first.about.dataset, study.metric.name):
            raise RunError(f"{r.folder} and {first.folder} are on different data or metrics: report them apart")
        same = seeds.setdefault(r.seed, r)
        digests = {x.config.data.digest for x in (r, same)} - {None}
        if _sizes(r) != _sizes(same) or len(digests) > 1:
            raise RunError(
                f"{r.folder} and {same.folder} have the same seed ({r.seed}) but not the same clients and samples: "
                "they cannot be compared, report them apart"
            )


def _sizes(run: Numbers) -> list[tuple[Any, ...]]:
    return [(c.name, c.train, c.test) for c in run.about.clients]
