"""The event loop, against FedAvg on quadratics by hand: in step, with late replies, resumed in mid-flight."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from polyfed.algorithms.ditto import Ditto
from polyfed.algorithms.fedavg import FedAvg
from polyfed.algorithms.fedcet import FedCET
from polyfed.base import checkpoint
from polyfed.base.errors import ConfigError, Diverged, RunError
from polyfed.base.randomness import client_keys
from polyfed.compute.batches import Work
from polyfed.compute.optimizers import Constant, Exponential
from polyfed.compute.split import Split
from polyfed.compute.task import Task
from polyfed.core.algorithm import Algorithm
from polyfed.core.engine import Lost, Silent
from polyfed.core.rounds import Loop
from polyfed.core.rows import MemoryRows
from polyfed.core.schedule import Asynchronous, Delays, Schedule, Turn, Uniform
from polyfed.core.worker import Plan
from polyfed.engines.local import LocalEngine

C = np.array([1.0, 0.5, 1.5, 0.8])  # f_i(w) = (c_i w - c_i b_i)^2, so a gradient step shrinks w - b_i by 1 - 2 lr c_i^2
B = np.array([2.0, -1.0, 0.5, 4.0])
SAMPLES = np.array([1, 3, 2, 2])
NAMES = ("oslo", "bern", "lima", "kyiv")
LR, STEPS = 0.1, 3


class Engine(LocalEngine):
    """With a record of the rounds that it was asked for."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.rounds = []

    def exchange(self, algorithm, received, round, tally):
        self.rounds.append(round)
        return super().exchange(algorithm, received, round, tally)


def make(algorithm: Algorithm, schedule: Schedule, *decay) -> Loop:
    def column(value: float, rows: int) -> torch.Tensor:
        return torch.full((rows, 1), value, dtype=torch.float64)

    split = Split.of([(column(c, m), column(c * b, m)) for m, c, b in zip(SAMPLES, C, B, strict=True)])
    task = Task(nn.Linear(1, 1, bias=False).double(), "mse")
    task.w0.fill_(1.0)
    keys = client_keys(NAMES)
    work = Work(steps=STEPS, batch_size=None)
    rows, sizes = MemoryRows(4, algorithm.init_client(task, task.w0)), Exponential(*decay) if decay else Constant()
    engine = Engine(task, {"train": split}, rows, keys, work, 0, Plan(2, 1, "cpu", "closed form"), sizes)
    return Loop(task, split.counts, NAMES, algorithm, schedule, engine, 0, sizes)


def trained(i: int, w: float, lr: float = LR) -> float:
    return B[i] + (1 - 2 * lr * C[i] ** 2) ** STEPS * (w - B[i])


@dataclass(frozen=True)
class Late(Schedule):
    """Client i answers `delay[i]` turns after it was sent to, and is sent to again in the turn after that."""

    delay: tuple[int, ...]

    def turn(self, seed, t, keys):
        d = np.array(self.delay)
        return Turn(np.flatnonzero(t % (d + 1) == 0), np.flatnonzero(t % (d + 1) == d))


def by_hand(schedule: Schedule, turns: int) -> list[float]:
    """w after every turn: the mean, weighted by samples, of what those who answer made of the w they were sent."""
    w, sent, course = 1.0, {}, []
    for t in range(turns):
        turn = schedule.turn(0, t, client_keys(NAMES))
        sent |= dict.fromkeys(turn.send.tolist(), w)
        back = turn.take
        if len(back):
            w = np.average([trained(i, sent[i]) for i in back], weights=SAMPLES[back])
        course.append(w)
    return course


@pytest.mark.parametrize("delay", [(0, 0, 0, 0), (1, 1, 1, 1), (0, 1, 2, 1), (3, 1, 2, 5), (2, 2, 2, 0)])
def test_delayed_fedavg_is_the_hand_computation(delay):
    loop = make(FedAvg(LR), Late(delay))
    for expected in by_hand(Late(delay), 12):
        loop.step()
        assert float(loop.server["w"][0]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("concurrency", [None, 1, 2])
def test_asynchronous_fedavg_is_the_hand_computation(concurrency):
    """One reply a turn, as it arrives; the clock runs with the replies, as many clients are at work as asked for."""
    schedule = Asynchronous(Delays("uniform", 1.0, 5.0), concurrency)
    loop, busy, clock = make(FedAvg(LR), schedule), set(), 0.0
    for t, expected in enumerate(by_hand(schedule, 20)):
        loop.step()
        turn = schedule.turn(0, t, loop.keys)
        assert not busy & set(turn.send.tolist()), "sent to a client that is at work"
        busy |= set(turn.send.tolist())
        assert len(busy) == (concurrency or 4)
        assert len(turn.take) == 1
        busy -= set(turn.take.tolist())
        assert turn.seconds >= 0
        clock += turn.seconds
        assert float(loop.server["w"][0]) == pytest.approx(expected, abs=1e-12)
        assert loop.clock == pytest.approx(clock)
    assert loop.ledger.frame()["staleness"].max() >= (concurrency or 4) - 1


def test_the_method_sees_how_old_a_reply_is():
    loop = make(FedAvg(LR), Late((0, 1, 2, 1)))
    for _ in range(3):
        loop.step()
    ages = [(r.t - r.sent).tolist() for r in loop.engine.rounds]
    ids = [r.ids.tolist() for r in loop.engine.rounds]
    assert ids == [[0], [0, 1, 3], [0, 2]]
    assert ages == [[0], [0, 1, 1], [0, 2]]
    assert [r.samples.tolist() for r in loop.engine.rounds] == [[1], [1, 3, 2], [1, 2]]


@pytest.mark.parametrize("algorithm", [FedAvg(LR), Ditto(LR)])
@pytest.mark.parametrize("delay", [(0, 0, 0, 0), (3, 1, 2, 5), (0, 2, 1, 1), None])
@pytest.mark.parametrize("at", [1, 5])
def test_resumed_with_messages_under_way(algorithm, delay, at, tmp_path):
    straight, first, second = (
        make(algorithm, Late(delay) if delay else Asynchronous(Delays("uniform", 1.0, 5.0), 3)) for _ in range(3)
    )
    for _ in range(9):
        straight.step()
    for _ in range(at):
        first.step()
    checkpoint.save(tmp_path, at, *first.state())
    tensors, meta, _ = checkpoint.load(tmp_path)
    second.restore(tensors, meta)
    assert (second.t, second.clock) == (at, first.clock)
    for _ in range(9 - at):
        second.step()
    assert torch.equal(second.server["w"], straight.server["w"])
    assert all(torch.equal(second.engine.rows.tensors[k], t) for k, t in straight.engine.rows.tensors.items())
    assert second.ledger.frame().drop(columns="seconds").equals(straight.ledger.frame().drop(columns="seconds"))
    assert [f.ids.tolist() for f in second.flights] == [f.ids.tolist() for f in straight.flights]


def test_a_decaying_step_size():
    loop, w = make(FedAvg(LR), Uniform(), 0.5, 2), 1.0
    for t in range(6):
        loop.step()
        w = np.average([trained(i, w, LR * 0.5 ** (t // 2)) for i in range(4)], weights=SAMPLES)
        assert float(loop.server["w"][0]) == pytest.approx(w, abs=1e-12)
    loop = make(FedCET("adaptive"), Uniform(), 0.5, 1)
    loop.step()
    with pytest.raises(ConfigError, match=r"algorithm\.lr of FedCET: found 'adaptive', expected a number, to decay it"):
        loop.step()


def test_a_rounds_seconds_and_steps_are_those_of_all_its_exchanges():
    loop = make(FedCET(), Uniform())
    exchange = loop.engine.exchange

    def timed(algorithm, received, round, *rest):
        seconds = 10.0**round.phase * (1 + round.ids.numpy())
        return exchange(algorithm, received, round, *rest)._replace(seconds=seconds, steps=2 * seconds.astype(int))

    loop.engine.exchange = timed
    loop.step()
    frame = loop.ledger.frame()
    assert frame["seconds"].tolist() == [1111, 2222, 3333, 4444]
    assert frame["steps"].tolist() == [2222, 4444, 6666, 8888]


def test_an_empty_cohort_changes_nothing():
    class Nobody(Schedule):
        def cohort(self, seed, t, keys):
            return np.array([], dtype=np.int64)

    loop = make(FedAvg(LR), Nobody())
    assert len(loop.step()) == 0
    assert float(loop.server["w"][0]) == 1.0
    assert loop.t == 1
    assert loop.ledger.totals() == (0, 0)


@pytest.mark.parametrize("algorithm", [FedAvg(1e200), FedCET(1e200), Ditto(1e200)])
def test_a_diverged_round_leaves_the_state_before_it(algorithm):
    loop = make(algorithm, Uniform())
    server, rows = ({k: t.clone() for k, t in part.items()} for part in (loop.server, loop.engine.rows.tensors))
    with pytest.raises(Diverged, match=r"round 0: client '(oslo|bern|lima|kyiv)' diverged \(NaN or infinity\)"):
        loop.step()
    assert loop.t == 0
    for before, now in ((server, loop.server), (rows, loop.engine.rows.tensors)):
        assert all(torch.equal(before[k], now[k]) for k in before)


def test_evaluation_costs_nothing_and_may_be_cut_into_blocks():
    loop = make(Ditto(LR), Uniform(0.5))
    loop.step()
    before = loop.ledger.totals()
    whole, cut = loop.scored("train"), loop.engine.evaluate(loop.algorithm, loop.deployment(), "train", block=8)
    assert all((whole[k] == cut[k]).all() for k in whole)
    assert loop.ledger.totals() == before
    personal = loop.personal(np.arange(4))[:, 0].numpy()
    assert whole["loss"] == pytest.approx((C * personal - C * B) ** 2)


@pytest.mark.parametrize("deaths", [2, 3])
def test_a_worker_that_dies_every_time_ends_the_run_with_what_was_reached(deaths, monkeypatch):
    loop, expected, said = make(FedAvg(lr=LR), Uniform()), make(FedAvg(lr=LR), Uniform()), []
    loop.step(), expected.step()
    loop.say, exchange, left = said.append, LocalEngine.exchange, [Lost("worker 0")] * deaths
    dying = lambda *given: (_ for _ in ()).throw(left.pop()) if left else exchange(*given)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "exchange", dying)
        if deaths == 3:
            with pytest.raises(
                Silent, match="round 1: worker 0 died 3 times in a row; the machine may be out of memory"
            ):
                loop.step()
        else:
            loop.step()
    assert said == ["round 1: worker 0 died; the round is repeated"] * 2 + ["round 1: worker 0 died"] * (deaths - 2)
    if deaths == 2:
        expected.step()
    assert loop.whole
    assert loop.t == expected.t
    assert torch.equal(loop.server["w"], expected.server["w"])


def test_sums_leave_no_rows_and_rows_that_no_rehearsal_saw_are_refused_in_one_line():
    @dataclass(frozen=True)
    class Curious(FedAvg, abstract=True):
        """FedAvg that looks at every client's own in its third round."""

        def aggregate(self, server, up, round):
            if round.t == 2:
                up["w"].sum()
            return super().aggregate(server, up, round)

    plain, summed = make(Curious(lr=LR), Uniform()), make(Curious(lr=LR), Uniform())
    summed.sums = {(1, 0): {"w": {"weighted"}}}
    for _ in range(2):
        plain.step(), summed.step()
    assert plain.kinds == summed.kinds == {(1, 0): {"w": {"weighted"}}}
    assert torch.allclose(plain.server["w"], summed.server["w"], rtol=1e-12)
    plain.step()
    with pytest.raises(
        RunError, match=r"uplink 'w': .* sums only when it was rehearsed; ask for up\['w'\] in every round"
    ):
        summed.step()
