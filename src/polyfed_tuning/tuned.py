"""Result of a search by `tune`, and its files: tune.toml, tune.csv and tune.svg, and its legs until it is over."""

import contextlib
import csv
import math
import shutil
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import tomli_w
from matplotlib.figure import Figure

from polyfed import report
from polyfed.base.errors import ConfigError, RunError
from polyfed.base.system import flush
from polyfed.metrics.metric import Metric
from polyfed.metrics.scores import LOSS
from polyfed.report.words import LEVELLED
from polyfed.runs import schema
from polyfed.runs.folder import RunFolder
from polyfed.runs.ownership import unsealed
from polyfed.runs.result import Result
from polyfed_tuning.figure import tune_figure
from polyfed_tuning.ladder import Ladder

LEGS = "legs"  # folder of the legs of a search that is not over
OVER = ".legs-over"  # the same while they are removed
SEARCH = "tune.toml"  # what the search is, so that the same one is continued


@dataclass(eq=False)
class Tuned:
    """Result of `tune`.

    Parameters
    ----------
    setting : str
        Name of the setting.
    metric : Metric
        The leading metric.
    rows : list of dict
        One per value and regime, in the order of training: regime; the value, under the setting's name; validation: the
        metric, mean over clients; clusters: their number (None for a method without); ari: agreement with the
        federation's own clusters, where known (not used for choosing); rounds, bytes, seconds: of this leg alone;
        ended: "tolerance", "stop", "rounds", "diverged" or "interrupted"; best: True for the choice.
    run : Result or None
        The chosen model, trained on; None without a finished leg or further training.
    status : str
        "finished" or "interrupted".
    folder : Path or None
        Folder of the search.
    ladders : dict
        {regime: the values given, and the setting's limits}.
    """

    setting: str = "lam"
    metric: Metric = LOSS
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    run: Result | None = None
    status: str = "finished"
    folder: Path | None = None
    ladders: dict[Any, Ladder] = field(default_factory=dict[Any, Ladder])

    @property
    def table(self) -> pd.DataFrame:
        """One row per value and regime."""
        return pd.DataFrame(self.rows)

    @property
    def best(self) -> dict[str, Any]:
        """The chosen row. Raises KeyError when no leg was finished."""
        rows = [row for row in self.rows if row["best"]]
        if not rows:
            raise KeyError(f"no {self.setting} was trained to its end")
        return rows[0]

    @property
    def edges(self) -> int:
        """1 where nothing above or below the chosen value was tried, though the setting goes on there; else 0."""
        best = next((row for row in self.rows if row["best"]), None)
        if best is None:
            return 0
        tried = [row[self.setting] for row in self.rows if row["regime"] == best["regime"]]
        return int(self.ladders[best["regime"]].at_edge(tried, best[self.setting]))

    @property
    def costs(self) -> dict[str, dict[str, float]]:
        """Per regime: rounds, bytes and seconds that its search took."""
        return {
            name: {k: sum(row[k] for row in self.rows if row["regime"] == name) for k in ("rounds", "bytes", "seconds")}
            for name in dict.fromkeys(row["regime"] for row in self.rows)
        }

    def figure(self) -> Figure:
        """Validation metric and number of clusters against the setting, a line per regime."""
        return tune_figure(self.rows, self.metric, self.setting)


def begun(tuned: Tuned, resume: bool, about: dict[str, Any]) -> dict[tuple[str, float], dict[str, Any]] | None:
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
        RunFolder(folder).head(SEARCH, about)
        return {} if resume else None
    same_search(folder, about)
    if not (folder / "tune.csv").is_file():
        return {}  # it did not come to the end of its first value
    rows = [row for row in _rows(folder) if row["ended"] not in ("interrupted", LEVELLED)]
    if rows and tuned.setting not in rows[0]:
        raise RunError(f"cannot resume {folder}: {tuned.setting} is not what was tuned there")
    return {(r["regime"], float(r[tuned.setting])): {"ended": r["ended"], "rounds": int(r["rounds"])} for r in rows}


def same_search(folder: Path, about: dict[str, Any]) -> None:
    """Refuse to continue a search with other settings."""
    before, now = unsealed(folder / SEARCH), tomllib.loads(tomli_w.dumps(about))
    for key in {**before, **now}:
        if before.get(key) != now.get(key):
            raise RunError(
                f"cannot continue the search in {folder}: {key} is {now.get(key)!r} and was {before.get(key)!r}; "
                "choose another folder"
            )


def is_over(folder: Path) -> bool:
    """True where the search in the folder is finished; its legs are then gone."""
    return (folder / SEARCH).exists() and (folder / "tune.csv").exists() and not (folder / LEGS).exists()


def _rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "tune.csv").open(encoding="utf-8", newline="") as f:
        return list(csv.DictReader(f))


def read_back(tuned: Tuned) -> Tuned:
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
        tuned.metric = schema.summary(tuned.folder).leads
    if not (tuned.folder / "tune.svg").exists():
        write(tuned, tuned.folder)
    return tuned


def write(tuned: Tuned, folder: Path) -> None:
    """tune.csv, and tune.svg once two legs have a metric."""
    RunFolder(folder).write("tune.csv", tuned.table.to_csv(index=False, lineterminator="\n"))
    flush(folder)
    if sum(math.isfinite(row["validation"]) for row in tuned.rows) > 1:
        report.save(tuned.figure(), folder / "tune.svg")
