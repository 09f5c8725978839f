"""Per-FedAvg: its meta-gradient against finite differences, its optimum in closed form, FedAvg at alpha = 0."""

import numpy as np
import pytest
import torch
from certify import certifies
from problems import LeastSquares
from torch import nn

import polyfed as pf
from polyfed.compute.batches import Batch
from polyfed.compute.task import Task

ORDERS = ("first", "hf", "exact")


@pytest.fixture(scope="module")
def problem():
    return LeastSquares(seed=3, clients=6, dim=5)


def network(kind):
    if kind == "mlp":
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double(), (2, 7, 4)
    return nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 2)).double(), (2, 7, 1, 3, 3)


@pytest.fixture(params=["mlp", "cnn"])
def small(request):
    """A task, two clients' weights and one batch for both; one client has two samples less."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, shape = network(request.param)
        task = Task(model, weight_decay=0.1)
        w = 0.7 * torch.randn(2, task.p, dtype=torch.float64)
        weight = torch.tensor([[1 / 7] * 7, [1 / 5] * 5 + [0.0] * 2], dtype=torch.float64)
        batch = Batch(torch.randn(*shape, dtype=torch.float64), torch.randint(2, (2, 7)), weight, [7, 5])
    return task, w, batch


def numerical(f, w, step=1e-6):
    """[s, p]: central differences of f: [s, p] -> [s], every coordinate of all clients at once."""
    columns = []
    for k in range(w.shape[1]):
        e = torch.zeros_like(w)
        e[:, k] = step
        columns.append((f(w + e) - f(w - e)) / (2 * step))
    return torch.stack(columns, 1)


@certifies(pf.PerFedAvg, by="of f(w - alpha grad f(w))")
def test_meta_gradient_by_finite_differences(small):
    """(I - alpha H(w)) grad f(w - alpha grad f(w)) is the gradient of f(w - alpha grad f(w)), on one batch."""
    task, w, batch = small
    alpha = 0.5
    expected = numerical(lambda w: task.gradient(w - alpha * task.gradient(w, batch)[0], batch)[1], w)
    exact = pf.PerFedAvg(alpha=alpha, order="exact").meta_gradient(task, w, batch, batch, batch)
    hf = pf.PerFedAvg(alpha=alpha, order="hf", delta=1e-4).meta_gradient(task, w, batch, batch, batch)
    first = pf.PerFedAvg(alpha=alpha, order="first").meta_gradient(task, w, batch, batch, batch)
    assert (exact - expected).abs().max() < 1e-8
    assert (hf - expected).abs().max() < 1e-7
    assert (first - expected).abs().max() > 1e-2


def test_hessian_vector_products(small):
    """Central differences of the gradient along v, of a network whose Hessian is not constant."""
    task, w, batch = small
    v = torch.randn(w.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    difference = (task.gradient(w + 1e-5 * v, batch)[0] - task.gradient(w - 1e-5 * v, batch)[0]) / 2e-5
    assert (task.hvp(w, v, batch) - difference).abs().max() < 1e-8


def test_hessian_vector_products_of_least_squares(problem):
    task = Task(problem.model(), "mse")
    X, y = (torch.as_tensor(a) for a in problem.data[0])
    v = torch.arange(5.0, dtype=torch.float64)[None]
    assert np.allclose(task.hvp(torch.zeros_like(v), v, Batch(X[None], y[None])), problem.H[0] @ v[0].numpy())


@certifies(pf.PerFedAvg, by="identity at alpha = 0")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("batch_size", [None, 8])
def test_without_adaptation_it_is_fedavg(problem, order, batch_size):
    """The gradient is taken at D' then: FedAvg on the outer batches; with full batches just FedAvg."""
    run = problem.fit(pf.PerFedAvg(0.02, alpha=0.0, order=order), rounds=4, batch_size=batch_size)
    assert torch.equal(run.personal[0], run.personal[1])
    if batch_size is None:
        same = problem.fit(pf.FedAvg(0.02, weighted=False), rounds=4)
        assert torch.allclose(run.server["w"], same.server["w"], atol=1e-14)


@certifies(pf.PerFedAvg, by="closed form on quadratics")
@pytest.mark.parametrize("order", ["hf", "exact"])
def test_optimum_of_the_meta_objective(problem, order):
    """min_w mean_i f_i((I - a H_i) w + a b_i): on quadratics sum_i A_i H_i (A_i w + a b_i) = sum_i A_i b_i."""
    a, eye = 0.05, np.eye(problem.dim)
    A = [eye - a * H for H in problem.H]
    pairs = list(zip(A, problem.H, problem.b, strict=True))
    optimum = np.linalg.solve(sum(M @ H @ M for M, H, _ in pairs), sum(M @ (b - a * H @ b) for M, H, b in pairs))
    run = problem.fit(pf.PerFedAvg(0.2, alpha=a, order=order), rounds=250, steps=1)
    assert np.allclose(run.server["w"], optimum, atol=1e-8)
    assert problem.error(run.server["w"]) > 1e-3
    expected = [w - a * problem.gradient(i, w) for i, w in enumerate([optimum] * problem.clients)]
    assert np.allclose(run.personal, np.stack(expected), atol=1e-7)


def test_first_order_has_its_own_limit(problem):
    """Without the Hessian: sum_i H_i (A_i w + a b_i) = sum_i b_i."""
    a, eye = 0.05, np.eye(problem.dim)
    left = sum(H @ (eye - a * H) for H in problem.H)
    limit = np.linalg.solve(left, sum(b - a * H @ b for H, b in zip(problem.H, problem.b, strict=True)))
    run = problem.fit(pf.PerFedAvg(0.2, alpha=a), rounds=250, steps=1)
    assert np.allclose(run.server["w"], limit, atol=1e-8)


@certifies(pf.PerFedAvg, by="by definition")
def test_the_deployed_model_is_one_step_away(problem):
    """From the model received in the last round, on all training data of the client."""
    before = problem.fit(pf.PerFedAvg(0.02, alpha=0.03), rounds=2).server["w"].numpy()
    run = problem.fit(pf.PerFedAvg(0.02, alpha=0.03), rounds=3)
    expected = [before - 0.03 * problem.gradient(i, before) for i in range(problem.clients)]
    assert np.allclose(run.personal, np.stack(expected), atol=1e-13)


@pytest.mark.parametrize("order", ORDERS)
def test_clients_of_few_samples_train(order):
    """A client smaller than one batch takes its step all the same, with all it has in each of the batches."""
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(3, 3)), rng.normal(size=3)
    fed = pf.Federation.from_arrays([(X, y)], test=[(X, y)])
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    run = pf.fit(model, fed, pf.PerFedAvg(0.01, alpha=0.02, order=order), rounds=1, batch_size=20, loss="mse")
    H, b = 2 * X.T @ X / 3, 2 * X.T @ y / 3
    v = H @ (0.02 * b) - b
    v = v if order == "first" else v - 0.02 * H @ v
    assert np.allclose(run.server["w"], -0.01 * v, atol=1e-10)


def test_the_batches_of_a_step_are_independent(monkeypatch):
    """D, D' and D'' of one step are three draws: no two hold the same samples, at any step of any client."""
    problem, seen = LeastSquares(seed=3, clients=6, dim=5), []
    meta = pf.PerFedAvg.meta_gradient

    def watched(self, task, w, *batches):
        if batches[0].x.shape[1] == 4:  # not the rehearsal's
            seen.append([{tuple(x) for x in rows.tolist()} for b in batches for rows in b.x])
        return meta(self, task, w, *batches)

    monkeypatch.setattr(pf.PerFedAvg, "meta_gradient", watched)
    problem.fit(pf.PerFedAvg(0.02, order="hf"), rounds=2, batch_size=4, workers=1)
    assert len(seen) >= 10
    for step in seen:
        inner, outer, curve = (step[k :: len(step) // 3][0] for k in (0, len(step) // 3, 2 * (len(step) // 3)))
        assert inner != outer != curve != inner


@pytest.mark.parametrize("order", ORDERS)
def test_fifty_samples_in_batches_of_twenty_are_three_steps(order, monkeypatch):
    """No order of the meta-gradient leaves a client out for want of three whole batches."""
    rng, calls = np.random.default_rng(0), []
    X, y = rng.normal(size=(50, 3)), rng.normal(size=50)
    fed = pf.Federation.from_arrays([(X, y)], test=[(X, y)])
    meta = pf.PerFedAvg.meta_gradient
    monkeypatch.setattr(pf.PerFedAvg, "meta_gradient", lambda *a: calls.append(a[3].x.shape[1]) or meta(*a))
    pf.fit(nn.Linear(3, 1), fed, pf.PerFedAvg(0.01, order=order), rounds=1, local_epochs=1, batch_size=20, loss="mse")
    assert calls[-3:] == [20, 20, 20]  # the last one is padded: 10 samples and weight zero
    assert set(calls[:-3]) == {8}  # the rehearsal's


def test_one_vector_each_way(problem):
    ledger = problem.fit(pf.PerFedAvg(0.02, order="hf"), rounds=2, fraction=0.5).ledger
    assert (ledger[["down_bytes", "up_bytes"]] == 8 * problem.dim).all(axis=None)
