"""Processor time of a round by method, relative to FedAvg, and the least that its arithmetic and its vectors allow.

    OMP_NUM_THREADS=1 python benchmarks/methods.py [--rounds 40] [--only scaffold feddyn]

100 clients of 80 samples, 10 in a round, a perceptron 784-200-10 of 159,010 numbers, one epoch of batches of 20, one
thread. Methods take turns, round by round, in one process; the figures are medians. The arithmetic is what torch counts
in matrix products without the kernel.

The floor is these products at FedAvg's rate, eigenvectors as long as they take alone, in single precision, and
every vector of a round once at the rate of a copy: private rows that are read and that are written, messages written
and read, rows of the server's tensors that change read and written. What a product reads belongs to the product;
FedAvg's own vectors are not in its rate, so that its floor is 1. Sorting is not in the floor either.
"""

import argparse
import dataclasses
import os
import time
from collections.abc import Callable
from functools import cache
from importlib import import_module
from math import prod
from pkgutil import iter_modules
from unittest.mock import patch

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

import polyfed.algorithms
from polyfed.base.randomness import client_keys
from polyfed.compute.batches import Work
from polyfed.compute.split import Split
from polyfed.compute.task import Task
from polyfed.core.algorithm import REGISTRY, Algorithm
from polyfed.core.messages import State
from polyfed.core.rounds import Loop
from polyfed.core.rows import Rows
from polyfed.core.schedule import Uniform
from polyfed.engines.local import LocalEngine, make_plan, make_rows

CLIENTS, COHORT, SAMPLES, BATCH = 100, 10, 80, 20
LATE = 30  # rounds before the first that counts: masks, clusters and private rows are then no longer those of the start


def loop(algorithm: Algorithm) -> Loop:
    """A run that is ready for its first round."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(CLIENTS * SAMPLES, 784, generator=g)
    y = torch.randint(0, 10, (CLIENTS * SAMPLES,), generator=g)
    data = {"train": Split(x, y, np.arange(CLIENTS + 1) * SAMPLES)}
    names, work = [f"c{i}" for i in range(CLIENTS)], Work(1, None, BATCH)
    torch.manual_seed(0)
    task = Task(torch.nn.Sequential(torch.nn.Linear(784, 200), torch.nn.ReLU(), torch.nn.Linear(200, 10)), device="cpu")
    plan = make_plan(task, COHORT, work.per_step(data["train"].counts), None, 1)
    rows = make_rows(algorithm, task, CLIENTS, COHORT, None)
    engine = LocalEngine(task, data, rows, client_keys(names), work, 0, plan)
    return Loop(task, np.full(CLIENTS, SAMPLES), names, algorithm, Uniform(COHORT / CLIENTS), engine, 0)


def least(algorithm: Algorithm, rounds: int = 3) -> tuple[float, float, float]:
    """Of a round: arithmetic of matrix products, by torch's own count on the path without the kernel, bytes, and the
    seconds of decompositions."""
    aten, run, decomposed = torch.ops.aten, loop(algorithm), list[torch.Size]()
    run.engine.worker.plan = dataclasses.replace(run.engine.plan, path="closed form")
    for _ in range(LATE - rounds):
        run.step()
    known: dict[object, Callable[..., int]] = dict.fromkeys((aten.addmm_, aten.baddbmm_), _product)
    known[aten._linalg_eigh] = lambda shape, **_: decomposed.append(shape) or 0
    counter = FlopCounterMode(display=False, custom_mapping=known)
    moved, before, billed, rows = 0, checksums(run), sum(run.ledger.totals()), watched(run.engine.rows)
    for _ in range(rounds):
        with counter, patch.dict(os.environ, POLYFED_NATIVE="0"):
            run.step()
        after = checksums(run)
        for name, sums in after.items():
            kept = before[name] == sums if len(before.get(name, ())) == len(sums) else torch.zeros(len(sums))
            moved += 2 * int((kept == 0).sum()) * run.server[name][:1].nbytes
        moved, before = moved + sum(rows.values()), after
        rows.clear()
    seconds = sum(map(decomposing, decomposed))
    moved += 2 * (sum(run.ledger.totals()) - billed)
    return counter.get_total_flops() / rounds, moved / rounds, seconds / rounds


@cache
def decomposing(shape: torch.Size) -> float:
    """Seconds of the eigenvectors of symmetric matrices [..., d, d]."""
    a, seconds = torch.randn(shape), list[float]()
    a = a @ a.mT
    for _ in range(9):
        begun = time.process_time()
        torch.linalg.eigh(a)
        seconds.append(time.process_time() - begun)
    return float(np.median(seconds))


def checksums(run: Loop) -> dict[str, torch.Tensor]:
    """One number for every row of the server's tensors, by which it is seen to have changed."""
    found = {name: t.reshape(len(t), -1) for name, t in run.server.items() if t.dim()}
    return {name: (t.view(torch.int32) if t.dtype == torch.float32 else t).sum(1) for name, t in found.items()}


def watched(rows: Rows) -> dict[tuple[str, str, int], int]:
    """Bytes of every private row from now on: ("read" or "written", tensor, client) -> bytes."""
    found, read, scatter = dict[tuple[str, str, int], int](), rows.read, rows.scatter

    def reading(name: str, ids: torch.Tensor) -> torch.Tensor:
        values = read(name, ids)
        found.update({("read", name, i): values[0].nbytes for i in ids.tolist()})
        return values

    def writing(ids: torch.Tensor, state: State) -> None:
        for name, values in state.items():
            found.update({("written", name, i): values[0].nbytes for i in ids.tolist()})
        scatter(ids, state)

    rows.read, rows.scatter = reading, writing
    return found


def copying() -> float:
    """Bytes a second, read and written, of a copy that no cache holds."""
    a, seconds = torch.rand(1 << 24), list[float]()
    b = a.clone()
    for _ in range(20):
        begun = time.process_time()
        b.copy_(a)
        seconds.append(time.process_time() - begun)
    return 2 * a.nbytes / float(np.median(seconds))


def _product(_: object, a: torch.Size, b: torch.Size, **more: object) -> int:
    """Of addmm_ and baddbmm_, which torch does not know."""
    return 2 * prod(a) * b[-1]


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--rounds", type=int, default=40)
    asked.add_argument("--only", nargs="+", metavar="METHOD", help="these and FedAvg")
    given = asked.parse_args()
    for module in iter_modules(polyfed.algorithms.__path__):
        import_module(f"polyfed.algorithms.{module.name}")
    torch.set_num_threads(1)
    names = [name for name in sorted(REGISTRY) if name != "fedavg" and name in (given.only or REGISTRY)]
    loops, seconds = {}, dict[str, list[float]]()
    for name in ["fedavg", *names]:
        try:
            loops[name] = loop(REGISTRY[name]())
        except Exception as e:  # a method that needs a setting, or another model
            print(f"{name}: {' '.join(str(e).split())}")
    for t in range(LATE + given.rounds):
        for name, run in loops.items():
            begun = time.process_time()
            run.step()
            if t >= LATE:
                seconds.setdefault(name, []).append(time.process_time() - begun)
    took = {name: float(np.median(found)) for name, found in seconds.items()}
    rate, counted = copying(), {name: least(REGISTRY[name]()) for name in loops}
    base, (products, moved, _) = took["fedavg"], counted["fedavg"]
    floor = {
        name: ((base - moved / rate) * f / products + b / rate + seconds) / base
        for name, (f, b, seconds) in counted.items()
    }
    print(
        f"| method | of FedAvg's {1000 * base:.1f} ms | arithmetic | floor | ratio |\n| --- | --: | --: | --: | --: |"
    )
    for name in sorted(took, key=lambda name: took[name]):
        time_, products_ = took[name] / base, counted[name][0] / products
        print(f"| {name} | {time_:.2f} | {products_:.2f} | {floor[name]:.2f} | {time_ / floor[name]:.2f} |", flush=True)
    print(f"copies at {rate / 1e9:.1f} GB/s, read and written")


if __name__ == "__main__":
    main()
