"""Gradients of 20 clients' LoRA on MiniLM on a processor: one pass of the base for all, against one after another.
Processor time of one thread, the median ratio of pairs; the weights are of a package.
"""

from time import process_time

import numpy as np
import torch

from polyfed.compute.batches import Batch
from polyfed.compute.task import Task
from polyfed.models import adapted, build
from polyfed_papers.adapters import minilm

CLIENTS, TOKENS, CLASSES, PAIRS = 20, 32, 4, 5


def main() -> None:
    torch.set_num_threads(1)
    net = build("transformers", (2, TOKENS), CLASSES, backbone=str(minilm()), pool="first")
    task, drawn = Task(adapted(net, "lora:r=8,targets=query+value")), torch.Generator().manual_seed(0)
    task.net.integers = True
    print("| samples of a client | one after another | in one pass | ratio | gradients apart |\n|--:|--:|--:|--:|--:|")
    for b in (1, 4, 10):
        ids = torch.randint(1000, 20000, (CLIENTS, b, TOKENS), generator=drawn)
        y = torch.randint(CLASSES, (CLIENTS, b), generator=drawn)
        x, weight = torch.stack([ids, torch.ones_like(ids)], 2), torch.full((CLIENTS, b), 1 / b)
        w, keys = task.w0.expand(CLIENTS, -1).clone(), np.arange(CLIENTS, dtype=np.uint64)
        batch, taken, found = Batch(x, y, weight, [b] * CLIENTS, seed=lambda keys=keys: keys), [], {}
        for _ in range(PAIRS + 1):  # the first does not count
            for many in (False, True):
                task.net.vectorised = task.net.grouped = many
                begun = process_time()
                found[many] = task.gradient(w, batch)[0]
                taken.append(process_time() - begun)
        times = np.array(taken[2:]).reshape(-1, 2)
        ratio, apart = np.median(times[:, 0] / times[:, 1]), (found[True] - found[False]).norm() / found[False].norm()
        each = " | ".join(f"{1e3 * t:.0f} ms" for t in np.median(times, 0))
        print(f"| {b} | {each} | {ratio:.2f} | {apart:.1e} |")


if __name__ == "__main__":
    main()
