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
from polyfed.core.compiled import PATH
from polyfed.core.optimizers import StepSizes
from polyfed.core.rows import Rows
from polyfed.core.split import Split
from polyfed.core.task import Task
from polyfed.core.uplinks import Part, Tally, added_up, diverged, rows_of

AHEAD = 4  # chunks per thread that may be done before their turn
SMALL = 1 << 20  # products of a full-batch step (samples, padded, times parameters) that cost less than another call


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
    """What answering cost a cohort of m clients, in the order of ids: seconds and local steps [m].

    bad: position of the first client that reached a number that is not finite; the others' replies are then of no use
    """

    seconds: np.ndarray
    steps: np.ndarray
    bad: int | None = None


class Worker:
    """Runs clients of one federation on one device.

    step_sizes: what the local step sizes of a message sent in round t are multiplied by
    """

    def __init__(
        self,
        task: Task,
        train: Split,
        keys: np.ndarray,
        work: Work,
        seed: int,
        plan: Plan,
        step_sizes: StepSizes = StepSizes(),  # noqa: B008  (immutable)
    ):
        self.task, self.train, self.keys, self.work, self.seed, self.plan = task, train, keys, work, seed, plan
        self.step_sizes = step_sizes
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
    ) -> tuple[Reply, list[tuple[Tensor, State]]]:
        """One exchange of the clients `round.ids`, whose uplinks go into `tally`.

        Returns the cost, and the clients' private rows by chunk: (their positions [s] in the cohort, [s, ...] each).

        A client works as of the round in which its message was sent: it cannot know when its reply will be taken.

        down: [m, ...] each (shared messages already expanded)
        server: if what the method needs of its uplinks is to be seen from the first chunk
        """
        ids, sent = round.ids.cpu().numpy(), round.sent.cpu().numpy()
        scaled = {t: algorithm.decayed(self.step_sizes.at(t)) for t in sorted(set(sent.tolist()))}
        at = [np.flatnonzero(sent == t) for t in scaled] if len(scaled) > 1 else [np.arange(len(ids))]
        parts = [c for t, some in zip(scaled, at, strict=True) for c in self._chunks(ids, some, t)]
        places = [torch.as_tensor(positions, device=round.ids.device) for positions in parts]

        def work(at: Tensor) -> tuple[State, Part, int | None, float, np.ndarray]:
            private, up, spent, taken = self._chunk(scaled, rows, down, round, at)
            if server is not None and at is places[0]:
                tally.added |= added_up(algorithm.aggregate, server, up, round.take(at))
            return private, tally.reduce(up, at), diverged(private.values()), spent, taken

        seconds, steps = np.empty(len(ids)), np.empty(len(ids), dtype=np.int64)
        private: list[tuple[Tensor, State]] = []
        for positions, at, (mine, part, lost, spent, taken) in zip(
            parts, places, self._in_order(work, places, first_alone=server is not None), strict=True
        ):
            bad = [row for row in (part.bad, lost) if row is not None]
            if bad:
                return Reply(seconds, steps, int(positions[min(bad)])), []
            tally.add(part, at)
            private.append((at, mine))
            seconds[positions], steps[positions] = spent / len(positions), taken
        return Reply(seconds, steps), private

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

    def _chunks(self, ids: np.ndarray, at: np.ndarray, t: int) -> list[np.ndarray]:
        """The positions `at` in the cohort, longest work first, cut into chunks of similar clients."""
        who = ids[at]
        found = chunks(self.work, self.train.counts[who], self.keys[who], self.seed, t, self.plan.chunk, self.task.p)
        return [at[c] for c in found]

    def _chunk(
        self, scaled: dict[int, Algorithm], rows: Rows, down: State, round: Round, at: Tensor
    ) -> tuple[State, State, float, np.ndarray]:
        """scaled: the method as of each round in which messages were sent"""
        start = time.perf_counter()
        with torch.no_grad():
            round = round.take(at)
            round = round._replace(t=int(round.sent[0]))
            ids = round.ids.cpu().numpy()
            # one stream of batches per exchange: a second local solve of a round draws its own
            purpose = "batches" if round.phase == 0 else f"batches {round.phase}"
            data = Batches(
                self.train, ids, self.keys[ids], self.work, self.seed, round.t, purpose, self.plan.path == PATH
            )
            mine = {name: rows_of(t, at) for name, t in down.items()}
            private, up = scaled[round.t].local_update(self.task, rows.gather(round.ids), mine, data, round)
        return private, up, time.perf_counter() - start, data.taken


def chunks(
    work: Work, counts: np.ndarray, keys: np.ndarray, seed: int, t: int, most: int, p: int = 0
) -> list[np.ndarray]:
    """Clients with `counts` [m] samples, longest work first, cut into chunks of at most `most` similar ones.

    p: parameters. Full batches so small that padding them costs less than another call need not be similar.
    """
    taken = work.taken(counts, t, keys, seed)
    if work.batch_size is None:
        order = np.argsort(-counts, kind="stable")
        small = len(counts) * int(counts.max(initial=0)) * p <= SMALL
        found = _cut(order, most) if small else alike(counts, most, order)
        return [c[np.argsort(-taken[c], kind="stable")] for c in found]
    return _cut(np.lexsort((-counts, -taken)), most)


def _cut(order: np.ndarray, most: int) -> list[np.ndarray]:
    return [order[k : k + most] for k in range(0, len(order), most)]


def expand(down: Down, m: int) -> State:
    """One downlink as m rows each: shared tensors are views without a copy."""
    return {name: t.expand(m, *t.shape) for name, t in down.shared.items()} | dict(down.each)
