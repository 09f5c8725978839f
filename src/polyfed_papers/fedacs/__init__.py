"""Shared parts of the experiments of FedACS, "Personalized Federated Learning with Attention-based Client Selection"
(arXiv 2312.15148).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import nn

from polyfed.algorithms.apfl import APFL
from polyfed.algorithms.ditto import Ditto
from polyfed.algorithms.fedacs import FedACS
from polyfed.algorithms.fedamp import FedAMP
from polyfed.algorithms.fedavg import FedAvg
from polyfed.algorithms.fedavgft import FedAvgFT
from polyfed.algorithms.local import Local
from polyfed.algorithms.perfedavg import PerFedAvg
from polyfed.algorithms.pfedme import PFedMe
from polyfed.base.errors import Diverged
from polyfed.base.values import Limits
from polyfed.core.algorithm import Algorithm
from polyfed.data import load
from polyfed.data.dataset import Dataset
from polyfed.data.federation import Federation
from polyfed.models import build
from polyfed_papers.recipes.recipe import Bench, Size
from polyfed_papers.recipes.said import Setting
from polyfed_tuning.ladder import At, Ladder

EPOCHS = 5
STEPS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)  # sizes, for everyone
TUNED: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "FedACS": ("quantile", (0.0, 0.25, 0.5, 0.75, 0.9)),
    "Ditto": ("lam", (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)),
    "FedAMP": ("sigma", (30.0, 100.0, 300.0, 1000.0, 3000.0, 10000.0, 30000.0)),
    "PerAvg": ("alpha", (0.01, 0.03, 0.1, 0.3, 1.0)),
    "pFedMe": ("lam", (1.0, 2.0, 5.0, 10.0, 15.0)),
    "APFL": ("alpha", (0.1, 0.25, 0.5, 0.75, 0.9)),
}
HALVED = Setting("CIFAR-10", "at 16 x 16, means of 2 x 2 pixels", "ours")
TRIAL = 1000  # the first seed that settings are chosen under; none of them counts
TRIALS = 18  # values, of every method
REMARK = "printed figures are shown, not matched: see the notes"
NOT_TO_BE_MATCHED = (
    "the printed figures are shown for reference, not as a target: the paper names no model, rounds, batch, step "
    "sizes, quantile, test sets or settings of the others, and no code is published",
    "CIFAR-10 as printed does not fit its setting: with 50 images per client at Dirichlet(0.5) the commonest class "
    "makes up 40 %, a linear classifier trained alone reaches 43 to 47 %, the paper's Local 77.29 %; that fits clients "
    "of about two classes",
)


class Make(Protocol):
    """seed -> the clients; trial: those that settings are chosen on, made of the training images alone."""

    def __call__(self, seed: int, trial: bool = False) -> Federation: ...


def base(label: str, lr: float, own: float | None = None) -> Algorithm:
    """A method with a step size and a value of its own setting, all with the same passes over the data."""
    method: Algorithm = {
        "Local": Local(lr),
        "FedAvg": FedAvg(lr),
        "FedAvg-FT": FedAvgFT(lr, finetune_epochs=EPOCHS, finetune_lr=lr),
        "Ditto": Ditto(lr, personal_epochs=EPOCHS),
        "PerAvg": PerFedAvg(lr),
        "pFedMe": PFedMe(min(lr / 2, 0.06), personal_lr=lr),  # below 1 / lam for every lam that is tried
        "APFL": APFL(lr),
        "FedAMP": FedAMP(lr),
        "FedACS": FedACS(lr),
    }[label]
    changes: dict[str, Any] = {} if own is None else {TUNED[label][0]: own}
    return replace(method, **changes)


def work(bench: Bench) -> dict[str, Any]:
    """Everyone's local work, and how long."""
    return {"rounds": bench.rounds(30, 100), "local_epochs": 1 if bench.rehearse else EPOCHS, "batch_size": 10}


@lru_cache(maxsize=2)
def images(name: str, folder: str | Path | None, halved: bool = False) -> Dataset:
    """A data set, read once; `halved` is CIFAR-10 at half its width and height, means of 2 x 2 pixels."""
    data = load(name, data_dir=folder)
    if not (halved and name == "cifar10"):
        return data
    assert data.x_test is not None
    small = (x.reshape(-1, 3, 16, 2, 16, 2).mean((3, 5)).round().astype(np.uint8) for x in (data.x, data.x_test))
    return replace(data, **dict(zip(("x", "x_test"), small, strict=True)))


def clients(
    bench: Bench,
    name: str = "fashion-mnist",
    partition: str = "dirichlet-prior:0.5,samples=50",
    n: int | None = None,
    at_most: int | None = None,
    halved: bool = False,
) -> Make:
    """seed -> Federation of images, `at_most` so many training images; test sets have their client's class ratio."""
    n = 8 if bench.rehearse else n or bench.pick(40, 100)

    def make(seed: int, trial: bool = False) -> Federation:
        data = images(name, bench.data_dir, halved)
        if trial:
            held, x, y = len(data) // 6, data.x, data.y
            data = replace(data, x=x[held:], y=y[held:], x_test=x[:held], y_test=y[:held])
        if at_most is not None and at_most < len(data):
            some = np.random.default_rng(seed).permutation(len(data))[:at_most]
            data = replace(data, x=data.x[some], y=data.y[some])
        return data.partition(partition, n, seed, test="ratio", validation_fraction=0.0)

    return make


def net(bench: Bench, name: str = "fashion-mnist", halved: bool = False) -> Callable[[int], nn.Module]:
    """seed -> the common start: softmax regression when small, else the CNN, for `halved` images too."""
    side = 16 if halved else 32
    shape = (3, side, side) if name == "cifar10" else (1, 28, 28)
    return lambda seed: build(bench.pick("linear", "cnn"), shape, 10, seed=seed)


def tuned(
    # one draw of 40 clients misjudges either by a point
    bench: Bench, key: str, labels: Sequence[str], model, federation: Make, trials: int = 3, **settings
) -> dict[str, Algorithm]:  # fmt: skip
    """Every method at the step size and the value of its setting that do best on average over the trials' clients."""
    tasks = [
        (f"{key}-{label}", TRIAL, partial(
            search, bench, f"{key}-{label}".lower(), label, model, federation, 1 if bench.rehearse else trials,
            **settings))
        for label in labels
    ]  # fmt: skip
    return {label: base(label, *best) for label, best in zip(labels, bench.all_of(tasks), strict=True)}


def search(bench: Bench, key: str, label: str, model, federation: Make, trials: int, **settings) -> At:
    """The best step size and, of a method that has one, value of its own setting; each trained for all rounds."""
    ladders = [Ladder(STEPS, Limits(gt=0))]
    if label in TUNED:
        ladders.append(Ladder.of(base(label, 0.1), *TUNED[label]))
    clients = {seed: federation(seed, trial=True) for seed in range(TRIAL, TRIAL + trials)}

    def score(at: At) -> float:
        method, total = base(label, *at), 0.0
        for seed, some in clients.items():
            try:
                run = bench.fit(model(seed), some, method, seed=seed, evaluate_every=0, **settings)
            except Diverged:
                return -np.inf
            total += float(np.nan_to_num(run.final["test"]["accuracy"]).mean())
        return total

    return bench.choose(key, score, ladders, TRIALS)


def commonest(bench: Bench, federation: Callable[[int], Federation]) -> np.ndarray:
    """[seeds] the mean over clients of the commonest class's share of the test set: what needs no inputs."""
    return np.array([_majority(federation(seed)) for seed in bench.seeds])


def _majority(federation: Federation) -> float:
    test = federation.test
    labels = np.split(test.y.numpy(), test.offsets[1:-1])
    return float(np.mean([np.bincount(y).max() / len(y) for y in labels]))


def apart(values: np.ndarray) -> np.ndarray:
    """[seeds] distance from the mean over seeds."""
    return np.abs(values - np.nanmean(values))


def chosen(label: str, method: Algorithm) -> str:
    """The choice for a method, in words."""
    names = ("personal_lr" if label == "pFedMe" else "lr", *TUNED.get(label, ())[:1])
    return ", ".join(f"{'lr' if k == 0 else name} {getattr(method, name):g}" for k, name in enumerate(names))


def listed(values: Sequence[float]) -> str:
    """Values in a line."""
    return ", ".join(f"{v:g}" for v in values)


def common_settings(scale: Size) -> list[Setting]:
    """Settings of all recipes with 50 images per client."""
    small = scale == "small"
    return [
        Setting("clients", "40", "ours") if small else Setting("clients", "100", "paper"),
        Setting("training images per client", "50", "paper"),
        Setting("test set per client", "100 images in the class ratio of its training images", "ours"),
        model_setting(scale),
        *work_settings(scale),
    ]


def model_setting(scale: Size) -> Setting:
    cnn = "CNN: 5x5x32, 5x5x64, 2x2 pools, dense 512"
    return Setting("model", "softmax regression on the pixels" if scale == "small" else cnn, "ours")


def work_settings(scale: Size, trials: str = "3") -> list[Setting]:
    return [
        Setting("rounds", "30" if scale == "small" else "100", "ours"),
        Setting("local work", f"{EPOCHS} epochs of batches of 10, for every method", "ours"),
        Setting("step size", f"{listed(STEPS)}, for every method its own", "ours"),
        *(Setting(f"{label}: {name} from", listed(grid), "ours") for label, (name, grid) in TUNED.items()),
        Setting("pFedMe", "envelope's step half the step size, at most 0.06; 5 inner steps, beta 1", "ours"),
        Setting("tuning", f"{TRIALS} trials of every method: all steps, all values of its own setting, beyond them "
                "while the first or the last is best, then between", "ours"),
        Setting("tuned on", f"{trials} other draws of clients, a sixth of the training images their test set", "ours"),
    ]  # fmt: skip
