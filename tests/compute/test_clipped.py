"""Clipped row gradients, against autograd row by row."""

import numpy as np
import pytest
import torch
from torch.nn import Linear, Sequential

from polyfed.base.errors import ModelError
from polyfed.compute.batches import Batch
from polyfed.compute.clipped import check_rows, clipped_sum, sizes_of
from polyfed.compute.task import Task
from polyfed.models import with_statistics


class Of(torch.nn.Module):
    """Layers, and a forward pass given as a function of (self, x)."""

    def __init__(self, forward, *layers):
        super().__init__()
        self.f, self.m = forward, torch.nn.ModuleList(layers)

    def forward(self, x):
        return self.f(self.m, x)


class Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -g


def packed(m, x):
    steps = torch.nn.utils.rnn.pack_padded_sequence(x.view(-1, 2, 3), torch.full((len(x),), 2), batch_first=True)
    return m[1](m[0](steps)[1][-1])


def filled(m, x):
    out = torch.zeros(len(x), 3, dtype=x.dtype)
    out[:] = m[0](x)
    return out


torch.manual_seed(0)
NETS = {  # what vmap has no rule for, or the wrong one, and three plain ones
    **{
        kind.__name__: Of(
            lambda m, x: m[1](m[0](x.view(-1, 2, 3))[0][:, -1]), kind(3, 4, batch_first=True), Linear(4, 3)
        )
        for kind in (torch.nn.GRU, torch.nn.LSTM, torch.nn.RNN)
    },
    "packed": Of(packed, torch.nn.GRU(3, 4, batch_first=True), Linear(4, 3)),
    "a branch on data": Of(lambda m, x: m[0](x) if (x[:, 0] > 1e9).all() else m[0](2 * x), Linear(6, 3)),
    "a function of its own": Of(lambda m, x: m[1](Turned.apply(m[0](x))), Linear(6, 4), Linear(4, 3)),
    "filled in place": Of(filled, Linear(6, 3)),
    "written to": Of(lambda m, x: m[0](x.clamp_(-0.5, 0.5)), Linear(6, 3)),
    "a squeeze": Of(lambda m, x: m[0](x[:, :, None].squeeze(-1)), Linear(6, 3)),
    "linear": Linear(6, 3),
    "mlp": Sequential(Linear(6, 5), torch.nn.Tanh(), Linear(5, 4, bias=False), torch.nn.ReLU(), Linear(4, 3)),
    "residual": Sequential(Linear(6, 6), torch.nn.LayerNorm(6), Linear(6, 3)),
}


def task_of(name: str, loss="cross-entropy") -> Task:
    task = Task(NETS[name], loss, dtype=torch.float64)
    task.net.random = False
    return task


def batch_of(weights: bool = False) -> Batch:
    """Two clients, of which the second has five rows, padded to eight."""
    rng = np.random.default_rng(0)
    x = torch.as_tensor(rng.normal(size=(2, 8, 6)))
    y = torch.as_tensor(rng.integers(0, 3, (2, 8)))
    weight = torch.full((2, 8), 1 / 8, dtype=torch.float64)
    weight[1] = torch.tensor([0.2] * 5 + [0.0] * 3, dtype=torch.float64)
    if weights:
        weight *= torch.as_tensor(rng.uniform(0.2, 3, (2, 8)))
    return Batch(x, y, weight, [8, 5], weighted=weights)


def by_hand(task: Task, w: torch.Tensor, batch: Batch, clip: float) -> torch.Tensor:
    """[s, p], one row at a time by the module."""
    out = torch.zeros_like(w)
    for i, size in enumerate([8, 5]):
        for r in range(size):
            module, row = task.module(w[i]), slice(r, r + 1)
            loss = torch.nn.functional.cross_entropy(module(batch.x[i, row].clone()), batch.y[i, row])
            parts = torch.autograd.grad(loss * size * batch.weight[i, r], [*module.parameters()])
            g = torch.cat([part.flatten() for part in parts])
            out[i] += g * min(1.0, clip / float(g.norm()))
    return out


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("clip", [0.05, 0.8, 100.0])
@pytest.mark.parametrize("net", NETS)
def test_it_is_the_sum_of_rows_clipped_one_by_one(net, clip, weights):
    task, batch = task_of(net), batch_of(weights)
    w = task.w0 + 0.3 * torch.randn(2, task.p, dtype=torch.float64)
    found = clipped_sum(task, w, batch, clip)
    assert torch.allclose(found, by_hand(task, w, batch, clip), rtol=1e-9, atol=1e-12)
    if clip == 100 and not weights:
        assert torch.allclose(found / sizes_of(batch)[:, None], task.gradient(w, batch)[0], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("value", [0.0, 1e3, 1e200, float("inf"), float("nan")])
def test_no_row_moves_the_sum_by_more_than_the_clip(net, value):
    """A row in the place of nothing, however wild; the divisor is the number of rows all the same."""
    task, clip = task_of(net), 0.7
    w = task.w0.expand(2, -1).clone()
    batch = batch_of()
    gone, wild = batch.weight.clone(), batch.x.clone()
    gone[0, 3] = 0.0
    wild[0, 3] = value
    with_row, without = (clipped_sum(task, w, b, clip) for b in (batch._replace(x=wild), batch._replace(weight=gone)))
    assert with_row.isfinite().all()
    assert (with_row - without)[0].norm() <= clip * (1 + 1e-9)
    assert torch.equal(with_row[1], without[1])
    assert sizes_of(batch._replace(weight=gone)).tolist() == [8, 5]


def test_regression_rows_are_clipped_too():
    task = Task(Linear(6, 1), "mse", dtype=torch.float64)
    x, y = torch.randn(1, 4, 6, dtype=torch.float64), 100 * torch.randn(1, 4, dtype=torch.float64)
    assert clipped_sum(task, task.w0[None], Batch(x, y), 0.5).norm() <= 4 * 0.5 * (1 + 1e-9)


def test_a_model_by_which_rows_depend_on_each_other_is_refused_by_its_name():
    rows = batch_of().x[0], batch_of().y[0]
    for net in NETS:
        check_rows(task_of(net), *rows)
    mixing = Sequential(Linear(6, 4), torch.nn.BatchNorm1d(4), Linear(4, 3))
    centred = Of(lambda m, x: m[0](x - x.mean(0)), Linear(6, 3))
    for model, word in ((with_statistics(mixing), "Statistics"), (centred, "Of")):
        with pytest.raises(ModelError, match=f"privacy.unit: found row with {word}.*expected site"):
            check_rows(Task(model, dtype=torch.float64), *rows)
