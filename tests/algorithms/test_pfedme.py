"""pFedMe: both models in closed form on quadratics, its limit as the pull grows, and the aliasing of known code."""

import numpy as np
import pytest
import torch
from certify import certifies
from problems import LeastSquares

import polyfed as pf
from polyfed.base.errors import ConfigError
from polyfed.base.randomness import client_keys
from polyfed.compute.batches import Batches, Work
from polyfed.compute.split import Split
from polyfed.compute.task import Task


@pytest.fixture(scope="module")
def problem():
    return LeastSquares(seed=3, clients=6, dim=5)


LAM = 4.0
EXACT = {"personal_lr": 0.06, "inner_steps": 200, "lam": LAM}


def near(problem, i, w):
    """argmin f_i(theta) + lam/2 ||theta - w||^2."""
    return np.linalg.solve(problem.H[i] + LAM * np.eye(problem.dim), problem.b[i] + LAM * w)


@certifies(pf.PFedMe, by="closed form after one round")
def test_the_personal_model_is_the_proximal_point(problem):
    """After one round of exact inner solves from w_0 = 0; the norm is squared."""
    run = problem.fit(pf.PFedMe(0.05, **EXACT), rounds=1, steps=3)
    means = []
    for i in range(problem.clients):
        w = np.zeros(problem.dim)
        for _ in range(3):
            theta = near(problem, i, w)
            w = w - 0.05 * LAM * (w - theta)
        assert np.allclose(run.personal[i], theta, atol=1e-9)
        means.append(w)
    assert np.allclose(run.server["w"], np.mean(means, axis=0), atol=1e-9)


@certifies(pf.PFedMe, by="closed form of both models on quadratics")
def test_optimum_of_the_envelopes(problem):
    """w* solves mean_i lam (w - theta_i(w)) = 0; one local step a round does not drift."""
    eye = np.eye(problem.dim)
    inverse = [np.linalg.inv(H + LAM * eye) for H in problem.H]
    left = sum(eye - LAM * M for M in inverse)
    right = sum(M @ b for M, b in zip(inverse, problem.b, strict=True))
    optimum = np.linalg.solve(left, right)
    settings = EXACT | {"inner_steps": 60}
    run = problem.fit(pf.PFedMe(0.2, **settings), rounds=100, steps=1)
    assert np.allclose(run.server["w"], optimum, atol=1e-8)
    expected = np.stack([near(problem, i, optimum) for i in range(problem.clients)])
    assert np.allclose(run.personal, expected, atol=1e-8)


def test_the_personal_models_are_not_the_common_one(problem):
    run = problem.fit(pf.PFedMe(0.05, **EXACT), rounds=3)
    assert ((run.personal - run.server["w"]).norm(dim=1) > 1e-2).all()
    assert (run.server["w"] != 0).all()


@certifies(pf.PFedMe, by="identity as lam grows")
def test_a_stiff_pull_is_fedavg(problem):
    """lam (w - theta) -> grad f(w) as lam grows: FedAvg with the same step size, the error falling like 1 / lam."""
    target = problem.fit(pf.FedAvg(1e-6, weighted=False), rounds=3).server["w"]

    def gap(lam):
        algorithm = pf.PFedMe(1e-6, lam=lam, personal_lr=0.9 / lam, inner_steps=40)
        return float((problem.fit(algorithm, rounds=3).server["w"] - target).norm() / target.norm())

    a, b = gap(1e3), gap(1e4)
    assert b < 2e-3
    assert a / b == pytest.approx(10, rel=0.1)


@certifies(pf.PFedMe, by="the server's step")
@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
def test_beta_extrapolates(problem, beta):
    one, other = (problem.fit(pf.PFedMe(0.05, **EXACT, beta=b), rounds=1).server["w"] for b in (1.0, beta))
    assert torch.allclose(other, beta * one, atol=1e-14)  # from zero


@pytest.mark.parametrize(("lr", "lam"), [(0.25, 4.0), (0.1, 15.0), (1.0, 2.0)])
def test_a_step_that_reaches_the_personal_model_is_refused(lr, lam):
    """1 - lr lam is what is left of w_i - theta_i: nothing at 1, the other side of theta_i beyond."""
    with pytest.raises(
        ConfigError, match=rf"algorithm.lr of PFedMe: found {lr}, expected a number below 1 / lam = {1 / lam:.4g}"
    ):
        pf.PFedMe(lr, lam=lam)
    assert pf.PFedMe(0.99 / lam, lam=lam).lr < lr


def test_a_client_that_has_finished_stays_where_it_is():
    """Each client ends where it ends alone, also where its neighbours take more steps and stand behind it."""
    rng, sizes = np.random.default_rng(0), (2, 9, 5)
    split = Split.of([(torch.tensor(rng.normal(size=(k, 3))), torch.tensor(rng.integers(0, 2, k))) for k in sizes])
    task, keys = Task(torch.nn.Linear(3, 2).double()), client_keys(["a", "b", "c"])
    start = torch.tensor(rng.normal(size=(3, task.p)))

    def trained(at):
        data = Batches(split, np.array(at), keys[at], Work(epochs=2, batch_size=2), 0, 0)
        private, up = pf.PFedMe(0.05, lam=LAM).local_update(task, {}, {"w": start[at]}, data, None)
        return torch.stack([private["w"], up["w"]], dim=1)

    assert torch.allclose(trained([0, 1, 2]), torch.cat([trained([i]) for i in range(3)]), atol=1e-12)


def test_one_vector_each_way(problem):
    ledger = problem.fit(pf.PFedMe(0.02), rounds=2, fraction=0.5).ledger
    assert (ledger[["down_bytes", "up_bytes"]] == 8 * problem.dim).all(axis=None)
