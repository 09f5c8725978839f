"""Vision transformers in the compiled kernel: random ones end where torch does; which it takes."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_kernel import OUT, needed, split_of
from test_networks import Case, compare, one_of
from torch import nn

from polyfed.compute.batches import Work
from polyfed.compute.check import check
from polyfed.compute.compiled import path_of
from polyfed.compute.split import Split
from polyfed.compute.task import Task


class Attention(nn.Module):
    def __init__(self, d, heads, bias=True, how="permuted", **options):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(d, 3 * d, bias), nn.Linear(d, d, bias), heads
        self.how, self.options = how, options

    def forward(self, x):
        b, n, d = x.shape
        if self.how == "permuted":
            q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        else:
            parts = self.qkv(x).chunk(3, -1)
            q, k, v = (t.reshape(b, n, self.heads, d // self.heads).transpose(1, 2) for t in parts)
            q, k = (k, q) if self.how == "swapped" else (q, k)
        out = F.scaled_dot_product_attention(q, k, v, **self.options).transpose(1, 2)
        return self.out(out.reshape(b, n, d) if self.how == "permuted" else out.flatten(2))


class Plus(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.f = nn.Sequential(*parts)

    def forward(self, x):
        return x + self.f(x)


class ViT(nn.Module):
    def __init__(
        self, d=6, heads=2, patch=2, image=(3, 4, 6), layers=1, bend=nn.GELU, bias=True, end="mean", **options
    ):
        super().__init__()
        channels, high, wide = image
        n = high // patch * (wide // patch)
        self.place, self.end = nn.Parameter(torch.randn(1, n, d)), end
        self.patches = nn.Conv2d(channels, d, patch, patch, bias=bias)
        blocks = [
            part for _ in range(layers) for part in (
                Plus(nn.LayerNorm(d, eps=0.1), Attention(d, heads, bias, **options)),
                Plus(nn.LayerNorm(d, eps=0.1), nn.Linear(d, 2 * d), bend(), nn.Linear(2 * d, d)),
            )
        ]  # fmt: skip
        self.layers = nn.Sequential(*blocks)
        self.head = nn.Linear(d if end != "all" else n * d, OUT)

    def forward(self, x):
        x = self.layers(self.patches(x).flatten(2).transpose(1, 2) + self.place)
        return self.head(x.mean(1) if self.end == "mean" else x[:, 0] if self.end == "first" else x.flatten(1))


def drawn(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    heads, each, patch, high, wide = (int(rng.integers(1, most)) for most in (5, 19, 4, 5, 6))
    image = int(rng.integers(1, 4)), patch * high, patch * wide
    model = ViT(
        heads * each, heads, patch, image, int(rng.integers(1, 3)), one_of(rng, nn.GELU, nn.ReLU, nn.Tanh),
        bool(rng.random() < 0.7), one_of(rng, "mean", "first", "all"), how=one_of(rng, "permuted", "thirds"),
    )  # fmt: skip
    task = Task(model, dtype=torch.float64, weight_decay=one_of(rng, 0.0, 0.01))
    sizes = rng.integers(1, 25, rng.integers(1, 4))
    s, p = len(sizes), task.p
    parts = [(torch.tensor(rng.normal(size=(n, *image))), torch.tensor(rng.integers(0, OUT, n))) for n in sizes]
    split = Split.of(parts)
    check(task, split, OUT)
    w, anchor, shift = task.w0 + 0.1 * torch.randn(3, s, p, dtype=torch.float64)
    stated: dict = {"shift": shift} if rng.random() < 0.3 else {}
    stated |= {"pull": (one_of(rng, 0.3, torch.rand(p).double()), anchor)} if rng.random() < 0.3 else {}
    only = one_of(rng, torch.rand(s, p) < 0.5, task.layout.mask("head"), task.layout.mask("place")).double()
    stated |= {"only": only} if rng.random() < 0.4 else {}
    work = Work(2, one_of(rng, None, int(rng.integers(1, 5))), one_of(rng, None, int(rng.integers(1, 33))))
    return Case(task, task.place(split), work, w, 0.02, stated, False)


@needed
@pytest.mark.parametrize("few", range(20))
def test_the_kernel_takes_torchs_steps(few, monkeypatch):
    for seed in range(3 * few, 3 * few + 3):
        compare(drawn(seed), monkeypatch, seed)


@needed
@pytest.mark.long
def test_the_kernel_takes_torchs_steps_in_a_thousand_transformers(monkeypatch):
    for seed in range(1000):
        compare(drawn(seed), monkeypatch, seed)


class Crossed(ViT):
    """What lies before tokens are turned, added behind."""

    def forward(self, x):
        x = self.patches(x).flatten(2)
        return self.head((x.transpose(1, 2) + self.place + x).mean(1))


@needed
@pytest.mark.parametrize(
    "model",
    [
        ViT(is_causal=True),
        ViT(dropout_p=0.5),
        ViT(scale=0.1),
        ViT(how="swapped"),
        Crossed(layers=0),
    ],
    ids=["causal", "dropout", "scale", "keys before queries", "crossed"],
)
def test_other_attention_is_left_to_torch(model):
    split = split_of(inputs=(3, 4, 6))
    task = Task(model)
    assert path_of(usual().net, None, usual().place(split)) == "native"
    assert path_of(task.net, None, task.place(split)) != "native"


def usual():
    return Task(ViT())
