"""Ray: what a round costs with one and two actors, and a model of it for clusters that are not at hand.

    python benchmarks/ray_scaling.py                    # measure here, fit, print the model's table
    python benchmarks/ray_scaling.py --docs FILE        # and put the tables between the file's markers

Measured: seconds of a round of FedAvg, of the engine on this machine and of Ray with one and two actors, turn by turn
in one process. The model: a round with w actors, p numbers and v vectors that come back takes

    fixed + w call + the slowest actor's clients + 4 p v / copy + 4 p (v + hops) / network + 2 hops latency

where `fixed`, `call` and `copy` come from what was measured here and the network is stated.
"""

import argparse
import itertools
import math
import time
from pathlib import Path

import numpy as np
import ray
import torch

import polyfed as pf
from polyfed.base.randomness import client_keys
from polyfed.compute.batches import Work
from polyfed.compute.split import Split
from polyfed.compute.task import Task
from polyfed.core.rounds import Loop
from polyfed.core.rows import MemoryRows
from polyfed.core.schedule import Uniform
from polyfed.core.worker import Plan
from polyfed.engines.local import LocalEngine
from polyfed_ray.engine import RayEngine, blocks, cover

MARK = "<!-- {}: benchmarks/ray_scaling.py -->"
NETWORK, LATENCY = 1.25e9, 5e-4  # bytes a second of 10 Gbit/s, seconds of a message


class Wide(torch.nn.Linear):
    """One matrix with as many numbers as are wanted."""

    def __init__(self, p: int):
        super().__init__(p // 10 - 1, 10)


class Busy(pf.FedAvg):
    """FedAvg whose clients take `pause` seconds of processor time more: a larger model's work without its bytes."""

    pause = 0.0

    def local_update(self, task, client, down, data, round):
        until = time.thread_time() + self.pause * len(round.ids)
        while time.thread_time() < until:
            pass
        return super().local_update(task, client, down, data, round)


def loop(p: int, actors: int, clients: int, pause: float) -> Loop:
    """actors: 0 is the engine on this machine"""
    gen = np.random.default_rng(0)
    x = torch.as_tensor(gen.normal(size=(clients, p // 10 - 1)), dtype=torch.float32)
    data = {"train": Split(x, torch.as_tensor(gen.integers(0, 10, clients)), np.arange(clients + 1))}
    names, work, plan = (
        [f"c{i}" for i in range(clients)],
        Work(steps=1, batch_size=None),
        Plan(1, 1, "cpu", "closed form"),
    )
    torch.manual_seed(0)
    model, method = Wide(p), type("Busy", (Busy,), {"pause": pause})(0.01)

    def task() -> Task:
        return Task(model, device="cpu")

    if actors:
        engine = RayEngine(task, data, names, method, work, 0, plan, workers=actors)
    else:
        engine = LocalEngine(task(), data, MemoryRows(clients, {}), client_keys(names), work, 0, plan)
    return Loop(task(), np.ones(clients), names, method, Uniform(), engine, 0)


def measure(p: int, clients: int, pause: float, repeats: int) -> dict[int, float]:
    """Median seconds of a round by number of actors, rounds taken in turns; 0 is the engine on this machine."""
    loops = {k: loop(p, k, clients, pause) for k in (0, 1, 2)}
    spent: dict[int, list[float]] = {k: [] for k in loops}
    for t in range(repeats + 2):
        for k, one in loops.items():
            start = time.perf_counter()
            one.step()
            if t >= 2:
                spent[k].append(time.perf_counter() - start)
    for one in loops.values():
        one.engine.close()
    return {k: float(np.median(s)) for k, s in spent.items()}


def vectors(workers: int, tree: int = 1024) -> int:
    """Vectors of p numbers that the actors of a round send together."""
    edges = np.arange(workers + 1) * tree // workers
    return sum(len(cover(int(a), int(b), tree)) for a, b in itertools.pairwise(edges))


def seconds(workers: int, cohort: int, p: int, step: float, fit: dict[str, float], draws: int = 20) -> float:
    """Of a round, simulated: each actor's clients take `step` seconds, exponentially spread over a tenth of it."""
    gen = np.random.default_rng(0)
    share = np.bincount(np.arange(cohort) % workers, minlength=workers)
    # a sum of m exponential delays is a gamma one
    late = gen.gamma(np.maximum(share, 1e-9), 0.1 * step, (draws, workers)).max(1)
    size, up = 4 * p, vectors(workers)
    moved = (math.ceil(math.log2(workers + 1)) + up) * size / NETWORK  # down along a tree of machines, up to one
    return float(
        fit["fixed"] + workers * fit["call"] + share.max() * step + late.mean() + up * size / fit["copy"]
        + moved + 2 * LATENCY * math.ceil(math.log2(workers + 1))
    )  # fmt: skip


def said(number: float) -> str:
    """Two digits."""
    return f"{number:.2g}" if number < 10 else f"{float(f'{number:.2g}'):,.0f}"


def fitted(empty: dict[int, dict[int, float]]) -> dict[str, float]:
    """From rounds whose clients do next to nothing, by p and actors."""
    small, large = min(empty), max(empty)
    call = max(empty[small][2] - empty[small][1], 1e-5)
    copy = (large - small) * 4 * 3 / max(empty[large][2] - empty[small][2], 1e-9)  # one vector down, two up
    return {"fixed": max(empty[small][1] - call, 0.0), "call": call, "copy": copy}


def show(tables: dict[str, list[str]], docs: Path | None) -> None:
    for lines in tables.values():
        print("\n".join(lines), end="\n\n")
    if docs is not None:
        text = docs.read_text()
        for name, lines in tables.items():
            before, _, rest = text.partition(MARK.format(name))
            after = rest.partition(MARK.format(f"end of {name}"))[2]
            text = "\n".join([before + MARK.format(name), "", *lines, "", MARK.format(f"end of {name}") + after])
        docs.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, help="a page with the tables' markers")
    parser.add_argument("--repeats", type=int, default=11)
    given = parser.parse_args()
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="error")  # actors of both loops
    rows = [(10_000, 20, 0.0), (10_000_000, 4, 0.0), (10_000, 40, 0.01), (1_000_000, 40, 0.01)]
    found = {row: measure(*row, given.repeats) for row in rows}
    here = [
        "| numbers | clients a round | a client's step | one machine | Ray, 1 actor | 2 actors | 2 against 1 |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for (p, clients, pause), s in found.items():
        step = f"{1000 * pause:.0f} ms" if pause else "next to nothing"
        cells = " | ".join(f"{1000 * s[k]:.1f} ms" for k in (0, 1, 2))
        here.append(f"| {p:,} | {clients} | {step} | {cells} | {s[1] / s[2]:.2f} |")
    fit = fitted({p: found[p, clients, 0.0] for p, clients in ((10_000, 20), (10_000_000, 4))})
    print({k: f"{v:.3g}" for k, v in fit.items()})
    model = [
        "| clients | in a round | numbers | a client's step | "
        + "1 actor | 10 | 100 | 1,000 actors"
        + " | bytes to the server, 1,000 actors |",
        "|--:|--:|--:|--:|" + "--:|" * 5,
    ]
    for n, cohort, p, step in (
        (1_000, 100, 10_000, 0.002), (100_000, 10_000, 10_000, 0.002), (10_000, 1_000, 1_000_000, 0.1),
        (1_000_000, 10_000, 1_000_000, 0.1), (1_000_000, 10_000, 10_000_000, 1.0), (10_000, 1_000, 100_000_000, 10.0),
    ):  # fmt: skip
        most = blocks(n)  # more actors than that are refused
        cells = [f"{said(seconds(w, cohort, p, step, fit))} s" if w <= most else "–" for w in (1, 10, 100, 1000)]
        size = f"{said(vectors(1000) * 4 * p / 1e9)} GB" if most > 1000 else "–"
        model.append(f"| {n:,} | {cohort:,} | {p:,} | {step:g} s | {' | '.join(cells)} | {size} |")
    show({"measured": here, "model": model}, given.docs)


if __name__ == "__main__":
    main()
