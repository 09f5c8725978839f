"""FedBABU: the common head never moves, what is deployed is fitted to the common body, and FedAvg in the limit."""

import numpy as np
import pytest
import torch
from certify import certifies
from problems import LeastSquares
from torch import nn

import polyfed as pf
from polyfed.base.errors import ConfigError

D, HIDDEN, CLIENTS = 4, 2, 5


@pytest.fixture(scope="module")
def problem():
    return LeastSquares(seed=3, clients=CLIENTS, dim=D)


def two_layers():
    """y = h' B x: a body B [2, 4] and a head h [1, 2], without biases."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(D, HIDDEN, bias=False), nn.Linear(HIDDEN, 1, bias=False)).double()


def fit(problem, algorithm, rounds, **kwargs):
    settings = {"local_epochs": 1, "batch_size": None, "evaluate_every": 0, "loss": "mse"} | kwargs
    return pf.fit(two_layers(), problem.federation, algorithm, rounds=rounds, **settings)


def split(w):
    """(B [.., 2, 4], h [.., 2]) of vectors [.., 10]."""
    w = np.asarray(w)
    return w[..., :8].reshape(*w.shape[:-1], 2, 4), w[..., 8:]


def gradients(problem, i, B, h):
    """Of mean (h' B x - y)^2 with respect to B and to h."""
    inner = problem.gradient(i, h @ B)
    return np.outer(h, inner), B @ inner


@certifies(pf.FedBABU, by="identity")
@pytest.mark.parametrize("fraction", [1.0, 0.4])
def test_without_a_head_it_is_fedavg(problem, fraction):
    a = fit(problem, pf.FedBABU(0.02, head=""), 5, batch_size=8, fraction=fraction)
    b = fit(problem, pf.FedAvg(0.02), 5, batch_size=8, fraction=fraction)
    assert torch.allclose(a.server["w"], b.server["w"], atol=1e-13)


@certifies(pf.FedBABU, by="bit for bit")
@pytest.mark.parametrize("tune", ["all", "head", "body"])
@pytest.mark.parametrize("rounds", [1, 7])
def test_the_common_head_never_moves(problem, rounds, tune):
    run = fit(problem, pf.FedBABU(0.02, tune=tune), rounds, batch_size=8, fraction=0.4)
    shared, w0 = run.server["shared"], run.trained.task.w0
    assert torch.equal(run.server["w"][~shared], w0[~shared])
    assert (run.server["w"][shared] != w0[shared]).all()


@certifies(pf.FedBABU, by="Algorithm 1 in plain numpy")
def test_one_round(problem):
    """Body steps under the first head, and personal steps of everything, both from the common start."""
    lr, start = 0.02, two_layers()
    B0, h0 = start[0].weight.detach().numpy(), start[1].weight.detach().numpy()[0]
    run = fit(problem, pf.FedBABU(lr, finetune_epochs=3), 1, local_epochs=2)
    bodies, own = [], []
    for i in range(CLIENTS):
        B = B0.copy()
        for _ in range(2):
            B = B - lr * gradients(problem, i, B, h0)[0]
        bodies.append(B)
        B, h = B0.copy(), h0.copy()
        for _ in range(3):
            gB, gh = gradients(problem, i, B, h)
            B, h = B - lr * gB, h - lr * gh
        own.append(np.concatenate([B.ravel(), h]))
    mean = np.average(bodies, axis=0, weights=problem.federation.train.counts)
    assert np.allclose(split(run.server["w"])[0], mean, atol=1e-13)
    assert np.allclose(run.personal, own, atol=1e-13)


@certifies(pf.FedBABU, by="closed form")
def test_heads_are_fitted_to_the_common_body(problem):
    """tune="head": deployed is the body received last, with the least-squares head of each client's own."""
    before = split(fit(problem, pf.FedBABU(0.1, finetune_epochs=0), 2).server["w"])[0]
    B, h = split(fit(problem, pf.FedBABU(0.1, finetune_epochs=1500, tune="head"), 3).personal)
    assert np.allclose(B, before, atol=1e-14)
    best = [np.linalg.solve(before @ H @ before.T, before @ b) for H, b in zip(problem.H, problem.b, strict=True)]
    assert np.allclose(h, best, atol=1e-8)


def test_without_fine_tuning_it_deploys_what_it_received(problem):
    run = fit(problem, pf.FedBABU(0.02, finetune_epochs=0), 3)
    received = fit(problem, pf.FedBABU(0.02, finetune_epochs=0), 2).server["w"]
    assert torch.equal(run.personal, received.expand(CLIENTS, -1))


@certifies(pf.FedBABU, by="bytes from the layer's sizes")
def test_only_the_body_is_billed(problem):
    ledger = fit(problem, pf.FedBABU(0.02), 3, fraction=0.4).ledger
    assert len(ledger) == 6
    assert (ledger[["down_bytes", "up_bytes"]] == 8 * 8).all(axis=None)


def test_what_does_not_fit_is_refused(problem):
    with pytest.raises(ConfigError, match=r"algorithm.tune of FedBABU: found 'neck', expected all, head or body"):
        pf.FedBABU(tune="neck")
    with pytest.raises(ConfigError, match="no layer 'conv9'"):
        fit(problem, pf.FedBABU(0.02, head="conv9"), 1)
