"""FedRep, FedPer and LG-FedAvg: which part is shared, what is billed for it, and identities in the limits."""

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


@certifies(pf.FedRep, by="identity")
@pytest.mark.parametrize("fraction", [1.0, 0.4])
def test_without_a_head_fedrep_is_fedavg(problem, fraction):
    a = fit(problem, pf.FedRep(0.02, body_epochs=3, head=""), 5, fraction=fraction)
    b = fit(problem, pf.FedAvg(0.02, weighted=False), 5, fraction=fraction, local_epochs=3)
    assert torch.allclose(a.personal, b.personal, atol=1e-13)


@certifies(pf.FedPer, by="identity")
@pytest.mark.parametrize("fraction", [1.0, 0.4])
def test_without_a_head_fedper_is_fedavg(problem, fraction):
    a = fit(problem, pf.FedPer(0.02, head=""), 5, fraction=fraction, batch_size=8)
    b = fit(problem, pf.FedAvg(0.02, weighted=False), 5, fraction=fraction, batch_size=8)
    assert torch.allclose(a.personal, b.personal, atol=1e-13)


class Idle(nn.Sequential):
    """The two layers, and a third that has no influence on the output."""

    def __init__(self):
        super().__init__(*two_layers(), nn.Linear(1, 1, bias=False).double())

    def forward(self, x):
        y = self[1](self[0](x))
        return y + 0 * self[2](y)


@certifies(pf.FedPer, by="identity")
def test_with_everything_personal_fedper_is_local(problem):
    """Everything that counts: of a shared layer without influence nothing can be learnt from others."""
    settings = {"rounds": 5, "batch_size": 8, "fraction": 0.4, "loss": "mse"}
    a, b = (pf.fit(Idle(), problem.federation, m, **settings) for m in (pf.FedPer(0.02, head="0 1"), pf.Local(0.02)))
    assert torch.allclose(a.personal[:, :10], b.personal[:, :10], atol=1e-13)
    assert (a.ledger[["down_bytes", "up_bytes"]] == 8).all(axis=None)


@pytest.mark.parametrize("algorithm", [pf.FedPer(), pf.FedRep(), pf.FedBABU(), pf.LGFedAvg(top="")])
def test_sharing_nothing_is_refused_before_training(problem, algorithm, tmp_path):
    with pytest.raises(ConfigError, match=r"would share nothing .*\(weight, bias\) stays with the client") as found:
        pf.fit(nn.Linear(D, 1), problem.federation, algorithm, rounds=1, loss="mse", out=tmp_path / "run")
    assert "\n" not in str(found.value)
    assert not (tmp_path / "run").exists()


@certifies(pf.LGFedAvg, by="identity")
def test_with_all_layers_shared_lg_is_fedavg(problem):
    a = fit(problem, pf.LGFedAvg(0.02, top="0 1"), 5, batch_size=8)
    b = fit(problem, pf.FedAvg(0.02, weighted=False), 5, batch_size=8)
    assert torch.allclose(a.personal, b.personal, atol=1e-13)


@certifies(pf.LGFedAvg, by="which end is common")
def test_lg_shares_the_top_layer(problem):
    """After training all clients have one head and bodies of their own; with FedPer it is the other way round."""
    B, h = split(fit(problem, pf.LGFedAvg(0.02), 5).personal)
    assert (h == h[0]).all()
    assert all(np.abs(B[i] - B[0]).max() > 1e-3 for i in range(1, CLIENTS))
    B, h = split(fit(problem, pf.FedPer(0.02), 5).personal)
    assert (B == B[0]).all()
    assert all(np.abs(h[i] - h[0]).max() > 1e-3 for i in range(1, CLIENTS))


@certifies(pf.FedRep, by="Algorithm 1 in plain numpy")
def test_one_round_of_fedrep(problem):
    """Head first with the received body, then the body with the new head; deployed: new body, new head."""
    lr, start = 0.02, two_layers()
    B0, h0 = start[0].weight.detach().numpy(), start[1].weight.detach().numpy()[0]
    bodies, heads = [], []
    for i in range(CLIENTS):
        B, h = B0.copy(), h0.copy()
        for _ in range(4):
            h = h - lr * gradients(problem, i, B, h)[1]
        for _ in range(2):
            B = B - lr * gradients(problem, i, B, h)[0]
        bodies.append(B)
        heads.append(h)
    B, h = split(fit(problem, pf.FedRep(lr, head_epochs=4, body_epochs=2), 1).personal)
    assert np.allclose(h, heads, atol=1e-13)
    assert np.allclose(B, np.mean(bodies, axis=0), atol=1e-13)  # uniform mean


def own_heads(problem, B):
    """argmin_h mean (h' B x - y)^2 for each client."""
    return [np.linalg.solve(B @ H @ B.T, B @ b) for H, b in zip(problem.H, problem.b, strict=True)]


@certifies(pf.FedRep, by="the heads in closed form")
def test_heads_are_least_squares_fits(problem):
    """With a frozen body each head solves its own least-squares problem, in closed form."""
    B, h = split(fit(problem, pf.FedRep(0.1, head_epochs=1500, body_epochs=0), 1).personal)
    assert np.allclose(B, two_layers()[0].weight.detach().numpy())
    assert np.allclose(h, own_heads(problem, B[0]), atol=1e-8)


@certifies(pf.FedPer, pf.FedRep, pf.LGFedAvg, by="bytes from the layer's sizes")
@pytest.mark.parametrize(
    ("algorithm", "numbers"),
    [(pf.FedRep(0.02), 8), (pf.FedPer(0.02), 8), (pf.LGFedAvg(0.02), 2)],
)
def test_only_the_shared_part_is_billed(problem, algorithm, numbers):
    ledger = fit(problem, algorithm, 3, fraction=0.4).ledger
    assert len(ledger) == 6
    assert (ledger[["down_bytes", "up_bytes"]] == 8 * numbers).all(axis=None)


@pytest.mark.parametrize("algorithm", [pf.FedRep(0.02), pf.FedPer(0.02), pf.LGFedAvg(0.02)])
def test_who_was_never_picked_has_the_common_part(problem, algorithm):
    run = fit(problem, algorithm, 1, fraction=0.4)
    absent = sorted(set(range(CLIENTS)) - set(run.ledger["client"]))
    shared, w0 = algorithm.shared(run.trained.task.layout), run.trained.task.w0
    assert torch.equal(run.personal[absent][:, shared], run.server["w"].expand(len(absent), -1))
    assert torch.equal(run.personal[absent][:, ~shared], w0[~shared].expand(len(absent), -1))
    assert (run.server["w"] != w0[shared]).any()


def test_an_unknown_layer_is_named(problem):
    with pytest.raises(ConfigError, match="no layer 'conv9'"):
        fit(problem, pf.FedPer(0.02, head="conv9"), 1)
