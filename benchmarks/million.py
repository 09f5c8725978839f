"""A million clients from arrays to a report: seconds of processor time, peak of memory and bytes on disk by step.

The peak is what a step takes above what was there before it. Linux alone can tell it step by step.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch

from polyfed import FedAvg, fit
from polyfed.compute import evaluation
from polyfed.core.rounds import Loop
from polyfed.data import Federation
from polyfed.report import write_report
from polyfed.runs.folder import RunFolder
from polyfed.runs.session import Session

INSIDE = {  # of a run, what is called from it
    "what describes it": (RunFolder, "begin"),
    "rounds, the rehearsal's among them": (Loop, "step"),
    "evaluations of all clients": (Session, "_evaluate"),
    "checkpoints": (RunFolder, "checkpoint"),
    "what is written at the end": (RunFolder, "finish"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--cohort", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--rows", type=int, default=5, help="of a client")
    parser.add_argument("--features", type=int, default=8)
    parser.add_argument("--report", type=Path, help="a run folder, which is reported and nothing else")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if given.report:
        with step("reported, by a process of its own", given.report):
            write_report(given.report)
        return
    with tempfile.TemporaryDirectory() as folder:
        whole_path(given, Path(folder) / "run")


def whole_path(given: argparse.Namespace, folder: Path) -> None:
    n, rng = given.clients, np.random.default_rng(0)
    x = rng.standard_normal((n * given.rows, given.features), dtype=np.float32)
    y = (x @ rng.standard_normal((given.features, 3), dtype=np.float32)).argmax(1)
    print(f"{n:,} clients of {given.rows} rows: {(x.nbytes + y.nbytes) / 1e6:.0f} MB\n| | s | peak, MB | on disk, MB |")
    print("|---|--:|--:|--:|")
    with step("made", folder):
        federation = Federation.from_flat(x, y, np.arange(n + 1) * given.rows)
    with step("described", folder):
        federation.describe()

    def train(rounds: int) -> Any:
        how = {"fraction": given.cohort / n, "evaluate_every": rounds, "workers": 1, "out": folder, "resume": True}
        return fit(torch.nn.Linear(given.features, 3), federation, FedAvg(lr=0.1), rounds=rounds, **how)

    spent = {name: watched(*of) for name, of in INSIDE.items()}
    with step(f"a run of {given.rounds} rounds, in a folder", folder):
        run = train(given.rounds)
    for name, seconds in spent.items():
        print(f"| of it {name} ({len(seconds)}, the middle one {np.median(seconds):.4f}) | {sum(seconds):.2f} | | |")
    some = np.sort(rng.choice(n, min(n, 10_000), replace=False))
    with step(f"{len(some):,} clients evaluated", folder):
        scores = evaluation.metrics(run.trained.task, run.trained.personal(some), federation.test, some)
    with step(f"resumed, for {given.rounds} rounds more", folder):
        train(2 * given.rounds)
    subprocess.run([sys.executable, __file__, "--report", folder], check=True)
    few, all_of_them = (100 * np.nanmean(a["accuracy"]) for a in (scores, run.final["test"]))
    print(f"Accuracy of the sample {few:.2f} %, of all {all_of_them:.2f} %.")


def watched(cls: type, name: str) -> list[float]:
    """Seconds of each call of a method from now on."""
    inner, seconds = getattr(cls, name), list[float]()

    def timed(*args: Any, **kwargs: Any) -> Any:
        begun = process_time()
        found = inner(*args, **kwargs)
        seconds.append(process_time() - begun)
        return found

    setattr(cls, name, timed)
    return seconds


@contextmanager
def step(name: str, folder: Path) -> Generator[None]:
    """Print what its body takes."""
    size, begun, before = on_disk(folder), process_time(), memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    yield
    row(name, process_time() - begun, memory("VmHWM") - before, on_disk(folder) - size)


def row(name: str, seconds: float, peak: float, disk: float) -> None:
    print(f"| {name} | {seconds:.2f} | {peak:.0f} | {disk:.1f} |", flush=True)


def memory(which: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(which))


def on_disk(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


if __name__ == "__main__":
    main()
