"""Plan a private run: what a method's uplinks are made of, seen on random samples; refusals by name; the releases.

An uplink is private by row where it depends on samples through noisy gradients alone, asked for at models that are no
secret. That is tried: gradients are replaced by numbers that no sample decides, then samples and private tensors are
exchanged, and neither the uplink nor one of those models may change by a bit.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyfed.base.errors import ConfigError, PolyfedError
from polyfed.base.randomness import client_keys
from polyfed.compute.batches import Batch, Batches, Work
from polyfed.compute.clipped import check_rows, sizes_of
from polyfed.compute.optimizers import Constant, StepSizes
from polyfed.compute.split import Split
from polyfed.compute.task import Task, having
from polyfed.core.algorithm import Algorithm, State
from polyfed.core.rounds import Loop
from polyfed.core.rows import MemoryRows
from polyfed.core.schedule import Schedule
from polyfed.core.uplinks import Wanted
from polyfed.core.worker import expand
from polyfed.data.federation import Federation
from polyfed.engines.local import here
from polyfed.runs.privacy import Privacy
from polyfed.runs.rehearsal import rehearsed, sums_instead
from polyfed_privacy.planned import Planned

NAMES = ("one", "two")
EPS = 8 * torch.finfo(torch.float64).eps
Purposes = Mapping[str, int]  # purpose of a local solve -> which numbers its gradients are


def planned(
    algorithm: Algorithm,
    task: Task,
    federation: Federation,
    privacy: Privacy,
    work: Work,
    schedule: Schedule,
    rounds: int,
    wanted: Mapping[tuple[int, int], Wanted],
    cohort: int,
    step_sizes: StepSizes = Constant(),  # noqa: B008  (immutable)
) -> Planned:
    """What a private run will do.

    wanted: the sums that are all that the method needs, by exchange, as `rehearsal.sums` finds them
    Raises ConfigError for what cannot be had, with the reason.
    """
    name = algorithm.name
    if schedule.late(federation.n):
        raise ConfigError(
            f"privacy: {name} answers one by one under this schedule, and the sum of one reply is the reply"
        )
    p = privacy
    loop, sent = _rehearsed(algorithm, task, federation)
    if not any(sent.values()):
        return Planned(p, sends=False)
    _check_sums(algorithm, loop, sent, wanted)
    numbers = max(sum(t.numel() for t in up.values()) for up in sent.values())
    kinds = frozenset(kind for names in wanted.values() for of in names.values() for kind in of)
    plan = Planned(p, True, rounds, 0.0, numbers, cohort=cohort, kinds=kinds)
    least = max(p.threshold if p.sums == "secure" else 1, p.absent + 1 if p.epsilon is not None else 1)
    if cohort < least:
        key = "threshold" if least == p.threshold else "absent"
        raise ConfigError(f"privacy.{key}: found {getattr(p, key)}, and {cohort} sites take part in a round")
    if p.epsilon is None:
        return plan
    _check_private(task, federation, p)
    if p.unit == "site":
        return dataclasses.replace(plan, releases=_releases_of_sites(algorithm, loop, p, rounds))
    rehearsal = Rehearsal(algorithm, task, federation, work, loop)
    home = rehearsal.home()
    if p.noise == "own":
        hits = [rehearsal.hits(t, home) for t in (0, 1, max(0, rounds - 1))]
        return dataclasses.replace(plan, releases=float(hits[0] + (rounds - 1) * max(hits[1:])), home=home)
    steps = [work.taken(federation.train.counts, t).max() for t in {0, 1, max(0, rounds - 1)}]
    if work.batch_size is not None or max(steps) != 1:
        raise ConfigError(
            f"privacy.noise: {p.noise} adds noise once, which is right for one step a round on all rows; set "
            "batch-size = full and local-steps = 1, or noise = own"
        )
    return dataclasses.replace(plan, releases=float(rounds), rate=rehearsal.rate(home), home=home)


def _rehearsed(algorithm: Algorithm, task: Task, federation: Federation) -> tuple[Loop, dict[tuple[int, int], State]]:
    """Three rounds on random samples: (the loop at their end, a client's message of each kind)."""
    try:
        loop, engine = rehearsed(algorithm, task, federation, 3)
    except PolyfedError:
        raise
    except Exception:
        raise ConfigError(
            f"privacy: {algorithm.name} cannot be rehearsed on random samples, so what it sends is not known"
        ) from None
    return loop, {kind: rows[0] for kind, rows in engine.up.items()}


def _releases_of_sites(algorithm: Algorithm, loop: Loop, p: Privacy, rounds: int) -> float:
    """Messages of one site, each of which is a release. Raises ConfigError where they cannot be clipped."""
    name = algorithm.name
    if type(algorithm).conserved is not Algorithm.conserved:
        raise ConfigError(
            f"privacy.unit: {name} rests on sums over its clients ({', '.join(_conserved(algorithm, loop))}), "
            "which clipping what a site sends would break; expected row, or another method"
        )
    phases = [algorithm.needs.phases(t) for t in (0, 1)]
    if p.quantile is not None and max(phases) > 1:
        raise ConfigError(f"privacy.quantile: {name} has several exchanges a round; leave quantile out")
    return float(phases[0] + phases[1] * max(0, rounds - 1))


def _check_sums(
    algorithm: Algorithm, loop: Loop, sent: Mapping[tuple[int, int], State], wanted: Mapping[tuple[int, int], Wanted]
) -> None:
    for kind, up in sent.items():
        used = loop.kinds.get(kind, {})
        rows = sorted(name for name, of in used.items() if "rows" in of)
        if rows:
            own = ", ".join(rows) + sums_instead(algorithm)
            raise ConfigError(f"privacy: the server of {algorithm.name} needs every client's own {own}")
        for name in up:
            if name in used and name not in wanted.get(kind, {}):
                raise ConfigError(f"privacy: {algorithm.name} sends {name!r}, which is not summed")
            if name in used and not up[name].is_floating_point():
                raise ConfigError(
                    f"privacy: {algorithm.name} sends {name!r}, which are positions and not numbers to sum"
                )


def _check_private(task: Task, federation: Federation, p: Privacy) -> None:
    rows = int(federation.train.counts.sum()) if p.unit == "row" else federation.n
    if p.delta >= 1 / max(1, rows):
        raise ConfigError(
            f"privacy.delta: found {p.delta:g}, expected less than 1 in {rows} {p.unit}s: else giving away one "
            f"{p.unit} whole would pass"
        )
    if task.dtype != torch.float64:
        raise ConfigError("dtype: found float32, expected float64: rounding is a part of what noise has to hide")

    if p.unit == "row" and task.net.stacked is None and task.net.random:
        raise ConfigError("privacy.unit: found row with a model that draws random numbers (dropout), expected none")
    if p.unit == "row":
        check_rows(task, federation.train.x[:4], federation.train.y[:4])


def _conserved(algorithm: Algorithm, loop: Loop) -> list[str]:
    return list(algorithm.conserved(loop.server, loop.engine.private(torch.arange(loop.n))))


class Rehearsal:
    """What the uplink of one exchange is made of, with two small clients on random samples."""

    def __init__(self, algorithm: Algorithm, task: Task, federation: Federation, work: Work, loop: Loop):
        if any(algorithm.needs.phases(t) > 1 for t in (0, 1, 2)) or algorithm.needs.everyone_first:
            raise ConfigError(
                f"privacy.unit: {algorithm.name} has several exchanges a round, the later of which read what a client "
                "keeps of the earlier; expected site"
            )
        self.algorithm, self.federation, self.work = algorithm, federation, work
        self.loops = [rehearsed(algorithm, task, federation, 3, seed)[0] for seed in (0, 1)]
        self.task = self.loops[0].task
        loop = self.loops[0]
        self.round = loop.round(np.arange(2), 0)
        self.received = tame(expand(algorithm.downlink(loop.server, self.round), 2))
        self.rows = [tame(loop.engine.private(torch.arange(2))) for loop in self.loops]
        self.splits = [here(loop.engine).data["train"] for loop in self.loops]

    def up(self, private: State, split: Split, which: Purposes, single: bool = False) -> "Traced":
        """What is sent, with gradients that no sample decides."""
        work = Work(steps=1 if single else 2, batch_size=None if single or self.work.batch_size is None else 4)
        at = list[tuple[str, Tensor]]()

        def made(w: Tensor, batch: Batch) -> Tensor:
            at.append((batch.purpose, w.clone()))
            key = which.get(batch.purpose, 0)
            return torch.zeros_like(w) if key < 0 else stand_in(key, len(at), w)

        task = having(self.task, guard=made)
        data = Batches(split, np.arange(2), client_keys(NAMES), work, 0, self.round.t)
        store = MemoryRows(2, {name: t[0] for name, t in private.items()})
        store.scatter(torch.arange(2), private)
        received = {name: t.clone() if t.stride(0) else t for name, t in self.received.items()}
        with torch.no_grad():
            sent = self.algorithm.local_update(task, store.gather(torch.arange(2)), received, data, self.round)[1]
        return Traced({name: t.clone() for name, t in sent.items()}, at)

    def home(self) -> frozenset[str]:
        """The purposes of local solves that nothing sent depends on; ConfigError where samples reach it by more than
        gradients at points that are no secret."""
        name, private, split = self.algorithm.name, self.rows[0], self.splits[0]
        plain = self.up(private, split, {})
        home, changed = plain.purposes, {p: self.up(private, split, {p: 1}) for p in plain.purposes}
        while reaching := {p for p in home if not plain.same(changed[p], home)}:
            home = home - reaching
        if home == plain.purposes:
            raise ConfigError(f"privacy.unit: what {name} sends depends on no gradient; expected site")
        for key in private:
            if not plain.same(self.up(private | {key: self.rows[1][key]}, split, {}), home):
                raise ConfigError(
                    f"privacy.unit: what {name} sends depends on the clients' private {key!r}, which is made of "
                    "samples without noise; expected site, or another method"
                )
        if not plain.same(self.up(private, self.splits[1], {}), home):
            raise ConfigError(
                f"privacy.unit: what {name} sends depends on samples by more than gradients; expected site, or another "
                "method"
            )
        return frozenset(home)

    def rate(self, home: frozenset[str]) -> float:
        """By how much the uplink moves against a gradient; ConfigError where it is no step along one."""
        private, split = self.rows[0], self.splits[0]
        plain = self.up(private, split, {}, True)
        zero, one, two = (self.up(private, split, dict.fromkeys(plain.purposes, k), True) for k in (-1, 1, 2))
        calls = [k for k, (purpose, _) in enumerate(plain.at, 1) if purpose not in home]
        rates: list[float] = []
        for key, traced in ((1, one), (2, two)):
            move = next(iter(traced.up.values())).double() - next(iter(zero.up.values())).double()
            g = stand_in(key, calls[0], move) if move.dim() == 2 and move.shape[1] == self.task.p else None
            if g is None or len(calls) != 1 or len(traced.up) != 1:
                break
            rates.append(float(-(move * g).sum() / g.square().sum()))
            rounding = 1e-9 * float(move.abs().max()) + EPS * max(float(t.abs().max()) for t in zero.up.values())
            if float((move + rates[-1] * g).abs().max()) > rounding:
                break
        if len(rates) < 2 or abs(rates[0] - rates[1]) > 1e-9 * abs(rates[0]):
            raise ConfigError(
                f"privacy.noise: what {self.algorithm.name} sends is no single gradient step from what it received; "
                "expected own"
            )
        return max(map(abs, rates))

    def hits(self, t: int, home: frozenset[str]) -> int:
        """How often a row of a client is used in round t, at most: of those with the fewest rows and with the most."""
        counts = self.federation.train.counts
        ids = np.unique([int(np.where(counts > 0, counts, counts.max()).argmin()), int(counts.argmax())])
        split, used = self.federation.train, {int(i): np.zeros(int(counts[i]), dtype=np.int64) for i in ids}
        ids = np.array(sorted(ids, key=lambda i: -int(self.work.taken(counts[[i]], t)[0])))

        def counting(w: Tensor, batch: Batch) -> Tensor:
            sizes: list[int] = sizes_of(batch).long().numpy().tolist()
            for k in range(len(w)):
                if batch.purpose not in home and (batch.live is None or bool(batch.live[k])):
                    i = int(ids[k])
                    at = slice(None) if batch.places is None else batch.places[k, : sizes[k]] - split.offsets[i]
                    used[i][at] += 1
            return torch.zeros_like(w)

        task = having(self.task, guard=counting)
        split = task.place(split)
        data = Batches(split, ids, client_keys([self.federation.names[int(i)] for i in ids]), self.work, 0, t)
        start = self.algorithm.init_client(task, task.w0)
        store, at = MemoryRows(len(ids), start), torch.arange(len(ids))
        received = {name: t[: len(ids)] for name, t in self.received.items()}
        round = self.round._replace(t=t, ids=at, samples=torch.as_tensor(counts[ids], dtype=task.dtype))
        with torch.no_grad():
            self.algorithm.local_update(task, store.gather(at), received, data, round._replace(sent=at * 0 + t))
        return max(int(u.max()) for u in used.values())


class Traced(NamedTuple):
    """An uplink, and the models at which gradients were asked for, by the purpose of the local solve."""

    up: State
    at: list[tuple[str, Tensor]]

    @property
    def purposes(self) -> set[str]:
        """Of all local solves."""
        return {purpose for purpose, _ in self.at}

    def same(self, other: "Traced", home: set[str]) -> bool:
        """True where what is sent, and the models of all solves that are not at home, are equal to the bit."""
        mine, theirs = ([w for purpose, w in traced.at if purpose not in home] for traced in (self, other))
        equal = self.up.keys() == other.up.keys() and len(mine) == len(theirs)
        pairs = [*zip(mine, theirs, strict=False), *((t, other.up[name]) for name, t in self.up.items() if equal)]
        return equal and all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


def tame(state: State) -> State:
    """What a rehearsal has left, no number above 1: where it has diverged, steps drown in rounding."""

    def small(t: Tensor) -> Tensor:
        mine = t[:1] if t.stride(0) == 0 else t  # the same for all clients, and known for it
        finite = mine.nan_to_num(0, 0, 0)
        return (finite / finite.abs().max().clamp(min=1)).expand_as(t)

    return {name: small(t) if t.is_floating_point() and t.numel() else t for name, t in state.items()}


def stand_in(key: int, call: int, like: Tensor) -> Tensor:
    """[s, p] numbers in the place of a gradient, the same for all clients."""
    drawn = np.random.default_rng([key, call]).normal(size=(1, like.shape[-1]))
    return torch.as_tensor(drawn).to(like).expand_as(like).clone()
