"""Per-client tensors [n, ...]: in memory (on the device), or memory-mapped when they would not fit.

A mapped store keeps the rows changed since the last checkpoint beside the file; a checkpoint writes those rows first
(a redo log) and applies them to the file only then, so a crash at any point leaves a consistent state.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from polyfed.core.algorithm import State
from polyfed.core.errors import RunError

NUMPY = {torch.float32: np.float32, torch.float64: np.float64, torch.int64: np.int64, torch.bool: np.bool_}


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
            self.tensors[name][ids] = values

    def snapshot(self) -> State:
        """What a checkpoint must hold."""
        return dict(self.tensors)

    def committed(self) -> None:
        """Called once the checkpoint with the last snapshot is safe."""

    def restore(self, saved: State) -> None:
        for name, values in saved.items():
            self.tensors[name].copy_(values)


class MappedRows:
    """Rows in one sparse file per tensor under `folder`; only the rows in use are in memory.

    A row that was never written is the start value: the file needs no initialising pass and takes no space for it.
    """

    def __init__(self, n: int, start: State, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.n, self.start, self.folder = n, start, folder
        self.maps: dict[str, np.memmap] = {}
        for name, t in start.items():
            path, shape = folder / f"{name}.rows", (n, *t.shape)
            fresh = not path.exists()
            self.maps[name] = np.memmap(path, dtype=NUMPY[t.dtype], mode="w+" if fresh else "r+", shape=shape)
        self.touched, self.commits = (
            np.memmap(folder / name, dtype=kind, mode="r+" if (folder / name).exists() else "w+", shape=(size,))
            for name, kind, size in (("touched", np.bool_, n), ("commits", np.int64, 1))
        )
        self.pending: dict[int, dict[str, Tensor]] = {}

    def gather(self, ids: Tensor) -> Gathered:
        return Gathered(self, ids)

    def names(self) -> list[str]:
        return list(self.start)

    def read(self, name: str, ids: Tensor) -> Tensor:
        start = self.start[name]
        block = torch.empty(len(ids), *start.shape, dtype=start.dtype)
        for k, i in enumerate(ids.tolist()):
            if i in self.pending:
                block[k] = self.pending[i][name]
            elif self.touched[i]:
                block[k] = torch.from_numpy(np.array(self.maps[name][i]))
            else:
                block[k] = start
        return block.to(start.device)

    def scatter(self, ids: Tensor, state: State) -> None:
        kept = {name: self.read(name, ids) for name in self.start if name not in state}
        for k, i in enumerate(ids.tolist()):
            self.pending[i] = {name: values[k].detach().cpu().clone() for name, values in (kept | state).items()}

    def snapshot(self) -> State:
        number, ids = {"commit": torch.tensor(int(self.commits[0]) + 1)}, sorted(self.pending)
        if not ids:
            return number
        rows = {name: torch.stack([self.pending[i][name] for i in ids]) for name in self.start}
        return {**number, "ids": torch.tensor(ids), **{f"rows.{name}": t for name, t in rows.items()}}

    def committed(self) -> None:
        self._apply(int(self.commits[0]) + 1)

    def _apply(self, number: int) -> None:
        """Write the pending rows into the files, which from the first byte on belong to commit `number`."""
        self.commits[0] = number
        self.commits.flush()
        for i, row in self.pending.items():
            for name, values in row.items():
                self.maps[name][i] = values.numpy()
            self.touched[i] = True
        for m in (*self.maps.values(), self.touched):
            m.flush()
        self.pending = {}

    def restore(self, saved: State) -> None:
        number, found = int(saved["commit"]), int(self.commits[0])
        if found not in (number - 1, number):
            raise RunError(
                f"the memory-mapped client rows in {self.folder} do not belong to this checkpoint: they hold the state "
                f"of checkpoint {found} of the run, it is number {number}; start the run anew"
            )
        self.pending = {}
        if "ids" in saved:
            self.scatter(saved["ids"], {name: saved[f"rows.{name}"] for name in self.start})
        self._apply(number)


Rows = MemoryRows | MappedRows
