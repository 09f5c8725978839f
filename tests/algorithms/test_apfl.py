"""APFL: its two ends are FedAvg and Local, its limit solves the client's problem, and one adaptive round by hand."""

from functools import partial

import numpy as np
import pytest
import torch
from certify import certifies
from problems import LeastSquares

import polyfed as pf


@pytest.fixture(scope="module")
def problem():
    return LeastSquares(seed=3, clients=6, dim=5)


def rows(run):
    return run.trained.engine.rows.gather(torch.arange(run.trained.n))


@certifies(pf.APFL, by="identity at alpha = 0")
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_share_zero_is_fedavg(problem, fraction):
    a = problem.fit(pf.APFL(0.02, alpha=0.0), rounds=6, fraction=fraction, batch_size=8)
    b = problem.fit(pf.FedAvg(0.02, weighted=False), rounds=6, fraction=fraction, batch_size=8)
    assert torch.allclose(a.personal, b.personal, atol=1e-13)


@certifies(pf.APFL, by="identity at alpha = 1")
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_share_one_is_local(problem, fraction):
    a = problem.fit(pf.APFL(0.02, alpha=1.0), rounds=6, fraction=fraction, batch_size=8)
    b = problem.fit(pf.Local(0.02), rounds=6, fraction=fraction, batch_size=8)
    assert torch.allclose(a.personal, b.personal, atol=1e-13)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_the_common_model_is_fedavg(problem, alpha, monkeypatch):
    """Stepped once per batch, and untouched by the personal part. APFL takes torch's gradients, so FedAvg does here."""
    monkeypatch.setenv("POLYFED_NATIVE", "0")
    a = problem.fit(pf.APFL(0.02, alpha=alpha, adaptive=alpha == 0.3), rounds=6)
    b = problem.fit(pf.FedAvg(0.02, weighted=False), rounds=6)
    assert torch.equal(a.server["w"], b.server["w"])


@certifies(pf.APFL, by="closed form of the limit")
def test_the_mixture_solves_the_clients_problem(problem):
    """One local step a round: w converges to the common optimum, and alpha v + (1 - alpha) w to argmin f_i."""
    run = problem.fit(pf.APFL(0.1, alpha=0.5), rounds=600, steps=1)
    assert problem.error(run.server["w"]) < 1e-9
    own = np.stack([np.linalg.solve(H, b) for H, b in zip(problem.H, problem.b, strict=True)])
    assert np.allclose(run.personal, own, atol=1e-8)
    assert np.allclose(rows(run)["v"], 2 * own - run.server["w"].numpy(), atol=1e-7)


@certifies(pf.APFL, by="Algorithm 1 step by step")
def test_one_adaptive_round_in_numpy(problem):
    """All three steps from the values before them."""
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


def mlp():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()


@certifies(pf.APFL, by="autograd on a network")
def test_parameters_are_mixed_not_outputs(problem):
    """On an MLP the two differ, in what is trained and in what is deployed: two full-batch steps by autograd."""
    lr, share, net = 0.1, 0.4, mlp()
    run = pf.fit(
        net, problem.federation, pf.APFL(lr, alpha=share), rounds=1, local_steps=2, batch_size=None, loss="mse"
    )
    start = torch.nn.utils.parameters_to_vector(net.parameters()).detach()

    def output(w, x):
        vector, parts = w, {}
        for name, t in net.named_parameters():
            parts[name], vector = vector[: t.numel()].view_as(t), vector[t.numel() :]
        return torch.func.functional_call(net, parts, x)

    def of_parameters(w, v, x):
        return output(share * v + (1 - share) * w, x)

    def of_outputs(w, v, x):
        return share * output(v, x) + (1 - share) * output(w, x)

    def slope(w, answer, x, y):
        """With respect to w, of the loss of answer(w, x)."""
        w = w.clone().requires_grad_()
        return torch.autograd.grad((answer(w, x) - y[:, None]).square().mean(), w)[0]

    def trained(mix_parameters):
        """v [n, p] and w [n, p] after the steps."""
        vs, ws = [], []
        for x, y in (map(torch.as_tensor, pair) for pair in problem.data):
            v, w = start.clone(), start.clone()
            for _ in range(2):
                step = slope(v, partial(of_parameters if mix_parameters else of_outputs, w), x, y)  # times alpha
                v, w = v - lr * step, w - lr * slope(w, output, x, y)
            vs.append(v)
            ws.append(w)
        return torch.stack(vs), torch.stack(ws)

    (v, w), (other, _) = trained(True), trained(False)
    assert torch.allclose(rows(run)["v"], v, atol=1e-12)
    assert torch.allclose(run.personal, share * v + (1 - share) * w.mean(0), atol=1e-12)
    assert (v - other).abs().max() > 1e-3
    x = torch.as_tensor(problem.data[0][0])
    deployed, logits = run.model(0)(x), of_outputs(w.mean(0), v[0], x)
    assert torch.allclose(deployed, output(run.personal[0], x), atol=1e-12)
    assert (deployed - logits).abs().max() > 1e-4


def test_one_vector_each_way(problem):
    ledger = problem.fit(pf.APFL(0.02, adaptive=True), rounds=2, fraction=0.5).ledger
    assert (ledger[["down_bytes", "up_bytes"]] == 8 * problem.dim).all(axis=None)
