"""Rounds of networks that people federate, polyfed's over the plain loop's: ten clients, two epochs, batches of 20.

    python benchmarks/nets.py [--cores 1 2] [--only "GRU" "ViT"] [--repeats 7] [--clock processor]

The loop is `plain.py`'s at its best (one indexing an epoch, autograd.grad, one foreach update, no optimiser object),
with 1 thread and with one per core. polyfed runs what `fit` runs. All take turns in one process per number of cores;
ratios are medians over turns; `--clock processor` is for one core of a machine that does other things. "peak" is the
milliseconds of the round's products at the speed of a large torch.mm. JAX has no modules of torch's: the networks that
it can be given are `rounds.py`'s.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rounds import PEAK, Ours, Plain, processor
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from workloads import MINIBATCH

import polyfed as pf
from polyfed.algorithms.fedavg import FedAvg

CLIENTS, SAMPLES, CLASSES = 10, 50, 10


class Recurrent(nn.Module):
    """The last step of recurrent layers, behind a table where the samples are characters."""

    def __init__(self, cell: nn.Module, width: int, table: nn.Module | None = None, classes: int = CLASSES):
        super().__init__()
        self.table, self.cell, self.head = table, cell, nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.cell(x if self.table is None else self.table(x))
        return self.head(out[:, -1])


class Attention(nn.Module):
    def __init__(self, d: int, heads: int):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(d, 3 * d), nn.Linear(d, d), heads

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d))


class Plus(nn.Module):
    """x + f(x), with a convolution of the former where the shapes differ, then what is behind."""

    def __init__(self, *parts: nn.Module, short: nn.Module | None = None, behind: nn.Module | None = None):
        super().__init__()
        self.f, self.short, self.behind = nn.Sequential(*parts), short, behind

    def forward(self, x: Tensor) -> Tensor:
        y = self.f(x)
        y = y + (x if self.short is None else self.short(x))
        return y if self.behind is None else self.behind(y)


class ViT(nn.Module):
    def __init__(self, layers: int = 4, d: int = 64, patch: int = 4, tokens: int = 64):
        super().__init__()
        self.patches, self.place = nn.Conv2d(3, d, patch, patch), nn.Parameter(0.02 * torch.randn(1, tokens, d))

        def layer() -> list[nn.Module]:
            wide = nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d)
            return [Plus(nn.LayerNorm(d), Attention(d, 4)), Plus(nn.LayerNorm(d), *wide)]

        self.layers = nn.Sequential(*(m for _ in range(layers) for m in layer()))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.place
        return self.head(self.norm(self.layers(x)).mean(1))


def conv(a: int, b: int, step: int = 1, groups: int = 1, window: int = 3) -> nn.Conv2d:
    return nn.Conv2d(a, b, window, step, window // 2, groups=groups, bias=False)


def norm(channels: int, groups: int = 8) -> nn.Module:
    return nn.GroupNorm(groups, channels)


def residual(a: int, b: int, step: int) -> nn.Module:
    short = None if a == b else nn.Sequential(conv(a, b, step, window=1), norm(b))
    return Plus(conv(a, b, step), norm(b), nn.ReLU(), conv(b, b), norm(b), short=short, behind=nn.ReLU())


def separable(a: int, b: int, step: int) -> list[nn.Module]:
    return [conv(a, a, step, a), norm(a), nn.ReLU(), conv(a, b, window=1), norm(b), nn.ReLU()]


def mean() -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten()]


def vocabulary() -> nn.Module:
    return nn.Embedding(80, 8)


NETS: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {  # shape of a sample, model
    "GRU 64 on 64 x 6": ((64, 6), lambda: Recurrent(nn.GRU(6, 64, batch_first=True), 64)),
    "Conv1d 9-32-64 on 128 steps": (
        (9, 128),
        lambda: nn.Sequential(
            nn.Conv1d(9, 32, 5, padding=2), nn.ReLU(), nn.Conv1d(32, 64, 5, padding=2), nn.ReLU(),
            nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, CLASSES),
        ),
    ),
    "depthwise and pointwise": (
        (3, 32, 32),
        lambda: nn.Sequential(
            conv(3, 32, 2), norm(32), nn.ReLU(), *separable(32, 64, 1), *separable(64, 128, 2), *separable(128, 128, 1),
            *mean(), nn.Linear(128, CLASSES),
        ),
    ),
    "ViT, 4 layers of 64, 64 tokens": ((3, 32, 32), ViT),
    "CNN with GroupNorm, 32-64": (
        (3, 32, 32),
        lambda: nn.Sequential(
            conv(3, 32), norm(32), nn.ReLU(), nn.MaxPool2d(2), conv(32, 64), norm(64), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(64 * 64, CLASSES),
        ),
    ),
    "ResNet-8 with GroupNorm": (
        (3, 32, 32),
        lambda: nn.Sequential(
            conv(3, 16), norm(16), nn.ReLU(), residual(16, 16, 1), residual(16, 32, 2), residual(32, 64, 2),
            *mean(), nn.Linear(64, CLASSES),
        ),
    ),
    "LSTM 2 x 128 on 80 characters": (
        (80,), lambda: Recurrent(nn.LSTM(8, 128, 2, batch_first=True), 128, vocabulary(), 80)
    ),
    "LEAF's CNN": ((1, 28, 28), lambda: pf.models.build("cnn", (1, 28, 28), CLASSES)),
}  # fmt: skip


def federation(shape: tuple[int, ...], classes: int) -> pf.Federation:
    """Random samples; whole numbers below 80 where a sample is a row."""
    rng = np.random.default_rng(0)

    def client() -> tuple[np.ndarray, np.ndarray]:
        x = rng.integers(0, 80, (SAMPLES, *shape)) if len(shape) == 1 else rng.normal(size=(SAMPLES, *shape))
        return x if len(shape) == 1 else x.astype(np.float32), rng.integers(0, classes, SAMPLES)

    parts = [client() for _ in range(CLIENTS)]
    return pf.Federation.from_arrays(parts, [(x[:2], y[:2]) for x, y in parts], classes=classes)


def measure(name: str, cores: int, repeats: int, clock: str) -> None:
    shape, make = NETS[name]
    torch.manual_seed(0)
    model = make()
    parts = federation(shape, [*model.parameters()][-1].numel())
    # of what `Ours` and `Plain` read: a workload whose model is no name of polyfed's
    workload: Any = SimpleNamespace(build=lambda _: model, algorithm=FedAvg(lr=0.05), fraction=1.0, work=MINIBATCH)
    ours, clients = Ours(workload, parts, 0), [*range(CLIENTS)]
    runs = {"ours": ours.round}
    runs |= {f"loop {k}": plain_round(workload, parts, clients, k) for k in sorted({1, cores})}
    now = time.process_time if clock == "processor" else time.perf_counter
    times: dict[str, list[float]] = {label: [] for label in [*runs, "peak"]}
    a = torch.randn(PEAK, PEAK)
    with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(parts.train.x[:20]), parts.train.y[:20]).backward()
    work = counter.get_total_flops() / 20 * CLIENTS * SAMPLES * (MINIBATCH.epochs or 1)
    for turn in range(repeats + 1):
        for label, run in runs.items():
            start = now()
            run()
            if turn:
                times[label].append(1e3 * (now() - start))
        torch.set_num_threads(cores)
        start = now()
        torch.mm(a, a)
        times["peak"].append(1e3 * (now() - start) * work / (2 * PEAK**3))
    best = min((label for label in runs if label != "ours"), key=lambda label: median(times[label]))
    ratio = median(x / y for x, y in zip(times[best], times["ours"], strict=True))
    cells = [median(times[best]), median(times["ours"]), min(times["peak"])]
    print(f"| {name} | {cores} | {best} | {' | '.join(f'{c:.0f}' for c in cells)} | {ratio:.2f} | {ours.plan.path} |")
    sys.stdout.flush()


def plain_round(workload: Any, parts: pf.Federation, clients: list[int], threads: int) -> Callable[[], object]:
    return Plain(workload, parts, clients, threads, True).round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=int, nargs="+", default=sorted({1, pf.base.system.cores()}))
    parser.add_argument("--only", nargs="+", default=[""], help="nets whose names begin so")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--clock", choices=["wall", "processor"], default="wall")
    given = parser.parse_args()
    if len(given.cores) > 1:  # one process each: thread pools are made once
        print(f"{processor()}; torch {torch.__version__}; JAX runs none of these\n")
        print("| net | cores | loop | loop, ms | polyfed, ms | peak, ms | ratio | path |")
        print("|---|--:|---|--:|--:|--:|--:|---|", flush=True)
        for k in given.cores:
            words = ["--cores", str(k), "--repeats", str(given.repeats), "--clock", given.clock, "--only", *given.only]
            subprocess.run([sys.executable, __file__, *words], check=True)
        return
    (k,) = given.cores
    if hasattr(os, "sched_setaffinity") and len(os.sched_getaffinity(0)) > k:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-k:])
        os.execv(sys.executable, [sys.executable, __file__, *sys.argv[1:]])  # libraries count cores as they are loaded
    for name in NETS:
        if name.startswith(tuple(given.only)):
            measure(name, k, given.repeats, given.clock)


if __name__ == "__main__":
    main()
