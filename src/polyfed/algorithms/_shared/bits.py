"""Masks on the wire: one bit per entry."""

import torch
from torch import Tensor


def pack(mask: Tensor) -> Tensor:
    """[s, p] bool -> [s, ceil(p / 8)] uint8, eight entries a byte."""
    bits = torch.nn.functional.pad(mask.to(torch.uint8), (0, -mask.shape[1] % 8)).unflatten(1, (-1, 8))
    return (bits << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(2, dtype=torch.uint8)


def unpack(packed: Tensor, p: int) -> Tensor:
    """`pack` undone: [s, p] bool."""
    bits = packed[..., None] >> torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (bits & 1).flatten(1)[:, :p].bool()
