"""FPFC, "Clustered Federated Learning based on Nonconvex Pairwise Fusion" (arXiv 2211.04218): what its experiments
share.
"""

import torch
from torch import nn

from polyfed.data import load
from polyfed.data.federation import Federation
from polyfed.papers.recipe import Bench, Setting, Size

SYNTHETIC = (
    Setting("features", "uniform on [0, 1), 60 of them (the text says normal; the tables fit uniform)", "code"),
    Setting("start", "W, b ~ N(0, 1), the same for all devices", "code"),
    Setting("participation", "30 % of the devices, drawn without replacement", "paper"),
    Setting("local work", "10 full-batch gradient steps, lr 0.1", "paper"),
    Setting("rho, a, xi, nu", "1, 3.7, 1e-4, 0.1", "paper"),
    Setting("metric", "mean over devices of test accuracy, last round; a cluster deploys its mean model", "paper"),
)
WORK = {"fraction": 0.3, "local_steps": 10, "batch_size": None}


def sizes(scale: Size) -> Setting:
    """The devices' samples."""
    if scale == "small":
        return Setting("devices", "20 (S1), at most 1500 samples each", "ours")
    return Setting("devices", "100 (S1), 250 to about 25 000 samples each", "paper")


def softmax(seed: int) -> nn.Module:
    """Softmax regression from N(0, 1), as the released code starts."""
    model = nn.Linear(60, 10)
    rng = torch.Generator().manual_seed(seed)
    for q in model.parameters():
        nn.init.normal_(q, generator=rng)
    return model


def scenario(bench: Bench, name: str = "s1", features: str = "uniform", validation: bool = True):
    """seed -> Federation of a synthetic scenario; the seed draws data and split."""

    def make(seed: int) -> Federation:
        data = load(f"fpfc-{name}", scale=bench.pick("small", "full"), features=features, seed=seed)
        return data.partition(seed=seed, validation_fraction=None if validation else 0.0)

    return make
