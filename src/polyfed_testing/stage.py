"""The stage of the conformance table: a small federation, a network, an event loop, and a wire that keeps a record."""

import copy
import dataclasses
import os
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from polyfed.base.errors import ConfigError
from polyfed.base.randomness import client_keys
from polyfed.base.typed import seeded
from polyfed.compute.batches import Work
from polyfed.compute.compiled import path_of
from polyfed.compute.task import Task
from polyfed.core.algorithm import Algorithm, Round, State
from polyfed.core.messages import copied
from polyfed.core.rounds import Loop
from polyfed.core.schedule import Schedule, Uniform
from polyfed.core.uplinks import Tally
from polyfed.core.worker import Reply
from polyfed.data.federation import Federation
from polyfed.engines.local import LocalEngine, here, make_plan, make_rows
from polyfed.models.memory import Memory
from polyfed.models.mixture import Mixture
from polyfed.runs.rehearsal import taken
from polyfed.runs.result import Result
from polyfed.runs.trainer import fit

NAMES = ("oslo", "bern", "lima", "kyiv", "riga", "cork")
SIZES = (24, 5, 26, 13, 30, 12)  # full batches: some share a chunk, with padding, and some do not
N = len(SIZES)
SMALL, BATCH = 1, 8  # client 1 has fewer samples than a batch
CLASSES, ROUNDS = 3, 3
Made = TypeVar("Made")


@cache
def federation(regression: bool = False, shape: tuple[int, ...] = (8,)) -> Federation:
    """Six clients of unequal sizes with 3 classes of inputs of this shape, labels skewed by client."""
    rng = np.random.default_rng(7)
    centres = rng.normal(size=(CLASSES, *shape))

    def draw(i: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        y = rng.choice(CLASSES, size, p=np.roll([0.6, 0.3, 0.1], i))
        if (y == y[0]).all():  # of one class alone a method that leaves out a client's absent classes learns nothing
            y[-1] = (y[0] + 1) % CLASSES
        x = (centres[y] + rng.normal(size=(size, *shape))).astype(np.float32)
        return x, (x.reshape(size, -1).mean(1) + i).astype(np.float32) if regression else y

    train = [draw(i, size) for i, size in enumerate(SIZES)]
    test = [draw(i, 7) for i in range(N)]
    return Federation.from_arrays(train, test, names=NAMES, classes=None if regression else CLASSES)


@cache
def other_test_samples() -> Federation:
    """The same clients with other test samples, labels and counts."""
    fed, rng = federation(), np.random.default_rng(1)
    test = [(50 * rng.normal(size=(9, 8)).astype(np.float32), rng.integers(CLASSES, size=9)) for _ in SIZES]
    return Federation.from_arrays([fed.train.client(i) for i in range(N)], test, names=NAMES, classes=CLASSES)


@cache
def weighted_and_repeated() -> list[Federation]:
    """The clients with samples of weights 2, 0 and 1, and with as many copies of each."""
    fed, given = federation(), {"names": NAMES, "classes": CLASSES, "test_fraction": 0.0}
    pairs: list[Any] = [fed.train.client(i) for i in range(N)]
    weights = [[*np.resize([2, 0, 1, 1], size - size % 2).tolist(), *[1] * (size % 2)] for size in SIZES]
    copies = [tuple(t.repeat_interleave(torch.tensor(w), 0) for t in p) for p, w in zip(pairs, weights, strict=True)]
    return [Federation.from_arrays(d, weights=w, **given) for d, w in ((pairs, weights), (copies, None))]


@cache
def network(outputs: int = CLASSES, norm: bool = False) -> nn.Sequential:
    """Two layers, so that methods that share a part of the layers can be run; always the same start."""
    with seeded(5):
        between = [nn.LayerNorm(5)] if norm else []
        return nn.Sequential(nn.Linear(8, 5), *between, nn.Sigmoid(), nn.Linear(5, outputs))


def opposite(net: nn.Module) -> nn.Module:
    """The same net with every parameter negated."""
    other = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.neg_()
    return other


def network_of(method: Algorithm, outputs: int = CLASSES) -> nn.Module:
    """`network`, or where a method refuses it, with an adapter, a normalisation layer or a memory, or two mixed."""
    plain = network(outputs)
    mixtures = (Mixture(plain, opposite(plain), classes=classes) for classes in (None, outputs))
    return taken(method, plain, network(outputs, norm=True), *mixtures, Memory(network(outputs), rows=7, k=3))


def train(method: Algorithm, fed: Federation | None = None, net: nn.Module | None = None, **settings: Any) -> Result:
    """A short run, with unequal numbers of steps where the method lets clients take them."""
    given: dict[str, Any] = {
        "rounds": ROUNDS, "local_epochs": 2, "local_steps": steps_of(method), "batch_size": BATCH, "seed": 3,
        "evaluate_every": 0, "workers": 1, "device": "cpu",
    }  # fmt: skip
    needs = method.needs
    if needs.everyone:
        settings.pop("fraction", None)
    if isinstance(settings.get("schedule"), Only) and (needs.everyone or needs.uniform):
        del settings["schedule"]
    return fit(net or network_of(method), fed or federation(), method, **(given | settings))


def once(make: Callable[..., Made], method: Algorithm, *given: Any, **settings: Any) -> Made:
    """The result of `make` for a method, one for all rows that only look at it, until another method's turn comes."""
    whose = type(method), repr(method), os.environ.get("POLYFED_NATIVE")
    call = make.__name__, repr(given), repr(settings)
    if _ONCE.get("whose") != whose:
        _ONCE.clear()
        _ONCE["whose"] = whose
    if call not in _ONCE:
        _ONCE[call] = make(method, *given, **settings)
    return _ONCE[call]


_ONCE = dict[Any, Any]()


def steps_of(method: Algorithm) -> int | None:
    """The local steps of every client, for a method that refuses unequal numbers of them; None for any other."""
    key = type(method), repr(method)  # a setting may be a list, which has no hash
    if key not in _STEPS:
        try:
            loop(method, Only((0, SMALL)), work=Work(epochs=2, batch_size=BATCH)).step()
            _STEPS[key] = None
        except ConfigError:
            _STEPS[key] = 4
    return _STEPS[key]


_STEPS: dict[tuple[type, str], int | None] = {}


def loop(
    method: Algorithm,
    schedule: Schedule | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    work: Work | None = None,
    chunk: int = 4,
    fed: Federation | None = None,
    net: nn.Module | None = None,
) -> Loop:
    """The bare event loop, for rows that watch or disturb single rounds."""
    fed = fed or federation()
    task = Task(net or network_of(method), dtype=dtype, device="cpu")
    split = fed.train.to(task.device, task.dtype)
    work = work or Work(epochs=2, steps=steps_of(method), batch_size=BATCH)
    rows, path = make_rows(method, task, fed.n, fed.n, None), path_of(task.net, work, split)
    plan = make_plan(task, fed.n, 8, chunk=chunk, workers=1, path=path)
    engine = LocalEngine(task, {"train": split, "test": fed.test}, rows, client_keys(fed.names), work, 3, plan)
    return Loop(task, split.counts, fed.names, method, schedule or Uniform(), engine, 3)


class Exchange(NamedTuple):
    """One exchange as the wire saw it, with copies of its tensors."""

    round: Round
    down: State
    up: State
    private: State  # of the clients of `round`, after it
    server: State  # before it
    aliased: list[str]  # messages that lie in the same memory as a private row


class Wire(LocalEngine):
    """A loop's engine, in its place, that keeps a record of what it carries."""

    def __init__(self, loop: Loop):
        vars(self).update(vars(here(loop.engine)))
        self.loop, self.record = loop, list[Exchange]()
        loop.engine = self

    def exchange(self, algorithm: Algorithm, received: State, round: Round, tally: Tally) -> Reply:
        before = copied(self.loop.server)
        reply = super().exchange(algorithm, received, round, tally)
        up = dict(tally.uplinks())
        kept = [*self.rows.snapshot().values(), *(t for _, rows in self._new for t in rows.values())]
        homes = {t.untyped_storage().data_ptr() for t in kept}
        messages = {f"down {k}": t for k, t in received.items()} | {f"up {k}": t for k, t in up.items()}
        aliased = [k for k, t in messages.items() if t.untyped_storage().data_ptr() in homes]
        self.record.append(Exchange(round, copied(received), copied(up), self._after(round), before, aliased))
        return reply

    def _after(self, round: Round) -> State:
        """The private rows of `round.ids` after the exchange."""
        rows = {name: self.rows.read(name, torch.arange(self.rows.n)) for name in self.rows.names()}
        for made, new in self._new:
            for name, values in new.items():
                rows[name][made.ids] = values
        return {name: t[round.ids] for name, t in rows.items()}


def watched(
    method: Algorithm, schedule: Schedule | None = None, rounds: int = ROUNDS, **given: Any
) -> tuple[Loop, list[Exchange]]:
    """A loop after some rounds, and the record of its wire."""
    one = loop(method, schedule, **given)
    wire = Wire(one)
    for _ in range(rounds):
        one.step()
    return one, wire.record


@dataclasses.dataclass(frozen=True)
class Only(Schedule):
    """The same few clients every round."""

    ids: tuple[int, ...]

    def cohort(self, seed: int, t: int, keys: np.ndarray) -> np.ndarray:
        return np.array(self.ids)


def private(of: Result | Loop) -> State:
    """[n, ...]: every client's private tensors."""
    rows = here((of.trained if isinstance(of, Result) else of).engine).rows
    return {name: rows.read(name, torch.arange(rows.n)) for name in rows.names()}


def overwrite(one: Loop, value: float, name: str | None = None) -> None:
    """Put a number into every private row, or into those of one tensor."""
    rows = here(one.engine).rows
    everyone = torch.arange(rows.n)
    names = rows.names() if name is None else [name]
    rows.scatter(everyone, {k: torch.full_like(rows.read(k, everyone), value) for k in names})


def differing(a: State, b: State) -> list[str]:
    """Names of tensors that differ between two states."""
    return sorted(k for k in a.keys() | b.keys() if k not in a or k not in b or not torch.equal(a[k], b[k]))


def gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max()) if a.numel() else 0.0
