"""BatchNorm with statistics in the vector: torch's own numbers, and a method says where they stay."""

import copy

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


def net(norm=nn.BatchNorm1d):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), norm(6, momentum=LR), nn.Tanh(), nn.Linear(6, 3)).double()


def site(shift):
    x = RNG.normal(size=(24, 4)) + shift
    return x, (x - shift)[:, :3].argmax(1)


FED = pf.Federation.from_arrays([site(s) for s in (-3, 0, 3)], test_fraction=0.25)


def fitted(method, model=None, **settings):
    how = {"rounds": 2, "batch_size": None, "local_steps": 5, "dtype": torch.float64} | settings
    return pf.fit(with_statistics(net()) if model is None else model, FED, method, **how)


def test_local_training_is_torch_s_own():
    """SGD with a step of torch's momentum: weights and running statistics to rounding."""
    run = fitted(pf.Local(lr=LR))
    for i in range(FED.n):
        model, (x, y) = net(), FED.train.client(i)
        for _ in range(10):
            loss = F.cross_entropy(model(x.double()), y)
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for q in model.parameters():
                    q -= LR * q.grad
        found = run.model(i).state_dict()
        for name, t in model.state_dict().items():
            if "batches" not in name:
                torch.testing.assert_close(found[name], t, rtol=0, atol=1e-12)
        assert run.clients.test_accuracy[i] == float(
            (model.eval()(FED.test.client(i)[0].double()).argmax(1) == FED.test.client(i)[1]).double().mean()
        )


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
    g = torch.autograd.grad(y.sum(), [layer.running_mean, layer.running_var])
    assert not any(t.any() for t in g)
    assert y.isfinite().all()


def test_frozen_layers_stay_and_others_are_refused_unless_said():
    model = net()
    model[1].requires_grad_(False).eval()
    with pytest.raises(ModelError, match="no BatchNorm that is trained"):
        with_statistics(model)
    with pytest.raises(ModelError, match="with_statistics"):
        pf.Task(net())
    both = nn.Sequential(copy.deepcopy(model[1]), nn.BatchNorm1d(6))
    made = with_statistics(both)
    assert type(made[0]) is nn.BatchNorm1d
    assert {name for name, _ in made[1].named_parameters()} == {"weight", "bias", "running_mean", "running_var"}
