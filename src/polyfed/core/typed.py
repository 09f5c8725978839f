"""What torch's stubs leave without types, or under a private name, typed once."""
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

BatchNorm = nn.modules.batchnorm._BatchNorm
InstanceNorm = nn.modules.instancenorm._InstanceNorm


def weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """sum_i weights_i values_i: [s] and [s, ...] -> [...], in the precision of the values."""
    return torch.tensordot(weights.to(values.dtype), values, dims=1)


def row_norms(values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """[s, p] -> [s] Euclidean norms, summed in `dtype`."""
    return torch.linalg.vector_norm(values, dim=1, dtype=dtype)


def add_(tensors: list[Tensor], others: Sequence[Tensor], alpha: float) -> None:
    """tensor += alpha * other for each pair, in one call."""
    torch._foreach_add_(tensors, list(others), alpha=alpha)


def copy_(tensors: list[Tensor], others: Sequence[Tensor]) -> None:
    """tensor <- other for each pair, in one call."""
    torch._foreach_copy_(tensors, list(others))


def named_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The module and all within it, each once, by name."""
    return module.named_modules()
