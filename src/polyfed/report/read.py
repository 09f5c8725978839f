"""Run folders read back: every report starts here, from files alone."""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from polyfed.base.arguments import checked
from polyfed.base.errors import RunError
from polyfed.report.verdicts import Study
from polyfed.runs.numbers import Numbers

SEEDED = re.compile(r"(?P<label>.+)-seed(?P<seed>-?\d+)")


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
    given = [Path(p) for p in ([paths] if isinstance(paths, str | Path) else paths)]
    if not given:
        raise RunError("no run folder was given")
    folders = [f for p in given for f in _folders(p)]
    runs = [_run(f) for f in dict.fromkeys(folders)]
    study = Study(_apart(runs), given)
    _check(study)
    return study


def _folders(path: Path) -> list[Path]:
    if not path.is_dir():
        raise RunError(f"{path}: there is no such folder")
    if (path / "config.toml").exists():
        return [path]
    if (path / "comparison.toml").exists() or (path / "runs").is_dir():
        inside = path / "runs"
        runs = sorted((f for f in inside.iterdir() if f.is_dir()), key=_natural) if inside.is_dir() else []
        if not runs:
            raise RunError(f"{path}: a comparison without a single run in {inside}")
        return runs
    raise RunError(f"{path}: neither a run folder (no config.toml) nor a comparison folder (no runs/)")


def _natural(folder: Path) -> list[Any]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", folder.name) if part]


def _run(folder: Path) -> Numbers:
    named = SEEDED.fullmatch(folder.name)
    return Numbers.of(folder, named["label"] if named else None)


def _apart(runs: list[Numbers]) -> list[Numbers]:
    """Give runs that would share label and seed their folder's name as label."""
    counts: dict[tuple[str, int], int] = {}
    for r in runs:
        counts[r.label, r.seed] = counts.get((r.label, r.seed), 0) + 1
    taken = {r.label for r in runs}
    renamed = []
    for r in runs:
        label = r.label
        if counts[r.label, r.seed] > 1:
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
