"""admit: clients that come after training, added by the method's rule while the others stay as they are, and compared
with training alone.
"""

import copy
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from polyfed.algorithms.local import Local
from polyfed.base.arguments import checked
from polyfed.base.errors import ConfigError
from polyfed.base.randomness import client_keys
from polyfed.base.values import COUNTED, Limits
from polyfed.compute.batches import padded
from polyfed.compute.check import check
from polyfed.compute.split import Split
from polyfed.core.algorithm import KNOWN, Algorithm, State
from polyfed.core.ledger import COLUMNS
from polyfed.core.newcomer import Newcomer
from polyfed.core.rounds import Loop
from polyfed.core.rows import MemoryRows
from polyfed.core.schedule import Uniform
from polyfed.data.federation import Federation
from polyfed.engines.local import LocalEngine, here, make_plan
from polyfed.runs.result import Result
from polyfed.runs.trained import Trained
from polyfed_members.admission import Admission
from polyfed_members.apart import Apart, newcomer
from polyfed_members.newcomers import fits


@checked
def admit(
    run: Result,
    newcomers: Federation,
    exchanges: Annotated[int, Limits(ge=0, le=COUNTED)] = 10,
    *,
    start: Literal["offered", "common"] = "offered",
    alone: Algorithm | None = None,
) -> Admission:
    """Add new clients to a finished run by the method's own rule.

    A common model needs no exchange beyond entry. A method that adapts the model to a client (Ditto, FedRep, ...) does
    so against the frozen common part, and a method with one model per cluster places the newcomer. Where the server
    keeps every client's model, the newcomer's is added after its first local training. Newcomers do not affect each
    other. Bytes count every exchange, and models downloaded at entry to keep or to choose from.

    Parameters
    ----------
    run : Result
        The run, which stays as it is, bit for bit.
    newcomers : Federation
        Data of the newcomers, under names that are new to the run.
    exchanges : int
        Rounds of each newcomer, with the run's amount of local work; batches, decaying step sizes and growing numbers
        of steps are those of a client's first rounds.
    start : {"offered", "common"}
        "offered": of the models that a method offers (FPFC those of its clusters), the one with the least training
        loss; "common": the start of the training.
    alone : Algorithm or None
        The comparison; None: Local with the method's step size.

    Returns
    -------
    Admission
        Each newcomer's model, and its scores after every exchange.
    """
    if run.settings.privacy:
        raise ConfigError("privacy: not with admit, whose exchanges no budget is kept for")
    fits(run.outline, newcomers)
    before = run.trained
    task = before.task
    check(task, newcomers.train, run.outline.classes)
    splits = {k: s.to(task.device, task.dtype) for k, s in (("train", newcomers.train), ("test", newcomers.test))}
    split = "test" if len(newcomers.test.x) else "train"
    lr = getattr(before.algorithm, "lr", None)
    alone = alone or (Local(float(lr)) if isinstance(lr, int | float) else Local())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        told = [
            _Admitting(before, algorithm, server, newcomers, splits, start).told(exchanges, split)
            for algorithm, server in ((before.algorithm, before.server), (alone, {KNOWN: before.server[KNOWN]}))
        ]
    finally:
        torch.set_num_threads(threads)
    (records, personal, clusters), (other, _, _) = told
    metric = task.scores[0]
    table = pd.DataFrame(records).assign(alone=[r[metric.name] for r in other])
    table = table[["exchange", "client", metric.name, "alone", "down_bytes", "up_bytes"]]
    return Admission(newcomers.names, table, metric, split, personal, clusters, task, before.algorithm.name)


class _Admitting:
    """All newcomers of one method, each with its own `Newcomer` at the server; the event loop trains them together."""

    def __init__(
        self,
        before: Trained,
        algorithm: Algorithm,
        server: State,
        federation: Federation,
        data: dict[str, Split],
        start: str,
    ):
        task, train, self.before, self.algorithm = before.task, data["train"], before, algorithm
        first = newcomer(algorithm, task, server, before.samples)
        self.newcomers = [copy.copy(first) for _ in range(federation.n)]
        keys, work = client_keys(federation.names), here(before.engine).worker.work
        plan = make_plan(task, federation.n, work.per_step(train.counts))
        counts = torch.as_tensor(train.counts, dtype=task.dtype, device=task.device)
        entered = [self._enter(new, i, train, float(counts[i]), start) for i, new in enumerate(self.newcomers)]
        rows = MemoryRows(federation.n, entered[0][0])
        engine = LocalEngine(task, data, rows, keys, work, before.seed, plan, before.step_sizes)
        self.loop = Loop(
            task, train.counts, federation.names, Apart(algorithm, self.newcomers), Uniform(), engine, before.seed,
            before.step_sizes,
        )  # fmt: skip
        everyone, zero = np.arange(federation.n), np.zeros(federation.n)
        rows.scatter(
            torch.as_tensor(everyone, device=task.device),
            {k: torch.stack([private[k] for private, _ in entered]) for k in entered[0][0]},
        )
        self.loop.ledger.record(-1, everyone, zero, np.array([size for _, size in entered]), zero, zero, zero)

    def _enter(self, new: Newcomer, i: int, train: Split, samples: float, start: str) -> tuple[State, int]:
        """(private state, bytes that it was offered) of a newcomer at entry."""
        offered = None if start == "common" and new.trains else new.offered()
        if offered is None:
            return new.enter(-1, samples), 0
        data = padded(train, np.array([i]))
        loss = torch.cat([self.before.task.loss_of(w[None], data) for w in offered])
        return new.enter(int(loss.argmin()), samples), offered.numel() * offered.element_size()

    def told(self, exchanges: int, split: str) -> tuple[list[dict[str, Any]], Tensor, np.ndarray | None]:
        """(one record per exchange and newcomer, the models at the end, clusters)."""
        records: list[dict[str, Any]] = []
        try:
            for t in range(exchanges + 1):
                if t and self.newcomers[0].trains:
                    self.loop.step()
                score = self.loop.scored(split)
                self.loop.refuse_diverged(score, split)
                down, up = self._moved()
                for i, name in enumerate(self.loop.names):
                    sizes = {"down_bytes": int(down[i]), "up_bytes": int(up[i])}
                    records.append({"exchange": t, "client": name} | {k: float(v[i]) for k, v in score.items()} | sizes)
            return records, self.loop.personal(np.arange(self.loop.n)), self._clusters()
        finally:
            self.loop.engine.close()

    def _moved(self) -> tuple[np.ndarray, np.ndarray]:
        """Bytes down and up of every newcomer so far."""
        book = self.loop.ledger.array()
        who = book[:, COLUMNS.index("client")].astype(int)
        moved = (book[:, COLUMNS.index(key)] for key in ("down_bytes", "up_bytes"))
        down, up = (np.bincount(who, sizes, self.loop.n).astype(int) for sizes in moved)
        return down, up

    def _clusters(self) -> np.ndarray | None:
        own = self.before.algorithm
        labels = own.describe(self.before.server).clusters if own is self.algorithm else None
        if labels is None:
            return None
        clusters = [new.cluster(torch.as_tensor(labels)) for new in self.newcomers]
        return None if None in clusters else np.array(clusters)
