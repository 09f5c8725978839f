"""Per-client tensors [n, ...]: in memory (on the device), or in files where they would not fit."""

import os
import zlib
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from io import BufferedRandom
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from polyfed.base.checkpoint import reason
from polyfed.base.errors import RunError
from polyfed.base.system import flush
from polyfed.core.algorithm import State

BLOCK = 1 << 26  # bytes of rows handled at once


class Gathered(dict[str, Tensor]):
    """Rows of some clients, read from the store tensor by tensor as a method asks for them."""

    def __init__(self, rows: "Rows", ids: Tensor):
        super().__init__()
        self._rows, self._ids = rows, ids

    def __missing__(self, name: str) -> Tensor:
        if name not in self._rows.names():
            raise KeyError(name)
        self[name] = self._rows.read(name, self._ids)
        return self[name]

    def whole(self) -> State:
        """All tensors, read."""
        return {name: self[name] for name in self._rows.names()}


class MemoryRows:
    """Rows held as tensors on the device."""

    def __init__(self, n: int, start: State):
        self.n = n
        self.tensors: State = {name: t.expand(n, *t.shape).clone() for name, t in start.items()}

    def gather(self, ids: Tensor) -> Gathered:
        """The rows of `ids: [s]`: [s, ...] each, read when they are first asked for."""
        return Gathered(self, ids)

    def names(self) -> list[str]:
        return list(self.tensors)

    def read(self, name: str, ids: Tensor) -> Tensor:
        """One tensor's rows of `ids`, copied."""
        return self.tensors[name].index_select(0, ids)

    def scatter(self, ids: Tensor, state: State) -> None:
        """Write `state: [s, ...]` into the rows of `ids`."""
        for name, values in state.items():
            self.tensors[name].index_copy_(0, ids, values)

    def snapshot(self) -> State:
        """Tensors that a checkpoint must hold."""
        return dict(self.tensors)

    def keep(self, kept: State | None) -> State:
        """A snapshot that stays as it is, or `kept`, one of before a resume."""
        return {name: t.clone() for name, t in self.tensors.items()} if kept is None else kept

    def committed(self) -> None:
        """Called once the checkpoint with the last snapshot is safe."""

    def restore(self, saved: State) -> None:
        _same_names(saved.keys(), self.names())
        for name, values in saved.items():
            self.tensors[name].copy_(values)


class MappedRows:
    """Rows in one file per tensor under `folder`; rows in use are in memory, and unwritten ones take no space."""

    def __init__(self, n: int, start: State, folder: Path):
        self.n, self.start = n, start
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.files = {
                name: SlotFile(folder / f"{name}.rows", n, t.numel() * t.element_size()) for name, t in start.items()
            }
            flush(folder, folder.parent)
        except OSError as e:
            raise RunError(f"cannot make the files of the client rows in {folder}: {reason(e)}") from e

    def gather(self, ids: Tensor) -> Gathered:
        return Gathered(self, ids)

    def names(self) -> list[str]:
        return list(self.start)

    def read(self, name: str, ids: Tensor) -> Tensor:
        start = self.start[name]
        block = torch.empty(len(ids), *start.shape, dtype=start.dtype)
        unwritten = self.files[name].read(ids.cpu().numpy(), _bytes(block))
        block[torch.as_tensor(unwritten)] = start.cpu()
        return block.to(start.device)

    def scatter(self, ids: Tensor, state: State) -> None:
        for name, values in state.items():
            self.files[name].write(ids.cpu().numpy(), _bytes(values.detach().to("cpu", self.start[name].dtype)))

    def snapshot(self) -> State:
        return {f"{key}.{name}": t for name, file in self.files.items() for key, t in file.snapshot().items()}

    def keep(self, kept: State | None) -> State:
        if kept is not None and not is_mapped(kept):
            return kept
        found = {f"{key}.{name}": t for name, file in self.files.items() for key, t in file.keep(kept, name).items()}
        return found if kept is None else kept

    def committed(self) -> None:
        for file in self.files.values():
            file.committed()

    def restore(self, saved: State) -> None:
        """Restore a snapshot of this store, or of one in memory."""
        if is_mapped(saved):
            _same_names({k[6:] for k in saved if k.startswith("index.")}, self.names())
            for name, file in self.files.items():
                file.restore(saved[f"index.{name}"].numpy(), saved[f"before.{name}"].numpy())
            return
        _same_names(saved.keys(), self.names())
        for name, values in saved.items():
            file = self.files[name]
            file.restore(np.empty((0, 3), np.int64), np.empty(0, np.int64))
            first = _bytes(self.start[name].cpu()[None])
            for ids in np.array_split(np.arange(self.n), -(-self.n * file.size // BLOCK) or 1):
                rows = _bytes(values[ids[0] : ids[-1] + 1])
                changed = (rows != first).any(1)
                file.write(ids[changed], rows[changed])


class SlotFile:
    """Rows of `size` bytes in the slots of one file, by shadow paging: a row goes to a slot that no checkpoint uses.

    A checkpoint holds the index: slot and checksum of every row. So the two checkpoints that are kept find their rows
    untouched whenever the process or the machine stops, and a row that was cut, zeroed or flipped is never taken for
    numbers.
    """

    def __init__(self, path: Path, n: int, size: int):
        self.path, self.n, self.size = path, n, size
        if not path.exists():  # reading a run touches nothing
            path.touch()
        self.best = np.empty(0, np.int64)  # slots of the round that is kept
        self.restore(np.empty((0, 3), np.int64), np.empty(0, np.int64))

    def restore(self, index: np.ndarray, before: np.ndarray) -> None:
        """Restore an index [m, 3] of (row, slot, checksum). before: the slots of the checkpoint before it"""
        # slot: [n], -1 for a row that was never written
        self.slot, self.sum = np.full(self.n, -1), np.zeros(self.n, np.int64)
        self.slot[index[:, 0]], self.sum[index[:, 0]] = index[:, 1], index[:, 2]
        self.new = np.zeros(self.n, bool)  # rows in a slot that no snapshot has seen: it may be written again
        self.changed = False  # since the last checkpoint
        # the slots that the last two checkpoints refer to
        self.kept: tuple[np.ndarray, np.ndarray] = before, index[:, 1]
        self._find_free()

    def _find_free(self) -> None:
        busy = np.bincount(np.concatenate([*self.kept, self.best])) > 0
        self.end = len(busy)  # from here on nothing was ever written, or nothing refers to it
        self.free = np.flatnonzero(~busy)[::-1].tolist()

    def read(self, ids: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Fill `rows: [s, size]`; returns those never written, as [s] booleans, whose rows are left as they are."""
        unwritten = self.slot[ids] < 0
        if not unwritten.all():
            with _opened(self.path, "rb") as f:
                for k in np.flatnonzero(~unwritten):
                    i = int(ids[k])
                    _fetch(f, self.path, rows[k], i, int(self.slot[i]), int(self.sum[i]))
        return unwritten

    def write(self, ids: np.ndarray, rows: np.ndarray) -> None:
        with _opened(self.path, "r+b") as f:
            for i, row in zip(ids.tolist(), rows, strict=True):
                if not self.new[i]:
                    if not self.free:
                        self.free.append(self.end)
                        self.end += 1
                    self.slot[i] = self.free.pop()
                f.seek(int(self.slot[i]) * self.size)
                f.write(row.data)
                self.sum[i], self.new[i], self.changed = zlib.crc32(row.data), True, True

    def snapshot(self) -> State:
        with _opened(self.path, "r+b") as f:
            os.fsync(f.fileno())
        return self._index()

    def _index(self) -> State:
        self.new[:] = False
        ids = np.flatnonzero(self.slot >= 0)
        self.taken = np.concatenate([self.slot[ids], self.best])
        index = np.stack([ids, self.slot[ids], self.sum[ids]], 1)
        parts = index, self.kept[1] if self.changed else self.kept[0], np.array(self.size)
        return dict(zip(("index", "before", "size"), map(torch.as_tensor, parts), strict=True))

    def keep(self, kept: State | None, name: str) -> State:
        """The index of the rows as they are; its slots, or those of an index of before, stay until the next call."""
        index = self._index()
        self.best = (index["index"] if kept is None else kept[f"index.{name}"]).numpy()[:, 1]
        if kept is None:
            self.changed = True
        else:
            self.kept = self.kept[0], np.concatenate([self.kept[1], self.best])
        self._find_free()
        return index

    def committed(self) -> None:
        if self.changed:  # a round that is saved again replaces its own checkpoint, and the one before is still kept
            self.kept, self.changed = (self.kept[1], self.taken), False
            self._find_free()


Rows = MemoryRows | MappedRows


def is_mapped(saved: State) -> bool:
    """True for a snapshot of rows in files."""
    return any(name.startswith("index.") for name in saved)


def check(folder: Path, saved: State) -> None:
    """Raise RunError unless the files in `folder` hold every row that the snapshot `saved` refers to."""
    for key, index in saved.items():
        if key.startswith("index.") and len(index):
            name = key[6:]
            row = np.empty(int(saved[f"size.{name}"]), np.uint8)
            path = folder / f"{name}.rows"
            with _opened(path, "rb") as f:
                for i, slot, total in index.numpy():
                    _fetch(f, path, row, int(i), int(slot), int(total))


def _fetch(f: BufferedRandom, path: Path, row: np.ndarray, i: int, slot: int, total: int) -> None:
    f.seek(slot * len(row))
    if f.readinto(row.data) != len(row) or zlib.crc32(row.data) != total:
        raise RunError(f"{path} is damaged: the row of client number {i} does not match its checksum")


def _bytes(block: Tensor) -> np.ndarray:
    """A block of rows [s, ...] as [s, bytes of a row]; the same memory where the block is contiguous."""
    s = len(block)
    return block.contiguous().view(s, block[0].numel() if s else 0).view(torch.uint8).numpy()


def _same_names(found: Iterable[str], expected: Iterable[str]) -> None:
    if set(found) != set(expected):
        raise RunError(
            f"the client rows of this checkpoint do not fit: found {', '.join(sorted(found)) or 'none'}, "
            f"expected {', '.join(sorted(expected)) or 'none'}; start the run again from the beginning"
        )


@contextmanager
def _opened(path: Path, mode: str) -> Generator[BufferedRandom]:
    try:
        with path.open(mode) as f:
            yield cast(BufferedRandom, f)
    except OSError as e:
        raise RunError(f"cannot {'read' if mode == 'rb' else 'write'} {path}: {reason(e)}") from e
