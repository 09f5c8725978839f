"""The default engine: every client on this machine, in chunks, on CPU threads or one accelerator.

Fixed rules, measured once (see benchmarks/), make the plan; the run folder keeps it for resuming.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyfed.base.allocator import keep_freed_memory
from polyfed.base.errors import ConfigError, RunError
from polyfed.base.system import cores, memory
from polyfed.compute import evaluation
from polyfed.compute.batches import Work
from polyfed.compute.compiled import PATH, path_of
from polyfed.compute.optimizers import Constant, StepSizes
from polyfed.compute.split import Split
from polyfed.compute.task import Task
from polyfed.core import contract
from polyfed.core.algorithm import Algorithm, Down, Round, State, outlined
from polyfed.core.engine import Answers, Engine
from polyfed.core.explosion import guarded
from polyfed.core.messages import size
from polyfed.core.rounds import part
from polyfed.core.rows import MappedRows, MemoryRows, Rows, check, is_mapped
from polyfed.core.uplinks import Tally, rows_of
from polyfed.core.worker import PARTS, WORTH, Plan, Reply, Worker, expand

CACHE = 1_500_000  # bytes of stacked weights that stay in a core's cache
ROOM = 8_000_000  # bytes of models that the kernel is given at a time: memory for vectors of this size is used again
LEAST = 64  # uplinks that are there at a time where they are added up: those of a few chunks per thread
SCORED = 16 * WORTH  # products of an evaluation that are worth another thread


def pick_device(name: str) -> torch.device:
    """ "auto", "cpu" or "cuda" -> a device. Raises ConfigError when it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device: found {name!r}, expected auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda was asked for, and this machine has no usable CUDA device")
    return device


def make_plan(
    task: Task,
    cohort: int,
    batch: float,
    chunk: int | None = None,
    workers: int | None = None,
    path: str | None = None,
    most: float | None = None,
    dense: bool | None = None,
) -> Plan:
    """The plan for cohorts of `cohort` clients with `batch` samples per step each, `most` at most."""
    dense = task.net.batched if dense is None else dense
    on_cpu = task.device.type == "cpu"
    # a thread only for `WORTH` products: small operations would wait for the interpreter's lock longer than they take
    enough = max(1, int(cohort * batch * task.p // WORTH)) if dense else cohort
    threads = workers or (min(cores(), cohort, enough) if on_cpu else 1)
    path = path or path_of(task.net)
    if chunk is None:
        size = task.p * task.w0.element_size()
        if not dense and path != PATH:
            chunk = 1
        elif on_cpu:
            # weights that fit a core's cache, whatever the threads
            chunk = max(1, min(cohort, (ROOM if path == PATH else CACHE) // size))
        else:
            # eight vectors, and twice what a step keeps for its backward pass, whose gradients are as large
            each = 8 * size + 2 * (most or batch) * task.net.sample_bytes
            chunk = max(1, min(cohort, int(free_memory(task.device) // 2 // each)))
    elif chunk < 1:
        raise ConfigError(f"chunk: found {chunk}, expected at least 1")
    return Plan(chunk, threads, str(task.device), path)


def free_memory(device: torch.device) -> int:
    """Bytes of a device's memory that are free for use."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else memory()


class LocalEngine:
    """All clients on this machine: their samples by split, of which "train" is trained on, and their private rows."""

    here = True
    parameters: Mapping[int, int] = {}

    def __init__(
        self,
        task: Task,
        data: Mapping[str, Split],
        rows: Rows,
        keys: np.ndarray,
        work: Work,
        seed: int,
        plan: Plan,
        step_sizes: StepSizes = Constant(),  # noqa: B008  (immutable)
    ):
        keep_freed_memory()
        self.task, self.data, self.rows, self.plan = task, data, rows, plan
        self.worker = Worker(task, data["train"], keys, work, seed, plan, step_sizes)
        self.workers = plan.workers
        self._new: list[tuple[Round, State]] = []  # rows that came of the last exchange
        self._old: list[tuple[Tensor, State]] = []  # rows as they were before the exchanges of this round ahead of it

    def send(self, down: Down, round: Round) -> None:
        """Clients are run when their reply is taken, on the loop's own copy of the message."""

    def wait(self, ids: np.ndarray, first: bool = False) -> Answers:
        """Everybody is here."""
        return Answers(ids, {})

    def exchange(self, algorithm: Algorithm, received: State, round: Round, tally: Tally) -> Reply:
        """One exchange with the clients `round.ids`, see `Worker.run`."""
        if self._new and self._new[0][0].phase != round.phase:  # this exchange sees what the one before it made
            for before, new in self._new:
                self._old.append((before.ids, {name: self.rows.read(name, before.ids) for name in new}))
            self._settle()
        reply, private = self.worker.run(algorithm, self.rows, received, round, tally)
        self._new += [(round.take(at), rows) for at, rows in private if rows]
        return reply

    def _settle(self) -> None:
        for round, private in self._new:
            self.rows.scatter(round.ids, private)
        self._new = []

    def commit(self) -> None:
        self._settle()
        self._old = []

    def abandon(self) -> None:
        for ids, rows in reversed(self._old):  # a row written twice gets its first numbers back
            self.rows.scatter(ids, rows)
        self._new, self._old = [], []

    def evaluate(self, algorithm: Algorithm, down: Down, split: str, block: int = 1 << 28) -> dict[str, np.ndarray]:
        """Each client's metrics [n] for the model it would deploy, with `block` bytes of models at a time."""
        n, data = self.rows.n, self.data[split]
        most = max(1, block // (self.task.p * self.task.w0.element_size()))
        worth = int(len(data.x) * self.task.p // SCORED) if self.task.net.batched else PARTS
        size = min(most, -(-n // max(1, min(PARTS, worth))))  # not of the number of threads, of which no bit depends
        blocks = [np.arange(k, min(k + size, n)) for k in range(0, n, size)]

        def measured(ids: np.ndarray) -> dict[str, np.ndarray]:
            return evaluation.metrics(self.task, self.personal(algorithm, down, ids), data, ids)

        parts = self.worker.map(lambda ids: guarded(partial(measured, ids)), blocks)
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def personal(self, algorithm: Algorithm, down: Down, ids: np.ndarray) -> Tensor:
        """[s, p]: the models that `ids` would deploy; `down` is what all clients receive for it."""
        at = torch.as_tensor(ids, device=self.task.device)
        received = {name: rows_of(t, at) for name, t in expand(down, self.rows.n).items()}
        models = algorithm.personal(self.task, self.rows.gather(at), received)
        return contract.models(algorithm, models, len(ids), self.task.p)

    def private(self, ids: Tensor) -> State:
        return self.rows.gather(ids).whole()

    def place(self, ids: Tensor, rows: State) -> None:
        self.rows.scatter(ids, rows)

    def save(self) -> State:
        return self.rows.snapshot()

    def keep(self, kept: State | None = None) -> State:
        return self.rows.keep(kept)

    def saved(self) -> None:
        self.rows.committed()

    def restore(self, state: State) -> None:
        self.rows.restore(state)

    def close(self) -> "LocalEngine":
        self.worker.close()
        return self


def here(engine: Engine) -> LocalEngine:
    """The engine of a run whose clients are all on this machine. Raises RunError where they are elsewhere."""
    if not isinstance(engine, LocalEngine):
        raise RunError("the clients of this run are elsewhere, and so are their samples and private rows")
    return engine


class MemoryPlan(NamedTuple):
    """Bytes that a run takes at its peak."""

    base: int  # frozen tensors, in memory already, once for all clients and threads
    server: int  # its state, before and after a round
    cohort: int  # messages and private rows of one
    steps: int  # of all threads: models, gradients, optimisers' vectors, activations; or to evaluate, if that is more
    row: int  # one client's private row

    @property
    def more(self) -> int:
        """Bytes that have to be free."""
        return self.server + self.cohort + self.steps

    def words(self) -> str:
        """The parts, in one line."""
        base = f"the frozen part {_size(self.base)} once, " if self.base else ""
        steps = f", local steps {_size(self.steps)}" if self.steps else ""
        return f"{base}the server's state takes {_size(self.server)}, a cohort {_size(self.cohort)}{steps}"

    def check(self, run: str, have: int) -> None:
        """Raise RunError, about the run `run`, where fewer than `more` bytes are free."""
        if self.more > have:
            raise RunError(
                f"{run} does not fit: {self.words()}, {_size(have)} are free; fewer clients per round, a smaller "
                "batch-size, recompute, fewer workers or a smaller model is needed"
            )


def _size(count: float) -> str:
    return f"{count / 1e9:.2g} GB" if count < 99e9 else f"{count / 1e9:,.0f} GB"


def memory_of(
    algorithm: Algorithm,
    task: Task,
    n: int,
    cohort: int,
    added: bool,
    plan: Plan | None = None,
    most: int = 0,
    evaluated: int = 0,
) -> MemoryPlan:
    """The memory that a run of n clients takes, `cohort` at a time; without a plan that of local steps is left out.

    `most` is the number of samples in a step, `evaluated` that of samples to evaluate on; for `added` see `make_rows`.
    """
    row = size(contract.client_state(algorithm, algorithm.init_client(task, task.w0)))
    w = task.p * task.w0.element_size()
    steps = 0
    if plan is not None:
        on_cpu = task.device.type == "cpu"  # 4: as measured there; an accelerator halves a chunk that does not fit
        samples, chunk = (4 * most, plan.chunk) if on_cpu else (2 * most, 1)
        steps = plan.workers * (8 * chunk * w + max(samples, min(evaluated, task.net.block)) * task.net.sample_bytes)
    moving = (min(cohort, LEAST) if added else cohort) * 4 * w + cohort * 2 * row
    return MemoryPlan(size(task.net.fixed), 2 * size(outlined(algorithm, task, n)), moving, steps, row)


def make_rows(
    algorithm: Algorithm,
    task: Task,
    n: int,
    cohort: int,
    folder: Path | None,
    saved: State | None = None,
    added: bool = False,
    copies: int = 1,
) -> Rows:
    """The store of the clients' private tensors, after checking that the run fits this machine.

    added: uplinks are added up as they come, so that no more than `LEAST` of a cohort's are there at a time
    copies: of all rows, that there may be at once
    """
    needed, have = memory_of(algorithm, task, n, cohort, added), free_memory(task.device)
    needed.check(f"{algorithm.name} with {n} clients and {task.p:,} parameters", have)
    per_row = needed.row
    start = contract.client_state(algorithm, algorithm.init_client(task, task.w0))
    # rows of a checkpoint that are in files stay there; rows in memory move there where they do not fit
    mapped = saved is not None and is_mapped(part(saved, "client."))
    fit = n if not per_row else max(0, int((0.6 * have - needed.more) // (per_row * copies)))
    if not mapped and n <= fit:
        return MemoryRows(n, start)
    if folder is None:
        raise RunError(
            f"{algorithm.name} keeps {n * per_row / 1e9:.1f} GB of private client state and {have / 1e9:.1f} GB of "
            f"memory are free, for {fit:,} of {n:,} clients: give the run a folder (out=...), where it can be mapped"
        )
    return MappedRows(n, start, folder / "rows")


def check_rows(folder: Path, saved: State) -> None:
    """Raise RunError when the rows of a checkpoint's tensors `saved` are in files of the run folder, and damaged."""
    for prefix in ("client.", "best.client."):
        check(folder / "rows", part(saved, prefix))
