"""Seconds per round on one core and on all: polyfed by each of its paths, plain loops, compiled JAX; and the peak.

    python benchmarks/rounds.py [--workload A B C D] [--repeats 5] [--cores 1 2] [--clock processor]
                                [--data-dir PATH] [--pfllib PATH] [--json FILE]

Everything runs interleaved in one process per number of cores, which is pinned to them, on the same clients and
samples, so that what else the machine does touches all alike. polyfed runs what `fit` runs, without evaluation. JAX is
timed where it is installed (workloads B, C and D), PFLlib's own code where a checkout of it is given (A, B and C), and
bfloat16 on A. `--clock processor` counts processor time in place of wall time: on
a machine that does other things one core's figures can be compared by it, those of several cores cannot.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import compiled
import numpy as np
import plain
import torch
from pfllib import PFLlib
from torch import nn
from torch.utils import mkldnn as mkldnn_utils
from workloads import WORKLOADS, Workload, flops_per_sample

import polyfed as pf
from polyfed.algorithms.fedavg import FedAvg
from polyfed.algorithms.fpfc import FPFC
from polyfed.base.randomness import client_keys
from polyfed.base.system import cores
from polyfed.compute.batches import Work
from polyfed.compute.check import check
from polyfed.compute.compiled import dense, path_of
from polyfed.compute.task import Task
from polyfed.core.rounds import Loop
from polyfed.core.schedule import Uniform
from polyfed.core.uplinks import Tally
from polyfed.core.worker import Plan, expand
from polyfed.engines.local import LocalEngine, make_plan, make_rows

SEED = 0
PEAK = 2048  # rows of the products that measure the machine's peak


def processor() -> str:
    """The processor's name."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    found = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    family = f", family {found['cpu family']}, model {found.get('model')}" if "cpu family" in found else ""
    return found.get("model name", platform.processor()) + family


def peaks(jax: compiled.Jax | None) -> dict[str, Callable[[], object]]:
    """One large float32 product, by every library that is at hand."""
    a, dense = torch.randn(PEAK, PEAK), nn.Linear(PEAK, PEAK, bias=False)
    array = a.numpy()
    found: dict[str, Callable[[], object]] = {"torch.mm": lambda: torch.mm(a, a), "NumPy": lambda: array @ array}
    if torch.backends.mkldnn.is_available():
        inside, layer = a.to_mkldnn(), mkldnn_utils.to_mkldnn(dense.eval())
        found["oneDNN"] = lambda: layer(inside)
    return found | ({"JAX": jax.peak(PEAK)} if jax is not None else {})


def typical_round(w: Workload, federation: pf.Federation) -> int:
    """The round, of the first 101, whose cohort has the median number of samples."""
    keys, schedule = client_keys(federation.names), Uniform(w.fraction)
    totals = [federation.train.counts[schedule.cohort(SEED, t, keys)].sum() for t in range(101)]
    return int(np.argsort(totals)[50])


class Ours:
    """polyfed's path: the core's loop with the local engine, always at the same round of the schedule."""

    def __init__(
        self, w: Workload, federation: pf.Federation, t: int, plan: Plan | None = None, path: str | None = None,
        bf16: bool = False,
    ):  # fmt: skip
        self.task = Task(w.build(federation), bf16=bf16)
        check(self.task, federation.train, federation.classes)  # as `fit` does: what draws nothing is not watched
        keys, schedule = client_keys(federation.names), Uniform(w.fraction)
        size, samples = schedule.size(federation.n), w.work.per_step(federation.train.counts)
        path = path or path_of(self.task.net, w.work, federation.train)
        net, train = self.task.net, federation.train
        plan = plan or make_plan(self.task, size, samples, path=path, dense=dense(net, path, train))
        self.plan, self.t = plan, t
        rows = make_rows(w.algorithm, self.task, federation.n, schedule.size(federation.n), None)
        engine = LocalEngine(self.task, {"train": federation.train}, rows, keys, w.work, SEED, plan)
        counts = federation.train.counts
        self.loop = Loop(self.task, counts, federation.names, w.algorithm, schedule, engine, SEED)
        self.ids = schedule.cohort(SEED, t, keys)

    def round(self) -> None:
        """A whole round."""
        torch.set_num_threads(1)
        self.loop.t = self.t
        self.loop.step()

    def clients(self) -> None:
        """The clients' part of a round: from the messages down to the messages up."""
        torch.set_num_threads(1)
        self.loop.t = self.t
        loop, round = self.loop, self.loop.round(self.ids)
        down = expand(loop.algorithm.downlink(loop.server, round), len(self.ids))
        loop.engine.exchange(loop.algorithm, down, round, Tally(round, down))


class Plain:
    """The plain loop on the same clients."""

    def __init__(self, w: Workload, federation: pf.Federation, clients: list[int], threads: int, best: bool):
        self.w, self.federation, self.clients, self.threads, self.best = w, federation, clients, threads, best
        self.model = w.build(federation)
        self.start = [q.detach().clone() for q in self.model.parameters()]

    def round(self) -> None:
        torch.set_num_threads(self.threads)
        work, algorithm, train = self.w.work, self.w.algorithm, self.federation.train
        if isinstance(algorithm, FPFC):
            assert isinstance(work.steps, int)
            lr, rho = algorithm.lr, algorithm.rho
            plain.fpfc_clients(self.model, self.start, train, self.clients, lr, work.steps, rho, self.best)
        else:
            assert isinstance(algorithm, FedAvg)
            assert work.batch_size is not None
            lr, batch = algorithm.lr, work.batch_size
            plain.fedavg_round(self.model, self.start, train, self.clients, lr, work.epochs, batch, self.best)


def in_jax(w: Workload, jax: compiled.Jax) -> None:
    """The same in JAX."""
    if isinstance(w.algorithm, FPFC):
        assert isinstance(w.work.steps, int)
        jax.fpfc(w.algorithm.lr, w.work.steps, w.algorithm.rho)
    else:
        assert isinstance(w.algorithm, FedAvg)
        assert w.work.batch_size is not None
        jax.fedavg(w.algorithm.lr, w.work.epochs, w.work.batch_size)


def sample_passes(work: Work, counts: np.ndarray) -> int:
    """Forward and backward passes through single samples in one round of clients with `counts` samples."""
    return int(counts.sum() * (work.steps if isinstance(work.steps, int) else work.epochs))


def measure(
    name: str, cores: int, repeats: int, clock: str, data_dir: Path | None, folder: Path | None
) -> dict[str, Any]:
    """Seconds of everything, {"polyfed": [...], "loop": [...], ...}, and what belongs beside them."""
    w = WORKLOADS[name]
    federation = w.federation(data_dir)
    t = typical_round(w, federation)
    ours = Ours(w, federation, t)
    clients, server = ours.ids.tolist(), isinstance(w.algorithm, FPFC)  # loops and JAX have the clients' part only
    runs: dict[str, Callable[[], object]] = {"polyfed": ours.clients if server else ours.round}
    if server:
        runs["polyfed, whole round"] = ours.round
    if ours.plan.path == "native":
        torchs = Ours(w, federation, t, path="torch")
        runs["polyfed, torch path"] = torchs.clients if server else torchs.round
    if name == "A":
        runs["polyfed, bf16"] = Ours(w, federation, t, bf16=True).round
    for threads in sorted({1, cores}):
        for best in (False, True):
            label = f"{'best ' * best}loop" + f", {threads} threads" * (threads > 1)
            runs[label] = Plain(w, federation, clients, threads, best).round
    jax = compiled.Jax(w.build(federation), federation.train, clients) if compiled.HERE and name != "A" else None
    if jax is not None:
        runs["JAX, compiled"] = partial(in_jax, w, jax)
    if folder is not None and isinstance(w.algorithm, FedAvg):
        lr, epochs, batch = w.algorithm.lr, w.work.epochs, w.work.batch_size or 0
        runs["PFLlib"] = PFLlib(folder, w.build(federation), federation.train, clients, lr, epochs, batch).round
    products = peaks(jax)
    now = time.process_time if clock == "processor" else time.perf_counter
    times: dict[str, list[float]] = {label: [] for label in [*runs, *products]}
    for repeat in range(repeats + 1):
        for label, run in (products | runs).items():
            torch.set_num_threads(cores)
            start = now()
            run()
            if repeat:  # the first pass warms up
                times[label].append(now() - start)
    passes = sample_passes(w.work, federation.train.counts[ours.ids])
    flops = passes * flops_per_sample(ours.task.model, federation.input_shape)
    peak = {label: 2 * PEAK**3 / min(times.pop(label)) / 1e9 for label in products}
    return {
        "workload": name,
        "title": w.title,
        "data": federation.meta.get("dataset"),
        "clients": len(clients),
        "sample passes": passes,
        "cores": cores,
        "clock": clock,
        "plan": {"chunk": ours.plan.chunk, "workers": ours.plan.workers, "path": ours.plan.path},
        "times": times,
        "goal": w.goal,
        "GFLOP": flops / 1e9,
        "peak GFLOP/s": peak,
        "share of peak": flops / min(times["polyfed"]) / 1e9 / max(peak.values()),
    }


def show(result: dict[str, Any]) -> None:
    plan, ours = result["plan"], median(result["times"]["polyfed"])
    print(
        f"{result['workload']}  {result['title']} on {result['data']}: {result['clients']} clients, "
        f"{result['sample passes']:,} sample passes, {result['GFLOP']:.4g} GFLOP; {result['cores']} cores, "
        f"{result['clock']} time; {plan['path']}, chunk {plan['chunk']}, {plan['workers']} workers"
    )
    for label, seconds in result["times"].items():
        middle, spread = median(seconds), np.subtract(*np.quantile(seconds, [0.75, 0.25]))
        print(f"   {label:<24} median {middle:.4f} s  min {min(seconds):.4f}  quartiles {spread:.4f} apart  "
              f"{middle / ours:6.2f} of polyfed's")  # fmt: skip
    best = min(median(v) for k, v in result["times"].items() if "loop" in k) / ours
    peak = ", ".join(f"{k} {v:.0f}" for k, v in result["peak GFLOP/s"].items())
    print(f"   {best:.2f} times as fast as the fastest loop (goal {result['goal']}); "
          f"{result['share of peak']:.1%} of the peak (GFLOP/s: {peak})\n")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds per round against plain loops, JAX and the machine's peak.")
    parser.add_argument("--workload", nargs="+", choices=sorted(WORKLOADS), default=sorted(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cores", nargs="+", type=int, default=sorted({1, cores()}), help="how many to use, in turn")
    parser.add_argument("--clock", choices=["wall", "processor"], default="wall")
    parser.add_argument("--data-dir", type=Path, help="folder with Fashion-MNIST; without it random images are used")
    parser.add_argument("--pfllib", type=Path, help="folder of a checkout of PFLlib, to time its code too")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    if len(arguments.cores) > 1:  # one process each: thread pools are made once
        parts = []
        for k in arguments.cores:
            with tempfile.NamedTemporaryFile(suffix=".json") as file:
                words = [*sys.argv[1:], "--cores", str(k), "--json", file.name]
                subprocess.run([sys.executable, __file__, *words], check=True)
                parts += json.loads(Path(file.name).read_text())
        if arguments.json:
            arguments.json.write_text(json.dumps(parts, indent=1) + "\n")
        return
    (k,) = arguments.cores
    if hasattr(os, "sched_setaffinity") and len(os.sched_getaffinity(0)) > k:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-k:])
        os.execv(sys.executable, [sys.executable, __file__, *sys.argv[1:]])  # libraries count cores as they are loaded
    if k == 1:
        compiled.one_core()
    print(
        f"{processor()}; torch {torch.__version__}, Python {platform.python_version()}; {k} of {os.cpu_count()} cores"
    )
    if arguments.data_dir is None:
        print("no --data-dir: random images in place of Fashion-MNIST")
    results = []
    for name in arguments.workload:
        results.append(measure(name, k, arguments.repeats, arguments.clock, arguments.data_dir, arguments.pfllib))
        show(results[-1])
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
