"""Local solvers against loops written out by hand, one client at a time."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from small import Wrapped, batches, mlp, split_of
from torch import nn

from polyfed.compute.check import check
from polyfed.compute.frozen import cut
from polyfed.compute.solvers import local_sgd, sgd_with_curvature, soft_threshold
from polyfed.compute.task import Task

SIZES = (10, 3, 8, 17)
SPLIT = split_of(*SIZES)


def by_hand(task, w, i, lr, *, correct=None, prox=None, **work):
    """Plain SGD of client i from w: [p], with torch's own autograd on the module itself."""
    module = task.module(w)
    for batch in batches(SPLIT, [i], **work):
        b = batch.x.shape[1] if batch.sizes is None else batch.sizes[0]
        loss = F.cross_entropy(module(batch.x[0, :b]), batch.y[0, :b])
        g = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])
        w = task.layout.flatten(module)
        w = w - lr * (g if correct is None else correct(w, g))
        w = w if prox is None else prox(w)
        task.layout.load_(module, w)
    return w


@pytest.mark.parametrize("clients", [[3, 0, 2, 1], [1, 0, 3, 2]], ids=["sorted", "unsorted"])
def test_correction_and_prox_compose(clients):
    task, data = Task(mlp()), batches(SPLIT, clients, epochs=2, batch_size=4)
    start, c = torch.randn(2, 4, task.p, dtype=torch.float64)
    lr = torch.tensor([[0.1], [0.2], [0.0], [0.3]], dtype=torch.float64)
    shrink = partial(soft_threshold, amount=0.002)

    def correct(w, g):
        return g + c[clients][: len(w)] + 0.3 * w

    for rate, prox in ((0.1, shrink), (lr[clients], None)):
        out = local_sgd(task, start[clients], data, rate, correct=correct, prox=prox)
        for row, i in enumerate(clients):
            given = {"correct": lambda w, g, i=i: g + c[i] + 0.3 * w, "prox": prox, "epochs": 2, "batch_size": 4}
            hand = by_hand(task, start[i], i, 0.1 if prox else float(lr[i]), **given)
            assert (out[row] - hand).abs().max() < 1e-12


@pytest.mark.parametrize("wrap", [False, True], ids=["closed form", "module"])
@pytest.mark.parametrize("decay", [0.0, 0.2], ids=["", "decay"])
@pytest.mark.parametrize("work", [{"epochs": 2, "batch_size": 4}, {"steps": 5, "batch_size": None}])
@pytest.mark.parametrize("clients", [[3, 0, 2, 1], [1, 0, 3, 2]], ids=["sorted", "unsorted"])
def test_a_pull_and_a_shift_are_the_loop_with_them(wrap, decay, work, clients):
    """For a strength and a step size that are numbers, one per client, one per parameter; and none at all."""
    task = Task(Wrapped(mlp()) if wrap else mlp(), weight_decay=decay)
    start, anchor, shift = torch.randn(3, 4, task.p, dtype=torch.float64)
    per_client, per_parameter = torch.rand(4, 1).double(), (torch.rand(task.p) < 0.5).double()
    for strength, lr in ((0.7, 0.1), (per_client, 0.1), (0.7, per_client), (per_parameter, per_client), (None, 0.1)):
        at = [s[clients] if s is per_client else s for s in (strength, lr)]
        pull = None if strength is None else (at[0], anchor[clients])
        data = batches(SPLIT, clients, **work)
        out = local_sgd(task, start[clients], data, at[1], pull=pull, shift=shift[clients])
        for row, i in enumerate(clients):
            mu = 0.0 if strength is None else float(strength[i]) if strength is per_client else strength
            rate = float(lr[i]) if isinstance(lr, torch.Tensor) else lr

            def direction(w, g, i=i, mu=mu):
                return g + decay * w + mu * (w - anchor[i]) + shift[i]

            assert (out[row] - by_hand(task, start[i], i, rate, correct=direction, **work)).abs().max() < 1e-12


def test_a_model_without_a_gradient_stays_at_its_anchor():
    """In float32 after many steps: what is kept of w and what comes from the anchor add up to one, as rounded."""
    task = Task(nn.Linear(4, 3, bias=False), "mse")
    split = split_of(6, 6, regression=True)
    split.x.zero_()
    anchor, data = torch.randn(2, task.p), batches(task.place(split), steps=1000, batch_size=None)
    w = local_sgd(task, anchor, data, 0.0137, pull=(0.31, anchor))
    assert ((w - anchor).abs() <= 2.0**-22 * anchor.abs()).all()


class Counted(nn.Conv1d):
    samples = 0

    def forward(self, x):
        Counted.samples += len(x)
        return super().forward(x)


def convolution():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        parts = nn.Unflatten(1, (1, 4)), Counted(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(9, 5), nn.Tanh()
        return nn.Sequential(*parts, nn.Linear(5, 3)).double()


@pytest.mark.parametrize("work", [{"epochs": 3, "batch_size": 4}, {"steps": 5, "batch_size": None}])
@pytest.mark.parametrize("net", [mlp, convolution], ids=["chain", "convolution"])
def test_what_frozen_layers_give_is_computed_once(net, work):
    """The loop through the whole network in which their gradients count for nothing."""
    task = Task(net(), weight_decay=0.2)
    check(task, SPLIT, 3)
    start, anchor, shift = torch.randn(3, 4, task.p, dtype=torch.float64)
    clients = [3, 0, 2, 1]
    for layers in (("head",), ("0" if net is mlp else "4", "head")):
        only, Counted.samples = task.layout.mask(*layers).double(), 0
        rest = {"pull": (0.7, anchor[clients]), "shift": shift[clients], "only": only}
        out = local_sgd(task, start[clients], batches(SPLIT, clients, **work), 0.1, **rest)
        assert net is mlp or Counted.samples == sum(SIZES)
        for row, i in enumerate(clients):

            def direction(w, g, i=i, only=only):
                return only * (g + 0.2 * w + 0.7 * (w - anchor[i]) + shift[i])

            assert (out[row] - by_hand(task, start[i], i, 0.1, correct=direction, **work)).abs().max() < 1e-12
        still = only == 0
        assert torch.equal(out[:, still], start[clients][:, still])


def test_frozen_layers_that_share_a_parameter_with_the_rest_are_no_part_by_themselves():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    net[2].weight = net[0].weight
    task = Task(net)
    check(task, SPLIT, 3)
    assert cut(task, task.layout.mask("head")) == 4
    assert cut(task, task.layout.mask("2.bias", "head")) is None


@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("lr", [0.02, 3.0])
def test_curvature_on_a_quadratic(batch_size, lr):
    """Ratios lie between the extreme eigenvalues met; where the top mode grows (lr > 2/L) the largest is found."""
    split = split_of(12, 9, 16, d=3, outputs=1, regression=True)
    task = Task(nn.Linear(3, 1, bias=False).double(), "mse")
    data = batches(split, steps=30, batch_size=batch_size)
    start = torch.randn(3, 3, dtype=torch.float64)
    w, found = sgd_with_curvature(task, start, data, lr)
    assert torch.allclose(w, local_sgd(task, start, data, lr), rtol=1e-10)
    assert sgd_with_curvature(task, start, data, 0.0)[1].tolist() == [0, 0, 0]
    for i in range(3):
        extremes = []
        for batch in batches(split, [i], steps=30, batch_size=batch_size):
            X = batch.x[0, : len(batch.x[0]) if batch.sizes is None else batch.sizes[0]]
            extremes.append(torch.linalg.eigvalsh(2 * X.T @ X / len(X))[[0, -1]])
        low, high = torch.stack(extremes).min(0)[0][0], torch.stack(extremes).max(0)[0][1]
        assert low - 1e-9 <= found[i] <= high * (1 + 1e-9)
        if batch_size is None and lr * high > 3:
            assert found[i] == pytest.approx(float(high), rel=1e-3)
