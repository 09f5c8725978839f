"""Kill what carries the messages of real sites, at every moment of a round: do the numbers stay the same, to the bit?

    make torture-network [ONLY=superlink,supernode] [METHODS=scaffold,fedcet] [SEED=0]

A server and three sites, each a process of its own, train method after method; in each run something is killed or
disturbed once. The state of the server and of every site must be that of a run on one machine. Prints a line for each
case, with what the operators of both sides have seen.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

sys.path += [str(Path(__file__).parent / name) for name in ("engines", "conformance", "algorithms")]

from network import SITES, Federation, loops, private

from polyfed.core.rounds import Loop
from polyfed.core.schedule import Uniform

METHODS = ("fedavg", "scaffold", "fedcet", "fpfc")
ROUNDS = 3
MOMENTS = ("before", "during", "after")


def children(pid: int) -> list[int]:
    """Processes that this one has started."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return [int(p) for p in found.split()]


class Faults:
    """What can happen, by name; each is given the federation and a site."""

    @staticmethod
    def superlink(there: Federation, site: str) -> None:
        os.kill(there.transport._link.process.pid, signal.SIGKILL)

    @staticmethod
    def supernode(there: Federation, site: str) -> None:
        for pid in children(there.processes[site].pid):
            os.kill(pid, signal.SIGKILL)

    @staticmethod
    def site(there: Federation, site: str) -> None:
        """Killed, and started again, as systemd would."""
        there.processes[site].kill()
        there.processes[site].wait()
        there.processes[site] = there.start(site)

    @staticmethod
    def away(there: Federation, site: str) -> None:
        """Stopped in order, and back after 20 seconds."""
        there.processes[site].terminate()
        there.processes[site].wait()
        threading.Timer(20, lambda: there.processes.__setitem__(site, there.start(site))).start()

    @staticmethod
    def frozen(there: Federation, site: str) -> None:
        """Too slow to answer anything for 30 seconds."""
        group = [there.processes[site].pid, *children(there.processes[site].pid)]
        for pid in group:
            os.kill(pid, signal.SIGSTOP)
        threading.Timer(30, lambda: [os.kill(pid, signal.SIGCONT) for pid in group]).start()

    @staticmethod
    def twice(there: Federation, site: str) -> None:
        """Asked twice, and so answers twice."""
        asked = there.transport._asked.get(site)
        if asked is not None and asked.ids:
            there.transport._send(site)


FAULTS = [name for name in vars(Faults) if not name.startswith("_")]


def disturbed(loop: Loop, fault, moment: str, rng: random.Random) -> None:
    """Run the loop; in its second round something happens."""
    for t in range(ROUNDS):
        if t == 1 and moment == "before":
            fault()
        if t == 1 and moment == "during":
            threading.Timer(rng.uniform(0.2, 6), fault).start()
        loop.step()
        if t == 1 and moment == "after":
            fault()


def case(there: Federation, label: str, name: str, moment: str, rng: random.Random) -> str:
    """What differs from one machine; "" if nothing does."""
    mark = f"-{name}-{moment}"
    here, far = loops(there, label, Uniform(), mark)
    site = rng.choice(SITES)
    for _ in range(ROUNDS):
        here.step()
    fault = lambda: getattr(Faults, name)(there, site)  # noqa: E731
    if name == "twice":  # from the loop's own thread
        pull = there.transport.pull
        there.transport.pull = lambda *a, **k: (fault(), pull(*a, **k))[1]
        disturbed(far, lambda: None, moment, rng)
        there.transport.pull = pull
    else:
        disturbed(far, fault, moment, rng)
    wrong = [f"server {k}" for k in here.server if not torch.equal(here.server[k], far.server[k])]
    for i, mine in enumerate(private(there, label, far, mark)):
        wrong += [f"{SITES[i]} {k}" for k, t in here.engine.rows.tensors.items() if not torch.equal(t[i], mine[k])]
    return ", ".join(wrong)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default=",".join(FAULTS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng, bad = random.Random(given.seed), 0
    with tempfile.TemporaryDirectory() as folder:
        there = Federation(Path(folder))
        try:
            there.ask(do="echo", seconds=300)
            for name in given.only.split(","):
                for moment in MOMENTS:
                    for label in given.methods.split(","):
                        seen, told = len(there.said), {n: len(there.told(n)) for n in SITES}
                        start = time.monotonic()
                        wrong = case(there, label, name, moment, rng)
                        bad += bool(wrong)
                        took = time.monotonic() - start
                        print(f"{name} {moment} {label}: {wrong or 'the same bits'}, {took:.0f} s", flush=True)
                        for line in there.said[seen:]:
                            print(f"    server: {line}")
                        for n in SITES:
                            for line in there.told(n)[told[n] :].splitlines():
                                print(f"    {n}: {line}", flush=True)
        finally:
            there.close()
    print(f"{bad} cases differ")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
