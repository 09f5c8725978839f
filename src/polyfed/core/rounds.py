"""The event loop: schedule -> downlink -> engine -> uplink -> aggregate. Synchronous and asynchronous training differ
only in the schedule: a message that is sent in one turn may be answered in a later one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from polyfed.core.algorithm import KNOWN, Algorithm, Personal, Round, State, started
from polyfed.core.errors import ConfigError, Diverged
from polyfed.core.ledger import Ledger, down_bytes
from polyfed.core.optimizers import StepSizes
from polyfed.core.randomness import client_keys
from polyfed.core.rows import Rows
from polyfed.core.schedule import Schedule
from polyfed.core.split import Split
from polyfed.core.task import Task
from polyfed.core.uplinks import Forge, NotKept, Rule, Tally, rows_of
from polyfed.core.worker import Reply, expand


class Engine(Protocol):
    """Carries messages to clients, runs them and carries the replies back. Knows no method."""

    workers: int  # how many calls `map` runs at a time

    def exchange(
        self, algorithm: Algorithm, rows: Rows, down: State, round: Round, tally: Tally, server: State | None = None
    ) -> Reply: ...

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]: ...

    def close(self) -> None: ...


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
    forge: what attackers send instead of their uplinks     rule: what the server uses instead of means
    streamed: whether uplinks are added up as they arrive, where a method takes only their means and sums
    used: what the method has asked of its uplinks so far, see `Uplinks.used`
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
        step_sizes: StepSizes = StepSizes(),  # noqa: B008  (immutable)
        forge: Forge | None = None,
        rule: Rule | None = None,
        streamed: bool = True,
    ):
        self.task, self.train, self.names, self.algorithm = task, train, names, algorithm
        self.schedule, self.engine, self.rows, self.seed = schedule, engine, rows, seed
        self.step_sizes = step_sizes
        self.forge, self.rule, self.streamed = forge, rule, streamed and rule is None  # a rule needs all rows
        self.keys = client_keys(names)
        self.n = len(names)
        if schedule.late(self.n):
            self._refuse_late(algorithm)
        self.samples = torch.as_tensor(train.counts, dtype=task.dtype, device=task.device)
        start = started(algorithm, task, self.n)
        self.server, self.free = start.whole(), tuple(start.free)
        self.ledger = Ledger()
        self.flights: list[Flight] = []
        self.used: dict[str, set[str]] = {}
        self._added: dict[tuple[int, int], dict[str, set[str]]] = {}  # `Tally.added` by (phases of the round, phase)
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
        algorithm = self.algorithm.decayed(self.step_sizes.at(self.t))
        phases = algorithm.phases(self.t)
        if not np.array_equal(send, take):
            self._refuse_late(algorithm, self.t)
        down, up, seconds, staleness, steps = np.zeros((5, len(take)))
        exchanges = np.zeros((2, len(take)))  # messages that were not empty, down and up
        everyone = torch.as_tensor(take, device=self.task.device)
        before: tuple[State, State] = {}, {}
        if phases > 1:
            before = {k: v.clone() for k, v in self.server.items()}, self.rows.gather(everyone).whole()
        earlier: tuple[np.ndarray, State] | None = None  # whom the round has asked so far, and what they received
        for phase in range(phases):
            asked = self._asked(algorithm, send, phase) if phases > 1 else send
            self._send(asked, phase)
            for ids, sent, messages, size in self._arrivals(asked if phases > 1 else take):
                round, received = self.round(ids, phase, sent), messages
                if earlier is not None and np.array_equal(earlier[0], ids):  # a model may be answered an exchange later
                    received = earlier[1] | messages
                earlier = ids, received
                try:
                    reply, sent_up = self._exchange(algorithm, messages, received, round, (phases, phase))
                except Diverged:  # a round of several exchanges counts whole or not at all
                    if phases > 1:
                        self.server = before[0]
                        self.rows.scatter(everyone, before[1])
                    self.whole = True
                    raise
                self.rows.scatter(round.ids, reply.private)
                at = np.searchsorted(take, ids)
                down[at] += size
                up[at] += sent_up
                exchanges[0, at] += size > 0
                exchanges[1, at] += sent_up > 0
                seconds[at] += reply.seconds
                steps[at] += reply.steps
                staleness[at] = self.t - sent
        self.ledger.record(self.t, take, exchanges.max(0), down, up, staleness, seconds, steps)
        self.t += 1
        self.clock += passed
        self.whole = True
        return take

    def _exchange(
        self, algorithm: Algorithm, down: State, received: State, round: Round, kind: tuple[int, int]
    ) -> tuple[Reply, int]:
        """One exchange and what the server makes of it: (reply, bytes that each client sent)."""
        added, look = self._added.get(kind, {}), self.server if self.streamed and kind not in self._added else None
        tally = Tally(round, received, dict(added), self.forge, self.rule)
        reply = self.engine.exchange(algorithm, self.rows, down, round, tally, look)
        if reply.bad is not None:
            who = self.names[int(round.ids[reply.bad])]
            raise Diverged(f"round {self.t}: client {who!r} diverged (NaN or infinity); try a smaller lr")
        self._added[kind], up = tally.added, tally.uplinks()
        self.whole = False
        try:
            known = self.server[KNOWN].index_copy(0, round.ids, round.samples)
            self.server = algorithm.aggregate(self.server, up, round) | {KNOWN: known}
        except NotKept:  # it asks for more than it did in its first round: the same replies again, with all rows kept
            self._added[kind] = {}
            return self._exchange(algorithm, down, received, round, kind)
        for name, words in up.used.items():
            self.used.setdefault(name, set()).update(words)
        return reply, tally.bytes

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
        """[s, p]: the models that `ids` would deploy now. down: what every client would receive, if known."""
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
        added = [[*kind, {name: sorted(kinds) for name, kinds in of.items()}] for kind, of in self._added.items()]
        return tensors, {"t": self.t, "clock": self.clock, "flights": flights, "added": added}

    def restore(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        # copies: a tensor read from a file may lie unaligned in memory, and matrix products then differ in the last bit
        self.t, self.clock = meta["t"], meta["clock"]
        self._added = {(a, b): {name: set(kinds) for name, kinds in of.items()} for a, b, of in meta["added"]}
        self.server = {k: v.to(self.task.device, copy=True) for k, v in part(tensors, "server.").items()}
        self.rows.restore(part(tensors, "client."))
        self.ledger.restore(tensors["ledger"])
        self.flights = [
            Flight(
                np.array(f["ids"]),
                f["sent"],
                {n: t.to(self.task.device, copy=True) for n, t in part(tensors, f"flight{k}.").items()},
                f["bytes"],
            )
            for k, f in enumerate(meta["flights"])
        ]


def part(tensors: State, prefix: str) -> State:
    """The tensors of a checkpoint whose names begin with `prefix`, without it."""
    return {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
