"""The only code that runs clients: chunks the cohort, gathers private rows and batches, calls `local_update`.

Chunks run on worker threads with one intra-op thread each. What is computed does not depend on how clients are
chunked, only how fast (and the last bits of sums).
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyfed.core.algorithm import Algorithm, Down, Round, State
from polyfed.core.batches import Batches, Work, alike
from polyfed.core.rows import Rows
from polyfed.core.split import Split
from polyfed.core.task import Task


@dataclass(frozen=True)
class Plan:
    """How clients are run on this machine; part of what makes a run come out again bit for bit.

    chunk: clients per call at most     workers: threads     device: "cpu", "cuda", ...     path: how gradients are made
    """

    chunk: int
    workers: int
    device: str
    path: str


class Reply(NamedTuple):
    """What a cohort of m clients computed: private states and uplinks [m, ...], in the order of ids; seconds and local
    steps [m] that it took.
    """

    private: State
    up: State
    seconds: np.ndarray
    steps: np.ndarray


class Worker:
    """Runs clients of one federation on one device."""

    def __init__(self, task: Task, train: Split, keys: np.ndarray, work: Work, seed: int, plan: Plan):
        self.task, self.train, self.keys, self.work, self.seed, self.plan = task, train, keys, work, seed, plan
        self._pool = ThreadPoolExecutor(plan.workers) if plan.workers > 1 else None

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """`function` of every item, on the worker threads."""
        if self._pool is None or len(items) == 1:
            return [function(item) for item in items]
        return list(self._pool.map(function, items))

    def run(self, algorithm: Algorithm, rows: Rows, down: State, round: Round) -> Reply:
        """One exchange of the clients `round.ids`. down: [m, ...] each (shared messages already expanded)."""
        ids = round.ids.cpu().numpy()
        chunks = self._chunks(ids, round.t)
        jobs = [(algorithm, rows, down, round, positions) for positions in chunks]
        done = self.map(lambda job: self._chunk(*job), jobs)
        seconds, steps = np.empty(len(ids)), np.empty(len(ids), dtype=np.int64)
        for positions, (*_, spent, taken) in zip(chunks, done, strict=True):
            seconds[positions], steps[positions] = spent / len(positions), taken
        private, up = (_join([part[k] for part in done], chunks) for k in (0, 1))
        return Reply(private, up, seconds, steps)

    def _chunks(self, ids: np.ndarray, t: int) -> list[np.ndarray]:
        """Positions within the cohort, longest work first, cut into chunks of similar clients."""
        counts = self.train.counts[ids]
        taken = self.work.taken(counts, t, self.keys[ids], self.seed)
        if self.work.batch_size is None:
            chunks = alike(counts, self.plan.chunk, np.argsort(-counts, kind="stable"))
            return [c[np.argsort(-taken[c], kind="stable")] for c in chunks]
        order = np.lexsort((-counts, -taken))
        return [order[k : k + self.plan.chunk] for k in range(0, len(order), self.plan.chunk)]

    def _chunk(
        self, algorithm: Algorithm, rows: Rows, down: State, round: Round, positions: np.ndarray
    ) -> tuple[State, State, float, np.ndarray]:
        start = time.perf_counter()
        with torch.no_grad():
            at = torch.as_tensor(positions, device=round.ids.device)
            ids = round.ids.cpu().numpy()[positions]
            # one stream of batches per exchange: a second local solve of a round draws its own
            purpose = "batches" if round.phase == 0 else f"batches {round.phase}"
            data = Batches(self.train, ids, self.keys[ids], self.work, self.seed, round.t, purpose)
            mine = {name: rows_of(t, at) for name, t in down.items()}
            private, up = algorithm.local_update(self.task, rows.gather(round.ids[at]), mine, data, round.take(at))
        return private, up, time.perf_counter() - start, data.taken


def expand(down: Down, m: int) -> State:
    """One downlink as m rows each: shared tensors are views without a copy."""
    return {name: t.expand(m, *t.shape) for name, t in down.shared.items()} | dict(down.each)


def rows_of(t: Tensor, at: Tensor) -> Tensor:
    """Rows of [m, ...]; rows of a shared message stay views of it."""
    return t[: len(at)] if t.stride(0) == 0 else t.index_select(0, at)


def _join(parts: list[State], chunks: list[np.ndarray]) -> State:
    """Chunks' tensors [s, ...] as one tensor [m, ...] in the cohort's order."""
    m = sum(len(positions) for positions in chunks)
    out = {name: t.new_empty(m, *t.shape[1:]) for name, t in parts[0].items()}
    for positions, part in zip(chunks, parts, strict=True):
        for name, t in part.items():
            out[name].index_copy_(0, torch.as_tensor(positions, device=t.device), t)
    return out
