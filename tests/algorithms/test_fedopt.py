"""Optimisers at the server: Algorithm 2 of Reddi et al. in numpy on quadratics, and what must follow from it."""

import dataclasses

import numpy as np
import pytest
import torch
from certify import certifies
from problems import LeastSquares

import polyfed as pf

LR, STEPS = 0.05, 4
ADAPTIVE = [pf.FedAdagrad, pf.FedAdam, pf.FedYogi]


@pytest.fixture(scope="module")
def problem():
    return LeastSquares(seed=5, clients=5, dim=6)


def moves(problem, w: np.ndarray) -> np.ndarray:
    """[n, p]: w_i - w after STEPS steps of gradient descent on f_i."""
    ends = []
    for i in range(problem.clients):
        x = w.copy()
        for _ in range(STEPS):
            x -= LR * problem.gradient(i, x)
        ends.append(x - w)
    return np.array(ends)


def mean_of(problem, d: np.ndarray, weighted: bool) -> np.ndarray:
    return np.average(d, axis=0, weights=[len(y) for _, y in problem.data] if weighted else None)


@certifies(pf.FedAdagrad, pf.FedAdam, pf.FedYogi, by="Algorithm 2 on quadratics")
@certifies(pf.FedAvgM, by="the recursion on quadratics")
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(
    "method",
    [
        pf.FedAvgM(LR, server_lr=0.7, beta=0.6),
        pf.FedAdagrad(LR, server_lr=0.2, beta1=0.3, tau=0.01),
        pf.FedAdagrad(LR, server_lr=0.2, tau=1e-8, v0=0.0),
        pf.FedAdam(LR, server_lr=0.2, beta1=0.7, beta2=0.8, tau=0.01),
        pf.FedAdam(LR, server_lr=0.2, beta1=0.7, beta2=0.8, tau=0.01, v0=0.5),
        pf.FedYogi(LR, server_lr=0.2, beta1=0.7, beta2=0.8, tau=0.01),
        pf.FedYogi(LR, server_lr=0.2, beta1=0.7, beta2=0.8, tau=0.3),
    ],
    ids=lambda m: m.name,
)
def test_rounds_in_numpy(problem, method, weighted):
    method = dataclasses.replace(method, weighted=weighted)
    w, m = np.zeros(problem.dim), np.zeros(problem.dim)
    v = m if isinstance(method, pf.FedAvgM) else m + (method.tau**2 if method.v0 is None else method.v0)
    for _ in range(12):
        D = mean_of(problem, moves(problem, w), weighted)
        if isinstance(method, pf.FedAvgM):
            v = method.beta * v + D
            w = w + method.server_lr * v
            continue
        m = method.beta1 * m + (1 - method.beta1) * D
        if isinstance(method, pf.FedAdagrad):
            v = v + D**2
        elif isinstance(method, pf.FedAdam):
            v = method.beta2 * v + (1 - method.beta2) * D**2
        else:
            v = v - (1 - method.beta2) * D**2 * np.sign(v - D**2)
        w = w + method.server_lr * m / (np.sqrt(v) + method.tau)
    server = problem.fit(method, rounds=12, steps=STEPS).server
    assert np.allclose(server["w"], w, rtol=0, atol=1e-12)
    assert np.allclose(server["v"], v, rtol=0, atol=1e-12)


@certifies(pf.FedAdagrad, pf.FedAdam, pf.FedYogi, by="an invariance, without tau")
@pytest.mark.parametrize("cls", ADAPTIVE)
def test_the_scale_of_the_moves_cancels(cls):
    """Targets ten times as large make moves so: without tau ten times the server's step gives ten times the model."""
    small, large = LeastSquares(seed=8, clients=4, dim=5), LeastSquares(seed=8, clients=4, dim=5)
    large.data = [(X, 10 * y) for X, y in large.data]
    large.federation = pf.Federation.from_arrays(large.data, test=large.data)
    a = small.fit(cls(LR, server_lr=0.01, tau=1e-14, v0=0.0), rounds=7).server["w"]
    b = large.fit(cls(LR, server_lr=0.1, tau=1e-14, v0=0.0), rounds=7).server["w"]
    assert torch.allclose(b, 10 * a, rtol=1e-8, atol=0)
