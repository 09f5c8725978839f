"""The event loop: schedule -> downlink -> engine -> uplink -> aggregate. Synchronous and asynchronous training differ
only in the schedule: a message that is sent in one turn may be answered in a later one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyfed.core import contract
from polyfed.core.algorithm import KNOWN, Algorithm, Down, Personal, Round, State, started
from polyfed.core.engine import TRIES, Engine, Lost, Silent, died
from polyfed.core.errors import ConfigError, Diverged, RunError
from polyfed.core.ledger import Ledger, down_bytes
from polyfed.core.optimizers import StepSizes
from polyfed.core.randomness import client_keys
from polyfed.core.schedule import Arrivals, Schedule, Turn
from polyfed.core.task import Task
from polyfed.core.uplinks import Forge, NotKept, Rule, Tally
from polyfed.core.worker import Reply, expand


@dataclass
class Flight:
    """Messages under way: sent in round `sent` to `ids: [m]`, `bytes` each."""

    ids: np.ndarray
    sent: int
    down: Down
    bytes: int

    def part(self, at: np.ndarray) -> "Flight":
        """Those at these positions."""
        each = {name: t[torch.as_tensor(at)] for name, t in self.down.each.items()}
        return replace(self, ids=self.ids[at], down=self.down._replace(each=each))


class Shrunk(Exception):
    """Of a round of several exchanges, which has to be repeated without those `lost`, who have not answered."""

    def __init__(self, lost: np.ndarray):
        super().__init__()
        self.lost = lost


class Book:
    """What a round moves and costs, for each client [m] that it asks."""

    def __init__(self, ids: np.ndarray):
        self.ids = ids
        self.down, self.up, self.seconds, self.staleness, self.steps = np.zeros((5, len(ids)))
        self.exchanges = np.zeros((2, len(ids)))  # messages that were not empty, down and up
        self.earlier: tuple[np.ndarray, State] | None = None  # whom it asked last, and what they have received in it

    def sent(self, ids: np.ndarray, size: int) -> None:
        at = np.searchsorted(self.ids, ids)
        self.down[at] += size
        self.exchanges[0, at] += size > 0

    def dropped(self, sizes: Mapping[int, int]) -> None:
        """Replies, by client, to an exchange that does not count."""
        at = np.searchsorted(self.ids, [*sizes])
        self.up[at] += [*sizes.values()]
        self.exchanges[1, at] += np.array([*sizes.values()]) > 0

    def taken(self, ids: np.ndarray, size: int, staleness: np.ndarray, reply: Reply) -> None:
        at = np.searchsorted(self.ids, ids)
        self.up[at] += size
        self.exchanges[1, at] += size > 0
        self.seconds[at] += reply.seconds
        self.steps[at] += reply.steps
        self.staleness[at] = staleness


class Loop:
    """The state of one training run and the step that advances it. It knows the clients by name and number of samples.

    After construction `t` rounds are done and `server` is the server's state.
    counts: [n] training samples     forge: what attackers send instead of their uplinks
    rule: what the server uses instead of means
    streamed: whether uplinks are added up as they arrive, where a method takes only their means and sums
    used, kinds: what the method has asked of its uplinks so far, see `Uplinks.used` and `Uplinks.kinds`
    missing: by name, who was asked in the last round and did not answer, and why
    say: takes lines about workers that were lost
    """

    def __init__(
        self,
        task: Task,
        counts: np.ndarray,
        names: Sequence[str],
        algorithm: Algorithm,
        schedule: Schedule,
        engine: Engine,
        seed: int,
        step_sizes: StepSizes = StepSizes(),  # noqa: B008  (immutable)
        forge: Forge | None = None,
        rule: Rule | None = None,
        streamed: bool = True,
    ):
        self.task, self.names, self.algorithm = task, names, algorithm
        self.schedule, self.engine, self.seed = schedule, engine, seed
        self.step_sizes = step_sizes
        self.forge, self.rule, self.streamed = forge, rule, streamed and rule is None  # a rule needs all rows
        self.keys = client_keys(names)
        self.n = len(names)
        if schedule.late(self.n):
            refuse_late(algorithm, self.n)
        self.samples = torch.as_tensor(counts, dtype=task.dtype, device=task.device)
        start = started(algorithm, task, self.n)
        self.server, self.free = start.whole(), tuple(start.free)
        self._lasting = self.server.keys() - start.free.keys()
        self.ledger = Ledger()
        self.flights: list[Flight] = []
        self.used: dict[str, set[str]] = {}
        self.kinds: dict[str, set[str]] = {}
        self.missing: dict[str, str] = {}
        self.say: Callable[[str], None] = lambda _: None
        self._added: dict[tuple[int, int], dict[str, set[str]]] = {}  # `Tally.added` by (phases of the round, phase)
        self.t = 0
        self.clock = 0.0  # virtual seconds
        self.whole = True  # whether all else is as after t rounds, also once an error has ended a step

    def round(self, ids: np.ndarray | Tensor, phase: int = 0, sent: np.ndarray | None = None) -> Round:
        """What both sides know about one exchange with `ids`."""
        at = torch.as_tensor(ids, device=self.task.device)
        when = torch.full_like(at, self.t) if sent is None else torch.as_tensor(sent, device=at.device)
        return Round(self.t, self.n, phase, at, self.samples[at], when)

    def step(self) -> np.ndarray:
        """One turn of the loop; returns the ids whose replies were taken."""
        flights = [replace(f) for f in self.flights]
        for again in range(TRIES - 1, -1, -1):
            try:
                return self._step()
            except Exception as e:
                if self.whole:
                    self.flights = [replace(f) for f in flights]
                    self.engine.abandon()
                if not (self.whole and isinstance(e, Lost)):
                    raise
                self.say(f"round {self.t}: {e} died" + "; the round is repeated" * bool(again))
                if not again:
                    raise Silent(died(f"round {self.t}", e)) from None
        raise AssertionError

    def _step(self) -> np.ndarray:
        self.missing = {}
        (send, take, passed), lost = self._turn()
        algorithm = self.algorithm.decayed(self.step_sizes.at(self.t))
        phases = algorithm.phases(self.t)
        if not np.array_equal(send, take):
            refuse_late(algorithm, self.n, self.t)
        book = Book(np.union1d(take, np.concatenate([np.zeros(0, dtype=np.int64), *(f.ids for f in lost)])))
        for f in lost:
            book.sent(f.ids, f.bytes)
        if phases == 1:
            take = self._phase(algorithm, send, take, (1, 0), book)
        else:
            take = self._phases(algorithm, phases, take, book)
        self.engine.commit()
        self.ledger.record(
            self.t, book.ids, book.exchanges.max(0), book.down, book.up, book.staleness, book.seconds, book.steps
        )
        self.t += 1
        self.clock += passed
        self.whole = True
        return take

    def _turn(self) -> tuple[Turn, list[Flight]]:
        """Who is sent a message and whose replies are taken; whoever comes first, where the schedule leaves it open.

        Then also the messages that nobody answers.
        """
        if not isinstance(self.schedule, Arrivals):
            return self.schedule.turn(self.seed, self.t, self.keys), []
        busy = np.concatenate([np.zeros(0, dtype=np.int64), *(f.ids for f in self.flights)])
        send = self.schedule.dispatch(self.seed, self.t, self.keys, busy)
        refuse_late(self.algorithm, self.n, self.t)
        self._send(send, 0)
        ids, missing, _ = self.engine.wait(np.sort(np.concatenate([busy, send])), first=True)
        return Turn(np.zeros(0, dtype=np.int64), ids[:1]), self._lost(missing)

    def _lost(self, missing: dict[int, str]) -> list[Flight]:
        """Note who does not answer; the messages to them, which are then no longer under way."""
        self.missing |= {self.names[i]: why for i, why in missing.items()}
        return self._landed(np.array(sorted(missing))) if missing else []

    def _phases(self, algorithm: Algorithm, phases: int, take: np.ndarray, book: Book) -> np.ndarray:
        """A round of several exchanges; it counts whole or not at all."""
        before = _copy(self.server)
        while True:
            book.earlier = None
            try:
                for phase in range(phases):
                    asked = algorithm.audience(self.server, self.round(take, phase)).cpu().numpy()
                    self._phase(algorithm, asked, asked, (phases, phase), book)
                return take
            except Exception as e:
                self.server = _copy(before)
                self.engine.abandon()
                self.flights, self.whole = [], True
                if not isinstance(e, Shrunk):
                    raise
                take = np.setdiff1d(take, e.lost)

    def _phase(
        self, algorithm: Algorithm, send: np.ndarray, take: np.ndarray, kind: tuple[int, int], book: Book
    ) -> np.ndarray:
        """One exchange: messages to `send`, replies of `take` or of those of them that answer, who are returned.

        kind: (phases of the round, phase)
        """
        phases, phase = kind
        self._send(send, phase)
        if not len(take):
            return take
        ids, missing, sizes = self.engine.wait(take)
        if missing:
            for f in self._lost(missing) + (self._landed(take) if phases > 1 else []):
                book.sent(f.ids, f.bytes)
            if not len(ids):
                raise RunError(f"round {self.t}: no client has replied ({', '.join(sorted({*missing.values()}))})")
            if phases > 1:
                book.dropped(sizes)
                raise Shrunk(np.array(sorted(missing)))
        sent, messages = self._arrivals(ids, book)
        received = messages
        if book.earlier is not None and np.array_equal(book.earlier[0], ids):  # a model may be answered later
            received = book.earlier[1] | messages
        book.earlier = ids, received
        round = self.round(ids, phase, sent)
        reply, size = self._exchange(algorithm, messages, received, round, kind)
        book.taken(ids, size, self.t - sent, reply)
        return ids

    def _exchange(
        self, algorithm: Algorithm, messages: State, received: State, round: Round, kind: tuple[int, int]
    ) -> tuple[Reply, int]:
        """One exchange and what the server makes of it: (reply, bytes that each client sent)."""
        added, look = self._added.get(kind, {}), self.server if self.streamed and kind not in self._added else None
        tally = Tally(round, received, dict(added), self.forge, self.rule)
        reply = self.engine.exchange(self.algorithm, messages, round, tally, look)
        if reply.bad is not None:
            who = self.names[int(round.ids[reply.bad])]
            raise Diverged(f"round {self.t}: client {who!r} diverged (NaN or infinity); try a smaller lr")
        self._added[kind], up = tally.added, tally.uplinks()
        self.whole = False
        try:
            known = self.server[KNOWN].index_copy(0, round.ids, round.samples)
            after = algorithm.aggregate(self.server, up, round)
            self.server = contract.next_state(algorithm, after, self._lasting) | {KNOWN: known}
        except NotKept:  # it asks for more than it did in its first round: the same replies again, with all rows kept
            self._added[kind] = {}
            return self._exchange(algorithm, messages, received, round, kind)
        for known, new in ((self.used, up.used), (self.kinds, up.kinds)):
            for name, asked in new.items():
                known.setdefault(name, set()).update(asked)
        return reply, tally.bytes

    def _send(self, ids: np.ndarray, phase: int) -> None:
        if len(ids):
            round = self.round(ids, phase)
            sent = self.algorithm.downlink(self.server, round)
            down = contract.downlink(self.algorithm, "downlink", sent, len(ids))
            self.flights.append(Flight(ids, self.t, down, down_bytes(down)))
            self.engine.send(down, round)

    def _landed(self, ids: np.ndarray) -> list[Flight]:
        """The messages to `ids`, which are then no longer under way."""
        landed: list[Flight] = []
        left: list[Flight] = []
        for flight in self.flights:
            if flight.ids is ids or (here := np.isin(flight.ids, ids)).all():
                landed.append(flight)
            elif here.any():
                landed.append(flight.part(np.flatnonzero(here)))
                left.append(flight.part(np.flatnonzero(~here)))
            else:
                left.append(flight)
        self.flights = left
        return landed

    def _arrivals(self, ids: np.ndarray, book: Book) -> tuple[np.ndarray, State]:
        """What `ids` answer now: the rounds [m] in which it was sent, and the messages [m, ...]."""
        landed = self._landed(ids)
        for f in landed:
            book.sent(f.ids, f.bytes)
        if len(landed) == 1:
            return np.full(len(ids), landed[0].sent), expand(landed[0].down, len(ids))
        order = np.argsort(np.concatenate([f.ids for f in landed]))
        rows = [expand(f.down, len(f.ids)) for f in landed]
        received = {name: torch.cat([r[name] for r in rows])[torch.as_tensor(order)] for name in rows[0]}
        return np.concatenate([np.full(len(f.ids), f.sent) for f in landed])[order], received

    def evaluate(self, split: str) -> dict[str, np.ndarray]:
        """Each client's metrics [n] for the model it would deploy now; nothing is billed."""
        return self.engine.evaluate(self.algorithm, self.deployment(), split)

    def personal(self, ids: np.ndarray) -> Tensor:
        """[s, p]: the models that `ids` would deploy now, where the engine may see them."""
        return self.engine.personal(self.algorithm, self.deployment(), np.asarray(ids))

    def deployment(self) -> Down:
        """What every client would receive now; nothing for methods that do not need it to deploy."""
        if isinstance(self.algorithm, Personal):
            return Down()
        sent = self.algorithm.deployment(self.server, self.round(np.arange(self.n)))
        return contract.downlink(self.algorithm, "deployment", sent, self.n)

    # exact resume

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that decides what happens next, as named tensors and JSON-able values."""
        tensors = {f"server.{k}": v for k, v in self.server.items()}
        tensors |= {f"client.{k}": v for k, v in self.engine.save().items()}
        tensors["ledger"] = self.ledger.tensor()
        for k, f in enumerate(self.flights):
            tensors |= {f"flight{k}.{name}": t for name, t in (f.down.shared | f.down.each).items()}
        flights = [
            {"ids": f.ids.tolist(), "sent": f.sent, "bytes": f.bytes, "shared": sorted(f.down.shared)}
            for f in self.flights
        ]
        added = [[*kind, {name: sorted(kinds) for name, kinds in of.items()}] for kind, of in self._added.items()]
        return tensors, {"t": self.t, "clock": self.clock, "flights": flights, "added": added}

    def restore(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        # copies: a tensor read from a file may lie unaligned in memory, and matrix products then differ in the last bit
        self.t, self.clock = meta["t"], meta["clock"]
        self._added = {(a, b): {name: set(kinds) for name, kinds in of.items()} for a, b, of in meta["added"]}
        self.server = {k: v.to(self.task.device, copy=True) for k, v in part(tensors, "server.").items()}
        self.engine.restore(part(tensors, "client."))
        self.ledger.restore(tensors["ledger"])
        self.flights = []
        for k, f in enumerate(meta["flights"]):
            messages = {n: t.to(self.task.device, copy=True) for n, t in part(tensors, f"flight{k}.").items()}
            shared = {n: messages.pop(n) for n in f.get("shared", ())}
            flight = Flight(np.array(f["ids"]), f["sent"], Down(shared, messages), f["bytes"])
            self.flights.append(flight)
            self.engine.send(flight.down, self.round(flight.ids, 0, np.full(len(flight.ids), flight.sent)))


def refuse_late(algorithm: Algorithm, n: int, t: int = 0) -> None:
    """Raise ConfigError for a method that needs its replies in their round. t: from which round on"""
    why = algorithm.in_step(n, t)
    if why is not None:
        raise ConfigError(f"{algorithm.name} {why} and cannot run asynchronously")


def _copy(state: State) -> State:
    return {name: t.clone() for name, t in state.items()}


def part(tensors: State, prefix: str) -> State:
    """The tensors of a checkpoint whose names begin with `prefix`, without it."""
    return {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
