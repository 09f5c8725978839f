"""SCAFFOLD: the exact optimum under drift, its variates against their definition, and the traps of known code."""

import numpy as np
import pytest
import torch
from certify import certifies
from problems import LeastSquares

import polyfed as pf


@pytest.fixture(scope="module")
def problem():
    return LeastSquares(seed=1, clients=8, dim=6)


@certifies(pf.Scaffold, by="the centralised optimum, both options")
@pytest.mark.parametrize("option", [1, 2])
def test_exact_optimum_under_drift(problem, option):
    """Full-batch SCAFFOLD converges to the optimum of the mean loss, where FedAvg with the same steps stalls."""
    run = problem.fit(pf.Scaffold(0.02, option=option), rounds=300)
    assert problem.error(run.server["w"]) < 1e-10
    stalled = problem.fit(pf.FedAvg(0.02, weighted=False), rounds=300)
    assert problem.error(stalled.server["w"]) > 1e-3


@pytest.mark.parametrize("option", [1, 2])
def test_exact_optimum_with_half_of_the_clients(problem, option):
    run = problem.fit(pf.Scaffold(0.02, option=option), rounds=600, fraction=0.5)
    assert problem.error(run.server["w"]) < 1e-6


@certifies(pf.Scaffold, by="by definition")
@pytest.mark.parametrize("option", [1, 2])
def test_variates_at_the_optimum_are_the_clients_gradients(problem, option):
    """c_i -> grad f_i(w*) and c -> 0: wrong sign, scale or step count would show here."""
    run = problem.fit(pf.Scaffold(0.02, option=option), rounds=300)
    expected = np.stack([problem.gradient(i, problem.optimum) for i in range(problem.clients)])
    ci = run.trained.engine.rows.gather(torch.arange(problem.clients))["c"]
    assert np.allclose(ci, expected, atol=1e-8)
    assert np.allclose(run.server["c"], 0, atol=1e-9)


def test_the_servers_variate_is_the_mean_of_all_clients(problem):
    """c = (1/n) sum over all n clients, whoever took part (division by n, not by the cohort)."""
    run = problem.fit(pf.Scaffold(0.02), rounds=7, fraction=0.5)
    ci = run.trained.engine.rows.gather(torch.arange(problem.clients))["c"]
    assert torch.allclose(run.server["c"], ci.mean(0), atol=1e-13)


@certifies(pf.Scaffold, by="the definition of (4)")
def test_option_two_is_the_mean_of_the_gradients_used(problem):
    """After round one (all variates zero) c_i is the mean of the k gradients along plain descent."""
    run = problem.fit(pf.Scaffold(0.02), rounds=1, steps=4)
    ci = run.trained.engine.rows.gather(torch.arange(problem.clients))["c"]
    for i in range(problem.clients):
        w, seen = np.zeros(problem.dim), []
        for _ in range(4):
            seen.append(problem.gradient(i, w))
            w = w - 0.02 * seen[-1]
        assert np.allclose(ci[i], np.mean(seen, axis=0), atol=1e-12)


def test_option_one_is_the_gradient_at_the_start(problem):
    run = problem.fit(pf.Scaffold(0.02, option=1), rounds=1, steps=4)
    ci = run.trained.engine.rows.gather(torch.arange(problem.clients))["c"]
    expected = np.stack([problem.gradient(i, np.zeros(problem.dim)) for i in range(problem.clients)])
    assert np.allclose(ci, expected, atol=1e-12)


@certifies(pf.Scaffold, by="identity with FedAvg")
def test_identical_clients_do_not_drift():
    """With the same data everywhere the corrections cancel: SCAFFOLD is FedAvg."""
    one = LeastSquares(seed=5, clients=1, dim=4)
    one.data, one.clients = one.data * 3, 3
    one.federation = pf.Federation.from_arrays(one.data, test=one.data)
    a = one.fit(pf.Scaffold(0.05), rounds=6)
    b = one.fit(pf.FedAvg(0.05), rounds=6)
    assert torch.allclose(a.server["w"], b.server["w"], atol=1e-12)


def test_a_client_smaller_than_a_batch_has_its_own_number_of_steps():
    """Option II divides by the client's own steps: with unequal clients c_i is still a mean of gradients."""
    rng = np.random.default_rng(0)
    data = [(rng.normal(size=(n, 3)), rng.normal(size=n)) for n in (4, 50)]
    fed = pf.Federation.from_arrays(data, test=data)
    model = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    run = pf.fit(model, fed, pf.Scaffold(0.01), rounds=1, batch_size=10, loss="mse", evaluate_every=0)
    X, y = data[0]
    gradient = -2 * X.T @ y / 4  # one step, from zero, on all it has
    assert np.allclose(run.trained.engine.rows.gather(torch.tensor([0]))["c"][0], gradient, atol=1e-12)


@pytest.mark.parametrize("option", [1, 2])
def test_the_servers_step_scales_the_models_move_alone(option):
    """One round from the same start: x moves by server_lr times the mean change, c and the c_i as without."""
    problem = LeastSquares(seed=2, clients=5, dim=4)
    whole, half = (problem.fit(pf.Scaffold(0.02, option=option, server_lr=s), rounds=1, steps=3) for s in (1.0, 0.5))
    assert whole.server["w"].abs().max() > 0.01
    assert torch.allclose(half.server["w"], whole.server["w"] / 2, atol=1e-15)  # the start is zero
    assert torch.equal(half.server["c"], whole.server["c"])
