"""PFLlib's public leaderboard: its Fashion-MNIST columns, with its protocol and with ours."""

from dataclasses import replace
from functools import partial

import numpy as np
from torch import nn

import polyfed as pf
from polyfed.base.typed import seeded
from polyfed.data import load
from polyfed.models import build
from polyfed_papers.recipes.recipe import Bench, Size
from polyfed_papers.recipes.said import Setting

PARTITIONS = {"pathological": "pathological:2,sizes=rest,order=label", "dirichlet": "dirichlet:0.1,capped=true,least=1"}
CLIENTS, BATCH = 20, 10
SAMPLES, HIDDEN = 6000, 64  # of the small size
RATE = {"small": 0.05, "middle": 0.005, "paper": 0.005}

# docs/benchmark.html of TsingZ0/PFLlib at d832e76: (pathological, Dirichlet)
PRINTED = {
    "FedAvg": ("80.41 ± 0.08", "85.85 ± 0.19"),
    "FedProx": ("78.08 ± 0.15", "85.63 ± 0.57"),
    "Per-FedAvg": ("99.18 ± 0.08", "95.10 ± 0.10"),
    "pFedMe": ("99.35 ± 0.14", "97.25 ± 0.17"),
    "Ditto": ("99.44 ± 0.06", "97.47 ± 0.04"),
    "APFL": ("99.41 ± 0.02", "97.25 ± 0.08"),
    "FedAMP": ("99.42 ± 0.03", "97.20 ± 0.06"),
    "FedPer": ("99.47 ± 0.03", "97.44 ± 0.06"),
    "FedRep": ("99.56 ± 0.03", "97.56 ± 0.04"),
    "FedBABU": ("99.41 ± 0.05", "97.46 ± 0.07"),
}


def methods(scale: Size) -> dict[str, pf.Algorithm]:
    """The leaderboard's methods that are here, in its order; FedAvg-FT, FedACS, FPFC, FedSLR; and no federation."""
    lr = RATE[scale]
    return {
        "FedAvg": pf.FedAvg(lr),
        "FedAvg-FT": pf.FedAvgFT(lr, finetune_lr=lr),
        "FedProx": pf.FedProx(lr),
        "Per-FedAvg": pf.PerFedAvg(lr, alpha=lr),
        "pFedMe": pf.PFedMe(lr),
        "Ditto": pf.Ditto(lr),
        "APFL": pf.APFL(lr),
        "FedAMP": pf.FedAMP(lr),
        "FedPer": pf.FedPer(lr),
        "FedRep": pf.FedRep(lr, head_epochs=1),
        "FedBABU": pf.FedBABU(lr),
        "FedACS": pf.FedACS(lr),
        "FPFC": pf.FPFC(lr),
        "FedSLR": pf.FedSLR(lr),
        "Local": pf.Local(lr),
    }


def settings(scale: Size) -> tuple[Setting, ...]:
    small = scale == "small"
    return (
        Setting("clients", "20, all in every round", "paper"),
        Setting("data", "training and test set merged, 75 % / 25 % of each client's samples", "paper"),
        Setting("samples", f"{SAMPLES} of 70 000, drawn anew per seed", "ours")
        if small
        else Setting("samples", "70 000", "paper"),
        Setting("pixels", "to [-1, 1]", "code"),
        Setting("model", f"784-{HIDDEN}-10 perceptron", "ours")
        if small
        else Setting("model", "5x5 convolutions of 32 and 64 channels, 512 units; 582,026 parameters", "code"),
        Setting("local work", "one epoch, batches of 10", "paper"),
        Setting("lr", "0.05", "ours") if small else Setting("lr", "0.005, the code's default", "code"),
        Setting("rounds", "2000", "paper") if scale == "paper" else Setting("rounds", "30" if small else "500", "ours"),
        Setting("Per-FedAvg", "first order, alpha = lr", "code"),
        Setting("FedRep", "one epoch for the head, one for the body", "code"),
        Setting("other hyper-parameters", "the library's defaults, none tuned; the page states none", "ours"),
    )


def federation(bench: Bench, partition: str):
    """seed -> Federation; the seed draws the samples (small), the partition and the test samples."""
    data = load("fashion-mnist", bench.data_dir, flat=bench.small, normalise="half")

    def make(seed: int) -> pf.Federation:
        some = data
        if bench.small:
            assert data.x_test is not None
            assert data.y_test is not None
            count = SAMPLES // 10 if bench.rehearse else SAMPLES
            k = np.random.default_rng(seed).permutation(len(data.y))[: count * 6 // 7]
            j = np.random.default_rng(seed).permutation(len(data.y_test))[: count - len(k)]
            some = replace(data, x=data.x[k], y=data.y[k], x_test=data.x_test[j], y_test=data.y_test[j])
        return some.partition(PARTITIONS[partition], CLIENTS, seed, "merged", test_fraction=0.25)

    return make


def model(bench: Bench):
    """seed -> the leaderboard's net; a perceptron for the small size."""

    def small(seed: int) -> nn.Module:
        return build("mlp", (784,), 10, seed=seed, hidden=HIDDEN)

    return small if bench.small else partial(leaderboard_net, (1, 28, 28), 10)


def leaderboard_net(input_shape: tuple[int, ...], outputs: int, seed: int) -> nn.Module:
    """The leaderboard's net, without padding; 582,026 parameters for grey images of 28 x 28 and 10 classes."""
    side = ((input_shape[-1] - 4) // 2 - 4) // 2
    with seeded(seed):
        return nn.Sequential(
            nn.Conv2d(input_shape[0], 32, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(64 * side**2, 512), nn.ReLU(), nn.Linear(512, outputs),
        )  # fmt: skip
