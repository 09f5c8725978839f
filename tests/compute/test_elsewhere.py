"""A step on a device that waits for nothing: the numbers of the processor, no value read back, as many operations for
fifty clients as for two, and nothing moved to the device but which samples to take."""

from functools import cache

import numpy as np
import pytest
import torch
from elsewhere import DEVICE, Elsewhere
from small import Wrapped, batches, mlp, split_of
from test_vectorised import NETS
from torch import nn

from polyfed import models
from polyfed.compute.check import check
from polyfed.compute.optimizers import Optimizer
from polyfed.compute.solvers import local_sgd
from polyfed.compute.split import Split
from polyfed.compute.task import Task

V, T = 11, 5


class Block(nn.Module):
    """A transformer's block with padding, 0, and dropout."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.drop = nn.Embedding(V, 8), nn.LayerNorm(8), nn.Dropout(0.3)
        self.query, self.value, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = self.norm(self.embedding(x))
        scores = (self.query(h) @ h.mT).masked_fill((x == 0)[:, None], -1e4)
        return self.head(self.drop(scores.softmax(-1) @ self.value(h)).mean(1))


def block() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return models.adapted(Block().double(), "lora:r=2,targets=query+value")


def words(*sizes: int) -> Split:
    rng = np.random.default_rng(0)
    return Split.of([(torch.tensor(rng.integers(0, V, (n, T))), torch.tensor(rng.integers(0, 3, n))) for n in sizes])


def tokens_or_images(net: str, *sizes: int) -> Split:
    return words(*sizes) if net == "grouped" else split_of(*sizes, d=36)


MODELS = {"grouped": block, "closed form": lambda: mlp(36), "plain": lambda: Wrapped(mlp(36)), **NETS}
WORK = {"batches": {"batch_size": 4, "epochs": 2}, "all samples": {"batch_size": None, "steps": 2}}


@cache
def model(net: str) -> nn.Module:
    return MODELS[net]()


def on_the_device(net: str, split: Split, **settings) -> tuple[Task, Split]:
    task = Task(model(net), device=DEVICE, **settings)
    split = task.place(split)
    check(task, split, 3)
    assert task.net.vectorised == (net != "closed form")
    task.net.grouped = net == "grouped"
    return task, split


OPTIMIZERS = Optimizer("momentum"), Optimizer("adamw", weight_decay=0.1), Optimizer(clip_norm=0.1)


@pytest.mark.parametrize(
    ("net", "work", "optimizer"),
    [*((net, work, Optimizer()) for net in MODELS for work in WORK), *(("conv", "batches", one) for one in OPTIMIZERS)],
    ids=[*(f"{net}-{work}" for net in MODELS for work in WORK), "momentum", "adamw", "clipped"],
)
def test_local_steps_wait_for_nothing_and_are_the_processors(net, work, optimizer):
    split = tokens_or_images(net, 10, 3, 8, 7)
    here = Task(model(net), optimizer=optimizer)
    check(here, split, 3)

    def solved(task: Task, split: Split) -> torch.Tensor:
        w, data = task.w0.expand(4, -1), batches(split, [0, 2, 3, 1], **WORK[work])
        return local_sgd(task, w, data, 0.1, pull=(0.5, w + 1), shift=0.1 * w)

    expected = solved(here, split)
    with Elsewhere() as device:
        there, samples = on_the_device(net, split, optimizer=optimizer)
        device.strict = True
        found = solved(there, samples)
    torch.testing.assert_close(found.held, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("net", MODELS)
def test_a_step_is_as_many_operations_for_two_clients_as_for_fifty(net):
    clients, found = (2, 2, 20, 50), list[Elsewhere]()  # the first time, the places of dropout are hashed
    with Elsewhere():
        task, samples = on_the_device(net, tokens_or_images(net, *[8] * 50))
        for s in clients:
            w = task.w0.expand(s, -1)
            with Elsewhere(strict=True) as device:
                local_sgd(task, w, batches(samples, range(s), batch_size=4, steps=2), 0.1)
            found.append(device)
    assert found[1].found == found[2].found == found[3].found
    assert found[1].found.total() > 20
    keyed = 2 * 2 * 4 if task.net.random and task.net.vectorised else 0  # halves of a key, steps, bytes
    for s, device in zip(clients, found, strict=True):
        assert device.to == s * (2 * 8 + 2 * 4 * 8 + keyed), "numbers of steps and samples, which they are, and keys"


def test_what_would_wait_is_found():
    """Each is an operation at which the host waits for an accelerator, or that it refuses."""
    with Elsewhere() as device:
        t = torch.arange(4.0).to(DEVICE)
        for k, waits in enumerate((
            lambda: t.sum().item(), lambda: bool(t[0] > 1), lambda: t.cpu(), lambda: t.tolist(), lambda: t.nonzero(),
            lambda: t[t > 1], lambda: torch.equal(t, t), lambda: t.unique(), lambda: torch.zeros(4).copy_(t),
        ), 1):  # fmt: skip
            waits()
            assert len(device.waits) == k
        assert device.to == 16
        device.strict = True
        t.add_(t).clone().sort()
        with pytest.raises(AssertionError, match="waits for the device"):
            float(t[0])
        with pytest.raises(RuntimeError, match="on the device and on the processor"):
            t + torch.zeros(4)
        with pytest.raises(TypeError, match="numpy"):
            np.asarray(t)
