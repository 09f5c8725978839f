"""The registry: parameter counts of the papers, output shapes, seeds, and what is said when something does not fit."""

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed import models
from polyfed.base.errors import ConfigError, ModelError

OWN = [name for name in models.names() if name != "transformers"]  # which is read from a folder


def size(model):
    return sum(q.numel() for q in model.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "outputs", "options", "parameters"),
    [
        ("linear", (784,), 10, {}, 7_850),
        ("linear", (60,), 10, {"bias": False}, 600),
        ("mlp", (1, 28, 28), 10, {}, 159_010),
        ("mlp", (20,), 3, {"hidden": [7, 5], "activation": "tanh"}, 20 * 7 + 7 + 7 * 5 + 5 + 5 * 3 + 3),
        ("mlp", (20,), 3, {"hidden": ()}, 63),
        ("cnn", (1, 28, 28), 10, {}, 1_663_370),  # McMahan et al. (2017), section 3
        ("lenet", (1, 28, 28), 10, {}, 156 + 2416 + 4010),  # FPFC's code
        ("resnet18", (3, 32, 32), 10, {}, 11_173_952),  # FedSLR's code
        ("resnet18", (3, 32, 32), 100, {}, 11_220_032),
        ("resnet18", (3, 64, 64), 200, {"stem": "imagenet"}, 11_279_112),
    ],
)
def test_the_parameter_counts_of_the_papers(name, shape, outputs, options, parameters):
    model = models.build(name, shape, outputs, **options)
    assert size(model) == parameters
    assert model(torch.zeros(2, *shape)).shape == (2, outputs)


@pytest.mark.parametrize("name", OWN)
def test_grey_images_need_no_channel_axis(name):
    with_channel, without = models.build(name, (1, 28, 20), 4), models.build(name, (28, 20), 4)
    x = torch.randn(3, 28, 20)
    torch.testing.assert_close(with_channel(x[:, None]), without(x))


@pytest.mark.parametrize("name", OWN)
def test_the_seed_decides_the_parameters_and_nothing_else_moves(name):
    before = torch.random.get_rng_state()
    first, again, other = (models.build(name, (1, 28, 28), 10, seed=s) for s in (7, 7, 8))
    assert torch.equal(before, torch.random.get_rng_state())
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "shape", "options", "error", "says"),
    [
        ("resnet", (3, 32, 32), {}, ConfigError, "model.name: unknown 'resnet' (did you mean 'resnet18"),
        ("mlp", (4,), {"hiden": 3}, ConfigError, "model.hiden: mlp has no such option (did you me"),
        ("cnn", (1, 28, 28), {"hidden": 3}, ConfigError, "model.hidden: cnn has no such option"),
        ("mlp", (4,), {"activation": "relo"}, ConfigError, "'relo' (did you mean 'relu'?)"),
        ("mlp", (4,), {"hidden": (3, 0)}, ConfigError, "model.hidden of mlp: found (3, 0), expected widths from 1"),
        ("mlp", (4,), {"hidden": 2**63}, ConfigError, "model.hidden of mlp: found 92233720368547758"),
        ("linear", (4,), {"bias": "no"}, ConfigError, "model.bias of linear: found 'no', expected tr"),
        ("linear", (4,), {"bias": -1e18}, ConfigError, "model.bias of linear: found -1e+18"),
        ("linear", (60,), {"init": "norml"}, ConfigError, "model.init of linear: found 'norml' (did you mean 'normal'"),
        ("linear", (60,), {"init": "norml"}, ConfigError, "expected default, normal or zeros"),
        ("resnet18", (3, 8, 8), {"stem": "tiny"}, ConfigError, "of resnet18: found 'tiny', expected cifar or imagenet"),
        ("resnet18", (3, 8, 8), {"groups": 3}, ConfigError, "found 3, expected 1, 2, 4, 8, 16, 32 or 64"),
        ("cnn", (60,), {}, ModelError, "these inputs have shape [60]"),
        ("resnet18", (2, 3, 32, 32), {}, ModelError, "shape [2, 3, 32, 32]"),
        ("cnn", (1, 3, 28), {}, ModelError, "at least 4x4; these are 3x28"),
        ("lenet", (11, 28), {}, ModelError, "at least 12x12; these are 11x28"),
        ("linear", (), {}, ModelError, "at least one feature"),
        ("linear", (4,), {"outputs": 0}, ModelError, "at least one output"),
    ],
)
def test_one_line_says_what_does_not_fit(name, shape, options, error, says):
    with pytest.raises(error) as caught:
        models.build(name, shape, **({"outputs": 2} | options))
    assert says in str(caught.value)


def start(init, seed=0):
    model = models.build("linear", (60,), 500, seed=seed, init=init)
    return torch.cat([q.detach().ravel() for q in model.parameters()])


def test_a_normal_start_has_mean_0_and_variance_1():
    w, n = start("normal"), 500 * 61  # weights and biases
    assert len(w) == n
    assert abs(w.mean()) < 5 / n**0.5
    assert abs(w.var() - 1) < 5 * (2 / n) ** 0.5
    assert w.abs().max() > 3  # no uniform distribution of variance 1
    assert torch.equal(w, start("normal"))
    assert not torch.equal(w, start("normal", 4))


def test_a_zero_start_is_zero_and_the_default_is_pytorchs():
    assert (start("zeros") == 0).all()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = torch.nn.Linear(60, 500)
    assert torch.equal(start("default"), torch.cat([q.detach().ravel() for q in layer.parameters()]))


def test_the_smallest_images_the_messages_allow_do_work():
    for name, least in (("cnn", 4), ("lenet", 12)):
        assert models.build(name, (least, least), 2)(torch.zeros(2, least, least)).shape == (2, 2)


@pytest.mark.parametrize(
    ("shape", "name"),
    [((1, 28, 28), "lenet"), ((3, 32, 32), "lenet"), *((s, "linear") for s in ((8, 8), (60,), (), (50, 2)))],
)
def test_the_default_is_a_cnn_for_images(shape, name):
    x, y = np.zeros((4, *shape), dtype=np.float32), np.array([0, 1, 0, 1])
    if not shape:
        x = x[:, None]
    assert models.default(pf.Federation.from_arrays([(x, y)])) == name


def test_every_model_says_what_it_is_and_what_it_takes():
    for name in models.names():
        assert models.about(name).endswith(".")
    assert models.options("mlp") == {"hidden": (200,), "activation": "relu", "letters": 0}


def test_a_perceptron_of_letters_learns_which_letter_is_the_last():
    """Their numbers have no order that a linear layer could use: without `letters` this is refused or not learnt."""
    rng = np.random.default_rng(0)
    texts = [rng.permutation(5)[rng.integers(0, 5, (80, 4))] for _ in range(2)]
    data = pf.Federation.from_arrays([(x, x[:, -1].copy()) for x in texts], classes=5, test_fraction=0.25)
    model = models.build("mlp", (4,), 5, hidden=16, letters=5)
    assert size(model) == 5 * 8 + (4 * 8 + 1) * 16 + (16 + 1) * 5
    run = pf.fit(model, data, pf.algorithms.FedAvg(lr=0.3), rounds=12, batch_size=20, evaluate_every=0)
    assert run.final["test"]["accuracy"].tolist() == [1.0, 1.0]
    mixed = models.build("mixture", (4,), 5, hidden=16, letters=5)
    assert mixed(torch.zeros(2, 4, dtype=torch.long)).shape == (2, 5)
