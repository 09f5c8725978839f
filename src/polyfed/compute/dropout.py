"""Dropout whose masks are a function of (key, which of the step's dropouts, place in the tensor), and of nothing
else: not of device, memory layout, padding or the number of clients computed at once. Places are hashed as 32-bit
integers by lowbias32 (C. Wellons, 2018), on a processor no slower than torch's own draws."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

GOLDEN = 0x9E3779B9


class Key(NamedTuple):
    """The two halves of a step's key, as int32: numbers, or tensors [s] for many clients."""

    low: int | Tensor
    high: int | Tensor


def halves(keys: np.ndarray) -> np.ndarray:
    """[s] uint64 -> [s, 2] int32."""
    return np.stack([keys.astype(np.uint32), (keys >> np.uint64(32)).astype(np.uint32)], -1).view(np.int32)


def key_from(key: int) -> Key:
    """Key of one client and step."""
    return Key(_signed(key & 0xFFFFFFFF), _signed(key >> 32))


def kept(key: Key, count: int, n: int, p: float, device: torch.device) -> Tensor:
    """[n] bool: True with probability 1 - p, in the `count`-th dropout of the step."""
    # of a size that batches with fewer samples share
    x = _places(1 << (n - 1).bit_length(), _signed((count + 1) * GOLDEN), device)[:n] ^ key.low
    x = _shifted(x, 16).mul_(_signed(0x7FEB352D)) + key.high
    x = _shifted(_shifted(x, 15).mul_(_signed(0x846CA68B)), 16)
    return x < min(int((1 - p) * 2**32), 2**32 - 1) - 2**31


@lru_cache(maxsize=16)
def _places(n: int, start: int, device: torch.device) -> Tensor:
    """[n] hashes of the places."""
    x = torch.arange(n, dtype=torch.int32, device=device) + start
    x = _shifted(x, 16).mul_(_signed(0x7FEB352D))
    return _shifted(_shifted(x, 15).mul_(_signed(0x846CA68B)), 16)


@contextmanager
def without_cache() -> Generator[None]:
    """Inside, no tensor of an earlier pass is used, nor one of this pass in a later."""
    _places.cache_clear()
    try:
        yield
    finally:
        _places.cache_clear()


def _shifted(x: Tensor, k: int) -> Tensor:
    """x ^= x >> k in place, as of unsigned numbers."""
    return x.bitwise_xor_((x >> k).bitwise_and_((1 << (32 - k)) - 1))


def _signed(number: int) -> int:
    """The int32 with the same last 32 bits."""
    return (number + 2**31) % 2**32 - 2**31


def dropped(func: Callable[..., Any], key: Key, count: int, *args: Any, **kwargs: Any) -> Tensor | None:
    """Call `func` of `DROPOUTS` with keyed masks; None where torch's own is to be called."""
    if not drops(func, *args, **kwargs):
        return None
    (input, p, _, inplace), dims = _arguments(*args, **kwargs), DROPOUTS[func]
    shape = input.shape[:2] if dims else input.shape
    mask = kept(key, count, prod(shape), p, input.device).to(input.dtype)
    mask = (mask / (1 - p) if p < 1 else mask).view(*shape, *[1] * (input.dim() - len(shape)))
    return input.mul_(mask) if inplace else input * mask


def drops(func: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """True where `dropped` has masks for this call."""
    input, p, training, _ = _arguments(*args, **kwargs)
    return training and 0 < p <= 1 and DROPOUTS[func] in (0, input.dim())


def _arguments(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> tuple[Any, ...]:
    return input, p, training, inplace


# dimensions of a batch whose channels [b, C, ...] go or stay as a whole; 0: every number by itself
DROPOUTS: dict[Callable[..., Any], int] = {F.dropout: 0, F.dropout1d: 3, F.dropout2d: 4, F.dropout3d: 5}
