"""FedDyn: Algorithm 1 in closed form, the exact optimum under drift, and the traps of known code."""

import numpy as np
import pytest
import torch
from certify import certifies
from problems import LeastSquares

import polyfed as pf


@pytest.fixture(scope="module")
def problem():
    return LeastSquares(seed=1, clients=8, dim=6)


def duals(run):
    return run.trained.engine.rows.gather(torch.arange(run.trained.n))["g"].numpy()


@certifies(pf.FedDyn, by="the centralised optimum")
@pytest.mark.parametrize(("fraction", "rounds"), [(1.0, 200), (0.5, 500)])
def test_exact_optimum_under_drift(problem, fraction, rounds):
    run = problem.fit(pf.FedDyn(0.02, alpha=5.0), rounds=rounds, fraction=fraction)
    assert problem.error(run.server["w"]) < 1e-9


@certifies(pf.FedDyn, by="their definition at the optimum")
def test_duals_become_the_clients_gradients(problem):
    run = problem.fit(pf.FedDyn(0.02, alpha=5.0), rounds=200)
    expected = np.stack([problem.gradient(i, problem.optimum) for i in range(problem.clients)])
    assert np.allclose(duals(run), expected, atol=1e-8)
    assert np.allclose(run.server["h"], duals(run).mean(0), atol=1e-9)


@certifies(pf.FedDyn, by="Algorithm 1 in closed form")
def test_two_rounds_of_exact_solves(problem):
    """w_i = (H_i + alpha)^-1 (b_i + g_i + alpha x): the norm squared, and no pull left out."""
    alpha, eye = 2.0, np.eye(problem.dim)
    x, h, g = np.zeros(problem.dim), np.zeros(problem.dim), np.zeros((problem.clients, problem.dim))
    for _ in range(2):
        sides = zip(problem.H, problem.b, g, strict=True)
        w = np.stack([np.linalg.solve(H + alpha * eye, b + gi + alpha * x) for H, b, gi in sides])
        g = g - alpha * (w - x)
        h = h - alpha * (w - x).sum(0) / problem.clients
        x = w.mean(0) - h / alpha
    run = problem.fit(pf.FedDyn(0.05, alpha=alpha), rounds=2, steps=300)
    assert np.allclose(run.server["w"], x, atol=1e-10)
    assert np.allclose(duals(run), g, atol=1e-10)


def test_the_servers_dual_is_the_mean_of_all_clients(problem):
    """h = mean of g_i over all n, whoever took part, and clients that never took part have none."""
    run = problem.fit(pf.FedDyn(0.02), rounds=3, fraction=0.25)
    assert np.allclose(run.server["h"], duals(run).mean(0), atol=1e-13)
    absent = sorted(set(range(problem.clients)) - set(run.ledger["client"]))
    assert absent
    assert (duals(run)[absent] == 0).all()


def test_one_vector_each_way(problem):
    ledger = problem.fit(pf.FedDyn(0.02), rounds=3, fraction=0.5).ledger
    assert len(ledger) == 12
    assert (ledger[["down_bytes", "up_bytes"]] == 8 * problem.dim).all(axis=None)
