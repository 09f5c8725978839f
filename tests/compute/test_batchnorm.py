"""BatchNorm with statistics in the vector: torch's own numbers, and a method says where they stay."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polyfed as pf
from polyfed.base.errors import ModelError
from polyfed.models import with_statistics

LR = 0.1
RNG = np.random.default_rng(0)


def net(momentum=LR):
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(6, momentum=momentum)
    return nn.Sequential(nn.Linear(4, 6, bias=False), norm, nn.Tanh(), nn.Linear(6, 3)).double()


def site(shift):
    x = RNG.normal(size=(24, 4)) + shift
    return x, (x - shift)[:, :3].argmax(1)


FED = pf.Federation.from_arrays([site(s) for s in (-3, 0, 3)], test_fraction=0.25)


def fitted(method, model=None, **settings):
    how = {"rounds": 2, "batch_size": None, "local_steps": 5, "dtype": torch.float64} | settings
    return pf.fit(with_statistics(net()) if model is None else model, FED, method, **how)


def by_torch(i, steps, model, optimizer=torch.optim.SGD, clip=None, pull=0.0, **settings):
    """A client's model, and its statistics, by torch's own layers and optimisers. pull: to where it began"""
    (x, y), start = FED.train.client(i), [q.detach().clone() for q in model.parameters()]
    taker = optimizer(model.parameters(), lr=0.03, **settings)
    for _ in range(steps):
        model.zero_grad()
        F.cross_entropy(model(x.double()), y).backward()
        for q, at in zip(model.parameters(), start, strict=True):
            q.grad += pull * (q.detach() - at)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        taker.step()
    return model


def assert_equal(found, model):
    for name, t in model.state_dict().items():
        if name in found:
            torch.testing.assert_close(found[name], t.to(found[name].dtype), rtol=0, atol=1e-12)


ADAM, ADAMW = torch.optim.Adam, torch.optim.AdamW
TORCH = {  # settings of a run -> those of torch
    "sgd": ({}, {}),
    "decay": ({"weight_decay": 0.1}, {"weight_decay": 0.1}),
    "momentum": ({"optimizer": "momentum"}, {"momentum": 0.9}),
    "adam": ({"optimizer": "adam"}, {"optimizer": ADAM}),
    "adam and decay": ({"optimizer": "adam", "weight_decay": 0.1}, {"optimizer": ADAM, "weight_decay": 0.1}),
    "adamw": ({"optimizer": "adamw", "weight_decay": 0.1}, {"optimizer": ADAMW, "weight_decay": 0.1}),
    "clipped": ({"clip_norm": 0.05}, {"clip": 0.05}),
}


@pytest.mark.parametrize("momentum", [0.1, 0.37, None], ids=str)
@pytest.mark.parametrize(("ours", "theirs"), TORCH.values(), ids=TORCH)
def test_statistics_move_as_torch_s_own_whatever_takes_the_steps(ours, theirs, momentum):
    """Weights too; steps of .03 are no momentum of .1."""
    run = fitted(pf.Local(lr=0.03), with_statistics(net(momentum=momentum)), rounds=1, local_steps=10, **ours)
    for i in range(FED.n):
        model = by_torch(i, 10, net(momentum), **theirs)
        assert_equal(run.model(i).state_dict(), model)
        x, y = FED.test.client(i)
        own = float((model.eval()(x.double()).argmax(1) == y).double().mean())
        assert run.clients.test_accuracy[i] == own


SAME = RNG.normal(size=(24, 4)) * 2 + 3
FIRST = pf.Federation.from_arrays(
    [(SAME, (SAME @ RNG.normal(size=(4, 3))).argmax(1)) for _ in range(3)], classes=3, test_fraction=0.0
)
BATCH = torch.tensor(SAME.mean(0)), torch.tensor(SAME.var(0, ddof=1))
METHODS = [
    pf.FedAvg(), pf.FedProx(), pf.Scaffold(), pf.FedDyn(), pf.FedAvgM(), pf.FedAdagrad(), pf.FedAdam(), pf.FedYogi(),
    pf.FedNova(), pf.FedExP(averaged=False), pf.FedLin(), pf.FedTrack(), pf.FedCET(), pf.FedSLR(), pf.FPFC(), pf.GPGD(),
    pf.LPGD(), pf.Ditto(), pf.APFL(), pf.APFL(adaptive=True), pf.PFedMe(), pf.PerFedAvg(), pf.FedALA(), pf.FedAS(),
    pf.FedDBE(), pf.FedRoD(), pf.MOON(), pf.IFCA(), pf.FedSoft(), pf.FedSpa(), pf.FedBuff(),
    pf.FedRep(), pf.FedPAC(), pf.FedBN(),
]  # fmt: skip


@pytest.mark.parametrize("how", [{}, {"optimizer": "adam", "weight_decay": 0.1, "clip_norm": 0.1}], ids=["sgd", "adam"])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_a_method_moves_them_by_whole_passes_and_by_nothing_else(method, how):
    """First inputs are the same everywhere: after k passes b + .9^k (start - b), whatever pulls and servers do."""
    if how and method.needs.plain_sgd:
        pytest.skip("takes steps of its own")
    torch.manual_seed(0)
    model = with_statistics(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)))
    settings = {"batch_size": None, "local_steps": 2, "dtype": torch.float64, "evaluate_every": 0} | how
    run = pf.fit(model, FIRST, method, rounds=2, **settings)
    for i in range(3):
        found = run.model(i).state_dict()
        for name, b, start in zip(("0.running_mean", "0.running_var"), BATCH, (0.0, 1.0), strict=True):
            passes = ((found[name] - b) / (start - b)).log() / np.log(0.9)
            torch.testing.assert_close(passes, passes[0].round().expand(4), rtol=0, atol=1e-9)
            assert passes[0].round() >= 1


@pytest.mark.parametrize("method", [pf.APPLE(), pf.PFedHN(), pf.QFedAvg()], ids=lambda m: m.name)
def test_a_method_that_makes_no_means_refuses_them(method):
    with pytest.raises(ModelError, match=f"running statistics of BatchNorm.*{method.name}"):
        fitted(method)


def twice():
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4, momentum=0.3)
    return nn.Sequential(norm, nn.Linear(4, 4), norm, nn.Tanh(), nn.Linear(4, 3)).double()


@pytest.mark.parametrize(
    ("method", "build", "steps", "pull"),
    [(pf.Local(lr=0.03), twice, 5, 0.0), (pf.Ditto(lr=0.03, lam=0.8, personal_epochs=4), net, 4, 0.8)],
    ids=["a layer in two places", "ditto"],
)
def test_a_layer_in_two_places_moves_twice_in_a_pass_and_a_pull_moves_none(method, build, steps, pull):
    run = fitted(method, with_statistics(build()), rounds=1)
    for i in range(FED.n):
        assert_equal(run.model(i).state_dict(), by_torch(i, steps, build(), pull=pull))


def test_fedavg_averages_the_statistics_and_fedbn_leaves_them():
    """One step in one round: means of what the clients' own statistics become, or these themselves."""
    local, common, own = (
        [fitted(m, rounds=1, local_steps=1).model(i).state_dict() for i in range(FED.n)]
        for m in (pf.Local(lr=LR), pf.FedAvg(lr=LR), pf.FedBN(lr=LR))
    )
    for name in ("1.running_mean", "1.running_var", "1.weight"):
        mean = torch.stack([found[name] for found in local]).mean(0)
        for i in range(FED.n):
            torch.testing.assert_close(common[i][name], mean, rtol=0, atol=1e-12)
            torch.testing.assert_close(own[i][name], local[i][name], rtol=0, atol=1e-12)
        assert not torch.allclose(own[0][name], own[1][name])
    torch.testing.assert_close(own[0]["3.weight"], own[1]["3.weight"])


def test_a_batch_of_one_value_leaves_them():
    layer = with_statistics(nn.Sequential(nn.BatchNorm1d(3)))[0].train()
    y = layer(torch.randn(1, 3))
    assert not any(t.any() for t in torch.autograd.grad(y.sum(), [layer.running_mean, layer.running_var]))
    assert y.isfinite().all()


def test_frozen_layers_stay_and_others_are_refused_unless_said():
    frozen = nn.Sequential(nn.BatchNorm1d(6).requires_grad_(False).eval())
    with pytest.raises(ModelError, match="no BatchNorm that is trained"):
        with_statistics(frozen)
    with pytest.raises(ModelError, match="with_statistics"):
        pf.Task(net())
    made = with_statistics(nn.Sequential(frozen[0], nn.BatchNorm1d(6)))
    assert type(made[0]) is nn.BatchNorm1d
    assert {name for name, _ in made[1].named_parameters()} == {"weight", "bias", "running_mean", "running_var"}
