"""The four workloads that `rounds.py` times, and how many floating-point operations one sample of each costs."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import nn

import polyfed as pf
from polyfed import models
from polyfed.algorithms.fedavg import FedAvg
from polyfed.algorithms.fpfc import FPFC
from polyfed.compute.batches import Work
from polyfed.core.algorithm import Algorithm


@dataclass(frozen=True)
class Workload:
    """One federation, one model, one method.

    model: a name of polyfed.models     fraction: of the clients, per round
    goal: wanted ratio to the best plain loop
    """

    title: str
    model: str
    federation: Callable[[Path | None], pf.Federation]
    algorithm: Algorithm
    fraction: float
    work: Work
    goal: float

    def build(self, federation: pf.Federation) -> nn.Module:
        return models.build(self.model, federation.input_shape, federation.outputs, seed=0)


def fashion_mnist(data_dir: Path | None) -> pf.Federation:
    """60,000 images at 100 clients, Dirichlet 0.5; without a folder random images of the same shape."""
    if data_dir is not None:
        data = pf.data.load("fashion-mnist", data_dir)
    else:
        rng = np.random.default_rng(0)
        images = rng.integers(0, 256, (60_000, 1, 28, 28), dtype=np.uint8)
        data = pf.data.Dataset("random images", images, rng.integers(0, 10, 60_000), classes=10)
    return data.partition("dirichlet:0.5", clients=100, seed=0)


def fpfc_s1(_: Path | None) -> pf.Federation:
    """FPFC's scenario S1: 100 clients of very unequal size, 60 features, 10 classes."""
    return pf.data.load("fpfc-s1").partition()


MINIBATCH = Work(epochs=2, batch_size=20)
WORKLOADS = {
    "A": Workload("McMahan CNN", "cnn", fashion_mnist, FedAvg(lr=0.05), 0.1, MINIBATCH, 1.5),
    "B": Workload("MLP 784-200-10", "mlp", fashion_mnist, FedAvg(lr=0.05), 0.1, MINIBATCH, 4.0),
    "C": Workload("softmax regression", "linear", fashion_mnist, FedAvg(lr=0.05), 0.1, MINIBATCH, 10.0),
    "D": Workload("FPFC S1", "linear", fpfc_s1, FPFC(lr=0.05, lam=0.6), 0.3, Work(steps=10, batch_size=None), 6.0),
}


def flops_per_sample(model: nn.Module, input_shape: tuple[int, ...]) -> int:
    """Multiplications and additions of one sample's forward and backward pass, matrix products only.

    A layer of weights costs one product forward, one for its weights' gradient, and one for its inputs' gradient,
    which the first layer does not need.
    """
    costs: list[int] = []

    def note(layer: nn.Module, _: object, output: torch.Tensor) -> None:
        assert isinstance(layer, nn.Linear | nn.Conv2d)
        places = prod(output.shape[2:]) if isinstance(layer, nn.Conv2d) else 1
        costs.append(2 * layer.weight.numel() * places)

    hooks = [m.register_forward_hook(note) for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    with torch.no_grad():
        model(torch.zeros(1, *input_shape))
    for hook in hooks:
        hook.remove()
    return 3 * sum(costs) - costs[0]
