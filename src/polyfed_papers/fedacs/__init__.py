"""Shared parts of the experiments of FedACS, "Personalized Federated Learning with Attention-based Client Selection"
(arXiv 2312.15148).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import nn

from polyfed import APFL, Algorithm, Ditto, FedACS, FedAMP, FedAvg, FedAvgFT, Federation, Local, PerFedAvg, PFedMe
from polyfed.base.errors import Diverged
from polyfed.base.values import Limits
from polyfed.data import load
from polyfed.data.dataset import Dataset
from polyfed.models import build
from polyfed_papers.fedacs.stated import EPOCHS, STEPS, TRIALS, TUNED
from polyfed_papers.recipes.recipe import Bench
from polyfed_tuning.ladder import At, Ladder

TRIAL = 1000  # the first seed that settings are chosen under; none of them counts


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


def net(
    bench: Bench, name: str = "fashion-mnist", halved: bool = False, middle: str = "linear"
) -> Callable[[int], nn.Module]:
    """seed -> the common start: softmax regression when small, else the CNN, for `halved` images too."""
    side = 16 if halved else 32
    shape = (3, side, side) if name == "cifar10" else (1, 28, 28)
    return lambda seed: build(bench.pick("linear", "cnn", middle), shape, 10, seed=seed)


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
    return best(bench, key, lambda at: base(label, *at), ladders, model, federation, trials, **settings)


def best(
    bench: Bench, key: str, make: Callable[[At], Algorithm], ladders: Sequence[Ladder], model, federation: Make,
    trials: int, **settings,
) -> At:  # fmt: skip
    """The values of a method's settings that do best on average over the trials' clients."""
    clients = {seed: federation(seed, trial=True) for seed in range(TRIAL, TRIAL + trials)}

    def score(at: At) -> float:
        method, total = make(at), 0.0
        for seed, some in clients.items():
            try:
                run = bench.fit(model(seed), some, method, seed=seed, evaluate_every=0, **settings)
            except Diverged:
                return -np.inf
            total += float(np.nan_to_num(run.final["test"]["accuracy"]).mean())
        return total

    return bench.choose(key, score, ladders, TRIALS, 2 * TRIALS, 4 * TRIALS)


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
