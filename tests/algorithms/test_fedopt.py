"""Optimisers at the server: Algorithm 2 of Reddi et al. in numpy on quadratics, and what must follow from it."""

import dataclasses
import itertools

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


@certifies(pf.FedAvgM, by="identity at beta = 0")
@pytest.mark.parametrize("weighted", [True, False])
def test_without_momentum_it_is_fedavg(problem, weighted):
    settings = {"rounds": 8, "batch_size": 8, "fraction": 0.6}
    a = problem.fit(pf.FedAvgM(LR, beta=0.0, weighted=weighted), **settings)
    b = problem.fit(pf.FedAvg(LR, weighted=weighted), **settings)
    assert torch.allclose(a.server["w"], b.server["w"], rtol=0, atol=1e-12)


@certifies(pf.FedAvgM, by="torch.optim.SGD on a single client's moves")
def test_momentum_is_torchs(problem):
    """torch.optim.SGD whose gradient is the negative mean move, at the server's step size."""
    w = torch.nn.Parameter(torch.zeros(problem.dim, dtype=torch.float64))
    optimizer = torch.optim.SGD([w], 0.4, momentum=0.7)
    for _ in range(9):
        w.grad = torch.tensor(-mean_of(problem, moves(problem, w.detach().numpy()), True))
        optimizer.step()
    run = problem.fit(pf.FedAvgM(LR, server_lr=0.4, beta=0.7), rounds=9, steps=STEPS)
    assert torch.allclose(run.server["w"], w.detach(), rtol=0, atol=1e-12)


@certifies(pf.FedAdam, by="closed form at beta1 = beta2 = 0")
def test_without_memory_steps_are_signs(problem):
    """beta1 = beta2 = 0: w moves by server_lr D / (|D| + tau), so that every number moves by server_lr."""
    method = pf.FedAdam(LR, server_lr=0.03, beta1=0.0, beta2=0.0, tau=1e-12)
    D = mean_of(problem, moves(problem, np.zeros(problem.dim)), False)
    moved = problem.fit(method, rounds=1, steps=STEPS).server["w"]
    assert np.abs(D).min() > 1e-4
    assert np.allclose(moved, 0.03 * np.sign(D), rtol=0, atol=1e-9)


@certifies(pf.FedAdagrad, by="by definition, and its sum")
def test_adagrads_second_moment_never_falls(problem):
    """v is tau^2 and the sum of all squared mean moves, each at the model of its round."""
    at = [problem.fit(pf.FedAdagrad(LR, server_lr=0.2), rounds=t, steps=STEPS).server for t in range(1, 8)]
    seen = [s["v"] for s in at]
    assert all((b >= a).all() for a, b in itertools.pairwise(seen))
    starts = [np.zeros(problem.dim), *(s["w"].numpy() for s in at[:-1])]
    total = 1e-6 + sum(mean_of(problem, moves(problem, w), False) ** 2 for w in starts)
    assert np.allclose(seen[-1], total, rtol=1e-12)


@certifies(pf.FedAdagrad, pf.FedAdam, pf.FedYogi, by="identity as tau grows")
@pytest.mark.parametrize("cls", ADAPTIVE)
def test_large_tau_is_fedavg(problem, cls):
    """As tau grows with server_lr = 2 tau and v0 = tau^2, sqrt(v) + tau -> 2 tau: the step is the mean move."""
    tau = 1e6
    run = problem.fit(cls(LR, server_lr=2 * tau, beta1=0.0, tau=tau, **_slow(cls)), rounds=6, steps=STEPS)
    plain = problem.fit(pf.FedAvg(LR, weighted=False), rounds=6, steps=STEPS)
    assert torch.allclose(run.server["w"], plain.server["w"], rtol=0, atol=1e-8)


def _slow(cls) -> dict[str, float]:
    """v stays where it starts; Adagrad's grows by D^2, far below tau^2."""
    return {} if cls is pf.FedAdagrad else {"beta2": 1 - 1e-15}


@certifies(pf.FedAdagrad, pf.FedAdam, pf.FedYogi, by="an invariance, without tau")
@pytest.mark.parametrize("cls", ADAPTIVE)
def test_the_scale_of_the_moves_cancels(cls):
    """Targets ten times as large make gradients and moves ten times as large: without tau the steps are the same, so
    that ten times the server's step size gives ten times the model.
    """
    small, large = LeastSquares(seed=8, clients=4, dim=5), LeastSquares(seed=8, clients=4, dim=5)
    large.data = [(X, 10 * y) for X, y in large.data]
    large.federation = pf.Federation.from_arrays(large.data, test=large.data)
    a = small.fit(cls(LR, server_lr=0.01, tau=1e-14, v0=0.0), rounds=7).server["w"]
    b = large.fit(cls(LR, server_lr=0.1, tau=1e-14, v0=0.0), rounds=7).server["w"]
    assert torch.allclose(b, 10 * a, rtol=1e-8, atol=0)


@certifies(pf.FedYogi, by="both sides of the sign")
def test_yogi_is_adam_while_the_moves_vanish_or_start(problem):
    """From v = 0, sign(v - D^2) = -1 and both add (1 - beta2) D^2. Above D^2, Yogi's v falls by (1 - beta2) D^2 and not
    by a share of itself: it forgets more slowly.
    """
    adam, yogi = (cls(LR, server_lr=0.01, tau=1e-3, v0=0.0) for cls in (pf.FedAdam, pf.FedYogi))
    a, b = (problem.fit(m, rounds=1, steps=STEPS).server for m in (adam, yogi))
    assert torch.allclose(a["v"], b["v"], rtol=1e-12)
    assert torch.allclose(a["w"], b["w"], rtol=1e-12)
    high = [dataclasses.replace(m, v0=1e6) for m in (adam, yogi)]
    a, b = (problem.fit(m, rounds=3, steps=STEPS).server["v"] for m in high)
    assert torch.allclose(a, torch.full_like(a, 1e6 * 0.99**3), rtol=1e-6)
    assert torch.allclose(b, torch.full_like(b, 1e6), rtol=1e-6)
    assert (b < 1e6).all()


@pytest.mark.parametrize("cls", [pf.FedAvgM, *ADAPTIVE])
def test_clients_that_agree_lead_to_their_optimum(cls):
    """All clients alike: the methods are optimisers of one function, and reach its minimum."""
    one = LeastSquares(seed=2, clients=1, dim=4)
    fed = pf.Federation.from_arrays(one.data * 3, test=one.data * 3)
    settings = {"server_lr": 0.3} if cls is not pf.FedAvgM else {}
    run = pf.fit(
        one.model(), fed, cls(LR, **settings), rounds=300, local_steps=STEPS, batch_size=None, evaluate_every=0,
        loss="mse", cosine=300,
    )  # fmt: skip
    assert one.error(run.server["w"]) < 1e-3
