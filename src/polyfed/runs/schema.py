"""The files of a run folder, read back and checked: each function gives what `folder` wrote, or RunError in one line
that names the file, what was found and what was expected. Everything that reads a run folder goes through here.
"""

import json
import math
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt, TypeAdapter, ValidationError

from polyfed.base.cells import unmarked
from polyfed.base.errors import RunError
from polyfed.metrics.metric import BETTER, Metric

Table = dict[str, Any]
Number = FiniteFloat | None  # None: was not finite
SPLITS = ("train_", "validation_", "test_")  # columns of clients.csv that begin so hold numbers: samples and metrics


class _File(BaseModel):
    """Known keys must have the type given; others are kept as they are."""

    model_config = ConfigDict(extra="allow", strict=True)


class _Config(_File):
    algorithm: Table = {}
    data: Table = {}
    model: Table = {}
    versions: Table = {}
    metrics: list[str] = []
    seed: NonNegativeInt = 0


class _Client(_File):
    name: str
    train: NonNegativeInt | None = None
    validation: NonNegativeInt | None = None
    test: NonNegativeInt | None = None
    labels: list[NonNegativeInt] | None = None


class _Federation(_File):
    clients: list[_Client] = Field(min_length=1)
    dataset: str | None = None
    partition: str | None = None
    classes: NonNegativeInt | None
    inputs: list[NonNegativeInt] | None = None
    outputs: NonNegativeInt | None = None
    clusters: list[int] | None = None
    preparation: Table | None = None
    notes: list[str] = []


class _Metric(_File):
    metric: str
    unit: str = ""
    better: str = Field("higher", pattern=BETTER)


class _Summary(_File):
    status: Literal["finished", "interrupted", "diverged"]
    algorithm: str
    seed: NonNegativeInt
    rounds: NonNegativeInt
    metric: str
    higher_is_better: bool
    unit: str = ""
    better: str = Field("higher", pattern=BETTER)
    final: dict[str, dict[str, Number]]
    metrics: list[_Metric] = []
    scores: dict[str, dict[str, dict[str, Number]]] = {}
    down_bytes: NonNegativeInt
    up_bytes: NonNegativeInt
    seconds: Number = None
    parameters: NonNegativeInt | None = None
    described_by: Number = None
    common: dict[str, Number] | None = None
    deploys: Literal["common", "own", "personal", "yardstick", "oracle"] | None = None
    steps: Number = None
    digest: dict[str, str] | None = None


class _Report(_File):
    clusters: list[int] | None = None
    mixing: list[list[Number]] | None = None


class _Record(_File):
    round: int
    split: str
    clusters: int | None = None
    assigned: list[int] | None = None
    # metrics, their spread, bytes and seconds
    __pydantic_extra__: dict[str, Number]  # pyright: ignore[reportIncompatibleVariableOverride]


def config(folder: Path, name: str = "config.toml") -> Table:
    """The settings of a run."""
    path = folder / name
    try:
        return _checked(path, tomllib.loads(text(path)), _Config)
    except (ValueError, RecursionError) as e:  # not TOML; integers of thousands of digits
        raise RunError(f"{path}: not valid TOML ({_line(e)})") from None


def federation(folder: Path) -> Table:
    """Who took part: at least one client, names that differ, labels and clusters of fitting lengths."""
    path = folder / "federation.json"
    found = _checked(path, _json(path), _Federation)
    clients = found["clients"]
    if len({c["name"] for c in clients}) < len(clients):
        raise RunError(f"{path}: two clients have the same name")
    if len({None if (labels := c.get("labels")) is None else len(labels) for c in clients}) > 1:
        raise RunError(f"{path}: 'labels' differ in length between clients")
    if len(found.get("clusters") or clients) != len(clients):
        raise RunError(f"{path}: {len(found['clusters'])} clusters are given for {len(clients)} clients")
    return found


def summary(folder: Path) -> Table:
    """How the run ended."""
    return _checked(folder / "summary.json", _json(folder / "summary.json"), _Summary)


def report(folder: Path) -> Table:
    """What the method found; {} where nothing was written."""
    path = folder / "report.json"
    found = _checked(path, _json(path), _Report) if path.exists() else {}
    if len({len(row) for row in found.get("mixing") or ()}) > 1:
        raise RunError(f"{path}: the rows of 'mixing' differ in length")
    return found


def metrics(folder: Path) -> list[Table]:
    """The evaluations, in order; the last line may be cut off if the run was killed."""
    path = folder / "metrics.jsonl"
    lines, rows = text(path).splitlines(), []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as e:
            if number == len(lines):
                break
            raise RunError(f"{path}: line {number} is not valid JSON ({_line(e)})") from None
        rows.append(_checked(path, row, _Record, f"line {number}, "))
    return rows


def clients(folder: Path, names: Sequence[str] | None = None) -> pd.DataFrame:
    """One row per client, in the order of `names` if given; text where a number belongs is refused."""
    path = folder / "clients.csv"
    found = _csv(path, ("client",), lambda c: c == "rounds" or c.endswith("_bytes") or c.startswith(SPLITS))
    found["client"] = found["client"].fillna("").map(unmarked)
    if names is not None and found["client"].tolist() != list(names):
        raise RunError(
            f"{path}: its {len(found)} rows are not the {len(names)} clients of federation.json, in their order"
        )
    return found


def scores(folder: Path) -> dict[str, np.ndarray] | None:
    """What every test sample adds to its client's metrics (see `runs.folder.scores`); None: not written."""
    path = folder / "scores.safetensors"
    if not path.exists():
        return None
    found = tensors(path, kind="np")
    if missing := {"counts", "id"} - found.keys():
        raise RunError(f"{path}: the tensor {min(missing)!r} is missing")
    counts = found["counts"]
    bad = {name: t.shape for name, t in found.items() if name != "counts" and t.shape != (counts.sum(),)}
    if counts.ndim != 1 or counts.dtype.kind != "i" or (counts < 0).any() or bad:
        raise RunError(f"{path}: its tensors do not belong together, expected one number per test sample")
    return found


def samples(scores: dict[str, np.ndarray]) -> np.ndarray:
    """[N, 2] the number and the class of every test sample, of `scores`; class -1: of none, or not known."""
    return np.c_[scores["id"], scores.get("class", np.full(len(scores["id"]), -1))]


def added(scores: dict[str, np.ndarray], metric: Metric) -> np.ndarray:
    """[N] what every test sample adds to a metric, of `scores`; NaN: not known."""
    known = metric.sign and metric.name in scores and ("class" in scores or not metric.classwise)
    return scores[metric.name].astype(float) if known else np.full(len(scores["id"]), math.nan)


def ledger(folder: Path) -> pd.DataFrame:
    """One row per round and participant."""
    columns = ("round", "client", "exchanges", "down_bytes", "up_bytes")
    return _csv(folder / "ledger.csv", columns, lambda c: c != "client")


def tensors(path: Path, row: int | None = None, kind: Literal["pt", "np"] = "pt") -> Table:
    """The named tensors of a safetensors file. row: only this row of each   kind: torch's, or numpy's, which need no
    torch"""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, kind) as f:
            return {k: f.get_tensor(k) if row is None else f.get_slice(k)[row : row + 1][0] for k in f.keys()}  # noqa: SIM118
    except (OSError, ValueError, KeyError, IndexError, TypeError, SafetensorError) as e:
        raise RunError(f"{path}: not a readable safetensors file ({_line(e)})") from None


def text(path: Path) -> str:
    """A text file."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RunError(f"{path}: this file of the run is missing") from None
    except (OSError, ValueError) as e:
        raise RunError(f"{path}: cannot be read ({_line(e)})") from None


def _json(path: Path) -> Any:
    try:
        return json.loads(text(path))
    except json.JSONDecodeError as e:
        raise RunError(f"{path}: not valid JSON (line {e.lineno}: {e.msg})") from None
    except (ValueError, RecursionError) as e:  # numbers of thousands of digits, thousands of brackets
        raise RunError(f"{path}: not valid JSON ({_line(e)})") from None


def _checked(path: Path, value: Any, model: type[_File], where: str = "") -> Table:
    """`value`, after checking it against `model`."""
    if not isinstance(value, dict):
        raise RunError(f"{path}: {where}found {type(value).__name__}, expected a table of keys and values")
    try:
        TypeAdapter(model).validate_python(value)
    except ValidationError as e:
        first = e.errors()[0]
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            raise RunError(f"{path}: {where}the key {key!r} is missing") from None
        shown = repr(first["input"])
        shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
        raise RunError(f"{path}: {where}{key}: found {shown}; {_line(ValueError(first['msg']))}") from None
    return value


def _csv(path: Path, columns: tuple[str, ...], numeric: Callable[[str], bool]) -> pd.DataFrame:
    if not path.exists():
        text(path)
    try:
        frame = pd.read_csv(path, dtype={"client": str}, keep_default_na=False, na_values=[""])
    except (OSError, ValueError, OverflowError) as e:
        raise RunError(f"{path}: not a readable table ({_line(e)})") from None
    missing = [c for c in columns if c not in frame]
    if missing:
        raise RunError(f"{path}: the column {missing[0]!r} is missing")
    for column in filter(numeric, map(str, frame.columns)):
        if frame[column].dtype.kind not in "iuf" and len(cells := frame[column].dropna().astype(str)):
            numbers = np.asarray(pd.to_numeric(cells, errors="coerce"), dtype=float)
            bad = next(iter(cells[np.isnan(numbers)]), cells.iloc[0])
            raise RunError(f"{path}: column {column!r}: found {bad[:60]!r}, expected numbers")
    return frame


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
