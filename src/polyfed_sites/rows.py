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
from typing import Any

import numpy as np

from polyfed.base.errors import DataError, Refusal
from polyfed.base.locks import alone
from polyfed.data.csv_files import Texts, canonical
from polyfed.data.readers import pictures, read_cells
from polyfed.data.schema import File
from polyfed_privacy.noise import new_secret
from polyfed_sites import journal
from polyfed_sites.keys import write

FOLDER, KEY, ASKED, LOCK = "rows", "key", "asked.jsonl", "lock"
STEP = np.uint64(0x9E3779B97F4A7C15)  # from one copy of a row to the next


class Book:
    """The rows of one site and what was asked of them. vaults: the folder of its vaults     dry: nothing is written"""

    def __init__(self, vaults: Path, site: str, dry: bool = False):
        self.folder, self.site, self.dry = vaults / FOLDER, site, dry
        self._sets: dict[str, np.ndarray | None] = {}
        self._shared: dict[tuple[str, str], np.ndarray] = {}
        self._asked: list[tuple[str, str, str, float]] = []  # kind, what, set of rows, weight
        self._read = -1  # bytes of the file that these were in

    # rows

    def identify(self, path: Path, only: Sequence[str] | None) -> dict[int, int]:
        """Keyed digests of the rows of a file, by line. only: columns that are read; None: all"""
        found: dict[int, bytes] = {}
        if path.suffix.lower() == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                parts = [np.ascontiguousarray(arrays[k]) for k in sorted(arrays) if not k.endswith("_test")]
            n = max((len(a) for a in parts if a.ndim), default=0)
            found = {i: b"".join(a[i].tobytes() for a in parts if a.ndim and len(a) == n) for i in range(n)}
        elif path.is_dir():
            found = {i: f.read_bytes() + f.parent.name.encode() for i, f in enumerate(pictures(path), 1)}
        else:
            found = _cells(path, only)
        key = self.key()
        return {i: int.from_bytes(blake2b(row, key=key, digest_size=8).digest(), "little") for i, row in found.items()}

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
        try:
            lock = alone(self.folder / LOCK, unlocked=True)
        except OSError as e:
            raise Refusal(f"{self.folder}: cannot be written ({e.strerror})", "its vault cannot be written") from None
        try:
            yield
        finally:
            os.close(lock)

    @property
    def asked(self) -> list[tuple[str, str, str, float]]:
        """(kind, what, set of rows, weight) of all that was asked."""
        path = self.folder / ASKED
        size = path.stat().st_size if path.is_file() else 0
        if size != self._read and not (self.dry and self._asked):
            self._asked, self._read = [], size
            for site, entry in journal.pairs(path):
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
            asked = self.asked
            if (kind, what) in {(k, w) for k, w, _, _ in asked}:
                return
            weights = dict[str, float]()
            for k, _, name, w in asked:
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
            known = self.load(before[name])
            part[np.isin(rows, [] if known is None else known)] = name
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
            known = [self.load(n) for n in old]
            mine = self.load(name)
            assert mine is not None
            everybody = np.unique(np.concatenate([mine, *(k for k in known if k is not None)]))
            pattern, signs = np.zeros(len(everybody), dtype=np.uint64), np.random.default_rng(0)
            for rows in (k for k in known if k is not None):
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


PARTS = ("train", "validation", "test")


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
        found = Texts(cells, delimiter != ",")
        said = [canonical(found.plain(text)) for text in found.all]
        parts.append([said[k] for k in found.at.tolist()])
    return {line: "\x1f".join(row).encode() for line, row in zip(lines, zip(*parts, strict=True), strict=True)}


def aligned(file: File, ids: Mapping[int, int]) -> np.ndarray:
    """[n] digests of a file's rows in their order, as it was read."""
    lines: Any = file.sheet.lines if file.sheet is not None else range(len(ids))
    return np.array([ids[line] for line in lines], dtype=np.uint64)
