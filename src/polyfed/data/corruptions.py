"""Corruptions of images, in four strengths and without a library: what cameras of different sites may differ in."""

import numpy as np
import torch
from torch import Tensor

from polyfed.base.errors import DataError

KINDS = ("clean", "noise", "blur", "contrast", "inverted")


def corrupted(x: Tensor, kind: str, severity: int, rng: np.random.Generator) -> Tensor:
    """Images [m, ..., h, w] corrupted, each by its own range and mean alone, so that no statistics are shared."""
    each = x.flatten(1)
    shape = (-1, *[1] * (x.dim() - 1))
    low, high, mean = (v.view(shape) for v in (each.amin(1), each.amax(1), each.mean(1)))
    if kind == "noise":
        return x + severity / 10 * (high - low) * torch.from_numpy(rng.standard_normal(x.shape)).to(x.dtype)
    if kind == "blur":  # `severity` passes of (1, 2, 1) / 4 along rows and columns
        for axis in (-1, -2) * severity:
            size = x.shape[axis]
            before = x.index_select(axis, (torch.arange(size) - 1).clamp(min=0))
            x = (before + 2 * x + x.index_select(axis, (torch.arange(size) + 1).clamp(max=size - 1))) / 4
        return x
    if kind == "contrast":
        return mean + (x - mean) / 2**severity
    if kind == "inverted":
        return high + low - x
    if kind == "clean":
        return x
    raise DataError(f"corruption: found {kind!r}, expected one of {', '.join(KINDS)}")
