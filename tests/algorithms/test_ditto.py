"""Ditto: its personal step as printed, one step of one gradient, from the common model as received."""

import numpy as np
from certify import certifies
from problems import LeastSquares

import polyfed as pf


def personal_models(problem, lr, lam, rounds, steps, halves=False):
    """Algorithm 1 in numpy, with the common model by FedAvg; or with the pull as a second step after the gradient's."""
    share = np.array([len(y) for _, y in problem.data], dtype=float)
    share /= share.sum()
    x, v = np.zeros(problem.dim), np.zeros((problem.clients, problem.dim))
    for _ in range(rounds):
        w = np.stack([x] * problem.clients)
        for i in range(problem.clients):
            for _ in range(steps):
                w[i] = w[i] - lr * problem.gradient(i, w[i])
                if halves:
                    v[i] = v[i] - lr * problem.gradient(i, v[i])
                    v[i] = v[i] - lr * lam * (v[i] - x)
                else:
                    v[i] = v[i] - lr * (problem.gradient(i, v[i]) + lam * (v[i] - x))
        x = share @ w
    return v


@certifies(pf.Ditto, by="Algorithm 1 in plain numpy")
def test_the_gradient_and_the_pull_are_one_step():
    """Two half-steps, the pull taken at the point behind the gradient's, are off by lr^2 lam grad f_i a step."""
    problem, lr, lam = LeastSquares(seed=2, clients=5, dim=4), 0.05, 2.0
    run = problem.fit(pf.Ditto(lr, lam=lam, personal_epochs=3), rounds=3, steps=3)
    assert np.allclose(run.personal, personal_models(problem, lr, lam, 3, 3), atol=1e-12)
    assert np.abs(run.personal.numpy() - personal_models(problem, lr, lam, 3, 3, halves=True)).max() > 1e-3


def test_the_limit_does_not_depend_on_the_step():
    """grad f_i(v) + lam (v - x) = 0. At the limit of half-steps (1 - lr lam) grad f_i(v) + lam (v - x) = 0: another
    point for every lr."""
    problem, lam, eye = LeastSquares(seed=2, clients=5, dim=4), 2.0, np.eye(4)
    for lr in (0.02, 0.05):
        run = problem.fit(pf.Ditto(lr, lam=lam, personal_epochs=5), rounds=200, steps=5)
        x = run.server["w"].numpy()
        limit = [np.linalg.solve(H + lam * eye, b + lam * x) for H, b in zip(problem.H, problem.b, strict=True)]
        halves = [
            np.linalg.solve((1 - lr * lam) * H + lam * eye, (1 - lr * lam) * b + lam * x)
            for H, b in zip(problem.H, problem.b, strict=True)
        ]
        assert np.allclose(run.personal, limit, atol=1e-9)
        assert np.allclose(personal_models(problem, lr, lam, 400, 5, halves=True), halves, atol=1e-9)
        assert np.abs(np.subtract(limit, halves)).max() > 1e-3


def test_one_vector_each_way():
    problem = LeastSquares(seed=2, clients=5, dim=4)
    ledger = problem.fit(pf.Ditto(0.05), rounds=2, fraction=0.6).ledger
    assert (ledger[["down_bytes", "up_bytes"]] == 8 * problem.dim).all(axis=None)
