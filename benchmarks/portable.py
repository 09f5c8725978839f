"""The price of --portable: processor seconds of training with and without it, taking turns, one thread each."""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = "import time; time.perf_counter = time.process_time; from polyfed.cli import main; main()"
COMMAND = (sys.executable, "-c", PROGRAM)
PLAIN = ("--data", "digits", "--clients", "10", "--seeds", "1", "--set", "workers=1", "--set", "evaluate-every=0", "-q")
WORKLOADS = {
    "softmax regression, batch 20": ("--model", "linear", "--batch-size", "20", "--rounds", "60"),
    "MLP 64-200-10, batch 20": ("--model", "mlp", "--batch-size", "20", "--rounds", "30"),
    "MLP 64-200-10, batch 20, float64": (
        "--model",
        "mlp",
        "--batch-size",
        "20",
        "--rounds",
        "30",
        "--dtype",
        "float64",
    ),
    "CNN, batch 20": ("--model", "cnn", "--batch-size", "20", "--rounds", "2"),
}


def seconds(words: tuple[str, ...], folder: Path) -> float:
    given = (*COMMAND, "run", "--algorithm", "fedavg", *PLAIN, *words, "--out", str(folder))
    subprocess.run(given, check=True, stdout=subprocess.DEVNULL)
    return json.loads((folder / "summary.json").read_text())["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for k, (name, words) in enumerate(WORKLOADS.items()):
            ratios, times = [], []
            for r in range(given.repeats):
                place = Path(folder) / f"{k}-{r}"
                usual, portable = seconds(words, place / "usual"), seconds((*words, "--portable"), place / "portable")
                times.append((usual, portable))
                ratios.append(portable / usual)
            usual, portable = (statistics.median(t) for t in zip(*times, strict=True))
            print(f"| {name} | {usual:.2f} s | {portable:.2f} s | {statistics.median(ratios):.2f} |", flush=True)


if __name__ == "__main__":
    main()
