"""BatchNorm -> GroupNorm (Hsieh et al., 2020), or a BatchNorm whose statistics are parameters: batch statistics mix
a client's samples, and those of torch's own layer are no part of the vector that clients exchange."""

import copy
from collections.abc import Callable

import torch
from torch import nn

from polyfed.base.arguments import checked
from polyfed.base.errors import ConfigError, ModelError
from polyfed.base.typed import BatchNorm
from polyfed.compute.batchnorm import Statistics


@checked
def replace_batchnorm(model: nn.Module, groups: int = 2) -> nn.Module:
    """A copy of `model` with every BatchNorm layer replaced by GroupNorm; its scale and shift are kept.

    The running statistics are dropped: a trained model must be trained again.

    Parameters
    ----------
    model : nn.Module
        Stays as it is.
    groups : int
        Most groups per layer; fewer where the channels are not divisible by it, and never groups of a single channel
        where a layer has more than one.

    Returns
    -------
    nn.Module
        The copy.
    """
    if type(groups) is not int or groups < 1:
        raise ConfigError(f"groups: found {groups!r}, expected an integer of at least 1")
    _refuse_lazy(model)
    return _replaced(model, lambda layer: _group_norm(layer, groups))


@checked
def with_statistics(model: nn.Module) -> nn.Module:
    """A copy of `model` in which clients exchange the running statistics of BatchNorm layers, as they do parameters.

    The method then decides about them: FedAvg averages them with everything else, FedBN leaves them, and the scale and
    shift, with their clients. In training a batch is normalised by its own statistics, and each pass moves the running
    ones by the layer's own `momentum`, as torch's BatchNorm does (0.1; None: the mean over batches): no optimiser, step
    size, weight decay, clipping, pull or variate touches them, and a server's mean of them is plain. Frozen layers stay
    as they are. Privacy by row is refused, since a row has no gradient of its own.

    Parameters
    ----------
    model : nn.Module
        Stays as it is.

    Returns
    -------
    nn.Module
        The copy, with the names of the model's tensors.
    """
    if not any(isinstance(m, BatchNorm) and _is_trained(m) for m in model.modules()):
        raise ModelError(f"{type(model).__name__} has no BatchNorm that is trained, expected one for its statistics")
    _refuse_lazy(model)
    return _replaced(model, lambda layer: Statistics(layer) if _is_trained(layer) else layer)


def _is_trained(layer: BatchNorm) -> bool:
    own = [*layer.parameters()]
    return any(q.requires_grad for q in own) if own else layer.training


def _refuse_lazy(model: nn.Module) -> None:
    for m in model.modules():
        if isinstance(m, BatchNorm) and m.num_features < 1:
            raise ModelError(f"{type(m).__name__} does not know its channels yet: run the model once on a batch first")


def _replaced(model: nn.Module, make: Callable[[BatchNorm], nn.Module]) -> nn.Module:
    """A copy with other layers in the place of BatchNorm."""
    model = copy.deepcopy(model)
    made: dict[nn.Module, nn.Module] = {}  # a layer used in two places stays one layer

    def replaced(parent: nn.Module) -> nn.Module:
        if isinstance(parent, BatchNorm):
            if parent not in made:
                made[parent] = make(parent)
            return made[parent]
        for name, child in list(parent._modules.items()):  # named_children() skips a layer's second place
            if child is not None:
                setattr(parent, name, replaced(child))
        return parent

    return replaced(model)


def _group_norm(layer: BatchNorm, groups: int) -> nn.GroupNorm:
    channels = layer.num_features
    most = max(1, min(groups, channels // 2))
    divisor = next(k for k in range(most, 0, -1) if channels % k == 0)
    made = nn.GroupNorm(divisor, channels, eps=layer.eps, affine=layer.affine)
    if layer.affine:
        made.to(layer.weight.device, layer.weight.dtype)
        with torch.no_grad():
            for old, new in ((layer.weight, made.weight), (layer.bias, made.bias)):
                new.copy_(old)
                new.requires_grad_(old.requires_grad)
    return made.train(layer.training)
