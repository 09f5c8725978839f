"""Small splits, tasks and methods that the tests of the core share."""

import numpy as np
import torch
from torch import nn

from polyfed.base.randomness import client_keys
from polyfed.compute.batches import Batches, Work
from polyfed.compute.split import Split


def split_of(*sizes: int, d: int = 4, outputs: int = 3, regression: bool = False, seed: int = 0) -> Split:
    """One client per size; x: float64 [N, d], y: labels below `outputs`, or float targets [N, outputs]."""
    rng = np.random.default_rng(seed)
    clients = []
    for size in sizes:
        x = torch.tensor(rng.normal(size=(size, d)))
        y = rng.normal(size=(size, outputs)) if regression else rng.integers(0, outputs, size)
        clients.append((x, torch.tensor(y)))
    return Split.of(clients)


def batches(split: Split, clients=None, *, round: int = 0, seed: int = 0, **work) -> Batches:
    at = np.arange(split.n) if clients is None else np.asarray(clients)
    keys = client_keys([f"client-{i}" for i in range(split.n)])
    return Batches(split, at, keys[at], Work(**work), seed, round)


class Wrapped(nn.Module):
    """A module that is no chain of layers to the task: its gradients take the general path."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def mlp(d: int = 4, outputs: int = 3) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(d, 5), nn.Tanh(), nn.Linear(5, outputs)).double()
