"""Descriptions of sites' files before the first round, consequences for all sites, and files prepared so.

Sites say what must agree: columns, kinds, values of categories, labels, shapes and counts; no text that may name a row.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from polyfed.base.columns import ARRAYS, CLASSES, NEXT, Columns, for_site
from polyfed.base.errors import DataError, Faults, closest
from polyfed.compute.split import Split
from polyfed.data import moments, readers
from polyfed.data.csv_files import FEW, IMAGE, LABEL, Seen, Sheet, canonical, cells_of, declared, merged, places
from polyfed.data.federation import Federation
from polyfed.data.intake import WEIGHTED, numbered, pair_of, token_labels, whole_labels
from polyfed.data.preparation import Input, Preparation, Settled, Statistics
from polyfed.data.prepare import Cut
from polyfed.data.raw import Text, raw_of, read_by
from polyfed.data.repairs import read
from polyfed.data.said import Column, Csv, Dropped, Npz, facts
from polyfed.data.tables import Table, split_of, text_ids, weights_of


class File:
    """A site's own file, CSV or npz, read once; nothing that is said of it is about fewer than `least` rows."""

    def __init__(
        self, path: Path, name: str, columns: Columns, cut: Cut, only: Sequence[str] | None = None, least: int = 1
    ):
        self.name, self.columns, self.least = name, columns, least
        self.sheet: Sheet | None = None
        self.language: tuple[Preparation, dict[str, Split]] | None = None
        if path.suffix.lower() == ".npz":
            (arrays,) = readers.read_clients([path])
            self.train = self._pair(arrays.train, "train")
            self.test = None if arrays.test is None else self._pair(arrays.test, "test")
            if not len(self.train[0]):
                raise DataError(f"client {name!r} has no training samples")
            strata = None if columns.split is None else self.train[1].numpy()
            self.rows = cut.of(len(self.train[0]), name, held=self.test is None, strata=strata)
        else:
            if path.is_dir():
                _check_folder(path, columns)
            self.sheet = read(path, columns, name, least)
            if only is not None:
                kept = {key: cells for key, cells in self.sheet.columns.items() if key in only}
                self.sheet = dataclasses.replace(self.sheet, columns=kept)
            if not self.sheet.lines:
                raise DataError(f"client {name!r} has no training samples")
            left = [key for key in self.sheet.columns if key not in columns.apart]
            self.outcome = columns.target or (left[-1] if left else "")
            self.rows = cut.of(len(self.sheet.lines), name, **split_of(self.sheet, columns, self.outcome))
            if columns.task == NEXT:
                self.language = self._language(self.sheet)

    def _pair(self, pair: tuple[np.ndarray, np.ndarray], split: str) -> tuple[Tensor, Tensor]:
        x, y = pair_of(pair, self.name, split)
        if _task(self.columns) == "regression" and not y.is_floating_point():
            y = y.float()
        elif _task(self.columns) == "classification" or (self.columns.classes and _task(self.columns) != "tokens"):
            y = whole_labels(y, f"client {self.name!r}, {split}", self.columns.classes)
        return (x, y[:, 0]) if not y.is_floating_point() and y.dim() == 2 and y.shape[1] == 1 else (x, y)

    def _language(self, sheet: Sheet) -> tuple[Preparation, dict[str, Split]]:
        """The parts of a language model's texts, which are divided before rows are made of them."""
        raw = raw_of(self.columns)
        assert isinstance(raw, Text)
        blank = Preparation((), raw.column, standardise="none", raw=raw)
        return blank.of_texts(text_ids(sheet, raw), {key: [rows] for key, rows in self.rows.items()})

    @property
    def counts(self) -> dict[str, int]:
        """Rows of each part."""
        if self.language is not None:
            return {part: len(self.language[1][part].x) for part in self.rows}
        given = {} if self.sheet is not None or self.test is None else {"test": len(self.test[0])}
        return {part: len(rows) for part, rows in self.rows.items()} | given

    # what it says

    def schema(self) -> Csv | Npz:
        """The site's own description of it."""
        if self.sheet is None:
            return self._arrays()
        outcome = self.outcome
        if self.language is not None:
            outcome = self.language[0].target
        columns = {name: self._column(name, name == outcome) for name in self.sheet.columns}
        weighted = (w := self._weights()) is not None and bool((w != w[0]).any())
        return Csv(target=outcome, columns=columns, weighted=weighted)

    def _weights(self) -> np.ndarray | None:
        """[rows] of the training part."""
        if self.sheet is None or self.columns.weights is None:
            return None
        column = self.columns.weights
        weights = weights_of(self.sheet, column)[self.rows["train"]]
        if not weights.any():
            raise DataError(f"{self.sheet.where}: column {column!r} is 0 on every training row", column)
        return weights

    def _column(self, name: str, outcome: bool) -> Dropped | Column:
        assert self.sheet is not None
        if name in self.columns.apart or (self.columns.raw not in (None, name) and not outcome):
            return Dropped()
        c = cells_of(self.sheet, name, self.columns)
        mine = c if self.least == 1 else cells_of(self._train, name, self.columns)
        gaps = self._coarse(mine.gaps, mine.cells)
        counts = {
            "cells": mine.cells,
            "gaps": gaps,
            "numbers": self._coarse(mine.numbers, mine.cells - gaps),
            "unmatched": self._coarse(mine.unmatched, mine.cells),
            "respelt": mine.respelt if mine.respelt >= self.least else 0,
        }
        listed = places(self.columns.labels or ()) if outcome else {}
        texts, numeric = sorted(c.texts or ()), c.numbers == c.there
        if name == self.columns.raw or (outcome and _task(self.columns) == "regression"):
            sent = False
        elif outcome and numeric:  # labels
            sent = (c.whole and len(texts) <= FEW) or _task(self.columns) == "classification"
        elif numeric and name not in self.columns.categories:
            sent = len(texts) == 1 < c.there  # so that a column is known for constant
        else:
            sent = declared(self.columns, name) is None and len(texts) <= FEW and not c.distinct
        train = self.rows["train"]
        there = {*self.sheet.positions(name, texts)[train].tolist()} if sent and not outcome else set[int]()
        missing = self.sheet.missing(name, self.columns.gaps)[train]
        if sent and listed:  # what [columns] lists is sent where many rows have it; what it does not is held to that
            rows = np.bincount(self.sheet.positions(name, texts) + 1, minlength=len(texts) + 1)[1:].tolist()
            texts = [
                t for t, n in zip(texts, rows, strict=True) if n >= self.least or {t, canonical(t)}.isdisjoint(listed)
            ]
        return Column(
            **facts(c, **counts, texts=texts if sent else None),
            one=c.range[0] if sent and c.range[0] == c.range[1] else None,
            train=[t for k, t in enumerate(texts) if k in there] if sent and not outcome else None,
            gap=bool(missing.any()),
            some=c.gaps > 0,
        )

    @cached_property
    def _train(self) -> Sheet:
        assert self.sheet is not None
        return self.sheet.only(self.rows["train"])

    def _coarse(self, n: int, rows: int) -> int:
        """A count of some of the rows as it is said: in steps of `least`, where neither it nor the rest is smaller."""
        step = self.least
        return 0 if n < step else rows if rows - n < step else n - n % step

    def _arrays(self) -> Npz:
        x, y = self.train
        labelled = not y.is_floating_point() and y.dim() == 1
        labels: list[int] = y.unique().tolist() if labelled else []
        few = len(labels) <= FEW or _task(self.columns) == "classification" or self.columns.classes is not None
        return Npz(
            inputs=[*x.shape[1:]], targets=[*y.shape[1:]], integers=not x.is_floating_point(),
            numbers=y.is_floating_point(), given=self.test is not None, labels=labels if labelled and few else None,
        )  # fmt: skip

    def rarest(self, schema: Csv | Npz) -> dict[str, int]:
        """Fewest rows of a value, for every column whose values it says; of values that [columns] lists, none."""
        if isinstance(schema, Npz) or self.sheet is None:
            counts = self.train[1].unique(return_counts=True)[1] if isinstance(schema, Npz) and schema.labels else None
            return {} if counts is None else {"targets": int(counts.min())}
        listed, fewest = places(self.columns.labels or ()), dict[str, int]()
        for name, texts in ((name, c.texts or []) for name, c in schema.used.items()):
            if any({t, canonical(t)}.isdisjoint(listed) for t in texts):
                at = self.sheet.positions(name, texts)
                fewest[name] = int(np.unique(at[at >= 0], return_counts=True)[1].min())
        return fewest

    # what it gives

    def labels(self, settled: Settled) -> list[int]:
        """Training rows in each class."""
        train = self.prepared(settled)["train"]
        return torch.bincount(train.y, minlength=settled.classes or 0).tolist()

    def prepared(self, settled: Settled) -> dict[str, Split]:
        """Its parts with inputs and targets as the model takes them."""
        return self.fitted(settled)[1]

    def fitted(self, settled: Settled) -> tuple[Preparation | None, dict[str, Split]]:
        """The preparation of a table with this site's own statistics, where it has them, and the file's parts."""
        if self.sheet is None or (blank := settled.preparation) is None:
            return None, self._gathered(settled)
        if self.language is not None:
            return self._following(blank)
        blank, parts = self._coded(blank)
        sites = blank.sites or {self.name: Statistics([], [], [])}  # learnt in `fitted`; its inputs are settled already
        repairs = for_site(self.columns.site, self.name)
        prepared, done = dataclasses.replace(blank, sites=sites, repairs=repairs).fitted(parts, [self.name])
        if settled.weighted and (weights := self._weights()) is not None:
            done["train"] = dataclasses.replace(done["train"], weight=torch.from_numpy(weights))
        return prepared, done

    def _following(self, blank: Preparation) -> tuple[Preparation, dict[str, Split]]:
        """A language model's parts, made by the tokenizer that was settled."""
        assert self.language is not None
        mine, parts = self.language
        assert isinstance(blank.raw, Text)
        assert isinstance(mine.raw, Text)
        if mine.raw.digest != blank.raw.digest:
            raise DataError(f"columns.tokenizer: found digest {mine.raw.digest}, expected {blank.raw.digest}")
        there = {key: split for key, split in parts.items() if split is not None}
        return dataclasses.replace(blank, raw=mine.raw, sites=mine.sites), there

    def _coded(self, blank: Preparation) -> tuple[Preparation, dict[str, Split]]:
        assert self.sheet is not None
        # its tokenizer is in a place of its own here
        blank = dataclasses.replace(blank, raw=read_by(blank.raw, self.columns.tokenizer))
        x, y = blank.codes(self.sheet), blank.targets(self.sheet)
        return blank, self._parts(torch.from_numpy(x), torch.from_numpy(y))

    def _parts(self, x: Tensor, y: Tensor) -> dict[str, Split]:
        return {key: Split(x[rows], y[rows], np.array([0, len(rows)])) for key, rows in self.rows.items()}

    def _gathered(self, settled: Settled) -> dict[str, Split]:
        def cast(y: Tensor) -> Tensor:
            if settled.tokens is not None:
                return token_labels(y, settled.tokens, f"client {self.name!r}")
            if settled.classes is None:
                return y if y.is_floating_point() else y.float()
            return numbered(y.long().reshape(len(y)), settled.numbered, settled.classes, f"client {self.name!r}")

        given = {} if self.test is None else {"test": Split.of([(self.test[0], cast(self.test[1]))])}
        return self._parts(self.train[0], cast(self.train[1])) | given

    # sums over its training rows, for "standardise = pooled"

    def sums(self, blank: Preparation, kind: str, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Sums over a site's rows of each column of numbers, the target last if it is one; the server adds them up."""
        train = self._coded(blank)[1]["train"]
        x = train.x.numpy()[:, [k for k, i in enumerate(blank.inputs) if i.values is None]]
        there = ~np.isnan(x)
        if kind == "counts":  # values at most the thresholds `at` [k, columns], as ordered integers
            keys = moments.ordered(x)
            return {"n": there.sum(0), "counts": np.array([((keys <= at) & there).sum(0) for at in given["at"]])}
        y = train.y.double().numpy()[:, None] if blank.labels is None else np.zeros((len(x), 0))
        x, d = np.where(np.isnan(x), given["fill"], x), x.shape[1]
        if kind == "sums":
            return {"n": there.sum(0), "sums": np.concatenate([x.sum(0), y.sum(0)])}
        mean = given["mean"]
        return {"squares": np.concatenate([np.square(x - mean[:d]).sum(0), np.square(y - mean[d:]).sum(0)])}


def _check_folder(folder: Path, columns: Columns) -> None:
    """Raise DataError unless a site may say what it has to of a folder of images: no name of a folder or of a file."""
    if columns.image != IMAGE or columns.target != LABEL:
        expected = f'image = "{IMAGE}" and target = "{LABEL}" in [columns]'
        raise DataError(f"{folder}: is a folder of images, and the experiment has not {expected}")
    if columns.labels is None:
        raise DataError(f"{folder}: its labels are names of folders, which are not said; expected labels in [columns]")
    inside = folder.resolve()
    for file in readers.pictures(folder):
        if not file.resolve().is_relative_to(inside):
            raise DataError(f"{file}: is a link out of the folder of images")
        if file.parent.name not in columns.labels:
            hint = f"{closest(file.parent.name, columns.labels)}, expected one of {', '.join(columns.labels)}"
            raise DataError(f"{file.parent}: found the label {file.parent.name!r}{hint}", LABEL)


def settle(schemas: Mapping[str, Csv | Npz], columns: Columns) -> Settled:
    """Facts that follow from all sites' descriptions. Raises DataError, with site and column, where they do not fit."""
    tables = {name: file for name, file in schemas.items() if isinstance(file, Csv)}
    arrays = {name: file for name, file in schemas.items() if isinstance(file, Npz)}
    words, first = {"table": "a CSV file", "arrays": "an npz file"}, next(iter(schemas))
    if tables and arrays:
        name = next(name for name, file in schemas.items() if file.kind != schemas[first].kind)
        there = f"site {first!r} has {words[schemas[first].kind]}"
        raise DataError(f"site {name!r}: has {words[schemas[name].kind]}, {there}")
    try:
        return _table(tables, columns) if tables else _arrays(arrays, columns)
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise DataError(f"a site's schema is damaged ({type(e).__name__}: {e})") from None


def _table(schemas: Mapping[str, Csv], columns: Columns) -> Settled:
    for column in columns.drop:
        if not any(column in s.columns for s in schemas.values()):
            raise DataError(f"the sites' files: no column {column!r}, which columns.drop names")
    sheets: list[Sheet] = []
    for site, s in schemas.items():
        names = [c for c in (s.columns if columns.raw is None else s.used) if c not in columns.apart]
        sheets.append(Sheet(f"site {site!r}", [], {name: [] for name in names}, client=site))
    if columns.target is None and columns.task != NEXT:
        first, target = next((site, s.target) for site, s in schemas.items())
        for site, s in schemas.items():
            if s.target != target:
                last = f"its last column is {s.target!r}, that of site {first!r} {target!r}"
                raise DataError(f"site {site!r}: {last}; name the target in [columns]")
        columns = dataclasses.replace(columns, target=target)
    parts: dict[str, dict[str, Column]] = {name: {} for sheet in sheets for name in sheet.columns}
    for site, s in schemas.items():
        for name, column in s.used.items():
            parts[name][site] = column
    survey = {
        name: merged(name, [_seen(c, name, site) for site, c in at.items()], sheets, columns)
        for name, at in parts.items()
    }
    limits = [name for name in columns.limits if name in survey]
    left = {"drop": [], "weights": None, "group": None, "site": {}, "limits": limits}
    split = columns.split if columns.parts is None else None
    table = Table(sheets, survey, dataclasses.replace(columns, split=split, **left))
    table.where = "the sites' files"
    if silent := _silent(table, parts):
        raise DataError(silent[0])
    if problems := table.problems():
        raise Faults("the sites' files", problems)
    settled, _ = table.settled({"all sites": _values(table)})
    prepared, weighted = settled.preparation, any(s.weighted for s in schemas.values())
    assert prepared is not None
    inputs = tuple(_trained(i, list(parts[i.name].values())) for i in prepared.inputs)
    prepared = dataclasses.replace(prepared, raw=read_by(prepared.raw), inputs=inputs)
    notes = (*settled.notes, *([WEIGHTED] if weighted else []))
    fields = {"inputs": prepared.shape, "numbered": None, "weighted": weighted}  # the labels are in the preparation
    return dataclasses.replace(settled, **fields, notes=notes, preparation=prepared)


def _values(table: Table) -> np.ndarray:
    """Each value of the target; of one that is a number any."""
    c, task = table.survey[table.outcome[-1]], table.columns.kind
    if table.labels is not None:
        return np.arange(len(table.labels))
    if task == "regression" or not (c.whole or task in CLASSES):
        if table.columns.classes is not None and task != "regression":
            raise DataError(f"{table.where}: target {c.name!r} holds other numbers than labels, and classes is stated")
        return np.array([0.5])
    y = np.array(sorted({float(v) for v in c.values}))
    return y.astype(np.int64) if (y == np.round(y)).all() else y


def _seen(c: Column, name: str, site: str) -> Seen:
    where, spread = f"site {site!r}, column {name!r}", (-math.inf, math.inf) if c.numbers else (math.inf, -math.inf)
    return Seen(
        **facts(c),
        range=spread if c.one is None else (c.one, c.one),
        odd=(where, "a text") if c.numbers < c.there else None,
        empty=(where, "an empty cell") if c.some else None,
    )


def _silent(table: Table, parts: Mapping[str, Mapping[str, Column]]) -> list[str]:
    """Lines on sites whose texts are needed and not said."""
    lines: list[str] = []
    labels = table.columns.labels
    for site, p in parts[table.outcome[-1]].items():
        listed = places(labels or ())
        wrong = [t for t in p.texts or () if {t, canonical(t)}.isdisjoint(listed)]
        if labels is not None and wrong:
            target = table.outcome[-1]
            lines.append(f"site {site!r}: column {target!r} holds {wrong[0][:40]!r}, expected {', '.join(labels)}")
    for name, at in parts.items():
        if name == table.columns.raw:
            continue
        c = table.survey[name]
        texts = c.kind in ("category", "text") and declared(table.columns, name) is None
        labels = name in table.outcome and table.columns.labels is None and table.columns.task != "regression"
        for site, p in at.items():
            if p.texts is not None or not p.there or not (texts or (labels and p.whole)):
                continue
            if labels and name in table.outcome and p.numbers == p.there:
                then = "state the task in [columns]: classification or regression"
                lines.append(f"site {site!r}: target {name!r} holds more than {FEW} different whole numbers; {then}")
            else:
                why = "all distinct, so they may identify rows" if p.distinct else f"more than {FEW}"
                then = "name its values in a table categories in [columns], or drop it"
                lines.append(f"site {site!r}: column {name!r} holds texts that are {why} and are not sent; {then}")
    return lines


def _trained(column: Input, at_sites: Sequence[Column]) -> Input:
    """An input with the values and gaps that training rows of some site have."""
    gap = any(c.gap for c in at_sites)
    if column.values is None or column.declared:
        return dataclasses.replace(column, gap=gap)
    there = {canonical(v) for c in at_sites for v in c.train or ()}
    return dataclasses.replace(column, gap=gap, values=tuple(v for v in column.values if canonical(v) in there))


def _arrays(schemas: Mapping[str, Npz], columns: Columns) -> Settled:
    first, one = next(iter(schemas.items()))
    for name, value in columns.given.items():
        if name not in ARRAYS:
            raise DataError(f"columns.{name.replace('_', '-')}: found {value!r}, expected none for npz files at sites")
    if columns.standardise not in (None, "none"):
        then = "expected none for npz files at sites, which are trained on as they are; scale them beforehand"
        raise DataError(f"columns.standardise: found {columns.standardise!r}, {then}")
    _check_alike(schemas)
    shape, task = tuple(one.inputs), _task(columns)
    if task == "tokens":
        if columns.classes is None:
            raise DataError(
                "columns.classes: found none, expected how many labels a token may have, for tokens at sites"
            )
        if one.targets != one.inputs[-1:]:
            raise DataError(f"site {first!r}: targets are of shape {one.targets}, expected {one.inputs[-1:]}")
        return Settled(shape, columns.classes, None, one.integers, tokens=columns.classes)
    outputs = math.prod(one.targets)
    if one.numbers and task != "classification" and columns.classes is None:
        return Settled(shape, outputs, None, one.integers)
    if task == "regression":
        return Settled(shape, outputs, None, one.integers)
    for name, s in schemas.items():
        if s.labels is None:
            then = "state the task in [columns]: classification or regression"
            raise DataError(f"site {name!r}: targets are more than {FEW} different integers; {then}")
    y = np.array(sorted({v for s in schemas.values() for v in s.labels or ()}))
    federation = Federation.from_arrays(
        [(np.zeros((len(y), 1)), y)], names=["all sites"], classes=columns.classes, test_fraction=0.0, task=columns.kind
    )
    classes, numbered = federation.classes, federation.meta.get("labels")
    assert classes is not None
    return Settled(shape, classes, classes, one.integers, numbered and tuple(numbered), federation.notes)


def _check_alike(schemas: Mapping[str, Npz]) -> None:
    """Raise DataError for the first site whose arrays are not of the first site's kind."""
    first, one = next(iter(schemas.items()))
    for name, s in schemas.items():
        for role, mine, others in (("inputs", s.inputs, one.inputs), ("targets", s.targets, one.targets)):
            if mine != others:
                raise DataError(f"site {name!r}: {role} are of shape {mine} per sample, those of {first!r} {others}")
        for mine, others, yes, no in (
            (s.integers, one.integers, "inputs are integers", "inputs are floats"),
            (s.numbers, one.numbers, "targets are floats", "targets are integers"),
            (s.given, one.given, "it has x_test and y_test", "it has no x_test and y_test"),
        ):
            if mine != others:
                raise DataError(f"site {name!r}: {yes if mine else no}, not so at site {first!r}")


def _task(columns: Columns) -> str:
    return "classification" if columns.task in CLASSES else columns.task
