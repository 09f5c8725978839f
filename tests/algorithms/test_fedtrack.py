"""FedTrack and FedLin: the exact optimum under drift, Algorithm 1 in plain numpy, and their relation to SCAFFOLD."""

import numpy as np
import pytest
import torch
from certify import certifies
from problems import LeastSquares, zero_linear

import polyfed as pf


@pytest.fixture(scope="module")
def problem():
    return LeastSquares(seed=1, clients=8, dim=6)


def numpy_fedlin(problem, total, steps, rounds, keep_up=None, keep_down=None):
    """Algorithm 1 as printed; steps: per client. Returns the server's x after each round."""

    def compress(v, keep):
        k = len(v) if keep is None else int(np.ceil(keep * len(v)))
        out = np.zeros_like(v)
        top = np.argsort(-np.abs(v))[:k]
        out[top] = v[top]
        return out

    n = problem.clients
    x, e, rho, seen = np.zeros(problem.dim), np.zeros(problem.dim), np.zeros((n, problem.dim)), []
    for _ in range(rounds):
        own = np.stack([problem.gradient(i, x) for i in range(n)])
        h = np.stack([compress(r + g, keep_up) for r, g in zip(rho, own, strict=True)])
        rho = rho + own - h
        g = compress(e + h.mean(0), keep_down)
        e = e + h.mean(0) - g
        local = np.stack([x] * n)
        for i in range(n):
            for _ in range(steps[i]):
                local[i] = local[i] - total / steps[i] * (problem.gradient(i, local[i]) - own[i] + g)
        x = local.mean(0)
        seen.append(x)
    return np.stack(seen)


def contraction(H, steps, lr):
    """M with x_{t+1} - x* = M (x_t - x*): a client's K steps of a move by -a sum_k (I - a H_i)^k grad f(x)."""
    eye, mean = np.eye(len(H[0])), np.mean(H, axis=0)
    clients = zip(H, steps, lr, strict=True)
    moves = [a * sum(np.linalg.matrix_power(eye - a * h, k) for k in range(K)) for h, K, a in clients]
    return eye - np.mean(moves, axis=0) @ mean


@certifies(pf.FedTrack, by="the centralised optimum, linear rate")
def test_exact_optimum_under_drift(problem):
    """The linear rate of its own iteration matrix, and the optimum in the end."""
    M = contraction(problem.H, [5] * 8, [0.02] * 8)
    expected = problem.optimum - np.linalg.matrix_power(M, 20) @ problem.optimum
    assert np.allclose(problem.fit(pf.FedTrack(0.02), rounds=20).server["w"], expected, atol=1e-12)
    assert problem.error(problem.fit(pf.FedTrack(0.02), rounds=200).server["w"]) < 1e-10


@certifies(pf.FedTrack, by="identity with option I")
def test_scaffold_is_one_round_behind(problem):
    """Option I with everybody: c_i is the gradient at the last x. Hand-made with FedTrack's step and old gradients."""
    n, x, lr = problem.clients, np.zeros(problem.dim), 0.02
    old = np.zeros((n, problem.dim))
    for _ in range(6):
        local = np.stack([x] * n)
        for i in range(n):
            for _ in range(5):
                local[i] = local[i] - lr * (problem.gradient(i, local[i]) - old[i] + old.mean(0))
        old = np.stack([problem.gradient(i, x) for i in range(n)])
        x = local.mean(0)
    scaffold = problem.fit(pf.Scaffold(lr, option=1), rounds=6)
    assert np.allclose(scaffold.server["w"], x, atol=1e-12)
    fresh = numpy_fedlin(problem, 5 * lr, [5] * n, 6)[-1]
    assert np.allclose(problem.fit(pf.FedTrack(lr), rounds=6).server["w"], fresh, atol=1e-12)
    assert not np.allclose(x, fresh, atol=1e-6)


def test_one_step_is_gradient_descent(problem):
    """With one local step the two local gradients cancel."""
    x = np.zeros(problem.dim)
    for _ in range(5):
        x = x - 0.05 * np.mean([problem.gradient(i, x) for i in range(problem.clients)], axis=0)
    assert np.allclose(problem.fit(pf.FedTrack(0.05), rounds=5, steps=1).server["w"], x, atol=1e-13)


@certifies(pf.FedLin, pf.FedTrack, by="identity")
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_fedlin_without_compression_is_fedtrack(problem, fraction):
    a = problem.fit(pf.FedTrack(0.02), rounds=8, fraction=fraction)
    b = problem.fit(pf.FedLin(5 * 0.02), rounds=8, fraction=fraction)
    c = problem.fit(pf.FedLin(5 * 0.02, keep_up=1.0, keep_down=1.0), rounds=8, fraction=fraction)
    assert torch.allclose(a.server["w"], b.server["w"], atol=1e-13)
    assert torch.allclose(a.server["w"], c.server["w"], atol=1e-13)


@certifies(pf.FedLin, by="Algorithm 1 in plain numpy, both memories")
@pytest.mark.parametrize(("up", "down"), [(None, 0.25), (0.5, None), (0.5, 0.25)])
def test_fedlin_as_printed(problem, up, down):
    run = problem.fit(pf.FedLin(0.05, keep_up=up, keep_down=down), rounds=25)
    assert np.allclose(run.server["w"], numpy_fedlin(problem, 0.05, [5] * 8, 25, up, down)[-1], atol=1e-11)


@certifies(pf.FedLin, by="exact with 2 entries of 6")
def test_sparse_downlinks_keep_the_optimum(problem):
    """Error feedback on the server: linear convergence to the exact optimum with 2 of 6 entries sent."""
    run = problem.fit(pf.FedLin(0.03, keep_down=0.25), rounds=300)
    assert problem.error(run.server["w"]) < 1e-9
    assert float(run.server["e"].abs().max()) < 1e-8


@certifies(pf.FedLin, by="the optimum")
def test_fedlin_is_exact_with_unequal_numbers_of_steps():
    """One to four steps by number of samples, each lr / tau_i long: the optimum of the plain mean, at its own rate."""
    rng = np.random.default_rng(0)
    X, y, steps = rng.normal(size=(8, 3)), rng.normal(size=8), np.arange(8) % 4 + 1
    data = [(np.tile(x, (4 * k, 1)), np.tile(t, 4 * k)) for x, t, k in zip(X, y, steps, strict=True)]  # batches alike
    H = [2 * np.outer(x, x) for x in X]
    optimum = np.linalg.lstsq(X, y, rcond=None)[0]
    fed = pf.Federation.from_arrays(data, test=data)
    for rounds in (10, 400):
        run = pf.fit(zero_linear(3), fed, pf.FedLin(0.2), rounds=rounds, batch_size=4, loss="mse", evaluate_every=0)
        M = contraction(H, steps, 0.2 / steps)
        assert np.allclose(run.server["w"], optimum - np.linalg.matrix_power(M, rounds) @ optimum, atol=1e-12)
    assert np.allclose(run.server["w"], optimum, atol=1e-10)


@certifies(pf.FedLin, by="values, and positions of 4 bytes")
def test_fedlins_bytes(problem):
    """Down the model and k values with k positions of 4 bytes, up the gradient's and the model."""
    ledger = problem.fit(pf.FedLin(0.01, keep_up=0.5, keep_down=1 / 6), rounds=3).ledger
    assert (ledger["down_bytes"] == 6 * 8 + 1 * (8 + 4)).all()
    assert (ledger["up_bytes"] == 6 * 8 + 3 * (8 + 4)).all()
    assert (ledger["exchanges"] == 2).all()
    ledger = problem.fit(pf.FedTrack(0.01), rounds=3).ledger
    assert (ledger[["down_bytes", "up_bytes"]] == 2 * 6 * 8).all(axis=None)
