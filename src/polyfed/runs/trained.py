"""Trained: what training has reached. A live loop and a folder's checkpoint both give one; whatever needs models,
private rows or the server's tensors asks it, and nothing in it goes on training.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from polyfed.base.typed import pieces
from polyfed.compute import evaluation
from polyfed.compute.optimizers import StepSizes
from polyfed.compute.split import Split, restored
from polyfed.compute.task import Task
from polyfed.core.algorithm import Algorithm, State
from polyfed.core.deployed import Deployed
from polyfed.core.engine import Engine
from polyfed.core.ledger import Ledger
from polyfed.core.rounds import Flight, Loop
from polyfed.core.uplinks import rows_of
from polyfed.core.worker import expand
from polyfed.engines.local import LocalEngine

BLOCK = 1 << 28  # bytes of models at a time


class Judged(Protocol):
    """Basis of the scores: the clients' models, or the answers of a yardstick, which has none."""

    def scored(self, split: str) -> dict[str, np.ndarray]: ...
    def shared(self, rows: Split) -> dict[str, np.ndarray]: ...
    def answers(self, test: Split) -> Iterator[tuple[int, Tensor]]: ...
    @property
    def deploys(self) -> str: ...
    def digest(self) -> str: ...


@dataclass(frozen=True, eq=False)
class Trained(Deployed):
    """The state of a run after `t` rounds, by the names that the event loop has for it (see `Loop`).

    engine: keeps the private rows; closed once training is over
    state: what a checkpoint holds, (tensors, meta)
    """

    task: Task
    algorithm: Algorithm
    names: Sequence[str]
    keys: np.ndarray
    samples: Tensor
    server: State
    engine: Engine
    ledger: Ledger
    seed: int
    step_sizes: StepSizes
    t: int
    clock: float
    flights: list[Flight]
    free: tuple[str, ...]
    used: dict[str, set[str]]
    marks: set[str]
    state: Callable[[], tuple[dict[str, Tensor], dict[str, Any]]]

    @classmethod
    def of(cls, loop: Loop) -> "Trained":
        """Take the state that a loop has reached."""
        return cls(**{f.name: getattr(loop, f.name) for f in fields(cls)})

    def ready(self, name: str, split: Split) -> tuple[Task, Split]:
        """The task and the samples of a split as models are evaluated on them: on kept features, where there are."""
        engine = self.engine
        if isinstance(engine, LocalEngine) and engine.task is not self.task and name in engine.data:
            return engine.task, engine.data[name]
        return self.task, split.to(self.task.device, self.task.dtype)

    def shared(self, rows: Split) -> dict[str, np.ndarray]:
        """The metrics [n] of every client's model on the same rows."""
        rows, blocks = rows.to(self.task.device, self.task.dtype), self._blocks(self.task)
        scores = [evaluation.shared(self.task, self.personal(ids), rows) for ids in blocks]
        return {name: np.concatenate([s[name] for s in scores]) for name in scores[0]}

    def _blocks(self, task: Task) -> list[np.ndarray]:
        return np.array_split(np.arange(self.n), -(-self.n * task.p * task.w0.element_size() // BLOCK))

    def answers(self, test: Split) -> Iterator[tuple[int, Tensor]]:
        """Outputs of every client's model for its test samples."""
        task, test = self.ready("test", test)
        for ids in self._blocks(task):
            for i, w in zip(ids, self.personal(ids), strict=True):
                if len(x := test.client(int(i))[0]):
                    yield int(i), restored(task.outputs(w, x), test.units([int(i)]))

    @property
    def deploys(self) -> str:
        """Kind of model that clients deploy: "common", from the server; "own", trained alone; or "personal"."""
        everyone = self.round(np.arange(self.n))
        if type(self.algorithm).personal is Algorithm.personal:
            return "common" if "w" in self.algorithm.deployment(self.server, everyone).shared else "personal"
        sends = sum(self.ledger.totals()) or any(self.algorithm.downlink(self.server, everyone))
        return "personal" if sends else "own"

    def digest(self) -> str:
        """sha256 of the clients' models."""
        sha, size = hashlib.sha256(), max(1, BLOCK // (self.task.p * self.task.w0.element_size()))
        for k in range(0, self.n, size):
            sha.update(raw(self.personal(np.arange(k, min(k + size, self.n)))))
        return sha.hexdigest()

    def parameters(self) -> np.ndarray:
        """[n]: numbers that describe each client's model, those of its structure where the method has one (FedSLR)."""
        counts = np.full(self.n, self.task.p, dtype=np.int64)
        if not self.engine.here:
            for i, count in self.engine.parameters.items():
                counts[i] = count
            return counts
        if type(self.algorithm).parameters is Algorithm.parameters:
            return counts
        down = expand(self.deployment(), self.n)
        for ids in pieces(torch.arange(self.n, device=self.task.device), 16):
            received = {name: rows_of(t, ids) for name, t in down.items()}
            own = self.algorithm.parameters(self.task, self.engine.private(ids), received)
            counts[ids.cpu().numpy()] = self.task.p if own is None else torch.as_tensor(own).cpu().numpy()
        return counts


def raw(t: Tensor) -> bytes:
    """The bytes of a tensor."""
    return t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
