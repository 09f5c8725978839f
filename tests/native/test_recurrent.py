"""GRUs and LSTMs in the compiled kernel: random ones end where torch does, by every instruction set; which it takes."""

import numpy as np
import pytest
import torch
from test_kernel import OUT, needed, split_of
from test_networks import Case, compare, one_of
from torch import nn

from polyfed.compute.batches import Work
from polyfed.compute.check import check
from polyfed.compute.compiled import path_of
from polyfed.compute.split import Split
from polyfed.compute.task import Task

ENDS = {
    "last": lambda out, h: out[:, -1],
    "last of all": lambda out, h: out[:, -1, :],
    "one": lambda out, h: out[:, 1],
    "state": lambda out, h: h[-1],
    "all": lambda out, h: out.flatten(1),
}


class Sequence(nn.Module):
    """Recurrent layers behind a table, or behind a linear layer and a norm, of which `end` is taken."""

    def __init__(self, cell, end, width, front=None, between=None, outputs=OUT):
        super().__init__()
        self.front, self.cell, self.between, self.end = front, cell, between, end
        self.head = nn.Linear(width, outputs)

    def forward(self, x):
        out, h = self.cell(x if self.front is None else self.front(x))
        h = h[0] if isinstance(h, tuple) else h
        out = out if self.between is None else self.between(out)
        return self.head(self.end(out, h))


def drawn(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    steps, d, h, layers = (int(rng.integers(low, high)) for low, high in ((2, 9), (1, 12), (1, 24), (1, 3)))
    h = h if rng.random() < 0.8 else h + 64  # of several panels
    end = one_of(rng, *ENDS)
    between = nn.Sequential(nn.Linear(h, h), nn.GELU()) if end != "state" and rng.random() < 0.3 else None
    whole, front = rng.random() < 0.3, None
    if whole:
        front = nn.Embedding(9, d)
    elif d > 4 and rng.random() < 0.4:
        front = nn.Sequential(nn.Linear(d, d), nn.LayerNorm(d, eps=0.1), nn.ReLU())
    kind, bias = one_of(rng, nn.GRU, nn.LSTM), bool(rng.random() < 0.8)
    cell = kind(d, h, layers, bias=bias, batch_first=True)
    model = Sequence(cell, ENDS[end], h * steps if end == "all" else h, front, between)
    single = rng.random() < 0.2
    dtype = torch.float32 if single else torch.float64
    task = Task(model, dtype=dtype, weight_decay=one_of(rng, 0.0, 0.01))
    sizes = rng.integers(1, 40, rng.integers(1, 4))
    s, p = len(sizes), task.p

    def client(n: int):
        x = rng.integers(0, 9, (n, steps)) if whole else rng.normal(size=(n, steps, d))
        return torch.tensor(x), torch.tensor(rng.integers(0, OUT, n))

    split = Split.of([client(n) for n in sizes])
    check(task, split, OUT)
    w, anchor, shift = task.w0 + 0.2 * torch.randn(3, s, p, dtype=dtype)
    stated: dict = {"shift": shift} if rng.random() < 0.3 else {}
    stated |= {"pull": (one_of(rng, 0.3, torch.rand(p, dtype=dtype)), anchor)} if rng.random() < 0.3 else {}
    only = one_of(rng, torch.rand(s, p) < 0.5, task.layout.mask("head"), task.layout.mask("cell")).to(dtype)
    stated |= {"only": only} if rng.random() < 0.4 else {}
    number = 1 if single else one_of(rng, None, int(rng.integers(1, 5)))
    work = Work(2, number, one_of(rng, None, int(rng.integers(1, 33))))
    return Case(task, task.place(split), work, w, 0.05, stated, False)


@needed
@pytest.mark.parametrize("few", range(8))
def test_the_kernel_takes_torchs_steps(few, monkeypatch):
    for seed in range(3 * few, 3 * few + 3):
        compare(drawn(seed), monkeypatch, seed)


@needed
@pytest.mark.long
def test_the_kernel_takes_torchs_steps_in_a_thousand_recurrent_networks(monkeypatch):
    for seed in range(1000):
        compare(drawn(seed), monkeypatch, seed)


@needed
@pytest.mark.parametrize(
    "cell",
    [
        nn.GRU(5, 8),
        nn.GRU(5, 4, batch_first=True, bidirectional=True),
        nn.LSTM(5, 8, 2, dropout=0.5, batch_first=True),
        nn.RNN(5, 8, batch_first=True),
    ],
    ids=str,
)
def test_other_recurrent_layers_are_left_to_torch(cell):
    split = split_of(inputs=(6, 5))
    with torch.no_grad():
        width = cell(split.x[:1].float())[0].shape[2]
    task = Task(Sequence(cell, ENDS["last"], width))
    assert path_of(task.net, None, task.place(split)) == "client by client"
