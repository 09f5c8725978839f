"""FPFC's two servers at scale: seconds per round and memory against the number of clients, as a table and a figure.

    python benchmarks/fpfc_scale.py [--sizes 300x610 1000x100000] [--rows pairs local cold] [--figure docs/images/x.svg]

Rows: pairs from local models, device-dual from local models, device-dual from a common start ("cold"). Planted problem:
5 groups of clients with quadratic losses f_i = 1/2 ||w - a_i||^2, lambda 1, a tenth of the clients per round; their 10
local steps are taken in closed form, and the server is FPFC's own `downlink` and `aggregate`. Every row runs in a
process of its own. The last fifth of the rounds is reported apart, since a cold start passes through a phase with as
many nodes as clients. Memory is the peak beyond what the data and the clients' own models take; in all is the process.

A row stops after `--limit` seconds, and is left out where the state does not fit this machine or where the smaller one
of the same kind took so long that this one would not get through five rounds.
"""

import argparse
import contextlib
import multiprocessing
import time
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator
from sklearn.metrics import adjusted_rand_score

from polyfed.algorithms.fpfc import FPFC
from polyfed.base.system import memory
from polyfed.compute.task import Task
from polyfed.core.algorithm import Round
from polyfed.report.style import BLUE, GREEN, VERMILLION, canvas, save, styled

GROUPS, LR, STEPS = 5, 0.1, 10
CLIENTS, PARAMETERS = (50, 100, 200, 300, 500, 1000, 2000, 5000), 610
NAMED = ("1000x100000", "10000x610")
ROUNDS = {"pairs": 40, "local": 40, "cold": 300}  # a cold start has found the groups after some 200
LABELS = {"pairs": "pairs", "local": "device-dual, local start", "cold": "device-dual, common start"}
GOALS = {(1000, 100_000): (1.2, 2.5), (5000, 610): (0.5, None)}  # seconds per round, GB in all; from a local start


class Row(NamedTuple):
    """What one size took: seconds at the start and per server round, bytes, nodes, and whether the groups are right."""

    m: int
    d: int
    kind: str
    rounds: int
    start: float
    mean: float
    end: float
    worst: float
    nodes: int
    server: float
    total: float
    ari: float

    def __str__(self) -> str:
        time = f"{self.start:8.3f}  {self.mean:8.5f}  {self.end:8.5f}  {self.worst:7.3f}"
        space = f"{self.nodes:6d}  {self.server / 1e9:6.3f}  {self.total / 1e9:6.2f}"
        return f"{self.m:7d}  {self.d:7d}  {self.kind:6s}  {self.rounds:6d}  {time}  {space}  {self.ari:5.3f}"


HEAD = "clients        d  row     rounds   start s   s/round    at end    worst   nodes      GB  in all    ARI"


def planted(m: int, d: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Minimisers a_i [m, d] around 5 centres some 8 apart, members about 0.1 from theirs; and their groups [m]."""
    rng = torch.Generator().manual_seed(0)
    group = torch.arange(m) * GROUPS // m
    centres = torch.randn(GROUPS, d, generator=rng) * (8 / (2 * d) ** 0.5)
    a = torch.randn(m, d, generator=rng).mul_(0.1 / d**0.5)
    for i, g in enumerate(group.tolist()):
        a[i] += centres[g]
    return a, group


def resident(key: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024


def forget_peak() -> None:
    """Let VmHWM begin anew, where the system allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def fpfc(kind: str) -> FPFC:
    return FPFC(LR, lam=1.0, solver="pairs" if kind == "pairs" else "device-dual")


def measure(m: int, d: int, kind: str, limit: float, threads: int) -> Row:
    """Train on the planted problem; what the server took."""
    torch.set_num_threads(threads)
    a, group = planted(m, d)
    # of a task FPFC asks nothing but where its shared layers lie, if there are any
    method, rng, task = fpfc(kind), torch.Generator().manual_seed(1), Task(torch.nn.Linear(d, 1, bias=False))
    samples = torch.full((m,), 50.0)
    w = torch.zeros(m, d) if kind == "cold" else a.clone()  # what the clients keep
    forget_peak()
    without, begun = resident("VmRSS"), time.perf_counter()
    cold = method.init_server(task, torch.zeros(d), m).whole() if kind == "cold" else None
    state = (cold or method.warm_start(task, a, samples)[0]) | {"known": samples}
    first = time.perf_counter() - begun
    keep = (1 - LR * (1 + method.rho)) ** STEPS
    seconds: list[float] = []
    nodes = 0
    for t in range(ROUNDS[kind]):
        ids = torch.randperm(m, generator=rng)[: m // 10].sort().values
        round = Round(t, m, 0, ids, samples[ids], torch.full_like(ids, t))
        before = time.perf_counter()
        zeta = method.downlink(state, round).each["zeta"]
        sent = time.perf_counter() - before
        fixed = (a[ids] + method.rho * zeta) / (1 + method.rho)
        w[ids] = fixed + keep * (w[ids] - fixed)
        before = time.perf_counter()
        state = method.aggregate(state, {"w": w[ids]}, round) | {"known": samples}
        seconds.append(sent + time.perf_counter() - before)
        nodes = max(nodes, len(state.get("f", ())))
        if time.perf_counter() - begun > limit and t >= 4:
            break
    peak = resident("VmHWM")
    last = seconds[-max(1, len(seconds) // 5) :]
    ari = adjusted_rand_score(group, method.clusters(state))
    took = (first, mean(seconds), mean(last), max(seconds))
    return Row(m, d, kind, len(seconds), *took, nodes, peak - without, peak, ari)


def fits(m: int, d: int, kind: str) -> bool:
    """Whether twice the state is there, as `fit` asks."""
    shapes = fpfc(kind).init_server(Task(torch.nn.Linear(d, 1, bias=False)), torch.zeros(d, device="meta"), m).whole()
    return 2 * sum(t.numel() * t.element_size() for t in shapes.values()) < memory()


def draw(rows: list[Row], path: Path) -> None:
    """Seconds per server round and memory against clients, at the number of parameters that has most rows."""
    looks = {"pairs": (VERMILLION, "s", "-"), "local": (BLUE, "o", "-"), "cold": (GREEN, "^", (0, (5, 1.5)))}
    with styled():
        figure, axes = canvas(4.9, 5.4, rows=2, sharex=True)
        for kind, (color, marker, line) in looks.items():
            mine = sorted(r for r in rows if r.kind == kind and r.d == PARAMETERS and r.ari == 1)
            look: dict[str, Any] = {"color": color, "marker": marker, "linestyle": line, "label": LABELS[kind]}
            axes[0].plot([r.m for r in mine], [r.mean for r in mine], **look)
            axes[1].plot([r.m for r in mine], [r.server / 1e9 for r in mine], **look)
        for ax in axes:
            ax.set_xscale("log")
            ax.set_yscale("log")
            ax.axvline(200, color="#5a626b", linewidth=0.8, linestyle=(0, (1.5, 1.5)))
        ticks = sorted({r.m for r in rows if r.d == PARAMETERS})
        axes[1].set_xticks(ticks, [f"{m:,}" for m in ticks])
        axes[1].xaxis.set_minor_locator(NullLocator())
        for ax in axes:
            ax.yaxis.set_minor_formatter(NullFormatter())
            ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        axes[0].set_ylabel("seconds per server round")
        axes[1].set_ylabel("GB on the server")
        axes[1].set_xlabel(f"clients, {PARAMETERS} parameters each, a tenth of them per round")
        axes[0].legend(loc="upper left")
        axes[1].annotate("auto", (200, 0.02), xycoords=("data", "axes fraction"), xytext=(4, 2),
                         textcoords="offset points", color="#5a626b", fontsize=8.8)  # fmt: skip
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = [f"{m}x{PARAMETERS}" for m in CLIENTS]
    parser.add_argument("--sizes", nargs="+", default=[*usual, *NAMED], help="clients x parameters")
    parser.add_argument("--rows", nargs="+", default=list(ROUNDS), choices=list(ROUNDS))
    parser.add_argument("--limit", type=float, default=120, help="seconds for the rounds of one row")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--figure", type=Path, help="write the figure of the rows with 610 parameters there")
    options = parser.parse_args()
    rows: list[Row] = []
    print(HEAD)
    for kind in options.rows:
        for m, d in (map(int, size.split("x")) for size in options.sizes):
            # pairs cost the square of the clients
            slow = [r.mean * (m / r.m) ** 2 for r in rows if (r.kind, r.d) == (kind, d) and r.m < m]
            if not fits(m, d, kind) or (slow and 5 * slow[-1] > options.limit):
                print(
                    f"{m:7d}  {d:7d}  {kind:6s}  left out: {'memory' if not fits(m, d, kind) else 'time'}", flush=True
                )
                continue
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                row = pool.apply(measure, (m, d, kind, options.limit, options.threads))
            rows.append(row)
            print(row, flush=True)
            seconds, gb = GOALS.get((m, d), (None, None))
            if kind == "local" and seconds:
                space = f", {row.total / 1e9 / gb:.2f} of {gb} GB" if gb else ""
                print(
                    f"         {row.mean / seconds:.2f} of the {seconds} s per round it should take{space}", flush=True
                )
    if options.figure:
        draw(rows, options.figure)
        print(f"wrote {options.figure}")


if __name__ == "__main__":
    main()
