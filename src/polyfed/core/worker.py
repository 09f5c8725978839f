"""The only code that runs clients: chunks the cohort, gathers private rows and batches, calls `local_update`. No bit
depends on how many threads there are, with one intra-op thread each: a new one has OpenMP's number until it is told."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyfed.base.errors import RunError
from polyfed.base.typed import tf32
from polyfed.compute.batches import Batches, Work, alike
from polyfed.compute.compiled import PATH
from polyfed.compute.optimizers import Constant, StepSizes
from polyfed.compute.split import Split
from polyfed.compute.task import Task
from polyfed.core import contract
from polyfed.core.algorithm import Algorithm, Down, Round, State, decayed
from polyfed.core.explosion import Exploded, exploded, guarded
from polyfed.core.rows import Rows
from polyfed.core.uplinks import Door, Part, Tally, diverged, rows_of

log = logging.getLogger("polyfed")
AHEAD = 4  # chunks per thread that may be done before their turn
PARTS = 8  # most parts of a cohort's work, however many threads there are
WORTH = 2_000_000  # products of a step (samples times parameters) below which a thread costs more than it brings
SMALL = 1 << 20  # products of a full-batch step (samples, padded, times parameters) that cost less than another call


@dataclass(frozen=True)
class Plan:
    """The way clients are run on this machine, part of what a run must repeat to come out again bit for bit."""

    chunk: int  # clients per call at most
    workers: int  # threads
    device: str  # "cpu", "cuda", ...
    path: str  # how gradients are made


class Reply(NamedTuple):
    """The cost of the answers of m clients, in the order of ids."""

    seconds: np.ndarray  # [m]
    steps: np.ndarray  # [m] local ones
    bad: int | None = None  # position of the first client that is not finite; the others' replies are then of no use
    why: str = ""  # a possible cause, beside a step size that is too large


class Stopwatch:
    """Seconds from its making to `stop`; on a CUDA device the device's own, read late, since reading waits."""

    def __init__(self, device: torch.device):
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        self._spent = 0.0
        self._mark(0)

    def _mark(self, which: int) -> None:
        if self._events:
            self._events[which].record()
        else:
            self._spent = time.perf_counter() - self._spent

    def stop(self) -> None:
        self._mark(1)

    def seconds(self) -> float:
        if not self._events:
            return self._spent
        self._events[1].synchronize()
        return self._events[0].elapsed_time(self._events[1]) / 1000


class Done(NamedTuple):
    """A chunk of clients that were run."""

    positions: np.ndarray  # in the cohort
    at: Tensor  # the same, on the device
    private: State
    part: Part
    lost: int | None  # the first private row that is not finite
    watch: Stopwatch
    taken: np.ndarray  # local steps
    together: bool  # the method asked for a batch of several clients, whose arithmetic they share


class Worker:
    """Runs clients of one federation on one device."""

    def __init__(
        self,
        task: Task,
        train: Split,
        keys: np.ndarray,
        work: Work,
        seed: int,
        plan: Plan,
        step_sizes: StepSizes = Constant(),  # noqa: B008  (immutable)
    ):
        self.task, self.train, self.keys, self.work, self.seed, self.plan = task, train, keys, work, seed, plan
        self.step_sizes = step_sizes  # factors, by the round in which a message was sent
        self._most = plan.chunk  # clients at once: fewer once they did not fit
        self._alone: dict[int, bool] = {}  # exchange -> True where calls show that clients do not see each other
        self._pool = ThreadPoolExecutor(plan.workers, "", torch.set_num_threads, (1,)) if plan.workers > 1 else None

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """`function` of every item, on the worker threads."""
        if self._pool is None or len(items) == 1:
            return [function(item) for item in items]
        return list(self._pool.map(function, items))

    def run(
        self, algorithm: Algorithm, rows: Rows, down: State, round: Round, tally: Tally
    ) -> tuple[Reply, list[tuple[Tensor, State]]]:
        """Run one exchange: the clients' uplinks go into `tally`; returns the cost, and their private rows by chunk.

        The rows come as (positions [s] in the cohort, [s, ...] each). down: [m, ...] each, shared messages expanded.
        """
        ids, sent = round.ids.cpu().numpy(), round.sent.cpu().numpy()
        # a client works as of the round of its message: it cannot know when its reply will be taken
        scaled = {t: decayed(algorithm, self.step_sizes.at(t)) for t in sorted(set(sent.tolist()))}
        at = [np.flatnonzero(sent == t) for t in scaled] if len(scaled) > 1 else [np.arange(len(ids))]
        # chunks that share their arithmetic follow from the work and `PARTS`; those that the kernel takes client by
        # client are cut for the threads there are, and their uplinks added one by one, in one order
        unlike = self.plan.path == PATH and self.work.batch_size is not None
        threads = self.plan.workers if self._alone.get(round.phase) else PARTS
        parts = [c for t, some in zip(scaled, at, strict=True) for c in self._chunks(ids, some, t, unlike, threads)]
        # where a method leaves all full batches to the kernel, clients need not be alike: the smallest show whether
        least = max(len(scaled), -(-len(ids) // self._most))
        trying = self.plan.path == PATH and not unlike and len(parts) > 1 + least
        parts = [*parts[-1:], *parts[:-1]] if trying else parts

        def answers(positions: np.ndarray) -> tuple[Tensor, tuple[State, State, Stopwatch, Batches]]:
            at = torch.as_tensor(positions, device=round.ids.device)
            t = int(sent[positions[0]])
            part = round.take(at)._replace(t=t)
            return at, self._chunk(scaled[t], rows, down, part, at, ids[positions], tally.door)

        def run(positions: np.ndarray, unlike: bool) -> Done:
            try:
                at, (private, up, watch, data) = guarded(partial(answers, positions))
            except Exploded as e:
                alone = (int(i) for i in positions if exploded(partial(answers, np.array([i]))))
                raise Exploded(next(alone, int(positions[0]))) from e
            lost, part = diverged(private.values()), tally.reduce(up, at, unlike)
            private = _apart(private, part.rows)
            return Done(positions, at, private, part, lost, watch, data.taken, data.together[0])

        def done() -> Iterator[Done]:
            left, free = parts, unlike
            if trying:
                first, left = self._fitting(partial(run, unlike=False), parts[0]), parts[1:]
                yield from first
                if free := not any(chunk.together for chunk in first):
                    rest, k = [np.setdiff1d(some, parts[0]) for some in at], self.plan.workers
                    left = [
                        c for t, some in zip(scaled, rest, strict=True) for c in self._chunks(ids, some, t, True, k)
                    ]
            yield from chain.from_iterable(self._in_order(partial(self._fitting, partial(run, unlike=free)), left))

        seconds, steps = np.empty(len(ids)), np.empty(len(ids), dtype=np.int64)
        private, watches = list[tuple[Tensor, State]](), list[tuple[np.ndarray, Stopwatch]]()
        try:
            for chunk in done():
                bad = [row for row in (chunk.part.bad, chunk.lost, tally.add(chunk.part, chunk.at)) if row is not None]
                if bad:
                    raise Exploded(int(chunk.positions[min(bad)]))
                self._alone[round.phase] = self._alone.get(round.phase, True) and not chunk.together
                steps[chunk.positions] = chunk.taken
                private.append((chunk.at, chunk.private))
                watches.append((chunk.positions, chunk.watch))
        except Exploded as e:
            return Reply(seconds, steps, e.position), []
        for positions, watch in watches:
            seconds[positions] = watch.seconds() / len(positions)
        return Reply(seconds, steps), private

    def _fitting(self, run: Callable[[np.ndarray], Done], positions: np.ndarray) -> list[Done]:
        """Run all these clients at once, or as many as the accelerator's memory holds."""
        if len(positions) <= self._most:
            try:
                return [run(positions)]
            except torch.OutOfMemoryError:
                if len(positions) == 1:
                    where = self.plan.device
                    raise RunError(f"one client's step does not fit the memory of {where}; lower batch_size") from None
            # here the failed step's tensors are gone, which the error held
            torch.cuda.empty_cache()
            self._most = -(-len(positions) // 2)
            log.warning(
                "%d clients at once do not fit the memory of %s: now %d", len(positions), self.plan.device, self._most
            )
        size = self._most
        cut = [positions[k : k + size] for k in range(0, len(positions), size)]
        return [chunk for some in cut for chunk in self._fitting(run, some)]

    def _in_order(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        """`function` of every item on the worker threads, in the order of items; only a few wait for their turn."""
        if self._pool is None or len(items) == 1:
            yield from map(function, items)
            return
        waiting: deque[Future[Any]] = deque()
        try:
            for item in items:
                waiting.append(self._pool.submit(function, item))
                if len(waiting) > AHEAD * self.plan.workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for left in waiting:
                left.cancel()
            wait(waiting)

    def _parts(self, ids: np.ndarray) -> int:
        """The number of threads that a step of these clients is worth, `PARTS` at most."""
        step = len(ids) * self.work.per_step(self.train.counts[ids]) * self.task.p if len(ids) else 0
        worth = int(step // WORTH) if self.task.net.batched else PARTS
        return 1 if self.task.device.type != "cpu" else max(1, min(PARTS, len(ids), worth))

    def _chunks(self, ids: np.ndarray, at: np.ndarray, t: int, unlike: bool, threads: int) -> list[np.ndarray]:
        """The positions `at` in the cohort in chunks of similar clients, or unlike ones in a chunk for each thread."""
        who, parts = ids[at], self._parts(ids[at])
        most = self._most if unlike else min(self._most, -(-len(who) // parts) or 1)
        cut, counts = min(threads, parts) if unlike else None, self.train.counts[who]
        return [at[c] for c in chunks(self.work, counts, self.keys[who], self.seed, t, most, self.task.p, cut)]

    def _chunk(
        self,
        method: Algorithm,
        rows: Rows,
        down: State,
        round: Round,
        at: Tensor,
        ids: np.ndarray,
        door: Door | None = None,
    ) -> tuple[State, State, "Stopwatch", Batches]:
        """Private rows, uplinks, time and batches of some clients; the method has the step sizes of `round.t`."""
        watch = Stopwatch(self.task.device)
        with torch.no_grad(), tf32(self.task.net.tf32) if self.task.device.type == "cuda" else nullcontext():
            # one stream of batches per exchange: a second local solve of a round draws its own
            purpose = "batches" if round.phase == 0 else f"batches {round.phase}"
            data = Batches(
                self.train, ids, self.keys[ids], self.work, self.seed, round.t, purpose, self.plan.path == PATH
            )
            mine = {name: rows_of(t, at) for name, t in down.items()}
            task = self.task if door is None else door.enter(self.task, mine, round)
            result = method.local_update(task, rows.gather(round.ids), mine, data, round)
            private, up = contract.update(method, result, len(ids), rows.names())
        watch.stop()
        return _apart(private, mine), up, watch, data


def _apart(private: State, message: State) -> State:
    """The private rows, copied where they lie in a message, which the server may change in place."""
    lent = {t.untyped_storage().data_ptr() for t in message.values()}
    return {k: t.clone() if t.untyped_storage().data_ptr() in lent else t for k, t in private.items()}


def chunks(
    work: Work, counts: np.ndarray, keys: np.ndarray, seed: int, t: int, most: int, p: int = 0, parts: int | None = None
) -> list[np.ndarray]:
    """Clients with `counts` [m] samples, longest work first, in chunks of at most `most` similar ones.

    parts: that many shares of equal work instead, in chunks of at most `most`; together they have one order.
    """
    taken, full = work.taken(counts, t, keys, seed), work.batch_size is None
    order = np.argsort(-counts, kind="stable") if full and parts is None else np.lexsort((-counts, -taken))
    if parts is not None:
        cost = (taken * counts if full else taken)[order] + 1e-9  # a sum > 0
        place = ((np.cumsum(cost) - cost / 2) * parts / cost.sum()).astype(int)
        groups = [c[i : i + most] for j in range(parts) for c in [order[place == j]] for i in range(0, len(c), most)]
    # smaller full batches need not be alike: padding them costs less than another call
    elif full and len(counts) * int(counts.max(initial=0)) * p > SMALL:
        groups = alike(counts, most, order)
    else:
        groups = [order[k : k + most] for k in range(0, len(order), most)]
    return [c[np.argsort(-taken[c], kind="stable")] for c in groups]


def expand(down: Down, m: int) -> State:
    """One downlink as m rows each: shared tensors are views without a copy."""
    return {name: t.expand(m, *t.shape) for name, t in down.shared.items()} | dict(down.each)
