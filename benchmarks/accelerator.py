"""A step of many models on an accelerator: unfolded convolutions against grouped ones, and the memory it takes.

    python benchmarks/accelerator.py [--device cuda] [--clients 10 50] [--batch 20] [--models cnn resnet18]

Decides `UNFOLDED` in compute/vectorised.py, and shows whether the plan's estimate of memory holds. Prints one line
where there is no such device.
"""

import argparse
import time
from statistics import median

import numpy as np
import torch

import polyfed as pf
from polyfed import models
from polyfed.base.typed import seeded, tf32
from polyfed.compute import vectorised
from polyfed.compute.batches import Batch
from polyfed.compute.check import check
from polyfed.compute.split import Split

PRECISIONS = ("fp32", "tf32", "bf16")
SHAPES = {"cnn": (1, 28, 28), "lenet": (3, 32, 32), "resnet18": (3, 32, 32)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 50])
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--models", nargs="+", default=["cnn", "resnet18"], choices=SHAPES)
    parser.add_argument("--repeats", type=int, default=20)
    asked = parser.parse_args()
    if asked.device == "cuda" and not torch.cuda.is_available():
        print("no GPU: nothing to compare")
        return
    device = torch.device(asked.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    print(f"{name}, torch {torch.__version__}, batches of {asked.batch}; medians of {asked.repeats} steps")
    for model in asked.models:
        for precision in PRECISIONS:
            for clients in asked.clients:
                compare(model, clients, asked.batch, asked.repeats, device, precision)


def compare(model: str, clients: int, batch: int, repeats: int, device: torch.device, precision: str) -> None:
    """One line: milliseconds a step on either way, the largest difference of the numbers, and the memory."""
    shape, found, results = SHAPES[model], dict[str, float](), list[torch.Tensor]()
    with seeded(0):
        data = torch.randn(clients * batch, *shape), torch.randint(10, (clients * batch,))
    split = Split(*data, np.arange(clients + 1) * batch).to(device, torch.float32)
    samples = Batch(split.x.view(clients, batch, *shape), split.y.view(clients, batch))
    peak = expected = 0.0
    for way, unfolded in (("unfolded", True), ("grouped", False)):
        vectorised.UNFOLDED = unfolded
        task = pf.Task(models.build(model, shape, 10, seed=0), device=device, bf16=precision == "bf16")
        task.net.vectorised = True
        check(task, split, 10)
        w, times = task.w0.expand(clients, -1).clone(), list[float]()
        for k in range(repeats + 3):
            synchronize(device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            start = time.perf_counter()
            with tf32(precision == "tf32"):
                task.descend_(w, samples, 0.01)
            synchronize(device)
            if k >= 3:  # the first steps choose kernels
                times.append(time.perf_counter() - start)
        found[way] = 1000 * median(times)
        results.append(w)
        if unfolded and device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device) / 2**30
            expected = clients * (8 * task.p * 4 + 2 * batch * task.net.sample_bytes) / 2**30
    gap = float((results[0] - results[1]).norm() / results[1].norm())
    print(
        f"{model:9} {precision} {clients:4} clients: unfolded {found['unfolded']:8.2f} ms, "
        f"grouped {found['grouped']:8.2f} ms, apart by {gap:.1e}; memory {peak:.2f} GiB, estimated {expected:.2f}"
    )


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
