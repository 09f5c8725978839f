"""BatchNorm whose running statistics are part of the vector: methods average them, or leave them with their clients.
In their place a gradient holds what a training pass moves them by, and steps set them to that (`statistics_`)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyfed.base.typed import BatchNorm


class Follow(torch.autograd.Function):
    """y as it is; backwards the statistics get `moves`, the numbers they move by, in place of gradients."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, moves: list[Tensor], *statistics: Tensor) -> Tensor:
        ctx.moves = moves  # not saved as an activation is: a block that is computed again moves nothing
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        return g, None, *ctx.moves


class Statistics(nn.Module):
    """A BatchNorm whose running mean and variance [C] are in the vector; in training they move as those of torch's.

    A batch [b, C, ...] with one value per channel is normalised by the running statistics, which it leaves as they are.
    """

    def __init__(self, layer: BatchNorm):
        super().__init__()
        self.eps, self.momentum = layer.eps, layer.momentum
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
        if self.momentum is None:
            passes = 0 if layer.num_batches_tracked is None else int(layer.num_batches_tracked)
            self.num_batches_tracked = nn.Parameter(like.new_full((), float(passes)))
        self.now: tuple[Tensor, ...] = ()  # the statistics behind the last call of a pass, see `begin`
        self.train(layer.training)

    def reset_parameters(self) -> None:
        """As torch's own layer: scale and variance 1, the rest 0."""
        for name, q in self.named_parameters(recurse=False):
            nn.init.constant_(q, float(name in ("weight", "running_var")))

    @property
    def statistics(self) -> dict[str, nn.Parameter]:
        """The parameters that the loss has no gradient of, by name."""
        names = ("running_mean", "running_var", "num_batches_tracked")
        return {name: q for name, q in self.named_parameters(recurse=False) if name in names}

    def forward(self, x: Tensor) -> Tensor:
        own = [*self.statistics.values()]
        mean, var, *passes = now = [t.detach() for t in (self.training and self.now) or own]
        if self.training and x.numel() > x.shape[1]:
            wide, dims = x.detach().to(mean.dtype), [k for k in range(x.dim()) if k != 1]
            share = self.momentum if self.momentum is not None else 1 / (passes[0] + 1)
            moves = [share * (mean - wide.mean(dims)), share * (var - wide.var(dims))]
            moves += [-torch.ones_like(t) for t in passes]
            self.now = tuple(t - move for t, move in zip(now, moves, strict=True))
            y = F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
        else:
            moves = [torch.zeros_like(t) for t in now]
            y = F.batch_norm(x, mean, var.clamp(min=0), self.weight, self.bias, False, 0.0, self.eps)
        follow: Any = Follow.apply
        return follow(y, moves, *own)


def begin(module: nn.Module, inputs: object) -> None:
    """A hook before a model's pass: layers start from the vector; one used twice goes on from its first call."""
    for m in module.modules():
        if isinstance(m, Statistics):
            m.now = ()
