"""Models whose layers are of low rank: as few numbers as they have, and pairs of thin layers that compute the same.

A linear layer of rank r is two linear layers. A kernel (o, i, kh, kw) whose matrix [o kh, i kw], entry
[o kh' + a, i kw' + b] = w[o, i, a, b], is U V of rank r is a 1 x kw convolution to r channels, with the stride and the
padding across, and a kh x 1 one after it, with those down. Huang et al. (2023), footnote 1 and Table 9.

`pack` gives the tensors of a factorised model: the dense ones under their names, and for a layer `x` that is
U V + (a few nonzeros) "x.U" [d1, r], "x.V" [r, d2], and "x.at" [k] int32, "x.values" [k] where there are any. With
nonzeros a layer is run dense: a second, sparse product takes longer than it saves (see benchmarks/factorised.py).
"""

import copy
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from polyfed.core.errors import ModelError


def pack(
    named: Mapping[str, Tensor], common: Mapping[str, Tensor], factors: Mapping[str, tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    """The tensors of a factorised model.

    named: the model's parameters     common: those of the low-rank model that it deviates from in a few entries
    factors: U [d1, r], V [r, d2] per low-rank layer of `common`
    A layer that would be no smaller, for all its nonzeros beside the factors, stays dense.
    """
    tensors: dict[str, Tensor] = {}
    for name, t in named.items():
        dense = {name: t.detach().cpu().contiguous()}
        parts = dense
        if name in factors:
            rest = (t - common[name]).detach().cpu().flatten()
            at = rest.nonzero()[:, 0]
            parts = {f"{name}.{part}": f.cpu().contiguous() for part, f in zip("UV", factors[name], strict=True)}
            if len(at):
                parts |= {f"{name}.at": at.to(torch.int32), f"{name}.values": rest[at]}
        tensors |= parts if size(parts) < size(dense) else dense
    return tensors


def as_weight(matrix: Tensor, shape: torch.Size) -> Tensor:
    """A layer's matrix [o kh, i kw] as its weight (o, i, kh, kw); any other weight is o x (all the rest) as it is."""
    if len(shape) == 4:
        o, i, kh, kw = shape
        return matrix.view(o, kh, i, kw).transpose(1, 2)
    return matrix.view(shape)


def size(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of some tensors."""
    return sum(t.numel() * t.element_size() for t in tensors.values())


def factorised(model: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A copy of `model` with the parameters `tensors` (see `pack`), layers that are two factors made pairs of layers.

    Pairs are made of nn.Linear and of nn.Conv2d of one group; any other layer keeps its form, with the same numbers.
    Raises ModelError where the tensors are not those of the model.
    """
    model = copy.deepcopy(model)
    known: set[str] = set()
    for name, q in model.named_parameters():
        known |= {name, *(f"{name}.{part}" for part in ("U", "V", "at", "values"))}
        try:
            value = _value(tensors, name, q.shape)
        except (KeyError, RuntimeError, IndexError):
            raise ModelError(f"not the tensors of this model: {name} {list(q.shape)} is missing or other") from None
        with torch.no_grad():
            q.copy_(value)
    if set(tensors) - known:
        raise ModelError(f"not the tensors of this model: it has no {min(set(tensors) - known)}")
    pairs: dict[nn.Module, nn.Module] = {}
    for path, layer in model.named_modules():
        name = f"{path}.weight" if path else "weight"
        if f"{name}.U" in tensors and f"{name}.at" not in tensors:
            pair = _pair(layer, tensors[f"{name}.U"], tensors[f"{name}.V"])
            pairs |= {} if pair is None else {layer: pair}
    return _replaced(model, pairs)


def load(path: str | Path, model: nn.Module) -> nn.Module:
    """A factorised model from the file that `polyfed export --factorised` writes.

    model: a module of the architecture that was trained, such as `models.build` makes; its numbers do not matter
    Raises ModelError where the file cannot be read or belongs to another model.
    """
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as e:
        raise ModelError(f"{path}: cannot be read as safetensors ({str(e).splitlines()[0]})") from None
    try:
        return factorised(model, tensors)
    except ModelError as e:
        raise ModelError(f"{path}: {e}") from None


def _value(tensors: Mapping[str, Tensor], name: str, shape: torch.Size) -> Tensor:
    """One parameter from its tensors. Raises KeyError or RuntimeError where they do not give one of this shape."""
    if f"{name}.U" not in tensors:
        if tensors[name].shape != shape:
            raise KeyError(name)
        return tensors[name]
    value = as_weight(tensors[f"{name}.U"] @ tensors[f"{name}.V"], shape)
    if f"{name}.at" in tensors:
        value = value.flatten().index_add(0, tensors[f"{name}.at"].long(), tensors[f"{name}.values"]).view(shape)
    return value


def _pair(layer: nn.Module, U: Tensor, V: Tensor) -> nn.Sequential | None:
    """Two layers that compute what `layer` does with the weight U V; None for other kinds of layers."""
    if not U.shape[1]:  # the zero matrix; layers have one channel at least
        U, V = U.new_zeros(len(U), 1), V.new_zeros(1, V.shape[1])
    r = U.shape[1]
    if isinstance(layer, nn.Linear):
        first, second = nn.Linear(layer.in_features, r, bias=False), nn.Linear(r, layer.out_features, bias=False)
        weights = V, U
    elif isinstance(layer, nn.Conv2d) and layer.groups == 1:
        o, i, (kh, kw) = layer.out_channels, layer.in_channels, layer.kernel_size
        (sh, sw), (dh, dw), mode, pad = layer.stride, layer.dilation, layer.padding_mode, layer.padding
        pad = pad if isinstance(pad, str) else (pad[0], pad[1])
        ph, pw = (pad, pad) if isinstance(pad, str) else ((pad[0], 0), (0, pad[1]))
        across, down = ((1, sw), pw, (1, dw)), ((sh, 1), ph, (dh, 1))
        if kh == 1:  # the first layer can leave out rows already
            across, down = ((sh, sw), pad, (1, dw)), (1, 0, 1)
        first = nn.Conv2d(i, r, (1, kw), *across, bias=False, padding_mode=mode)
        second = nn.Conv2d(r, o, (kh, 1), *down, bias=False, padding_mode=mode)
        weights = V.view(r, i, 1, kw), U.view(o, kh, r).transpose(1, 2)[..., None]
    else:
        return None
    pair = nn.Sequential(first, second).to(layer.weight.device, layer.weight.dtype).train(layer.training)
    with torch.no_grad():
        first.weight.copy_(weights[0])
        second.weight.copy_(weights[1])
    second.bias = layer.bias  # pyright: ignore[reportAttributeAccessIssue]  (None is as good)
    return pair


def _replaced(module: nn.Module, by: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """The module with some of its layers replaced, wherever they are used."""
    if module in by:
        return by[module]
    for name, child in list(module._modules.items()):  # named_children() skips a layer's second place
        if child is not None:
            setattr(module, name, _replaced(child, by))
    return module
