"""FedAMP and HeurFedAMP: weights digit for digit, the objective's optimality conditions, and the limits."""

import numpy as np
import pytest
import torch
from certify import certifies
from problems import LeastSquares, centres, fit_points

import polyfed as pf
from polyfed.algorithms.fedamp import heuristic, messages
from polyfed.base.errors import ConfigError

THREE = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]], dtype=torch.float64)


@certifies(pf.FedAMP, by="the definition, digit for digit")
def test_weights_of_three_clients():
    """Squared distances .4, 2 and .8; alpha = .5, sigma = 1: first row .597, .335, .068."""
    A = messages(THREE, 0.5, 1.0)
    assert np.allclose(A[0], [0.597, 0.335, 0.068], atol=5e-4)
    D = np.array([[0, 0.4, 2], [0.4, 0, 0.8], [2, 0.8, 0]])
    expected = 0.5 * np.exp(-D) * (1 - np.eye(3))
    expected += np.diag(1 - expected.sum(1))
    assert np.allclose(A, expected, atol=1e-14)


def attraction(W, sigma):
    """sum_{i<j} 1 - exp(-||w_i - w_j||^2 / sigma)."""
    return sum(
        1 - np.exp(-((W[i] - W[j]) ** 2).sum() / sigma) for i in range(len(W)) for j in range(i + 1, len(W))
    )  # fmt: skip


@certifies(pf.FedAMP, by="finite differences")
def test_mixing_is_a_gradient_step_of_the_attraction():
    """U = W - alpha/2 grad A(W), by finite differences of A: the norm is squared, and sigma divides twice."""
    W, sigma, alpha = np.random.default_rng(0).normal(size=(4, 3)), 2.0, 0.4
    gradient = np.zeros_like(W)
    for at in np.ndindex(*W.shape):
        e = np.zeros_like(W)
        e[at] = 1e-6
        gradient[at] = (attraction(W + e, sigma) - attraction(W - e, sigma)) / 2e-6
    U = messages(torch.as_tensor(W), alpha, sigma).numpy() @ W
    assert np.allclose(U, W - alpha / 2 * gradient, atol=1e-9)


@certifies(pf.FedAMP, by="optimality conditions")
@pytest.mark.parametrize("alpha", [None, 0.1])
def test_stationary_point_of_the_objective(alpha):
    """Exact local solves converge to grad f_i(w_i) + lam/2 grad_i A(W) = 0, f_i = 1/2 ||w - c_i||^2."""
    c = np.random.default_rng(1).normal(size=(5, 3))
    sigma, lam = 3.0, 0.8
    algorithm = pf.FedAMP(1.0, lam=lam, sigma=sigma, alpha=alpha)
    step = algorithm.step(5)
    algorithm = pf.FedAMP(1 / (1 + lam / step), lam=lam, sigma=sigma, alpha=alpha)  # one step solves it
    run = fit_points(centres(c), algorithm, rounds=300, dim=3)
    W = run.personal.numpy()
    K = np.exp(-((W[:, None] - W[None]) ** 2).sum(2) / sigma) / sigma
    pull = lam * (K[:, :, None] * (W[:, None] - W[None])).sum(1)
    assert np.abs(W - c + pull).max() < 1e-9
    assert np.abs(pull).max() > 0.05


@certifies(pf.FedAMP, by="identity as sigma falls")
def test_far_apart_it_is_local():
    """sigma far below the squared distances: nobody attracts anybody; lam = 0 leaves no pull to one's own past."""
    c = np.eye(4) * 10
    start = fit_points(centres(c), pf.Local(0.3), rounds=6, dim=4).personal
    run = fit_points(centres(c), pf.FedAMP(0.3, lam=0.0, sigma=1e-3), rounds=6, dim=4)
    # in the first round all models are equal, and so are their mixtures
    assert torch.allclose(run.personal, start, atol=1e-13)


def test_no_weight_is_negative():
    W = torch.randn(30, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 1e-3
    A = messages(W, 100.0 / 29, 100.0)
    assert (A >= -1e-15).all()
    assert torch.allclose(A.sum(1), torch.ones(30, dtype=torch.float64))
    with pytest.raises(ConfigError, match=r"at most sigma/\(n-1\) = 25"):
        fit_points(centres(np.eye(5)), pf.FedAMP(0.1, alpha=26.0), rounds=1, dim=5)


def test_training_starts_from_the_mixture():
    """One round after models are known: w_i = u_i - lr (u_i - c_i), in which the proximal term is zero."""
    c = np.random.default_rng(2).normal(size=(3, 2))
    W = torch.as_tensor(0.5 * c)  # after one step of 1/2 from zero
    algorithm = pf.FedAMP(0.5, sigma=2.0)
    run = fit_points(centres(c), algorithm, rounds=2, dim=2)
    U = messages(W, 1.0, 2.0).numpy() @ (0.5 * c)
    assert np.allclose(run.personal, U - 0.5 * (U - c), atol=1e-13)


def by_distance(W, alpha, sigma):
    """FedAMP's u_i, from the definition: sum_j xi_ij w_j with xi_ij = alpha exp(-||w_i - w_j||^2 / sigma) / sigma."""
    U = W.copy()
    for i in range(len(W)):
        for j in range(len(W)):
            U[i] += alpha / sigma * np.exp(-((W[i] - W[j]) ** 2).sum() / sigma) * (W[j] - W[i])
    return U


def by_cosine(W, sigma, own):
    """HeurFedAMP's u_i: `own` of w_i, the rest shared by exp(sigma cos(w_i, w_j))."""
    N = W / np.linalg.norm(W, axis=1, keepdims=True)
    E = np.exp(sigma * N @ N.T) * (1 - np.eye(len(W)))
    return own * W + (1 - own) * (E / E.sum(1, keepdims=True)) @ W


@certifies(pf.FedAMP, by="Algorithm 1 by hand, from u_i")
@certifies(pf.HeurFedAMP, by="the rounds by hand, from u_i")
@pytest.mark.parametrize(
    ("method", "mix"),
    [
        (pf.FedAMP(0.03, lam=3.0, sigma=2.0, alpha=0.25), lambda W: by_distance(W, 0.25, 2.0)),
        (pf.HeurFedAMP(0.03, lam=3.0, alpha=0.25, sigma=4.0, self_weight=0.3), lambda W: by_cosine(W, 4.0, 0.3)),
    ],
    ids=lambda m: getattr(m, "name", ""),
)
def test_rounds_in_numpy(method, mix):
    """Algorithm 1: local descent on f_i(w) + lam / (2 alpha) ||w - u_i||^2 from u_i, in steps too short to solve it.

    After so few steps the result still depends on where they began, and on lam / alpha = 12 as it could not on 3/4.
    """
    problem = LeastSquares(seed=4, clients=4, dim=3)
    W = np.zeros((4, 3))
    for t in range(3):
        U = mix(W) if t else W  # in the first round all models are equal
        W = U.copy()
        for _ in range(2):
            G = np.stack([problem.gradient(i, w) for i, w in enumerate(W)])
            W = W - 0.03 * (G + 3.0 / 0.25 * (W - U))
    assert np.abs(mix(W) - W).max() > 0.01
    assert np.allclose(problem.fit(method, rounds=3, steps=2).personal, W, atol=1e-13)


@certifies(pf.HeurFedAMP, by="the definition in numpy")
def test_heuristic_weights_of_three_clients():
    """Cosines .8, 0 and .6: softmax over the others, the rest for self."""
    expected = np.zeros((3, 3))
    C = np.array([[1, 0.8, 0], [0.8, 1, 0.6], [0, 0.6, 1]])
    for i in range(3):
        others = [j for j in range(3) if j != i]
        e = np.exp(5 * C[i, others])
        expected[i, others] = 0.7 * e / e.sum()
        expected[i, i] = 0.3
    assert np.allclose(heuristic(THREE, 5.0, 0.3), expected, atol=1e-14)


@certifies(pf.HeurFedAMP, by="identity")
def test_a_self_weight_of_one_is_local():
    c = np.random.default_rng(3).normal(size=(5, 3))
    run = fit_points(centres(c), pf.HeurFedAMP(0.3, lam=0.0, self_weight=1.0), rounds=5, dim=3)
    assert torch.allclose(run.personal, fit_points(centres(c), pf.Local(0.3), rounds=5, dim=3).personal, atol=1e-13)


@certifies(pf.HeurFedAMP, by="identity at sigma = 0, self_weight = 1/n")
def test_equal_weights_are_fedavg():
    """sigma = 0 and self_weight = 1/n: everybody starts from the mean of all models."""
    c = np.random.default_rng(3).normal(size=(5, 3))
    a = fit_points(centres(c), pf.HeurFedAMP(0.3, lam=0.0, sigma=0.0, self_weight=0.2), rounds=5, dim=3, local_steps=2)
    b = fit_points(centres(c), pf.FedAvg(0.3, weighted=False), rounds=5, dim=3, local_steps=2)
    assert torch.allclose(a.personal.mean(0), b.server["w"], atol=1e-13)


@pytest.mark.parametrize("algorithm", [pf.FedAMP(0.3), pf.HeurFedAMP(0.3)])
def test_a_lone_client_is_local(algorithm):
    run = fit_points(centres(np.ones((1, 3))), algorithm, rounds=4, dim=3)
    assert torch.allclose(run.personal, fit_points(centres(np.ones((1, 3))), pf.Local(0.3), rounds=4, dim=3).personal)


@pytest.mark.parametrize("algorithm", [pf.FedAMP(0.1), pf.HeurFedAMP(0.1)])
def test_one_vector_each_way(algorithm):
    ledger = fit_points(centres(np.eye(4)), algorithm, rounds=2, dim=4, fraction=0.5).ledger
    assert (ledger[["down_bytes", "up_bytes"]] == 8 * 4).all(axis=None)


@pytest.mark.parametrize("method", [pf.FedAMP(0.05), pf.HeurFedAMP(0.05)], ids=lambda m: m.name)
def test_absent_clients_are_mixed_in_as_the_server_last_saw_them(method):
    problem = LeastSquares(seed=1, clients=6, dim=3)
    run = problem.fit(method, rounds=4, steps=2)
    sent = method.downlink(run.server, run.trained.round(np.array([1, 4]))).each["u"]
    everyone = method.weights(run.server["w"]) @ run.server["w"]
    assert torch.allclose(sent, everyone[[1, 4]], atol=1e-12)
    alone = method.weights(run.server["w"][[1, 4]]) @ run.server["w"][[1, 4]]
    assert (sent - alone).abs().max() > 1e-4
