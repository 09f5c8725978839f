"""APFL, pFedMe and Per-FedAvg: personal models by their algorithms in numpy, closed forms and finite differences."""

import numpy as np
import pytest
import torch
from certify import certifies
from problems import LeastSquares
from torch import nn

import polyfed as pf
from polyfed.base.randomness import client_keys
from polyfed.compute.batches import Batch, Batches, Work
from polyfed.compute.split import Split
from polyfed.compute.task import Task


@pytest.fixture(scope="module")
def problem():
    return LeastSquares(seed=3, clients=6, dim=5)


def rows(run):
    return run.trained.engine.rows.gather(torch.arange(run.trained.n))


@certifies(pf.APFL, by="Algorithm 1 step by step")
def test_one_adaptive_round_in_numpy(problem):
    lr = 0.05
    run = problem.fit(pf.APFL(lr, alpha=0.4, adaptive=True), rounds=2, steps=4)
    n, x = problem.clients, np.zeros(problem.dim)
    v, alpha = np.zeros((n, problem.dim)), np.full(n, 0.4)
    for _ in range(2):
        w = np.stack([x] * n)
        for i in range(n):
            for _ in range(4):
                slope = problem.gradient(i, alpha[i] * v[i] + (1 - alpha[i]) * w[i])
                share = alpha[i] - lr * (v[i] - w[i]) @ slope
                w_new = w[i] - lr * problem.gradient(i, w[i])
                v[i] = v[i] - lr * alpha[i] * slope
                w[i], alpha[i] = w_new, np.clip(share, 0, 1)
        x = w.mean(0)
    assert np.allclose(run.server["w"], x, atol=1e-12)
    assert np.allclose(rows(run)["v"], v, atol=1e-12)
    assert np.allclose(rows(run)["alpha"][:, 0], alpha, atol=1e-12)
    assert len(set(alpha)) > 1
    assert np.allclose(run.personal, alpha[:, None] * v + (1 - alpha[:, None]) * x, atol=1e-12)


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


@certifies(pf.PFedMe, by="the server's step")
@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
def test_beta_extrapolates(problem, beta):
    one, other = (problem.fit(pf.PFedMe(0.05, **EXACT, beta=b), rounds=1).server["w"] for b in (1.0, beta))
    assert torch.allclose(other, beta * one, atol=1e-14)  # from zero


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


ORDERS = ("first", "hf", "exact")


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
