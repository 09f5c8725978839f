"""Images as rows of channels in the compiled kernel: convolutions with steps and groups, norms by groups of channels,
pools and residual blocks end where torch does, by every instruction set."""

import numpy as np
import pytest
import torch
from test_chains import BENDS, Plus
from test_kernel import OUT, SIZES, batches, needed, split_of
from test_networks import Case, compare, one_of
from torch import nn

from polyfed.compute.batches import Work
from polyfed.compute.solvers import local_sgd
from polyfed.compute.split import Split
from polyfed.compute.task import Task


class Short(Plus):
    """f(x) plus a layer of x."""

    def __init__(self, *parts, short):
        super().__init__(*parts)
        self.short = short

    def forward(self, x):
        return self.f(x) + self.short(x)


class Mean(nn.Module):
    def forward(self, x):
        return x.mean([*range(2, x.dim())])


def conv(rng, channels: int, out: int, image: list[int], step=1, groups=1) -> nn.Module:
    window = [int(rng.integers(1, min(4, n) + 1)) for n in image]
    around = [int(rng.integers(0, n)) for n in window]
    kind = nn.Conv2d if len(image) == 2 else nn.Conv1d
    return kind(channels, out, window, step, around, groups=groups, bias=bool(rng.random() < 0.6))


def norm(rng, channels: int) -> nn.Module:
    groups = int(one_of(rng, *[g for g in range(1, channels + 1) if channels % g == 0]))
    return nn.GroupNorm(groups, channels, eps=one_of(rng, 1e-3, 0.1), affine=bool(rng.random() < 0.8))


def body(rng, channels: int, image: list[int], depth: int = 0) -> list[nn.Module]:
    """Layers on images of these channels, which have as many places at the end where `depth` is not 0."""
    found: list[nn.Module] = []

    def shape() -> tuple[int, list[int]]:
        made = nn.Sequential(*found)(torch.zeros(2, channels, *image))
        return made.shape[1], [*made.shape[2:]]

    for k in range(rng.integers(1, 5)):
        c, places = shape()
        kind = rng.integers(0, 6) if k or depth else 0  # torch's own GroupNorm ends the process on samples as they are
        if kind == 0 and depth == 0:
            out = int(one_of(rng, 1, 3, 8, 16, 17, rng.integers(1, 30)))
            found.append(conv(rng, c, out, places, int(rng.integers(1, 3))))
        if kind == 1:
            groups = int(one_of(rng, c, *[g for g in range(1, c + 1) if c % g == 0]))
            odd = [min(n - 1 + n % 2, 3) for n in places]
            make = nn.Conv2d if len(places) == 2 else nn.Conv1d
            step, bias = 1 if depth else int(rng.integers(1, 3)), bool(rng.random() < 0.6)
            found.append(make(c, c, odd, step, [n // 2 for n in odd], groups=groups, bias=bias))
        if kind == 2 and np.prod(places) > 3:
            found.append(norm(rng, c))
        if kind == 3:
            found.append(one_of(rng, *BENDS)())
        if kind == 4 and depth == 0 and min(places) > 2:
            flat, step = len(places) == 1, int(rng.integers(1, 3))
            largest, mean = (nn.MaxPool1d, nn.AvgPool1d) if flat else (nn.MaxPool2d, nn.AvgPool2d)
            found.append(one_of(rng, largest(2), largest(3, step, 1), mean(2), mean(2, step)))
        if kind == 5 and depth < 2:
            inside = body(rng, c, places, depth + 1)
            if rng.random() < 0.5:
                found.append(Plus(*inside, turned=bool(rng.random() < 0.5)))
            elif depth == 0:
                make, step = nn.Conv2d if len(places) == 2 else nn.Conv1d, int(rng.integers(1, 3))
                last, short = make(c, 9, 3, step, 1), [make(c, 9, 1, step)]
                short += [norm(rng, 9)] if rng.random() < 0.5 and np.prod(places) > 15 else []
                found += [Short(*inside, last, short=nn.Sequential(*short)), one_of(rng, *BENDS)()]
    return found


def drawn(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    outputs, loss = int(rng.integers(2, 12)), one_of(rng, "cross-entropy", "mse")
    shape = int(rng.integers(1, 20)), *map(int, rng.integers(2, 12, int(rng.integers(1, 3))))
    modules = body(rng, shape[0], [*shape[1:]])
    _, *places = nn.Sequential(*modules)(torch.zeros(2, *shape)).shape[1:]
    flat = len(places) == 1
    pool = nn.AdaptiveAvgPool1d(1) if flat else nn.AdaptiveAvgPool2d(1)
    modules += one_of(rng, [nn.Flatten()], [pool, nn.Flatten()], [Mean()])
    width = nn.Sequential(*modules)(torch.zeros(2, *shape)).shape[1]
    modules += [nn.Linear(width, 8), nn.GELU(), nn.Dropout(0.3)] if rng.random() < 0.4 else []
    modules.append(nn.Linear(8 if isinstance(modules[-1], nn.Dropout) else width, outputs))
    single = rng.random() < 0.2
    dtype = torch.float32 if single else torch.float64
    task = Task(nn.Sequential(*modules), loss, weight_decay=one_of(rng, 0.0, 0.01), dtype=dtype)
    sizes = rng.integers(1, 16, rng.integers(1, 4))
    s, p = len(sizes), task.p

    def client(n: int):
        y = rng.integers(0, outputs, n) if loss == "cross-entropy" else rng.normal(size=(n, outputs))
        return torch.tensor(rng.normal(size=(n, *shape))), torch.tensor(y)

    w, anchor, shift = task.w0 + 0.1 * torch.randn(3, s, p, dtype=dtype)
    stated: dict = {"shift": shift} if rng.random() < 0.3 else {}
    stated |= {"pull": (one_of(rng, 0.3, torch.rand(p, dtype=dtype)), anchor)} if rng.random() < 0.3 else {}
    layer = one_of(rng, "head", *sorted({e.name.split(".")[0] for e in task.layout.entries}))
    only = one_of(rng, torch.rand(s, p) < 0.5, task.layout.mask(layer)).to(dtype)
    stated |= {"only": only} if rng.random() < 0.3 else {}
    steps = 1 if single else one_of(rng, None, int(rng.integers(1, 5)))
    work = Work(2, steps, one_of(rng, None, int(rng.integers(1, 16))))
    return Case(task, task.place(Split.of([client(n) for n in sizes])), work, w, 0.05, stated, False)


@needed
@pytest.mark.parametrize("few", range(12))
def test_the_kernel_takes_torchs_steps(few, monkeypatch):
    for seed in range(3 * few, 3 * few + 3):
        compare(drawn(seed), monkeypatch, seed)


@needed
@pytest.mark.long
def test_the_kernel_takes_torchs_steps_in_a_thousand_networks_of_images(monkeypatch):
    for seed in range(1000):
        compare(drawn(seed), monkeypatch, seed)


@needed
@pytest.mark.parametrize(
    ("pool", "side"),
    [
        (nn.MaxPool2d(2), 6),
        (nn.MaxPool2d(2), 5),  # a row is in no window
        (nn.AvgPool2d(3, 2), 6),  # one is in two windows, one in none: as many as there are
        (nn.MaxPool2d(3, 3, 1), 3),  # so do the zeros around
    ],
)
def test_every_number_gets_the_gradient_of_the_windows_that_see_it(pool, side, monkeypatch):
    torch.manual_seed(1)
    again = nn.Conv2d(4, 4, pool.kernel_size, pool.stride, pool.padding)
    wide = nn.Conv2d(4, 4, 3, 1, 1), nn.Conv2d(4, 4, 3, 1, 1)  # whose gradients reach what no window sees
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, 1, 1),
        Plus(nn.GroupNorm(2, 4), nn.Tanh()),
        Short(wide[0], short=wide[1]),
        Short(again, short=pool),
        Mean(),
        nn.Linear(4, OUT),
    )
    task = Task(model, dtype=torch.float64)
    start, split = task.w0.expand(len(SIZES), -1), task.place(split_of(inputs=(2, side, side)))
    compare(Case(task, split, Work(2, None, 16), start, 0.05, {}, False), monkeypatch, "pool")


@needed
def test_norms_of_large_images_learn_at_clients_that_train_them_first_later_and_never(monkeypatch):
    """Images of which one alone is kept near: a norm's gradient is added up on the way back, if there is one."""
    torch.manual_seed(1)
    parts = nn.Conv2d(1, 16, 3, 1, 1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 4, 3, 4), nn.GroupNorm(2, 4)
    task = Task(nn.Sequential(*parts, Mean(), nn.Linear(4, OUT)), dtype=torch.float64)
    mask = {name: task.layout.mask(name).double() for name in ("0", "1", "3", "4", "6")}
    above = mask["4"] + mask["6"]
    only = torch.stack([sum(mask.values()), above + mask["3"] + mask["1"], above, mask["6"], sum(mask.values())])
    split = task.place(split_of(sizes=(3, 2, 2, 2, 3), inputs=(1, 72, 64)))
    start = task.w0.expand(len(only), -1)
    compare(Case(task, split, Work(1, 2, 2), start, 0.05, {"only": only}, False), monkeypatch, "large")


class Thrice(Short):
    def forward(self, x):
        return super().forward(x) + x


@needed
def test_the_gradients_of_all_that_take_an_image_are_added_up(monkeypatch):
    torch.manual_seed(1)
    block = Thrice(nn.Conv2d(4, 4, 3, 1, 1), nn.ReLU(), short=nn.Conv2d(4, 4, 1))
    model = nn.Sequential(nn.Conv2d(2, 4, 3), block, nn.Conv2d(4, 4, 3, 2, 1, groups=4), Mean(), nn.Linear(4, OUT))
    task = Task(model, dtype=torch.float64)
    split = task.place(split_of(inputs=(2, 5, 6)))
    start, work = task.w0.expand(len(SIZES), -1), Work(2, None, 16)
    compare(Case(task, split, work, start, 0.05, {}, False), monkeypatch, "thrice")


@needed
@pytest.mark.parametrize("block", [64, 3])
def test_a_client_comes_out_the_same_whoever_is_trained_with_it_and_a_diverging_one_is_seen(block):
    """Also a deep block, of which a few images at a time are kept."""
    torch.manual_seed(1)
    parts = (nn.Conv2d(9, 9, 3, 2, 1, groups=block // 3 % 9 or 9), nn.GroupNorm(3, 9), nn.ReLU())
    model = nn.Sequential(nn.Conv2d(2, 9, 3), Short(*parts, short=nn.Conv2d(9, 9, 1, 2)), Mean(), nn.Linear(9, OUT))
    task = Task(model)
    split = task.place(split_of(inputs=(2, block, 9)))
    w = task.w0 + 0.02 * torch.randn(len(SIZES), task.p)
    work = Work(epochs=2, batch_size=16)
    calm = local_sgd(task, w, batches(split, work, True), 0.05)
    found = local_sgd(task, w.index_fill(0, torch.tensor([1]), torch.nan), batches(split, work, True), 0.05)
    assert found[1].isnan().any()
    for i in (0, 2, 3, 4):
        assert torch.equal(found[i], calm[i])
        assert torch.equal(local_sgd(task, w[[i]], batches(split, work, True, [i]), 0.05)[0], calm[i])
