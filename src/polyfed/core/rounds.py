"""The event loop: schedule -> downlink -> engine -> uplink -> aggregate. Synchronous and asynchronous training
differ only in the schedule: a message sent in one turn may be answered in a later one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyfed.base.errors import ConfigError, Diverged, PolyfedError, RunError
from polyfed.base.randomness import client_keys
from polyfed.compute.optimizers import Constant, StepSizes
from polyfed.compute.task import Task
from polyfed.core import contract
from polyfed.core.algorithm import KNOWN, Algorithm, Down, Round, State, decayed, started
from polyfed.core.deployed import Deployed, all_finite
from polyfed.core.engine import TRIES, Engine, Lost, Silent, died
from polyfed.core.explosion import Exploded, guarded
from polyfed.core.ledger import Ledger, down_bytes
from polyfed.core.messages import copied
from polyfed.core.schedule import Arrivals, Schedule, Turn
from polyfed.core.uplinks import Door, Forge, Rule, Tally, Uplinks, Wanted
from polyfed.core.worker import Reply, expand

Kept = tuple[dict[str, Tensor], dict[str, Any]]  # a round: tensors by name, and what is said of it


@dataclass
class Flight:
    """Messages under way to some clients."""

    ids: np.ndarray  # [m]
    sent: int  # round
    down: Down
    bytes: int  # of each message

    def part(self, at: np.ndarray) -> "Flight":
        """The messages at some positions."""
        each = {name: t[torch.as_tensor(at)] for name, t in self.down.each.items()}
        return replace(self, ids=self.ids[at], down=self.down._replace(each=each))


class Book:
    """Traffic and cost of a round, for each client [m] that it asks."""

    def __init__(self, ids: np.ndarray):
        self.ids = ids
        self.down, self.up, self.seconds, self.staleness, self.steps = np.zeros((5, len(ids)))
        self.exchanges = np.zeros((2, len(ids)))  # messages that were not empty, down and up
        self.earlier: tuple[np.ndarray, State] | None = None  # the clients it asked last, and their messages in it

    def sent(self, ids: np.ndarray, size: int) -> None:
        at = np.searchsorted(self.ids, ids)
        self.down[at] += size
        self.exchanges[0, at] += size > 0

    def dropped(self, sizes: Mapping[int, int]) -> None:
        """Add the bytes of replies, by client, to an exchange that does not count."""
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


class Loop(Deployed):
    """One training run after `t` rounds, and the step that advances it; it knows clients by name and sample count."""

    def __init__(
        self,
        task: Task,
        counts: np.ndarray,
        names: Sequence[str],
        algorithm: Algorithm,
        schedule: Schedule,
        engine: Engine,
        seed: int,
        step_sizes: StepSizes = Constant(),  # noqa: B008  (immutable)
        forge: Forge | None = None,
        rule: Rule | None = None,
        sums: Mapping[tuple[int, int], Wanted] | None = None,
        door: Door | None = None,
    ):
        self.door = door
        self.task, self.names, self.algorithm = task, names, algorithm
        self.schedule, self.engine, self.seed = schedule, engine, seed
        self.step_sizes, self.forge, self.rule = step_sizes, forge, rule
        # by (exchanges of the round, exchange), the sums that are all the method needs, as a rehearsal has shown; rows
        # of other uplinks are kept
        self.sums: Mapping[tuple[int, int], Wanted] = (sums or {}) if rule is None else {}  # a rule needs all rows
        self.keys = client_keys(names)
        if schedule.late(self.n):
            refuse_late(algorithm, self.n)
        self.samples = torch.as_tensor(counts, dtype=task.dtype, device=task.device)
        start = started(algorithm, task, self.n, self.keys)
        self.server, self.free = start.whole(), tuple(start.free)
        self.marks = {name for name, t in self.server.items() if not all_finite(t)}  # infinities that it begins with
        self.lasting = self.server.keys() - start.free.keys()
        self.ledger = Ledger()
        self.flights: list[Flight] = []
        self.used: dict[str, set[str]] = {}  # asked of the uplinks so far, see `Uplinks.used`
        self.kinds: dict[tuple[int, int], dict[str, set[str]]] = {}  # the same by exchange
        self.missing: dict[str, str] = {}  # who did not answer in the last round, by name, and why
        self.say: Callable[[str], None] = lambda _: None  # takes lines about lost workers
        self.best: Kept | None = None  # the round that was kept; after `back`, the last one
        self.gone_back = False
        self.t = 0
        self.clock = 0.0  # virtual seconds
        self.whole = True

    def step(self) -> np.ndarray:
        """One turn of the loop; returns the ids whose replies were taken. Workers that die cost a repeated round."""
        left = TRIES
        while True:
            attempt, left = Attempt(self), left - 1
            try:
                take = attempt.run()
                break
            except Exception as e:
                attempt.undo()
                if isinstance(e, Exploded) or not (isinstance(e, PolyfedError | Lost) or self.finite):
                    raise Diverged(self.exploded()) from e
                if not (self.whole and isinstance(e, Lost)):
                    raise
                self.say(f"round {self.t}: {e} died" + "; the round is repeated" * bool(left))
                if not left:
                    raise Silent(died(f"round {self.t}", e)) from None
        book = attempt.book
        self.ledger.record(
            self.t, book.ids, book.exchanges.max(0), book.down, book.up, book.staleness, book.seconds, book.steps
        )
        self.t += 1
        self.clock += attempt.passed
        self.whole = True
        return take

    # exact resume

    def state(self) -> Kept:
        """Everything that decides the next turns, and the round that was kept: named tensors, JSON-able values."""
        now, best = self._now(self.engine.save()), self.best
        (tensors, meta), best = (best, now) if best is not None and self.gone_back else (now, best)
        if best is not None:
            tensors = tensors | {f"best.{k}": t for k, t in best[0].items()}
            meta = meta | {"best": best[1]}
        return tensors | {"ledger": self.ledger.tensor()}, meta

    def keep(self) -> None:
        """Keep this round, in the place of one that was kept before."""
        tensors, meta = self._now(self.engine.keep())
        self.best = {k: t if k.startswith("client.") else t.clone() for k, t in tensors.items()}, meta

    def back(self) -> None:
        """Go back to the round that was kept, where clients stay; the ledger has what was moved until the last."""
        assert self.best is not None
        (tensors, meta), self.gone_back = self.best, True
        self.keep()
        self._load(tensors, meta)

    def _now(self, clients: State) -> Kept:
        tensors = {f"server.{k}": v for k, v in self.server.items()}
        tensors |= {f"client.{k}": v for k, v in clients.items()}
        for k, f in enumerate(self.flights):
            tensors |= {f"flight{k}.{name}": t for name, t in (f.down.shared | f.down.each).items()}
        flights = [
            {"ids": f.ids.tolist(), "sent": f.sent, "bytes": f.bytes, "shared": sorted(f.down.shared)}
            for f in self.flights
        ]
        return tensors, {"t": self.t, "clock": self.clock, "flights": flights}

    def restore(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        self._load(tensors, meta)
        self.ledger.restore(tensors["ledger"])
        if "best" in meta:
            self.best = part(tensors, "best."), meta["best"]
            self.engine.keep(part(tensors, "best.client."))
        for f in self.flights:
            self.engine.send(f.down, self.round(f.ids, 0, np.full(len(f.ids), f.sent)))

    def _load(self, tensors: State, meta: dict[str, Any]) -> None:
        # copies: a tensor read from a file may lie unaligned in memory, and matrix products then differ in the last bit
        self.t, self.clock = meta["t"], meta["clock"]
        self.server = {k: v.to(self.task.device, copy=True) for k, v in part(tensors, "server.").items()}
        self.engine.restore(part(tensors, "client."))
        self.flights = []
        for k, f in enumerate(meta["flights"]):
            messages = {n: t.to(self.task.device, copy=True) for n, t in part(tensors, f"flight{k}.").items()}
            shared = {n: messages.pop(n) for n in f.get("shared", ())}
            self.flights.append(Flight(np.array(f["ids"]), f["sent"], Down(shared, messages), f["bytes"]))


class Attempt:
    """One round of a loop until it counts: the clients it asks, the messages it moves, and the way to undo it.

    A round of one exchange can be undone until the server has used its replies, which it may do in place
    (`Loop.whole`). A round of several counts whole or not at all: the server's state before it is kept, and it begins
    again without those who do not answer.
    """

    def __init__(self, loop: Loop):
        self.loop = loop
        self.flights = [replace(f) for f in loop.flights]
        self.before: State | None = None  # the server's state, of a round of several exchanges
        self.passed = 0.0  # virtual seconds
        self.book = Book(np.zeros(0, dtype=np.int64))

    def run(self) -> np.ndarray:
        """Ask, collect and aggregate; returns whose replies were taken."""
        (loop := self.loop).missing = {}
        (send, take, self.passed), lost = self._turn()
        algorithm = decayed(loop.algorithm, loop.step_sizes.at(loop.t))
        phases = algorithm.needs.phases(loop.t)
        if not np.array_equal(send, take):
            refuse_late(algorithm, loop.n, loop.t)
        met = self._asked(algorithm, 0, take)
        others = [f.ids for f in lost] if met is take else [met, *(f.ids for f in lost)]
        self.book = Book(np.union1d(take, np.concatenate(others)) if others else np.sort(take))
        self._bill(lost)
        if phases == 1:
            replied = self._exchange(algorithm, send, take, (1, 0))
        else:
            self.before = copied(loop.server)
            while (replied := self._exchanges(algorithm, phases, take)) is None:
                take = np.array([i for i in take if loop.names[i] not in loop.missing], dtype=np.int64)
                self.undo()
            self.before = None
        loop.whole = False
        loop.engine.commit()
        assert replied is not None
        return replied

    def undo(self) -> None:
        """Put the loop and the clients back to where they were, unless the server has used replies in place."""
        loop = self.loop
        if self.before is not None:
            loop.server, loop.whole = copied(self.before), True
        if loop.whole:
            loop.flights = [replace(f) for f in self.flights]
            loop.engine.abandon()

    def _turn(self) -> tuple[Turn, list[Flight]]:
        """The clients that are sent a message and those whose replies are taken; then messages that nobody answers."""
        loop = self.loop
        if not isinstance(loop.schedule, Arrivals):
            return loop.schedule.turn(loop.seed, loop.t, loop.keys), []
        busy = np.concatenate([np.zeros(0, dtype=np.int64), *(f.ids for f in loop.flights)])
        send = loop.schedule.dispatch(loop.seed, loop.t, loop.keys, busy)
        refuse_late(loop.algorithm, loop.n, loop.t)
        self._send(send, 0)
        ids, missing, _ = loop.engine.wait(np.sort(np.concatenate([busy, send])), first=True)
        return Turn(np.zeros(0, dtype=np.int64), ids[:1]), self._lost(missing)

    def _exchanges(self, algorithm: Algorithm, phases: int, take: np.ndarray) -> np.ndarray | None:
        """All exchanges of a round of several; None where somebody has not answered."""
        self.book.earlier = None
        for phase in range(phases):
            cohort = self._asked(algorithm, phase, take)
            if self._exchange(algorithm, cohort, cohort, (phases, phase)) is None:
                self._bill(self._landed(cohort))
                return None
        return take

    def _asked(self, algorithm: Algorithm, phase: int, take: np.ndarray) -> np.ndarray:
        """Clients that take part in one exchange of the round of `take`."""
        loop, needs = self.loop, algorithm.needs
        if phase == 0 and needs.everyone_first and loop.t == 0:
            return np.flatnonzero([name not in loop.missing for name in loop.names])
        if phase == 0 and needs.unmet_first:
            return take[(loop.server[KNOWN][take] == 0).cpu().numpy()]
        return take

    def _exchange(
        self, algorithm: Algorithm, send: np.ndarray, take: np.ndarray, kind: tuple[int, int]
    ) -> np.ndarray | None:
        """Message `send`; returns those of `take` that answer, None where one is missing from a round of several."""
        # kind: (exchanges of the round, exchange)
        loop, book, phase = self.loop, self.book, kind[1]
        self._send(send, phase)
        if not len(take):
            return take
        ids, missing, sizes = loop.engine.wait(take)
        if missing:
            self._bill(self._lost(missing))
            if not len(ids):
                raise RunError(f"round {loop.t}: no client has replied ({', '.join(sorted({*missing.values()}))})")
            if kind[0] > 1 and loop.door is not None:
                lost = ", ".join(loop.names[i] for i in missing)
                raise Silent(
                    f"round {loop.t}: {lost} missing in exchange {phase} of {kind[0]}; under [privacy] a round of "
                    "several exchanges is not repeated without it, whose part would be the difference of two sums"
                )
            if kind[0] > 1:
                book.dropped(sizes)
                return None
        sent, messages = self._arrivals(ids)
        received = messages
        if book.earlier is not None and np.array_equal(book.earlier[0], ids):  # a model may be answered later
            received = book.earlier[1] | messages
        book.earlier = ids, received
        round = loop.round(ids, phase, sent)
        tally = Tally(round, received, loop.sums.get(kind), loop.forge, loop.rule, door=loop.door)
        reply = loop.engine.exchange(loop.algorithm, messages, round, tally)
        if reply.bad is not None:
            who = loop.names[int(ids[reply.bad])]
            then = reply.why or "try a smaller lr"
            raise Diverged(f"round {loop.t}: client {who!r} diverged (NaN or infinity); {then}")
        self._aggregate(algorithm, tally.uplinks(), round, kind)
        book.taken(ids, tally.bytes, loop.t - sent, reply)
        return ids

    def _aggregate(self, algorithm: Algorithm, up: Uplinks, round: Round, kind: tuple[int, int]) -> None:
        (loop := self.loop).whole = False
        known, before = loop.server[KNOWN], loop.server.get("w")
        after = guarded(partial(algorithm.aggregate, loop.server, up, round))
        known[round.ids] = round.samples  # in place: a round asks for nothing that grows with n
        loop.server = contract.next_state(algorithm, after, loop.lasting) | {KNOWN: known}
        self._statistics(before, up)
        for total, new in ((loop.used, up.used), (loop.kinds.setdefault(kind, {}), up.kinds)):
            for name, words in new.items():
                total.setdefault(name, set()).update(words)

    def _statistics(self, before: Tensor | None, up: Uplinks) -> None:
        """Set BatchNorm's running statistics in the server's model, which was `before`, to the clients' mean."""
        w, at, mean = self.loop.server.get("w"), self.loop.task.net.statistics, up.means.get("w")
        if mean is None and before is not None and "dw" in up.means:
            mean = before + up.means["dw"]
        if w is not None and at is not None and mean is not None and w.shape == mean.shape == (self.loop.task.p,):
            self.loop.server["w"] = w.index_copy(0, at, mean[at])

    # messages under way

    def _send(self, ids: np.ndarray, phase: int) -> None:
        if len(ids):
            loop, round = self.loop, self.loop.round(ids, phase)
            sent = guarded(partial(loop.algorithm.downlink, loop.server, round))
            down = contract.downlink(loop.algorithm, "downlink", sent, len(ids))
            loop.flights.append(Flight(ids, loop.t, down, down_bytes(down)))
            loop.engine.send(down, round)

    def _bill(self, flights: list[Flight]) -> None:
        for f in flights:
            self.book.sent(f.ids, f.bytes)

    def _lost(self, missing: dict[int, str]) -> list[Flight]:
        """Note those who do not answer; returns the messages to them, which are no longer under way."""
        self.loop.missing |= {self.loop.names[i]: why for i, why in missing.items()}
        return self._landed(np.array(sorted(missing))) if missing else []

    def _landed(self, ids: np.ndarray) -> list[Flight]:
        """Take the messages to `ids` off those under way."""
        landed: list[Flight] = []
        left: list[Flight] = []
        for flight in self.loop.flights:
            if flight.ids is ids or (here := np.isin(flight.ids, ids)).all():
                landed.append(flight)
            elif here.any():
                landed.append(flight.part(np.flatnonzero(here)))
                left.append(flight.part(np.flatnonzero(~here)))
            else:
                left.append(flight)
        self.loop.flights = left
        return landed

    def _arrivals(self, ids: np.ndarray) -> tuple[np.ndarray, State]:
        """The answers of `ids`: the round [m] in which each message was sent, and the messages [m, ...]."""
        landed = self._landed(ids)
        self._bill(landed)
        if len(landed) == 1:
            return np.full(len(ids), landed[0].sent), expand(landed[0].down, len(ids))
        order = np.argsort(np.concatenate([f.ids for f in landed]))
        rows = [expand(f.down, len(f.ids)) for f in landed]
        received = {name: torch.cat([r[name] for r in rows])[torch.as_tensor(order)] for name in rows[0]}
        return np.concatenate([np.full(len(f.ids), f.sent) for f in landed])[order], received


def refuse_late(algorithm: Algorithm, n: int, t: int = 0) -> None:
    """Raise ConfigError for a method that from round t on needs its replies in their round."""
    if why := algorithm.needs.in_step(n, t):
        raise ConfigError(f"{algorithm.name} {why} and cannot run asynchronously")


def part(tensors: State, prefix: str) -> State:
    """The tensors of a checkpoint whose names begin with `prefix`, without it."""
    return {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
