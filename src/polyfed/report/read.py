"""Reading run folders back: every report starts here, from files alone.

`read` takes run folders and comparison folders (runs/<label>-seed<k>/) and gives a `Study`.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from polyfed.base.arguments import checked
from polyfed.base.errors import ConfigError, RunError, closest
from polyfed.metrics import scores
from polyfed.metrics.metric import Metric
from polyfed.runs import schema as files

ALONE = ("own", "yardstick")  # the roles of what a site has without the others
SEEDED = re.compile(r"(?P<label>.+)-seed(?P<seed>-?\d+)")


@dataclass(frozen=True, eq=False)
class RunFiles:
    """One run folder.

    label: the method (with its setting) that the run belongs to     seed: of the run
    config, federation, summary: the files of those names; where the run was killed before it wrote a summary, one made
    from its last evaluation, with status "unfinished"     findings: report.json, what the method found
    metrics: one row per evaluated round and split     clients: one row per client, or None for an unfinished run
    """

    folder: Path
    label: str
    seed: int
    config: files.Config
    federation: files.About
    metrics: pd.DataFrame
    clients: pd.DataFrame | None
    findings: files.Findings
    summary: files.Summary

    @property
    def algorithm(self) -> str:
        return self.summary.algorithm

    @property
    def status(self) -> str:
        return self.summary.status

    @property
    def n(self) -> int:
        """Number of clients."""
        return len(self.federation.clients)

    @property
    def split(self) -> str:
        """The split that the run is judged on: test, or else validation, or else train."""
        return self.summary.split

    @property
    def role(self) -> str:
        """Whose model a client deploys: "own" (trained alone), "common" (one for all) or "personalised"; "yardstick"
        for what a site has without a torch model, "oracle" for what is not available in practice.

        A method that moved no byte has trained every client alone, whatever it is called.
        """
        s = self.summary
        if s.deploys in ("yardstick", "oracle"):
            return s.deploys
        if s.deploys == "own" or (s.rounds and not s.down_bytes + s.up_bytes):
            return "own"
        return "common" if s.deploys == "common" else "personalised"

    @cached_property
    def ledger(self) -> pd.DataFrame:
        """ledger.csv: one row per round and participant; read when first asked for."""
        return files.ledger(self.folder)

    def values(self, split: str | None = None, metric: str | None = None) -> dict[str, float]:
        """A metric of every client, by name, the one that leads by default; NaN where a client does not have it."""
        if self.clients is None:
            return {}
        column = f"{split or self.split}_{metric or self.summary.metric}"
        if column not in self.clients:
            raise RunError(f"{self.folder / 'clients.csv'}: there is no column {column!r}")
        values = [finite(v) for v in self.clients[column].tolist()]
        return dict(zip(self.clients["client"].tolist(), values, strict=True))

    def records(self, split: str) -> list[dict[str, Any]]:
        """The evaluations of one split, in order of rounds."""
        return [{str(k): v for k, v in row.items()} for row in self.metrics.to_dict("records") if row["split"] == split]

    def samples(self, split: str) -> np.ndarray:
        """[n] samples per client in a split."""
        return np.array([c.samples(split) for c in self.federation.clients])


@checked
@dataclass(frozen=True, eq=False)
class Study:
    """Runs that belong together: one data set, any number of methods and seeds. `read` makes one.

    Parameters
    ----------
    runs : sequence of RunFiles
        In the order read.
    paths : sequence of Path
        The folders that were asked for.
    """

    runs: Sequence[RunFiles]
    paths: Sequence[Path] = field(default_factory=tuple)

    @cached_property
    def labels(self) -> list[str]:
        """The methods: own models first, then the common ones, the personalised ones, and what they are measured by."""
        order = ("own", "common", "personalised", "yardstick", "oracle")
        return sorted(dict.fromkeys(r.label for r in self.runs), key=lambda label: order.index(self.role(label)))

    def of(self, label: str) -> list[RunFiles]:
        """All runs of one method.

        Parameters
        ----------
        label : str
            The method, one of `labels`.

        Returns
        -------
        list of RunFiles
            By seed.
        """
        return sorted((r for r in self.runs if r.label == label), key=lambda r: r.seed)

    def counted(self, label: str) -> list[RunFiles]:
        """The runs that enter means.

        Parameters
        ----------
        label : str
            The method, one of `labels`.

        Returns
        -------
        list of RunFiles
            The finished ones, or where none is, all that have results per client and did not diverge.
        """
        runs = [r for r in self.of(label) if r.clients is not None]
        finished = [r for r in runs if r.status == "finished"]
        return finished or [r for r in runs if r.status != "diverged"]

    def role(self, label: str) -> str:
        """Whose model a client deploys.

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

    @property
    def first(self) -> RunFiles:
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
        return list(dict.fromkeys(name for r in self.runs for name in r.federation.names))

    @cached_property
    def redrawn(self) -> bool:
        """Whether clients of one name hold different data under different seeds (the partition itself was redrawn)."""
        drawn = list({r.seed: r for r in self.runs}.values())
        total = [r.samples("train") + r.samples("validation") + r.samples("test") for r in drawn]
        if any(len(t) != len(total[0]) or (t != total[0]).any() for t in total):
            return True
        shares = [
            labels / labels.sum(1, keepdims=True).clip(1) for r in drawn if (labels := label_counts(r)) is not None
        ]
        return any(float(np.abs(s - shares[0]).sum(1).mean()) / 2 > 0.25 for s in shares)


def finite(value: Any) -> float:
    """A number that may be absent: NaN for anything that is not a finite number."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan


def label_counts(run: RunFiles) -> np.ndarray | None:
    """[n, classes] training samples per class, or None for regression."""
    rows = [c.labels for c in run.federation.clients]
    return None if any(r is None for r in rows) else np.array(rows, dtype=float)


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


def _run(folder: Path) -> RunFiles:
    config, federation = files.config(folder), files.federation(folder)
    records = files.metrics(folder)
    metrics = pd.DataFrame(records, columns=None if records else ["round", "split"])
    done = (folder / "summary.json").exists()
    summary = files.summary(folder) if done else _so_far(config, metrics)
    clients = files.clients(folder, federation.names) if done else None
    named = SEEDED.fullmatch(folder.name)
    label = named["label"] if named else summary.algorithm
    return RunFiles(folder, label, summary.seed, config, federation, metrics, clients, files.report(folder), summary)


def _so_far(config: files.Config, metrics: pd.DataFrame) -> files.Summary:
    """A summary of a run that was killed: its last evaluation."""
    asked = [files.Judge(metric=name).read for name in config.metrics]
    lead = asked[0] if asked else scores.leading(map(str, metrics))
    last = metrics.groupby("split").last().to_dict("index") if len(metrics) else {}
    final = {
        str(split): {"mean": finite(row.get(lead.name)), "std": row.get("std"), "worst": row.get("worst")}
        for split, row in last.items()
    }
    cost = metrics.iloc[-1].to_dict() if len(metrics) else {}
    size = config.model.get("parameters")
    return files.Summary.model_validate({
        "status": "unfinished", "algorithm": config.method, "seed": config.seed, "rounds": int(cost.get("round", 0)),
        **files.Judge.of(lead).model_dump(), "higher_is_better": lead.better == "higher", "final": final,
        "parameters": size if isinstance(size, int) else None, "seconds": finite(cost.get("seconds")),
        **{key: int(finite(cost.get(key) or 0)) for key in ("down_bytes", "up_bytes")},
    })  # fmt: skip


def described(about: dict[str, Any]) -> RunFiles:
    """A federation, as `Federation.describe` has it, as a run that has not begun."""
    config, metrics = files.Config(), pd.DataFrame(columns=["round", "split"])
    summary = _so_far(config, metrics)
    found = files.About.model_validate(about)
    return RunFiles(Path(), "", found.seed or 0, config, found, metrics, None, files.Findings(), summary)


def _apart(runs: list[RunFiles]) -> list[RunFiles]:
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
        if (r.federation.dataset, r.summary.metric) != (first.federation.dataset, study.metric.name):
            raise RunError(f"{r.folder} and {first.folder} are on different data or metrics: report them apart")
        same = seeds.setdefault(r.seed, r)
        digests = {x.config.data.get("digest") for x in (r, same)} - {None}
        if _sizes(r) != _sizes(same) or len(digests) > 1:
            raise RunError(
                f"{r.folder} and {same.folder} have the same seed ({r.seed}) but not the same clients and samples: "
                "they cannot be compared, report them apart"
            )


def _sizes(run: RunFiles) -> list[tuple[Any, ...]]:
    return [(c.name, c.train, c.test) for c in run.federation.clients]
