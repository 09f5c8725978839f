"""Random networks, data and steps: the compiled kernel ends where torch does, by every instruction set."""

from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from test_kernel import BUILT, batches, needed
from torch import Tensor, nn

from polyfed import native
from polyfed.compute import compiled
from polyfed.compute.batches import Work
from polyfed.compute.compiled import path_of
from polyfed.compute.solvers import local_sgd, sgd_with_curvature
from polyfed.compute.split import Split
from polyfed.compute.steps import affine
from polyfed.compute.task import Task
from polyfed.compute.terms import Distillation

ACTIVATIONS = (nn.Identity, nn.ReLU, nn.Tanh, nn.Sigmoid)


class Case(NamedTuple):
    """Local steps of some clients; curvature: whether it is measured on the way."""

    task: Task
    split: Split
    work: Work
    w: Tensor
    lr: float | Tensor
    stated: dict
    curvature: bool


def one_of(rng, *choices):
    return choices[rng.integers(len(choices))]


def convolutions(rng, shape: tuple[int, ...], even: bool) -> list[nn.Module]:
    """Up to three, with windows, zeros and cells of any form; before pooling or behind it an activation, or none.

    even: their numbers will be multiples of 1/4, and those of cells equal more often than not"""
    modules, (channels, *image) = [], shape
    for _ in range(rng.integers(1, 4)):
        window = [int(rng.integers(1, min(4, n) + 1)) for n in image]
        around = [int(rng.integers(0, n)) for n in window]
        if rng.random() < 0.2:
            window, around = [n - 1 + n % 2 for n in window], "same"
        out = int(one_of(rng, 1, 3, 8, 16, 17, rng.integers(1, 40)))
        layer = nn.Conv2d(channels, out, tuple(window), padding=around, bias=bool(rng.random() < 0.8))
        channels, image = out, layer(torch.empty(1, channels, *image)).shape[2:]
        cell = [int(rng.integers(1, min(3, n) + 1)) for n in image]
        act = one_of(rng, *ACTIVATIONS[: 2 if even else 4])()
        pool = nn.MaxPool2d(tuple(cell)) if rng.random() < 0.8 else nn.Identity()
        image = pool(torch.empty(1, 1, *image)).shape[2:]
        behind = [act, pool] if rng.random() < 0.5 else [pool, act]
        modules += [nn.Sequential(layer, *behind)] if rng.random() < 0.3 else [layer, *behind]
    return [*modules, nn.Flatten()]


def network(rng, shape: tuple[int, ...], outputs: int, even: bool) -> nn.Module:
    modules = convolutions(rng, shape, even) if len(shape) == 3 else []
    width = nn.Sequential(*modules)(torch.zeros(2, *shape)).shape[1]
    if modules and rng.random() < 0.2:
        modules.insert(0, nn.Unflatten(1, shape))
    for _ in range(one_of(rng, 0, 1, 2)):
        out = int(one_of(rng, 1, 16, 32, rng.integers(1, 80)))
        modules += [nn.Linear(width, out, bias=bool(rng.random() < 0.7)), one_of(rng, *ACTIVATIONS)()]
        width = out
    modules.append(nn.Linear(width, outputs, bias=bool(rng.random() < 0.7)))
    return modules[0] if len(modules) == 1 else nn.Sequential(*modules)


def drawn(seed: int, network=network) -> Case:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    images, loss, outputs = rng.random() < 0.4, one_of(rng, "cross-entropy", "mse"), int(rng.integers(2, 20))
    even = bool(images and rng.random() < 0.6)
    single = (even or not images) and rng.random() < 0.3  # of others two numbers may be as near as float32 can tell
    shape = (int(rng.integers(1, 4)), *map(int, rng.integers(3, 13, 2))) if images else (int(rng.integers(1, 90)),)
    model, dtype = network(rng, shape, outputs, even), torch.float32 if single else torch.float64
    task = Task(model, loss, weight_decay=one_of(rng, 0.0, 0.01), dtype=dtype)
    sizes = rng.integers(1, 20 if images else 60, rng.integers(1, 6))
    s, p = len(sizes), task.p

    def client(n: int) -> tuple[Tensor, Tensor]:
        x = rng.integers(0, 3, (n, *shape)) / 4 if even else rng.normal(size=(n, *shape))
        y = rng.integers(0, outputs, n) if loss == "cross-entropy" else rng.normal(size=(n, outputs))
        flat = isinstance(next(model.children(), None), nn.Unflatten)
        return torch.tensor(x.reshape(n, -1) if flat else x), torch.tensor(y)

    split = task.place(Split.of([client(n) for n in sizes]))
    w, anchor, shift = task.w0 + 0.1 * torch.randn(3, s, p, dtype=dtype)
    if even:  # sums of such numbers are exact in any order, so that equal ones are equal
        inside = sum(q.numel() for m in model.modules() if type(m) is nn.Conv2d for q in m.parameters())
        w[:, :inside] = torch.randint(-2, 3, (s, inside)) / 4
    each = torch.linspace(0.01, 0.05, s, dtype=dtype)[:, None]
    curvature = not images and not task.net.weight_decay and rng.random() < 0.5
    batch = one_of(rng, 5 if curvature else None, int(rng.integers(1, 20)))
    steps = 1 if even or single else one_of(rng, None, int(rng.integers(1, 9)))
    stated: dict = {"shift": shift} if rng.random() < 0.5 else {}
    if not curvature:
        stated |= {"minus": anchor[0].expand(s, p)} if rng.random() < 0.4 else {}
        numbers = torch.rand(p, dtype=dtype)  # a strength of each number, some of them 0
        strength = one_of(rng, 0.3, 10 * each, (numbers - 0.3).relu(), 10 * each * numbers)
        stated |= {"pull": (strength, anchor)} if rng.random() < 0.5 else {}
        layer = one_of(rng, "head", *sorted({e.name.split(".")[0] for e in task.layout.entries}))
        only = one_of(rng, torch.rand(s, p) < 0.5, task.layout.mask(layer)).to(dtype)
        stated |= {"only": only} if rng.random() < 0.6 else {}
        if loss == "cross-entropy":
            stated |= added(rng, task, s)
    return Case(task, split, Work(2, steps, batch), w, one_of(rng, 0.05, each), stated, curvature)


def added(rng, task: Task, s: int) -> dict:
    """What is added to the loss: nothing, a pull of features, a teacher, or both."""
    last = [m for m in task.model.modules() if isinstance(m, nn.Linear)][-1]
    shape = last.out_features, last.in_features
    vectors = one_of(rng, torch.randn(s, *shape), torch.randn(shape).expand(s, *shape)).to(task.dtype)
    strength = one_of(rng, 0.3, torch.rand(s, shape[0]).to(task.dtype) * (torch.rand(shape[0]) < 0.7))
    models = task.w0 + 0.1 * torch.randn(one_of(rng, 1, s), task.p, dtype=task.dtype)
    form = Distillation(0.5, one_of(rng, 1.0, 2.5), bool(rng.random() < 0.5))
    found = {"toward": (strength, vectors)} if rng.random() < 0.5 else {}
    return found | ({"teacher": (models.expand(s, -1), form)} if rng.random() < 0.5 else {})


def compare(case: Case, monkeypatch, said: object) -> None:
    """What is not to be trained stays to the last bit."""
    task, split, work, w, lr, stated, curvature = case
    assert path_of(task.net, work, split) == "native"
    near = torch.zeros(len(w), dtype=torch.float64)
    steps = partial(sgd_with_curvature if curvature else local_sgd, task, lr=lr, **stated)
    torchs, far = steps(w, batches(split, work, False)) if curvature else (steps(w, batches(split, work, False)), near)
    only, *terms = (stated.pop(name, None) for name in ("only", "toward", "teacher"))
    for instructions in native.SETS[: native.SETS.index(BUILT.set) + 1]:
        with monkeypatch.context() as here:
            here.setattr(BUILT, "set", instructions)
            near = torch.zeros_like(near)
            drift, measured = affine(task.net, w, lr, **stated), near if curvature else None
            ours = compiled.train(task.net, w, batches(split, work, True), lr, drift, only, measured, *terms)
        eps = torch.finfo(w.dtype).eps
        which = f"network {said}, {instructions}, {w.dtype}: {task.model}, {task.loss}"
        apart, bound = (torchs - ours).abs().max(), 5000 * eps * torchs.abs().max()
        if apart > bound and not curvature:  # of an unstable network, by what torch makes of a start one rounding off
            off = 1 + eps * torch.randint(-1, 2, w.shape).to(w.dtype)
            bound = 4 * (torchs - steps(w * off, batches(split, work, False))).abs().max()
        assert apart <= bound, which
        assert torch.allclose(far.double(), near, rtol=1e6 * eps, atol=0), which
        assert only is None or torch.equal(ours[only.expand_as(w) == 0], w[only.expand_as(w) == 0]), which


@needed
@pytest.mark.parametrize("dozen", range(10))
def test_the_kernel_takes_torchs_steps(dozen, monkeypatch):
    for seed in range(12 * dozen, 12 * dozen + 12):
        compare(drawn(seed), monkeypatch, seed)


@needed
@pytest.mark.long
def test_the_kernel_takes_torchs_steps_in_a_thousand_networks(monkeypatch):
    for seed in range(1000):
        compare(drawn(seed), monkeypatch, seed)
