"""Shared parts of the experiments of FPFC, "Clustered Federated Learning based on Nonconvex Pairwise Fusion"
(arXiv 2211.04218).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from polyfed import FPFC, Algorithm, Federation
from polyfed.base.typed import seeded
from polyfed.compute.batches import Each
from polyfed.data import load
from polyfed.data.dataset import Dataset
from polyfed.models import build
from polyfed.report.table import Cell
from polyfed.runs.result import Result
from polyfed.studies.compare import Comparison
from polyfed_papers.fpfc.stated import FEWER, HIDDEN, IMAGE_ROUNDS
from polyfed_papers.recipes.recipe import Bench, curves, grouping_of, metric_of
from polyfed_papers.recipes.said import Claim, ordered, ours


@dataclass(frozen=True)
class Problem:
    """A data set of the experiments, and how methods are trained on it."""

    title: str  # in the paper
    model: Callable[[int], nn.Module]  # by seed
    federation: Callable[[int], Federation]  # by seed
    fpfc: FPFC
    rounds: int
    work: Mapping[str, Any]  # other settings of `fit`
    clusters: int  # planted; IFCA is given their number
    first_round: int = 20  # before which CFL does not split
    error: bool = False  # judged by RMSE, not by accuracy

    @property
    def key(self) -> str:
        """In names of files."""
        return self.title.lower().replace("&", "").replace(", ", "-").replace(" ", "-")

    @property
    def metric(self) -> str:
        """The metric's name with its unit, in tables and on axes."""
        return "RMSE" if self.error else "accuracy, %"

    @property
    def factor(self) -> float:
        """From the metric to the unit that is shown."""
        return 1.0 if self.error else 100.0

    @property
    def sign(self) -> int:
        """1: higher is better; -1: lower."""
        return -1 if self.error else 1

    def better(self, text: str, high: np.ndarray, low: np.ndarray) -> Claim:
        """The claim that a metric is better than another, both [seeds]; the same houses and men are tested again."""
        unit, share = ("", HBF_TESTED) if self.error else (" points", 0.0)
        return ordered(f"{self.title}: {text}", self.sign * high, self.sign * low, self.factor, unit, share)

    def of(self, steps: int | Each) -> "Problem":
        """With another amount of work in a round."""
        work = {k: v for k, v in self.work.items() if k not in ("local_steps", "local_epochs")}
        return replace(self, work=work | {"local_steps": steps})

    def compare(self, bench: Bench, key: str, methods: Any, **changes: Any) -> Comparison:
        """`bench.compare` on the data set with its rounds and work, tested at the end."""
        given: dict[str, Any] = {"rounds": self.rounds, "evaluate_every": 0, **self.work, **changes}
        return bench.compare(key, self.model, self.federation, methods, **given)

    def fit(self, bench: Bench, seed: int, method: Algorithm, **changes: Any) -> Result:
        """`bench.fit` on the data set with its rounds and work, tested at the end."""
        given = {"rounds": self.rounds, "evaluate_every": 0, "seed": seed, **self.work, **changes}
        return bench.fit(self.model(seed), self.federation(seed), method, **given)

    def cells(self, runs: Comparison, label: str) -> tuple[Cell, Cell, Cell]:
        """A method's metric, clusters and ARI."""
        number, score = grouping_of(runs, label)
        return ours(metric_of(runs, label), self.factor), ours(number), ours(score)


CLUSTERS = {"s1": (4, 4), "s2": (4, 4), "s3": (2, 2), "s4": (1, 1), "s5": (12, 50)}  # small and full


def synthetic(bench: Bench, name: str = "s1", features: str = "uniform", validation: float | None = None) -> Problem:
    """A synthetic scenario, at middle size the small one, drawn by seed; `validation` is a fifth by default."""

    def make(seed: int) -> Federation:
        data = load(f"fpfc-{name}", scale=bench.pick("small", "full", "small"), features=features, seed=seed)
        return data.partition(seed=seed, validation_fraction=validation)

    title = name.upper() + (f", {features} features" if features != "uniform" else "")
    work = {"fraction": 0.3, "local_steps": 10, "batch_size": None}
    clusters = CLUSTERS[name][bench.pick(0, 1, 0)]
    return Problem(title, softmax, make, FPFC(0.1, lam=0.7), bench.rounds(600, 2000, 600), work, clusters)


def softmax(seed: int) -> nn.Module:
    """Softmax regression from N(0, 1), as the released code starts."""
    model = nn.Linear(60, 10)
    rng = torch.Generator().manual_seed(seed)
    for q in model.parameters():
        nn.init.normal_(q, generator=rng)
    return model


HBF_TESTED = 0.2  # of the same houses and men, drawn anew for every seed


def hbf(bench: Bench) -> Problem:
    """Housing and Body fat; the seed draws split and the 14th input."""

    def make(seed: int) -> Federation:
        return load("housing-bodyfat", data_dir=bench.data_dir, scale="minmax", seed=seed).partition(seed=seed)

    work = {"fraction": 0.5, "local_steps": 20, "batch_size": None, "loss": "mse"}
    fpfc = FPFC(0.01, lam=4.0, nu=4.0)
    return Problem("H&BF", linear, make, fpfc, bench.rounds(100, 100), work, clusters=2, error=True)


def linear(seed: int) -> nn.Module:
    """Linear regression on 14 inputs, from zero."""
    model = nn.Linear(14, 1)
    for q in model.parameters():
        nn.init.zeros_(q)
    return model


def images(bench: Bench, title: str, validation: float | None = None) -> Problem:
    """Label-swapped images; at small size a few of them, of half the side, and a perceptron."""

    def make(seed: int) -> Federation:
        data = load(title.lower(), data_dir=bench.data_dir)
        if count := FEWER.get(bench.scale):
            data = fewer(data, *((400, 200) if bench.rehearse else count), seed)
        if bench.small:
            data = replace(data, x=halved(data.x), x_test=halved(data.x_test))
        return data.partition(
            "dirichlet:1.0+label-swap:4", 20, seed, test="independent", validation_fraction=validation
        )

    work = {"fraction": 0.5, "batch_size": bench.pick(10, 100, 25), "local_epochs": bench.pick(5, 10, 5),
            "lr_schedule": "exponential:factor=0.9,every=5"}  # fmt: skip
    fpfc = FPFC(bench.pick(0.2, 0.01, 0.1), lam=0.4, shared_layers="body")
    model, first = bench.pick(perceptron, lenet), bench.pick(3, 20, 6)
    return Problem(title, model, make, fpfc, bench.rounds(*IMAGE_ROUNDS), work, clusters=4, first_round=first)


IMAGE_TITLES = ("MNIST", "Fashion-MNIST")


def halved(x: np.ndarray | None) -> np.ndarray:
    """Images [n, 1, 28, 28] with every two by two pixels averaged: [n, 1, 14, 14]."""
    assert x is not None
    return x.reshape(-1, 1, 14, 2, 14, 2).mean((3, 5)).astype(x.dtype)


def fewer(data: Dataset, train: int, test: int, seed: int) -> Dataset:
    """A random part of a data set with a test set."""
    assert data.x_test is not None
    assert data.y_test is not None
    rng = np.random.default_rng(seed)
    a, b = rng.permutation(len(data.x))[:train], rng.permutation(len(data.x_test))[:test]
    return replace(data, x=data.x[a], y=data.y[a], x_test=data.x_test[b], y_test=data.y_test[b])


def perceptron(seed: int) -> nn.Module:
    """In place of the paper's network: as there, all layers but the last are shared."""
    return build("mlp", (1, 14, 14), 10, seed, hidden=HIDDEN)


def lenet(seed: int) -> nn.Module:
    """The paper's network for images, as PyTorch starts it."""
    with seeded(seed):
        return build("lenet", (1, 28, 28), 10)


# ---- saying what was found ------------------------------------------------------------------------------------------


def numbers_sent(runs: Comparison, label: str, clients: int) -> Cell:
    """Numbers exchanged, both directions, by the ledger; "+": the initial download of one model to every client."""
    rows = [r.summary for r in runs.results if r.label == label and r.summary is not None]
    if not rows:
        return Cell("–", {"numbers": None}, "quiet")
    sent = float(np.mean([r.down_bytes + r.up_bytes for r in rows])) / 4
    start = (rows[0].parameters or 0) * clients if sent else 0
    return Cell(f"{sent:.3g} + {start:.3g}" if sent else "0", {"numbers": sent, "initial": start})


def planted(runs: Comparison, label: str, clusters: int, text: str) -> Claim:
    """The claim that the planted clusters are found, under every seed."""
    number, score = grouping_of(runs, label)
    ok = (number == clusters) & (score == 1)
    counts = ", ".join(f"{n:.0f}" for n in number)
    scores = ", ".join(f"{s:.2f}" for s in score)
    return Claim(text, bool(ok.all()), f"clusters {counts}; ARI {scores}, per seed")


def lines(
    comparison: Comparison, x: str = "round", factor: float = 100.0, points: int = 60, split: str = "", column: str = ""
) -> dict[str, tuple[list[float], list[list[float]]]]:
    """label -> (x, [seed][point]) of the main metric, or a column of the history, for `curve_figure`.

    x is a column of `Run.history`, or "numbers" for thousands sent in both directions; methods that send none are left
    out.
    """
    frame, column = curves(comparison, split or None), column or comparison.metric.name
    sent = (frame["down_bytes"] + frame["up_bytes"]) / 4000
    runs: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for r in comparison.results:
        mine = ((frame["label"] == r.label) & (frame["seed"] == r.seed)).to_numpy()
        at = (sent if x == "numbers" else frame[x]).to_numpy(dtype=float)[mine]
        runs.setdefault(r.label, []).append((at, factor * frame[column].to_numpy(dtype=float)[mine]))
    if x == "round":
        return {label: (own[0][0].tolist(), [y.tolist() for _, y in own]) for label, own in runs.items()}
    moving = {label: own for label, own in runs.items() if min(at[-1] for at, _ in own) > 0}
    grid = np.linspace(0, min(at[-1] for own in moving.values() for at, _ in own), points)
    return {
        label: (grid.tolist(), [y[np.searchsorted(at, grid, side="right").clip(1) - 1].tolist() for at, y in own])
        for label, own in moving.items()
    }
