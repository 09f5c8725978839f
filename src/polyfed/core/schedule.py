"""Schedules: who takes part and when. A schedule turns (round, seed) into the clients that are sent a message and
those whose replies are taken; in synchronous training both are the round's cohort."""

import csv
import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import floor
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np

from polyfed.base.arguments import checked
from polyfed.base.errors import ConfigError
from polyfed.base.randomness import below, generator, key_of, mix, priorities
from polyfed.base.registry import Registry, arguments
from polyfed.base.settings import Configured, found, setting
from polyfed.base.text import parse
from polyfed.base.values import COUNTED, Limits
from polyfed.native import kernel


def sample(seed: int, purpose: str, round: int, keys: np.ndarray, m: int) -> np.ndarray:
    """Sorted positions of m of the clients with these keys, drawn without replacement: the m smallest priorities."""
    n = len(keys)
    if m >= n:
        return np.arange(n)
    share = (m + 8 * m**0.5 + 16) / n  # of the clients among which the m smallest nearly always are
    few = _candidates(seed, purpose, round, keys, share)
    few = few if len(few) > m else np.arange(n)
    return np.sort(few[np.argpartition(priorities(seed, purpose, round, keys[few]), m)[:m]])


def _candidates(seed: int, purpose: str, round: int, keys: np.ndarray, share: float) -> np.ndarray:
    """The clients whose priorities are below a share of 2^64, and few more."""
    bound, h, fast = int(share * 2**31) + 1 << 33, mix(seed, key_of(purpose), round), kernel()
    if bound >= 2**64:
        return np.arange(len(keys))
    found = None if fast is None else fast.below(bound, h, keys)
    return below(bound, h, keys) if found is None else found


class Turn(NamedTuple):
    """One turn of the event loop."""

    send: np.ndarray  # clients that are sent a downlink at its start
    take: np.ndarray  # clients whose replies are taken at its end
    seconds: float = 0.0  # virtual, 0 where no delays are simulated


@checked
class Schedule(Configured):
    """Base: a synchronous schedule, defined by its cohort."""

    table: ClassVar[str] = "schedule"

    def cohort(self, seed: int, t: int, keys: np.ndarray) -> np.ndarray:
        """The clients of a round.

        Parameters
        ----------
        seed, t : int
            The run's seed, and the round from 0.
        keys : array
            [n] client keys.

        Returns
        -------
        array
            Sorted positions of the clients.
        """
        raise NotImplementedError

    def late(self, n: int) -> bool:
        """True where replies may be taken in a later turn than their message was sent in.

        Parameters
        ----------
        n : int
            Clients in the federation.

        Returns
        -------
        bool
            False for a synchronous schedule.
        """
        return False

    def replies(self, n: int) -> int:
        """Number of replies that the server takes at a time; the expected one where it is drawn.

        Parameters
        ----------
        n : int
            Clients in the federation.

        Returns
        -------
        int
            By default n.
        """
        return n

    def turn(self, seed: int, t: int, keys: np.ndarray) -> Turn:
        """One turn of the event loop.

        Parameters
        ----------
        seed, t : int
            The run's seed, and the turn from 0.
        keys : array
            [n] client keys.

        Returns
        -------
        Turn
            The clients that are sent a message, those whose replies are taken, and the virtual seconds that pass.
        """
        ids = self.cohort(seed, t, keys)
        return Turn(ids, ids)


SCHEDULES: Registry[type[Schedule]] = Registry("schedule.name")


@checked
@dataclass(frozen=True)
class Uniform(Schedule):
    """floor(fraction * n) clients, at least one, drawn without replacement; all of them at fraction 1."""

    fraction: float = setting(1.0, gt=0, le=1, doc="Share of the clients.")

    def size(self, n: int) -> int:
        """Number of clients that take part in a round.

        Parameters
        ----------
        n : int
            Clients in the federation.

        Returns
        -------
        int
            At least 1.
        """
        return max(1, floor(self.fraction * n + 1e-9))  # 0.29 * 100 is 28.999999999999996

    def replies(self, n: int) -> int:
        return self.size(n)

    def cohort(self, seed: int, t: int, keys: np.ndarray) -> np.ndarray:
        return sample(seed, "cohort", t, keys, self.size(len(keys)))


@checked
@dataclass(frozen=True)
class Bernoulli(Schedule):
    """Each client independently with a given probability; if none is drawn, the client with the smallest draw."""

    probability: float = setting(gt=0, le=1, doc="Chance of a client to take part in a round.")

    def replies(self, n: int) -> int:
        return max(1, floor(self.probability * n + 1e-9))

    def cohort(self, seed: int, t: int, keys: np.ndarray) -> np.ndarray:
        few = _candidates(seed, "cohort", t, keys, self.probability)
        ids = few[priorities(seed, "cohort", t, keys[few]) / 2.0**64 < self.probability]
        return ids if len(ids) else sample(seed, "cohort", t, keys, 1)


@checked
@dataclass(frozen=True)
class Availability(Schedule):
    """A uniform draw among the clients that are reachable."""

    trace: np.ndarray | tuple[tuple[bool, ...], ...] = setting(
        doc="[periods, n]: who is reachable in each period of one round; repeated over the rounds."
    )
    fraction: float = setting(1.0, gt=0, le=1, doc="Share of the reachable clients that take part.")

    def __post_init__(self):
        if isinstance(self.trace, np.ndarray):
            self.require(self.trace.ndim == 2, "trace", "[periods, n] true or false")
            object.__setattr__(self, "trace", tuple(tuple(map(bool, row)) for row in self.trace))
        super().__post_init__()
        self.require(len({len(row) for row in self.trace}) == 1, "trace", "[periods, n] true or false")

    def replies(self, n: int) -> int:
        return max(1, floor(self.fraction * min(map(sum, self.trace)) + 1e-9))

    def cohort(self, seed: int, t: int, keys: np.ndarray) -> np.ndarray:
        row = self.trace[t % len(self.trace)]
        if len(row) != len(keys):
            raise ConfigError(f"availability: found {len(row)} clients in the trace, expected {len(keys)}")
        here = np.flatnonzero(row)
        if not len(here):
            raise ConfigError(f"availability: no client is reachable in round {t}")
        m = max(1, floor(self.fraction * len(here) + 1e-9))
        return here[sample(seed, "cohort", t, keys[here], m)]


@checked
@dataclass(frozen=True)
class Delays(Configured):
    """Seconds from sending a client a message to having its reply: compute plus network."""

    table: ClassVar[str] = "delays"
    kind: Literal["uniform", "log-normal"] = setting(
        "uniform",
        doc="Distribution: uniform between `low` and `high`, or log-normal with median `low` and shape `high`.",
    )
    low: float = setting(0.0, ge=0, le=1e9, doc="Its parameters, in seconds except for the shape.")
    high: float = setting(0.0, ge=0, le=1e9, doc="Its parameters, in seconds except for the shape.")
    compute: np.ndarray | tuple[float, ...] | float = setting(
        0.0, doc="[n] fixed seconds per client, or one number for all, added to the draw."
    )
    network: np.ndarray | tuple[float, ...] | float = setting(
        0.0, doc="[n] fixed seconds per client, or one number for all, added to the draw."
    )

    def __post_init__(self):
        super().__post_init__()
        for key in ("compute", "network"):  # as tuples they compare, and print, in full
            value = np.asarray(getattr(self, key))
            fits = value.dtype.kind in "fiu" and value.ndim <= 1 and bool((np.isfinite(value) & (value >= 0)).all())
            self.require(fits, key, "a number of seconds from 0, or one for each client")
            object.__setattr__(self, key, tuple(map(float, value)) if value.ndim else float(value))
        if self.kind == "uniform":
            self.require(self.high >= self.low, "high", f"at least low = {self.low:g}")
        else:
            self.require(self.high <= 100, "high", "a shape of at most 100")

    @classmethod
    def from_text(cls, text: str, names: tuple[str, ...] | None) -> "Delays | None":
        """Delays from "uniform:0,20", "log-normal:5,0.5" or "file:PATH".

        Parameters
        ----------
        text : str
            As on the command line.
        names : tuple of str or None
            The clients' names; None: the text is only checked.

        Returns
        -------
        Delays or None
            None for a file without `names`.
        """
        if text.startswith("file:"):
            return None if names is None else cls.from_file(text.removeprefix("file:"), names)
        kind, values, named = parse(text, "schedule.delays")
        if len(values) != 2 or named:
            expected = "uniform:0,20 or log-normal:5,0.5 or file:PATH"
            raise ConfigError(f"schedule.delays: {found(text, expected)}")
        return cls(**arguments(cls, [kind, *values], {}, "schedule.delays", text))

    @classmethod
    def from_file(cls, path: str | Path, names: tuple[str, ...]) -> "Delays":
        """Fixed delays from a CSV file with columns client, compute, network (seconds).

        Parameters
        ----------
        path : str or Path
            The file, with one row for each of `names`.
        names : tuple of str
            The clients' names, in the order of the federation.

        Returns
        -------
        Delays
            With `compute` and `network` set.
        """
        try:
            with Path(path).open(encoding="utf-8", newline="") as f:
                read = [(row["client"], float(row["compute"]), float(row["network"])) for row in csv.DictReader(f)]
        except (OSError, KeyError, TypeError, ValueError) as e:
            raise ConfigError(f"delays: {path} is not a CSV file with columns client, compute, network ({e})") from None
        rows = {name: seconds for name, *seconds in read}
        if len(rows) < len(read):
            twice = next(name for i, (name, *_) in enumerate(read) if name in [r[0] for r in read[:i]])
            raise ConfigError(f"delays: {path} has two rows for client {twice!r}, expected one")
        missing = [name for name in names if name not in rows]
        if missing:
            raise ConfigError(f"delays: {path} has no row for client {missing[0]!r}")
        bad = [name for name in names if not all(0 <= s < np.inf for s in rows[name])]
        if bad:
            raise ConfigError(f"delays: {path}, client {bad[0]!r}: found {rows[bad[0]]}, expected seconds from 0")
        compute, network = np.array([rows[name] for name in names]).reshape(-1, 2).T
        return cls(compute=compute, network=network)

    def draw(self, seed: int, t: int, ids: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """The delays of one turn.

        Parameters
        ----------
        seed, t : int
            The run's seed, and the turn from 0.
        ids, keys : array
            [m] positions of the clients that were sent a message, and [n] client keys.

        Returns
        -------
        array
            [m] seconds.
        """
        rngs = [generator(seed, "delay", t, int(keys[i])) for i in ids]
        if self.kind == "uniform":
            drawn = np.array([rng.uniform(self.low, self.high) for rng in rngs])
        else:
            drawn = np.array([self.low * np.exp(self.high * rng.standard_normal()) for rng in rngs])
        return drawn + sum(self._fixed(key, len(keys))[ids] for key in ("compute", "network"))

    def _fixed(self, key: str, n: int) -> np.ndarray:
        seconds = np.asarray(getattr(self, key))
        self.require(seconds.ndim == 0 or len(seconds) == n, key, f"one number of seconds for each of {n} clients")
        return np.broadcast_to(seconds, n)


@checked
@dataclass(frozen=True)
class Timed(Schedule):
    """A synchronous schedule on a virtual clock: a round lasts as long as its slowest participant."""

    schedule: Schedule = setting(doc="Who takes part.")
    delays: Delays = setting(doc="Time that each takes.")

    def replies(self, n: int) -> int:
        return self.schedule.replies(n)

    def cohort(self, seed: int, t: int, keys: np.ndarray) -> np.ndarray:
        return self.schedule.cohort(seed, t, keys)

    def turn(self, seed: int, t: int, keys: np.ndarray) -> Turn:
        ids = self.cohort(seed, t, keys)
        return Turn(ids, ids, float(self.delays.draw(seed, t, ids, keys).max()))


Memo = dict[tuple[int, bytes], tuple[list[Turn], Iterator[Turn]]]  # (seed, keys) -> (turns so far, those to come)


ROUND = Annotated[int, Limits(ge=0, le=COUNTED)]


@checked
@dataclass(frozen=True)
class Asynchronous(Schedule):
    """Every reply is taken when it arrives, on a virtual clock, so a simulation never waits.

    A turn takes the next reply and sends a new message to a client drawn from those at rest, which at full concurrency
    is the one that has just replied.
    """

    delays: Delays = setting(doc="Time that each client takes.")
    concurrency: int | None = setting(None, ge=1, doc="Clients at work at any time; none: all.")
    _memo: Memo = field(default_factory=Memo, compare=False, repr=False)

    def late(self, n: int) -> bool:
        return n > 1 and self.concurrency != 1

    def replies(self, n: int) -> int:
        return 1

    def turn(self, seed: int, t: ROUND, keys: np.ndarray) -> Turn:
        # the seed alone decides the turns, so there is no state to save: a resumed run draws them again from the first
        turns, more = self._memo.setdefault((seed, keys.tobytes()), ([], self._turns(seed, keys)))
        while len(turns) <= t:
            turns.append(next(more))
        return turns[t]

    def _turns(self, seed: int, keys: np.ndarray) -> Iterator[Turn]:
        n, clock, t = len(keys), 0.0, 0
        most = n if self.concurrency is None else self.concurrency
        if not 1 <= most <= n:
            raise ConfigError(f"concurrency: found {most}, expected 1 to {n}, the number of clients")
        # due; of ties the message sent first, or without delays one client would answer for ever; then by key, so that
        # ties do not hang on the order of clients; client
        queue: list[tuple[float, int, int, int]] = []
        while True:
            send = _dispatched(seed, t, keys, [i for *_, i in queue], most)
            for i, delay in zip(send, self.delays.draw(seed, t, send, keys), strict=True):
                heapq.heappush(queue, (clock + float(delay), t, int(keys[i]), int(i)))
            due, *_, i = heapq.heappop(queue)
            yield Turn(send, np.array([i]), due - clock)
            clock, t = due, t + 1


def _dispatched(seed: int, t: int, keys: np.ndarray, busy: Sequence[int] | np.ndarray, most: int) -> np.ndarray:
    """Clients at rest, as many as bring those at work from `busy` to `most`."""
    resting = np.setdiff1d(np.arange(len(keys)), busy)
    return resting[sample(seed, "dispatch", t, keys[resting], max(0, most - len(busy)))]


@dataclass(frozen=True)
class Arrivals(Schedule):
    """Takes the replies of real sites as they arrive, one a turn, in an order that cannot be known in advance."""

    concurrency: int | None = setting(None, ge=1, doc="Clients at work at any time; none: all.")

    def late(self, n: int) -> bool:
        return n > 1 and self.concurrency != 1

    def replies(self, n: int) -> int:
        return 1

    def dispatch(self, seed: int, t: int, keys: np.ndarray, busy: np.ndarray) -> np.ndarray:
        """Sorted positions of the clients at rest that are sent a message in turn t. keys: [n] of all clients"""
        return _dispatched(seed, t, keys, busy, min(self.concurrency or len(keys), len(keys)))


@dataclass(frozen=True)
class Replay(Schedule):
    """The turns of another run again, whatever decided them."""

    turns: tuple[Turn, ...] = setting(doc="One for each turn.")

    @classmethod
    def of(cls, ledger: Mapping[str, Any]) -> "Replay":
        """The turns of a ledger, as `Run.ledger` gives it; clients that were asked and did not answer are left out."""
        taken, client, late, seconds = (np.asarray(ledger[key]) for key in ("round", "client", "staleness", "seconds"))
        there = (taken >= 0) & (seconds > 0)
        taken, client, sent = taken[there], client[there], (taken - late)[there]
        turns = range(int(taken.max(initial=-1)) + 1)
        return cls(tuple(Turn(np.sort(client[sent == t]), np.sort(client[taken == t])) for t in turns))

    def late(self, n: int) -> bool:
        return any(not np.array_equal(turn.send, turn.take) for turn in self.turns)

    def replies(self, n: int) -> int:
        return max((len(turn.take) for turn in self.turns), default=1)

    def turn(self, seed: int, t: int, keys: np.ndarray) -> Turn:
        if t >= len(self.turns):
            raise ConfigError(f"replay: found {len(self.turns)} turns, expected one more for round {t}")
        return self.turns[t]


SCHEDULES.add("uniform", Uniform)
SCHEDULES.add("bernoulli", Bernoulli)
SCHEDULES.add("asynchronous", Asynchronous)


def schedule_of(table: Mapping[str, Any], fraction: float, names: tuple[str, ...] | None) -> Schedule:
    """The schedule of a [schedule] table; a file of delays is read only with the clients' `names`."""
    given = {key.replace("-", "_"): value for key, value in table.items()}
    name, text = given.pop("name", None), given.pop("delays", None)
    kind = SCHEDULES.find(name)
    if text is not None and not isinstance(text, str):
        raise ConfigError(f"schedule.delays: {found(text, 'uniform:0,20 or log-normal:5,0.5 or file:PATH')}")
    delays = None if text is None else Delays.from_text(text, names)
    if fraction != 1 and (kind is Asynchronous or "probability" in given):
        instead = "concurrency" if kind is Asynchronous else "probability"
        raise ConfigError(f"schedule.name: {name} does not use fraction = {fraction:g}; set {instead} alone")
    if kind is Asynchronous:
        return SCHEDULES.make(name, {**given, "delays": delays or Delays()})
    if kind is Uniform and "fraction" in given:
        raise ConfigError("schedule.fraction: uniform has no such setting; set fraction, outside of [schedule]")
    share = "fraction" if kind is Uniform else "probability"
    schedule = SCHEDULES.make(name, {share: fraction, **given})
    return schedule if delays is None else Timed(schedule, delays)
