"""Models whose layers are of low rank: tensors as few as they have numbers, and pairs of thin layers that compute
the same. Huang et al. (2023), footnote 1 and Table 9."""

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

from polyfed.algorithms._shared.lowrank import places
from polyfed.base.errors import ConfigError, ModelError, PolyfedError
from polyfed.base.typed import hooked
from polyfed.core.algorithm import Algorithm, State
from polyfed.core.messages import size
from polyfed.core.stated import Portrait
from polyfed.runs.result import Result

SPARSE = ("merged", "beside")
BATCH = 20  # samples for which an exported model is timed, as in Table 9 of FedSLR's paper


def model_of(run: Result, w: Tensor, sparse: str) -> nn.Module:
    """The module of a client's model `w` with its factors; see `Result.model`."""
    task = run.trained.task
    factors, common = _factors(run.trained.algorithm, run.kept.server)
    return factorised(task.model, pack(task.layout.named(w), task.layout.named(common), factors), sparse)


def parts_of(run: Result, client: str, named: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(a client's tensors as factors, what an export says of them), from the server's state."""
    factors, w = _factors(run.algorithm, run.kept.server)
    sheets = places(run.kept.server).items()
    common = {key: as_weight(sheet.unfold(w), named[key].shape) for key, sheet in sheets if key in factors}
    tensors = pack(named, common, factors)
    ranks = {key[:-2]: t.shape[1] for key, t in tensors.items() if key.endswith(".U")}
    layers = {key: {"rank": rank, "nonzeros": len(tensors.get(f"{key}.at", ()))} for key, rank in ranks.items()}
    return tensors, {"factorised": layers, "measured": _measured(run, client, tensors)}


def _factors(algorithm: Any, server: State) -> tuple[Mapping[str, tuple[Tensor, Tensor]], Tensor]:
    """(factors of the common model, the model)."""
    shows = algorithm.describe(server) if isinstance(algorithm, Algorithm) else Portrait()
    if shows.factors is None or shows.common is None:
        raise ConfigError(
            f"factorised: {algorithm.name} does not make low-rank models; fedslr (structure LR+S or LR+LR) and gpgd do"
        )
    return shows.factors, shows.common


def _measured(run: Result, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Bytes, milliseconds and output differences of all forms of the model for a batch of test samples."""
    try:
        model = run.model(name).to("cpu")
        x = run.federation.test.to("cpu", run.trained.task.dtype).x[:BATCH]
        forms = measure(model, tensors, x)
    except PolyfedError as e:  # as for runs from Python, whose model or data cannot be made again
        return {"missing": f"the run's model cannot be made again from its folder ({e})"}
    return {"samples": len(x), "threads": 1, "fastest": min(forms, key=lambda f: forms[f]["ms"]), "forms": forms}


def pack(
    named: Mapping[str, Tensor], common: Mapping[str, Tensor], factors: Mapping[str, tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    """The tensors of a factorised model: dense ones under their names, low-rank ones in parts where these are smaller.

    For a layer `x` that is U V + (a few nonzeros): "x.U" [d1, r], "x.V" [r, d2], and "x.at" [k] int32, "x.values" [k]
    where there are any. named: the model's parameters; common, factors: those of the low-rank model it deviates from,
    and its U, V.
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
    """A pair of thin layers and a sparse matrix S beside them: x -> U V x + S x, for convolutions of unfolded x."""

    starts: Tensor  # [o + 1] int32; S [o, i kh kw] is in compressed rows
    columns: Tensor  # [k] int32
    values: Tensor  # [k]

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
        """S, made anew."""
        # a sparse tensor can be neither copied with its module nor written, its buffers can
        return torch.sparse_csr_tensor(self.starts, self.columns, self.values, self.shape, check_invariants=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.pair(x)
        if self.window is None:
            return y + (self.matrix() @ x.reshape(-1, self.shape[1]).T).T.reshape(y.shape)
        unfolded = F.unfold(x, **self.window).transpose(0, 1).reshape(self.shape[1], -1)  # [i kh kw, batch places]
        return y + (self.matrix() @ unfolded).view(self.shape[0], len(y), *y.shape[2:]).transpose(0, 1)


def factorised(model: nn.Module, tensors: Mapping[str, Tensor], sparse: str = "merged") -> nn.Module:
    """A copy of `model` with the `tensors` of `pack`: layers that are two factors become pairs of layers.

    sparse: a layer with nonzeros beside its factors becomes one dense layer ("merged": the memory and time of that) or
    a pair and a sparse matrix ("beside": small in memory too). Layers that cannot be pairs keep their form, with the
    same numbers. Raises ModelError where the tensors are not those of the model.
    """
    if sparse not in SPARSE:
        raise ConfigError(f"sparse: found {sparse!r}, expected {' or '.join(SPARSE)}")
    model = copy.deepcopy(model)
    names: set[str] = set()
    for name, q in model.named_parameters():
        names |= {name, *(f"{name}.{part}" for part in ("U", "V", "at", "values"))}
        try:
            value = _value(tensors, name, q.shape)
        except (KeyError, RuntimeError, IndexError):
            raise ModelError(
                f"not the tensors of this model: {name} {list(q.shape)} is missing or has another shape"
            ) from None
        with torch.no_grad():
            q.copy_(value)
    if set(tensors) - names:
        raise ModelError(f"not the tensors of this model: it has no {min(set(tensors) - names)}")
    # at rank 10 beside 4 % nonzeros and batches of 20, on one thread, "beside" is 2 times as fast as dense for an mlp
    # 784-512-512, no faster for 784-200 or smaller, and half as fast for the cnn, whose input a sparse product needs
    # unfolded (benchmarks/factorised.py --layers)
    instead: dict[nn.Module, nn.Module] = {}
    for path, layer in model.named_modules():
        name = f"{path}.weight" if path else "weight"
        pair = _instead(layer, name, tensors, sparse) if f"{name}.U" in tensors else None
        instead |= {} if pair is None else {layer: pair}
    return _replaced(model, instead)


def load(path: str | Path, model: nn.Module, sparse: str = "merged") -> nn.Module:
    """A factorised model, in the architecture of `model`, from the file of `polyfed export --form factorised`.

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
    """Bytes, milliseconds for the batch x and largest relative difference of outputs, of the model in every form."""
    forms = {"dense": model, "merged": factorised(model, tensors)}
    if any(name.endswith(".at") for name in tensors):
        forms["beside"] = factorised(model, tensors, "beside")
    modes, threads = {form: m.training for form, m in forms.items()}, torch.get_num_threads()
    spent: dict[str, list[float]] = {form: [] for form in forms}
    # in turns, with medians after one turn to warm up
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
    dense, measured = outputs["dense"], dict[str, dict[str, Any]]()
    for form, m in forms.items():
        apart = float((outputs[form] - dense).abs().max() / dense.abs().max())
        measured[form] = {"bytes": memory(m), "ms": median(spent[form]), "difference": apart}
    return measured


def _value(tensors: Mapping[str, Tensor], name: str, shape: torch.Size) -> Tensor:
    """One parameter from its tensors. Raises KeyError or RuntimeError where these do not give one of this shape."""
    if f"{name}.U" not in tensors:
        if tensors[name].shape != shape:
            raise KeyError(name)
        return tensors[name]
    value = as_weight(tensors[f"{name}.U"] @ tensors[f"{name}.V"], shape)
    if f"{name}.at" in tensors:
        value = value.flatten().index_add(0, tensors[f"{name}.at"].long(), tensors[f"{name}.values"]).view(shape)
    return value


def _instead(layer: nn.Module, name: str, tensors: Mapping[str, Tensor], sparse: str) -> nn.Module | None:
    """The module to run in place of a layer with factors; None: the layer itself."""
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
    """Two layers that compute `layer` with the weight U V; None for other kinds of layers."""
    if not U.shape[1]:  # the zero matrix; layers have one channel at least
        U, V = U.new_zeros(len(U), 1), V.new_zeros(1, V.shape[1])
    r = U.shape[1]
    if isinstance(layer, nn.Linear):
        first, second = nn.Linear(layer.in_features, r, bias=False), nn.Linear(r, layer.out_features, bias=False)
        weights = V, U
    elif isinstance(layer, nn.Conv2d) and layer.groups == 1:
        # a kernel (o, i, kh, kw) whose matrix [o kh, i kw], entry [o kh' + a, i kw' + b] = w[o, i, a, b], is U V is a 1
        # x kw convolution to r channels, with the stride and padding across, and a kh x 1 one with those down
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
    second.bias = layer.bias  # pyrefly: ignore[bad-assignment]  (None is as good)
    return pair


def _replaced(module: nn.Module, by: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """The module with some of its layers replaced, wherever they are used."""
    if module in by:
        return hooked(by[module], module)
    for name, child in list(module._modules.items()):  # named_children() skips a layer's second place
        if child is not None:
            setattr(module, name, _replaced(child, by))
    return module
