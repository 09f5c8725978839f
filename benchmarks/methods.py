"""Processor time of a round by method, relative to FedAvg, and what the method's arithmetic allows.

    OMP_NUM_THREADS=1 python benchmarks/methods.py [--rounds 40] [--only scaffold feddyn]

100 clients of 80 samples, 10 in a round, a perceptron 784-200-10 of 159,010 numbers, one epoch of batches of 20, one
thread. Methods take turns, round by round, in one process; the figures are medians. The arithmetic is what torch counts
in matrix products without the kernel; decompositions, sorting, and the vectors that are moved besides are not in it.
"""

import argparse
import dataclasses
import time
from importlib import import_module
from math import prod
from pkgutil import iter_modules

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

import polyfed.algorithms
from polyfed.core.algorithm import REGISTRY, Algorithm
from polyfed.core.batches import Work
from polyfed.core.randomness import client_keys
from polyfed.core.rounds import Loop
from polyfed.core.schedule import Uniform
from polyfed.core.split import Split
from polyfed.core.task import Task
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


def flops(algorithm: Algorithm, rounds: int = 5) -> float:
    """Arithmetic of matrix products in a round, by torch's own count on the path without the kernel."""
    aten, run = torch.ops.aten, loop(algorithm)
    run.engine.worker.plan = dataclasses.replace(run.engine.plan, path="closed form")
    for _ in range(LATE - rounds):
        run.step()
    counter = FlopCounterMode(display=False, custom_mapping=dict.fromkeys((aten.addmm_, aten.baddbmm_), _product))
    with counter:
        for _ in range(rounds):
            run.step()
    return counter.get_total_flops() / rounds


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
    counted = {name: flops(REGISTRY[name]()) for name in loops}
    print(f"| method | of FedAvg's {1000 * took['fedavg']:.1f} ms | arithmetic |\n| --- | --: | --: |")
    for name in sorted(took, key=lambda name: took[name]):
        print(f"| {name} | {took[name] / took['fedavg']:.2f} | {counted[name] / counted['fedavg']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
