"""Adapters: a small part of a pretrained model is trained, the rest is frozen, and clients exchange some thousand
numbers. LoRA (Hu et al., 2022) adds c B A to a frozen weight. A is frozen too, with orthonormal rows: ||B A - B' A||
= ||B - B'||, so that means and distances of clients' vectors are those of the updates. "factors" trains A, as the
paper does."""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyfed.base.arguments import checked
from polyfed.base.errors import ConfigError, ModelError, closest
from polyfed.base.randomness import generator, key_of
from polyfed.base.typed import named_modules
from polyfed.compute.layout import is_norm
from polyfed.compute.narrow import HALF, placed


class Beside(nn.Module):
    """A frozen linear layer with something trained beside it."""

    base: nn.Linear
    linear: bool = True  # True: the weight is linear in the trained parameters, where A is frozen

    @property
    def weight(self) -> Tensor:
        """[m, k] of one layer that computes the same, for modules that read it instead of calling the layer."""
        raise NotImplementedError

    @property
    def bias(self) -> Tensor | None:
        """[m], or None."""
        return self.base.bias

    def merged(self) -> nn.Linear:
        """One linear layer that computes the same."""
        layer = copy.deepcopy(self.base)  # its new numbers are of the wider type of both
        for name, t in (("weight", self.weight), ("bias", self.bias)):
            if t is not None:
                setattr(layer, name, nn.Parameter(t.detach(), requires_grad=False))
        return layer


class LoRA(Beside):
    """A linear layer with an update beside it, which begins at 0: y = base(x) + scale (R x + B (A x)).

    base: [m, k], frozen; A: [r, k]; B: [m, r]; R: [m, k], where a method merges updates.
    """

    def __init__(self, base: nn.Linear, a: Tensor, scale: float, train: str):
        super().__init__()
        factors = train != "chart"
        self.base, self.scale = base, scale
        self.A = nn.Parameter(a.to(base.weight.device, _wide(base.weight.dtype)), requires_grad=factors)
        self.B = nn.Parameter(self.A.new_zeros(base.out_features, len(a)))
        self.R = nn.Parameter(self.A.new_zeros(base.out_features, base.in_features)) if train == "residual" else None

    def forward(self, x: Tensor) -> Tensor:
        update = F.linear(F.linear(x, self.A), self.B)
        return self.base(x) + self.scale * (update if self.R is None else update + F.linear(x, self.R))

    @property
    def weight(self) -> Tensor:
        """[m, k] with the update."""
        update = self.B @ self.A
        return self.base.weight + self.scale * (update if self.R is None else update + self.R)


class DoRA(Beside):
    """A linear layer in lengths g [m] and directions: its weight has the rows of V = W + scale B A, scaled to g.

    Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation" (2024), equation 5. The lengths of V are derived too,
    where the paper's section 4.3 takes them for constants: methods get the gradient of the loss.
    """

    linear = False

    def __init__(self, base: nn.Linear, a: Tensor, scale: float):
        super().__init__()
        self.base, self.scale = base, scale
        self.A = nn.Parameter(a.to(base.weight.device, _wide(base.weight.dtype)))
        self.B = nn.Parameter(self.A.new_zeros(base.out_features, len(a)))
        self.g = nn.Parameter(self.lengths(self.A, self.B).detach())

    def lengths(self, A: Tensor, B: Tensor) -> Tensor:
        """[..., m] lengths of the rows of V, without V. A: [..., r, k]; B: [..., m, r]"""
        W = self.base.weight.to(A.dtype)
        cross, own = W @ A.mT, B @ (A @ A.mT)
        squares = W.square().sum(1) + self.scale * ((2 * cross + self.scale * own) * B).sum(-1)
        return squares.clamp(min=torch.finfo(A.dtype).tiny).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        update = self.scale * F.linear(F.linear(x, self.A), self.B)
        return self.scaled(self.base(x), update, self.g / self.lengths(self.A, self.B))

    def scaled(self, base: Tensor, update: Tensor, by: Tensor) -> Tensor:
        """The outputs of base and update with scaled rows. At by = 1 they are the base's, to the bit."""
        plain = base if self.base.bias is None else base - self.base.bias.to(base.dtype)
        return base + (by - 1) * plain + by * update

    @property
    def weight(self) -> Tensor:
        """[m, k] with the update, in the lengths g."""
        V = self.base.weight + self.scale * (self.B @ self.A)
        return V * (self.g / self.lengths(self.A, self.B))[:, None]


class IA3(Beside):
    """A linear layer whose outputs [m], or inputs [k], are multiplied by `l`, which begins at 1. Liu et al. (2022)."""

    def __init__(self, base: nn.Linear, inputs: bool):
        super().__init__()
        self.base, self.inputs = base, inputs
        self.l = nn.Parameter(base.weight.new_ones(base.weight.shape[int(inputs)], dtype=_wide(base.weight.dtype)))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x * self.l) if self.inputs else self.base(x) * self.l

    @property
    def weight(self) -> Tensor:
        """[m, k], multiplied."""
        return self.base.weight * (self.l if self.inputs else self.l[:, None])

    @property
    def bias(self) -> Tensor | None:
        """[m], multiplied with the outputs, or None."""
        return self.base.bias if self.inputs or self.base.bias is None else self.base.bias * self.l


@dataclass(frozen=True)
class Adapter:
    """An adapter by its words, `lora:r=8,targets=query+value`."""

    name: str
    options: Mapping[str, str]

    @classmethod
    def read(cls, text: str) -> "Adapter":
        """Read the words. Raises ConfigError for unknown ones."""
        name, _, rest = text.partition(":")
        if name not in KINDS:
            raise ConfigError(f"adapter: found {name!r}{closest(name, KINDS)}, expected {', '.join(KINDS)}")
        pairs = [part.partition("=") for part in rest.split(",") if part]
        if name == "last" and rest:
            pairs = [("k", "=", rest)]
        options = {key.strip(): value.strip() for key, _, value in pairs}
        for key, value in options.items():
            if key not in KINDS[name]:
                choices = ", ".join(KINDS[name]) or "none"
                raise ConfigError(f"adapter: {name} has no option {key!r}{closest(key, KINDS[name])}; it has {choices}")
            fits = KINDS[name][key]
            if not fits(value):
                raise ConfigError(f"adapter.{key}: found {value!r}, expected {EXPECTED[key]}")
        if name == "last" and "k" not in options:
            raise ConfigError("adapter: found 'last', expected last:K, the number of layers to train")
        return cls(name, options)


def _count(text: str) -> bool:
    return text.isdecimal() and 1 <= int(text) <= 1 << 20


def _positive(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


EXPECTED = {
    "r": "an integer of at least 1",
    "k": "an integer of at least 1",
    "targets": "names of layers, or their ends, such as query+value",
    "train": "chart (B), factors (A and B) or residual (these, and a matrix to merge updates into)",
    "alpha": "a positive number",
    "scale": "lora (alpha / r) or rs (alpha / sqrt r)",
    "inputs": "names of layers, or their ends, such as output.dense",
}
KINDS: dict[str, dict[str, Callable[[str], bool]]] = {
    "lora": {
        "r": _count,
        "targets": bool,
        "train": lambda text: text in ("chart", "factors", "residual"),
        "alpha": _positive,
        "scale": lambda text: text in ("lora", "rs"),
    },
    "dora": {"r": _count, "targets": bool, "alpha": _positive, "scale": lambda text: text in ("lora", "rs")},
    "probe": {},
    "biases": {},
    "norms": {},
    "last": {"k": _count},
    "ia3": {"targets": bool, "inputs": bool},
}


@checked
def adapted(model: nn.Module, adapter: str, seed: int = 0) -> nn.Module:
    """A copy of a model of which only an adapter and the last layer, the head, are trained.

    Parameters
    ----------
    model : nn.Module
        Stays as it is.
    adapter : str
        "probe": the head alone. "lora:r=8,targets=query+value": updates of rank r, or a layer's width where that is
        less, beside the linear layers whose names end so; without targets beside all but the head. They are B A with A
        frozen and orthonormal; with `train=factors` they are scale B A with both trained, scale = alpha / r, or with
        `scale=rs` alpha / sqrt r; `train=residual` puts a matrix beside these, into which FedEx-LoRA and FLoRA merge
        updates. "dora:r=8,targets=query+value": these updates, and the lengths of the weights' rows, which are trained
        apart from their directions; methods that compare clients refuse it, as it is not linear.
        "ia3:targets=key+value,inputs=output.dense": factors on the outputs of the former and on the inputs of the
        latter; without either, on the outputs of all but the head. "biases": all biases (BitFit). "norms": weights and
        biases of normalisation layers. "last:K": the last K layers with weights.
    seed : int
        A follows from it and the layer's name: the same at every client.

    Returns
    -------
    nn.Module
        Everything else is frozen, in the memory of `model`; in half precision it stays so, and computes in float32.
    """
    form = Adapter.read(adapter)
    same = {id(q): nn.Parameter(q.detach(), q.requires_grad) for q in model.parameters() if type(q) is nn.Parameter}
    model = copy.deepcopy(model, same)
    owners = [name for name, m in named_modules(model) if any(True for _ in m.parameters(recurse=False))]
    if not owners:
        raise ModelError(f"{type(model).__name__} has no parameters, so there is nothing to adapt")
    if is_adapted(model):
        raise ModelError(f"{type(model).__name__} has an adapter; expected the model that it was put into")
    head = owners[-1]
    model.requires_grad_(False)
    if form.name in ("lora", "dora"):
        _add_lora(model, form, head, seed)
    if form.name == "ia3":
        ends = {key: _named(model, form.options, key, head) for key in ("targets", "inputs")}
        _put(model, {name: IA3(base, key == "inputs") for key, layers in ends.items() for name, base in layers.items()})
    for name in owners[-int(form.options["k"]) :] if form.name == "last" else [head]:
        model.get_submodule(name).requires_grad_(True)
    for m in model.modules():
        for name, q in m.named_parameters(recurse=False):
            if (form.name == "biases" and name == "bias") or (form.name == "norms" and is_norm(m)):
                q.requires_grad_(True)
    for q in model.parameters():
        if q.requires_grad:
            q.data = q.data.clone()
    half = any(q.dtype in HALF for q in model.parameters())
    return placed(model, None, torch.float32) if half else model


def is_adapted(model: nn.Module) -> bool:
    """True for a model with updates beside its layers."""
    return any(isinstance(m, Beside) for m in model.modules())


def _named(model: nn.Module, options: Mapping[str, str], key: str, head: str) -> dict[str, nn.Linear]:
    """The linear layers that an option names; where there are no options, "targets" are all but the head."""
    linear = {name: m for name, m in named_modules(model) if type(m) is nn.Linear and name not in ("", head)}
    if key not in options:
        return {} if key == "inputs" or "inputs" in options else linear
    ends = options[key].split("+")
    for end in ends:
        if not any(_ends(name, end) for name in linear):
            names = sorted({name.rpartition(".")[2] for name in linear})
            raise ConfigError(
                f"adapter.{key}: no linear layer ends in {end!r}{closest(end, names)}; there are {list(linear)}"
            )
    return {name: m for name, m in linear.items() if any(_ends(name, end) for end in ends)}


def _put(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Replace modules by name."""
    for name, layer in layers.items():
        where, _, last = name.rpartition(".")
        setattr(model.get_submodule(where), last, layer)


def _add_lora(model: nn.Module, form: Adapter, head: str, seed: int) -> None:
    """Put updates beside the linear layers of the model, in place."""
    options = form.options
    train, r = "factors" if form.name == "dora" else options.get("train", "chart"), int(options.get("r", "8"))
    factors = train != "chart"
    alpha = float(options.get("alpha", r))
    scale = alpha / (math.sqrt(r) if options.get("scale") == "rs" else r) if factors else 1.0
    if not factors and ("alpha" in options or "scale" in options):
        raise ConfigError("adapter: alpha and scale are for train=factors or residual; a chart has scale 1")
    updates: dict[str, nn.Module] = {}
    for name, base in _named(model, options, "targets", head).items():
        rank = min(r, base.in_features, base.out_features)
        a = _drawn(seed, name, rank, base, factors)
        updates[name] = DoRA(base, a, scale) if form.name == "dora" else LoRA(base, a, scale, train)
    _put(model, updates)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The precision to train in beside such weights: single beside half."""
    return torch.promote_types(dtype, torch.float32)


def _ends(name: str, end: str) -> bool:
    return not end or name == end or name.endswith(f".{end}")


def _drawn(seed: int, name: str, r: int, base: nn.Linear, factors: bool) -> Tensor:
    """A: [r, k] with orthonormal rows; where it is trained, uniform as a linear layer's weights begin."""
    rng, k = generator(seed, "adapter", 0, key_of(name)), base.in_features
    if factors:
        return torch.as_tensor(rng.uniform(-1, 1, (r, k)) / math.sqrt(k))
    q, upper = np.linalg.qr(rng.standard_normal((k, r)))
    return torch.as_tensor((q * np.sign(np.diag(upper))).T.copy())


@checked
def merged(model: nn.Module) -> nn.Module:
    """A copy of an adapted model without adapters: their updates are added to the weights.

    Parameters
    ----------
    model : nn.Module
        Such as `run.model(client)`; stays as it is.

    Returns
    -------
    nn.Module
        Of the form that the model had before `adapted`, with the same outputs.
    """
    model = copy.deepcopy(model)
    _put(model, {name: m.merged() for name, m in named_modules(model) if isinstance(m, Beside)})
    return model
