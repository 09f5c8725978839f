"""The event loop: schedule -> downlink -> engine -> uplink -> aggregate. Synchronous and asynchronous training differ
in the schedule only: a message that is sent in one turn may be answered in a later one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from polyfed.core.algorithm import Algorithm, Personal, Round, State
from polyfed.core.errors import ConfigError, Diverged
from polyfed.core.ledger import Ledger, down_bytes, row_bytes
from polyfed.core.randomness import client_keys
from polyfed.core.rows import Rows
from polyfed.core.schedule import Schedule
from polyfed.core.split import Split
from polyfed.core.task import Task
from polyfed.core.worker import Reply, expand, rows_of


class Engine(Protocol):
    """Carries messages to clients, runs them and carries the replies back. Knows no method."""

    workers: int  # how many calls `map` runs at a time

    def exchange(self, algorithm: Algorithm, rows: Rows, down: State, round: Round) -> Reply: ...

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]: ...


@dataclass
class Flight:
    """Messages under way: sent in round `sent` to `ids`, `down: [m, ...]`, `bytes` each."""

    ids: np.ndarray
    sent: int
    down: State
    bytes: int


class Loop:
    """The state of one training run and the step that advances it.

    After construction `t` rounds are done, `server` is the server's state, `rows` the clients' private tensors.
    """

    def __init__(
        self,
        task: Task,
        train: Split,
        names: Sequence[str],
        algorithm: Algorithm,
        schedule: Schedule,
        engine: Engine,
        rows: Rows,
        seed: int,
        lr_decay: float = 1.0,
        lr_decay_every: int = 1,
    ):
        self.task, self.train, self.names, self.algorithm = task, train, names, algorithm
        self.schedule, self.engine, self.rows, self.seed = schedule, engine, rows, seed
        self.lr_decay, self.lr_decay_every = lr_decay, lr_decay_every
        self.keys = client_keys(names)
        self.n = len(names)
        if schedule.late(self.n):
            self._refuse_late(algorithm)
        self.samples = torch.as_tensor(train.counts, dtype=task.dtype, device=task.device)
        self.server = algorithm.init_server(task, task.w0.clone(), self.n)
        self.ledger = Ledger()
        self.flights: list[Flight] = []
        self.t = 0
        self.clock = 0.0  # virtual seconds
        self.whole = True  # whether all else is as after t rounds, also once an error has ended a step

    def _refuse_late(self, algorithm: Algorithm, t: int = 0) -> None:
        why = algorithm.in_step(self.n, t)
        if why is not None:
            raise ConfigError(f"{algorithm.name} {why} and cannot run asynchronously")

    def round(self, ids: np.ndarray | Tensor, phase: int = 0, sent: np.ndarray | None = None) -> Round:
        """What both sides know about one exchange with `ids`."""
        at = torch.as_tensor(ids, device=self.task.device)
        when = torch.full_like(at, self.t) if sent is None else torch.as_tensor(sent, device=at.device)
        return Round(self.t, self.n, phase, at, self.samples[at], when)

    def step(self) -> np.ndarray:
        """One turn of the loop; returns the ids whose replies were taken."""
        flights = [replace(f) for f in self.flights]
        try:
            return self._step()
        except Exception:
            if self.whole:
                self.flights = flights
            raise

    def _step(self) -> np.ndarray:
        send, take, passed = self.schedule.turn(self.seed, self.t, self.keys)
        algorithm = self.algorithm.decayed(self.lr_decay ** (self.t // self.lr_decay_every))
        phases = algorithm.phases(self.t)
        if not np.array_equal(send, take):
            self._refuse_late(algorithm, self.t)
        down, up, seconds, staleness = np.zeros((4, len(take)))
        exchanges = np.zeros((2, len(take)))  # messages that were not empty, down and up
        everyone = torch.as_tensor(take, device=self.task.device)
        before = self.server, {k: self.rows.read(k, everyone) for k in self.rows.names()} if phases > 1 else {}
        for phase in range(phases):
            asked = self._asked(algorithm, send, phase) if phases > 1 else send
            self._send(asked, phase)
            for ids, sent, messages, size in self._arrivals(asked if phases > 1 else take):
                round = self.round(ids, phase, sent)
                reply = self.engine.exchange(algorithm, self.rows, messages, round)
                try:
                    self._finite(ids, reply)
                except Diverged:  # a round of several exchanges counts whole or not at all
                    self.server = before[0]
                    self.rows.scatter(everyone, before[1])
                    self.whole = True
                    raise
                self.whole = False
                self.server = algorithm.aggregate(self.server, reply.up, round)
                self.rows.scatter(round.ids, reply.private)
                at, sent_up = np.searchsorted(take, ids), row_bytes(reply.up)
                down[at] += size
                up[at] += sent_up
                exchanges[:, at] += np.stack([size > 0, np.full(len(at), sent_up > 0)])
                seconds[at] += reply.seconds
                staleness[at] = self.t - sent
        self.ledger.record(self.t, take, exchanges.max(0), down, up, staleness, seconds)
        self.t += 1
        self.clock += passed
        self.whole = True
        return take

    def _asked(self, algorithm: Algorithm, ids: np.ndarray, phase: int) -> np.ndarray:
        return algorithm.audience(self.server, self.round(ids, phase)).cpu().numpy()

    def _send(self, ids: np.ndarray, phase: int) -> None:
        if not len(ids):
            return
        down = self.algorithm.downlink(self.server, self.round(ids, phase))
        self.flights.append(Flight(ids, self.t, expand(down, len(ids)), down_bytes(down)))

    def _arrivals(self, take: np.ndarray) -> list[tuple[np.ndarray, np.ndarray, State, np.ndarray]]:
        """The messages that `take` answer now, as (ids, sent, down [m, ...], bytes [m]); no longer under way."""
        if len(self.flights) == 1 and np.array_equal(self.flights[0].ids, take):
            flight = self.flights.pop()
            return [(take, np.full(len(take), flight.sent), flight.down, np.full(len(take), flight.bytes))]
        parts: list[tuple[Flight, np.ndarray]] = []
        for flight in self.flights:
            at = np.flatnonzero(np.isin(flight.ids, take))
            if len(at):
                parts.append((flight, at))
        if not parts:
            return []
        ids = np.concatenate([f.ids[at] for f, at in parts])
        order = np.argsort(ids)
        rows = {
            name: torch.cat([f.down[name][torch.as_tensor(at)] for f, at in parts])[torch.as_tensor(order)]
            for name in parts[0][0].down
        }
        sent = np.concatenate([np.full(len(at), f.sent) for f, at in parts])[order]
        size = np.concatenate([np.full(len(at), f.bytes) for f, at in parts])[order]
        for f, at in parts:
            keep = np.setdiff1d(np.arange(len(f.ids)), at)
            f.ids, f.down = f.ids[keep], {name: t[torch.as_tensor(keep)] for name, t in f.down.items()}
        self.flights = [f for f in self.flights if len(f.ids)]
        return [(ids[order], sent, rows, size)]

    def _finite(self, ids: np.ndarray, reply: Reply) -> None:
        for values in (*reply.up.values(), *reply.private.values()):
            if values.is_floating_point() and not torch.isfinite(values.sum()):
                bad = ~torch.isfinite(values.reshape(len(values), -1)).all(1)
                if bad.any():
                    who = self.names[int(ids[int(bad.nonzero()[0])])]
                    raise Diverged(
                        f"round {self.t}: client {who!r} reached a value that is not finite; a smaller lr may help"
                    )

    def evaluate(self, split: Split, block: int = 1 << 28) -> dict[str, np.ndarray]:
        """Each client's metrics [n] for the model it would deploy now; nothing is billed. `block`: bytes of models."""
        down = self._to_everyone()
        most = max(1, block // (self.task.p * self.task.w0.element_size()))
        size = min(most, -(-self.n // self.engine.workers))
        blocks = [np.arange(k, min(k + size, self.n)) for k in range(0, self.n, size)]
        parts = self.engine.map(lambda ids: self.task.metrics(self.personal(ids, down), split, ids), blocks)
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _to_everyone(self) -> State:
        """What every client would receive now, [n, ...] each; nothing for methods that do not need it to deploy."""
        if isinstance(self.algorithm, Personal):
            return {}
        return expand(self.algorithm.deployment(self.server, self.round(np.arange(self.n))), self.n)

    def personal(self, ids: np.ndarray, down: State | None = None) -> Tensor:
        """[s, p]: the models that `ids` would deploy now. down: what everybody would receive, if at hand."""
        at = torch.as_tensor(ids, device=self.task.device)
        down = self._to_everyone() if down is None else down
        return self.algorithm.personal(self.rows.gather(at), {name: rows_of(t, at) for name, t in down.items()})

    # exact resume

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that decides what happens next, as named tensors and JSON-able values."""
        tensors = {f"server.{k}": v for k, v in self.server.items()}
        tensors |= {f"client.{k}": v for k, v in self.rows.snapshot().items()}
        tensors["ledger"] = self.ledger.tensor()
        for k, f in enumerate(self.flights):
            tensors |= {f"flight{k}.{name}": t for name, t in f.down.items()}
        flights = [{"ids": f.ids.tolist(), "sent": f.sent, "bytes": f.bytes} for f in self.flights]
        return tensors, {"t": self.t, "clock": self.clock, "flights": flights}

    def restore(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Take up where `state` was taken."""

        def part(prefix: str) -> State:
            return {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}

        # copies: a tensor read from a file may lie unaligned in memory, and matrix products then differ in the last bit
        self.t, self.clock = meta["t"], meta["clock"]
        self.server = {k: v.to(self.task.device, copy=True) for k, v in part("server.").items()}
        self.rows.restore(part("client."))
        self.ledger.restore(tensors["ledger"])
        self.flights = [
            Flight(
                np.array(f["ids"]),
                f["sent"],
                {n: t.to(self.task.device, copy=True) for n, t in part(f"flight{k}.").items()},
                f["bytes"],
            )
            for k, f in enumerate(meta["flights"])
        ]
