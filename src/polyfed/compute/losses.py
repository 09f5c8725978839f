"""Losses: of a batch, of each of its samples, of many models' batches at once."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from polyfed.base.errors import ConfigError, closest
from polyfed.compute.batches import Batch, on_device

LOSSES = ("cross-entropy", "mse")
Loss = str | Callable[[Tensor, Tensor], Tensor]
IGNORED = -100  # the target of a token that no answer is wanted for
FEW = 32  # classes up to which their losses are worked out for many samples at once


def tokens(output: Tensor, target: Tensor) -> Tensor:
    """Mean over samples of their mean cross-entropy over tokens; 0 for a sample without any."""
    # output: [b, T, C]; target: [b, T], also as floats, -100 where a token is not counted
    loss = F.cross_entropy(output.transpose(1, 2), target.long(), ignore_index=IGNORED, reduction="none")
    return (loss.sum(1) / (target != IGNORED).sum(1).clamp(min=1)).mean()


class Criterion:
    """A loss as a mean over samples, by name or of a callable. Raises ConfigError for one that is unknown."""

    def __init__(self, loss: Loss, class_weights: Sequence[float] | None, device: torch.device):
        if class_weights is not None and loss != "cross-entropy":
            raise ConfigError("class-weights: found weights with another loss than cross-entropy; weigh in the loss")
        names = (*LOSSES, tokens.__name__)
        if isinstance(loss, str) and loss not in names:
            raise ConfigError(f"unknown loss {loss!r}{closest(loss, names)}; known: {', '.join(names)}, or a callable")
        self.loss = tokens if loss == tokens.__name__ else loss
        self.class_weights = None
        if class_weights is not None:
            self.class_weights = torch.tensor(class_weights, dtype=torch.float64).to(device)
        self.reshape = True  # outputs [b, 1] for a callable, until `check` has found its wish

    def mean(self, output: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
        """The mean loss over samples [b, ...], or their sum weighted by `weight: [b]`."""
        if weight is not None:
            if not callable(self.loss):
                return (self.each(output.reshape(1, len(output), -1), target[None])[0] * weight).sum()
            each = [self.mean(output[k : k + 1], target[k : k + 1]) for k in range(len(target))]
            return (torch.stack(each) * weight).sum()
        if callable(self.loss):
            return self.loss(self.aligned(output.clone(), target), target.clone()).mean()  # it may write to them
        if self.loss == "cross-entropy":
            if self.class_weights is not None:
                return self.each(output[None], target[None]).mean()
            return F.cross_entropy(output, target)
        return F.mse_loss(output.reshape(target.shape), target)

    def aligned(self, output: Tensor, target: Tensor) -> Tensor:
        """Outputs [b, 1] in the shape of float targets [b], or the reverse: a loss may broadcast them to [b, b]."""
        fits = self.reshape and target.is_floating_point() and column(output, target)
        return output.reshape(target.shape) if fits else output

    def each(self, output: Tensor, target: Tensor) -> Tensor:
        """[s, b] losses of samples, of named losses only. output: [s, b, out]; target: [s, b, ...]"""
        if self.loss == "cross-entropy":
            if output.shape[2] <= FEW or output.stride(2) != 1:  # along samples, not along the few classes of each
                loss = F.cross_entropy(output.transpose(1, 2), target, reduction="none")
            else:
                loss = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)
            return loss if self.class_weights is None else loss * self.class_weights.to(loss.dtype)[target]
        output = output.flatten(2) if output.dim() > 2 else output[:, :, None]  # one number without a dimension
        return (output - target.reshape(output.shape)).square().mean(2)

    def of_models(self, output: Tensor, batch: Batch) -> Tensor:
        """[s] each client's mean loss, of each model's outputs [s, b, ...] on its own samples."""
        if not callable(self.loss):
            each = self.each(output, batch.y)
            return each.mean(1) if batch.weight is None else (each * batch.weight).sum(1)
        many = torch.func.vmap(self.mean)
        if batch.weighted and batch.weight is not None:
            each = many(output.flatten(0, 1)[:, None], batch.y.flatten(0, 1)[:, None])
            return (each.view(batch.weight.shape) * batch.weight).sum(1)
        if batch.sizes is None:
            return many(output, batch.y)
        sizes, loss = np.array(batch.sizes), output.new_zeros(len(output))
        for b in np.unique(sizes[sizes > 0]).tolist():  # the loss of b samples, which padding is none of
            rows = on_device(np.flatnonzero(sizes == b), output.device)
            loss = loss.index_add(0, rows, many(output[rows, :b], batch.y[rows, :b]))
        return loss


def column(output: Tensor, target: Tensor) -> bool:
    """True where one of the two is [b, 1] and the other [b], or both with the same axes between."""
    a, b = output.shape, target.shape
    return a == (*b, 1) or b == (*a, 1)
