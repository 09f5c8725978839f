"""The conformance table for anybody's method: `check_method(Momentum())` runs every row and names the one that fails.

Every row is a function `(method) -> None` on one small federation; it raises `NotConformant` or passes, or returns a
sentence where it does not apply. The project's own tests run the same rows on every built-in method.
"""

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from polyfed.base.errors import ConfigError, Diverged, PolyfedError
from polyfed.base.randomness import client_keys
from polyfed.compute.batches import Work
from polyfed.compute.task import Task
from polyfed.core.algorithm import Algorithm, Personal, Round, Server, State
from polyfed.core.rounds import Loop
from polyfed.core.schedule import Asynchronous, Delays, Schedule, Uniform
from polyfed.core.uplinks import Tally
from polyfed.core.worker import Reply
from polyfed.data.federation import Federation
from polyfed.engines.local import LocalEngine, here, make_plan, make_rows
from polyfed.runs.fit import fit
from polyfed.runs.rehearsal import averaged
from polyfed.runs.result import Result
from polyfed.studies.admit import admit
from polyfed.threats import Median, SignFlip

NAMES = ("oslo", "bern", "lima", "kyiv", "riga", "cork")
SIZES = (24, 5, 26, 13, 30, 12)
BATCH = 8  # more than the second client has
ROUNDS = 3


class NotConformant(AssertionError):
    """A method breaks a row of the table. `str(error)` is one line: method, row, what was found."""


class Row(NamedTuple):
    """The outcome of one row.

    Parameters
    ----------
    name : str
        The fact that was tested, in words.
    outcome : str
        "passed", or why the row does not apply.
    """

    name: str
    outcome: str


def check_method(method: Algorithm, rows: str | None = None) -> list[Row]:
    """Run the conformance table on a method; it takes some seconds.

    Parameters
    ----------
    method : Algorithm
        An instance of a class that derives from `Algorithm`.
    rows : str or None
        Only the rows whose name contains this word.

    Returns
    -------
    list of Row
        One for each row that was run.

    Raises
    ------
    NotConformant
        For the first row that fails.
    ConfigError
        `method` is not an instance of such a class.
    """
    if not isinstance(method, Algorithm):
        raise ConfigError(
            f"method: found {method!r}, expected an instance of a class that derives from polyfed.Algorithm"
        )
    found = []
    for row in ROWS:
        name = row.__name__.removeprefix("_").replace("_", " ")
        if rows is None or rows in name:
            with _named(method, name):
                found.append(Row(name, row(method) or "passed"))
    return found


@contextmanager
def _named(method: Algorithm, row: str) -> Iterator[None]:
    try:
        yield
    except AssertionError as e:
        raise NotConformant(f"{method.name}: {row}: {' '.join(str(e).split()) or 'it does not hold'}") from e
    except PolyfedError as e:
        raise NotConformant(f"{method.name}: {row}: {e}") from e


# what the rows run on


@cache
def _federation(regression: bool = False) -> Federation:
    """Six clients of unequal sizes with 3 classes of 8 numbers, labels skewed by client."""
    rng = np.random.default_rng(7)
    centres = rng.normal(size=(3, 8))

    def draw(i: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        y = rng.choice(3, size, p=np.roll([0.6, 0.3, 0.1], i))
        x = (centres[y] + rng.normal(size=(size, 8))).astype(np.float32)
        return x, (x.mean(1) + i).astype(np.float32) if regression else y

    train = [draw(i, size) for i, size in enumerate(SIZES)]
    test = [draw(i, 7) for i in range(len(SIZES))]
    return Federation.from_arrays(train, test, names=NAMES, classes=None if regression else 3)


def _model(outputs: int = 3) -> nn.Module:
    """Two layers, so that methods which share a part of the layers can be run; always the same start."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(5)
        return nn.Sequential(nn.Linear(8, 5), nn.Sigmoid(), nn.Linear(5, outputs))


def _train(method: Algorithm, federation: Federation | None = None, **settings: Any) -> Result:
    given = {"rounds": ROUNDS, "local_steps": 4, "batch_size": BATCH, "seed": 3, "workers": 1, "device": "cpu"}
    return fit(_model(), federation or _federation(), method, **(given | settings))


class _Exchange(NamedTuple):
    """One exchange as the wire saw it, with copies of what it was made from."""

    round: Round
    down: State
    up: State
    server: State
    aliased: list[str]


class _Wire(LocalEngine):
    """A loop's engine, in its place, that keeps a record of what it carries."""

    def __init__(self, loop: Loop):
        vars(self).update(vars(here(loop.engine)))
        self.loop, self.record = loop, list[_Exchange]()
        loop.engine = self

    def exchange(
        self, algorithm: Algorithm, received: State, round: Round, tally: Tally, server: State | None = None
    ) -> Reply:
        before = {k: v.clone() for k, v in self.loop.server.items()}
        tally.added = {}  # every row is kept
        reply = super().exchange(algorithm, received, round, tally)
        up = dict(tally.uplinks())
        private = [*self.rows.snapshot().values(), *(t for _, rows in self._new for t in rows.values())]
        homes = {t.untyped_storage().data_ptr() for t in private}
        messages = {f"down {k}": t for k, t in received.items()} | {f"up {k}": t for k, t in up.items()}
        aliased = [k for k, t in messages.items() if t.untyped_storage().data_ptr() in homes]
        kept, sent = ({k: t.clone() for k, t in part.items()} for part in (received, up))
        self.record.append(_Exchange(round, kept, sent, before, aliased))
        return reply


def _loop(method: Algorithm, schedule: Schedule | None = None, dtype: torch.dtype = torch.float32) -> Loop:
    fed, task = _federation(), Task(_model(), dtype=dtype, device="cpu")
    split = fed.train.to(task.device, task.dtype)
    work = Work(steps=4, batch_size=BATCH)
    rows, plan = make_rows(method, task, fed.n, fed.n, None), make_plan(task, fed.n, 8, chunk=4, workers=1)
    engine = LocalEngine(task, {"train": split}, rows, client_keys(fed.names), work, 3, plan)
    return Loop(task, split.counts, fed.names, method, schedule or Uniform(), engine, 3)


def _watched(method: Algorithm, schedule: Schedule | None = None) -> tuple[Loop, list[_Exchange]]:
    loop = _loop(method, schedule)
    wire = _Wire(loop)
    for _ in range(ROUNDS):
        loop.step()
    return loop, wire.record


@dataclasses.dataclass(frozen=True)
class _Only(Schedule):
    """The same few clients every round."""

    ids: tuple[int, ...]

    def cohort(self, seed: int, t: int, keys: np.ndarray) -> np.ndarray:
        return np.array(self.ids)


def _overwrite(loop: Loop, value: float, name: str | None = None) -> None:
    """Put a number into every private row, or into those of one tensor."""
    rows = here(loop.engine).rows
    everyone = torch.arange(rows.n)
    names = rows.names() if name is None else [name]
    rows.scatter(everyone, {k: torch.full_like(rows.read(k, everyone), value) for k in names})


def _same(a: State, b: State) -> list[str]:
    """Names of tensors that differ between two states."""
    return [k for k in a.keys() | b.keys() if k not in a or k not in b or not torch.equal(a[k], b[k])]


def _gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max()) if a.numel() else 0.0


# the rows


def _chunks_and_workers_do_not_change_the_models(method: Algorithm) -> None:
    alone = _train(method, dtype=torch.float64, chunk=1, evaluate_every=0).personal
    for chunk, workers in ((2, 2), (len(SIZES), 1)):
        gap = _gap(_train(method, dtype=torch.float64, chunk=chunk, workers=workers, evaluate_every=0).personal, alone)
        assert gap <= 1e-9, f"chunk {chunk} and {workers} workers change the models by {gap:.1e}"


def _relabelling_the_clients_relabels_the_result(method: Algorithm) -> None:
    order = [3, 0, 5, 1, 4, 2]
    for fraction in (1.0, 0.5):
        a = _train(method, dtype=torch.float64, fraction=fraction)
        b = _train(method, _federation().reorder(order), dtype=torch.float64, fraction=fraction)
        gap = _gap(b.personal, a.personal[order])
        assert gap <= 1e-8, f"with the clients in another order their models differ by {gap:.1e}"


def _same_seed_same_bits(method: Algorithm) -> None:
    a, b, c = (_train(method, fraction=0.5, seed=seed).personal for seed in (1, 1, 2))
    assert torch.equal(a, b), "two runs of one seed differ: a draw is not keyed"
    assert not torch.equal(a, c), "another seed changes nothing"


def _test_samples_are_for_metrics_alone(method: Algorithm) -> None:
    fed, rng = _federation(), np.random.default_rng(1)
    test = [(50 * rng.normal(size=(9, 8)).astype(np.float32), rng.integers(3, size=9)) for _ in SIZES]
    train = [fed.train.client(i) for i in range(fed.n)]
    other = Federation.from_arrays(train, test, names=NAMES, classes=3)
    a, b = (_train(method, f, rounds=2, fraction=0.5) for f in (fed, other))
    changed = _same(a.server, b.server)
    assert not changed, f"other test samples change the server's {', '.join(changed)}"
    assert torch.equal(a.personal, b.personal), "other test samples change the models"


@cache
def _weighted_and_repeated() -> list[Federation]:
    """The clients with samples of weights 2, 0 and 1, and with as many copies of each."""
    fed, given = _federation(), {"names": NAMES, "classes": 3, "test_fraction": 0.0}
    pairs: list[Any] = [fed.train.client(i) for i in range(fed.n)]
    weights = [[*np.resize([2, 0, 1, 1], size - size % 2).tolist(), *[1] * (size % 2)] for size in SIZES]
    copies = [tuple(t.repeat_interleave(torch.tensor(w), 0) for t in p) for p, w in zip(pairs, weights, strict=True)]
    return [Federation.from_arrays(d, weights=w, **given) for d, w in ((pairs, weights), (copies, None))]


def _a_sample_of_weight_two_counts_twice(method: Algorithm) -> None:
    how: dict[str, Any] = {"dtype": torch.float64, "batch_size": None, "evaluate_every": 0, "rounds": 2}
    a, b = (_train(method, fed, **how).personal for fed in _weighted_and_repeated())
    assert _gap(a, b) <= 1e-8, f"models of weighted and of repeated samples differ by {_gap(a, b):.1e}"


def _no_message_lies_in_the_memory_of_a_private_row(method: Algorithm) -> None:
    for exchange in _watched(method)[1]:
        assert not exchange.aliased, f"{', '.join(exchange.aliased)} shares memory with private state"


def _the_downlink_is_a_function_of_the_server_state_alone(method: Algorithm) -> None:
    for schedule in (Uniform(), Uniform(0.5)):
        loop, record = _watched(method, schedule)
        _overwrite(loop, float("nan"))
        twin = dataclasses.replace(method)
        for exchange in record:
            server = {k: v.clone() for k, v in exchange.server.items()}
            again, m = twin.downlink(server, exchange.round), len(exchange.round.ids)
            now = {k: t.expand(m, *t.shape) for k, t in again.shared.items()} | dict(again.each)
            differ = _same(now, exchange.down)
            assert not differ, f"{', '.join(differ)} depends on more than the server's state"
            assert not _same(server, exchange.server), "downlink changes the server's state"


def _a_personal_model_is_either_the_uplink_or_unknown_to_it(method: Algorithm) -> str | None:
    if not isinstance(method, Personal):
        return "its clients keep no model of their own"
    sent = []
    for poisoned in (False, True):
        loop = _loop(method)
        loop.step()
        if poisoned:
            _overwrite(loop, 3.0, "w")
        wire = _Wire(loop)
        loop.step()
        sent.append([e.up for e in wire.record])
    if len(sent[0]) == len(sent[1]) and not any(_same(a, b) for a, b in zip(*sent, strict=True)):
        return None
    loop = _loop(method)
    wire = _Wire(loop)
    loop.step()
    own = here(loop.engine).rows.read("w", torch.arange(len(SIZES)))
    models = {c.numpy().tobytes() for c in own.T.contiguous()}
    for exchange in wire.record:
        for name, t in exchange.up.items():
            if t.dim() > 1 and t.shape[1] > 1:
                columns = {c.numpy().tobytes() for c in t.T.contiguous()} - {bytes(4 * len(SIZES))}
                assert columns <= models, f"uplink {name} is made from the personal model without being it"
    return None


def _sums_over_clients_hold_with_any_cohort(method: Algorithm) -> str | None:
    run = _train(method, dtype=torch.float64, fraction=0.5, rounds=5)
    rows, everyone = here(run.trained.engine).rows, torch.arange(len(SIZES))
    stated = method.conserved(run.server, {k: rows.read(k, everyone) for k in rows.names()})
    for what, gap in stated.items():
        assert float(gap.abs().max()) <= 1e-10, f"{what} does not hold after rounds of half of the clients"
    return None if stated else "it states none"


def _every_byte_is_billed(method: Algorithm) -> None:
    loop, record = _watched(method, Uniform(0.5))
    sums = np.zeros((ROUNDS, len(SIZES), 2), dtype=np.int64)
    for e in record:
        for row, i in enumerate(e.round.ids.tolist()):
            sums[e.round.t, i] += [sum(t[row].numel() * t.element_size() for t in p.values()) for p in (e.down, e.up)]
    for t, client, _, down, up, *_ in loop.ledger.array().astype(np.int64).tolist():
        moved = sums[t, client].tolist()
        assert [down, up] == moved, f"round {t}: {[down, up]} bytes are billed, {moved} were moved"


def _numbers_stay_in_the_precision_of_the_run(method: Algorithm) -> None:
    run = _train(method, dtype=torch.float64)
    rows = here(run.trained.engine).rows
    kept = [*run.server.items(), *((k, rows.read(k, torch.tensor([0]))) for k in rows.names())]
    coarse = [k for k, t in kept if t.is_floating_point() and t.dtype != torch.float64]
    assert not coarse, f"{', '.join(coarse)} is {torch.float32} in a float64 run"


def _a_client_smaller_than_a_batch_trains(method: Algorithm) -> None:
    run = _train(method, schedule=_Only((1,)), rounds=8)
    moved = float((run.personal[1] - run.trained.task.w0).norm())
    assert moved > 1e-4, f"a client of {SIZES[1]} samples with batches of {BATCH} has not moved"


def _a_client_that_is_never_picked_is_evaluated(method: Algorithm) -> None:
    run = _train(method, schedule=_Only(tuple(range(1, len(SIZES)))))
    assert torch.isfinite(run.personal).all(), "its model is not finite"
    for split, metrics in run.final.items():
        for name, values in metrics.items():
            assert np.isfinite(values).all(), f"its {split} {name} is not a number"


class _Stop(BaseException):
    """Ends a run at once, as a kill does; nothing is written after it."""


def _a_stopped_run_resumes_to_the_same_bits(method: Algorithm) -> None:
    def stop(progress: Any) -> None:
        if progress.round == 2:
            raise _Stop

    whole = _train(method, rounds=4, fraction=0.5)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        with suppress(_Stop):
            _train(method, rounds=4, fraction=0.5, out=out, checkpoint_every=1, callbacks=[stop])
        again = _train(method, rounds=4, fraction=0.5, out=out, checkpoint_every=1, resume=True)
    changed = _same(whole.server, again.server)
    assert not changed, f"after a stop and a resume the server's {', '.join(changed)} differs: state is kept elsewhere"
    assert torch.equal(whole.personal, again.personal), "after a stop and a resume the models differ"


def _divergence_is_loud(method: Algorithm) -> str | None:
    if not isinstance(getattr(method, "lr", None), int | float):
        return "it has no step size lr"
    try:
        wild = dataclasses.replace(method, lr=1e12)  # pyright: ignore[reportCallIssue]
    except ConfigError:
        return "it refuses a large lr"
    try:
        fit(_model(1), _federation(True), wild, loss="mse", rounds=60, batch_size=BATCH, workers=1, device="cpu")
    except Diverged:
        return None
    raise AssertionError("60 rounds with lr = 1e12 raised no error")


def _it_admits_a_newcomer(method: Algorithm) -> None:
    old, new = (_federation().reorder(ids) for ids in ([0, 1, 2, 3], [4, 5]))
    run = _train(method, old, dtype=torch.float64)
    before = {k: v.clone() for k, v in run.server.items()}
    found = admit(run, new, 2)
    changed = _same(before, run.server)
    assert not changed, f"admitting a client changes the server's {', '.join(changed)} of the run"
    assert found.personal.shape == (2, run.trained.task.p), (
        f"newcomers' models are of shape {list(found.personal.shape)}"
    )
    assert torch.isfinite(found.personal).all(), "a newcomer's model is not finite"


def _means_are_protected_by_a_robust_rule(method: Algorithm) -> str | None:
    run = _train(method)
    if not averaged(run.trained.used):
        return "it averages nothing that clients send"
    attacked = _train(method, attack=SignFlip(ratio=0.2), robust=Median())
    assert torch.isfinite(attacked.personal).all(), "under an attack and a median a model is not finite"
    return None


def _late_replies_are_taken_or_refused(method: Algorithm) -> str | None:
    schedule = Asynchronous(Delays("uniform", 0, 20))
    if any(method.in_step(len(SIZES), t) for t in range(ROUNDS)):
        try:
            _train(method, schedule=schedule)
        except ConfigError:
            return "it needs its replies in step, and says so"
        raise AssertionError("in_step gives a reason, yet the method runs with late replies")
    run = _train(method, schedule=schedule, rounds=12)
    assert torch.isfinite(run.personal).all(), "with late replies a model is not finite"
    return None


def _the_server_state_says_its_axes(method: Algorithm) -> None:
    task = Task(_model(), device="cpu")
    states = [method.init_server(task, task.w0.clone(), n) for n in (4, 5)]
    four, five = (s if isinstance(s, Server) else Server(s) for s in states)
    for axes, sizes in (("shared", ((), ())), ("each", ((4,), (5,))), ("pairs", ((4, 4), (5, 5)))):
        for name, t in getattr(four, axes).items():
            other, k = getattr(five, axes)[name], len(sizes[0])
            fits = t.shape[:k] == sizes[0] and other.shape[:k] == sizes[1] and t.shape[k:] == other.shape[k:]
            assert fits, (
                f"server tensor {name} is {list(t.shape)} for 4 clients and {list(other.shape)} for 5, not {axes}"
            )


def _the_docstring_names_every_setting(method: Algorithm) -> None:
    text = type(method).__doc__ or ""
    missing = [f.name for f in dataclasses.fields(method) if f"{f.name}" not in text]
    assert not missing, f"the docstring does not mention {', '.join(missing)}"


ROWS: tuple[Callable[[Algorithm], str | None], ...] = (
    _the_docstring_names_every_setting,
    _the_server_state_says_its_axes,
    _same_seed_same_bits,
    _relabelling_the_clients_relabels_the_result,
    _chunks_and_workers_do_not_change_the_models,
    _test_samples_are_for_metrics_alone,
    _a_sample_of_weight_two_counts_twice,
    _no_message_lies_in_the_memory_of_a_private_row,
    _the_downlink_is_a_function_of_the_server_state_alone,
    _a_personal_model_is_either_the_uplink_or_unknown_to_it,
    _sums_over_clients_hold_with_any_cohort,
    _every_byte_is_billed,
    _numbers_stay_in_the_precision_of_the_run,
    _a_client_smaller_than_a_batch_trains,
    _a_client_that_is_never_picked_is_evaluated,
    _a_stopped_run_resumes_to_the_same_bits,
    _divergence_is_loud,
    _late_replies_are_taken_or_refused,
    _means_are_protected_by_a_robust_rule,
    _it_admits_a_newcomer,
)
