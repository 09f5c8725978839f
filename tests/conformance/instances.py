"""The rows of the conformance table: every registered method on one small federation.

A new method file is a new row without another line. `VARIANTS` adds settings that take another path through a method.
"""

import os
from functools import cache
from zlib import crc32

import numpy as np
import pytest
import torch
from torch import nn
from traffic import TWO_LAYERS

import polyfed as pf
import polyfed.algorithms
from polyfed.base.randomness import client_keys
from polyfed.compute.batches import Work
from polyfed.compute.task import Task
from polyfed.core.algorithm import REGISTRY, Algorithm
from polyfed.core.rounds import Loop
from polyfed.core.schedule import Schedule, Uniform
from polyfed.engines.local import LocalEngine, make_plan, make_rows

VARIANTS = {
    "fedavg": [{"weighted": False}],
    "recalibrated": [{"slope": True}],
    "fedavgm": [{"weighted": False, "server_lr": 0.5}],
    "fedadam": [{"weighted": True, "v0": 0.0, "tau": 1e-2}],
    "fedslr": [
        {"lam": 0.02, "form": "all-duals", "deploy": "gkr"},
        {"lam": 0.02, "p_init": "weights", "structure": "LR+LR"},
        {"structure": "S+S", "p_weight_decay": 0.1},
    ],
    "lpgd": [{"lam": 0.02}],
    "gpgd": [{"lam": 0.02, "steps": 4}],
    "per-fedavg": [{"order": "hf"}, {"order": "exact"}],
    "apfl": [{"adaptive": True}],
    "fedspa": [{"search": "rsm"}],
    "scaffold": [{"option": 1}],
    "ditto": [{"personal_epochs": 2}],
    "fedacs": [{"quantile": None, "pool": "all"}, {"quantile": 0.5, "pool": "all"}],
    "fedbabu": [{"tune": "head"}],
    "fedlin": [{"keep_up": 0.3}, {"keep_down": 0.1}, {"keep_up": 0.3, "keep_down": 0.1}],
    "fedcet": [{"lr": 0.05}, {"lr": "paper", "smoothness": 2.0, "convexity": 1.0}],
    "ifca": [{"averaging": "gradient"}, {"weighted": True, "init_scale": 0.5}],
    "cfl": [{"eps1": 10.0, "eps2": 0.01, "gamma_max": 0.9}],
    "pacfl": [{"threshold": 60.0}, {"angle": "sum", "threshold": 200.0, "linkage": "complete"}],
    "fpfc": [
        {"lam": 0.05, "nu": 0.5, "penalty": "l1"},
        {"lam": 0.05, "merge": False},
        {"lam": 0.05, "shared_layers": "body"},
        {"lam": 0.05, "solver": "device-dual"},
        {"lam": 0.05, "merge": False, "shared_layers": "body", "solver": "device-dual"},
    ],
}
SIZES = (24, 5, 26, 13, 30, 12)  # full batches: some share a chunk, with padding, and some do not
BATCH = 8  # more than client 1 has
SMALL = 1
NAMES = ("oslo", "bern", "lima", "kyiv", "riga", "cork")
CLASSES, PIXELS = 3, 6
ROUNDS = 3


def methods() -> dict[str, Algorithm]:
    """Every method of the package with its defaults, and the variants, by a readable name."""
    found: dict[str, Algorithm] = {}
    for name, cls in sorted(REGISTRY.items()):
        if cls.__module__.startswith(f"{polyfed.algorithms.__name__}."):
            found[name] = cls()
            for settings in VARIANTS.get(name, []):
                found[f"{name}({','.join(f'{k}={v}' for k, v in settings.items())})"] = cls(**settings)
    return found


METHODS = methods()


@cache
def federation(regression: bool = False) -> pf.Federation:
    """Six clients with unequal numbers of 6 x 6 images, labels skewed by client, in float32."""
    rng = np.random.default_rng(7)
    centres = rng.normal(size=(CLASSES, 1, PIXELS, PIXELS))

    def draw(i: int, size: int):
        y = rng.choice(CLASSES, size, p=np.roll([0.6, 0.3, 0.1], i))
        x = (centres[y] + rng.normal(size=(size, 1, PIXELS, PIXELS))).astype(np.float32)
        return x, (x.mean((1, 2, 3)) + i).astype(np.float32) if regression else y

    train = [draw(i, size) for i, size in enumerate(SIZES)]
    test = [draw(i, 7) for i in range(len(SIZES))]
    return pf.Federation.from_arrays(train, test, names=NAMES, classes=None if regression else CLASSES)


def model(kind: str = "linear", outputs: int = CLASSES) -> nn.Module:
    """ "linear", "deep" (linear too, of two layers), "mlp" or "cnn", always with the same start."""
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(5)
        d = PIXELS**2
        if kind == "linear":
            return nn.Sequential(nn.Flatten(), nn.Linear(d, outputs))
        if kind == "deep":
            return nn.Sequential(nn.Flatten(), nn.Linear(d, 8), nn.Linear(8, outputs))
        if kind == "mlp":
            return nn.Sequential(nn.Flatten(), nn.Linear(d, 8), nn.ReLU(), nn.Linear(8, outputs))
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(36, outputs)
        )


def steps(method: Algorithm) -> int | None:
    """Local steps, for the one setting that needs the same number at every client; epochs otherwise."""
    return 4 if getattr(method, "lr", None) == "paper" else None


def kind_of(method: Algorithm) -> str:
    """Two layers for a method that sends its body or its head alone: of one layer, all is head."""
    return "deep" if type(method).__name__ in TWO_LAYERS else "linear"


def train(method: Algorithm, fed: pf.Federation | None = None, kind: str | None = None, **settings) -> pf.Run:
    """A short run on the small federation, one worker unless told otherwise.

    Half of the methods and models train without the kernel, so that the contract and the kill tests see both paths at
    no cost; test_native.py has every method on both.
    """
    settings = {
        "rounds": ROUNDS, "local_epochs": 2, "local_steps": steps(method), "batch_size": BATCH, "seed": 3, "workers": 1,
    } | settings  # fmt: skip
    kind = kind or kind_of(method)
    with pytest.MonkeyPatch.context() as patch:
        if crc32(f"{method!r} {kind}".encode()) % 2 and "POLYFED_NATIVE" not in os.environ:
            patch.setenv("POLYFED_NATIVE", "0")
        return pf.fit(model(kind), fed or federation(), method, **settings)


def loop(
    method: Algorithm,
    *,
    dtype: torch.dtype = torch.float32,
    schedule: Schedule | None = None,
    work: Work | None = None,
    chunk: int = 4,
) -> Loop:
    """The bare event loop on the small federation, for tests that watch or disturb single rounds."""
    fed = federation()
    task = Task(model(kind_of(method)), dtype=dtype, device="cpu")
    split = fed.train.to(task.device, task.dtype)
    work = work or Work(epochs=2, steps=steps(method), batch_size=BATCH)
    rows, plan = make_rows(method, task, fed.n, fed.n, None), make_plan(task, fed.n, 8, chunk=chunk, workers=1)
    engine = LocalEngine(task, {"train": split}, rows, client_keys(fed.names), work, 3, plan)
    return Loop(task, split.counts, fed.names, method, schedule or Uniform(), engine, 3)
