"""Rounds of networks that people federate, beside the plain loop's and JAX's: ten clients, two epochs, batches of 20.

    python benchmarks/nets.py [--cores 1 2] [--only "GRU" "ViT"] [--repeats 5] [--clock processor] [--record]

The loop is `plain.py`'s at its best (one indexing an epoch, autograd.grad, one foreach update, no optimiser object),
with 1 thread and with one per core; the better counts. polyfed runs what `fit` runs. JAX is `compiled.py`'s, where it
is installed (`pip install 'polyfed[bench]'`), with torch's outputs first; it has no dropout there. All take turns in
one process per number of cores, and what has taken `ENOUGH` seconds no more of them; ratios are medians over turns, by
the wall's clock and in processor time, which alone says something on a machine that does other things. "peak" is the
milliseconds of the round's products at the speed of the fastest large product of torch, oneDNN, NumPy and JAX.
`--record` keeps the rows under version and processor in docs/tables/benchmarks/nets.csv, which the page on speed shows.
"""

import argparse
import csv
import math
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import chains
import compiled
import numpy as np
import torch
import torch.nn.functional as F
from rounds import PEAK, Ours, Plain, in_jax, peaks, processor
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from workloads import MINIBATCH

import polyfed as pf
from polyfed.algorithms.fedavg import FedAvg

CLIENTS, SAMPLES, CLASSES = 10, 50, 10
ENOUGH = 4.0
SPAN = 20.0  # milliseconds of a turn, at least: small rounds come one after another, as in a training
QUIET = 0.1  # seconds until the threads of what ran before have stopped waiting for more
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
RECORD = Path(__file__).parents[1] / "docs/tables/benchmarks/nets.csv"
COLUMNS = (
    "net<",
    "cores",
    "release<",
    "clock<",
    "loop, ms",
    "polyfed, ms",
    "JAX, ms",
    "peak, ms",
    "loop / polyfed",
    "JAX / polyfed",
)
COLUMNS += "path<", "date<", "processor<"


class Recurrent(nn.Module):
    """The last step of recurrent layers, behind a table where the samples are characters."""

    def __init__(self, cell: nn.Module, width: int, table: nn.Module | None = None, classes: int = CLASSES):
        super().__init__()
        self.table, self.cell, self.head = table, cell, nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.cell(x if self.table is None else self.table(x))
        return self.head(out[:, -1])

    def in_jax(self, part: Any, p: dict[str, Any], at: str, x: Any) -> Any:
        return part("head", part("cell", x if self.table is None else part("table", x))[:, -1])


class Attention(nn.Module):
    def __init__(self, d: int, heads: int):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(d, 3 * d), nn.Linear(d, d), heads

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d))

    def in_jax(self, part: Any, p: dict[str, Any], at: str, x: Any) -> Any:
        import jax

        b, n, d = x.shape
        q, k, v = (z.squeeze(2) for z in np.split(part("qkv", x).reshape(b, n, 3, self.heads, -1), 3, 2))
        return part("out", jax.nn.dot_product_attention(q, k, v).reshape(b, n, d))


class Plus(nn.Module):
    """x + f(x), with a convolution of the former where the shapes differ, then what is behind."""

    def __init__(self, *parts: nn.Module, short: nn.Module | None = None, behind: nn.Module | None = None):
        super().__init__()
        self.f, self.short, self.behind = nn.Sequential(*parts), short, behind

    def forward(self, x: Tensor) -> Tensor:
        y = self.f(x)
        y = y + (x if self.short is None else self.short(x))
        return y if self.behind is None else self.behind(y)

    def in_jax(self, part: Any, p: dict[str, Any], at: str, x: Any) -> Any:
        y = part("f", x) + (x if self.short is None else part("short", x))
        return y if self.behind is None else part("behind", y)


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

    def in_jax(self, part: Any, p: dict[str, Any], at: str, x: Any) -> Any:
        x = part("patches", x)
        x = x.reshape(*x.shape[:2], -1).swapaxes(1, 2) + p[at + "place"]
        return part("head", part("norm", part("layers", x)).mean(1))


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
    "PFLlib's CNN": (
        (3, 32, 32),
        lambda: nn.Sequential(
            nn.Conv2d(3, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(1600, 512), nn.ReLU(), nn.Linear(512, CLASSES),
        ),
    ),
    "softmax regression, 784": ((784,), lambda: pf.models.build("linear", (784,), CLASSES)),
    "MLP 784-200-10": ((784,), lambda: pf.models.build("mlp", (784,), CLASSES)),
    "rows of a table: LayerNorm, GELU, dropout": ((chains.INPUTS,), lambda: chains.nets(64)["residual"]),
}  # fmt: skip


def federation(shape: tuple[int, ...], classes: int, whole: bool) -> pf.Federation:
    """Random samples; characters, whole numbers below 80, where `whole`."""
    rng = np.random.default_rng(0)

    def client() -> tuple[np.ndarray, np.ndarray]:
        x = rng.integers(0, 80, (SAMPLES, *shape)) if whole else rng.normal(size=(SAMPLES, *shape)).astype(np.float32)
        return x, rng.integers(0, classes, SAMPLES)

    parts = [client() for _ in range(CLIENTS)]
    return pf.Federation.from_arrays(parts, [(x[:2], y[:2]) for x, y in parts], classes=classes)


def measure(name: str, cores: int, repeats: int, clocks: list[str]) -> list[list[str]]:
    """The net's rows of the table, one per clock."""
    shape, make = NETS[name]
    torch.manual_seed(0)
    model = make()
    kinds = {type(m) for m in model.modules()}
    parts = federation(shape, [*model.parameters()][-1].numel(), nn.Embedding in kinds)
    # of what `Ours` and `Plain` read: a workload whose model is no name of polyfed's
    workload: Any = SimpleNamespace(build=lambda _: model, algorithm=FedAvg(lr=0.05), fraction=1.0, work=MINIBATCH)
    ours, clients = Ours(workload, parts, 0), [*range(CLIENTS)]
    runs: dict[str, Callable[[], object]] = {"polyfed": ours.round}
    loops = {f"loop {k}": Plain(workload, parts, clients, k, True).round for k in sorted({1, cores})}
    jax = compiled.Jax(model, parts.train, clients) if compiled.HERE and nn.Dropout not in kinds else None
    runs |= loops
    if jax is not None:
        with torch.no_grad():
            np.testing.assert_allclose(jax.outputs(20), model(parts.train.x[:20]), rtol=1e-3, atol=1e-4)
        runs["JAX, compiled"] = partial(in_jax, workload, jax)
    products = peaks(jax)
    warnings.filterwarnings("ignore", "TF32 acceleration")
    with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(parts.train.x[:20]), parts.train.y[:20]).backward()
    work = counter.get_total_flops() / 20 * CLIENTS * SAMPLES * (MINIBATCH.epochs or 1)
    turns: dict[str, list[dict[str, float]]] = {label: [] for label in [*runs, *products]}  # milliseconds by clock
    many = dict.fromkeys(turns, 1)  # rounds of a turn
    for turn in range(repeats + 1):
        for label, run in (products | runs).items():
            if sum(many[label] * t["wall"] for t in turns[label]) < 1e3 * ENOUGH:
                torch.set_num_threads(cores)
                time.sleep(QUIET)
                if not turn:
                    run()  # warms up
                start = {c: now() for c, now in CLOCKS.items()}
                for _ in range(many[label]):
                    run()
                each = {c: 1e3 * (now() - start[c]) / many[label] for c, now in CLOCKS.items()}
                if turn:
                    turns[label].append(each)
                else:
                    many[label] = math.ceil(SPAN / each["wall"])
    head, tail = (name, str(cores), pf.__version__), (ours.plan.path, f"{date.today()}", processor())
    return [[*head, c, *cells(turns, c, [*loops], [*products], work), *tail] for c in clocks]


def cells(
    turns: dict[str, list[dict[str, float]]], clock: str, loops: list[str], products: list[str], work: float
) -> list[str]:
    """Milliseconds and ratios by one clock."""
    times = {label: [t[clock] for t in of] for label, of in turns.items()}
    best = min(loops, key=lambda label: median(times[label]))
    peak = min(min(times[label]) for label in products) * work / (2 * PEAK**3)
    found = [median(times[label]) if label in times else None for label in (best, "polyfed", "JAX, compiled")]
    ratios = [
        f"{median(x / y for x, y in zip(times[label], times['polyfed'], strict=False)):.2f}" if label in times else ""
        for label in (best, "JAX, compiled")
    ]
    return [*("" if c is None else f"{c:.3g}" if c < 100 else f"{c:.0f}" for c in [*found, peak]), *ratios]


def keep(row: list[str]) -> None:
    """Put a row in the record, in place of that of the same net, cores, release, clock and processor."""
    rows = [*csv.reader(RECORD.read_text().splitlines())][1:] if RECORD.exists() else []
    rows = [r for r in rows if [*r[:4], r[-1]] != [*row[:4], row[-1]]] + [row]
    rows.sort(key=lambda r: ([*NETS].index(r[0]) if r[0] in NETS else len(NETS), r[1]))  # stable: releases as they came
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    with RECORD.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=int, nargs="+", default=sorted({1, pf.base.system.cores()}))
    parser.add_argument("--only", nargs="+", default=[""], help="nets whose names begin so")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clock", nargs="+", choices=[*CLOCKS], default=[*CLOCKS])
    parser.add_argument("--record", action="store_true", help=f"also into {RECORD.name}, under this version")
    given = parser.parse_args()
    if len(given.cores) > 1:  # one process each: thread pools are made once
        here = "" if compiled.HERE else "; no JAX here, its column is empty: pip install 'polyfed[bench]'"
        print(f"{processor()}; torch {torch.__version__}{here}\n")
        print(f"| {' | '.join(c.rstrip('<') for c in COLUMNS[:-2])} |")
        print(f"|{'|'.join('---' if c.endswith('<') else '--:' for c in COLUMNS[:-2])}|", flush=True)
        for k in given.cores:
            words = ["--cores", str(k), "--repeats", str(given.repeats), "--clock", *given.clock, "--only", *given.only]
            subprocess.run([sys.executable, __file__, *words, *["--record"] * given.record], check=True)
        return
    (k,) = given.cores
    if hasattr(os, "sched_setaffinity") and len(os.sched_getaffinity(0)) > k:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-k:])
        os.execv(sys.executable, [sys.executable, __file__, *sys.argv[1:]])  # libraries count cores as they are loaded
    if k == 1:
        compiled.one_core()
    for name in NETS:
        if name.startswith(tuple(given.only)):
            for row in measure(name, k, given.repeats, given.clock):
                print(f"| {' | '.join(row[:-2])} |", flush=True)
                if given.record:
                    keep(row)


if __name__ == "__main__":
    main()
