"""FedRep, FedPer, LG-FedAvg, FedBABU and FedBN: which part is shared, which never moves, and what is deployed."""

import copy
from dataclasses import fields

import numpy as np
import pytest
import torch
from certify import certifies
from problems import LeastSquares, fit_labels, labelled, two_layers
from torch import nn

import polyfed as pf
from polyfed.base.errors import ModelError
from polyfed.compute.layout import Layout

D, HIDDEN, CLIENTS = 4, 2, 5


@pytest.fixture(scope="module")
def problem():
    return LeastSquares(seed=3, clients=CLIENTS, dim=D)


def two_linear_layers():
    """y = h' B x: a body B [2, 4] and a head h [1, 2], without biases."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(D, HIDDEN, bias=False), nn.Linear(HIDDEN, 1, bias=False)).double()


def fit(problem, algorithm, rounds, **kwargs):
    settings = {"local_epochs": 1, "batch_size": None, "evaluate_every": 0, "loss": "mse"} | kwargs
    return pf.fit(two_linear_layers(), problem.federation, algorithm, rounds=rounds, **settings)


def split(w):
    """(B [.., 2, 4], h [.., 2]) of vectors [.., 10]."""
    w = np.asarray(w)
    return w[..., :8].reshape(*w.shape[:-1], 2, 4), w[..., 8:]


def gradients(problem, i, B, h):
    """Of mean (h' B x - y)^2 with respect to B and to h."""
    inner = problem.gradient(i, h @ B)
    return np.outer(h, inner), B @ inner


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
    lr, start = 0.02, two_linear_layers()
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


@pytest.mark.parametrize("algorithm", [pf.FedRep(0.02), pf.FedPer(0.02), pf.LGFedAvg(0.02)])
def test_who_was_never_picked_has_the_common_part(problem, algorithm):
    run = fit(problem, algorithm, 1, fraction=0.4)
    absent = sorted(set(range(CLIENTS)) - set(run.ledger["client"]))
    shared, w0 = algorithm.shared(run.trained.task.layout), run.trained.task.w0
    assert torch.equal(run.personal[absent][:, shared], run.server["w"].expand(len(absent), -1))
    assert torch.equal(run.personal[absent][:, ~shared], w0[~shared].expand(len(absent), -1))
    assert (run.server["w"] != w0[shared]).any()


@certifies(pf.FedBABU, by="bit for bit")
@pytest.mark.parametrize("tune", ["all", "head", "body"])
@pytest.mark.parametrize("rounds", [1, 7])
def test_the_common_head_never_moves(problem, rounds, tune):
    run = fit(problem, pf.FedBABU(0.02, tune=tune), rounds, batch_size=8, fraction=0.4)
    shared, w0 = run.server["shared"], run.trained.task.w0
    assert torch.equal(run.server["w"][~shared], w0[~shared])
    assert (run.server["w"][shared] != w0[shared]).all()


@pytest.mark.parametrize("method", [pf.FedAvgFT, pf.FedBABU])
def test_whoever_fine_tunes_from_the_last_round_on_deploys_what_always_doing_so_makes(problem, method):
    from_0, from_2, from_3 = (fit(problem, method(0.02, finetune_from=t), 3, local_epochs=2) for t in (0, 2, 3))
    assert (from_0.personal == from_2.personal).all()
    received = fit(problem, method(0.02), 2, local_epochs=2).server["w"]
    assert (from_3.personal == received).all()
    assert from_0.ledger["steps"].sum() > from_2.ledger["steps"].sum() > from_3.ledger["steps"].sum()


@pytest.mark.parametrize("method", [pf.FedRep, pf.FedPAC, pf.FedSLR])
def test_no_number_of_epochs_is_the_runs_local_work(method):
    names, how = {"head_epochs", "body_epochs", "personal_epochs"} & {f.name for f in fields(method)}, {"batch_size": 4}
    passes, steps = {"rounds": 2, "local_epochs": 2, **how}, {"rounds": 2, "local_steps": 3, **how}
    two, none, few = (
        pf.fit(two_layers(), labelled(), method(**dict.fromkeys(names, k)), evaluate_every=0, **work)
        for k, work in ((2, passes), (None, passes), (None, steps))
    )
    assert (two.personal == none.personal).all()
    assert (few.ledger["steps"] == 6).all()  # three of each of its two solves


@certifies(pf.FedBABU, by="Algorithm 1 in plain numpy")
def test_one_round_of_fedbabu(problem):
    """Body steps under the first head, and personal steps of everything, both from the common start."""
    lr, start = 0.02, two_linear_layers()
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


@certifies(pf.FedBN, by="torch.optim, client by client")
def test_all_but_normalisation_is_averaged():
    """The normalisation layer is "1.weight" and "1.bias": known by its type, not by "bn" in its name."""
    fed, start = labelled(), two_layers(norm=True)
    run = fit_labels(fed, pf.FedBN(0.1), model=two_layers(norm=True))
    clients = [copy.deepcopy(start) for _ in range(3)]
    for _ in range(3):
        for i, net in enumerate(clients):
            x, y = fed.train.client(i)
            for _ in range(2):
                net.zero_grad()
                nn.functional.cross_entropy(net(x.double()), y).backward()
                torch.optim.SGD(net.parameters(), lr=0.1).step()
        common = {k: torch.stack([net.state_dict()[k] for net in clients]).mean(0) for k in start.state_dict()}
        for net in clients:
            net.load_state_dict({k: v if k.startswith("1.") else common[k] for k, v in net.state_dict().items()})
    expected = torch.stack([Layout(net).flatten(net) for net in clients])
    assert torch.allclose(run.personal, expected, atol=1e-12)
    assert len({tuple(w) for w in expected[:, Layout(start).mask("norm")].tolist()}) == 3


@pytest.mark.parametrize("norm", [nn.LayerNorm(5), nn.GroupNorm(1, 5, affine=False), nn.Identity()])
def test_a_model_without_trained_normalisation_is_refused(norm):
    model = nn.Sequential(nn.Linear(4, 5), norm, nn.Linear(5, 3)).double()
    if isinstance(norm, nn.LayerNorm):
        assert np.isfinite(fit_labels(labelled(), pf.FedBN(0.1), model=model).personal.numpy()).all()
        return
    with pytest.raises(ModelError, match=r"found no normalisation layer among 0\.weight"):
        fit_labels(labelled(), pf.FedBN(0.1), model=model)
