"""Shared parts of the experiments of FPFC, "Clustered Federated Learning based on Nonconvex Pairwise Fusion"
(arXiv 2211.04218).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from polyfed.algorithms.fpfc import FPFC
from polyfed.compute.batches import Each
from polyfed.data import load
from polyfed.data.dataset import Dataset
from polyfed.data.federation import Federation
from polyfed.models import build
from polyfed.report.table import Cell, Table
from polyfed.studies.compare import Comparison
from polyfed_papers.recipes.recipe import Bench, Size, curves, grouping_of
from polyfed_papers.recipes.said import Claim, Setting, ordered, without

SYNTHETIC = (
    Setting("features", "uniform on [0, 1), 60 of them (the text says normal; the tables fit uniform)", "code"),
    Setting("start", "W, b ~ N(0, 1), the same for all devices", "code"),
    Setting("participation", "30 % of the devices, drawn without replacement (the text: 30 to 50 %)", "code"),
    Setting("local work", "10 full-batch gradient steps, lr 0.1", "paper"),
    Setting("rho, a, xi", "1, 3.7, 1e-4", "paper"),
    Setting("nu", "0.1 (the text: from xi to 0.5)", "code"),
    Setting(
        "training data",
        "64 % of a device's samples, 16 % for validation, 20 % for the test (the code: 80, 0 and 20)",
        "paper",
    ),
    Setting("metric", "mean over devices of test accuracy, last round; a cluster deploys its mean model", "paper"),
)
GRID = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # of lambda from a common start; the paper's 0.6

HBF = (
    Setting("devices", "6 with Boston Housing, 2 with Body fat", "paper"),
    Setting("participation", "4 of the 8 a round (the text: 30 to 50 %; follows from the printed cost)", "ours"),
    Setting("inputs", "each data set to [-1, 1] by its training rows; the paper does not say", "ours"),
    Setting("model", "linear with intercept, mean squared error, from zero", "ours"),
    Setting("work", "20 full-batch gradient steps, lr 0.01", "paper"),
    Setting("rounds", "100 (follows from the printed cost of 12120)", "ours"),
    Setting("rho, a, xi", "1, 3.7, 1e-4", "paper"),
    Setting("lambda", "4", "paper"),
    Setting("nu", "4 (from [xi, 0.5], as in the text, no clusters are found)", "ours"),
)
HBF_BESIDE = tuple(Setting(f"H&BF, {s.key}", s.value, s.source) for s in HBF)  # where other data sets have their own
HBF_GRID = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)  # of lambda
HBF_CAVEAT = (
    "Boston Housing has an ethical problem: one of its inputs was made on the assumption that racial self-segregation "
    "raises house prices. It is used here only because the paper reports it. BodyFat is computed from Density, one of "
    "its inputs."
)

IMAGES = (
    Setting("devices, images", "20, Dirichlet(1.0) per class, training and test sets dealt out independently", "code"),
    Setting("clusters", "4 of 5 devices, each with another two labels exchanged: 0/8, 1/7, 2/6, 3/5", "code"),
    Setting("layers", "all but the last are shared by all devices, the last is fused (the text: three shared)", "code"),
    Setting("shared layers", "mean over the round's participants, weighted by samples", "ours"),
    Setting("participation, images", "half of the devices (the text: 30 to 50 %)", "code"),
    Setting("step size", "x 0.9 every 5 rounds", "paper"),
    Setting("step size of the rivals", "falls as FPFC's (released: IFCA's alone does)", "ours"),
)
FEWER = {"small": (2000, 5000), "middle": (6000, 10_000)}  # images of the training and of the test set
HIDDEN = 50  # units of the small size's perceptron
IMAGE_ROUNDS = (30, 200, 100)  # small, paper, middle
LENET = "two convolutions of 6 and 16 channels and one linear layer, 2572 + 4010 numbers"


def image_settings(scale: Size, but: Sequence[str] = ()) -> tuple[Setting, ...]:
    """Data, model, rounds and local work on images; a recipe has its own of the keys in `but`."""
    small, middle, paper = IMAGE_ROUNDS[0], IMAGE_ROUNDS[2], IMAGE_ROUNDS[1]
    if scale == "paper":
        own = (
            Setting("model", LENET, "code"),
            Setting("rounds, images", str(paper), "code"),
            Setting("epochs", "10", "paper"),
            Setting("batches, lr", "of 100, 0.01", "paper"),
            Setting("lambda, images", "0.4 (the code's README; 0.1 in Table 2)", "code"),
        )
    elif scale == "middle":
        own = (
            Setting("model", LENET, "code"),
            Setting("images", "{} for training, {} for the test".format(*FEWER[scale]), "ours"),
            Setting("rounds, images", str(middle), "ours"),
            Setting("epochs", "5", "ours"),
            Setting("batches, lr", "of 25, 0.1", "ours"),
            Setting("lambda, images", "0.4", "code"),
        )
    else:
        own = (
            Setting("model", f"perceptron 196-{HIDDEN}-10, {197 * HIDDEN} + {10 * HIDDEN + 10} numbers", "ours"),
            Setting("images", "{} for training, {} for the test, at 14x14 pixels".format(*FEWER[scale]), "ours"),
            Setting("rounds, images", str(small), "ours"),
            Setting("epochs", "5", "ours"),
            Setting("batches, lr", "of 10, 0.2", "ours"),
            Setting("lambda, images", "0.4", "code"),
        )
    return without((*IMAGES, *own), *but)


def sizes(scale: Size, name: str = "s1") -> Setting:
    """The devices' samples."""
    small = {"s1": 20, "s2": 20, "s3": 16, "s4": 12, "s5": 12}
    if scale != "paper":
        return Setting("devices", f"{small[name]} ({name.upper()}), at most 1500 samples each", "ours")
    full = 50 if name in ("s4", "s5") else 100
    return Setting("devices", f"{full} ({name.upper()}), 250 to about 25 000 samples each", "paper")


def rounds_of(scale: Size, small: int, paper: int) -> Setting:
    """Number of rounds and its source."""
    return Setting("rounds", str(paper), "code") if scale == "paper" else Setting("rounds", str(small), "ours")


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

    def work_of(self, steps: int | Each) -> dict[str, Any]:
        """`work` with another amount of it in a round."""
        return {k: v for k, v in self.work.items() if k not in ("local_steps", "local_epochs")} | {"local_steps": steps}


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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build("lenet", (1, 28, 28), 10)


# ---- saying what was found ------------------------------------------------------------------------------------------


def numbers_sent(found: Comparison, label: str, clients: int) -> Cell:
    """Numbers exchanged, both directions, by the ledger; "+": the initial download of one model to every client."""
    rows = [r.summary for r in found.results if r.label == label and r.summary is not None]
    if not rows:
        return Cell("–", {"numbers": None}, "quiet")
    sent = float(np.mean([r.down_bytes + r.up_bytes for r in rows])) / 4
    start = (rows[0].parameters or 0) * clients if sent else 0
    return Cell(f"{sent:.3g} + {start:.3g}" if sent else "0", {"numbers": sent, "initial": start})


def told_by(title: str, heads: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Table:
    """A table whose machine columns are named by their heads."""
    names = [h.removesuffix("<") for h in heads]
    body = (
        tuple(Cell(c.text, {f"{name} {k}": v for k, v in c.values.items()} or {name: c.text}, c.mark)
              for name, c in zip(names, row, strict=True))
        for row in rows
    )  # fmt: skip
    return Table(title, tuple(heads), tuple(body))


def planted(found: Comparison, label: str, clusters: int, text: str) -> Claim:
    """The claim that the planted clusters are found, under every seed."""
    number, score = grouping_of(found, label)
    ok = (number == clusters) & (score == 1)
    counts = ", ".join(f"{n:.0f}" for n in number)
    scores = ", ".join(f"{s:.2f}" for s in score)
    return Claim(text, bool(ok.all()), f"clusters {counts}; ARI {scores}, per seed")


def lines(
    found: Comparison, x: str = "round", factor: float = 100.0, points: int = 60, split: str = "", column: str = ""
) -> dict[str, tuple[list[float], list[list[float]]]]:
    """label -> (x, [seed][point]) of the main metric, or a column of the history, for `curve_figure`.

    x is a column of `Run.history`, or "numbers" for thousands sent in both directions; methods that send none are left
    out.
    """
    frame, column = curves(found, split or None), column or found.metric.name
    sent = (frame["down_bytes"] + frame["up_bytes"]) / 4000
    runs: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for r in found.results:
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
