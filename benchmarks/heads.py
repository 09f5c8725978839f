"""Every method on heads of 100 clients on real sentences and images, whose features are made once: processor time.

Methods are as `board/full` has them, at the middle of their ladders, with nothing tuned: 20 rounds of 5 steps.
"""

import argparse
from time import perf_counter, process_time

import torch

from polyfed.base.errors import PolyfedError
from polyfed.core.algorithm import REGISTRY, Algorithm
from polyfed.runs.trainer import fit
from polyfed_papers.adapters import Place
from polyfed_papers.board import APART, OTHER, made, start, work

CLIENTS, EACH, ROUNDS = 100, 24, 20
OURS = "polyfed.algorithms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--data-dir", help="folder with CIFAR-10; without it, sentences alone")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for data in ("sentences", "images") if given.data_dir else ("sentences",):
        timed(data, given.seeds, given.data_dir)


def timed(data: str, seeds: int, folder: str | None) -> None:
    training = ("batch_size", 10), ("workers", 1)
    place = Place(data, None, CLIENTS, folder=folder, training=training, each=EACH)
    began = process_time()
    for seed in range(seeds):
        place.federation(seed)
    print(f"features of {data}, and {seeds} draws of clients: {process_time() - began:.0f} s of processor time")
    found, refused = dict[str, float](), dict[str, str]()
    before, clock = process_time(), perf_counter()
    REGISTRY.load()
    for name, cls in sorted(REGISTRY.items()):
        if not issubclass(cls, Algorithm) or not cls.__module__.startswith(OURS) or name in APART:
            continue
        begun = process_time()
        try:
            for seed in range(seeds):
                fit(place.model(cls, seed), place.federation(seed), made(cls, start(cls)), rounds=ROUNDS, seed=seed,
                    evaluate_every=0, metrics="accuracy", **work(place))  # fmt: skip
            found[name] = process_time() - begun
        except PolyfedError as e:
            refused[name] = str(e)
    spent, waited = process_time() - before, perf_counter() - clock
    slow = sorted(found, key=lambda k: -found[k])[:5]
    print(f"{len(found)} methods x {seeds} seeds x {CLIENTS} clients: {spent / 60:.1f} minutes of processor time, "
          f"{waited / 60:.1f} by the clock; not at defaults: {', '.join(OTHER)}")  # fmt: skip
    print("most: " + ", ".join(f"{name} {found[name]:.1f} s" for name in slow))
    for name, why in refused.items():
        print(f"not trained: {name}: {why}")


if __name__ == "__main__":
    main()
