"""Local optimisers against torch.optim, step by step, on every path to a gradient; step sizes by hand and by torch."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small import Wrapped, batches, mlp, split_of
from torch import nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector

from polyfed.base.errors import ConfigError
from polyfed.compute.optimizers import Cosine, Exponential, Optimizer
from polyfed.compute.solvers import local_sgd
from polyfed.compute.task import Task

LR = 0.05
SIZES = (13, 20, 3, 8)  # in no order: some have finished while rows behind them still work
CLIP = 0.1
PULL = 0.7  # of a proximal term, which is part of the direction
THEIRS = {
    "sgd": lambda q, decay: torch.optim.SGD(q, LR),
    "momentum": lambda q, decay: torch.optim.SGD(q, LR, momentum=0.8),
    "adam": lambda q, decay: torch.optim.Adam(q, LR, betas=(0.7, 0.95), eps=1e-6),
    "adamw": lambda q, decay: torch.optim.AdamW(q, LR, betas=(0.7, 0.95), eps=1e-6, weight_decay=decay),
}
WORK = {
    "full batches": {"steps": 7, "batch_size": None},
    "batches": {"epochs": 3, "batch_size": 6},  # clients leave one after another, the last batches are short
    "numbers of steps": {"steps": 5, "batch_size": 4},
}
PATHS = ("closed form", "vectorised", "client by client")


def task_of(path: str, optimizer: Optimizer, **settings) -> Task:
    task = Task(mlp() if path == "closed form" else Wrapped(mlp()), optimizer=optimizer, **settings)
    assert (task.net.stacked is not None) == (path == "closed form")
    task.net.vectorised = path == "vectorised"
    return task


def ours(name: str, clip: float | None, decay: float = 0.0) -> Optimizer:
    return Optimizer(name, momentum=0.8, beta1=0.7, beta2=0.95, eps=1e-6, clip_norm=clip, weight_decay=decay)


def torchs(name: str, data, i: int, clip=None, pull=0.0, decay=0.0, coupled=0.0) -> torch.Tensor:
    """Client i trained by torch.optim on its own samples of every batch."""
    net = mlp()
    start = parameters_to_vector(net.parameters()).detach().clone()
    optimizer = THEIRS[name]([*net.parameters()], decay)
    if coupled:
        optimizer.param_groups[0]["weight_decay"] = coupled
    for k, batch in enumerate(data):
        if k == int(data.steps[i]):
            break
        b = batch.x.shape[1] if batch.sizes is None else batch.sizes[i]
        w = parameters_to_vector(net.parameters())
        loss = F.cross_entropy(net(batch.x[i, :b]), batch.y[i, :b]) + pull / 2 * (w - start).square().sum()
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return parameters_to_vector(net.parameters()).detach()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("clip", [None, CLIP])
@pytest.mark.parametrize("name", THEIRS)
def test_every_path_is_torchs(name, clip, work, path):
    decay = 0.2 if name == "adamw" else 0.0
    task, split = task_of(path, ours(name, clip, decay)), split_of(*SIZES)
    x = task.w0.expand(len(SIZES), -1)
    ways = (0.0, {}), (PULL, {"correct": lambda w, g: g + PULL * (w - x)}), (PULL, {"pull": (PULL, x)})
    for pull, stated in ways:
        found = local_sgd(task, x, batches(split, **WORK[work]), LR, **stated)
        expected = [torchs(name, batches(split, **WORK[work]), i, clip, pull, decay) for i in range(len(SIZES))]
        assert torch.allclose(found, torch.stack(expected), rtol=0, atol=1e-12)


def test_the_clips_are_active_and_the_optimisers_differ():
    """Otherwise the test above would say nothing of them."""
    split, ends = split_of(*SIZES), []
    for name in THEIRS:
        for clip in (None, CLIP):
            task = task_of("closed form", ours(name, clip, 0.2))
            ends.append(local_sgd(task, task.w0.expand(4, -1), batches(split, **WORK["batches"]), LR))
    apart = [float((a - b).abs().max()) for i, a in enumerate(ends) for b in ends[:i]]
    assert min(apart) > 1e-3


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_coupled_weight_decay_is_torchs(name):
    """Outside of adamw it is part of the loss, as torch's SGD and Adam have it."""
    split, task = split_of(*SIZES), task_of("closed form", ours(name, None), weight_decay=0.3)
    found = local_sgd(task, task.w0.expand(4, -1), batches(split, **WORK["batches"]), LR)
    for i in range(len(SIZES)):
        expected = torchs(name, batches(split, **WORK["batches"]), i, coupled=0.3)
        assert torch.allclose(found[i], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("work", WORK)
def test_what_is_not_trained_stays(name, work):
    """`only` is torch's requires_grad: neither momentum nor decoupled decay nor the clip's norm sees the rest."""
    split, task = split_of(*SIZES), task_of("closed form", ours(name, CLIP, 0.2))
    body = task.layout.mask("body").to(task.dtype)
    w, same = (
        local_sgd(task, task.w0.expand(4, -1), batches(split, **WORK[work]), LR, only=only)
        for only in (body, body.expand(4, -1))
    )
    assert torch.equal(w, same)
    assert torch.equal(w[:, body == 0], task.w0[body == 0].expand(4, -1))
    frozen = Wrapped(mlp())
    frozen.inner[2].requires_grad_(False)
    alone = Task(frozen, optimizer=ours(name, CLIP, 0.2))
    expected = local_sgd(alone, alone.w0.expand(4, -1), batches(split, **WORK[work]), LR)
    assert torch.allclose(w[:, body == 1], expected, rtol=0, atol=1e-12)


def test_proximal_steps_are_those_of_plain_sgd():
    task = task_of("closed form", Optimizer("adam"))
    with pytest.raises(ConfigError, match=r"optimizer: found 'adam', expected plain sgd for a method's proximal steps"):
        local_sgd(task, task.w0[None], batches(split_of(5), steps=1), LR, prox=lambda w: w)


@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_step_sizes_are_torchs(warmup):
    """LinearLR, then CosineAnnealingLR; or, after the same rise, StepLR."""
    length, expected = 30, [(t + 1) / warmup for t in range(warmup)]
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, length - warmup)
    for _ in range(length - warmup):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        cosine.step()
    assert np.allclose([Cosine(length, warmup).at(t) for t in range(length)], expected, rtol=0, atol=1e-14)
    risen = 0.9 ** (np.arange(length) // 4) * np.minimum(1, (np.arange(length) + 1) / max(1, warmup))
    assert np.allclose([Exponential(0.9, 4, warmup).at(t) for t in range(length)], risen, rtol=0, atol=1e-14)
