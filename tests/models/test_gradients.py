"""A model is a vector: its layers are views, and the three ways to a gradient are plain torch's gradient."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polyfed as pf
from polyfed import models
from polyfed.compute import compiled
from polyfed.compute.batches import Batch
from polyfed.compute.steps import affine
from polyfed.compute.task import having
from polyfed.models.resnet import Block, GlobalMean
from polyfed.native import kernel

CASES = {
    "linear": ("linear", (9,), {}),
    "linear without bias": ("linear", (9,), {"bias": False}),
    "mlp relu": ("mlp", (3, 3), {"hidden": (8, 7)}),
    "mlp tanh": ("mlp", (9,), {"hidden": 8, "activation": "tanh"}),
    "mlp sigmoid": ("mlp", (9,), {"hidden": (8,), "activation": "sigmoid"}),
    "lenet": ("lenet", (14, 13), {}),
    "lenet in colour": ("lenet", (3, 14, 13), {}),
    "cnn": ("cnn", (1, 8, 8), {}),
    "residual": ("", (3, 8, 8), {}),
}
SIZES = [6, 4, 1]  # samples of the three clients, padded to 6


def build(case, seed):
    """The case's model; "residual" is what resnet18 is made of, in small."""
    name, shape, options = CASES[case]
    if name:
        return models.build(name, shape, 4, seed=seed, **options)
    torch.manual_seed(seed)
    stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.GroupNorm(2, 4), nn.ReLU())
    return nn.Sequential(stem, Block(4, 8, 2, groups=2), Block(8, 8, 1, groups=2), GlobalMean(), nn.Linear(8, 4))


def problem(case, loss="cross-entropy"):
    """A float64 task, three different weight vectors and a ragged batch."""
    shape = CASES[case][1]
    generator = torch.Generator().manual_seed(3)
    task = pf.Task(build(case, 1), loss, dtype=torch.float64)
    w = task.w0 + 0.1 * torch.randn(3, task.p, generator=generator, dtype=torch.float64)
    x = torch.randn(3, 6, *shape, generator=generator, dtype=torch.float64)
    y = (
        torch.randint(4, (3, 6), generator=generator)
        if loss == "cross-entropy"
        else torch.randn(3, 6, 4, generator=generator, dtype=torch.float64)
    )
    real = torch.arange(6) < torch.tensor(SIZES)[:, None]
    return task, w, Batch(x, y, real / real.sum(1, keepdim=True).double(), SIZES)


def plain(task, w, batch, loss):
    """Client by client with nothing of ours: parameters copied into a contiguous module, real samples only."""
    gradients, losses = [], []
    for i, size in enumerate(SIZES):
        module = task.module(w[i]).to(memory_format=torch.contiguous_format)
        value = loss(module(batch.x[i, :size]), batch.y[i, :size])
        value.backward()
        parts = [
            q.grad.permute(0, 2, 3, 1).flatten() if q.dim() == 4 else q.grad.flatten() for q in module.parameters()
        ]
        gradients.append(torch.cat(parts))
        losses.append(value.detach())
    return torch.stack(gradients), torch.stack(losses)


@pytest.mark.parametrize("loss", ["cross-entropy", "mse"])
@pytest.mark.parametrize("case", CASES)
def test_every_path_to_a_gradient_is_plain_torch(case, loss):
    task, w, batch = problem(case, loss)
    expected = plain(task, w, batch, F.cross_entropy if loss == "cross-entropy" else F.mse_loss)
    paths = {"as chosen": task}
    for path, vectorised in (("one by one", False), ("vectorised", True)):
        paths[path] = having(task, stacked=None, vectorised=vectorised)
    assert (task.net.stacked is not None) == (CASES[case][0] in ("linear", "mlp"))
    for path, used in paths.items():
        found = used.gradient(w, batch)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10, msg=lambda m, path=path: f"{path}: {m}")


@pytest.mark.skipif(kernel() is None, reason="the kernel is not built here, or switched off")
@pytest.mark.parametrize("loss", ["cross-entropy", "mse"])
@pytest.mark.parametrize("case", ["linear", "linear without bias", "mlp relu", "mlp tanh", "mlp sigmoid", "lenet"])
def test_the_kernels_gradient_and_steps_are_plain_torchs(case, loss):
    """On a batch at hand, ragged as it is: one gradient, and three steps with a pull, against the same by hand."""
    task, w, batch = problem(case, loss)
    criterion, own = F.cross_entropy if loss == "cross-entropy" else F.mse_loss, batch._replace(native=True)
    found = compiled.gradient(task.net, w, own)
    assert found is not None
    torch.testing.assert_close(found, plain(task, w, batch, criterion)[0], atol=1e-10, rtol=1e-10)
    moved, near = w.clone(), w.clone()
    task.descend_(moved, own, 0.2, affine(task.net, w, 0.2, pull=(0.7, w)).summed(), steps=3)
    for _ in range(3):
        near = near - 0.2 * (plain(task, near, batch, criterion)[0] + 0.7 * (near - w))
    torch.testing.assert_close(moved, near, atol=1e-10, rtol=1e-10)


@pytest.mark.skipif(kernel() is None, reason="the kernel is not built here, or switched off")
def test_the_kernel_leaves_alone_what_it_cannot():
    """Samples that count differently, a client without any, another precision: torch makes these gradients."""
    task, w, batch = problem("mlp relu")
    own = batch._replace(native=True)
    others = own._replace(weighted=True), own._replace(sizes=[6, 4, 0]), own._replace(x=own.x.float()), batch
    assert [compiled.gradient(task.net, w, other) for other in others] == [None] * 4


@pytest.mark.parametrize("case", ["linear", "mlp relu", "lenet"])
def test_a_padded_sample_has_no_influence(case):
    task, w, batch = problem(case)
    spoiled = batch.x.clone()
    for i, size in enumerate(SIZES):
        spoiled[i, size:] = 1e3
    for vectorised in (False, True):
        other = having(task, stacked=None if vectorised else task.net.stacked, vectorised=vectorised)
        a, b = other.gradient(w, batch)[0], other.gradient(w, batch._replace(x=spoiled))[0]
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)
