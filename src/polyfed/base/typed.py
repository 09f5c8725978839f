"""Types for what the stubs of torch and numpy leave without, or under a private name."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor
from torch.utils._python_dispatch import _pop_mode_temporarily

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


def hooked(module: nn.Module, like: nn.Module) -> nn.Module:
    """The module with another one's hooks on what goes in."""
    for hook in like._forward_pre_hooks.values():
        module.register_forward_pre_hook(hook)
    return module


def norm(t: Tensor) -> float:
    """The Euclidean norm of all of a tensor."""
    return float(t.norm())


def pieces(t: Tensor, size: int) -> Sequence[Tensor]:
    """The tensor in pieces of at most `size` rows."""
    return t.split(size)


def plain(value: Any) -> Any:
    """Tensors, arrays and their scalars as Python's lists and numbers, anything else as it is."""
    return value.tolist() if isinstance(value, Tensor | np.ndarray | np.generic) else value


@contextmanager
def seeded(seed: int) -> Generator[None]:
    """Inside, torch draws from this seed; afterwards its generator is as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextmanager
def tf32(on: bool) -> Generator[None]:
    """Inside, CUDA devices round the factors of all float32 products and convolutions to TF32's 10 bits, or none."""
    flags: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn]
    before = [f.allow_tf32 for f in flags]
    try:
        for f in flags:
            f.allow_tf32 = on
        yield
    finally:
        for f, value in zip(flags, before, strict=True):
            f.allow_tf32 = value


def unwatched() -> AbstractContextManager[object]:
    """Inside, the innermost dispatch mode does not see what torch does."""
    return _pop_mode_temporarily()


def is_batched(t: Tensor) -> bool:
    """True for a tensor inside `torch.func.vmap` that differs from one of the vmapped to the next."""
    return is_batchedtensor(t)
