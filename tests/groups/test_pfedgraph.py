"""pFedGraph: its quadratic programme by scipy, its rounds in numpy, and its limits."""

import math

import numpy as np
import pytest
import torch
from certify import certifies
from problems import Given, centres, fit_points, zero_linear
from scipy.optimize import brentq, nnls
from test_ifca import of_sizes

import polyfed as pf
from polyfed.algorithms._shared.similarity import simplex
from polyfed_groups.pfedgraph import collaboration

POINTS = np.random.default_rng(3).normal(size=(6, 4)) + 1.0
SIZES = np.array([1, 3, 2, 5, 1, 2])


def nearest(v):
    """The point of the simplex nearest to v: max(v - t, 0) that adds up to 1."""
    t = brentq(lambda t: np.maximum(v - t, 0).sum() - 1, v.min() - 1, v.max(), xtol=1e-15)
    return np.maximum(v - t, 0)


def negative_cosines(dw):
    unit = dw / np.linalg.norm(dw, axis=1, keepdims=True)
    D = -unit @ unit.T
    return np.where(D < -0.9, -1, D)


def solved(p, d, alpha):
    """argmin over the simplex of alpha ||a - p||^2 + d a: of ||a - v||^2, v = p - d / (2 alpha), which is ||M y||^2 of
    y >= 0 for M = 1 - v 1' and a = y / sum y."""
    m = len(p)
    M = np.eye(m) - np.outer(p - d / (2 * alpha), np.ones(m))
    y = nnls(np.vstack([M, np.ones(m)]), np.eye(m + 1)[m])[0]
    return y / y.sum()


@certifies(pf.PFedGraph, by="its quadratic programme by scipy's least squares under bounds, at 1e-9")
@pytest.mark.parametrize("alpha", [0.05, 0.8, 10.0])
def test_its_graph_is_the_programmes_solution(alpha):
    rng = np.random.default_rng(0)
    for m in (2, 5, 9):
        dw, p = rng.normal(size=(m, 3)), rng.dirichlet(np.ones(m))
        found = collaboration(torch.as_tensor(dw), torch.as_tensor(p), alpha).numpy()
        assert np.abs(found - [solved(p, d, alpha) for d in negative_cosines(dw)]).max() < 1e-9


@certifies(pf.PFedGraph, by="its box in numpy, on cohorts")
@pytest.mark.parametrize("lam", [0.0, 0.7])
def test_rounds_by_hand(lam):
    """A client that was away goes on from its last mixture; the pull is towards the collaborators' directions."""
    cohorts, lr, alpha, steps = ((0, 1, 2, 3), (1, 2, 4, 5), (0, 3, 5), (4,)), 0.2, 0.3, 3
    u, m, w, graph = np.full((6, 4), 0.7), np.zeros((6, 4)), np.full((6, 4), 0.7), np.zeros((6, 6))
    for t in range(6):
        who = np.array(cohorts[t % 4])
        for i in who:
            w[i] = u[i]
            for _ in range(steps):
                g, length = w[i] - POINTS[i], np.linalg.norm(w[i])
                if m[i].any():
                    g = g - lam * (np.eye(4) - np.outer(w[i], w[i]) / length**2) @ m[i] / length
                w[i] = w[i] - lr * g
        p = SIZES[who] / SIZES[who].sum()
        a = np.stack([nearest(p - d / (2 * alpha)) for d in negative_cosines(w[who] - 0.7)])
        graph[who] = 0
        graph[np.ix_(who, who)] = a
        u[who] = a @ w[who]
        m[who] = lam and a @ (w[who] / np.linalg.norm(w[who], axis=1, keepdims=True))
    model, how = zero_linear(4), {"batch_size": None, "evaluate_every": 0, "loss": "mse", "local_steps": steps}
    torch.nn.init.constant_(model.weight, 0.7)
    method, schedule = pf.PFedGraph(lr, alpha=alpha, lam=lam), Given(cohorts)
    run = pf.fit(model, of_sizes(POINTS, SIZES), method, rounds=6, schedule=schedule, **how)
    assert np.allclose(run.personal, w, rtol=0, atol=1e-12)
    assert np.allclose(run.findings["mixing"], graph, rtol=0, atol=1e-12)
    assert 0 < (graph == 0).sum() < graph.size - len(graph)
    moved = run.ledger[["down_bytes", "up_bytes"]].to_numpy()
    assert set(moved[:, 0]) == {8 * 4 * (2 if lam else 1)}
    assert set(moved[:, 1]) == {8 * 4}


@certifies(
    pf.PFedGraph, by="FedAvg at alpha -> infinity, Local at alpha -> 0, and FedAvg of equal clients at any alpha"
)
def test_its_limits():
    def fit(method, points=POINTS):
        return fit_points(of_sizes(points, SIZES), method, 5, 4, local_steps=2)

    average = fit(pf.FedAvg(0.1)).server["w"]
    assert torch.allclose(fit(pf.PFedGraph(0.1, alpha=1e12, lam=0.0)).server["u"], average.expand(6, -1), atol=1e-11)
    apart = np.vstack([np.eye(4), -np.eye(4)[:2]])
    found, alone = (fit(m, apart).personal for m in (pf.PFedGraph(0.1, alpha=1e-9, lam=0.0), pf.Local(0.1)))
    assert torch.allclose(found, alone, atol=1e-12)
    equal = np.tile(POINTS[:1], (6, 1))
    found, one = fit(pf.PFedGraph(0.1, alpha=0.01, lam=0.0), equal), fit(pf.FedAvg(0.1), equal)
    assert np.allclose(found.findings["mixing"], SIZES / SIZES.sum(), atol=1e-12)
    assert torch.allclose(found.server["u"], one.server["w"].expand(6, -1), atol=1e-12)


def test_clients_within_a_cosine_of_nine_tenths_count_as_equal():
    dw = torch.tensor([[1.0, 0], [0.91, np.sqrt(1 - 0.91**2)], [0.89, -np.sqrt(1 - 0.89**2)]], dtype=torch.float64)
    a = collaboration(dw, torch.full((3,), 1 / 3).double(), 1e-6)
    assert a[0].tolist() == pytest.approx([0.5, 0.5, 0.0], abs=1e-9)


def test_it_finds_who_is_alike_where_fedavg_serves_nobody():
    group = np.arange(6) % 2
    points = np.where(group[:, None] == 0, 3.0, -3.0) * np.ones(4) + 0.1 * POINTS
    run = fit_points(centres(points), pf.PFedGraph(0.5), 20, 4)
    assert np.allclose(run.findings["mixing"], (group[:, None] == group) / 3, atol=1e-9)
    assert np.abs(run.personal.numpy() - points).max() < 0.3


def test_the_simplex_of_large_numbers_and_of_none():
    """Of float32 numbers that dwarf the sum of 1, all is the largest's, ties share; NaN stays NaN."""
    v = torch.tensor([[1e16, 3.0, -1e16], [5e7, 5e7, 0.0], [0.2, 0.5, 0.9], [math.nan, 1.0, 2.0]])
    found = simplex(v)
    assert found[:2].tolist() == [[1, 0, 0], [0.5, 0.5, 0]]
    assert torch.allclose(found[2], torch.tensor([0.0, 0.3, 0.7]), atol=1e-6)
    assert not found[3].isfinite().any()
