"""The only code that runs clients: chunks the cohort, gathers private rows and batches, calls `local_update`.

Chunks run on worker threads with one intra-op thread each. What is computed does not depend on how clients are
chunked, only how fast (and the last bits of sums).
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
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
from polyfed.core.uplinks import Part, Tally, added_up, joined, rows_of

AHEAD = 4  # chunks per thread that may be done before their turn


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
    """What a cohort of m clients computed, besides its uplinks, in the order of ids: private states [m, ...], and the
    seconds and local steps [m] that it took.

    bad: position of the first client that reached a number that is not finite
    """

    private: State
    seconds: np.ndarray
    steps: np.ndarray
    bad: int | None = None


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

    def run(
        self, algorithm: Algorithm, rows: Rows, down: State, round: Round, tally: Tally, server: State | None = None
    ) -> Reply:
        """One exchange of the clients `round.ids`, whose uplinks go into `tally`. down: [m, ...] each (shared messages
        already expanded).

        server: if what the method needs of its uplinks is to be seen from the first chunk
        """
        ids = round.ids.cpu().numpy()
        chunks = self._chunks(ids, round.t)
        places = [torch.as_tensor(positions, device=round.ids.device) for positions in chunks]

        def work(at: Tensor) -> tuple[State, Part, float, np.ndarray]:
            private, up, spent, taken = self._chunk(algorithm, rows, down, round, at)
            if server is not None and at is places[0]:
                tally.added |= added_up(algorithm.aggregate, server, up, round.take(at))
            return private, tally.reduce(up, private, at), spent, taken

        seconds, steps = np.empty(len(ids)), np.empty(len(ids), dtype=np.int64)
        private: list[State] = []
        for positions, at, (mine, part, spent, taken) in zip(
            chunks, places, self._in_order(work, places, first_alone=server is not None), strict=True
        ):
            if part.bad is not None:
                return Reply({}, seconds, steps, int(positions[part.bad]))
            tally.add(part, at)
            private.append(mine)
            seconds[positions], steps[positions] = spent / len(positions), taken
        return Reply(joined(private, places), seconds, steps)

    def _in_order(self, function: Callable[[Any], Any], items: Sequence[Any], first_alone: bool) -> Iterator[Any]:
        """`function` of every item on the worker threads, in the order of items; only a few wait for their turn."""
        if self._pool is None or len(items) == 1:
            yield from map(function, items)
            return
        waiting: deque[Future[Any]] = deque()
        try:
            for k, item in enumerate(items):
                if k == 0 and first_alone:
                    yield function(item)
                    continue
                waiting.append(self._pool.submit(function, item))
                if len(waiting) > AHEAD * self.plan.workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for left in waiting:
                left.cancel()
            wait(waiting)

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
        self, algorithm: Algorithm, rows: Rows, down: State, round: Round, at: Tensor
    ) -> tuple[State, State, float, np.ndarray]:
        start = time.perf_counter()
        with torch.no_grad():
            ids = round.ids[at].cpu().numpy()
            # one stream of batches per exchange: a second local solve of a round draws its own
            purpose = "batches" if round.phase == 0 else f"batches {round.phase}"
            data = Batches(self.train, ids, self.keys[ids], self.work, self.seed, round.t, purpose)
            mine = {name: rows_of(t, at) for name, t in down.items()}
            private, up = algorithm.local_update(self.task, rows.gather(round.ids[at]), mine, data, round.take(at))
        return private, up, time.perf_counter() - start, data.taken


def expand(down: Down, m: int) -> State:
    """One downlink as m rows each: shared tensors are views without a copy."""
    return {name: t.expand(m, *t.shape) for name, t in down.shared.items()} | dict(down.each)
