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


def kth_largest(values: Tensor, k: int) -> Tensor:
    """[s]: the k-th largest of each row of `values: [s, d]`, of which none is negative.

    Numbers of one sign have the order of their bits: the first 16 are counted, and only those that share them with the
    k-th are looked at again, several times as fast as selecting among all.
    """
    if values.device.type != "cpu":
        return values.kthvalue(values.shape[1] - k + 1, dim=1).values
    found: list[float] = []
    for row in values.numpy():
        first = row.view(f"i{row.itemsize}") >> (8 * row.itemsize - 16)
        as_large = np.bincount(first)[::-1].cumsum()[::-1]
        at = np.flatnonzero(as_large >= k)[-1]
        close = row[first == at]
        rank = int(as_large[at]) - k  # from below
        found.append(np.partition(close, rank)[rank])
    return torch.as_tensor(np.array(found, dtype=values.numpy().dtype))
