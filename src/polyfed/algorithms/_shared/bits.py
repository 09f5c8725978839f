"""Masks: where they are set, and on the wire, one bit per entry."""

import numpy as np
import torch
from torch import Tensor


def pack(mask: Tensor) -> Tensor:
    """[s, p] bool -> [s, ceil(p / 8)] uint8, eight entries a byte."""
    return torch.as_tensor(np.packbits(mask.cpu().numpy(), axis=1, bitorder="little"), device=mask.device)


def unpack(packed: Tensor, p: int) -> Tensor:
    """`pack` undone: [s, p] bool."""
    bits = np.unpackbits(packed.cpu().numpy(), axis=1, count=p, bitorder="little")
    return torch.as_tensor(bits.view(np.bool_), device=packed.device)


def positions(mask: Tensor) -> Tensor:
    """[s, p] bool -> [s, k]: where each row is set, in rising order; as often in every row."""
    s, p = mask.shape
    # NumPy counts them out ten times as fast
    flat = (
        torch.as_tensor(np.flatnonzero(mask.numpy())) if mask.device.type == "cpu" else mask.flatten().nonzero()[:, 0]
    )
    return flat.view(s, -1) - p * torch.arange(s, device=mask.device)[:, None]


def kth_largest(score: Tensor, k: int) -> Tensor:
    """[s]: the k-th largest of each row of `score: [s, d]`."""
    d = score.shape[1]
    if score.device.type != "cpu":
        return score.kthvalue(d - k + 1, dim=1).values
    # NumPy finds it several times as fast
    return torch.as_tensor(np.partition(score.numpy(), d - k, axis=1)[:, d - k])
