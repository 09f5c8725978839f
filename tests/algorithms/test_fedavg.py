"""FedAvg, FedProx, FedAvg-FT, Local and Ditto against closed forms on quadratics and their algorithms in numpy."""

import numpy as np
import pytest
import torch
from certify import certifies
from problems import LeastSquares

import polyfed as pf


@pytest.fixture(scope="module")
def problem():
    return LeastSquares(seed=3, clients=6, dim=5)


def fixed_point(problem, lr, steps, weights):
    """FedAvg's limit: sum_i p_i (I - (I - lr H_i)^k) (w - w_i*) = 0, from its definition on quadratics."""
    A = [np.eye(problem.dim) - np.linalg.matrix_power(np.eye(problem.dim) - lr * H, steps) for H in problem.H]
    own = [np.linalg.solve(H, b) for H, b in zip(problem.H, problem.b, strict=True)]
    left = sum(p * Ai for p, Ai in zip(weights, A, strict=True))
    right = sum(p * Ai @ w for p, Ai, w in zip(weights, A, own, strict=True))
    return np.linalg.solve(left, right)


@certifies(pf.FedAvg, by="identity with centralised descent")
def test_one_full_step_is_gradient_descent(problem):
    counts = np.array([len(y) for _, y in problem.data])
    p, w = counts / counts.sum(), np.zeros(problem.dim)
    for _ in range(7):
        w -= 0.05 * sum(pi * problem.gradient(i, w) for i, pi in enumerate(p))
    run = problem.fit(pf.FedAvg(0.05), rounds=7, steps=1)
    assert torch.allclose(run.server["w"], torch.as_tensor(w), atol=1e-13)


@certifies(pf.FedAvg, by="closed form of its biased limit")
@pytest.mark.parametrize("weighted", [True, False])
def test_drift_has_the_predicted_limit(problem, weighted):
    """With k > 1 steps FedAvg does not reach the optimum; where it stops is known in closed form."""
    counts = np.array([len(y) for _, y in problem.data])
    p = counts / counts.sum() if weighted else np.full(6, 1 / 6)
    run = problem.fit(pf.FedAvg(0.05, weighted=weighted), rounds=400)
    expected = fixed_point(problem, 0.05, 5, p)
    assert np.allclose(run.server["w"], expected, atol=1e-10)
    assert problem.error(run.server["w"]) > 1e-3


@certifies(pf.FedProx, by="closed form of the proximal step")
def test_fedprox_solves_its_subproblem(problem):
    """With many steps each client returns argmin f_i + mu/2 ||w - x||^2 = (H_i + mu)^-1 (b_i + mu x)."""
    mu, eye = 3.0, np.eye(problem.dim)
    counts = np.array([len(y) for _, y in problem.data])
    x = np.zeros(problem.dim)
    for _ in range(2):
        solved = [np.linalg.solve(H + mu * eye, b + mu * x) for H, b in zip(problem.H, problem.b, strict=True)]
        x = np.average(solved, axis=0, weights=counts)
    run = problem.fit(pf.FedProx(0.05, mu=mu), rounds=2, steps=400)
    assert np.allclose(run.server["w"], x, atol=1e-10)


@certifies(pf.Local, by="closed form of least squares")
def test_local_reaches_each_clients_own_solution(problem):
    run = problem.fit(pf.Local(0.05), rounds=60, steps=20)
    own = np.stack([np.linalg.solve(H, b) for H, b in zip(problem.H, problem.b, strict=True)])
    assert np.allclose(run.personal, own, atol=1e-9)


@certifies(pf.Ditto, by="closed form")
def test_dittos_personal_models_solve_their_problem(problem):
    """v_i -> argmin f_i(v) + lam/2 ||v - x||^2 = (H_i + lam)^-1 (b_i + lam x), x FedAvg's limit: the norm squared."""
    lam, eye = 2.0, np.eye(problem.dim)
    run = problem.fit(pf.Ditto(0.05, lam=lam, personal_epochs=5), rounds=300)
    x = run.server["w"].numpy()
    expected = [np.linalg.solve(H + lam * eye, b + lam * x) for H, b in zip(problem.H, problem.b, strict=True)]
    assert np.allclose(run.personal, np.stack(expected), atol=1e-9)


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


@certifies(pf.FedAvgFT, by="closed form")
def test_fine_tuning_is_gradient_descent_from_the_common_model(problem):
    """w_i* + (I - lr H_i)^k (w - w_i*), with w the common model received in the last round."""
    w = problem.fit(pf.FedAvg(0.02), rounds=2).server["w"].numpy()
    run = problem.fit(pf.FedAvgFT(0.02, finetune_epochs=7, finetune_lr=0.05), rounds=3)
    for i, (H, b) in enumerate(zip(problem.H, problem.b, strict=True)):
        own = np.linalg.solve(H, b)
        expected = own + np.linalg.matrix_power(np.eye(5) - 0.05 * H, 7) @ (w - own)
        assert np.allclose(run.personal[i], expected, atol=1e-12)


@certifies(pf.Local, by="an empty ledger")
def test_local_sends_nothing(problem):
    run = problem.fit(pf.Local(0.05), rounds=2)
    assert run.ledger[["down_bytes", "up_bytes", "exchanges"]].to_numpy().sum() == 0
