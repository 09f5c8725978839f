"""What `toward=` and `teacher=` of `local_sgd` cost over FedAvg's steps in the compiled kernel: processor time of one
thread, the least of repeats that take turns.
"""

import argparse
import sys
from time import thread_time

import numpy as np
import torch

from polyfed.compute.batches import Batches, Work
from polyfed.compute.check import check
from polyfed.compute.solvers import local_sgd
from polyfed.compute.split import Split
from polyfed.compute.task import Task
from polyfed.compute.terms import Distillation
from polyfed.models import build

# model, its further options, inputs, classes, samples of a client, batch, steps, clients
SHAPES = (
    ("linear", {}, 20, 5, 100, 10, 50, 20),
    ("linear", {}, 64, 10, 140, 20, 50, 10),
    ("linear", {}, 64, 10, 140, 20, 5, 10),
    ("linear", {}, 784, 10, 200, 20, 50, 10),
    ("mlp", {"hidden": 8}, 13, 2, 100, 20, 50, 10),
    ("mlp", {"hidden": 32}, 64, 10, 140, 20, 50, 10),
    ("mlp", {"hidden": 32}, 64, 10, 140, 20, 5, 10),
    ("mlp", {"hidden": 100}, 784, 10, 200, 20, 30, 10),
)


def row(kind: str, more: dict, inputs: int, classes: int, n: int, batch: int, steps: int, s: int, repeats: int) -> str:
    rng, torch_seed = np.random.default_rng(0), torch.manual_seed(0)
    x = torch.as_tensor(rng.normal(size=(s, n, inputs)), dtype=torch.float32)
    split = Split.of([(mine, torch.as_tensor(rng.integers(0, classes, n))) for mine in x])
    task = Task(build(kind, (inputs,), classes, seed=0, **more))
    check(task, split, classes)
    w = task.w0.expand(s, -1).contiguous()
    other = w + 0.01 * torch.randn(w.shape, generator=torch_seed)
    forms = {
        "fedavg": {},
        "toward": {"toward": (0.5, torch.randn(s, classes, task.width))},
        "teacher": {"teacher": (other, Distillation(0.7, 2.0))},
        "not true": {"teacher": (other, Distillation(0.7, 2.0, False))},
    }
    least = dict.fromkeys(forms, np.inf)
    for _ in range(repeats):
        for name, form in forms.items():
            data = Batches(split, np.arange(s), np.arange(s, dtype=np.uint64), Work(1, steps, batch), 0, 0, native=True)
            before = thread_time()
            local_sgd(task, w, data, 0.05, **form)
            least[name] = min(least[name], thread_time() - before)
    own = least.pop("fedavg")
    shape = "-".join(map(str, (inputs, *more.values(), classes)))
    cells = [shape, f"{steps} of {batch}", f"{1e6 * own / steps / s:.2f}", *(f"{t / own:.2f}" for t in least.values())]
    return " | ".join(["", *cells, ""]).strip()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=40)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | steps of | fedavg, us a step | toward | teacher | not true |\n|---|--:|--:|--:|--:|--:|")
    for shape in SHAPES:
        print(row(*shape, given.repeats))
        sys.stdout.flush()
