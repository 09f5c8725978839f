"""A rehearsal: some rounds of two clients that leave no trace, to see what a method sends and asks of its uplinks."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from polyfed import models
from polyfed.base.errors import ConfigError, Diverged, PolyfedError
from polyfed.base.randomness import client_keys
from polyfed.base.typed import seeded
from polyfed.compute.batches import Work
from polyfed.compute.losses import Loss, tokens
from polyfed.compute.optimizers import Advance, Optimizer
from polyfed.compute.split import Split
from polyfed.compute.task import Task, having
from polyfed.core.algorithm import Algorithm, Contender, Round, State
from polyfed.core.messages import Form, form_of
from polyfed.core.rounds import Loop
from polyfed.core.rows import MemoryRows
from polyfed.core.schedule import Schedule, Uniform
from polyfed.core.uplinks import Tally, Wanted
from polyfed.core.worker import Reply, expand
from polyfed.data.federation import Federation
from polyfed.engines.local import LocalEngine, make_plan
from polyfed.models.memory import Memory
from polyfed.models.mixture import Mixture
from polyfed.runs.threats import Rule


class Sent(NamedTuple):
    """Messages of a method, counted on a small network.

    p: its parameters     first, later: (down, up) per client in the first round and in the last, in units of p numbers
    kinds: what its server asked of the uplinks, see `Uplinks.kinds`     instead: the setting that makes do with sums
    """

    p: int
    first: tuple[float, float]
    later: tuple[float, float]
    kinds: dict[str, set[str]]
    instead: str = ""

    def words(self) -> str:
        """`1 down, 1 up`, in vectors of p numbers."""
        first, later = (f"{down:.3g} down, {up:.3g} up" for down, up in (self.first, self.later))
        return later if first == later else f"{later} (first round {first})"

    def needs(self) -> str:
        """Say what the server needs of the uplinks, and what follows for secure aggregation.

        Clients can add up uplinks that are weighted alike or by their samples. Weights that the server chooses, such
        as those of late replies, are known to it alone and go on each client's own.
        """
        if not self.kinds:
            return "Nothing is sent up."
        rows = sorted(name for name, kinds in self.kinds.items() if "rows" in kinds)
        if not rows:
            return "The server needs means and sums only: secure aggregation is possible."
        return (
            f"The server needs every client's own {', '.join(rows)}: secure aggregation is not possible{self.instead}."
        )


def sending(algorithm: Contender) -> bool:
    """True for a method whose clients send something."""
    return isinstance(algorithm, Algorithm) and bool(counted(algorithm, rounds=2).kinds)


def counted(algorithm: Algorithm, rounds: int = 3) -> Sent:
    """Count what a method sends and asks for, in a short run of two small clients."""
    with seeded(0):
        lower, upper = nn.Linear(8, 6), nn.Linear(6, 3)
    plain = nn.Sequential(lower, nn.Sigmoid(), upper)
    normed = nn.Sequential(lower, nn.LayerNorm(6), nn.Sigmoid(), upper)
    others = Mixture(plain), Mixture(plain, classes=3), Memory(plain, rows=5)
    task = Task(taken(algorithm, plain, normed, *others), device="cpu")
    loop, _ = _drawn(algorithm, task, (8,), 3, 3, rounds)
    book = loop.ledger.array()
    first, later = (tuple((book[book[:, 0] == t, 3:5].mean(0) / (4 * task.p)).tolist()) for t in (0, rounds - 1))
    kinds: dict[str, set[str]] = {}
    for of in loop.kinds.values():
        for name, uses in of.items():
            kinds.setdefault(name, set()).update(uses)
    return Sent(task.p, first, later, kinds, sums_instead(algorithm))


def sums_instead(algorithm: Algorithm) -> str:
    """Name the setting by which a method that needs rows makes do with sums, where it has one."""
    if getattr(algorithm, "aggregation_error", False):
        return "; without aggregation-error it takes sums alone"
    return "; one-hot = true sends sums alone" if getattr(algorithm, "one_hot", None) is False else ""


def taken(algorithm: Algorithm, *nets: nn.Module) -> nn.Module:
    """The first net that a method does not refuse, or the first of all; with an adapter for a method for adapters."""
    if algorithm.adapter_train:
        return models.adapted(nets[0], f"lora:r=2,train={algorithm.adapter_train}")
    for net in nets:
        task = Task(net, device="cpu")
        with suppress(PolyfedError):
            algorithm.init_server(task, task.w0.clone(), 2)
            return net
    return nets[0]


def rehearse(algorithm: Algorithm, task: Task, federation: Federation, work: Work) -> Loop:
    """The event loop of the first two clients that have samples, after one round: `used` says what the method asked of
    its uplinks, `ledger` what was sent."""
    who = federation.train.counts.nonzero()[0][:2]
    train = federation.train.select(who).to(task.device, task.dtype)
    return _played(algorithm, task, train, [federation.names[int(i)] for i in who], work, 1)[0]


def sums(
    algorithm: Algorithm, task: Task, shape: tuple[int, ...], classes: int | None, outputs: int
) -> tuple[dict[tuple[int, int], Wanted], bool]:
    """The sums that are all a method needs of its uplinks, by (exchanges of the round, exchange), see `Loop`.

    Also whether it takes nothing else.

    Seen on two clients with random samples, the same in simulation and at sites. Of a method that cannot run on these,
    every row is kept.
    """
    try:
        loop, engine = _drawn(algorithm, task, shape, classes, outputs)
    except Exception:  # a method or a loss of the user's own need not run on such samples
        return {}, False
    wanted: dict[tuple[int, int], Wanted] = {}
    for kind, uplinks in loop.kinds.items():
        rows = engine.up[kind][0]
        wanted[kind] = {k: of for k, of in uplinks.items() if "rows" not in of and k in rows and rows[k].dim() > 0}
    uses = [of for uplinks in loop.kinds.values() for of in uplinks.values()]
    return wanted, bool(uses) and not any("rows" in of for of in uses)


class Forms(NamedTuple):
    """Messages of a method up and down in each kind of exchange, "exchanges of the round.exchange", by name.

    deployed: what clients receive to deploy a model
    """

    up: dict[str, dict[str, Form]]
    down: dict[str, dict[str, Form]]
    deployed: dict[str, Form]

    def of(self, phases: int, phase: int) -> dict[str, Form]:
        """Messages sent up in one exchange; where it was not rehearsed, in any."""
        return self._of(self.up, phases, phase)

    def to(self, phases: int, phase: int) -> dict[str, Form]:
        """Messages sent down in one exchange; where it was not rehearsed, in any."""
        return self._of(self.down, phases, phase)

    def _of(self, kinds: Mapping[str, dict[str, Form]], phases: int, phase: int) -> dict[str, Form]:
        if (exact := kinds.get(f"{phases}.{phase}")) is not None:
            return exact
        return {name: form._replace(optional=True) for forms in kinds.values() for name, form in forms.items()}

    @property
    def largest(self) -> int:
        """Bytes of the largest message from a client."""
        return _largest(self.up.values())

    @property
    def largest_down(self) -> int:
        """Bytes of the largest message to a client."""
        return _largest([*self.down.values(), self.deployed])


def _largest(messages: Iterable[Mapping[str, Form]]) -> int:
    return max((sum(f.bytes for f in of.values()) for of in messages), default=0)


class _Noting(LocalEngine):
    """Takes down what clients send and receive, by (exchanges of the round, exchange)."""

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        self.up: dict[tuple[int, int], list[State]] = {}
        self.down: dict[tuple[int, int], list[State]] = {}

    def exchange(self, algorithm: Algorithm, received: State, round: Round, tally: Tally) -> Reply:
        kind = algorithm.needs.phases(round.t), round.phase
        self.down.setdefault(kind, []).append({name: t[0] for name, t in received.items()})
        reply = super().exchange(algorithm, received, round, tally)
        if reply.bad is None:
            self.up.setdefault(kind, []).append({name: t[0] for name, t in tally.part().rows.items()})
        return reply


def _played(
    algorithm: Algorithm, task: Task, train: Split, names: Sequence[str], work: Work, rounds: int
) -> tuple[Loop, _Noting]:
    """Some rounds of a few clients that leave no trace, with every row kept."""
    plan = make_plan(task, len(names), 1, workers=1)
    rows = MemoryRows(len(names), algorithm.init_client(task, task.w0))
    engine = _Noting(task, {"train": train}, rows, client_keys(names), work, 0, plan)
    loop = Loop(task, train.counts, names, algorithm, Uniform(), engine, 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(rounds):
            loop.step()
    except Diverged:  # on these samples: what was sent before tells the rest
        if not engine.up:
            raise
    finally:
        torch.set_num_threads(threads)
    return loop, engine


def rehearsed(
    algorithm: Algorithm, task: Task, federation: Federation, rounds: int, seed: int = 0
) -> tuple[Loop, _Noting]:
    """Some rounds of two clients with random samples in the place of the federation's. seed: of the samples"""
    shape, outputs = federation.input_shape, federation.outputs
    return _drawn(algorithm, task, shape, federation.classes, outputs, rounds, seed)


def _drawn(
    algorithm: Algorithm,
    task: Task,
    shape: tuple[int, ...],
    classes: int | None,
    outputs: int,
    rounds: int = 3,
    seed: int = 0,
) -> tuple[Loop, _Noting]:
    """Some rounds of one step of two clients with random samples.

    task: with the model, whose `check` need not have been called     shape: of an input
    """
    rng, size = np.random.default_rng(seed), 2 * min(classes or 4, 50)
    task = having(task)
    task.scores = ()

    def draw() -> tuple[Tensor, Tensor]:
        whole = task.net.integers
        x = torch.as_tensor(rng.integers(0, 2, (size, *shape)) if whole else rng.normal(size=(size, *shape)))
        if task.loss is tokens:
            with torch.no_grad():
                output = task.outputs(task.w0, task.place(Split(x, x[:, :0], np.array([0, size]))).x)
            return x, torch.zeros(output.shape[:2]).long()
        if classes is not None:
            return x, (torch.arange(size) + (seed > 0)) % classes
        y = torch.as_tensor(rng.normal(size=(size, outputs)))
        return x, y[:, 0] if outputs == 1 else y

    train = task.place(Split.of([draw(), draw()]))
    return _played(algorithm, task, train, ("one", "two"), Work(steps=1, batch_size=None), rounds)


def forms(algorithm: Algorithm, task: Task, shape: tuple[int, ...], classes: int | None, outputs: int) -> Forms:
    """The forms of what a method sends, seen in three rounds of two clients with random samples of this shape."""
    loop, engine = _drawn(algorithm, task, shape, classes, outputs)
    up, down = (
        {f"{phases}.{phase}": _forms(of, task.p) for (phases, phase), of in sent.items()}
        for sent in (engine.up, engine.down)
    )
    deployed = expand(loop.deployment(), loop.n)
    return Forms(up, down, _forms([{name: t[0] for name, t in deployed.items()}], task.p))


def _forms(messages: Sequence[State], p: int) -> dict[str, Form]:
    """Find what messages of one kind have in common."""
    common: dict[str, Form] = {}
    for name in dict.fromkeys(name for m in messages for name in m):
        each = [form_of(m[name]) for m in messages if name in m]
        sizes = [set(of) for of in zip(*(f.shape for f in each), strict=True)]
        shape = tuple(next(iter(of)) if len(of) == 1 else None for of in sizes)
        most = max(f.most for f in each)
        common[name] = Form(each[0].dtype, shape, max(most, p) if None in shape else most, len(each) < len(messages))
    return common


def averaged(used: dict[str, set[str]]) -> list[str]:
    """The uplinks, by name, that a method takes means or sums of: those that a robust rule protects."""
    return sorted(name for name, words in used.items() if words != {"rows"})


def check_optimizer(algorithm: Algorithm, task: Task, federation: Federation, work: Work) -> None:
    """Raise ConfigError where the local steps cannot be those of the task's optimiser."""
    if task.net.optimizer.plain:
        return
    key = "clip_norm" if task.net.optimizer.name == "sgd" else "optimizer"
    why = algorithm.needs.plain_sgd
    if not why and not _asked(algorithm, task, federation, work):
        why = "its local steps are not those of local_sgd"
    if why:
        given = task.net.optimizer.clip_norm if key == "clip_norm" else task.net.optimizer.name
        raise ConfigError(f"{key}: found {given!r}, expected plain sgd with {algorithm.name}: {why}")


def _asked(algorithm: Algorithm, task: Task, federation: Federation, work: Work) -> bool:
    """True where a method's local steps are those of `local_sgd`, tried with one step of two clients."""
    starts: list[bool] = []

    class Noticing(Optimizer):
        def start(self, w: Tensor, only: Tensor | None = None) -> Advance:
            starts.append(True)
            return super().start(w, only)

    watched = having(task, optimizer=Noticing(**dataclasses.asdict(task.net.optimizer)))
    rehearse(algorithm, watched, federation, dataclasses.replace(work, steps=1))
    return bool(starts)


def check_robust(
    algorithm: Algorithm,
    rule: Rule,
    model: nn.Module,
    loss: Loss,
    federation: Federation,
    work: Work,
    schedule: Schedule,
) -> str:
    """Say in words what a robust rule will act on. Raises ConfigError where that is nothing, or too few uploads."""
    taken = schedule.replies(federation.n)
    if why := rule.idle(taken):
        raise ConfigError(f"robust: {rule.name} would see {taken} upload{'s' * (taken > 1)} at a time; {why}")
    used = rehearse(algorithm, Task(model, loss, device="cpu"), federation, work).used
    means = averaged(used)
    if not means:
        raise ConfigError(f"robust: {algorithm.name} does not average its uploads, so {rule.name} cannot be applied")
    alone = sorted(name for name, words in used.items() if "rows" in words)
    also = "also " if set(alone) & set(means) else ""
    verb = "is" if len(alone) == 1 else "are"
    rest = f"; {', '.join(alone)} {verb} {also}used client by client, as sent" if alone else ""
    return f"{rule.name} replaces the mean of {', '.join(means)}{rest}"
