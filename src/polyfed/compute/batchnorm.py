"""BatchNorm whose running statistics are part of the vector: methods average them, or leave them with their clients,
as they do with every other parameter.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyfed.base.typed import BatchNorm


class Follow(torch.autograd.Function):
    """y as it is; backwards also the gradient of 1/2 |mean - batch mean|^2 + 1/2 |var - batch var|^2."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, mean: Tensor, var: Tensor, batch_mean: Tensor, batch_var: Tensor) -> Tensor:
        ctx.save_for_backward(mean - batch_mean, var - batch_var)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return g, *ctx.saved_tensors, None, None


class Statistics(nn.Module):
    """A BatchNorm whose running mean and variance are parameters.

    In training a batch is normalised by its own mean and variance, and a step of plain SGD moves the running ones as
    torch's BatchNorm does with momentum = lr: m <- m + lr (batch mean - m). A batch with one value per channel is
    normalised by the running ones, which it leaves as they are.
    x: [b, C, ...]     weight, bias, running_mean, running_var: [C]
    """

    def __init__(self, layer: BatchNorm):
        super().__init__()
        self.eps = layer.eps
        given: dict[str, Tensor | None] = {
            "weight": layer.weight, "bias": layer.bias, "mean": layer.running_mean, "var": layer.running_var,
        }  # fmt: skip
        like = next((t for t in given.values() if t is not None), torch.zeros(layer.num_features)).detach()
        like = torch.zeros_like(like)
        own = {name: like + t.detach() for name, t in given.items() if t is not None}
        self.weight = nn.Parameter(own["weight"]) if "weight" in own else None
        self.bias = nn.Parameter(own["bias"]) if "bias" in own else None
        self.running_mean = nn.Parameter(own.get("mean", like.clone()))
        self.running_var = nn.Parameter(own.get("var", like + 1))
        self.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.running_mean, self.running_var
        at: tuple[Tensor, Tensor] = (mean.detach(), var.detach())
        if self.training and x.numel() > x.shape[1]:
            dims = [k for k in range(x.dim()) if k != 1]
            at = x.detach().mean(dims), x.detach().var(dims)
            y = F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
        else:
            y = F.batch_norm(x, at[0], at[1].clamp(min=0), self.weight, self.bias, False, 0.0, self.eps)
        follow: Any = Follow.apply  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return follow(y, mean, var, *at)
