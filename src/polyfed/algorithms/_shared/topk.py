"""The entries of largest magnitude of clients' vectors, as values and positions."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from polyfed.core.algorithm import State


def top_k(v: Tensor, fraction: float) -> State:
    """The k = ceil(fraction p) entries of largest magnitude in each row of v: [s, p], and their positions."""
    k = math.ceil(fraction * v.shape[-1] - 1e-9)  # 0.07 * 100 is 7.000000000000001
    at = v.abs().topk(k).indices.sort().values
    return {"values": v.gather(-1, at), "at": at.to(torch.int32)}


def dense(message: Mapping[str, Tensor], p: int) -> Tensor:
    """`top_k` undone: [s, p], zero elsewhere."""
    values, at = message["values"], message["at"].long()
    return values.new_zeros(*values.shape[:-1], p).scatter_(-1, at, values)


def misplaced(at: Tensor | None, p: int) -> str:
    """Why the positions of one client's message, if it has any, cannot be those of `top_k`; or ""."""
    right = at is None or (at[0] >= 0 and at[-1] < p and bool((at.diff() > 0).all()))
    return "" if right else f"its positions are not rising ones from 0 to {p - 1}"
