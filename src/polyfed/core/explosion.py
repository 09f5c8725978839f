"""Failures because numbers have exploded: an eigendecomposition that overflows, an index of NaN, a loss that refuses
NaN. Only a call that has failed is repeated, and watched."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from polyfed.base.errors import PolyfedError

T = TypeVar("T")
UNFILLED = (torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty)  # may hold NaN until they are written


class Exploded(Exception):
    """Numbers are NaN, or so large that their squares overflow. position: the client's, where it is known"""

    def __init__(self, position: int = 0):
        super().__init__()
        self.position = position


def guarded(call: Callable[[], T], *passing: type[Exception]) -> T:
    """The call's result. Raises `Exploded` where it fails on exploded numbers. passing: errors to leave alone"""
    try:
        return call()
    except (PolyfedError, torch.OutOfMemoryError, *passing):
        raise
    except Exception as e:
        if exploded(call):
            raise Exploded() from e
        raise


def exploded(call: Callable[[], object]) -> bool:
    """True where torch meets exploded numbers in the call, however it ends."""
    with _Watch() as watch, suppress(Exception):
        call()
    return watch.exploded


class _Watch(TorchFunctionMode):
    """Sees NaN and large numbers; infinity alone does not count, as methods use it as a mark."""

    def __init__(self):
        super().__init__()
        self.exploded = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # inputs and no outputs: the inverse of a singular matrix is NaN before it is an error
        self.exploded = self.exploded or any(_beyond(t) for t in tree_leaves((args, kwargs)))
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in UNFILLED else made


def _beyond(t: object) -> bool:
    if not isinstance(t, Tensor) or not t.is_floating_point() or t.device.type == "meta":
        return False
    size = t.abs()
    large = size.isfinite() & (size > torch.finfo(t.dtype).max ** 0.5)
    return bool((t.isnan() | large).any())
