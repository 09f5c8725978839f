"""The rows of the conformance table, which the project's tests run on every built-in method: `row(method)` raises an
error where the method breaks it, and returns a sentence where it does not apply."""

import dataclasses
import re
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyfed.base import checkpoint
from polyfed.base.errors import ConfigError, Diverged, ModelError
from polyfed.base.settings import settings_of
from polyfed.compute.task import Task
from polyfed.core import contract
from polyfed.core.algorithm import Algorithm, Personal
from polyfed.core.schedule import Asynchronous, Delays, Uniform
from polyfed.runs.rehearsal import averaged
from polyfed.runs.result import Result
from polyfed.runs.trainer import fit
from polyfed_members.admit import admit
from polyfed_testing.stage import (
    BATCH,
    ROUNDS,
    SIZES,
    SMALL,
    Exchange,
    N,
    Only,
    Wire,
    copied,
    differing,
    federation,
    gap,
    loop,
    network_of,
    once,
    other_test_samples,
    overwrite,
    private,
    train,
    watched,
    weighted_and_repeated,
)
from polyfed_threats import Median, SignFlip

F64: dict[str, Any] = {"dtype": torch.float64}
OLD, NEW = [0, 1, 2, 3], [4, 5]  # clients of a run, and those that join it later


# a method's statements about itself


def every_setting_has_a_meaning(method: Algorithm) -> None:
    missing = [s.name for s in settings_of(type(method)) if not s.doc]
    assert not missing, f"nothing says what {', '.join(missing)} means, expected setting(..., doc=...) at the field"


def the_server_state_says_its_axes(method: Algorithm) -> None:
    task = Task(network_of(method), device="cpu")
    made = {n: method.init_server(task, task.w0.clone(), n) for n in (4, 5)}
    four, five = (contract.server_state(method, made[n], np.zeros(n, dtype=np.uint64)) for n in made)
    for axes, sizes in (("shared", ((), ())), ("each", ((4,), (5,))), ("pairs", ((4, 4), (5, 5)))):
        for name, t in getattr(four, axes).items():
            other, k = getattr(five, axes)[name], len(sizes[0])
            fits = t.shape[:k] == sizes[0] and other.shape[:k] == sizes[1] and t.shape[k:] == other.shape[k:]
            assert fits, (
                f"server tensor {name} is {list(t.shape)} for 4 clients and {list(other.shape)} for 5, not {axes}"
            )


# influences on the numbers


def same_seed_same_bits(method: Algorithm) -> None:
    a = once(train, method, fraction=0.5).personal
    b, c = (train(method, fraction=0.5, seed=seed).personal for seed in (3, 2))
    assert torch.equal(a, b), "two runs of one seed differ: a draw is not keyed"
    assert gap(a, c) > 1e-5, "another seed changes nothing but rounding"


def relabelling_the_clients_relabels_the_result(method: Algorithm) -> None:
    order = [3, 0, 5, 1, 4, 2]
    hows: tuple[dict[str, Any], ...] = ({}, {"fraction": 0.5, "rounds": 5})
    for how in hows:
        a, b = once(train, method, **how, **F64), train(method, federation().reorder(order), **how, **F64)
        apart = gap(b.personal, a.personal[order])
        assert apart <= 1e-9, f"with the clients in another order their models differ by {apart:.1e}"
        mine, yours = (run.trained.ledger.by_client(N) for run in (a, b))
        moved = [key for key, values in mine.items() if not np.array_equal(yours[key], values[order])]
        assert not moved, f"with the clients in another order their {', '.join(moved)} differ"


def chunks_and_workers_do_not_change_the_models(method: Algorithm) -> None:
    """With all clients, sums over a chunk may cancel in the sum over the cohort; with half of them they do not."""
    for fraction, batch, others in ((1.0, BATCH, ((2, 2), (N, 1))), (0.5, None, ((N, 1),))):
        how: dict[str, Any] = {"fraction": fraction, "batch_size": batch, "local_epochs": 1} | F64
        alone = train(method, chunk=1, **how)
        for chunk, workers in others:
            run = train(method, chunk=chunk, workers=workers, **how)
            apart, words = gap(run.personal, alone.personal), f"chunk {chunk} and {workers} workers change"
            assert apart <= 1e-9, f"{words} the models by {apart:.1e}"
            steps = (run.ledger.steps - alone.ledger.steps).abs().max()
            assert steps == 0, f"{words} the steps of a client by {steps}"


def test_samples_are_for_metrics_alone(method: Algorithm) -> None:
    a, b = (train(method, fed, rounds=2, fraction=0.5) for fed in (federation(), other_test_samples()))
    assert not np.array_equal(a.final["test"]["loss"], b.final["test"]["loss"]), (
        "its metrics are not those of its models"
    )
    for whose, mine, yours in (("server", a.server, b.server), ("clients", private(a), private(b))):
        changed = differing(mine, yours)
        assert not changed, f"other test samples change the {whose}'s {', '.join(changed)}"
    assert torch.equal(a.personal, b.personal), "other test samples change the models"


def a_sample_of_weight_two_counts_twice(method: Algorithm) -> str | None:
    if method.needs.apart:
        return "it sets samples apart at random, and copies of one may come apart"
    how: dict[str, Any] = {"batch_size": None, "local_steps": 4, "rounds": 2}
    a, b = (train(method, fed, **how, **F64).personal for fed in weighted_and_repeated())
    assert gap(a, b) <= 1e-8, f"models of weighted and of repeated samples differ by {gap(a, b):.1e}"
    return None


# messages on the network


def no_message_lies_in_the_memory_of_a_private_row(method: Algorithm) -> None:
    for schedule in (Uniform(), Only((SMALL,))):  # a single reply is handed on as it is
        for exchange in once(watched, method, schedule)[1]:
            assert not exchange.aliased, f"{', '.join(exchange.aliased)} shares memory with private state"


def the_downlink_is_a_function_of_the_server_state_alone(method: Algorithm) -> None:
    for schedule in (Uniform(), Uniform(0.5)):
        record = once(watched, method, schedule)[1]
        twin = dataclasses.replace(method)  # nothing is remembered in the method either
        for exchange in record:
            server, m = copied(exchange.server), len(exchange.round.ids)
            again = twin.downlink(server, exchange.round)
            now = {k: t.expand(m, *t.shape) for k, t in again.shared.items()} | dict(again.each)
            differ = differing(now, exchange.down)
            assert not differ, f"{', '.join(differ)} depends on more than the server's state"
            assert not differing(server, exchange.server), "downlink changes the server's state"


def a_personal_model_is_either_the_uplink_or_unknown_to_it(method: Algorithm) -> str | None:
    if not isinstance(method, Personal):
        return "its clients keep no model of their own"
    honest, poisoned = (_next_round(method, poison) for poison in (False, True))
    if len(honest) == len(poisoned) and not any(differing(a.up, b.up) for a, b in zip(honest, poisoned, strict=True)):
        return None
    for exchange in once(watched, method, Uniform())[1]:
        own = exchange.private["w"]
        models = _columns(own) | _columns(torch.zeros_like(own[:, :1]))
        if any(t.dim() > 1 and _columns(own) <= _columns(t) for t in exchange.up.values()):
            continue  # the server is sent the model itself
        for name, t in exchange.up.items():
            if t.dim() > 1 and t.shape[1] > 1:
                assert _columns(t) <= models, f"uplink {name} is made from the personal model without being it"
    return None


def _next_round(method: Algorithm, poison: bool) -> list[Exchange]:
    """The exchanges of the second round, the models of all clients having been overwritten before it or not."""
    one = loop(method)
    one.step()
    if poison:
        overwrite(one, 3.0, "w")
    wire = Wire(one)
    one.step()
    return wire.record


def _columns(t: Tensor) -> set[bytes]:
    """The columns of [s, p], each as bytes."""
    return {column.numpy().tobytes() for column in t.T.contiguous()}


def every_byte_is_billed(method: Algorithm) -> None:
    for schedule in (Uniform(), Uniform(0.5)):
        one, record = once(watched, method, schedule)
        moved, trips = moved_bytes(record)
        book = one.ledger.frame()
        assert len(book) == (trips > 0).sum(), (
            f"{len(book)} rounds of clients are billed, {(trips > 0).sum()} took place"
        )
        for t, i, trip, down, up in (
            book[["round", "client", "exchanges", "down_bytes", "up_bytes"]].to_numpy().tolist()
        ):
            billed, sent = [down, up], moved[t, i].tolist()
            assert billed == sent, f"round {t}: {billed} bytes are billed, {sent} were moved"
            assert trip <= trips[t, i], f"round {t}: {trip} exchanges are billed, {trips[t, i]} took place"


def moved_bytes(record: list[Exchange]) -> tuple[np.ndarray, np.ndarray]:
    """Bytes [rounds, n, 2] down and up that the wire saw of every client in every round, and exchanges [rounds, n]."""
    sums, trips = np.zeros((ROUNDS, N, 2), dtype=np.int64), np.zeros((ROUNDS, N), dtype=np.int64)
    for e in record:
        for row, i in enumerate(e.round.ids.tolist()):
            sums[e.round.t, i] += [
                sum(t[row].numel() * t.element_size() for t in part.values()) for part in (e.down, e.up)
            ]
            trips[e.round.t, i] += 1
    return sums, trips


def numbers_stay_in_the_precision_of_the_run(method: Algorithm) -> None:
    run = once(train, method, **F64)
    kept = run.server | private(run) | {"model": run.personal}
    coarse = [k for k, t in kept.items() if t.is_floating_point() and t.dtype != torch.float64]
    assert not coarse, f"{', '.join(coarse)} is {torch.float32} in a float64 run"


def a_start_is_the_same_in_both_precisions(method: Algorithm) -> None:
    single, double = (train(method, rounds=0, dtype=dtype) for dtype in (torch.float32, torch.float64))
    starts = [{**run.server, **private(run), "model": run.personal} for run in (single, double)]
    apart = [k for k, t in starts[0].items() if not torch.allclose(t.double(), starts[1][k].double(), 1e-6, 1e-6)]
    assert not apart, f"{', '.join(apart)} starts elsewhere in {torch.float64} than in {torch.float32}"


def sums_over_clients_hold_with_any_cohort(method: Algorithm) -> str | None:
    run = once(train, method, fraction=0.5, rounds=5, **F64)
    stated = method.conserved(run.server, private(run))
    for name, apart in stated.items():
        assert float(apart.abs().max()) <= 1e-10, f"{name} does not hold after rounds of half of the clients"
    return None if stated else "it states none"


# no client is forgotten


def a_client_smaller_than_a_batch_trains(method: Algorithm) -> None:
    run = train(method, schedule=Only((SMALL,)), rounds=8)
    moved = float((run.personal[SMALL] - run.trained.task.w0).norm())
    assert moved > 1e-4, f"a client of {SIZES[SMALL]} samples with batches of {BATCH} has not moved"


def a_client_that_is_never_picked_is_evaluated(method: Algorithm) -> str | None:
    if method.needs.everyone or method.needs.uniform:
        return "it refuses a schedule that leaves a client out for good"
    run = train(method, schedule=Only(tuple(range(1, N))))
    met = int(method.needs.everyone_first)  # in the first round, to be asked something
    assert run.clients["rounds"].tolist() == [met] + [ROUNDS] * (N - 1), "it is said to have taken part"
    assert torch.isfinite(run.personal).all(), "its model is not finite"
    for split, metrics in run.final.items():
        for name, values in metrics.items():
            assert np.isfinite(values).all(), f"its {split} {name} is not a number"
    x, y = federation().test.client(0)
    with torch.no_grad():
        own = float((run.model(0)(x).argmax(1) == y).double().mean())
    assert abs(own - run.clients["test_accuracy"][0]) < 1e-6, "its accuracy is not that of its model"
    return None


# runs that end early


class _Stop(BaseException):
    """Ends a run at once, as a kill does; nothing is written after it."""


def a_stopped_run_resumes_to_the_same_bits(method: Algorithm) -> None:
    def stop(progress: Any) -> None:
        if progress.round == 2:
            raise _Stop

    how: dict[str, Any] = {"fraction": 0.5}
    whole = once(train, method, **how)
    with tempfile.TemporaryDirectory() as folder:
        how |= {"out": Path(folder) / "run", "checkpoint_every": 1}
        with suppress(_Stop):
            train(method, callbacks=[stop], **how)
        again = train(method, resume=True, **how)
    for whose, a, b in (("server", whole.server, again.server), ("clients", private(whole), private(again))):
        changed = differing(a, b)
        assert not changed, (
            f"after a stop and a resume the {whose}'s {', '.join(changed)} differs: state is kept elsewhere"
        )
    assert torch.equal(whole.personal, again.personal), "after a stop and a resume the models differ"
    books = [run.ledger.drop(columns="seconds") for run in (whole, again)]
    assert books[0].equals(books[1]), "after a stop and a resume other bytes are billed"


def divergence_is_loud(method: Algorithm) -> str | None:
    """Slow or at once, divergence names a round and a client, and leaves a finite checkpoint."""
    if not isinstance(getattr(method, "lr", None), int | float | str):
        return "it has no step size lr"
    for lr in (30.0, 1e12):
        try:
            wild: Algorithm = dataclasses.replace(method, lr=lr)  # pyrefly: ignore[unexpected-keyword]
        except ConfigError:
            return "it refuses a large lr"
        try:
            with tempfile.TemporaryDirectory() as folder:
                raised = _exploded(wild, Path(folder))
        except ModelError:
            return "it is for classes alone"
        assert raised or lr < 1e12, "60 rounds with lr = 1e12 raised no error"
    return None


def _exploded(method: Algorithm, out: Path) -> bool:
    """True where 60 rounds end with the error that says so; without it all models are finite."""
    how: dict[str, Any] = {"loss": "mse", "rounds": 60, "batch_size": BATCH, "evaluate_every": 0, "workers": 1}
    try:
        run = fit(network_of(method, 1), federation(True), method, out=out, device="cpu", **how)
    except Diverged as e:
        message = str(e)
    else:
        assert torch.isfinite(run.personal).all(), "60 rounds with a large lr end in a model that is not finite"
        return False
    match = re.match(r"round (\d+): client '(.+?)'", message)
    assert match is not None, f"the error names no round and client: {message}"
    if int(match[1]) == 1 and not (out / "checkpoint").exists():  # there is nothing before it to go on from
        return True
    tensors, meta, _ = checkpoint.load(out / "checkpoint")
    assert meta["t"] <= int(match[1]), f"a checkpoint of round {meta['t']} was written, round {match[1]} diverged"
    wild = [k for k, t in tensors.items() if t.is_floating_point() and not torch.isfinite(t).all()]
    assert not wild, f"the checkpoint's {', '.join(wild)} is not finite"
    return True


# other settings of a run


def late_replies_are_taken_or_refused(method: Algorithm) -> str | None:
    schedule = Asynchronous(Delays("uniform", 0, 20))
    if any(method.needs.in_step(N, t) for t in range(ROUNDS)):
        try:
            train(method, schedule=schedule)
        except ConfigError:
            return "it needs its replies in step, and says so"
        raise AssertionError("`needs.synchronous` gives a reason, yet the method runs with late replies")
    run = train(method, schedule=schedule, rounds=12)
    assert torch.isfinite(run.personal).all(), "with late replies a model is not finite"
    return None


def means_are_protected_by_a_robust_rule(method: Algorithm) -> str | None:
    if not averaged(once(train, method, **F64).trained.used):
        return "it averages nothing that clients send"
    attacked = train(method, attack=SignFlip(ratio=0.2), robust=Median())
    assert torch.isfinite(attacked.personal).all(), "under an attack and a median a model is not finite"
    return None


# clients that join a finished run


def it_admits_a_newcomer(method: Algorithm) -> None:
    run, new = once(_left, method), federation().reorder(NEW)
    before, meta = run.trained.state()
    before = copied(before)
    joined = admit(run, new, 2)
    after, still = run.trained.state()
    changed = [*differing(before, after), *(["ledger"] if meta != still else [])]
    assert not changed, f"admitting a client changes the run's {', '.join(changed)}"
    shape, p = list(joined.personal.shape), run.trained.task.p
    assert shape == [len(NEW), p], f"newcomers' models are of shape {shape}, not {[len(NEW), p]}"
    assert torch.isfinite(joined.personal).all(), "a newcomer's model is not finite"
    assert len(joined.table) == 3 * len(NEW), (
        f"{len(joined.table)} scores were taken of 2 newcomers after 0, 1 and 2 exchanges"
    )
    clusters = {-1, *([] if run.clusters is None else run.clusters.tolist())}
    assert (joined.clusters is None) == (run.clusters is None), "of clients and newcomers, only some have clusters"
    assert joined.clusters is None or set(joined.clusters.tolist()) <= clusters, "a newcomer is in a cluster of its own"


def _left(method: Algorithm) -> Result:
    """A run without the newcomers."""
    return train(method, federation().reorder(OLD), **F64)


def newcomers_do_not_see_each_other(method: Algorithm) -> None:
    run, new = once(_left, method), federation().reorder(NEW)
    both = admit(run, new, 2)
    for at, name in enumerate(new.names):
        alone = admit(run, new.reorder([at]), 2)
        apart = gap(alone.personal[0], both.personal[at])
        assert apart <= 1e-10, f"the model of {name} alone and of {name} with another newcomer differ by {apart:.1e}"
        same = both.clusters is None or alone.clusters == both.clusters[at]
        assert same, f"{name} alone and {name} with another newcomer are in different clusters"


ROWS: tuple[Callable[[Algorithm], str | None], ...] = (
    every_setting_has_a_meaning,
    the_server_state_says_its_axes,
    same_seed_same_bits,
    relabelling_the_clients_relabels_the_result,
    chunks_and_workers_do_not_change_the_models,
    test_samples_are_for_metrics_alone,
    a_sample_of_weight_two_counts_twice,
    no_message_lies_in_the_memory_of_a_private_row,
    the_downlink_is_a_function_of_the_server_state_alone,
    a_personal_model_is_either_the_uplink_or_unknown_to_it,
    sums_over_clients_hold_with_any_cohort,
    every_byte_is_billed,
    numbers_stay_in_the_precision_of_the_run,
    a_start_is_the_same_in_both_precisions,
    a_client_smaller_than_a_batch_trains,
    a_client_that_is_never_picked_is_evaluated,
    a_stopped_run_resumes_to_the_same_bits,
    divergence_is_loud,
    late_replies_are_taken_or_refused,
    means_are_protected_by_a_robust_rule,
    it_admits_a_newcomer,
    newcomers_do_not_see_each_other,
)
