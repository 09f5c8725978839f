"""A task: losses, gradients and metrics on flat vectors, against autograd on the module itself."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small import Wrapped, batches, mlp, split_of
from torch import nn

from polyfed.base.errors import ConfigError, ModelError
from polyfed.compute import evaluation
from polyfed.compute.batches import Batch
from polyfed.compute.check import check
from polyfed.compute.task import Task

SIZES = (10, 3, 8)
CLASSES, NUMBERS = split_of(*SIZES), split_of(*SIZES, regression=True)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(3, 3)
    ).double()


@pytest.mark.parametrize("shared", [False, True], ids=["own models", "one model"])
@pytest.mark.parametrize("classes", [3, 50], ids=["few classes", "many"])
@pytest.mark.parametrize("path", ["closed form", "vectorised", "client by client"])
@pytest.mark.parametrize("loss", ["cross-entropy", lambda out, y: F.cross_entropy(out, y)], ids=["named", "callable"])
def test_metrics_of_any_clients_in_any_order(loss, path, classes, shared):
    """Those that follow one another, and others, are each judged on their own samples; NaN is who has none."""
    split = split_of(10, 3, 8, 5, 7, 0, outputs=classes)
    task = Task(mlp(outputs=classes) if path == "closed form" else Wrapped(mlp(outputs=classes)), loss)
    task.net.vectorised = path == "vectorised"
    w = task.w0.expand(6, -1) if shared else torch.randn(6, task.p, dtype=torch.float64)
    for clients in ([0, 1, 2, 3, 4, 5], [1, 2, 3], [2], [4, 5, 0, 3], [3, 2, 1]):
        found = evaluation.metrics(task, w[: len(clients)], split, np.array(clients))
        assert set(found) == {"loss", "accuracy"}
        for row, i in enumerate(clients):
            x, y = split.client(i)
            output = task.module(w[row]).eval()(x).detach()
            expected = float(F.cross_entropy(output, y)), float((output.argmax(1) == y).double().mean())
            assert (found["loss"][row], found["accuracy"][row]) == pytest.approx(expected, rel=1e-12, nan_ok=True)


def test_a_tie_is_no_guess_at_the_right_class():
    task = Task(nn.Linear(4, 3).double())
    found = evaluation.metrics(task, torch.zeros(1, task.p).double(), CLASSES, np.array([0]))
    assert found["accuracy"][0] == pytest.approx(float((CLASSES.client(0)[1] == 0).double().mean()))


def test_losses_of_many_samples_add_up_over_blocks_and_of_none_to_none():
    task = Task(nn.Linear(3, 2).double())
    x, y = torch.randn(3, 4000, 3, dtype=torch.float64), torch.randint(2, (3, 4000))
    w = torch.randn(3, 2, task.p, dtype=torch.float64)
    alone = [[F.cross_entropy(task.outputs(w[i, j], x[i]), y[i]) for j in range(2)] for i in range(3)]
    assert torch.allclose(task.loss_of(w, Batch(x, y)), torch.tensor(alone, dtype=torch.float64), rtol=1e-12)
    assert task.loss_of(w, Batch(x[:, :0], y[:, :0], sizes=[0] * 3)).tolist() == [[0.0] * 2] * 3


def test_bf16_rounds_what_layers_compute_and_nothing_else():
    """Of eight bits: gradients within a few per cent, and not exact; evaluation and weights are as without."""
    plain, rough = (Task(cnn().float(), bf16=on) for on in (False, True))
    w, split = plain.w0.expand(len(SIZES), -1).clone(), CLASSES.to("cpu", torch.float32)
    for task in (plain, rough):
        check(task, split, 3)
    for batch in batches(split, batch_size=None):
        exact, near = (task.gradient(w, batch)[0] for task in (plain, rough))
        assert near.dtype == torch.float32
        assert 2**-12 < (near - exact).norm() / exact.norm() < 2**-4
    clients = np.arange(len(SIZES))
    found = [evaluation.metrics(task, w, split, clients) for task in (plain, rough)]
    assert all(np.array_equal(found[0][k], found[1][k]) for k in found[0])
    with pytest.raises(ConfigError, match="found bf16 with weights in float64, expected float32"):
        Task(cnn(), bf16=True)


@pytest.mark.parametrize(
    ("build", "loss", "split", "words"),
    [
        (lambda: mlp(outputs=2), "cross-entropy", CLASSES, r"shape \[2\] per sample, expected \[3\] for 3 classes"),
        (lambda: mlp(d=5), "cross-entropy", CLASSES, r"does not accept inputs of shape \[4\]"),
        (lambda: Wrapped(mlp(d=5)), "cross-entropy", CLASSES, r"does not accept inputs of shape \[4\]"),
        (lambda: mlp(outputs=2), "mse", NUMBERS, r"shape \[2\] per sample, expected \[3\] like the targets"),
        (mlp, "cross-entropy", NUMBERS, "needs integer class labels"),
        (mlp, "mse", CLASSES, "needs float targets"),
        (nn.Flatten, "mse", NUMBERS, "no trainable parameters"),
        (mlp, "cross_entropy", CLASSES, r"unknown loss 'cross_entropy' \(did you mean 'cross-entropy'\?\)"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_in_one_line(build, loss, split, words):
    with pytest.raises((ModelError, ConfigError), match=words):
        check(Task(build(), loss), split, 3 if split is CLASSES else None)


def test_an_activation_that_stands_in_two_places_acts_in_both():
    act = nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 5), act, nn.Linear(5, 6), act, nn.Linear(6, 2))
    task, x = Task(model), torch.randn(7, 4)
    assert task.net.stacked is not None
    assert torch.allclose(task.outputs(task.w0, x), model(x), atol=1e-6)


@pytest.mark.parametrize("build", [mlp, lambda: Wrapped(mlp())])
@pytest.mark.parametrize("loss", ["cross-entropy", lambda z, y: F.cross_entropy(z, y)])
def test_losses_of_samples_have_the_loss_as_their_mean(build, loss):
    task, batch = Task(build(), loss), batches(split_of(6, 6), batch_size=None).whole()
    w = task.w0 + torch.rand(2, 3, task.p, generator=torch.Generator().manual_seed(0)).double()
    found = task.losses(w, batch)
    assert found.shape == (2, 3, 6)
    assert torch.allclose(found.mean(2), task.loss_of(w, batch), atol=1e-12)
