"""FedACS's server at scale: seconds per round, bytes of state, and what it saves to refresh changed rows only.

    python benchmarks/fedacs_scale.py [--sizes 300x610 1000x610] [--share 0.5] [--rounds 9] [--threads 1]

FedACS with pool="all": in every round a share of the clients receives its mixture (`downlink`), moves by noise in place
of training, and sends its model (`aggregate`, which refreshes the similarities of the changed rows). Refreshing and
computing all similarities take turns in one process; medians over the rounds. `groups` is what a report of them takes.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import TypeVar

import torch

from polyfed.algorithms._shared.similarity import similarity
from polyfed.algorithms.fedacs import FedACS, refresh
from polyfed.compute.task import Task
from polyfed.core.algorithm import Round

T = TypeVar("T")
HEAD = "clients        d    down s      up s   s/round   refresh s     all s   ratio   groups s   state MB"


def timed(f: Callable[[], T]) -> tuple[T, float]:
    begun = time.perf_counter()
    return f(), time.perf_counter() - begun


def measure(n: int, d: int, share: float, rounds: int) -> str:
    """One line of the table."""
    rng, method = torch.Generator().manual_seed(0), FedACS(pool="all")
    start = torch.randn(d, generator=rng)
    # of a task FedACS asks nothing
    server = method.init_server(Task(torch.nn.Linear(1, 1)), start, n).whole()
    everyone = torch.arange(n)
    samples, noise = torch.full((n,), 50.0), 0.1 * torch.randn(n, d, generator=rng)
    server = method.aggregate(server, {"w": start + noise}, Round(0, n, 0, everyone, samples, everyone * 0))
    server["known"] = samples
    seconds = []
    for t in range(1, rounds + 1):
        ids = torch.randperm(n, generator=rng)[: round(share * n)].sort().values
        now = Round(t, n, 0, ids, samples[ids], torch.full_like(ids, t))
        down, sent = timed(lambda server=server, now=now: method.downlink(server, now))
        w = down.each["u"] + 0.1 * torch.randn(len(ids), d, generator=rng)
        before = server["similarity"]
        server, taken = timed(
            lambda server=server, w=w, now=now: method.aggregate(server, {"w": w}, now) | {"known": samples}
        )
        W = server["w"]
        part, some = timed(lambda before=before, W=W, ids=ids: refresh(before, W, ids))
        whole, full = timed(lambda W=W: similarity(W))
        assert (part - whole).abs().max() < 1e-12
        seconds.append((sent, taken, sent + taken, some, full, full / some))
    down, up, both, some, full, ratio = (median(column) for column in zip(*seconds, strict=True))
    _, groups = timed(lambda: method.describe(server))
    size = sum(v.numel() * v.element_size() for v in server.values()) / 1e6
    times = f"{down:8.4f}  {up:8.4f}  {both:8.4f}    {some:8.4f}  {full:8.4f}  {ratio:6.2f}   {groups:8.4f}"
    return f"{n:7d}  {d:7d}  {times}   {size:8.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["300x610", "1000x610", "3000x610"], help="clients x parameters")
    parser.add_argument("--share", type=float, default=0.5, help="of the clients, whose models change in a round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(HEAD)
    for size in options.sizes:
        n, d = map(int, size.split("x"))
        print(measure(n, d, options.share, options.rounds), flush=True)


if __name__ == "__main__":
    main()
