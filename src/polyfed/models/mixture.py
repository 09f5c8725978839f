"""Mixtures: several nets whose probabilities are mixed, which FedEM and FedRC train."""

import math

import torch
from torch import Tensor, nn

from polyfed.base.arguments import checked
from polyfed.base.errors import ModelError
from polyfed.base.values import COUNT
from polyfed.models.mlp import LETTERS, WIDTH, mlp


class Mixture(nn.Module):
    """p(y | x) = sum_k pi_k softmax(f_k(x))_y of nets f_1, f_2, ... with the same outputs; it returns the logarithm.

    The nets have starts of their own. With `classes` the weights are pi_ky of every class y, under which FedRC trains.
    """

    def __init__(self, *parts: nn.Module, classes: int | None = None):
        super().__init__()
        if not parts:
            raise ModelError("mixture: found no net, expected at least one")
        self.parts = nn.ModuleList(parts)
        size = (len(parts),) if classes is None else (len(parts), classes)
        self.mixing = nn.Parameter(torch.full(size, -math.log(len(parts))))  # logarithms of the weights
        self.end = nn.Identity()  # [b, K, C] log-probabilities of each net enter it, where a method sees them

    def forward(self, x: Tensor) -> Tensor:
        """[b, ...] -> [b, C] logarithms of probabilities, which cross-entropy takes as they are."""
        each = self.end(torch.stack([part(x).log_softmax(-1) for part in self.parts], -2))
        return (each + self.mixing.log_softmax(0).reshape(len(self.parts), -1)).logsumexp(-2)


@checked
def mixture(
    input_shape: tuple[int, ...],
    outputs: COUNT,
    parts: COUNT = 3,
    hidden: WIDTH = 32,
    by_class: bool = False,
    letters: LETTERS = 0,
) -> nn.Module:
    """Several perceptrons with one hidden layer whose probabilities are mixed, for FedEM; by_class: for FedRC."""
    nets = (mlp(input_shape, outputs, hidden, letters=letters) for _ in range(parts))
    return Mixture(*nets, classes=outputs if by_class else None)
