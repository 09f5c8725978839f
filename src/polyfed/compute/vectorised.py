"""Many models at once: one pass of stacked weights on an accelerator, of any module as it is. `torch.func.vmap`
carries it over the client axis; dropout draws every client's own keyed masks in one go."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from polyfed.base.typed import is_batched
from polyfed.compute.dropout import DROPOUTS, Key, dropped
from polyfed.compute.layout import Layout
from polyfed.compute.terms import Entering

import_module("torch._C._functorch")._set_vmap_fallback_warning_enabled(False)  # which asks to file an issue of torch's
UNFOLDED: bool | None = None  # `benchmarks/accelerator.py` compares the two on a device; None: as it found


def stacked_outputs(module: nn.Module, layout: Layout, w: Tensor, x: Tensor, keys: Tensor | None = None) -> Tensor:
    """Every model's outputs on its own samples: [s, p], [s, b, ...] -> [s, b, ...]."""
    return stacked_pass(module, layout, w, x, keys, None)[0]


def stacked_pass(
    module: nn.Module, layout: Layout, w: Tensor, x: Tensor, keys: Tensor | None, watch: Entering | None
) -> tuple[Tensor, ...]:
    """`stacked_outputs`, and behind them the inputs of every model's last layer, where `watch` watches it."""

    def forward(views: list[Tensor], x: Tensor, *key: Tensor) -> tuple[Tensor, ...]:
        named = {e.name: v for e, v in zip(layout.entries, views, strict=True)}
        with Many(Key(*key) if key else None), watch or nullcontext():
            output = torch.func.functional_call(module, named, (x.clone(),))  # a model may write to its input
        return (output,) if watch is None else (output, watch.entered())

    # keys: [s, 2] halves, of the dropouts of this pass; None: nothing may be drawn
    return torch.func.vmap(forward)(layout.views(w), x, *(() if keys is None else keys.unbind(1)))


class Many(TorchFunctionMode):
    """Inside a vmapped forward pass. key: of this pass, one for each client; None: nothing is dropped."""

    def __init__(self, key: Key | None = None):
        super().__init__()
        self._key, self._count = key, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # with weights of their own, clients' convolutions would be one of as many groups, cuDNN's slowest case
        if func in CONVOLUTIONS and _unfolds() and (made := _convolved(*args, **kwargs)) is not None:
            return made
        if self._key is not None and func in DROPOUTS:
            made = dropped(func, self._key, self._count, *args, **kwargs)
            if made is not None:
                self._count += 1
                return made
        if func is F.scaled_dot_product_attention:  # fused on CUDA it keeps nothing for a backward pass outside of vmap
            with sdpa_kernel(SDPBackend.MATH) if (*args, *kwargs.values())[0].is_cuda else nullcontext():
                return func(*args, **kwargs)
        if func is F.group_norm:  # vmap has no rule for it channels last
            return _group_norm(*args, **kwargs)
        return func(*args, **kwargs)


def _unfolds() -> bool:
    """True where products of unfolded inputs are faster than grouped convolutions."""
    # on an H100 in float32 by three times; in bfloat16 the grouped convolutions are, by a half
    return not torch.is_autocast_enabled("cuda") if UNFOLDED is None else UNFOLDED


def _group_norm(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return F.group_norm(input.contiguous(), *args, **kwargs)


def _convolved(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor | None:
    """`F.conv1d`, `conv2d` or `conv3d` as a product, channels last; None where torch's own is to be called."""
    if groups != 1 or input.dim() != weight.dim() or not is_batched(weight):
        return None
    columns, places = unfolded(input, weight.shape[2:], stride, padding, dilation), range(2, weight.dim())
    out = F.linear(columns.flatten(0, -2), weight.permute(0, *places, 1).reshape(len(weight), -1), bias)
    return out.view(*columns.shape[:-1], -1).movedim(-1, 1)


def unfolded(
    input: Tensor,
    size: Sequence[int],
    stride: int | Sequence[int],
    padding: str | int | Sequence[int],
    dilation: int | Sequence[int],
) -> Tensor:
    """The window of every place of a convolution: [b, C, ...] -> [b, places ..., (kernel's places) C]."""
    d = len(size)
    step, apart = _each(stride, d), _each(dilation, d)
    reach = [a * (k - 1) for a, k in zip(apart, size, strict=True)]
    if padding == "same":
        pads = [(r // 2, r - r // 2) for r in reach]
    else:
        pads = [(n, n) for n in _each(0 if padding == "valid" else padding, d)]  # pyrefly: ignore[bad-argument-type]
    if any(sum(pads, ())):
        input = F.pad(input, [n for pad in reversed(pads) for n in pad])
    for k in range(d):
        input = input.unfold(2 + k, reach[k] + 1, step[k])[..., :: apart[k]]
    outer = [input.shape[0], *input.shape[2 : 2 + d]]
    return input.permute(0, *range(2, 2 + 2 * d), 1).reshape(*outer, -1)


def _each(value: int | Sequence[int], d: int) -> list[int]:
    """A number for every dimension, as torch takes them."""
    given = [value] if isinstance(value, int) else [*value]
    return given * d if len(given) == 1 else given


CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
