"""A model as layers of the compiled kernel, where it is a chain of what the kernel knows, with or without additions.

It is found in what a pass does, not in how the model is written: the calls that torch's functions get on a few samples,
in training and in evaluation mode. A call that is not in `FORMS`, or on something that is not the result of one before
it, is a model that torch trains.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from polyfed.native import Layer, Pair

if TYPE_CHECKING:
    from polyfed.compute.task import Task


class Unknown(Exception):
    """A pass does what the kernel does not."""


class Call(NamedTuple):
    """One call in a pass: value k + 1 of the k-th, and 0 are the samples.

    kind: as in `FORMS`     x: the value that it took     other: the value that was added to it
    owned: the parameters that it took, by their place in the model     options: the rest
    shape: what one sample is then
    """

    kind: str
    x: int
    other: int | None
    owned: tuple[int, ...]
    options: tuple[Any, ...]
    shape: tuple[int, ...]


class Recorder(TorchFunctionMode):
    """Inside, the calls on `x` and on what comes of it; dropouts drop nothing. Raises Unknown for another one."""

    def __init__(self, x: Tensor, parameters: Sequence[nn.Parameter]):
        super().__init__()
        self.calls: list[Call] = []
        self._values: list[tuple[Tensor, int]] = [(x, 0)]
        self._places = {id(q): k for k, q in enumerate(parameters)}

    def value(self, t: Any) -> int:
        """Which of the values a tensor is now."""
        for seen, value in reversed(self._values):
            if seen is t:
                return value
        raise Unknown

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in READS:
            return func(*args, **kwargs)
        if func not in FORMS:
            raise Unknown
        kind, form = FORMS[func]
        x, *given = form(*args, **kwargs)
        other = self.value(given.pop()) if kind == "add" else None
        value, tensors = self.value(x), [t for t in given if isinstance(t, Tensor)]
        if any(id(t) not in self._places for t in tensors):
            raise Unknown
        out = (
            x
            if func is F.dropout and kwargs.get("inplace")
            else x.clone()
            if func is F.dropout
            else func(*args, **kwargs)
        )
        if out is x:  # written over: what shares its memory is no longer what it was
            memory = out.untyped_storage().data_ptr()
            self._values = [v for v in self._values if v[0].untyped_storage().data_ptr() != memory]
        owned = tuple(self._places[id(t)] for t in tensors)
        options = tuple(o for o in given if not (o is None or isinstance(o, Tensor)))
        self.calls.append(Call(kind, value, other, owned, options, tuple(out.shape[1:])))
        self._values.append((out, len(self.calls)))
        return out


def _linear(input: Any, weight: Any, bias: Any = None) -> tuple[Any, ...]:
    return input, weight, bias


def _norm(
    input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> tuple[Any, ...]:
    return input, weight, bias, tuple(normalized_shape), eps


def _bend(input: Any, inplace: bool = False) -> tuple[Any, ...]:
    return (input,)


def _gelu(input: Any, approximate: str = "none") -> tuple[Any, ...]:
    return input, approximate


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> tuple[Any, ...]:
    return input, p if training else 0.0


def _add(input: Any, other: Any, alpha: float = 1) -> tuple[Any, ...]:
    if alpha != 1:
        raise Unknown
    return input, other


def _reshape(input: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return (input,)


def _convolution(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[Any, ...]:
    window = tuple(weight.shape[2:])
    even = padding == "same" and not all(n % 2 for n in window)
    if even or groups != 1 or _pair(stride) != (1, 1) or _pair(dilation) != (1, 1):
        raise Unknown
    if isinstance(padding, str):
        padding = [n // 2 for n in window] if padding == "same" else 0
    return input, weight, bias, window, _pair(padding)


def _pool(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> tuple[Any, ...]:
    cell = _pair(kernel_size)
    plain = not ceil_mode and not return_indices and (stride is None or _pair(stride) == cell)
    if not plain or _pair(padding) != (0, 0) or _pair(dilation) != (1, 1):
        raise Unknown
    return input, cell


_tensor: Any = Tensor
READS: set[Any] = {  # of a tensor's form, which say nothing of its numbers
    *(getattr(_tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device")),
    Tensor.size,
    Tensor.dim,
    Tensor.is_floating_point,
}
# torch's functions: what each is here, and (its arguments) -> (input, tensors, options)
FORMS: dict[Callable[..., Any], tuple[str, Callable[..., tuple[Any, ...]]]] = {
    F.linear: ("linear", _linear),
    F.layer_norm: ("norm", _norm),
    F.gelu: ("GELU", _gelu),
    F.dropout: ("dropout", _dropout),
    **dict.fromkeys((F.relu, torch.relu, Tensor.relu), ("ReLU", _bend)),
    **dict.fromkeys((torch.tanh, Tensor.tanh), ("Tanh", _bend)),
    **dict.fromkeys((torch.sigmoid, Tensor.sigmoid), ("Sigmoid", _bend)),
    F.silu: ("SiLU", _bend),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.add_), ("add", _add)),
    **dict.fromkeys((torch.flatten, Tensor.flatten, Tensor.unflatten), ("reshape", _reshape)),
    F.conv2d: ("convolution", _convolution),
    F.max_pool2d: ("pool", _pool),
}


def known(task: "Task", sample: torch.Size) -> list[Layer] | None:
    """The layers of a task's model on samples of this shape; None where it is no chain, or its parameters lie in
    another order than their layers."""
    if not all(q.requires_grad for q in task.model.parameters()):
        return None
    try:
        trained, evaluated = (_calls(task, sample, training) for training in (True, False))
        if [_plain(c) for c in trained] != [_plain(c) for c in evaluated]:
            return None
        return _Chain(trained, tuple(sample)).layers
    except Exception:  # of the model's own on samples of ones, which it need not take
        return None


def _calls(task: "Task", sample: torch.Size, training: bool) -> list[Call]:
    module, parameters = task.workspace(training)
    x = torch.ones(3 if training else 2, *sample, dtype=task.dtype)
    with Recorder(x, parameters) as recorder:
        end = recorder.value(module(x))
    calls = recorder.calls
    if end != len(calls) or [k for c in calls for k in c.owned] != [*range(len(parameters))]:
        raise Unknown
    return calls


def _plain(call: Call) -> Call:
    """Without the share that is dropped."""
    return call._replace(options=()) if call.kind == "dropout" else call


class _Chain:
    """The layers that calls make. Raises Unknown where they make none."""

    def __init__(self, calls: list[Call], sample: tuple[int, ...]):
        self.layers: list[Layer] = []
        self._shape = sample
        ends = [0]  # layers that each value is the result of
        needed = {min(c.x, c.other) for c in calls if c.other is not None}
        for k, call in enumerate(calls):
            self._kept = len(self.layers) in {ends[v] for v in needed if v <= k}
            if max(call.x, call.other or 0) != k:
                raise Unknown
            if call.other is not None:
                self._add(ends[min(call.x, call.other)], call)
            else:
                self._take(call)
            self._shape = call.shape
            ends.append(len(self.layers))
        last = self.layers[-1]
        if last.operation != "linear" or last.window != (0, 0) or last.bent:
            raise Unknown

    def _take(self, call: Call) -> None:
        kind, owned, rows = call.kind, len(call.owned), len(self._shape) == 1
        if kind == "convolution":
            self._convolve(call)
        elif kind == "pool":
            self._on_images(pool=call.options[0])
        elif kind == "reshape":
            image = not self.layers and len(call.shape) == 3
            if prod(call.shape) != prod(self._shape) or not (image or len(call.shape) == 1):
                raise Unknown
        elif kind == "dropout":
            if call.options[0]:
                self._bend(drop=float(call.options[0]))
        elif kind == "linear" and rows:
            self.layers.append(Layer(self._shape[0], call.shape[0], owned == 2))
        elif kind == "norm" and rows and call.options[0] == self._shape:
            (n,), eps = self._shape, call.options[1]
            self.layers.append(Layer(n, n, owned == 2, operation="norm", weight=owned > 0, eps=eps))
        elif kind in ("linear", "norm"):
            raise Unknown
        else:
            self._bend(activation=kind + (" tanh" if call.options == ("tanh",) else ""))

    def _add(self, skip: int, call: Call) -> None:
        if skip == len(self.layers) or self.layers[skip].window != (0, 0) or call.shape != self._shape:
            raise Unknown
        if call.shape != (self.layers[skip].inputs,):
            raise Unknown
        self._bend(skip=skip)

    def _bend(self, **what: Any) -> None:
        """Activation, dropout or an addition: with the layer below, or one of its own where something lies between."""
        last = self.layers[-1] if self.layers else None
        if len(self._shape) != 1:
            self._on_images(**what)
            return
        if last is None or last.window != (0, 0) or self._kept or not last.free([*what]):
            width = self._shape[0]
            self.layers.append(Layer(width, width, False, operation="same", weight=False))
        self.layers[-1] = self.layers[-1]._replace(**what)

    def _convolve(self, call: Call) -> None:
        window, around = call.options
        if len(self._shape) != 3 or any(n.window == (0, 0) for n in self.layers):
            raise Unknown
        channels, *image = self._shape
        layer = Layer(channels, call.shape[0], len(call.owned) == 2, "", window, around, _pair(image))
        self.layers.append(layer)

    def _on_images(self, **what: Any) -> None:
        """A convolution's activation, and what is pooled, in either order."""
        last = self.layers[-1]
        whole = len(self._shape) == 3 and last.window != (0, 0) and not self._kept
        if not whole or what.get("activation", "ReLU") not in ("ReLU", "Tanh", "Sigmoid"):
            raise Unknown
        if not {"activation", "pool"} >= what.keys() or any(
            getattr(last, k) != getattr(Layer(1, 1, True), k) for k in what
        ):
            raise Unknown
        self.layers[-1] = last._replace(**what)


def _pair(value: int | Sequence[int]) -> Pair:
    high, wide = (value, value) if isinstance(value, int) else value
    return high, wide
