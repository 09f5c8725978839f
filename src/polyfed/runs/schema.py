"""The files of a run folder, one model each, written and read: `folder` writes what these models dump, and each
function here gives one back, or RunError in one line that names the file, what was found and what was expected.
Everything that reads a run folder goes through here.
"""

import json
import math
import tomllib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
import pandas as pd
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    SerializerFunctionWrapHandler,
    Strict,
    ValidationError,
    model_serializer,
)
from safetensors import SafetensorError, safe_open

from polyfed.base.errors import RunError
from polyfed.base.part import Part
from polyfed.base.settings import is_list, is_table, kebab
from polyfed.base.system import uncollected
from polyfed.base.text import unmarked
from polyfed.base.values import unboxed
from polyfed.metrics.metric import BETTER, Metric, mean_of
from polyfed.metrics.scores import known

_safe_open: Any = safe_open  # which has no types
Table = dict[str, Any]
FORMAT = 1  # of run folders; there has been no other
CROWD = 10_000  # clients above which nothing is written sample by sample, and reports have quantiles
SPLITS = ("train", "validation", "test")
OF_SPLIT = ("train_", "validation_", "test_", "global_")  # before the numbers of clients.csv: samples and metrics
Scores = dict[str, Mapping[str, np.ndarray]]  # split -> metric -> [n], a number for each client


def _number(value: Any) -> Any:
    """NaN here, null in a file."""
    return math.nan if value is None or (isinstance(value, float) and not math.isfinite(value)) else value


Number = Annotated[float, BeforeValidator(_number)]


class _File(BaseModel):
    """Known keys must have the type given; others are kept as they are."""

    model_config = ConfigDict(extra="allow", strict=True)

    def table(self) -> Table:
        """The keys that were given, in plain values."""
        return self.model_dump(exclude_unset=True, by_alias=True)

    def written(self) -> Table:
        """As a JSON file has it."""
        return finite(self.table())


class _Toml(_File):
    """A table of config.toml, keys in kebab-case."""

    model_config = ConfigDict(alias_generator=kebab, validate_by_name=True)


class Source(_Toml):
    """[data] of config.toml. digest: of the samples     sites: where they are, in place of a name"""

    name: str | None = None
    dir: str | None = None
    digest: str | None = None
    sites: list[str] | None = None
    test_fraction: float = 0.2
    options: Table = {}


class Planned(_Toml):
    """[plan] of config.toml: how clients were run, see `core.worker.Plan`."""

    chunk: int
    workers: int
    device: str
    path: str


class Begun(_Toml):
    """[start] of config.toml: the run that another began with."""

    algorithm: str
    rounds: NonNegativeInt


class Config(_Toml):
    """config.toml: what determines the numbers. The same table is an experiment file; the other settings of `Training`
    are further keys, as they are written.
    """

    format: Literal[1] = FORMAT
    algorithm: Table = {}
    data: Source = Source()
    columns: Table = {}
    model: Table = {}
    plan: Planned | None = None
    start: Begun | None = None
    initial_weights: str | None = None
    versions: dict[str, str] = {}
    packages: list[str] = []
    metrics: list[str] = []
    rounds: NonNegativeInt = 0
    seed: NonNegativeInt = 0
    loss: str | None = None
    stop: str | None = None
    dtype: str | None = None
    privacy: Table = {}
    privacy_plan: Table = {}
    privacy_says: list[str] = []

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> "Config":
        """The settings of a run that begins; what is None is not set."""
        return cls.model_validate({key: _plain(value) for key, value in table.items() if value is not None})

    def toml(self) -> Table:
        """As the file has it. TOML has no null: unset keys are left out."""
        return _set({"format": FORMAT} | self.table())

    @property
    def method(self) -> str:
        """The name of the method."""
        return str(self.algorithm.get("name", "unknown"))

    @property
    def judges(self) -> list[Metric]:
        """The metrics that were asked for, as far as their names say what they are; none: the usual ones."""
        return [Judge(metric=name).read for name in self.metrics]


Count = Annotated[NonNegativeInt, Strict()]


@dataclass(slots=True, frozen=True)
class Client:  # no model: that takes a kilobyte
    """A client in federation.json; labels: training samples per class."""

    __pydantic_config__: ClassVar = ConfigDict(strict=False)  # it is made of a table
    name: Annotated[str, Strict()]
    train: Count = 0
    validation: Count = 0
    test: Count = 0
    labels: Annotated[list[Count], Strict()] | None = None

    def samples(self, split: str) -> int:
        """Number of samples in a split."""
        return getattr(self, split)

    @property
    def total(self) -> int:
        """Number of samples in all."""
        return self.train + self.validation + self.test


class Flagged(_File):
    """A column that the audit between sites flags, in federation.json: where, and what it is at every site."""

    flagged: list[str]
    sites: dict[str, Part]


class About(_File):
    """federation.json: who took part, on which data; see `Federation.describe`."""

    dataset: str | None = None
    partition: str | None = None
    seed: int | None = None
    test: Any = None
    options: Table = {}
    classes: NonNegativeInt | None
    inputs: list[NonNegativeInt] | None = None
    outputs: NonNegativeInt | None = None
    tokens: NonNegativeInt | None = None
    shared: NonNegativeInt | None = None
    clients: list[Client] = Field(min_length=1)
    clusters: list[int] | None = None
    notes: list[str] = []
    scaling: Any = None
    preparation: Table | None = None
    audit: dict[str, Flagged] = {}

    @property
    def names(self) -> list[str]:
        """The clients' names."""
        return [c.name for c in self.clients]


class Judge(_File):
    """A metric in summary.json."""

    metric: str
    unit: str = ""
    better: str = Field(default="higher", pattern=BETTER)

    @classmethod
    def of(cls, metric: Metric) -> "Judge":
        """A metric as it is written."""
        return cls(metric=metric.name, unit=metric.unit, better=metric.better)

    @property
    def read(self) -> Metric:
        """The metric itself, as far as its name says what it is."""
        return known(self.metric) or Metric(self.metric, self.unit, self.better)


class Spread(_File):
    """One metric over the clients that have it."""

    mean: Number = math.nan
    std: Number = math.nan
    worst: Number = math.nan
    best: Number = math.nan
    clients: NonNegativeInt | None = None

    @classmethod
    def of(cls, metric: Metric, values: np.ndarray) -> "Spread":
        """The spread of a metric's values [n]; NaN where a client has none. Of infinite ones there is no mean."""
        present = values[~np.isnan(values)]
        if not len(present):
            return cls(mean=math.nan, std=math.nan, worst=math.nan, best=math.nan, clients=0)
        merit, whole = metric.merit(present), bool(np.isfinite(present).all())
        return cls(
            mean=mean_of(values), std=float(present.std()) if whole else math.nan, worst=float(present[merit.argmin()]),
            best=float(present[merit.argmax()]), clients=len(present),
        )  # fmt: skip


class Summary(_File):
    """summary.json: the run in a few numbers. final: of the metric that leads, by split     scores: of every metric

    trained_bytes, frozen_bytes: of one model's numbers, in memory and in messages
    best_round: whose models are kept     unsent_bytes: of the rounds before whose end validation stopped it
    higher_is_better: for those who read it without polyfed
    """

    status: Literal["finished", "interrupted", "diverged", "unfinished"]
    algorithm: str
    seed: NonNegativeInt
    rounds: NonNegativeInt
    metric: str
    unit: str = ""
    better: str = Field(default="higher", pattern=BETTER)
    higher_is_better: bool
    final: dict[str, Spread]
    metrics: list[Judge] = []
    scores: dict[str, dict[str, Spread]] = {}
    down_bytes: NonNegativeInt
    up_bytes: NonNegativeInt
    seconds: Number = math.nan
    parameters: NonNegativeInt | None = None
    trained_bytes: NonNegativeInt | None = None
    frozen_bytes: NonNegativeInt = 0
    described_by: Number = math.nan
    common: dict[str, Number] | None = None
    steps: Number = math.nan
    deploys: Literal["common", "own", "personal", "yardstick", "oracle"] | None = None
    digest: dict[str, str] | None = None
    best_round: NonNegativeInt | None = None
    unsent_bytes: NonNegativeInt | None = None

    @property
    def leads(self) -> Metric:
        """The metric that leads."""
        return Judge(metric=self.metric, unit=self.unit, better=self.better).read

    @property
    def judges(self) -> list[Metric]:
        """All metrics, the one that leads first."""
        return [m.read for m in self.metrics] or [self.leads]

    @property
    def split(self) -> str:
        """The split that the run is judged on: test, or else validation, or else train."""
        return next((s for s in ("test", "validation", "train") if s in self.final), "test")


class Findings(_File):
    """report.json: what the method found."""

    clusters: list[int] | None = None
    mixing: list[list[Number]] | None = None


class Record(_File):
    """A line of metrics.jsonl: one split in one round. `record["accuracy"]` is a metric's mean over the clients.

    std, worst: of the metric that leads     pooled: its mean over all samples     clusters, assigned: see `Result`
    aggregation_error: what means of low-rank factors lack of the mean of their products, over the latter
    """

    round: int
    split: str
    std: Number = math.nan
    worst: Number = math.nan
    pooled: Number = math.nan
    down_bytes: NonNegativeInt = 0
    up_bytes: NonNegativeInt = 0
    seconds: Number = math.nan
    virtual_time: Number = math.nan
    clusters: int | None = None
    assigned: list[int] | None = None
    aggregation_error: Number = math.nan
    # the metrics
    __pydantic_extra__: dict[str, Number]  # pyrefly: ignore[bad-override-mutable-attribute]

    def __getitem__(self, metric: str) -> float:
        return self.metrics[metric]

    @property
    def metrics(self) -> dict[str, float]:
        """The mean over the clients of every metric."""
        return self.__pydantic_extra__

    @model_serializer(mode="wrap")
    def _in_order(self, dump: SerializerFunctionWrapHandler) -> Table:
        table = dump(self)
        return {key: table[key] for key in ("round", "split", *self.metrics)} | table


F = TypeVar("F", bound=_File)


def finite(value: Any) -> Any:
    """JSON has no NaN: absent values become null."""
    if is_table(value):
        return {k: finite(v) for k, v in value.items()}
    if is_list(value):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Any) -> Any:
    """A value as a file can hold it, and null."""
    if is_table(value):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if is_list(value) else unboxed(value)


def _set(value: Any) -> Any:
    """Without what is null."""
    if is_table(value):
        return {k: _set(v) for k, v in value.items() if v is not None}
    return [_set(v) for v in value] if is_list(value) else value


def config(folder: Path) -> Config:
    """The settings of a run."""
    path = folder / "config.toml"
    try:
        return _checked(path, tomllib.loads(text(path)), Config)
    except (ValueError, RecursionError) as e:  # not TOML; integers of thousands of digits
        raise RunError(f"{path}: not valid TOML ({_line(e)})") from None


def federation(folder: Path) -> About:
    """Read who took part: at least one client, names that differ, labels and clusters of fitting lengths."""
    path = folder / "federation.json"
    with uncollected():
        about = _checked(path, _json(path), About)
    if len(set(about.names)) < len(about.clients):
        raise RunError(f"{path}: two clients have the same name")
    if len({None if c.labels is None else len(c.labels) for c in about.clients}) > 1:
        raise RunError(f"{path}: 'labels' differ in length between clients")
    if about.clusters and len(about.clusters) != len(about.clients):
        raise RunError(f"{path}: {len(about.clusters)} clusters are given for {len(about.clients)} clients")
    return about


def summary(folder: Path) -> Summary:
    """Read how the run ended."""
    return _checked(folder / "summary.json", _json(folder / "summary.json"), Summary)


def report(folder: Path) -> Findings:
    """Read what the method found; nothing where nothing was written."""
    path = folder / "report.json"
    findings = _checked(path, _json(path), Findings) if path.exists() else Findings()
    if len({len(row) for row in findings.mixing or ()}) > 1:
        raise RunError(f"{path}: the rows of 'mixing' differ in length")
    return findings


def metrics(folder: Path) -> list[Record]:
    """The evaluations, in order; the last line may be cut off if the run was killed."""
    path = folder / "metrics.jsonl"
    lines, rows = text(path).splitlines(), list[Record]()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as e:
            if number == len(lines):
                break
            raise RunError(f"{path}: line {number} is not valid JSON ({_line(e)})") from None
        rows.append(_checked(path, row, Record, f"line {number}, "))
    return rows


def clients(folder: Path, names: Sequence[str] | None = None) -> pd.DataFrame:
    """One row per client, in the order of `names` if given; text where a number belongs is refused."""
    path = folder / "clients.csv"
    table = _csv(path, ("client",), lambda c: c == "rounds" or c.endswith("_bytes") or c.startswith(OF_SPLIT))
    table["client"] = table["client"].fillna("").map(unmarked)
    if names is not None and table["client"].tolist() != list(names):
        raise RunError(
            f"{path}: its {len(table)} rows are not the {len(names)} clients of federation.json, in their order"
        )
    return table


def final(table: pd.DataFrame) -> Scores:
    """The metrics of clients.csv."""
    by_split: defaultdict[str, dict[str, np.ndarray]] = defaultdict(dict)
    for column, values in table.items():
        split, _, key = str(column).partition("_")
        if f"{split}_" in OF_SPLIT and key not in ("", "samples"):
            by_split[split][key] = values.to_numpy(dtype=float)
    return {**by_split}


def scores(folder: Path) -> dict[str, np.ndarray] | None:
    """Read what every test sample adds to its client's metrics (see `runs.folder.scores`); None: not written."""
    path = folder / "scores.safetensors"
    if not path.exists():
        return None
    terms = tensors(path, kind="np")
    if missing := {"counts", "id"} - terms.keys():
        raise RunError(f"{path}: the tensor {min(missing)!r} is missing")
    counts = terms["counts"]
    bad = {name: t.shape for name, t in terms.items() if name != "counts" and t.shape != (counts.sum(),)}
    if counts.ndim != 1 or counts.dtype.kind != "i" or (counts < 0).any() or bad:
        raise RunError(f"{path}: its tensors do not belong together, expected one number per test sample")
    return terms


def ledger(folder: Path) -> pd.DataFrame:
    """One row per round and participant."""
    columns = ("round", "client", "exchanges", "down_bytes", "up_bytes")
    return _csv(folder / "ledger.csv", columns, lambda c: c != "client")


def tensors(path: Path, row: int | None = None, kind: Literal["pt", "np"] = "pt") -> Table:
    """The named tensors of a safetensors file. row: only this row of each   kind: torch's, or numpy's, which need no
    torch"""
    try:
        with _safe_open(path, kind) as f:
            return {k: f.get_tensor(k) if row is None else f.get_slice(k)[row : row + 1][0] for k in f.keys()}  # noqa: SIM118
    except (OSError, ValueError, KeyError, IndexError, TypeError, SafetensorError) as e:
        raise RunError(f"{path}: not a readable safetensors file ({_line(e)})") from None


def text(path: Path) -> str:
    """A text file."""
    try:
        return path.read_text("utf-8")
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


def _checked(path: Path, value: Any, model: type[F], where: str = "") -> F:
    """`value` as a `model`."""
    if not isinstance(value, dict):
        raise RunError(f"{path}: {where}found {type(value).__name__}, expected a table of keys and values")
    try:
        return model.model_validate(value)
    except ValidationError as e:
        first = min(e.errors(), key=lambda error: error["type"] == "missing")
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            raise RunError(f"{path}: {where}the key {key!r} is missing") from None
        shown = repr(first["input"])
        shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
        raise RunError(f"{path}: {where}{key}: found {shown}; {_line(ValueError(first['msg']))}") from None


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
