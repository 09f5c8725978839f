"""Label-swapped digits: which layers of deep networks to fuse, and a control where labels are spread evenly."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from torch import nn

from polyfed import FPFC, IFCA, Algorithm, FedAvg, Federation, Local
from polyfed.base.typed import seeded
from polyfed.data import load
from polyfed.models import build
from polyfed.models.resnet import Block, GlobalMean
from polyfed.report.table import Cell
from polyfed_papers.fpfc import Problem, fewer, halved, lenet
from polyfed_papers.fpfc.methods import TRIALS, lam_of, tuned_one
from polyfed_papers.recipes.recipe import Bench, Outcome, Size, grouping_of, metric_of, recipe
from polyfed_papers.recipes.said import Claim, Setting, ours, told_by

SPREAD, ROUNDS = 100, 60
LAMBDAS = (0.3, 0.6, 1.0, 1.6)


class Net(NamedTuple):
    """A network, the step size, and what may be fused: beginnings of the names of the parameters that are shared."""

    make: Callable[[int], nn.Module]
    lr: float
    halved: bool
    fused: dict[str, str]


def resnet(seed: int) -> nn.Module:
    """A residual network of three blocks with GroupNorm, 19,810 parameters."""
    with seeded(seed):
        first = nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.GroupNorm(2, 8), nn.ReLU()
        blocks = Block(8, 8, 1, 2), Block(8, 16, 2, 2), Block(16, 32, 2, 2)
        return nn.Sequential(*first, *blocks, GlobalMean(), nn.Linear(32, 10))


NETS = {  # upper: all but the first convolution, or the first block; last: the last layer alone
    "LeNet": Net(lenet, 0.05, False, {"FPFC-all": "", "FPFC-upper": "0", "FPFC-last": "body"}),
    "ResNet, GroupNorm": Net(resnet, 0.1, True, {"FPFC-all": "", "FPFC-upper": "0 1 3", "FPFC-last": "body"}),
}


SIZES = {"small": ("LeNet",), "paper": tuple(NETS)}


def settings(scale: Size) -> Sequence[Setting]:
    both = "LeNet, lr 0.05; a residual network of three blocks with GroupNorm on half the side, lr 0.1"
    return (
        Setting("images", "MNIST, 4000 for training, 1000 for the test", "ours"),
        Setting("devices", "20 in 4 clusters, each with another two labels exchanged; labels spread evenly "
                f"(Dirichlet({SPREAD}))", "ours"),
        Setting("models", both if scale == "paper" else both.split(";")[0], "ours"),
        Setting("work", f"{ROUNDS} rounds of two epochs of batches of 25, half of the devices", "ours"),
        Setting("FPFC: lambda from", f"{', '.join(map(str, LAMBDAS))}, {TRIALS} trials, by validation data of devices "
                "that do not count", "ours"),
        Setting("IFCA", "k = 4, starts of their own", "ours"),
        Setting("a, xi, nu", "3.7, 1e-4, 0.1", "paper"),
    )  # fmt: skip


def federation(bench: Bench, smaller: bool, seed: int) -> Federation:
    """Label-swapped digits whose labels all devices have alike."""
    data = fewer(load("mnist", data_dir=bench.data_dir), *((400, 200) if bench.rehearse else (4000, 1000)), seed)
    if smaller:
        data = replace(data, x=halved(data.x), x_test=halved(data.x_test))
    return data.partition(f"dirichlet:{SPREAD}+label-swap:4", 20, seed, test="independent")


@recipe("fpfc/deep", "Beyond the paper: FPFC with deep networks, and which layers to fuse", minutes=(7, 180),
        settings=settings, data=("mnist",))  # fmt: skip
def deep(bench: Bench) -> Outcome:
    """Does fusion find the clusters of deep networks, and which of their layers should it compare?"""
    outcome = Outcome()
    for title in SIZES[bench.scale]:
        net, key = NETS[title], title.split(",")[0].lower()
        work = {"fraction": 0.5, "local_epochs": 2, "batch_size": 25}
        problem = Problem(
            title, net.make, partial(federation, bench, net.halved), FPFC(net.lr), bench.rounds(60, 60), work, 4
        )
        methods: dict[str, Algorithm] = {
            "Local": Local(net.lr), "FedAvg": FedAvg(net.lr), "IFCA": IFCA(net.lr, k=4)
        }  # fmt: skip
        for label, shared in net.fused.items():
            fpfc = replace(problem.fpfc, shared_layers=shared)
            methods[label] = tuned_one(bench, f"{key}-choice-{label}", problem, lam_of(fpfc, LAMBDAS))
        runs = problem.compare(bench, key, methods)
        rows = []
        for label, method in methods.items():
            accuracy, *groups = problem.cells(runs, label)
            rows.append((Cell(label), Cell(f"{method.lam:.3g}" if isinstance(method, FPFC) else ""), *groups, accuracy))
        heads = ("method<", "lambda", "clusters", "ARI", "accuracy, %")
        outcome.tables.append(told_by(f"{title}, MNIST with exchanged labels", heads, rows))
        outcome.claims += [
            problem.better(f"{label} is better than {other}", metric_of(runs, label), metric_of(runs, other))
            for label in net.fused
            for other in ("Local", "FedAvg", "IFCA")
        ]
        _, score = grouping_of(runs, "FPFC-all")
        outcome.claims.append(Claim(f"{title}: fusing all layers finds the clusters", bool((score == 1).all()),
                                    "ARI " + ", ".join(f"{s:.2f}" for s in score)))  # fmt: skip
    return outcome


FEATURES = 50
SPREADS = (100.0, 10.0, 1.0)  # Dirichlet's parameter: labels nearly alike, to as on the images of the tables
EVEN_LAMBDAS = (0.7, 0.8, 0.9, 1.2)
EVEN_ROUNDS = 160


SETTINGS_OF_EVEN = (
    Setting("images", "4000 of MNIST for training, 1000 for the test", "ours"),
    Setting("model", f"softmax regression on {FEATURES} principal components, from zero", "ours"),
    Setting("devices", "20 in 4 clusters, each with another two labels exchanged", "code"),
    Setting("labels", "Dirichlet(100), (10) and (1.0) per class; the last is the code's", "ours"),
    Setting("work", f"{EVEN_ROUNDS} rounds of 20 full-batch steps, lr 0.1, half of the devices", "ours"),
    Setting("rho, a, xi", "1, 3.7, 1e-4", "paper"),
    Setting("nu", "0.1", "code"),
)


def components(bench: Bench, spread: float):
    """seed -> Federation of label-swapped digits as principal components of the training images."""

    def make(seed: int):
        data = fewer(load("mnist", data_dir=bench.data_dir), 4000, 1000, seed)
        assert data.x_test is not None
        x, test = (np.asarray(part, dtype=np.float32).reshape(len(part), -1) / 255 for part in (data.x, data.x_test))
        mean = x.mean(0)
        axes = np.linalg.eigh((x - mean).T @ (x - mean))[1][:, : -FEATURES - 1 : -1]
        data = replace(data, x=(x - mean) @ axes, x_test=(test - mean) @ axes)
        return data.partition(f"dirichlet:{spread:g}+label-swap:4", 20, seed, test="independent")

    return make


def flat(seed: int) -> nn.Module:
    """Softmax regression from zero."""
    return build("linear", (FEATURES,), 10, init="zeros")


@recipe("fpfc/even-labels", "Label-swapped digits: are the clusters found where labels are spread evenly?",
        minutes=(1, 1), settings=SETTINGS_OF_EVEN, data=("mnist",))  # fmt: skip
def even_labels(bench: Bench) -> Outcome:
    """Is it the skew of the labels, and not the method, that hides the clusters of Figures 4 and 5?"""
    rows, exact = [], {}
    for spread in SPREADS[: 1 if bench.rehearse else None]:
        methods = {f"{lam:g}": FPFC(0.1, lam=lam) for lam in EVEN_LAMBDAS}
        runs = bench.compare(
            f"dirichlet-{spread:g}", flat, components(bench, spread), methods, fraction=0.5, local_steps=20,
            rounds=bench.rounds(EVEN_ROUNDS, EVEN_ROUNDS), batch_size=None, evaluate_every=0,
        )  # fmt: skip
        for label in methods:
            number, score = grouping_of(runs, label)
            exact[spread, label] = score
            rows.append(
                (Cell(f"{spread:g}"), Cell(label), ours(number), ours(score), ours(metric_of(runs, label), 100))
            )
    heads = ("Dirichlet", "lambda", "clusters", "ARI", "accuracy, %")
    even = exact[SPREADS[0], "0.8"]
    claims = [Claim("even labels, lambda 0.8: the four clusters are found", bool((even == 1).all()),
                    "ARI " + ", ".join(f"{s:.2f}" for s in even))]  # fmt: skip
    if not bench.rehearse:
        best = max(exact[SPREADS[-1], f"{lam:g}"].max() for lam in EVEN_LAMBDAS)
        claims.append(Claim("labels as on the images of the tables: no lambda finds them", bool(best < 1),
                            f"largest ARI {best:.2f}"))  # fmt: skip
    notes = [
        "the paper claims no clusters on images. Two of ten rows of the last layer tell two clusters apart; with "
        "skewed labels the devices of one cluster differ by more than that in the classes that they lack"
    ]
    return Outcome([told_by("Clusters of exchanged labels, MNIST", heads, rows)], claims=claims, notes=notes)
