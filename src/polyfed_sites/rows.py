"""What has been asked of a site's rows, over all runs and versions of its file, in the folder of its vaults.

A row is known by a keyed digest of its cells: an empty line, another order, other line ends or ten new patients leave
the others what they were. What is counted is counted for each row (individual accounting), and no sum of rows that was
answered differs from another one by a few: every atom of the parts that were answered about has none or `least` rows.
"""

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

import numpy as np

from polyfed.base.errors import DataError, Refusal
from polyfed.base.system import alone
from polyfed.data.csv_files import Texts, canonical
from polyfed.data.readers import digest, pictures, read_cells
from polyfed.data.schema import File
from polyfed_privacy.noise import new_secret
from polyfed_sites import journal
from polyfed_sites.keys import write
from polyfed_sites.policy import Policy

FOLDER, KEY, ASKED, LOCK = "rows", "key", "asked.jsonl", "lock"
PARTS = ("train", "validation", "test")
COUNTED = {  # what is counted of each row: the policy's key, and what a site is asked for
    "join": ("most_joins", "join {} on the same rows"),
    "agreements": ("most_agreements", "{} agreements on the same rows"),
    "cells": ("most_cells", "{} sums, counts and scores on the same rows"),
}
STEP = np.uint64(0x9E3779B97F4A7C15)  # from one copy of a row to the next


class Book:
    """The rows of one site and what was asked of them. vaults: the folder of its vaults     dry: nothing is written"""

    def __init__(self, vaults: Path, site: str, dry: bool = False):
        self.folder, self.site, self.dry = vaults / FOLDER, site, dry
        self._sets: dict[str, np.ndarray | None] = {}
        self._shared: dict[tuple[str, str], np.ndarray] = {}
        self._asked: list[tuple[str, str, str, float]] = []  # kind, what, set of rows, weight
        self._lines = journal.Pairs(self.folder / ASKED)
        self._identified = ("", dict[int, int]())  # digest of a site's file, and its rows

    # rows

    def identify(self, path: Path, only: Sequence[str] | None) -> dict[int, int]:
        """Keyed digests of the rows of a file, by line. only: columns that are read; None: all"""
        if self._identified[0] == (whole := digest(path)):
            return self._identified[1]
        if path.suffix.lower() == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                parts = [np.ascontiguousarray(arrays[k]) for k in sorted(arrays) if not k.endswith("_test")]
            n = max((len(a) for a in parts if a.ndim), default=0)
            cells = {i: b"".join(a[i].tobytes() for a in parts if a.ndim and len(a) == n) for i in range(n)}
        elif path.is_dir():
            cells = {i: f.read_bytes() + f.parent.name.encode() for i, f in enumerate(pictures(path), 1)}
        else:
            cells = _cells(path, only)
        key = self.key()
        ids = {i: int.from_bytes(blake2b(c, key=key, digest_size=8).digest(), "little") for i, c in cells.items()}
        self._identified = whole, ids
        return ids

    def key(self) -> bytes:
        path = self.folder / KEY
        if self.dry and not path.is_file():
            return new_secret()
        with self.held():
            if not path.is_file():
                if any(self.folder.glob("*.set")):
                    raise Refusal(
                        f"{path}: is missing, and what was asked of the rows is not; restore it",
                        "its vault lacks a key",
                    )
                write(path, new_secret())
        return path.read_bytes()

    def keep(self, rows: np.ndarray) -> str:
        """Write a set of rows down; what it is known by. rows: [n] digests, see `apart`"""
        rows = np.sort(rows)
        name = blake2b(rows.tobytes(), digest_size=16).hexdigest()
        self._sets[name] = rows
        path = self.folder / f"{name}.set"
        if not self.dry and not path.is_file():
            write(path, rows.astype("<u8").tobytes())
        return name

    def load(self, name: str) -> np.ndarray | None:
        """A set of rows; None for what an older version has written down, which may be any."""
        if name not in self._sets:
            path = self.folder / f"{name}.set"
            self._sets[name] = np.frombuffer(path.read_bytes(), "<u8") if path.is_file() else None
        return self._sets[name]

    # what was asked

    @contextmanager
    def held(self) -> Generator[None]:
        """Alone with the folder: of two runs at once, the second counts on from the first."""
        if self.dry:
            yield
            return
        with journal.writing(self.folder):
            lock = alone(self.folder / LOCK, unlocked=True)
        try:
            yield
        finally:
            os.close(lock)

    @property
    def asked(self) -> list[tuple[str, str, str, float]]:
        """(kind, what, set of rows, weight) of all that was asked."""
        for site, entry in self._lines.new():
            with suppress(ValueError, TypeError):
                kind, what, rows, weight = entry
                self._asked += [(str(kind), str(what), str(rows), float(weight))] if site == self.site else []
        return self._asked

    def heaviest(self, weights: Mapping[str, float], rows: str) -> float:
        """The most that weighs on one row of a set. weights: of sets; one that is not known weighs on every row"""
        mine = self.load(rows)
        total = np.zeros(1 if mine is None else max(1, len(mine)))
        for name, weight in weights.items():
            other = self.load(name)
            if mine is None or other is None or name == rows:
                total += weight
            else:
                if (name, rows) not in self._shared:
                    self._shared[name, rows] = np.isin(mine, other, assume_unique=True)
                total[: len(mine)] += weight * self._shared[name, rows]
        return float(total.max())

    def spend(self, kind: str, what: str, rows: str, most: Callable[[int], None], weight: float = 1) -> None:
        """Count something before it is answered; asked again it costs nothing. most: refuses a number for one row"""
        with self.held():
            entries = self.asked
            if (kind, what) in {(k, w) for k, w, _, _ in entries}:
                return
            weights = dict[str, float]()
            for k, _, name, w in entries:
                if k == kind:
                    weights[name] = weights.get(name, 0.0) + w
            most(int(self.heaviest(weights, rows) + weight))
            self.note(kind, what, rows, weight)

    def note(self, kind: str, what: str, rows: str, weight: float = 1) -> None:
        """Write down what is answered next."""
        if (kind, what, rows) in {entry[:3] for entry in self.asked}:
            return
        if self.dry:
            self.asked.append((kind, what, rows, weight))
        else:
            journal.append(self.folder / ASKED, [self.site, [kind, what, rows, weight]])

    # parts of a file

    def cut(self, file: File, ids: np.ndarray, words: str, least: int) -> None:
        """Leave rows [n] in the parts that they were in when the same was asked before; few new ones are trained on."""
        before = {kind: rows for kind, what, rows, _ in self.asked if what == words and kind in file.rows}
        if not before or file.language is not None:
            return
        drawn, part = np.empty(len(ids), dtype=object), np.full(len(ids), None, dtype=object)
        for name, rows in file.rows.items():
            drawn[rows] = name
        rows = apart(ids)
        for name in before:  # copies of a row go to the parts in turn, as many as were there
            earlier = self.load(before[name])
            part[np.isin(rows, [] if earlier is None else earlier)] = name
        new = np.array([p is None for p in part])
        for name in file.rows:
            some = new & (drawn == name)
            part[some] = "train" if name != "train" and some.sum() < least else name
        file.rows = {name: np.flatnonzero(part == name) for name in file.rows}

    def differs(self, sets: Sequence[str], least: int) -> bool:
        """Whether no sum over these sets and those that were answered about is of fewer rows than `least`."""
        old = [
            name
            for name in dict.fromkeys(rows for k, _, rows, _ in self.asked if k in PARTS)
            if self.load(name) is not None
        ]
        for name in sets:
            if name in old:
                continue
            earlier = [self.load(n) for n in old]
            mine = self.load(name)
            assert mine is not None
            everybody = np.unique(np.concatenate([mine, *(k for k in earlier if k is not None)]))
            pattern, signs = np.zeros(len(everybody), dtype=np.uint64), np.random.default_rng(0)
            for rows in (k for k in earlier if k is not None):
                sign = signs.integers(1, 2**63, dtype=np.uint64)
                pattern[np.searchsorted(everybody, rows)] += sign
            there = np.zeros(len(everybody), dtype=bool)
            there[np.searchsorted(everybody, mine)] = True
            atoms, at = np.unique(pattern, return_inverse=True)
            inside, whole = np.bincount(at[there], minlength=len(atoms)), np.bincount(at, minlength=len(atoms))
            left = np.where((atoms != 0) & (whole >= least), whole - inside, 0)
            if any(((0 < n) & (n < least)).any() for n in (inside, left)):
                return False
            old.append(name)
        return True


class Rows:
    """The rows of a site's file as it is now: by part, and as all that is asked of them is counted."""

    def __init__(self, book: Book, policy: Policy, data: Path):
        self.book, self.policy, self.ids = book, policy, book.identify(data, policy.columns)
        self.sets = {
            "all": book.keep(apart(np.array([*self.ids.values()], dtype=np.uint64)))
        }  # and a set for each part
        self.train = np.zeros(0, dtype=np.uint64)  # digests of those to train on, in order

    def spend(self, kind: str, what: str, weight: float = 1) -> None:
        """Count something before it is answered; kind: of `COUNTED`. Raises Refusal beyond the policy."""
        key, words = COUNTED[kind]
        self.book.spend(kind, what, self.sets["all"], lambda n: self.policy.most(key, n, words.format(n)), weight)

    def part(self, file: File, cut: str, scored: bool) -> None:
        """Cut a file as such terms have cut it before. Raises Refusal for parts whose sums would tell of a few rows.

        cut: the terms that decide it, in words     scored: whether scores leave
        """
        least, lines = self.policy.least_count, range(len(self.ids)) if file.sheet is None else file.sheet.lines
        ids = np.array([self.ids[line] for line in lines], dtype=np.uint64)
        self.book.cut(file, ids, cut, least)
        order = np.concatenate([file.rows[part] for part in PARTS if part in file.rows])
        digests = dict(zip(order.tolist(), apart(ids[order]).tolist(), strict=True))
        self.train = np.array([digests[k] for k in file.rows["train"].tolist()], dtype=np.uint64)
        for part in PARTS:
            mine = file.rows.get(part, order[:0])
            if part == "train" or (scored and len(mine) >= least):
                mine = np.array([digests[k] for k in mine.tolist() if k in digests], dtype=np.uint64)
                self.sets[part] = self.book.keep(mine)
        if not self.book.differs([self.sets[p] for p in PARTS if p in self.sets], least):
            earlier = {what for kind, what, _, _ in self.book.asked if kind == "train"}
            same = (
                f"with {min(earlier)}, and no fewer than {least} rows more or less, they would not" if earlier else ""
            )
            self.policy.forbid("least_count", f"parts that differ from earlier ones by too few rows ({same})")

    def note(self, cut: str) -> None:
        """Write the parts down, before anything is answered about them."""
        for part in PARTS:
            if part in self.sets:
                self.book.note(part, cut, self.sets[part])


def apart(ids: np.ndarray) -> np.ndarray:
    """[n] digests of rows, those of copies of a row told apart by their number."""
    _, group = np.unique(ids, return_inverse=True)
    order = np.argsort(group, kind="stable")
    copy = np.empty(len(ids), dtype=np.uint64)
    copy[order] = np.arange(len(ids)) - np.searchsorted(group[order], group[order])
    return ids + copy * STEP


def _cells(path: Path, only: Sequence[str] | None) -> dict[int, bytes]:
    """The cells of every row in one order and notation, by line; read as the site's file is, whatever a server says."""
    head = path.open("rb").read(2)
    first = "utf-16" if head in (b"\xff\xfe", b"\xfe\xff") else None
    try:
        header, lines, columns, delimiter = read_cells(path, ",;\t", first)
    except DataError:
        header, lines, columns, delimiter = read_cells(path, ",;\t", "latin-1")
    named = sorted((name, cells) for name, cells in zip(header, columns, strict=True) if only is None or name in only)
    parts: list[list[str]] = []
    for _, cells in named:
        texts = Texts(cells, delimiter != ",")
        plain = [canonical(texts.plain(text)) for text in texts.all]
        parts.append([plain[k] for k in texts.at.tolist()])
    return {line: "\x1f".join(row).encode() for line, row in zip(lines, zip(*parts, strict=True), strict=True)}
