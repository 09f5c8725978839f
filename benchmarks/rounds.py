"""Seconds per round: polyfed, the plain loop at one thread and at all threads, and the machine's matrix-product peak.

    python benchmarks/rounds.py [--workload A B C D] [--repeats 5] [--data-dir PATH] [--json FILE]

Everything runs interleaved in one process, on the same clients and samples, so that what else the machine does touches
all alike. Ratios are against the faster of the two plain loops. polyfed runs what `fit` runs, without evaluation.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import plain
import torch
from workloads import WORKLOADS, Workload, flops_per_sample

import polyfed as pf
from polyfed.algorithms.fedavg import FedAvg
from polyfed.algorithms.fpfc import FPFC
from polyfed.core.batches import Work
from polyfed.core.randomness import client_keys
from polyfed.core.rounds import Loop
from polyfed.core.schedule import Uniform
from polyfed.core.task import Task
from polyfed.core.uplinks import Tally
from polyfed.core.worker import Plan, expand
from polyfed.engines.local import LocalEngine, make_plan, make_rows

SEED = 0
CORES = torch.get_num_threads()
COLLAPSED = (
    4  # a loop this many times slower than the other on one client is left out: its threads wait for a busy core
)


def peak(threads: int, size: int = 3072) -> Callable[[], float]:
    """A function that measures one float32 matrix product in GFLOP/s."""
    a, b = torch.randn(size, size), torch.randn(size, size)

    def product() -> float:
        torch.set_num_threads(threads)
        start = time.perf_counter()
        torch.mm(a, b)
        return 2 * size**3 / (time.perf_counter() - start) / 1e9

    return product


def typical_round(w: Workload, federation: pf.Federation) -> int:
    """The round, of the first 101, whose cohort has the median number of samples."""
    keys, schedule = client_keys(federation.names), Uniform(w.fraction)
    totals = [federation.train.counts[schedule.cohort(SEED, t, keys)].sum() for t in range(101)]
    return int(np.argsort(totals)[50])


class Ours:
    """polyfed's path: the core's loop with the local engine, always at the same round of the schedule."""

    def __init__(self, w: Workload, federation: pf.Federation, t: int, plan: Plan | None = None):
        self.task = Task(w.build(federation))
        keys, schedule = client_keys(federation.names), Uniform(w.fraction)
        plan = plan or make_plan(self.task, schedule.size(federation.n), w.work.per_step(federation.train.counts))
        self.plan, self.t = plan, t
        rows = make_rows(w.algorithm, self.task, federation.n, schedule.size(federation.n), None)
        engine = LocalEngine(self.task, {"train": federation.train}, rows, keys, w.work, SEED, plan)
        counts = federation.train.counts
        self.loop = Loop(self.task, counts, federation.names, w.algorithm, schedule, engine, SEED)
        self.ids = schedule.cohort(SEED, t, keys)

    def round(self) -> float:
        """Seconds of a whole round."""
        torch.set_num_threads(1)
        self.loop.t = self.t
        start = time.perf_counter()
        self.loop.step()
        return time.perf_counter() - start

    def clients(self) -> float:
        """Seconds of the clients' part of a round: from the messages down to the messages up."""
        torch.set_num_threads(1)
        self.loop.t = self.t
        loop, round = self.loop, self.loop.round(self.ids)
        down = expand(loop.algorithm.downlink(loop.server, round), len(self.ids))
        start = time.perf_counter()
        loop.engine.exchange(loop.algorithm, down, round, Tally(round, down))
        return time.perf_counter() - start


class Plain:
    """The plain loop on the same clients."""

    def __init__(self, w: Workload, federation: pf.Federation, clients: list[int], threads: int):
        self.w, self.federation, self.clients, self.threads = w, federation, clients, threads
        self.model = w.build(federation)
        self.start = [q.detach().clone() for q in self.model.parameters()]

    def round(self, clients: list[int] | None = None) -> float:
        """Seconds of a whole round, or of these clients only."""
        torch.set_num_threads(self.threads)
        clients = clients or self.clients
        work, algorithm, train = self.w.work, self.w.algorithm, self.federation.train
        start = time.perf_counter()
        if isinstance(algorithm, FPFC):
            assert isinstance(work.steps, int)
            plain.fpfc_clients(self.model, self.start, train, clients, algorithm.lr, work.steps, algorithm.rho)
        else:
            assert isinstance(algorithm, FedAvg)
            assert work.batch_size is not None
            plain.fedavg_round(self.model, self.start, train, clients, algorithm.lr, work.epochs, work.batch_size)
        return time.perf_counter() - start


def sample_passes(work: Work, counts: np.ndarray) -> int:
    """Forward and backward passes through single samples in one round of clients with `counts` samples."""
    return int(counts.sum() * (work.steps if isinstance(work.steps, int) else work.epochs))


def measure(name: str, repeats: int, data_dir: Path | None) -> dict[str, Any]:
    """Times in seconds: {"polyfed": [...], "loop, 1 thread": [...], ...}, and what belongs beside them."""
    w = WORKLOADS[name]
    federation = w.federation(data_dir)
    t = typical_round(w, federation)
    ours = Ours(w, federation, t)
    server = isinstance(w.algorithm, FPFC)  # the plain loop has the clients' part only
    threads = sorted({1, CORES})
    loops = {k: Plain(w, federation, ours.ids.tolist(), k) for k in threads}
    smallest = [int(ours.ids[federation.train.counts[ours.ids].argmin()])]
    trial = {k: min(loop.round(smallest) for _ in range(2)) for k, loop in loops.items()}
    runs: dict[str, Callable[[], float]] = {"polyfed": ours.clients if server else ours.round}
    if server:
        runs["polyfed, whole round"] = ours.round
    for k, loop in loops.items():
        if trial[k] < COLLAPSED * min(trial.values()):
            runs[f"loop, {k} thread{'s'[: k > 1]}"] = loop.round
    products = {k: peak(k) for k in threads}
    times: dict[str, list[float]] = {label: [] for label in runs}
    peaks: dict[int, list[float]] = {k: [] for k in threads}
    for repeat in range(repeats + 1):
        for k, product in products.items():
            peaks[k].append(product())
        for label, run in runs.items():
            seconds = run()
            if repeat:  # the first pass warms up
                times[label].append(seconds)
    passes = sample_passes(w.work, federation.train.counts[ours.ids])
    flops = passes * flops_per_sample(ours.task.model, federation.input_shape)
    best, loop = min(times["polyfed"]), min(min(v) for k, v in times.items() if k.startswith("loop"))
    middle = min(median(v) for k, v in times.items() if k.startswith("loop")) / median(times["polyfed"])
    top = max(max(v) for v in peaks.values())
    return {
        "workload": name,
        "title": w.title,
        "data": federation.meta.get("dataset"),
        "clients": len(ours.ids),
        "sample passes": passes,
        "plan": {"chunk": ours.plan.chunk, "workers": ours.plan.workers, "path": ours.plan.path},
        "times": times,
        "left out": [f"loop, {k} threads" for k in threads if trial[k] >= COLLAPSED * min(trial.values())],
        "ratio of medians": middle,
        "ratio of minima": loop / best,
        "goal": w.goal,
        "GFLOP": flops / 1e9,
        "peak GFLOP/s": {str(k): max(v) for k, v in peaks.items()},
        "share of peak": flops / best / 1e9 / top,
    }


def show(result: dict[str, Any]) -> None:
    plan = result["plan"]
    print(
        f"{result['workload']}  {result['title']} on {result['data']}: {result['clients']} clients, "
        f"{result['sample passes']:,} sample passes, {result['GFLOP']:.4g} GFLOP; "
        f"{plan['path']}, chunk {plan['chunk']}, {plan['workers']} workers"
    )
    for label, seconds in result["times"].items():
        print(f"   {label:<22} median {median(seconds):.4f} s   min {min(seconds):.4f} s")
    if result["left out"]:
        print(f"   left out, its threads were waiting for a busy core: {', '.join(result['left out'])}")
    print(
        f"   ratio to the faster loop (goal {result['goal']}): "
        f"medians {result['ratio of medians']:.2f}, minima {result['ratio of minima']:.2f}; "
        f"{result['share of peak']:.1%} of the peak of {max(result['peak GFLOP/s'].values()):.0f} GFLOP/s\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds per round against the plain loop and the machine's peak.")
    parser.add_argument("--workload", nargs="+", choices=sorted(WORKLOADS), default=sorted(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--data-dir", type=Path, help="folder with Fashion-MNIST; without it random images are used")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {CORES} of {os.cpu_count()} CPU threads")
    if arguments.data_dir is None:
        print("no --data-dir: random images in place of Fashion-MNIST")
    results = []
    for name in arguments.workload:
        results.append(measure(name, arguments.repeats, arguments.data_dir))
        show(results[-1])
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
