"""Models whose layers are of low rank: as few numbers as they have, and pairs of thin layers that compute the same.

A linear layer of rank r is two linear layers. A kernel (o, i, kh, kw) whose matrix [o kh, i kw], entry
[o kh' + a, i kw' + b] = w[o, i, a, b], is U V of rank r is a 1 x kw convolution to r channels, with the stride and the
padding across, and a kh x 1 one after it, with those down. Huang et al. (2023), footnote 1 and Table 9.

`pack` gives the tensors of a factorised model: the dense ones under their names, and for a layer `x` that is
U V + (a few nonzeros) "x.U" [d1, r], "x.V" [r, d2], and "x.at" [k] int32, "x.values" [k] where there are any.

Such a layer is run dense (`sparse="merged"`: the memory and the time of the dense layer) or as the pair and a product
with a sparse matrix added (`sparse="beside"`: small in memory too). `measure` times all forms, as none is always the
fastest. At rank 10 beside 4 % nonzeros and batches of 20, on one thread, "beside" is 2 times as fast as dense for an
mlp 784-512-512, no faster for 784-200 or smaller, and half as fast for the cnn: a sparse product with a convolution's
input needs it unfolded (benchmarks/factorised.py --layers).
"""

import copy
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from polyfed.base.errors import ConfigError, ModelError
from polyfed.base.typed import hooked
from polyfed.core.messages import size

SPARSE = ("merged", "beside")


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


def memory(model: nn.Module) -> int:
    """Bytes of a module's parameters and buffers, the positions of nonzeros included."""
    return size(dict(model.named_parameters()) | dict(model.named_buffers()))


class Beside(nn.Module):
    """A pair of thin layers and a sparse matrix S beside them: x -> U V x + S x, for convolutions of unfolded x.

    S [o, i kh kw] in compressed rows: starts [o + 1] int32, columns [k] int32, values [k].
    """

    starts: Tensor
    columns: Tensor
    values: Tensor

    def __init__(self, pair: nn.Sequential, layer: nn.Linear | nn.Conv2d, at: Tensor, values: Tensor):
        super().__init__()
        self.pair, self.shape = pair, (len(layer.weight), layer.weight[0].numel())
        self.window: dict[str, Any] | None = None
        if isinstance(layer, nn.Conv2d):
            self.window = {k: getattr(layer, k) for k in ("kernel_size", "dilation", "padding", "stride")}
        rows = at.long() // self.shape[1]
        starts = torch.bincount(rows, minlength=self.shape[0]).cumsum(0)
        self.register_buffer("starts", F.pad(starts, (1, 0)).to(layer.weight.device, torch.int32))
        self.register_buffer("columns", (at.long() % self.shape[1]).to(layer.weight.device, torch.int32))
        self.register_buffer("values", values.to(layer.weight))
        with warnings.catch_warnings():  # torch says once that its compressed rows are new
            warnings.filterwarnings("ignore", message="Sparse CSR")
            self.matrix()

    def matrix(self) -> Tensor:
        """S; its buffers are kept apart, as a sparse tensor can be neither copied with its module nor written."""
        return torch.sparse_csr_tensor(self.starts, self.columns, self.values, self.shape, check_invariants=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.pair(x)
        if self.window is None:
            return y + (self.matrix() @ x.reshape(-1, self.shape[1]).T).T.reshape(y.shape)
        unfolded = F.unfold(x, **self.window).transpose(0, 1).reshape(self.shape[1], -1)  # [i kh kw, batch places]
        return y + (self.matrix() @ unfolded).view(self.shape[0], len(y), *y.shape[2:]).transpose(0, 1)


def factorised(model: nn.Module, tensors: Mapping[str, Tensor], sparse: str = "merged") -> nn.Module:
    """A copy of `model` with the parameters `tensors` (see `pack`), layers that are two factors made pairs of layers.

    sparse: a layer with nonzeros beside its factors is one dense layer ("merged") or a pair and a sparse matrix
        ("beside")
    Pairs are made of nn.Linear and of nn.Conv2d of one group (with nonzeros: and zeros as padding, given in numbers);
    any other layer keeps its form, with the same numbers.
    Raises ModelError where the tensors are not those of the model.
    """
    if sparse not in SPARSE:
        raise ConfigError(f"sparse: found {sparse!r}, expected {' or '.join(SPARSE)}")
    model = copy.deepcopy(model)
    known: set[str] = set()
    for name, q in model.named_parameters():
        known |= {name, *(f"{name}.{part}" for part in ("U", "V", "at", "values"))}
        try:
            value = _value(tensors, name, q.shape)
        except (KeyError, RuntimeError, IndexError):
            raise ModelError(
                f"not the tensors of this model: {name} {list(q.shape)} is missing or has another shape"
            ) from None
        with torch.no_grad():
            q.copy_(value)
    if set(tensors) - known:
        raise ModelError(f"not the tensors of this model: it has no {min(set(tensors) - known)}")
    instead: dict[nn.Module, nn.Module] = {}
    for path, layer in model.named_modules():
        name = f"{path}.weight" if path else "weight"
        found = _instead(layer, name, tensors, sparse) if f"{name}.U" in tensors else None
        instead |= {} if found is None else {layer: found}
    return _replaced(model, instead)


def load(path: str | Path, model: nn.Module, sparse: str = "merged") -> nn.Module:
    """A factorised model from the file that `polyfed export --factorised` writes.

    model: a module of the architecture that was trained, such as `models.build` makes; its numbers do not matter
    sparse: as for `factorised`
    Raises ModelError where the file cannot be read or belongs to another model.
    """
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as e:
        raise ModelError(f"{path}: cannot be read as safetensors ({str(e).splitlines()[0]})") from None
    try:
        return factorised(model, tensors, sparse)
    except ModelError as e:
        raise ModelError(f"{path}: {e}") from None


@torch.no_grad()
def measure(model: nn.Module, tensors: Mapping[str, Tensor], x: Tensor, repeats: int = 15) -> dict[str, dict[str, Any]]:
    """Bytes in memory, milliseconds for the batch x and largest difference of the outputs, of every form of a model.

    model: dense, with its numbers     tensors: the same from `pack`
    Forms: "dense", "merged", and "beside" where there are nonzeros. On one thread, in turns, medians after one turn to
    warm up; the difference is relative to the largest output of the dense model.
    """
    forms = {"dense": model, "merged": factorised(model, tensors)}
    if any(name.endswith(".at") for name in tensors):
        forms["beside"] = factorised(model, tensors, "beside")
    modes, threads = {form: m.training for form, m in forms.items()}, torch.get_num_threads()
    spent: dict[str, list[float]] = {form: [] for form in forms}
    torch.set_num_threads(1)
    try:
        outputs = {form: m.eval()(x) for form, m in forms.items()}
        for _ in range(repeats):
            for form, m in forms.items():
                start = time.perf_counter()
                m(x)
                spent[form].append(1e3 * (time.perf_counter() - start))
    finally:
        torch.set_num_threads(threads)
        for form, m in forms.items():
            m.train(modes[form])
    dense = outputs["dense"]
    return {
        form: {
            "bytes": memory(m),
            "ms": median(spent[form]),
            "difference": float((outputs[form] - dense).abs().max() / dense.abs().max()),
        }
        for form, m in forms.items()
    }


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


def _instead(layer: nn.Module, name: str, tensors: Mapping[str, Tensor], sparse: str) -> nn.Module | None:
    """Return the module to run in place of a layer with factors; None: the layer itself."""
    rest = f"{name}.at" in tensors
    if rest and (sparse == "merged" or (isinstance(layer, nn.Conv2d) and not _unfolds(layer))):
        return None
    pair = _pair(layer, tensors[f"{name}.U"], tensors[f"{name}.V"])
    if pair is None or not rest:
        return pair
    assert isinstance(layer, nn.Linear | nn.Conv2d)
    return Beside(pair, layer, tensors[f"{name}.at"], tensors[f"{name}.values"])


def _unfolds(layer: nn.Conv2d) -> bool:
    """True where F.unfold takes the layer's padding."""
    return layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


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
        return hooked(by[module], module)
    for name, child in list(module._modules.items()):  # named_children() skips a layer's second place
        if child is not None:
            setattr(module, name, _replaced(child, by))
    return module
