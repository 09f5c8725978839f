"""Random runs of `pf.fit`, all settings at once: refused in one line, or right, with the same bits a second time and
after a Ctrl-C at any round and a resume, and the same bytes however many clients share a call.

A case is a table of plain values, so that a failure can be typed in again: `check(drawn(7))`.
"""

import secrets
import signal
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
import polyfed.algorithms
from fuzz import METHODS, MORE, survives
from polyfed.core.algorithm import REGISTRY
from polyfed.core.schedule import Asynchronous, Bernoulli, Delays, Timed, Uniform
from polyfed.threats import ATTACKS, RULES

FACES = (8, 8)  # of the images


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(inputs, 6), nn.Linear(6, 6), nn.Linear(6, outputs)

    def forward(self, x):
        h = self.first(x).relu()
        return self.head(h + self.second(h).tanh())


class Recurrent(nn.Module):
    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.cell, self.head = nn.GRU(1, 4, batch_first=True), nn.Linear(4, outputs)

    def forward(self, x):
        return self.head(self.cell(x[:, :, None])[0][:, -1])


def chain(*layers) -> nn.Module:
    return nn.Sequential(*layers)


FLAT = {
    "linear": nn.Linear,
    "two layers": lambda d, k: chain(nn.Linear(d, 8), nn.ReLU(), nn.Linear(8, k)),
    "no bias": lambda d, k: chain(nn.Linear(d, 5, bias=False), nn.Tanh(), nn.Linear(5, k, bias=False)),
    "batch norm": lambda d, k: chain(nn.Linear(d, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, k)),
    "layer norm": lambda d, k: chain(nn.LayerNorm(d), nn.Linear(d, 6), nn.GELU(), nn.Linear(6, k)),
    "dropout": lambda d, k: chain(nn.Linear(d, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, k)),
    "frozen below": lambda d, k: chain(nn.Linear(d, 6).requires_grad_(False), nn.Tanh(), nn.Linear(6, k)),
    "residual": Residual,
    "recurrent": Recurrent,
}
IMAGES = {
    "convolution": lambda d, k: chain(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, k)),
    "group norm": lambda d, k: chain(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, k)
    ),
}
MODELS = FLAT | IMAGES
RESIDUAL = ("flora", "fedex-lora")  # methods that train LoRA's residual beside its factors


def drawn(seed: int) -> dict[str, Any]:
    """One case: methods, models, data, schedules, attacks, robust rules, privacy and metrics, each now and then."""
    rng = np.random.default_rng(seed)

    def one(*choices):
        return choices[rng.integers(len(choices))]

    def now(chance: float) -> bool:
        return bool(rng.random() < chance)

    kind = one("classes", "classes", "numbers", "images")
    case: dict[str, Any] = {
        "seed": int(rng.integers(100)), "method": one(*METHODS), "lr": one(None, 0.01, 0.1, 1.0), "kind": kind,
        "model": one(*IMAGES) if kind == "images" else one(*FLAT),
        "sizes": [int(one(1, 2, 3, 7, 12, 33, 65)) for _ in range(one(1, 3, 4, 5, 5, 8, 12))],
        "classes": one(2, 2, 3, 5), "features": one(1, 3, 6), "tests": one("all", "some", "none"), "alike": now(0.05),
    }  # fmt: skip
    n, rounds = len(case["sizes"]), one(0, 1, 2, 3, 5)
    train: dict[str, Any] = {"rounds": rounds, "seed": int(rng.integers(5)), "batch_size": one(1, 4, 8, 1000, None)}
    if now(0.6):
        train["local_steps"] = one(1, 3, [int(k) for k in rng.integers(1, 4, n)])
    if now(0.3):
        train["fraction"] = one(1e-9, 0.3, 0.5, 0.99)
    if now(0.4):
        train |= {"optimizer": one("momentum", "adam", "adamw"), "weight_decay": one(0.0, 0.01)}
    if now(0.2):
        train["clip_norm"] = one(1e-3, 1.0)
    if now(0.2):
        train |= {"lr_schedule": one("constant:warmup=2", "exponential:0.5,2", "cosine:9")}
    if now(0.25) and "fraction" not in train:
        train["schedule"] = one("bernoulli", "asynchronous", "one at a time", "late", "timed")
    if now(0.2):
        train["attack"] = {"name": one(*ATTACKS), "ratio": one(0.2, 0.4)}
    if now(0.2):
        train["robust"] = {"name": one(*RULES)}
    if now(0.12):
        train["privacy"] = one({"sums": "secure"}, {"sums": "secure", "epsilon": 5.0, "clip": 1.0},
                               {"noise": "own", "epsilon": 5.0, "clip": 1.0, "unit": "row"},
                               {"noise": "server", "epsilon": 5.0, "clip": 1.0, "unit": "site"})  # fmt: skip
    if now(0.2):
        train["metrics"] = (
            one(["rmse", "mae"], ["r2"]) if kind == "numbers" else one(["auc", "brier"], ["balanced-accuracy"])
        )
    if now(0.15) and kind != "numbers":
        train["class_weights"] = "balanced"
    if now(0.3):
        train["dtype"] = "float64"
    if now(0.4):
        train["evaluate_every"] = one(0, 1, 2)
    if now(0.1) and kind == "images":
        train["augment"] = one("flip", "crop:1")
    return case | {"train": train, "stop": int(rng.integers(1, max(2, rounds))), "chunks": [2, 3, 100]}


def federation(case: dict[str, Any]) -> pf.Federation:
    rng, d, k = np.random.default_rng(case["seed"]), case["features"], case["classes"]

    def site(m: int):
        x = rng.normal(size=(m, 1, *FACES) if case["kind"] == "images" else (m, d)).astype(np.float32)
        if case["kind"] == "numbers":
            return x, (x.reshape(m, -1)[:, 0] + 0.1 * rng.normal(size=m)).astype(np.float32)
        return x, np.arange(m) % k if not case["alike"] else np.zeros(m, dtype=np.int64)

    sites, how = [site(m) for m in case["sizes"]], {"classes": k} if case["kind"] != "numbers" else {}
    if case["tests"] == "none":
        return pf.Federation.from_arrays(sites, test_fraction=0, **how)
    return pf.Federation.from_arrays(sites, **(how | ({"test": sites} if case["tests"] == "all" else {})))


def settings(case: dict[str, Any]) -> dict[str, Any]:
    """What goes to `pf.fit`, with a schedule made of its name."""
    train, late = dict(case["train"]), Delays(kind="uniform", low=0.1, high=2.0)
    schedules = {
        "bernoulli": lambda: Bernoulli(0.6), "asynchronous": lambda: Asynchronous(Delays()),
        "one at a time": lambda: Asynchronous(late, concurrency=1), "late": lambda: Asynchronous(late),
        "timed": lambda: Timed(Uniform(0.7), late),
    }  # fmt: skip
    if "schedule" in train:
        train["schedule"] = schedules[train["schedule"]]()
    return train | {"workers": 1, "chunk": 1, "device": "cpu"}


def model_of(case: dict[str, Any], fed: pf.Federation, outputs: int) -> nn.Module:
    """As drawn, or what a method asks for."""
    name, model = case["method"], MODELS[case["model"]](case["features"], outputs)
    if name in ("fedem", "fedrc"):
        return pf.models.mixture(fed.input_shape, outputs, by_class=name == "fedrc")
    if name == "knn-per":
        return pf.models.memory(fed.input_shape, outputs)
    if "lora" in name:
        return pf.models.adapted(model, f"lora:r=2,train={'residual' if name in RESIDUAL else 'factors'}")
    if case["model"] == "batch norm":
        return pf.models.with_statistics(model)
    return model


def fitted(case: dict[str, Any], fed: pf.Federation, **more):
    torch.manual_seed(case["seed"])
    outputs = 1 if case["kind"] == "numbers" else case["classes"]
    method = REGISTRY.make(case["method"], {} if case["lr"] is None else {"lr": case["lr"]})
    return pf.fit(model_of(case, fed, outputs), fed, method, **(settings(case) | more))


def bits(run) -> dict[str, Any]:
    """All that a run says: models, the server's tensors, scores, and who sent how much."""
    ledger = run.ledger
    return {
        "models": run.personal.numpy().tobytes(),
        **{f"server {k}": torch.as_tensor(t).numpy().tobytes() for k, t in run.server.items()},
        **{f"{part} {k}": np.asarray(v).tobytes() for part, of in run.final.items() for k, v in of.items()},
        "ledger": ledger.drop(columns=[c for c in ledger if "seconds" in c or "time" in c]).to_csv(),
    }


def same(one: dict[str, Any], other: dict[str, Any], why: str) -> None:
    assert one.keys() == other.keys(), why
    differ = [key for key in one if one[key] != other[key]]
    assert not differ, f"{why}: {', '.join(differ)}"


def stopped(case: dict[str, Any], fed: pf.Federation, out: Path):
    """Ctrl-C in a round, then the same call with resume."""

    def press(progress):
        if progress.round == case["stop"]:
            signal.raise_signal(signal.SIGINT)

    with suppress(KeyboardInterrupt):
        fitted(case, fed, out=out, callbacks=[press])  # which may have fewer rounds
    return fitted(case, fed, out=out, resume=True)


def right(case: dict[str, Any]) -> None:
    fed = federation(case)
    first = fitted(case, fed)
    sent = [c for c in first.ledger if c.endswith("bytes")]
    for chunk in case["chunks"]:
        other = fitted(case, fed, chunk=chunk)
        assert other.ledger[sent].equals(first.ledger[sent]), f"other bytes in chunks of {chunk}"
    if "epsilon" in case["train"].get("privacy", {}):
        return  # whose noise is the run's own
    same(bits(first), bits(fitted(case, fed)), "a second time")
    with tempfile.TemporaryDirectory() as folder:
        same(bits(first), bits(stopped(case, fed, Path(folder) / "run")), "after Ctrl-C and resume")


def check(case: dict[str, Any]) -> str:
    """Whether the run "worked" or was "refused"; anything else fails with the case."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        try:
            return survives(case, lambda: right(case))
        except AssertionError as e:
            raise AssertionError(f"{case!r}: {e}") from e.__cause__


FIRST = secrets.randbelow(2**32) if MORE else 5


@pytest.mark.parametrize("seed", range(FIRST, FIRST + 14 * max(1, MORE)))
def test_a_random_run_is_refused_in_one_line_or_right(seed):
    check(drawn(seed))
