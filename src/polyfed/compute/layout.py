"""nn.Module <-> flat vector. `w: [p]`; layers are zero-copy views of it, with or without a leading client axis."""

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from polyfed.base.errors import ModelError
from polyfed.base.typed import BatchNorm, InstanceNorm
from polyfed.compute.batchnorm import Statistics

NORMS = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, BatchNorm, InstanceNorm, Statistics)


def is_norm(module: nn.Module) -> bool:
    """True for a normalisation layer: torch's, or another library's by its name, such as `LlamaRMSNorm`."""
    return isinstance(module, NORMS) or type(module).__name__.endswith(("RMSNorm", "LayerNorm"))


class Entry(NamedTuple):
    name: str
    shape: tuple[int, ...]  # as the module sees it
    channels_last: bool  # convolutions on CPU run markedly faster so

    @property
    def size(self) -> int:
        return prod(self.shape)


def last(module: nn.Module) -> nn.Module:
    """The last layer of a module, in the order in which it lists them."""
    return [m for m in module.modules() if next(m.children(), None) is None][-1]


class Layout:
    """The place of each trainable parameter of a module in the flat vector `w: [p]`."""

    def __init__(self, module: nn.Module):
        self.entries = [
            Entry(name, tuple(p.shape), p.dim() == 4) for name, p in module.named_parameters() if p.requires_grad
        ]
        self.sizes = [e.size for e in self.entries]
        self.p = sum(self.sizes)
        owners = [
            m for m in module.modules() if not is_norm(m) and any(p.requires_grad for p in m.parameters(recurse=False))
        ]
        of = {id(p): name for name, p in module.named_parameters()}
        self._head = {of[id(p)] for m in owners[-1:] for p in m.parameters(recurse=False)}
        end = last(module)
        self.end, self._linear = str(end), owners[-1:] == [end] and isinstance(end, nn.Linear)
        moving = {of[id(q)] for m in module.modules() if isinstance(m, Statistics) for q in m.statistics.values()}
        self.statistics: Tensor | None = (
            None  # [k] places of what is no parameter, but a BatchNorm's running statistics
        )
        if moving:
            places = torch.arange(self.p).split_with_sizes(self.sizes)
            self.statistics = torch.cat([at for at, e in zip(places, self.entries, strict=True) if e.name in moving])
        self._norm = {of[id(p)] for m in module.modules() if is_norm(m) for p in m.parameters(recurse=False)}

    def views(self, w: Tensor) -> list[Tensor]:
        """The parameters as views of `w`: [..., p] -> one [..., *shape] per parameter, in the module's order."""
        lead = w.shape[:-1]
        return [self._view(t, e, lead) for t, e in zip(w.split_with_sizes(self.sizes, -1), self.entries, strict=True)]

    @staticmethod
    def _view(t: Tensor, e: Entry, lead: torch.Size) -> Tensor:
        if not e.channels_last:
            return t if len(e.shape) == 1 else t.view(lead + e.shape)
        o, i, kh, kw = e.shape
        return t.view(*lead, o, kh, kw, i).movedim(-1, -3)

    def named(self, w: Tensor) -> dict[str, Tensor]:
        """`views` by parameter name."""
        return {e.name: v for e, v in zip(self.entries, self.views(w), strict=True)}

    def flatten(self, module: nn.Module) -> Tensor:
        """A copy of the module's trainable parameters as one vector [p]."""
        first = next(p for p in module.parameters() if p.requires_grad)
        w = torch.empty(self.p, dtype=first.dtype, device=first.device)
        parameters = dict(module.named_parameters())
        for name, view in self.named(w).items():
            view.copy_(parameters[name].detach())
        return w

    def load_(self, module: nn.Module, w: Tensor) -> nn.Module:
        """Copy `w: [p]` into the module's parameters; returns the module."""
        parameters = dict(module.named_parameters())
        with torch.no_grad():
            for name, view in self.named(w).items():
                parameters[name].copy_(view)
        return module

    def mask(self, *layers: str) -> Tensor:
        """[p] bool: True where a parameter belongs to one of `layers`. Raises KeyError for an unknown layer.

        Each is "head" (the last layer with weights), "body" (all but the head), "norm" (normalisation layers), or the
        beginning of a parameter's name ("conv1", "0.weight").
        """
        parts: list[Tensor] = []
        for layer in layers:
            if layer not in ("head", "body", "norm") and not any(self._within(e.name, layer) for e in self.entries):
                raise KeyError(f"no layer {layer!r}; the model has {', '.join(e.name for e in self.entries)}")
        for e in self.entries:
            inside = any(
                (e.name in self._head)
                if layer == "head"
                else (e.name not in self._head)
                if layer == "body"
                else (e.name in self._norm)
                if layer == "norm"
                else self._within(e.name, layer)
                for layer in layers
            )
            parts.append(torch.full((e.size,), inside))
        return torch.cat(parts)

    def head(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """The last layer's trained weights [..., C, d] and bias [..., C] as views of `w: [..., p]`; ModelError if
        none."""
        named = self.named(w)
        parts = {name.rpartition(".")[2]: named[name] for name in self._head if name in named}
        if not self._linear or parts.keys() != {"weight", "bias"}:
            raise ModelError(f"model: its last layer is {self.end}, expected a trained linear layer with a bias")
        return parts["weight"], parts["bias"]

    @staticmethod
    def _within(name: str, layer: str) -> bool:
        return name == layer or name.startswith(layer + ".")
