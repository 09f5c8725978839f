"""The engine for many machines: Ray actors hold shards of the clients, each a local engine with its samples and rows.

An actor adds up its blocks of clients along a fixed tree: the bits of a sum do not depend on the number of actors.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from polyfed.base.errors import ConfigError, RunError
from polyfed.base.randomness import client_keys
from polyfed.compute.batches import Work
from polyfed.compute.optimizers import Constant, StepSizes
from polyfed.compute.split import Split
from polyfed.compute.task import Task
from polyfed.core.algorithm import Algorithm, Down, Round, State
from polyfed.core.engine import TRIES, Answers, Lost, Silent, died
from polyfed.core.rows import MappedRows, MemoryRows
from polyfed.core.uplinks import Part, Tally, Wanted, rows_of
from polyfed.core.worker import Plan, Reply, expand
from polyfed.engines.local import LocalEngine
from polyfed_ray.cluster import PATIENCE, connect, needs, ray

Gone: type[Exception] = ray.exceptions.RayActorError
Late: type[Exception] = ray.exceptions.GetTimeoutError
BLOCKS = 64, 1024  # at least and at most; powers of two
HANGS = 3600.0  # seconds after which an answer is given up, or 20 times the longest one

Sums = dict[tuple[str, str], Tensor]
Make = Callable[[Mapping[str, Split]], LocalEngine]  # from the samples of some clients
Node = tuple[int, int]  # blocks from, and how many: a power of two, from a multiple of it


def blocks(n: int) -> int:
    """Number of blocks for n clients: beyond 64, a power of two with at least 16 clients to a block."""
    return min(max(BLOCKS[0], 1 << (n // 16).bit_length() >> 1), BLOCKS[1])


def total(nodes: Mapping[Node, Sums], first: int, size: int) -> Sums | None:
    """The sum over the blocks of a node, along the tree; None where no block of it has clients."""
    if (first, size) in nodes or size == 1:
        return nodes.get((first, size))
    a, b = (total(nodes, at, size // 2) for at in (first, first + size // 2))
    return {k: a[k] + b[k] for k in a} if a is not None and b is not None else a if b is None else b


def cover(first: int, end: int, size: int, at: int = 0) -> list[Node]:
    """The fewest nodes of a tree over `size` blocks that are together those from `first` to before `end`."""
    if first <= at and at + size <= end:
        return [(at, size)]
    if at + size <= first or end <= at:
        return []
    return cover(first, end, size // 2, at) + cover(first, end, size // 2, at + size // 2)


class Asked(NamedTuple):
    """One exchange as an actor is asked for it."""

    t: int
    n: int
    phase: int
    at: np.ndarray  # rows of the cohort
    ids: np.ndarray  # positions in the shard
    blocks: np.ndarray
    sent: np.ndarray
    total: float
    added: Wanted
    each: State


class Shard:
    """An actor: a process that holds some clients at a time, with their samples and private rows, in a local engine."""

    def hold(self, local: Make, data: Mapping[str, Split], algorithm: Algorithm, nodes: list[Node]) -> None:
        """local: makes the engine of these data"""
        torch.set_num_threads(1)
        self.engine = local(data)
        self.task, self.algorithm, self.nodes = self.engine.task, algorithm, nodes
        self.samples = torch.as_tensor(data["train"].counts, dtype=self.task.dtype, device=self.task.device)

    def exchange(self, request: Asked, shared: Mapping[str, np.ndarray]) -> "Done":
        down = {name: torch.tensor(a).to(self.task.device) for name, a in shared.items()}
        by_node: dict[Node, Sums] = {}
        rows: list[State] = []
        places: list[np.ndarray] = []
        size, seconds, steps = 0, np.zeros(len(request.at)), np.zeros(len(request.at), dtype=np.int64)
        for block in np.unique(request.blocks):
            here = np.flatnonzero(request.blocks == block)
            ids = torch.as_tensor(request.ids[here], device=self.task.device)
            sent = torch.as_tensor(request.sent[here], device=self.task.device)
            round = Round(request.t, request.n, request.phase, ids, self.samples[ids], sent, self.engine.worker.seed)
            received = expand(Down(down, {k: t[torch.as_tensor(here)] for k, t in request.each.items()}), len(here))
            whole = self.samples.new_tensor(request.total)
            tally = Tally(round, received, request.added, total=whole)
            reply = self.engine.exchange(self.algorithm, received, round, tally)
            if reply.bad is not None:
                return Done(request.at, {}, {}, 0, seconds, steps, int(request.at[here[reply.bad]]))
            part = tally.part()
            by_node[int(block), 1], size = part.sums, part.bytes
            rows.append(part.rows)
            places.append(here)
            seconds[here], steps[here] = reply.seconds, reply.steps
        order = np.argsort(np.concatenate(places))
        kept = {name: torch.cat([r[name] for r in rows])[torch.as_tensor(order)].cpu() for name in rows[0]}
        sums = {node: s for node in self.nodes if (s := total(by_node, *node)) is not None}
        return Done(request.at, kept, sums, size, seconds, steps, None)

    def commit(self) -> State:
        """The index with which another actor could open the rows' files."""
        self.engine.commit()
        if isinstance(self.engine.rows, MemoryRows):
            return {}
        index = {k: t.clone() for k, t in self.engine.save().items()}
        self.engine.saved()
        return index

    def abandon(self) -> None:
        self.engine.abandon()

    def pid(self) -> int:
        return os.getpid()

    def reopen(self, index: State) -> None:
        self.engine.restore(index)

    def rows(self) -> State:
        everyone = torch.arange(self.engine.rows.n, device=self.task.device)
        return {k: self.engine.rows.read(k, everyone).cpu() for k in self.engine.rows.names()}

    def write(self, rows: State) -> State:
        everyone = torch.arange(self.engine.rows.n, device=self.task.device)
        self.engine.rows.scatter(everyone, {k: t.to(self.task.device) for k, t in rows.items()})
        return self.commit()

    def evaluate(self, shared: Mapping[str, np.ndarray], each: State, split: str) -> dict[str, np.ndarray]:
        return self.engine.evaluate(self.algorithm, self._down(shared, each), split)

    def personal(self, shared: Mapping[str, np.ndarray], each: State, ids: np.ndarray) -> Tensor:
        return self.engine.personal(self.algorithm, self._down(shared, each), ids).cpu()

    def _down(self, shared: Mapping[str, np.ndarray], each: State) -> Down:
        device = self.task.device
        here = {name: torch.tensor(a).to(device) for name, a in shared.items()}
        return Down(here, {name: t.to(device) for name, t in each.items()})


class Done(NamedTuple):
    """An actor's answer: kept rows, in the order of `at`, sums, bytes of one client, costs; `bad` diverged."""

    at: np.ndarray
    rows: State
    sums: dict[Node, Sums]
    bytes: int
    seconds: np.ndarray
    steps: np.ndarray
    bad: int | None


IDLE: dict[str, list[Any]] = {}  # by device, actors that no engine uses: starting one takes longer than a small run


class RayEngine:
    """Runs clients in `workers` actors, of the cluster at `address` or one on this machine.

    Actors keep private rows in `folder`, which all machines see; without it a lost actor's rows are lost.
    """

    here = True
    parameters: Mapping[int, int] = {}

    def __init__(
        self,
        task: Callable[[], Task],
        data: Mapping[str, Split],
        names: Sequence[str],
        algorithm: Algorithm,
        work: Work,
        seed: int,
        plan: Plan,
        step_sizes: StepSizes = Constant(),  # noqa: B008  (immutable)
        *,
        workers: int = 2,
        folder: Path | None = None,
        address: str | None = None,
    ):
        self.n, self.workers, self.names, self.plan = len(names), workers, names, plan
        self.tree = blocks(self.n)
        if not 1 <= workers <= (most := min(self.tree, self.n)):
            raise ConfigError(f"workers: found {workers}, expected 1 to {most} with {self.n} clients")
        self._needs = needs(plan.device)
        patience = connect(workers, address, self._needs, idle := IDLE.setdefault(plan.device, []))
        given = getattr(task, "args", ())
        for user in (task, type(algorithm), *given, *map(type, given)):
            _by_value(user)
        self.blocks = np.arange(self.n) * self.tree // self.n  # [n] the block of each client
        edges = np.arange(workers + 1) * self.tree // workers
        self.home = np.searchsorted(edges, self.blocks, side="right") - 1  # [n] the actor of each client
        self.first = np.searchsorted(self.home, np.arange(workers))  # [workers] its first client
        local = partial(_local, task, algorithm, work, seed, plan, step_sizes)
        self._local = partial(local, names, None, data)
        self._shards: list[tuple[Any, ...]] = []
        for k in range(workers):
            mine = np.flatnonzero(self.home == k)
            held = ray.put({name: split.select(mine) for name, split in data.items()})
            place = None if folder is None else str(folder / f"shard-{k}")
            here, nodes = [names[int(i)] for i in mine], cover(int(edges[k]), int(edges[k + 1]), self.tree)
            self._shards.append((partial(local, here, place), held, algorithm, nodes))
        self._actors = [idle.pop() if idle else self._new() for _ in range(workers)]
        try:
            ray.get(
                [a.hold.remote(*parts) for a, parts in zip(self._actors, self._shards, strict=True)], timeout=patience
            )
        except Late:
            for actor in self._actors:
                ray.kill(actor)
            there = int(ray.cluster_resources().get("CPU", 0))
            then = f"within {patience:.0f} seconds; the cluster has {there} processors"
            raise RunError(f"workers: {workers} Ray actors have not started {then}") from None
        self._index: list[State] = [{} for _ in range(workers)]  # `Shard.commit` of each
        self._longest = 0.0  # seconds that an answer took
        self._stateless = not algorithm.init_client(task(), task().w0)

    # the engine

    def send(self, down: Down, round: Round) -> None:
        """Clients are run when their reply is taken."""

    def wait(self, ids: np.ndarray, first: bool = False) -> Answers:
        return Answers(ids, {})

    def exchange(self, algorithm: Algorithm, received: State, round: Round, tally: Tally) -> Reply:
        ids, sent = round.ids.cpu().numpy(), round.sent.cpu().numpy()
        common = {name: t[0] for name, t in received.items() if t.stride(0) == 0}
        shared = ray.put(_arrays(common))
        added = {} if tally.forge is not None else dict(tally.added)  # attackers are at this end
        jobs: dict[int, Any] = {}
        for k in np.unique(self.home[ids]):
            at = np.flatnonzero(self.home[ids] == k)
            each = {name: rows_of(t, torch.as_tensor(at)).cpu() for name, t in received.items() if name not in common}
            request = Asked(
                round.t, round.n, round.phase, at, ids[at] - self.first[k], self.blocks[ids[at]], sent[at],
                float(round.samples.sum()), added, each,
            )  # fmt: skip
            jobs[int(k)] = self._ask(k, "exchange", request, shared)
        answers = cast(list[Done], self._got(jobs))
        seconds, steps = np.zeros(len(ids)), np.zeros(len(ids), dtype=np.int64)
        for done in answers:
            seconds[done.at], steps[done.at] = done.seconds, done.steps
        bad = [done.bad for done in answers if done.bad is not None]
        if bad:
            return Reply(seconds, steps, min(bad))
        device = round.samples.device
        for done in answers:
            at = torch.tensor(done.at, device=device)
            rows = {name: t.to(device) for name, t in done.rows.items()}
            part = Tally(round, received, forge=tally.forge).reduce(rows, at)
            if part.bad is not None:
                return Reply(seconds, steps, int(done.at[part.bad]))
            tally.add(Part(part.rows, {}, done.bytes, None), at)
        sums = total({node: s for done in answers for node, s in done.sums.items()}, 0, self.tree)
        if sums:
            none = torch.zeros(0, dtype=torch.int64, device=device)
            tally.add(Part({}, {k: t.to(device) for k, t in sums.items()}, answers[0].bytes, None), none)
        return Reply(seconds, steps)

    def commit(self) -> None:
        try:
            self._index = self._all("commit")
        except Lost as e:  # the server has used these replies: the round cannot be repeated
            if not self._stateless:
                raise RunError(f"{e} is gone while its clients' private rows were written; resume the run") from None

    def abandon(self) -> None:
        with suppress(Lost):  # a new actor has the rows as of the last commit
            self._all("abandon")

    def evaluate(self, algorithm: Algorithm, down: Down, split: str) -> dict[str, np.ndarray]:
        shared = ray.put(_arrays(down.shared))
        parts = self._read(
            lambda: {k: self._ask(k, "evaluate", shared, self._rows_for(k, down), split) for k in range(self.workers)}
        )
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def personal(self, algorithm: Algorithm, down: Down, ids: np.ndarray) -> Tensor:
        shared, home = ray.put(_arrays(down.shared)), self.home[ids]
        at = {int(k): np.flatnonzero(home == k) for k in np.unique(home)}
        models = self._read(
            lambda: {
                k: self._ask(k, "personal", shared, self._rows_for(k, down), ids[rows] - self.first[k])
                for k, rows in at.items()
            }
        )
        return torch.cat(models)[torch.as_tensor(np.argsort(np.concatenate([*at.values()])))]

    def private(self, ids: Tensor) -> State:
        return {name: t[ids.cpu()] for name, t in self.save().items()}

    def place(self, ids: Tensor, rows: State) -> None:
        self.restore({name: t.index_copy(0, ids.cpu(), rows[name].cpu()) for name, t in self.save().items()})

    def save(self) -> State:
        parts = self._read(lambda: {k: self._ask(k, "rows") for k in range(self.workers)})
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def keep(self, kept: State | None = None) -> State:
        return self.save() if kept is None else kept

    def saved(self) -> None:
        """A checkpoint holds the rows themselves."""

    def restore(self, state: State) -> None:
        ends = [*self.first[1:].tolist(), self.n]
        jobs = {
            k: self._ask(k, "write", {name: t[int(self.first[k]) : ends[k]] for name, t in state.items()})
            for k in range(self.workers)
        }
        self._index = self._got(jobs)

    def close(self) -> "LocalEngine | RayEngine":
        """The actors are free for another run; the rows are fetched to this process, unless they are lost."""
        try:
            rows, here = self.save(), self._local()
        except (Lost, RunError):
            for actor in self._actors:
                ray.kill(actor)
            self._actors = []
            return self
        everyone = torch.arange(self.n, device=here.task.device)
        here.rows.scatter(everyone, {k: t.to(here.task.device) for k, t in rows.items()})
        IDLE[self.plan.device] += self._actors
        self._actors = []
        return here

    # actors

    def _new(self) -> Any:
        return ray.remote(num_cpus=self._needs["CPU"], num_gpus=self._needs.get("GPU", 0))(Shard).remote()

    def _rows_for(self, k: int, down: Down) -> State:
        mine = torch.as_tensor(np.flatnonzero(self.home == k))
        return {name: t.cpu()[mine] for name, t in down.each.items()}

    def _ask(self, k: int, method: str, *given: Any) -> Any:
        if not self._actors:
            raise RunError("the workers of this run are gone; resume it")
        return getattr(self._actors[int(k)], method).remote(*given)

    def _all(self, method: str) -> list[Any]:
        return self._got({k: self._ask(k, method) for k in range(self.workers)})

    def _read(self, ask: Callable[[], dict[int, Any]]) -> list[Any]:
        """Answers that change nothing: where an actor was lost, the new one has the rows as of the last commit."""
        for again in range(TRIES - 1, -1, -1):
            try:
                return self._got(ask())
            except Lost as e:
                if not again:
                    raise Silent(died("an answer", e)) from None
        raise AssertionError

    def _got(self, jobs: dict[int, Any]) -> list[Any]:
        """The answers, in the order of actors. An actor that is gone is made again, and `Lost` raised."""
        answers, gone, begun = list[Any](), list[int](), time.monotonic()
        for k, job in jobs.items():
            try:
                answers.append(ray.get(job, timeout=max(HANGS, 20 * self._longest)))
            except Gone:
                gone.append(k)
            except Late:  # it hangs
                ray.kill(self._actors[k])
                gone.append(k)
        if not gone:
            self._longest = max(self._longest, time.monotonic() - begun)
            return answers
        for k in gone:
            if not self._stateless and not self._index[k]:
                raise RunError(
                    f"worker {k} is gone, and with it its clients' private rows; resume the run, and give it a folder "
                    "(out=...) so that a lost worker costs one round"
                )
            self._actors[k] = self._new()
            try:
                ray.get(self._actors[k].hold.remote(*self._shards[k]), timeout=PATIENCE)
                if self._index[k]:
                    ray.get(self._ask(k, "reopen", self._index[k]), timeout=PATIENCE)
            except (Gone, Late) as e:
                raise RunError(f"worker {k} is gone and cannot be started again ({type(e).__name__})") from None
        raise Lost(", ".join(f"worker {k}" for k in gone))


def _local(
    make: Callable[[], Task],
    algorithm: Algorithm,
    work: Work,
    seed: int,
    plan: Plan,
    step_sizes: StepSizes,
    names: Sequence[str],
    folder: str | None,
    data: Mapping[str, Split],
) -> LocalEngine:
    """A local engine of these clients; their private rows are in `folder`, or in memory without one."""
    task = make()
    start = algorithm.init_client(task, task.w0)
    rows = MemoryRows(len(names), start) if folder is None else MappedRows(len(names), start, Path(folder))
    here = {name: task.place(split) for name, split in data.items()}
    return LocalEngine(task, here, rows, client_keys(names), work, seed, plan, step_sizes)


def _by_value(user: Any) -> None:
    """Code of the user's own files goes to the actors itself: they may not be able to import it."""
    name = str(getattr(user, "__module__", ""))
    file = getattr(sys.modules.get(name), "__file__", None)
    importable = name.partition(".")[0] in {"polyfed", *sys.stdlib_module_names} or "site-packages" in str(file)
    if file is not None and not importable:
        ray.cloudpickle.register_pickle_by_value(sys.modules[name])


def _arrays(tensors: State) -> dict[str, np.ndarray]:
    return {name: t.detach().cpu().numpy() for name, t in tensors.items()}
