"""Inputs of a model from the rows of a file, and answers from its outputs, by statistics of training rows alone.

Each client has its own, or all share sums of counts, values and squares; they are plain numbers, kept as JSON.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError, model_validator

from polyfed.base.columns import DEFAULTS, Columns, Repairs, for_site
from polyfed.base.errors import ConfigError, DataError, closest
from polyfed.compute.split import Split
from polyfed.data.csv_files import Sheet
from polyfed.data.moments import filling, median, moments
from polyfed.data.raw import Images, Text, following
from polyfed.data.repairs import repaired

T = TypeVar("T")
UNSEEN = -1  # the code of a value that no training part has
ALL = ""  # whose statistics, where they are every client's


@dataclass(frozen=True)
class Input:
    """A column that goes in."""

    name: str
    values: tuple[str, ...] | None = None  # of a category; None: a number
    gap: bool = False  # one more input says that it is missing
    declared: bool = False  # its values are the user's and not those that were found


@dataclass(frozen=True)
class Statistics:
    """Numbers that fill, shift and scale, one entry per column."""

    fill: list[float]
    shift: list[float]
    scale: list[float]
    target: list[float] | None = None  # shift and scale
    low: list[float | None] | None = None  # least number of the training rows
    high: list[float | None] | None = None  # largest number of the training rows
    gaps: list[float] | None = None  # share of gaps in the training rows

    def ranged(self, x: np.ndarray, numbers: list[int]) -> "Statistics":
        """The same with low, high and gaps of rows x: [N, inputs], of which some are numbers; as it is where it has."""
        if self.gaps is not None:
            return self
        ends = [(v.min(), v.max()) if len(v := x[~np.isnan(x[:, k]), k]) else (None, None) for k in numbers]
        return replace(self, low=[a for a, _ in ends], high=[b for _, b in ends], gaps=np.isnan(x).mean(0).tolist())


@dataclass(frozen=True)
class Preparation:
    """Recipe that makes inputs of rows and answers of outputs."""

    inputs: tuple[Input, ...]
    target: str
    labels: tuple[str, ...] | None = None  # the classes in their order; None for a regression
    missing: str = "median"
    unseen: str = DEFAULTS["unseen"]
    standardise: str = "pooled"
    gaps: tuple[str, ...] = ()  # further texts for a missing value
    survival: bool = False  # the target is a time and an event
    # by client, or under "" where all clients share them
    sites: Mapping[str, Statistics] = field(default_factory=dict[str, Statistics])
    repairs: Mapping[str, Repairs] = field(default_factory=dict[str, Repairs])
    limits: tuple[str, ...] = ()  # columns in which <5 is a value
    raw: Text | Images | None = None  # the column that goes in instead of all others

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a row of inputs."""
        return (len(self.names),) if self.raw is None else self.raw.shape

    @property
    def names(self) -> list[str]:
        """The model's inputs in their order: numbers, gaps, values of categories."""
        categories = [f"{i.name}={v}" for i in self.inputs for v in i.values or ()]
        numbers = [i.name for i in self.inputs if i.values is None]
        return [*numbers, *(f"{i.name} missing" for i in self.inputs if i.gap), *categories]

    @property
    def tokens(self) -> int | None:
        """Ids that may follow a token, of a language model's texts; else None."""
        return self.raw.words if isinstance(self.raw, Text) and self.raw.following else None

    @property
    def packed(self) -> bool:
        """True where a row of the model is no row of the table."""
        return isinstance(self.raw, Text) and self.raw.pack

    def with_inputs(self, inputs: tuple[Input, ...]) -> "Preparation":
        """The same for these columns only, without statistics: before anything is learnt."""
        return replace(self, inputs=inputs, sites={})

    def at(self, client: str) -> Statistics:
        """The statistics of a client, its own or those of all. Raises DataError for a client that has none."""
        if ALL in self.sites:
            return self.sites[ALL]
        if client not in self.sites:
            names = ", ".join(self.sites)
            raise DataError(
                f"client {client!r}: has no statistics of its own{closest(client, self.sites)}; has {names}"
            )
        return self.sites[client]

    def only(self, client: str) -> "Preparation":
        """The preparation with the statistics of this client alone, or of all."""
        sites = {ALL if ALL in self.sites else client: self.at(client)}
        return replace(self, sites=sites, repairs=for_site(self.repairs, client))

    def repaired(self, sheet: Sheet, client: str) -> Sheet:
        """A client's rows with its repairs, of inputs alone; tables of texts may name some that are not there."""
        return repaired(sheet, self.repairs, client, self.limits, self.gaps, [i.name for i in self.inputs])

    # rows to inputs

    def codes(self, sheet: Sheet) -> np.ndarray:
        """Cells as numbers, [N, columns] float64: positions of categories' values, NaN for a gap, -1 for unseen ones.

        DataError names file, line and column of a cell that is no number, or a gap or unseen where these are refused.
        """
        if self.raw is not None:
            sheet.need(name := self.raw.column)
            codes = self.raw.codes(sheet.columns[name], sheet.folder).reshape(len(sheet.lines), -1)
            return codes if codes.dtype.kind == "f" else codes.astype(np.float64)
        return np.stack([self._coded(sheet, i) for i in self.inputs], 1) if self.inputs else np.zeros((0, 0))

    def _coded(self, sheet: Sheet, column: Input) -> np.ndarray:
        sheet.need(name := column.name)
        missing = sheet.missing(name, self.gaps)
        if column.values is None:
            codes = sheet.numbers(name)
            odd = np.isnan(codes)
            if not odd.any() and not missing.any():
                return codes
        else:
            codes = sheet.positions(name, column.values).astype(np.float64)
            odd = (codes < 0) & (self.unseen == "refuse")
        wrong = np.flatnonzero(np.where(missing, self.missing == "refuse", odd))
        if len(wrong):
            row = int(wrong[0])
            cell, where = sheet.columns[name][row], sheet.at(row, name)
            if missing[row]:
                raise DataError(f'{where}: found {cell!r}, a gap; missing = "median" fills gaps', name)
            if column.values is None:
                raise DataError(f"{where}: found {cell[:40]!r}, expected a number", name)
            near, choices = closest(cell, column.values), ", ".join(column.values)
            raise DataError(f"{where}: found {cell[:40]!r}{near}, expected one of {choices}", name)
        return np.where(missing, np.nan, codes)

    def targets(self, sheet: Sheet, name: str | None = None) -> np.ndarray:
        """Targets [N], int64 positions among the classes or float64 numbers, from the column `name`."""
        sheet.need(name := name or self.target)
        targets = sheet.numbers(name) if self.labels is None else sheet.positions(name, self.labels)
        wrong = np.isnan(targets) if self.labels is None else targets < 0
        if wrong.any():
            row = int(wrong.argmax())
            expected = "a number" if self.labels is None else f"one of {', '.join(self.labels)}"
            raise DataError(
                f"{sheet.at(row, name)}: found {sheet.columns[name][row][:40]!r}, expected {expected}", name
            )
        return targets

    def transform(self, codes: np.ndarray, client: str) -> np.ndarray:
        """A client's `codes` [N, columns] as inputs [N, inputs] float32 in the order of `names`, by scikit-learn.

        Texts become tokens [N, 2, length] int64, images [N, 3, size, size].
        """
        if self.raw is not None:
            return codes.astype(self._kind, copy=False).reshape(-1, *self.shape)
        with np.errstate(over="ignore"):
            out = np.asarray(self._transformer(self.at(client)).transform(codes), dtype=np.float32)
        if not np.isfinite(out).all():
            column = self.names[int(np.argwhere(~np.isfinite(out))[0, 1])]
            raise DataError(
                f"client {client!r}, column {column!r}: found numbers beyond 3.4e+38, the largest of float32", column
            )
        return out

    def _transformer(self, at: Statistics) -> Any:
        """Declared and not learnt, so that it can be made again from numbers: it is fitted to a row without meaning."""
        from sklearn.compose import ColumnTransformer
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import FunctionTransformer, OneHotEncoder

        width = [len(i.values or ()) for i in self.inputs]
        numbers = np.array([k for k, i in enumerate(self.inputs) if i.values is None], dtype=int)
        categories = np.array([k for k in range(len(width)) if width[k]], dtype=int)
        gaps = np.array([k for k, i in enumerate(self.inputs) if i.gap], dtype=int)
        values: Any = [np.arange(float(width[k])) for k in categories]
        hot = OneHotEncoder(categories=values, handle_unknown="ignore", sparse_output=False)
        steps = [
            ("numbers", FunctionTransformer(partial(_scaled, at=at)), numbers),
            ("gaps", FunctionTransformer(np.isnan), gaps),
            ("categories", make_pipeline(FunctionTransformer(partial(np.nan_to_num, nan=UNSEEN)), hot), categories),
        ]
        return ColumnTransformer([s for s in steps if len(s[2])]).fit(np.zeros((1, len(self.inputs))))

    # learning it

    def fitted(self, parts: Mapping[str, Split | None], names: Sequence[str]) -> "tuple[Preparation, dict[str, Any]]":
        """Learn from the training part and prepare all parts, given as `codes`; earlier statistics stay."""
        train = parts["train"]
        assert train is not None
        x, n = train.x.numpy(), train.n
        scaled = self.labels is None and self.standardise != "none" and train.y.dim() == 1  # so is the target
        inputs, recoded = (self.inputs, None) if self.sites else self._seen(x)
        sites, numbers = self.sites, [k for k, i in enumerate(self.inputs) if i.values is None]
        if ALL not in sites:
            rows = [x[a:b][:, numbers] for a, b in zip(train.offsets[:-1], train.offsets[1:], strict=True)]
            ys = [train.client(i)[1].double().numpy()[:, None] for i in range(n)] if scaled else [None] * n
            scopes = {ALL: range(n)} if self.standardise == "pooled" else {name: [i] for i, name in enumerate(names)}
            sites = {
                name: _statistics(
                    [rows[i] for i in who],
                    [y for i in who if (y := ys[i]) is not None],
                    self.standardise,
                    filling if self.missing == "mean" else median,
                )
                for name, who in scopes.items()
            }
        if self.raw is None:
            whose = {name: slice(*train.offsets[i : i + 2]) for i, name in enumerate(names)}
            sites = {name: s.ranged(x[whose.get(name, slice(None))], numbers) for name, s in sites.items()}
        prepared = replace(self, inputs=inputs, sites=sites)
        unit = torch.tensor([prepared.at(name).target for name in names], dtype=torch.float64) if scaled else None
        done: dict[str, Any] = dict.fromkeys(parts)
        for key, split in parts.items():
            if split is not None:
                done[key] = replace(split, x=prepared._applied(self, split, names, recoded), unit=unit)
        return prepared, done

    def of_texts(
        self, texts: Sequence[np.ndarray], indices: Mapping[str, Sequence[np.ndarray]]
    ) -> "tuple[Preparation, dict[str, Any]]":
        """The result of `fitted` for a language model's texts; `indices` has the texts of each client in each part."""
        raw = self.raw
        assert isinstance(raw, Text)
        done: dict[str, Any] = {"train": None, "validation": None, "test": None}
        for key, clients in indices.items():
            pairs = [following([texts[k] for k in index], raw.length, raw.pack) for index in clients]
            done[key] = Split.of([(torch.from_numpy(x), torch.from_numpy(y)) for x, y in pairs])
        return replace(self, sites={ALL: Statistics([], [], [])}), done

    def _seen(self, x: np.ndarray) -> tuple[tuple[Input, ...], list[np.ndarray]]:
        """The inputs with the values and gaps that training rows x: [N, columns] have; and new codes from old ones."""
        inputs: list[Input] = []
        recoded: list[np.ndarray] = []
        for k, column in enumerate(self.inputs):
            gap, values = bool(np.isnan(x[:, k]).any()), column.values or ()
            kept = np.arange(len(values))
            if not column.declared:
                kept = np.unique(x[:, k][x[:, k] >= 0]).astype(int) if column.values is not None else kept
            present = None if column.values is None else tuple(values[j] for j in kept)
            inputs.append(replace(column, values=present, gap=gap))
            new = np.full(len(values) + 1, UNSEEN, dtype=float)  # the last one is that of UNSEEN itself
            new[kept] = np.arange(len(kept))
            recoded.append(new)
        return tuple(inputs), recoded

    def _applied(
        self, before: "Preparation", split: Split, names: Sequence[str], recoded: list[np.ndarray] | None
    ) -> torch.Tensor:
        """The inputs of a part whose codes are those of `before`."""
        codes = split.x.numpy().copy()
        for k, column in enumerate(self.inputs):
            if column.values is not None and recoded is not None:
                there = ~np.isnan(codes[:, k])
                old = codes[there, k].astype(int)
                codes[there, k] = recoded[k][old]
                lost = np.flatnonzero(codes[:, k] == UNSEEN)
                if len(lost) and self.unseen == "refuse":
                    who = names[int(np.searchsorted(split.offsets, lost[0], side="right")) - 1]
                    value = (before.inputs[k].values or ())[int(split.x[lost[0], k])]
                    raise DataError(
                        f"client {who!r}, column {column.name!r}: found {value!r}, which no training part has; declare "
                        f'its values with categories, or set unseen = "zeros"',
                        column.name,
                    )
        if ALL in self.sites and len(codes):
            with suppress(DataError):  # which is raised below, with the client's name
                return torch.from_numpy(self.transform(codes, ALL))
        cuts = zip(names, split.offsets[:-1], split.offsets[1:], strict=True)
        some = [self.transform(codes[a:b], name) for name, a, b in cuts if b > a]
        return torch.from_numpy(np.concatenate(some) if some else self._nothing())

    def _nothing(self) -> np.ndarray:
        return np.zeros((0, *self.shape), dtype=self._kind)

    @property
    def _kind(self) -> type[np.generic]:
        return np.int64 if isinstance(self.raw, Text) else np.float32

    # as JSON

    def dump(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        keys = ("target", "labels", "missing", "unseen", "standardise", "gaps", "survival")
        fields = {k: getattr(self, k) for k in keys}
        fields |= {k: value for k in ("repairs", "limits") if (value := getattr(self, k))}
        inputs = [
            {"name": i.name, "values": None if i.values is None else list(i.values), "gap": i.gap} for i in self.inputs
        ]
        fields |= {} if self.raw is None else {"raw": vars(self.raw)}
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}
        return plain | {"inputs": inputs, "sites": {name: vars(s) for name, s in self.sites.items()}}

    @classmethod
    def read(cls, dumped: Any, where: str) -> "Preparation":
        """Read back what `dump` returned; `where` names the file in errors."""
        return read_dump(PREPARATION, dumped, f"{where}: its preparation")

    @model_validator(mode="after")
    def _fits(self) -> "Preparation":
        width = sum(i.values is None for i in self.inputs)
        for s in self.sites.values():
            lists, gaps = (s.fill, s.shift, s.scale, s.low or s.fill, s.high or s.fill), s.gaps or self.inputs
            if {*map(len, lists)} != {width} or len(gaps) != len(self.inputs) or len(s.target or "ab") != 2:
                raise ValueError(f"expected {width} numbers per statistic")
        try:
            Columns(site=self.repairs)
        except ConfigError as e:
            raise ValueError(str(e)) from None
        return self


@dataclass(frozen=True)
class Settled:
    """Facts that all sites have in common."""

    inputs: tuple[int, ...]  # shape of one
    outputs: int
    classes: int | None
    integers: bool = False
    numbered: tuple[int, ...] | None = None  # the labels that are classes 0, 1, ...
    notes: tuple[str, ...] = ()
    weighted: bool = False  # the weights of rows differ at some site
    tokens: int | None = None  # as in `Federation`
    preparation: Preparation | None = None  # of tables, without statistics unless they are everybody's

    def dump(self) -> dict[str, Any]:
        """As JSON holds it."""
        plain = {key: list(v) if isinstance(v, tuple) else v for key, v in vars(self).items()}
        return plain | {"preparation": self.preparation and self.preparation.dump()}

    @classmethod
    def read(cls, dumped: Any) -> "Settled":
        """Read back what `dump` returned. Raises DataError for anything else."""
        return read_dump(SETTLED, dumped, "the server: what it settled")

    def with_statistics(self, fill: np.ndarray, shift: np.ndarray, scale: np.ndarray) -> "Settled":
        """The same with all sites' statistics; of the target last, where it is scaled."""
        assert self.preparation is not None
        d = len(fill)
        target = [float(shift[d]), float(scale[d])] if len(shift) > d else None
        statistics = Statistics(fill.tolist(), shift[:d].tolist(), scale[:d].tolist(), target)
        return replace(self, preparation=replace(self.preparation, sites={ALL: statistics}))


PREPARATION, SETTLED = TypeAdapter(Preparation), TypeAdapter(Settled)


def read_dump(kind: TypeAdapter[T], dumped: Any, subject: str) -> T:
    """The object that a `dump` holds. Raises DataError, in one line, for anything else."""
    try:
        return kind.validate_python(dumped)
    except ValidationError as e:
        first = e.errors()[0]
        raise DataError(f"{subject} is damaged ({'.'.join(map(str, first['loc']))}: {first['msg']})") from None


def _scaled(x: np.ndarray, at: Statistics) -> np.ndarray:
    return (np.where(np.isnan(x), at.fill, x) - at.shift) / at.scale


def _statistics(
    rows: list[np.ndarray],
    targets: list[np.ndarray],
    standardise: str,
    middle: Callable[[list[np.ndarray]], np.ndarray],
) -> Statistics:
    """Middles, means and deviations of the rows [n_i, columns] of some clients, and of targets where there are any."""
    fill = middle(rows)
    shift, scale = np.zeros(len(fill)), np.ones(len(fill))
    if standardise != "none":
        shift, scale = moments([np.where(np.isnan(x), fill, x) for x in rows])
    target = [float(v[0]) for v in moments(targets)] if targets else None
    return Statistics(fill.tolist(), shift.tolist(), scale.tolist(), target)
