"""Local epochs of small chains in the compiled kernel over the plain loop's (client by client: pass, `autograd.grad`,
update): medians of ratios of processor time of one thread, in pairs.
"""

import argparse
import sys
from time import thread_time

import numpy as np
import torch
from torch import Tensor, nn

from polyfed.compute.batches import Batches, Work
from polyfed.compute.check import check
from polyfed.compute.compiled import path_of
from polyfed.compute.solvers import local_sgd
from polyfed.compute.split import Split
from polyfed.compute.task import Task

INPUTS, CLASSES, SAMPLES = 32, 10, 320
COLUMNS, CATEGORIES, NUMBERS = 4, 20, 8  # of the inputs, that say a category; numbers that a table has of each


class Plus(nn.Module):
    def __init__(self, *parts: nn.Module):
        super().__init__()
        self.f = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)


class Tables(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(CATEGORIES, NUMBERS) for _ in range(COLUMNS))

    def forward(self, x: Tensor) -> Tensor:
        found = [table(x[:, k].long()) for k, table in enumerate(self.tables)]
        return torch.cat([*found, x[:, COLUMNS:]], 1)


def nets(d: int) -> dict[str, nn.Module]:
    def two(*behind: type[nn.Module] | nn.Module) -> nn.Module:
        def some() -> list[nn.Module]:
            return [m() if isinstance(m, type) else m for m in behind]

        return nn.Sequential(nn.Linear(INPUTS, d), *some(), nn.Linear(d, d), *some(), nn.Linear(d, CLASSES))

    def block() -> nn.Module:
        drop = nn.Dropout(0.1)
        return Plus(nn.LayerNorm(d), nn.Linear(d, d), nn.GELU(), drop, nn.Linear(d, d), drop)

    norms = [m for _ in range(2) for m in (nn.LayerNorm(d), nn.ReLU(), nn.Linear(d, d))]
    return {
        "ReLU": two(nn.ReLU),
        "GELU": two(nn.GELU),
        "GELU, tanh": two(nn.GELU("tanh")),
        "SiLU": two(nn.SiLU),
        "LayerNorm, ReLU": nn.Sequential(nn.Linear(INPUTS, d), *norms[:-1], nn.Linear(d, CLASSES)),
        "ReLU, dropout": two(nn.ReLU, nn.Dropout(0.1)),
        "residual": nn.Sequential(nn.Linear(INPUTS, d), block(), block(), nn.LayerNorm(d), nn.Linear(d, CLASSES)),
        "tables, ReLU": nn.Sequential(
            Tables(),
            nn.Linear(INPUTS - COLUMNS + COLUMNS * NUMBERS, d),
            nn.ReLU(),
            nn.Linear(d, d),
            nn.ReLU(),
            nn.Linear(d, CLASSES),
        ),
    }


def plain(model: nn.Module, task: Task, split: Split, lr: float, batch: int) -> None:
    parameters = [*model.parameters()]
    for c in range(split.n):
        x, y = split.client(c)
        task.layout.load_(model, task.w0)
        for rows in torch.randperm(len(x)).split(batch):
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            found = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                for q, g in zip(parameters, found, strict=True):
                    q.sub_(g, alpha=lr)


def ratio(model: nn.Module, batch: int, clients: int, repeats: int) -> tuple[float, float]:
    """(the loop's time over the kernel's, microseconds of a step in the kernel)."""
    rng = np.random.default_rng(0)

    def client() -> tuple[Tensor, Tensor]:
        x = torch.as_tensor(rng.normal(size=(SAMPLES, INPUTS)), dtype=torch.float32)
        x[:, :COLUMNS] = torch.as_tensor(rng.integers(0, CATEGORIES, (SAMPLES, COLUMNS)))
        return x, torch.as_tensor(rng.integers(0, CLASSES, SAMPLES))

    task, split = Task(model), Split.of([client() for _ in range(clients)])
    check(task, split, CLASSES)
    assert path_of(task.net, None, split) == "native", model
    w, found = task.w0.expand(clients, -1), list[tuple[float, float]]()
    for _ in range(repeats + 1):
        before = thread_time()
        plain(model, task, split, 0.05, batch)
        between = thread_time()
        keys = np.arange(clients, dtype=np.uint64)
        local_sgd(task, w, Batches(split, np.arange(clients), keys, Work(1, None, batch), 0, 0, native=True), 0.05)
        found.append((between - before, thread_time() - between))
    steps = clients * -(-SAMPLES // batch)
    loops, ours = np.array(found[1:]).T
    return float(np.median(loops / ours)), 1e6 * float(np.median(ours)) / steps


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--batches", type=int, nargs="+", default=[10, 32])
    parser.add_argument("--only", nargs="+", choices=[*nets(8)])
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(1)
    pairs = [(b, d) for b in given.batches for d in given.widths]
    print(f"| times the loop (us a step) | {' | '.join(f'{b} of width {d}' for b, d in pairs)} |")
    print("|---|" + "--:|" * len(pairs))
    for name in given.only or nets(8):
        cells = [ratio(nets(d)[name], b, max(2, 640 // d), given.repeats) for b, d in pairs]
        print(f"| {name} | {' | '.join(f'{r:.1f} ({t:.0f})' for r, t in cells)} |")
        sys.stdout.flush()
