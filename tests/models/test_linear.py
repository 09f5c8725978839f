"""The starts of the linear model: what is drawn, and that the seed decides it."""

import pytest
import torch

from polyfed import models
from polyfed.base.errors import ConfigError


def parameters(init, seed=0):
    model = models.build("linear", (60,), 500, seed=seed, init=init)
    return torch.cat([q.detach().ravel() for q in model.parameters()])


def test_a_normal_start_has_mean_0_and_variance_1():
    w = parameters("normal")
    n = len(w)
    assert n == 500 * 61  # weights and biases
    assert abs(w.mean()) < 5 / n**0.5
    assert abs(w.var() - 1) < 5 * (2 / n) ** 0.5
    assert w.abs().max() > 3  # no uniform distribution of variance 1


def test_a_zero_start_is_zero_and_the_default_is_pytorchs():
    assert (parameters("zeros") == 0).all()
    w = parameters("default")
    assert w.abs().max() <= 60**-0.5
    assert w.abs().max() > 0.99 * 60**-0.5
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = torch.nn.Linear(60, 500)
    assert torch.equal(w, torch.cat([q.detach().ravel() for q in layer.parameters()]))


def test_the_seed_decides_a_normal_start():
    assert torch.equal(parameters("normal", 3), parameters("normal", 3))
    assert not torch.equal(parameters("normal", 3), parameters("normal", 4))


def test_an_unknown_start_is_named():
    with pytest.raises(
        ConfigError,
        match=r"model.init of linear: found 'norml' \(did you mean 'normal'.*expected default, normal or zeros",
    ):
        models.build("linear", (60,), 10, init="norml")
