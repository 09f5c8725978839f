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
    """[s, p] bool -> [s, k] positions of True, rising; every row has k."""
    s, p = mask.shape
    # NumPy counts them out ten times as fast
    flat = (
        torch.as_tensor(np.flatnonzero(mask.numpy())) if mask.device.type == "cpu" else mask.flatten().nonzero()[:, 0]
    )
    return flat.view(s, -1).sub_(p * torch.arange(s, device=mask.device)[:, None])


def largest(score: Tensor, k: int, among: Tensor | None = None) -> Tensor:
    """[s, d] bool: the k largest entries in size of each row of `score: [s, d]`, of equals the first; NaN is inf."""
    if not k:
        return torch.zeros_like(score, dtype=torch.bool)
    size = score.abs()
    # among: [s, d] bool, at least k in every row that may be chosen; None: all
    if among is not None:
        size.masked_fill_(~among, 0)  # the least there is
    least = kth_largest(size, k)[:, None]
    chosen = size >= least
    if int(chosen.count_nonzero()) != k * len(size):
        if size.isnan().any():  # of a model that diverges, whose masks are no smaller
            return largest(score.nan_to_num(torch.inf, torch.inf, -torch.inf), k, among)
        above, level = size > least, size == least if among is None else among & (size == least)
        chosen = above | (level & (level.cumsum(1) <= k - above.sum(1, keepdim=True)))
    return chosen


def kth_largest(values: Tensor, k: int) -> Tensor:
    """[s]: the k-th largest of each row of `values: [s, d]`, several times as fast as selecting among all."""
    if values.device.type != "cpu":
        return values.kthvalue(values.shape[1] - k + 1, dim=1).values
    kth: list[float] = []
    for row in values.numpy():
        # every 32nd number mostly says between which two it lies, and only those between are put in order
        some = np.sort(row[::32])
        n, below = len(some), 1 - k / len(row)
        at, by = n * below, 2.5 * np.sqrt(n * below * (1 - below)) + 2
        low, high = some[max(0, int(at - by))], some[min(n - 1, int(at + by))]
        near, rank = row[(row >= low) & (row <= high)], k - np.count_nonzero(row > high)
        if not 1 <= rank <= len(near):
            near, rank = row, k
        kth.append(np.partition(near, len(near) - rank)[-rank])
    return torch.as_tensor(np.array(kth, dtype=values.numpy().dtype))
