"""The rows of the conformance table: every registered method on one small federation.

A new method file is a new row without another line. `VARIANTS` adds settings that take another path through a method.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from zlib import crc32

import pytest
import torch
from torch import nn
from traffic import FEATURES, TWO_LAYERS

import polyfed as pf
import polyfed.algorithms
from polyfed.algorithms import shipped
from polyfed.compute.batches import Work
from polyfed.core.algorithm import Algorithm
from polyfed.core.rounds import Loop
from polyfed.core.schedule import Schedule
from polyfed.models import adapted
from polyfed.models.memory import Memory
from polyfed.models.mixture import Mixture
from polyfed_testing import stage
from polyfed_testing.stage import BATCH, CLASSES, ROUNDS

VARIANTS = {
    "fedavg": [{"weighted": False}],
    "recalibrated": [{"slope": True}],
    "fedavgm": [{"weighted": False, "server_lr": 0.5}],
    "fedadam": [{"weighted": True, "v0": 0.0, "tau": 1e-2}],
    "fedslr": [
        {"lam": 0.02, "form": "all-duals", "deploy": "gkr"},
        {"lam": 0.02, "p_init": "weights", "structure": "LR+LR"},
        {"structure": "S+S", "p_weight_decay": 0.1},
        {"lam": 0.02, "keep": 0.3},
    ],
    "lpgd": [{"lam": 0.02}],
    "gpgd": [{"lam": 0.02, "steps": 4}],
    "per-fedavg": [{"order": "hf"}, {"order": "exact"}, {"start": "personal", "weighted": True}],
    "lg-fedavg": [{"deployed": "before", "weighted": True}],
    "apfl": [{"adaptive": True}],
    "fedspa": [{"search": "rsm"}],
    "scaffold": [{"option": 1}],
    "ditto": [{"personal_epochs": 2}],
    "fedacs": [{"quantile": None, "pool": "all"}, {"quantile": 0.5, "first": 0.0, "sigma": 1.0, "start_seed": 1}],
    "fedbabu": [{"tune": "head"}],
    "fedlin": [{"keep_up": 0.3}, {"keep_down": 0.1}, {"keep_up": 0.3, "keep_down": 0.1}],
    "fedcet": [{"lr": 0.05}, {"lr": "paper", "smoothness": 2.0, "convexity": 1.0}],
    "led": [{"mixing": 0.5}],
    "compressedscaffnew": [{"keep": 2 / 3, "p": 0.3}],
    "tamuna": [{"keep": 2 / 3, "p": 0.3}],
    "gradskip": [{"q": 0.5, "p": 0.3}],
    "locodl": [{"keep": 0.3, "p": 0.3}, {"compressor": "natural"}],
    "ifca": [{"averaging": "gradient"}, {"weighted": True, "init_scale": 0.5}, {"averaging": "shrinking"}],
    "hypcluster": [{"one_hot": True}],
    "fedsoft": [{"k": 3, "tau": 1}],
    "clove": [{"k": 3, "stable": 1, "init_scale": 0.5}],
    "sr-fca": [{"quantile": 0.6, "refine": 1, "refinements": 2}],
    "pfedgraph": [{"alpha": 0.1, "lam": 0.0}],
    "fedfomo": [{"validation": 0.0, "models": 2}],
    "fedexp": [{"weighted": True, "averaged": False}],
    "q-fedavg": [{"form": "term"}, {"form": "afl", "q": 0.1}],
    "fednova": [{"mu": 0.1}],
    "flexcfl": [{"between": 0.01}],
    "fedem": [{"responsibilities": "following"}],
    "fedrc": [{"responsibilities": "following"}],
    "apple": [{"form": "cosine"}],
    "fedsa-lora": [{"head": "shared"}],
    "feddpa": [{"lam": 1.0}],
    "fedex-lora": [{"weighted": False}],
    "flexlora": [{"least": 1}],
    "hetlora": [{"least": 1, "gamma": 0.5}],
    "fedproto": [{"pull": "paper", "weighted": True}, {"deployed": "head"}],
    "fedtgp": [{"weighted": True, "tau": 0.1}],
    "fedgh": [{"deployed": "common"}],
    "fedas": [{"fisher": "batch"}],
    "feddbe": [{"kappa": 0.0}],
    "fedpac": [{"distance": "sum", "least": 0.0}],
    "cfl": [{"eps1": 10.0, "eps2": 0.01, "gamma_max": 0.9}],
    "pacfl": [
        {"threshold": 60.0},
        {"angle": "sum", "threshold": 200.0, "linkage": "complete"},
        {"threshold": 60.0, "everyone_first": True, "deployed": "own"},
    ],
    "fpfc": [
        {"lam": 0.05, "nu": 0.5, "penalty": "l1"},
        {"lam": 0.05, "merge": False},
        {"lam": 0.05, "shared_layers": "body"},
        {"lam": 0.05, "solver": "device-dual"},
        {"lam": 0.05, "merge": False, "shared_layers": "body", "solver": "device-dual"},
    ],
}
PIXELS = 6


class Plus(nn.Module):
    """x + f(x)."""

    def __init__(self, f: nn.Module):
        super().__init__()
        self.f = f

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.f(x)


def methods() -> dict[str, Algorithm]:
    """Every method of the package with its defaults, and the variants, by a readable name."""
    found: dict[str, Algorithm] = {}
    for name, cls in shipped().items():
        found[name] = cls()
        for settings in VARIANTS.get(name, []):
            found[f"{name}({','.join(f'{k}={v}' for k, v in settings.items())})"] = cls(**settings)
    return found


METHODS = methods()


def federation(regression: bool = False) -> pf.Federation:
    """The table's clients, with 6 x 6 images."""
    return stage.federation(regression, (1, PIXELS, PIXELS))


def model(kind: str = "linear", outputs: int = CLASSES) -> nn.Module:
    """ "linear", "deep" (linear too, of two layers), "norm" (that, normalised), "factors" or "residual" (that, with an
    adapter), "mlp", "block" (that, with a norm and a dropout around a sum), "cnn", a mixture of two, or one with a
    memory."""
    if kind.startswith("memory"):
        net = model("cnn" if kind.endswith("cnn") else "deep", outputs)
        assert isinstance(net, nn.Sequential)
        return Memory(net, rows=7, k=3)
    if "mixture" in kind:
        part = model("cnn" if kind.endswith("cnn") else "linear", outputs)
        return Mixture(part, stage.opposite(part), classes=outputs if "class" in kind else None)
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(5)
        d = PIXELS**2
        if kind == "linear":
            return nn.Sequential(nn.Flatten(), nn.Linear(d, outputs))
        if kind == "deep":
            return nn.Sequential(nn.Flatten(), nn.Linear(d, 8), nn.Linear(8, outputs))
        if kind == "norm":
            return nn.Sequential(nn.Flatten(), nn.Linear(d, 8), nn.LayerNorm(8), nn.Linear(8, outputs))
        if kind == "mlp":
            return nn.Sequential(nn.Flatten(), nn.Linear(d, 8), nn.ReLU(), nn.Linear(8, outputs))
        if kind == "block":
            inside = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.2))
            return nn.Sequential(nn.Flatten(), nn.Linear(d, 8), Plus(inside), nn.SiLU(), nn.Linear(8, outputs))
        norm = [nn.GroupNorm(2, 4)] if kind == "norm cnn" else []
        if kind in ("factors", "residual"):
            return adapted(model("deep", outputs), f"lora:r=2,train={kind}")
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), *norm, nn.ReLU(), nn.Conv2d(4, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(36, outputs)
        )


def steps(method: Algorithm) -> int | None:
    """Local steps, for the one setting that needs the same number at every client; epochs otherwise."""
    return 4 if getattr(method, "lr", None) == "paper" else None


def kind_of(method: Algorithm) -> str:
    """Two layers for a method that sends its body or its head alone (of one layer, all is head), or that has a use for
    features."""
    if type(method).__name__ == "FedBN":
        return "norm"
    if method.adapter_train:
        return method.adapter_train
    if type(method).__name__ in ("FedEM", "FedRC"):
        return "mixture" if type(method).__name__ == "FedEM" else "class mixture"
    if type(method).__name__ == "KNNPer":
        return "memory"
    return "deep" if type(method).__name__ in (*TWO_LAYERS, *FEATURES) else "linear"


def train(method: Algorithm, fed: pf.Federation | None = None, kind: str | None = None, **settings) -> pf.Run:
    """A short run on the small federation, one worker unless told otherwise."""
    settings = {
        "rounds": ROUNDS, "local_epochs": 2, "local_steps": steps(method), "batch_size": BATCH, "seed": 3, "workers": 1,
    } | settings  # fmt: skip
    if method.needs.everyone:
        settings.pop("fraction", None)
    usual = kind_of(method)
    kind = (
        f"{usual} cnn" if kind == "cnn" and usual in ("norm", "mixture", "class mixture", "memory") else kind or usual
    )
    kind = method.adapter_train or kind
    with half_without_the_kernel(f"{method!r} {kind}"):
        return pf.fit(model(kind), fed or federation(), method, **settings)


@contextmanager
def half_without_the_kernel(case: str) -> Iterator[None]:
    """Half of the cases train on torch alone, so that both paths are seen at no cost; test_native.py compares them."""
    with pytest.MonkeyPatch.context() as patch:
        if crc32(case.encode()) % 2 and "POLYFED_NATIVE" not in os.environ:
            patch.setenv("POLYFED_NATIVE", "0")
        yield


def loop(method: Algorithm, *, schedule: Schedule | None = None, work: Work | None = None, **given) -> Loop:
    """The bare event loop on the small federation, for tests that watch or disturb single rounds."""
    work = work or Work(epochs=2, steps=steps(method), batch_size=BATCH)
    return stage.loop(method, schedule, work=work, fed=federation(), net=model(kind_of(method)), **given)
