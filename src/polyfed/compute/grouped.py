"""Many models that are alike but for small trained parts, in one pass of the rest: frozen modules are called as they
are on all samples [s b, ...], so that masks may be of any kind; trained layers are batched products, by type."""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from polyfed.base.errors import ModelError
from polyfed.base.plugins import ours
from polyfed.compute.dropout import DROPOUTS, Key, dropped, drops
from polyfed.compute.layout import Layout
from polyfed.compute.recompute import kept_short
from polyfed.compute.terms import Entering
from polyfed.compute.vectorised import unfolded

Own = dict[str, Any]  # a layer's trained parameters by name, [s, ...]
Form = Callable[[Any, Own, int, Tensor], Tensor]  # of a layer, its trained parameters, s, the input [s b, ...]


def grouped_pass(
    module: nn.Module,
    layout: Layout,
    w: Tensor,
    x: Tensor,
    keys: Tensor | None,
    watch: Entering | None,
    blocks: Sequence[str] = (),
) -> tuple[Tensor, ...]:
    """Every model's outputs on its own samples: [s, p], [s, b, ...] -> [s, b, ...]; features too where `watch` watches.

    blocks: names of those to compute again in the backward pass. Raises ModelError for a layer that has no form. A
    parameter used elsewhere than in its own layer's call has no gradient here; `check` finds it by comparing.
    """
    s, owned = len(w), dict[str, Own]()
    for e, view in zip(layout.entries, layout.views(w), strict=True):
        layer, _, name = e.name.rpartition(".")
        owned.setdefault(layer, {})[name] = view

    def again() -> Callable[[], AbstractContextManager[None]]:
        return partial(_inside, module, owned, s, keys, draws.count)

    with _forms(module, owned, s), Drawn(s, keys) as draws, kept_short(module, blocks, again), watch or nullcontext():
        output: Tensor = module(x.flatten(0, 1).clone())  # a model may write to its input
        made = [output] if watch is None else [output, watch.entered()]
    return tuple(t.view(s, -1, *t.shape[1:]) for t in made)


@contextmanager
def _inside(module: nn.Module, owned: dict[str, Own], s: int, keys: Tensor | None, count: int) -> Generator[None]:
    """The contexts of a pass, from its dropout `count` on."""
    with _forms(module, owned, s), Drawn(s, keys, count):
        yield


@contextmanager
def _forms(module: nn.Module, owned: dict[str, Own], s: int) -> Generator[None]:
    """Let layers with trained parameters compute by their forms."""
    changed: list[nn.Module] = []
    try:
        for name, own in owned.items():
            layer = module.get_submodule(name)
            form = FORMS.get(type(layer).__name__ if ours(type(layer).__module__) else type(layer))
            # vectors: factors on outputs or inputs, RMSNorms of transformers
            if form is None and all(t.dim() == 2 for t in own.values()):
                form = _by_sample
            if form is None:
                raise ModelError(f"layer {name!r} ({type(layer).__name__}) has no grouped form")
            layer.forward = _called(form, layer, own, s)
            changed.append(layer)
        yield
    finally:
        for layer in changed:
            del layer.__dict__["forward"]


def _called(form: Form, layer: nn.Module, own: Own, s: int) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        if x.dim() < 2 or len(x) % s:
            raise ModelError(f"{type(layer).__name__}: its input {list(x.shape)} does not begin with the samples")
        return form(layer, own, s, x)

    return forward


def _by_group(x: Tensor, s: int) -> Tensor:
    """[s b, ..., k] -> [s, b ..., k]."""
    return x.reshape(s, -1, x.shape[-1])


def _times(x: Tensor, weight: Tensor, s: int) -> Tensor:
    """[s, n, k] times the transpose of one weight [m, k], or of one for each group [s, m, k]."""
    return x @ weight.mT if weight.dim() == 3 else F.linear(x, weight)


def _linear(layer: Any, own: Own, s: int, x: Tensor) -> Tensor:
    weight, bias = own.get("weight", layer.weight), own.get("bias", layer.bias)
    y = _times(_by_group(x, s), weight, s)
    y = y if bias is None else y + (bias[:, None] if bias.dim() == 2 else bias)
    return y.view(*x.shape[:-1], -1)


def _lora(layer: Any, own: Own, s: int, x: Tensor) -> Tensor:
    """base(x) + c (R x + B (A x)), the rest by group."""
    g, R = _by_group(x, s), own.get("R")
    A = own.get("A", layer.A)
    update = _times(_times(g, A, s), own["B"], s)
    update = update if R is None else update + _times(g, R, s)
    base: Tensor = layer.base(x)
    return base + layer.scale * update.view(base.shape)


def _dora(layer: Any, own: Own, s: int, x: Tensor) -> Tensor:
    """`_lora` with the rows of every group's weight scaled to their lengths."""
    A, B, g = own["A"], own["B"], own["g"]
    update = layer.scale * _times(_times(_by_group(x, s), A, s), B, s)
    base: Tensor = layer.base(x)
    scaled: Tensor = layer.scaled(_by_group(base, s), update, (g / layer.lengths(A, B))[:, None])
    return scaled.view(base.shape)


def _layer_norm(layer: nn.LayerNorm, own: Own, s: int, x: Tensor) -> Tensor:
    return _scaled(layer, own, F.layer_norm(x, [*layer.normalized_shape], None, None, layer.eps), s)


def _rms_norm(layer: nn.RMSNorm, own: Own, s: int, x: Tensor) -> Tensor:
    return _scaled(layer, own, F.rms_norm(x, [*layer.normalized_shape], None, layer.eps), s)


def _scaled(layer: nn.Module, own: Own, y: Tensor, s: int) -> Tensor:
    """The normalised [s b, ...], times the weights plus the biases of every group."""
    shape, named = y.shape, dict(layer.named_parameters())
    if "weight" in named:
        y = y.reshape(s, -1, *named["weight"].shape)
    for name, act in (("weight", torch.mul), ("bias", torch.add)):
        if name in named:
            y = act(y, own[name][:, None] if name in own else named[name])
    return y.view(shape)


def _group_norm(layer: nn.GroupNorm, own: Own, s: int, x: Tensor) -> Tensor:
    last = F.group_norm(x, layer.num_groups, eps=layer.eps).movedim(1, -1)
    return _scaled(layer, own, last, s).movedim(-1, 1)


def _convolution(layer: Any, own: Own, s: int, x: Tensor) -> Tensor:
    """Unfold once, then one product per group; groups of channels make one convolution of s times as many."""
    weight, bias = own.get("weight", layer.weight), own.get("bias", layer.bias)
    step, pad, apart = layer.stride, layer.padding, layer.dilation
    convolve: Callable[..., Tensor] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(step)]
    if layer.padding_mode != "zeros":
        raise ModelError(f"{type(layer).__name__}: padding_mode {layer.padding_mode!r} has no grouped form")
    if "weight" not in own:
        y = convolve(x, weight, None, step, pad, apart, layer.groups)
    elif layer.groups == 1:
        places = range(3, weight.dim())
        columns = unfolded(x, layer.kernel_size, step, pad, apart)
        y = _times(_by_group(columns, s), weight.permute(0, 1, *places, 2).flatten(2), s)
        y = y.view(*columns.shape[:-1], -1).movedim(-1, 1)
    else:
        side = x.view(s, -1, *x.shape[1:]).transpose(0, 1).flatten(1, 2)
        y = convolve(side, weight.flatten(0, 1), None, step, pad, apart, s * layer.groups)
        y = y.view(len(y), s, -1, *y.shape[2:]).transpose(0, 1).flatten(0, 1)
    if bias is None:
        return y
    each = bias[:, None] if "bias" in own else bias[None, None]
    return (y.view(s, -1, *y.shape[1:]) + each[(..., *[None] * len(step))]).flatten(0, 1)


def _by_sample(layer: Any, own: Own, s: int, x: Tensor) -> Tensor:
    """Call the layer with vectors [s b, 1, ..., k], which is right where it multiplies or adds them."""
    b, between, before = len(x) // s, [1] * (x.dim() - 2), dict(layer.named_parameters(recurse=False))
    layer._parameters.update({
        name: t[:, None].expand(-1, b, -1).reshape(len(x), *between, -1) for name, t in own.items()
    })  # fmt: skip
    try:
        return cast("type[Any]", type(layer)).forward(layer, x)
    finally:
        layer._parameters.update(before)


def _embedding(layer: nn.Embedding, own: Own, s: int, x: Tensor) -> Tensor:
    if layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse:
        raise ModelError("Embedding: max_norm, scale_grad_by_freq and sparse have no grouped form")
    n, d = own["weight"].shape[1:]
    at = x.view(s, -1) + n * torch.arange(s, device=x.device)[:, None]
    y = F.embedding(at, own["weight"].reshape(s * n, d)).view(*x.shape, d)
    return y if layer.padding_idx is None else torch.where((x == layer.padding_idx)[..., None], y.detach(), y)


FORMS: dict[Any, Form] = {  # two by name: they are built from models, which lie above
    nn.Linear: _linear,
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _rms_norm,
    nn.GroupNorm: _group_norm,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _convolution),
    nn.Embedding: _embedding,
    "LoRA": _lora,
    "DoRA": _dora,
}


class Drawn(TorchFunctionMode):
    """Gives the dropouts from `count` on each group's own masks. keys: [s, 2] halves; None: nothing may be drawn."""

    def __init__(self, s: int, keys: Tensor | None, count: int = 0):
        super().__init__()
        self._s, self._keys, self.count = s, keys, count

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and (kwargs.get("dropout_p") or (len(args) > 4 and args[4])):
            raise ModelError("attention drops inside torch's own function, whose masks have no keys")
        if self._keys is not None and func in DROPOUTS:
            made = self._dropped(func, args, kwargs)
            if made is not None:
                self.count += 1
                return made
        return func(*args, **kwargs)

    def _dropped(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
        x = args[0] if args else kwargs["input"]
        if len(x) % self._s:
            raise ModelError(f"dropout of {list(x.shape)}, which does not begin with the samples")
        keys, parts = self._keys, x.unflatten(0, (self._s, -1))
        rest, named = args[1:], {k: v for k, v in kwargs.items() if k != "input"}
        if keys is None or not drops(func, parts[0], *rest, **named):
            return None

        def one(part: Tensor, low: Tensor, high: Tensor) -> Tensor:
            made = dropped(func, Key(low, high), self.count, part, *rest, **named)
            assert made is not None
            return made

        return torch.func.vmap(one)(parts, *keys.unbind(1)).flatten(0, 1)
