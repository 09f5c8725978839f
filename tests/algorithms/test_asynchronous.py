"""Asynchronous training: the event queue, FedAsync, FedBuff and asyncFPFC, against recursions written out by hand."""

import heapq

import numpy as np
import pytest
import torch
from certify import certifies
from problems import Given, LeastSquares, centres, fit_points

import polyfed as pf
from polyfed.base.randomness import client_keys
from polyfed.core.schedule import Asynchronous, Delays, Timed, Uniform

POINTS = np.random.default_rng(0).normal(size=(5, 3)) + 1
LR = 0.3


def events(schedule, rounds, seed=0, n=5):
    keys = client_keys([f"client-{i}" for i in range(n)])
    return [schedule.turn(seed, t, keys) for t in range(rounds)]


def stale(run):
    """(client, staleness) of every reply, in order."""
    return run.ledger[["client", "staleness"]].to_numpy().tolist()


def trained(i, w):
    """One step on f_i(w) = 1/2 ||w - c_i||^2."""
    return w - LR * (w - POINTS[i])


def test_the_clock_is_an_event_queue():
    """With fixed delays and everybody at work, replies come in the order of an ordinary priority queue."""
    delay = np.array([1.0, 2.5173, 0.7019, 4.1231, 1.6427])
    turns = events(Asynchronous(Delays(compute=delay)), 60)
    queue, clock, expected = [(d, i) for i, d in enumerate(delay)], 0.0, []
    heapq.heapify(queue)
    for _ in range(60):
        due, i = heapq.heappop(queue)
        expected.append((i, due))
        heapq.heappush(queue, (due + delay[i], i))
    for turn, (i, due) in zip(turns, expected, strict=True):
        clock += turn.seconds
        assert turn.take.tolist() == [i]
        assert clock == pytest.approx(due)


def test_a_synchronous_round_waits_for_the_slowest():
    delays = Delays("uniform", 0, 20)
    keys = client_keys([f"client-{i}" for i in range(5)])
    for t, turn in enumerate(events(Timed(Uniform(1.0), delays), 20)):
        assert turn.seconds == delays.draw(0, t, np.arange(5), keys).max()
        assert turn.seconds <= 20


@certifies(pf.FedAsync, by="the recursion on quadratics")
def test_fedasync_by_hand():
    algorithm = pf.FedAsync(LR, alpha=0.5, staleness=0.7, mu=0.0)
    run = fit_points(centres(POINTS), algorithm, 40, 3, schedule=Asynchronous(Delays("uniform", 1, 9)))
    versions = [np.zeros(3)]
    for client, late in stale(run):
        reply = trained(client, versions[len(versions) - 1 - late])
        alpha = 0.5 * (late + 1.0) ** -0.7
        versions.append((1 - alpha) * versions[-1] + alpha * reply)
    assert run.ledger["staleness"].max() > 2
    assert np.allclose(run.server["w"], versions[-1], atol=1e-12)


@certifies(pf.FedAsync, by="with mu")
def test_fedasyncs_local_problem_has_its_proximal_term():
    """w_i = descent on f_i(w) + mu/2 ||w - x||^2 from x; f_i = 1/2 ||w - c_i||^2, all clients in one round."""
    run = fit_points(centres(POINTS), pf.FedAsync(LR, alpha=0.5, mu=0.8), 1, 3, local_steps=3)
    w = np.zeros_like(POINTS)  # from x = 0
    for _ in range(3):
        w = w - LR * (w - POINTS + 0.8 * w)
    assert np.allclose(run.server["w"], 0.5 * w.mean(0), atol=1e-13)


@certifies(pf.FedBuff, by="the recursion on quadratics")
def test_fedbuff_by_hand():
    run = fit_points(centres(POINTS), pf.FedBuff(LR, buffer=3), 50, 3, schedule=Asynchronous(Delays("uniform", 1, 9)))
    w, version, total, history = np.zeros(3), 0, np.zeros(3), [(np.zeros(3), 0)]
    for k, (client, late) in enumerate(stale(run)):
        start, seen = history[len(history) - 1 - late]
        total = total + (trained(client, start) - start) / np.sqrt(1 + version - seen)
        if k % 3 == 2:
            w, version, total = w + total / 3, version + 1, np.zeros(3)
        history.append((w, version))
    assert np.allclose(run.server["w"], w, atol=1e-12)


@certifies(pf.FPFC, by="identity")
def test_one_client_in_flight_is_the_synchronous_method():
    """asyncFPFC with one client at work at a time, zeta computed at dispatch, is FPFC with one participant a round."""
    problem = LeastSquares(seed=0, clients=6, dim=4)
    algorithm = pf.FPFC(0.05, lam=0.5, merge=False)
    late = problem.fit(algorithm, 80, schedule=Asynchronous(Delays("uniform", 0, 20), concurrency=1))
    step = problem.fit(algorithm, 80, schedule=Given([(int(i),) for i in late.ledger["client"]]))
    assert torch.equal(late.personal, step.personal)
