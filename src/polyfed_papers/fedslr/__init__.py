"""Shared parts of the experiments of FedSLR, "Fusion of Global and Local Knowledge for Personalized Federated Learning"
(arXiv 2302.11051).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from polyfed import Algorithm, Federation, FedSLR, Progress
from polyfed.base.errors import DataError, Diverged
from polyfed.data import load
from polyfed.data.dataset import Dataset
from polyfed.data.partition import IID, DirichletPrior
from polyfed.models import build
from polyfed.studies.compare import Comparison
from polyfed_papers.adapters import efficientnet, read_pictures
from polyfed_papers.fedslr.stated import CLIENTS, DATA, SAMPLES
from polyfed_papers.recipes.recipe import Bench
from polyfed_papers.recipes.said import Claim, ordered
from polyfed_tuning.ladder import At, Ladder

FULL = {"cifar10": 50_000, "cifar100": 50_000, "tiny-imagenet": 100_000}
TRIALS, UNCOUNTED = 8, 1000  # values of every method, and the first of the seeds that they are chosen under


class Choice(NamedTuple):
    """A method with one setting of its own to choose: the values, and the method at one of them."""

    ladder: Ladder
    make: Callable[[float], Algorithm]


def lam(bench: Bench) -> float:
    """Weight of the nuclear norm: the paper's, or as much more as there are fewer rounds (small: twenty times)."""
    return bench.pick(2e-3, 1e-4, 2.5e-4, 1e-2)


def method(bench: Bench, **changes: Any) -> FedSLR:
    """FedSLR with the settings of the experiments."""
    return replace(FedSLR(lr=0.1, lam=lam(bench), mu=1e-3, eta_g=10.0), **changes)


def federation(
    bench: Bench, data: str = "CIFAR-100", iid: bool = False, trial: bool = False
) -> Callable[[int], Federation]:
    """seed -> the clients; data: at paper scale; trial: tested on a sixth of the training images."""

    def make(seed: int) -> Federation:
        if count := SAMPLES.get(bench.scale):
            images = (
                fashion(bench.data_dir) if bench.small else load("cifar100", data_dir=bench.data_dir, normalise=True)
            )
            images = held_out(images) if trial else images
            some = np.random.default_rng(seed).permutation(len(images.x))[: CLIENTS * count]
            images = replace(images, x=images.x[some], y=images.y[some])
        elif bench.scale == "heads":
            images = features(bench.data_dir)
            images = held_out(images) if trial else images
        else:
            images = load(DATA[data], data_dir=bench.data_dir, normalise=True)
            wanted = FULL[images.name]
            if len(images) < wanted and not bench.rehearse:
                raise DataError(
                    f"{images.name} in {bench.data_dir}: {len(images)} training images, the paper scale needs "
                    f"{wanted}; polyfed data fetch {images.name} --data-dir ANOTHER-FOLDER"
                )
            images = held_out(images) if trial else images
        how = IID() if iid else DirichletPrior(0.1)
        return images.partition(how, bench.pick(CLIENTS, 100, CLIENTS), seed, test="ratio")

    return make


def held_out(data: Dataset) -> Dataset:
    """The training images alone, a sixth of them in the place of the test images."""
    cut = len(data) // 6
    return replace(data, x=data.x[cut:], y=data.y[cut:], x_test=data.x[:cut], y_test=data.y[:cut])


@cache
def fashion(data_dir: str | Path | None) -> Dataset:
    """Fashion-MNIST, read once for all experiments."""
    return load("fashion-mnist", data_dir=data_dir, normalise=True)


@cache
def features(data_dir: str | Path | None) -> Dataset:
    """CIFAR-100 as a frozen EfficientNet-Lite0 sees it at 64 x 64, standardised over the training images."""
    images = load("cifar100", data_dir=data_dir)
    assert images.x_test is not None
    net = efficientnet(1).eval()
    x, x_test = (read_pictures(net, np.asarray(part))[0] for part in (images.x, images.x_test))
    mean, deviation = x.mean(0), x.std(0)
    return replace(images, x=(x - mean) / deviation, x_test=(x_test - mean) / deviation)


def network(bench: Bench, data: str = "CIFAR-100") -> Callable[[int], nn.Module]:
    """seed -> the model."""

    def make(seed: int) -> nn.Module:
        if bench.small:
            return build("mlp", (1, 28, 28), 10, seed, hidden=(100, 50))
        if bench.scale == "middle":
            return build("cnn", (3, 32, 32), 100, seed)
        if bench.scale == "heads":
            return build("linear", (1280,), 100, seed)
        return resnet(data, seed)

    return make


def resnet(data: str, seed: int = 0) -> nn.Module:
    """The paper's model for one of its data sets."""
    tiny, classes = data == "Tiny ImageNet", {"CIFAR-10": 10, "CIFAR-100": 100, "Tiny ImageNet": 200}[data]
    side, stem = (64, "imagenet") if tiny else (32, "cifar")
    return build("resnet18", (3, side, side), classes, seed, stem=stem)


def work(bench: Bench, data: str = "CIFAR-100") -> dict[str, Any]:
    """The work of a round, as settings of `fit`."""
    padding = 8 if data == "Tiny ImageNet" else 4
    return {
        "rounds": bench.rounds(40, 1000, 400, 200), "fraction": bench.pick(0.25, 0.1, 0.25), "local_epochs": 2,
        "batch_size": 20, "weight_decay": 1e-3, "evaluate_every": 0, "lr_schedule": "exponential:factor=0.998",
        **({} if bench.scale in ("small", "heads") else {"augment": f"flip+crop:{padding},p=0.5"}),
    }  # fmt: skip


def train(
    bench: Bench, key: str, methods: Mapping[str, Algorithm], data: str = "CIFAR-100", iid: bool = False, **changes: Any
) -> Comparison:
    """`bench.compare` on the experiments' data and work, with the common models followed."""
    given: dict[str, Any] = {**work(bench, data), "callbacks": (follow,), **changes}
    return bench.compare(key, network(bench, data), federation(bench, data, iid), methods, **given)


def tuned(
    bench: Bench, key: str, choices: Mapping[str, Choice], data: str = "CIFAR-100", iid: bool = False
) -> dict[str, Algorithm]:
    """Every method at the value of its own setting that does best on average over clients that do not count."""
    given, model, clients = work(bench, data), network(bench, data), federation(bench, data, iid, trial=True)
    seeds = range(UNCOUNTED, UNCOUNTED + (1 if bench.rehearse else 2))

    def best(label: str, choice: Choice) -> Algorithm:
        def score(at: At) -> float:
            try:
                runs = [bench.fit(model(s), clients(s), choice.make(at[0]), seed=s, **given) for s in seeds]
            except Diverged:
                return -np.inf
            return float(np.mean([run.final["test"]["accuracy"].mean() for run in runs]))

        return choice.make(bench.choose(f"{key}-choice-{label}".lower(), score, [choice.ladder], TRIALS)[0])

    tasks = [(f"{key}-{label}", UNCOUNTED, partial(best, label, choice)) for label, choice in choices.items()]
    return dict(zip(choices, bench.all_of(tasks), strict=True))


def few(bench: Bench, values: Sequence[Any]) -> Sequence[Any]:
    """The values to sweep over; in a rehearsal the first two."""
    return values[:2] if bench.rehearse else values


# ---- the common model and the sizes, evaluated round by round -------------------------------------------------------

FOLLOWED = "common.jsonl"


def follow(progress: Progress) -> None:
    """A callback: whenever the run is evaluated, a line on its common model and on the sizes of the models."""
    run = progress.run
    if not progress.records or run.folder is None:
        return
    numbers, common = run.parameters, run.common
    row = {
        "round": progress.round,
        "accuracy": None if common is None else float(run.evaluate(common)["accuracy"].mean()),
        "parameters": float(numbers.mean()),
        "spread": float(numbers.std()),
        "gkr_parameters": run.findings.get("gkr_parameters"),
        "ranks": run.findings.get("ranks"),
    }
    with (run.folder / FOLLOWED).open("a", encoding="utf-8", newline="\n") as f:
        f.write(json.dumps(row) + "\n")


def followed(found: Comparison, label: str) -> list[list[dict[str, Any]]]:
    """[seed][evaluated round] what `follow` wrote; after a resume the later line of a round counts."""
    runs = []
    for r in (r for r in found.results if r.label == label and r.folder is not None):
        path = (r.folder or found.folder) / FOLLOWED  # pyrefly: ignore[unsupported-operation]
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        by_round = {row["round"]: row for row in map(json.loads, lines)}
        runs.append([by_round[t] for t in sorted(by_round)])
    return runs


def last(runs: Comparison, label: str, key: str = "accuracy") -> np.ndarray:
    """[seeds] a followed value after the last round: accuracy of the common model, parameters, gkr_parameters."""
    values = [run[-1][key] if run else None for run in followed(runs, label)]
    return np.array([np.nan if v is None else v for v in values], dtype=float)


def gigabytes(runs: Comparison, label: str, direction: str = "both") -> np.ndarray:
    """[seeds] bytes exchanged / 1e9 by the ledger; direction: "down", "up" or "both"."""
    ways = ("down", "up") if direction == "both" else (direction,)
    rows = [r.summary for r in runs.results if r.label == label]
    return np.array([np.nan if s is None else sum(getattr(s, f"{w}_bytes") for w in ways) / 1e9 for s in rows])


def falling(text: str, steps: Mapping[str, np.ndarray], factor: float = 1.0, unit: str = "") -> Claim:
    """The claim that a value falls at every step: every neighbouring pair decided as by `ordered`."""
    verdicts, gaps = [], []
    for a, b in pairwise(steps):
        claim = ordered("", steps[a], steps[b], factor, unit)
        verdicts.append(claim.holds)
        doubt = "" if claim.holds else f" ({claim.verdict})"
        gaps.append(f"{a} to {b} {factor * np.nanmean(steps[b] - steps[a]):+.3g}{doubt}")
    holds = False if False in verdicts else None if None in verdicts else True
    return Claim(text, holds, "change " + ", ".join(gaps) + unit)
