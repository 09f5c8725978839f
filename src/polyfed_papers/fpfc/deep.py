"""Beyond the paper: FPFC with deep networks, and which of their layers to fuse."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from polyfed.algorithms.fedavg import FedAvg
from polyfed.algorithms.fpfc import FPFC
from polyfed.algorithms.ifca import IFCA
from polyfed.algorithms.local import Local
from polyfed.core.algorithm import Algorithm
from polyfed.data import load
from polyfed.data.federation import Federation
from polyfed.models.resnet import Block, GlobalMean
from polyfed.report.table import Cell
from polyfed_papers.fpfc import Problem, fewer, halved, lenet, told_by
from polyfed_papers.fpfc.methods import TRIALS, lam_of, tuned_one
from polyfed_papers.recipes.recipe import Bench, Outcome, Size, grouping_of, metric_of, recipe
from polyfed_papers.recipes.said import Claim, Setting, ours

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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
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
        found = bench.compare(
            key, problem.model, problem.federation, methods, rounds=problem.rounds, **work, evaluate_every=0
        )
        rows = []
        for label, method in methods.items():
            number, score = grouping_of(found, label)
            lam = Cell(f"{method.lam:.3g}") if isinstance(method, FPFC) else Cell("")
            rows.append((Cell(label), lam, ours(number), ours(score), ours(metric_of(found, label), 100)))
        heads = ("method<", "lambda", "clusters", "ARI", "accuracy, %")
        outcome.tables.append(told_by(f"{title}, MNIST with exchanged labels", heads, rows))
        outcome.claims += [
            problem.better(f"{label} is better than {other}", metric_of(found, label), metric_of(found, other))
            for label in net.fused
            for other in ("Local", "FedAvg", "IFCA")
        ]
        _, score = grouping_of(found, "FPFC-all")
        outcome.claims.append(Claim(f"{title}: fusing all layers finds the clusters", bool((score == 1).all()),
                                    "ARI " + ", ".join(f"{s:.2f}" for s in score)))  # fmt: skip
    return outcome
