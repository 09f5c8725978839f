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
from polyfed.compute.solvers import local_sgd
from polyfed.compute.split import Split
from polyfed.compute.task import Task

SIZES = (10, 3, 8)
CLASSES, NUMBERS = split_of(*SIZES), split_of(*SIZES, regression=True)


def reference(task: Task, w, x, y, loss) -> tuple[torch.Tensor, float]:
    """Gradient [p] and loss of one client by autograd."""
    module = task.module(w).train()
    value = loss(module(x), y)
    names = [e.name for e in task.layout.entries]
    grads = dict(zip(names, torch.autograd.grad(value, list(module.parameters())), strict=True))
    g = torch.empty_like(w)
    for name, view in task.layout.named(g).items():
        view.copy_(grads[name])
    return g, float(value.detach())


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(3, 3)
    ).double()


LOSSES = {
    "cross-entropy": ("cross-entropy", CLASSES, F.cross_entropy),
    "mse": ("mse", NUMBERS, F.mse_loss),
    "callable": (lambda out, y: F.smooth_l1_loss(out, y), NUMBERS, F.smooth_l1_loss),
}


@pytest.mark.parametrize("batch_size", [4, None])
@pytest.mark.parametrize("build", [mlp, lambda: Wrapped(mlp()), cnn], ids=["closed form", "module", "cnn"])
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_autograds(loss, build, batch_size):
    given, split, expected = LOSSES[loss]
    task = Task(build(), given)
    w = torch.randn(len(SIZES), task.p, dtype=torch.float64)
    for batch in batches(split, [0, 2, 1], batch_size=batch_size, epochs=1):
        g, values = task.gradient(w[: batch.rows], batch)
        assert values is not None
        for i in range(batch.rows):
            b = batch.x.shape[1] if batch.sizes is None else batch.sizes[i]
            if b == 0:
                continue
            g_ref, value = reference(task, w[i], batch.x[i, :b], batch.y[i, :b], expected)
            assert (g[i] - g_ref).abs().max() < 1e-12
            assert float(values[i]) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("build", [mlp, lambda: Wrapped(mlp())], ids=["closed form", "module"])
def test_weight_decay_is_half_the_squared_norm(build):
    plain, decayed = Task(build()), Task(build(), weight_decay=0.3)
    w = torch.randn(3, plain.p, dtype=torch.float64)
    whole = batches(CLASSES).whole()
    (g, loss), (g2, loss2) = plain.gradient(w, whole), decayed.gradient(w, whole)
    assert torch.allclose(g2, g + 0.3 * w, atol=1e-14)
    assert torch.allclose(loss2, loss + 0.15 * w.square().sum(1), atol=1e-12)
    x = w.clone()
    decayed.descend_(x, whole, 0.1)
    assert torch.allclose(x, w - 0.1 * g2, atol=1e-14)


@pytest.mark.parametrize("build", [lambda: nn.Linear(4, 1), lambda: Wrapped(nn.Linear(4, 1))], ids=["closed", "module"])
def test_mse_of_one_output_against_flat_targets(build):
    """[b, 1] against [b] is one number per sample, never a [b, b] table."""
    split = Split(CLASSES.x, CLASSES.x.sum(1), CLASSES.offsets)
    task = Task(build().double(), "mse")
    check(task, split, None)
    w = torch.randn(3, task.p, dtype=torch.float64)
    _, losses = task.gradient(w, batches(split).whole())
    metrics = evaluation.metrics(task, w, split, np.arange(3))
    for i in range(3):
        x, y = split.client(i)
        expected = float((task.outputs(w[i], x)[:, 0] - y).square().mean())
        assert float(losses[i]) == pytest.approx(expected)
        assert metrics["loss"][i] == pytest.approx(expected)
        assert metrics["rmse"][i] == pytest.approx(expected**0.5)


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("build", [mlp, lambda: Wrapped(mlp())], ids=["closed form", "module"])
def test_metrics_are_means_over_own_samples_and_nan_for_none(build, shared):
    split = split_of(10, 0, 3)
    task = Task(build())
    w = torch.randn(3, task.p, dtype=torch.float64)
    w = w[0].expand(3, -1) if shared else w
    found = evaluation.metrics(task, w, split, np.arange(3))
    assert set(found) == {"loss", "accuracy"}
    for i in (0, 2):
        x, y = split.client(i)
        output = task.outputs(w[i], x)
        assert found["loss"][i] == pytest.approx(float(F.cross_entropy(output, y)))
        assert found["accuracy"][i] == pytest.approx(float((output.argmax(1) == y).double().mean()))
    assert np.isnan(found["loss"][1])
    assert np.isnan(found["accuracy"][1])


@pytest.mark.parametrize("shared", [False, True], ids=["own models", "one model"])
@pytest.mark.parametrize("classes", [3, 50], ids=["few classes", "many"])
@pytest.mark.parametrize("path", ["closed form", "vectorised", "client by client"])
def test_metrics_of_any_clients_in_any_order(path, classes, shared):
    """Those that follow one another, and others, are each judged on their own samples."""
    split = split_of(10, 3, 8, 5, 7, outputs=classes)
    task = Task(mlp(outputs=classes) if path == "closed form" else Wrapped(mlp(outputs=classes)))
    task.vectorised = path == "vectorised"
    w = task.w0.expand(5, -1) if shared else torch.randn(5, task.p, dtype=torch.float64)
    for clients in ([0, 1, 2, 3, 4], [1, 2, 3], [2], [4, 0, 3], [3, 2, 1]):
        found = evaluation.metrics(task, w[: len(clients)], split, np.array(clients))
        for row, i in enumerate(clients):
            x, y = split.client(i)
            output = task.module(w[row]).eval()(x).detach()
            assert found["loss"][row] == pytest.approx(float(F.cross_entropy(output, y)), rel=1e-12)
            assert found["accuracy"][row] == pytest.approx(float((output.argmax(1) == y).double().mean()), rel=1e-12)


def test_a_tie_is_no_guess_at_the_right_class():
    """Of equal outputs the first class is the guess, so that a model of zeros is right on the first class only."""
    task = Task(nn.Linear(4, 3).double())
    found = evaluation.metrics(task, torch.zeros(1, task.p).double(), CLASSES, np.array([0]))
    assert found["accuracy"][0] == pytest.approx(float((CLASSES.client(0)[1] == 0).double().mean()))


def test_metrics_of_a_callable_loss():
    split = split_of(6, 0, 3, regression=True)
    task = Task(mlp(), lambda out, y: F.l1_loss(out, y))
    found = evaluation.metrics(task, task.w0.expand(3, -1), split, np.arange(3))
    x, y = split.client(2)
    assert found["loss"][2] == pytest.approx(float(F.l1_loss(task.outputs(task.w0, x), y)))
    assert np.isnan(found["loss"][1])


def test_loss_of_and_whole_agree_with_the_gradients_loss():
    task = Task(mlp())
    w = torch.randn(3, task.p, dtype=torch.float64)
    whole = batches(CLASSES).whole()
    assert torch.allclose(task.loss_of(w, whole), task.gradient(w, whole)[1])


def test_dropout_is_keyed():
    """Which clients share a call does not change a mask; another step, round or seed has another one."""
    model = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Tanh(), nn.Linear(32, 3)).double()
    task, work = Task(model), {"epochs": 2, "batch_size": 4}

    def trained(clients, **more):
        return local_sgd(task, task.w0.expand(len(clients), -1), batches(CLASSES, clients, **work, **more), 0.1)

    together = trained([0, 2, 1])
    for row, i in enumerate((0, 2, 1)):
        assert torch.equal(trained([i])[0], together[row])
    torch.manual_seed(99)
    assert torch.equal(trained([0, 2, 1]), together)

    x = torch.ones(1, 4, 4, dtype=torch.float64)
    masks = set()
    for t, seed in ((0, 0), (1, 0), (0, 1)):
        for batch in batches(CLASSES, [0], round=t, seed=seed, steps=2, batch_size=4):
            same = batch._replace(x=x, y=torch.zeros(1, 4, dtype=torch.int64), weight=None, sizes=None)
            masks.add(tuple(task.gradient(task.w0[None], same)[0][0].tolist()))
    assert len(masks) == 6
    assert torch.equal(task.outputs(task.w0, x[0]), task.outputs(task.w0, x[0])), "no dropout in evaluation"


# what is refused


def test_bf16_rounds_what_layers_compute_and_nothing_else():
    """bfloat16 keeps eight bits: the gradient is within a few per cent of the exact one and is not it; evaluation and
    the weights' own precision are as without."""
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


def test_batchnorm_is_refused_and_the_helper_named():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    with pytest.raises(ModelError, match=r"layer '1' is BatchNorm1d.*polyfed\.models\.replace_batchnorm"):
        Task(model)
    from polyfed.models import replace_batchnorm

    Task(replace_batchnorm(model))


def test_a_model_without_parameters_is_refused():
    with pytest.raises(ModelError, match="no trainable parameters"):
        Task(nn.Flatten())


def test_an_unknown_loss_is_refused():
    with pytest.raises(ConfigError, match=r"unknown loss 'cross_entropy' \(did you mean 'cross-entropy'\?\)"):
        Task(mlp(), "cross_entropy")


@pytest.mark.parametrize(
    ("build", "loss", "split", "words"),
    [
        (
            lambda: mlp(outputs=2),
            "cross-entropy",
            CLASSES,
            r"output of shape \[2\] per sample, expected \[3\] for 3 classes",
        ),
        (lambda: mlp(d=5), "cross-entropy", CLASSES, r"does not accept inputs of shape \[4\]"),
        (lambda: Wrapped(mlp(d=5)), "cross-entropy", CLASSES, r"does not accept inputs of shape \[4\]"),
        (lambda: mlp(outputs=2), "mse", NUMBERS, r"output of shape \[2\] per sample, expected \[3\] like the targets"),
        (mlp, "cross-entropy", NUMBERS, "needs integer class labels"),
        (mlp, "mse", CLASSES, "needs float targets"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_in_one_line(build, loss, split, words):
    with pytest.raises(ModelError, match=words) as error:
        check(Task(build(), loss), split, 3 if split is CLASSES else None)
    assert "\n" not in str(error.value)


def test_the_model_given_is_not_touched():
    model = mlp()
    before = [q.clone() for q in model.parameters()]
    task = Task(model, dtype=torch.float32)
    local_sgd(task, task.w0.expand(3, -1), batches(CLASSES.to("cpu", torch.float32), epochs=1, batch_size=4), 0.1)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert next(model.parameters()).dtype == torch.float64


def test_an_activation_that_stands_in_two_places_acts_in_both():
    act = nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 5), act, nn.Linear(5, 6), act, nn.Linear(6, 2))
    task, x = Task(model), torch.randn(7, 4)
    assert task.stacked is not None
    assert torch.allclose(task.outputs(task.w0, x), model(x), atol=1e-6)


def test_the_loss_of_a_client_without_samples_is_a_sum_of_none():
    task = Task(nn.Linear(3, 2))
    x, y = torch.zeros(2, 0, 3), torch.zeros(2, 0, dtype=torch.int64)
    assert task.loss_of(task.w0.expand(2, 4, -1), Batch(x, y, sizes=[0, 0])).tolist() == [[0.0] * 4] * 2


def test_losses_of_many_samples_add_up_over_blocks():
    task = Task(nn.Linear(3, 2).double())
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(3, 4000, 3, generator=g, dtype=torch.float64), torch.randint(2, (3, 4000), generator=g)
    w = torch.randn(3, 2, task.p, generator=g, dtype=torch.float64)
    alone = [[F.cross_entropy(task.outputs(w[i, j], x[i]), y[i]) for j in range(2)] for i in range(3)]
    assert torch.allclose(task.loss_of(w, Batch(x, y)), torch.tensor(alone, dtype=torch.float64), rtol=1e-12)


@pytest.mark.parametrize("build", [mlp, lambda: Wrapped(mlp())])
@pytest.mark.parametrize("loss", ["cross-entropy", lambda z, y: F.cross_entropy(z, y)])
def test_losses_of_samples_have_the_loss_as_their_mean(build, loss):
    task, batch = Task(build(), loss), batches(split_of(6, 6), batch_size=None).whole()
    w = task.w0 + torch.rand(2, 3, task.p, generator=torch.Generator().manual_seed(0)).double()
    found = task.losses(w, batch)
    assert found.shape == (2, 3, 6)
    assert torch.allclose(found.mean(2), task.loss_of(w, batch), atol=1e-12)


def test_classes_and_width_are_those_of_the_last_layer():
    task = Task(mlp(outputs=7))
    assert (task.classes, task.width) == (7, 5)
    with pytest.raises(ModelError, match="loss: found mse, expected cross-entropy"):
        _ = Task(mlp(), "mse").classes
