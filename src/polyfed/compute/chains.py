"""A model as layers of the compiled kernel, where it is a chain of layers that the kernel knows, with or without
additions. It is found in the torch calls that a pass makes on a few samples, in training and in evaluation mode."""

from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from traceback import walk_tb
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from polyfed.compute.net import Net
from polyfed.native import ACTIVATIONS, Layer, Pair


class Unknown(Exception):
    """A pass does something that the kernel does not."""


class Call(NamedTuple):
    """One call in a pass. Value k + 1 is the result of the k-th; value 0 is the samples."""

    kind: str  # as in `FORMS`
    x: int  # the input's value
    others: tuple[int, ...]  # values that were added to it, or put behind it
    owned: tuple[int, ...]  # parameters, by their place in the model
    options: tuple[Any, ...]
    shape: tuple[int, ...]  # of one sample's result


class Recorder(TorchFunctionMode):
    """Records the calls on `x` and on their results; dropouts drop nothing. Raises Unknown for any other call."""

    def __init__(self, x: Tensor, parameters: Sequence[nn.Parameter]):
        super().__init__()
        self.calls: list[Call] = []
        self._values: list[tuple[Tensor, int]] = [(x, 0)]
        self._places = {id(q): k for k, q in enumerate(parameters)}
        self._zeros: list[Tensor] = []  # that recurrent layers begin with
        self._ends: list[tuple[Tensor, int, int]] = []  # their last steps, of which value, and layers
        self._views: list[Tensor] = []  # of values, that are no values
        self._heads: list[tuple[Tensor, int, bool]] = []  # attention by heads, of which value, whether tokens are first

    def value(self, t: Any) -> int:
        """The place of a tensor among the values so far."""
        for earlier, value in reversed(self._values):
            if earlier is t:
                return value
        raise Unknown

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in READS:
            return func(*args, **kwargs)
        if func is torch.zeros:
            self._zeros.append(func(*args, **kwargs))
            return self._zeros[-1]
        if (special := self._special(func, args, kwargs)) is not None:
            return special
        if func not in FORMS:
            raise Unknown
        kind, form = FORMS[func]
        x, *given = form(*args, **kwargs)
        if kind == "add" and id(given[0][0]) in self._places:
            return self._place(x, given[0][0], func(*args, **kwargs))
        others = tuple(map(self.value, given.pop())) if kind in ("add", "cat") else ()
        value, tensors = self.value(x), [t for t in given if isinstance(t, Tensor)]
        if any(id(t) not in self._places for t in tensors):
            raise Unknown
        out = (x if given[-1] else x.clone()) if kind == "dropout" else func(*args, **kwargs)
        if out is x:  # written over: what shares its memory is no longer what it was
            memory = out.untyped_storage().data_ptr()
            self._values = [v for v in self._values if v[0].untyped_storage().data_ptr() != memory]
        owned = tuple(self._places[id(t)] for t in tensors)
        options = tuple(o for o in given if not (o is None or isinstance(o, Tensor)))
        return self._made(Call(kind, value, others, owned, options, tuple(out.shape[1:])), out)

    def _place(self, x: Tensor, place: Tensor, out: Tensor) -> Tensor:
        """A parameter added to every sample, one row for each token."""
        if x.dim() != 3 or out is x or place.shape not in (x.shape[1:], (1, *x.shape[1:])):
            raise Unknown
        return self._made(Call("place", self.value(x), (), (self._places[id(place)],), (), tuple(out.shape[1:])), out)

    def _attend(self, q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0,
                is_causal: bool = False, **kwargs: Any) -> Tensor:  # fmt: skip
        """Queries, keys and values have to be the thirds of one value's rows, head after head."""
        if attn_mask is not None or dropout_p or is_causal or kwargs or q.dim() != 4:
            raise Unknown
        b, heads, n, d = q.shape
        memory = q.untyped_storage().data_ptr()
        owners = [found for found in self._values if found[0].untyped_storage().data_ptr() == memory]
        if not owners:
            raise Unknown
        t, value = owners[-1]
        wide, first = 3 * heads * d, t.storage_offset()
        rows = t.shape == (b, n, wide) and t.is_contiguous()
        for at, part in enumerate((q, k, v)):
            here = first + at * heads * d
            same = part.untyped_storage().data_ptr() == memory and part.shape == q.shape
            steps = zip(part.shape, part.stride(), (n * wide, d, wide, 1), strict=True)
            if not rows or not same or part.storage_offset() != here or any(n > 1 and a != b for n, a, b in steps):
                raise Unknown
        out = F.scaled_dot_product_attention(q, k, v)
        self._heads.append((out, value, False))
        return out

    def _join(self, found: tuple[Tensor, int, bool], func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Heads put together again, token by token."""
        _, value, turned = found
        out = func(x, *args, **kwargs)
        if not turned and func is Tensor.transpose and set(args) in ({1, 2}, {-2, -3}):
            self._heads.append((out, value, True))
        elif turned and func in RESHAPES and out.shape == (*x.shape[:2], x.shape[2] * x.shape[3]):
            return self._made(Call("attention", value, (), (), (x.shape[2],), tuple(out.shape[1:])), out)
        elif turned and func is Tensor.contiguous:
            self._heads.append((out, value, True))
        else:
            raise Unknown
        return out

    def _special(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call that is of no form: of recurrent layers, of attention, of views; else None."""
        if func in GATES and len(args) == 9:
            return self._recurrent(func, *args)
        if func is Tensor.__getitem__ and (found := [e for e in self._ends if e[0] is args[0]]):
            ((h, value, count),) = found
            if args[1] not in (-1, count - 1):
                raise Unknown
            return self._made(
                Call("columns", value, (), (), (self.calls[value - 1].shape[0] - 1, 1), h.shape[2:]), h[-1]
            )
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if found := [h for h in self._heads if args and h[0] is args[0]]:
            return self._join(found[0], func, *args, **kwargs)
        if func in VIEWS and (func not in FORMS or any(args[0] is v for v in self._views)):
            out = func(*args, **kwargs)
            self._views += [out] if isinstance(out, Tensor) else out
            return out
        return None

    def _made(self, call: Call, out: Tensor) -> Tensor:
        self.calls.append(call)
        self._values.append((out, len(self.calls)))
        return out

    def _recurrent(self, func: Callable[..., Any], x: Any, begin: Any, weights: Any, *how: Any) -> tuple[Tensor, ...]:
        """How: whether there are biases, layers, dropout, training, both ways, batch first."""
        (_, layers, dropout, _, both, first), value = how, self.value(x)
        begins = [begin] if isinstance(begin, Tensor) else begin
        zeros = all(any(t is z for z in self._zeros) for t in begins)
        if both or not first or dropout or not zeros or any(id(t) not in self._places for t in weights):
            raise Unknown
        out, h, *rest = func(x, begin, weights, *how)
        owned, shape = tuple(self._places[id(t)] for t in weights), tuple(out.shape[1:])
        if len(owned) % layers or len(owned) // layers not in (2, 4):
            raise Unknown
        self._made(Call("recurrent", value, (), owned, (GATES[func], layers), shape), out)
        self._ends.append((h, len(self.calls), layers))
        return out, h, *rest


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
    return input, p if training else 0.0, inplace


def _add(input: Any, other: Any, alpha: float = 1) -> tuple[Any, ...]:
    if alpha != 1:
        raise Unknown
    return input, [other]


def _cat(tensors: Sequence[Any], dim: int = 0) -> tuple[Any, ...]:
    if dim not in (1, -1):
        raise Unknown
    return tensors[0], tensors[1:]


def _columns(input: Any, at: Any) -> tuple[Any, ...]:
    """Some columns that lie side by side."""
    if input.dim() == 3 and (at := (*at, slice(None)))[0] == at[2] == slice(None) and isinstance(at[1], int):
        return input, at[1] % input.shape[1], 1
    rows, which = at
    if input.dim() != 2 or rows != slice(None) or not isinstance(which, int | slice):
        raise Unknown
    one = isinstance(which, int)
    picked = [*range(input.shape[1])][slice(which, which + 1 or None) if one else cast("slice", which)]
    if not picked or picked != [*range(picked[0], picked[-1] + 1)]:
        raise Unknown
    return input, picked[0], len(picked)


def _integers(input: Any, dtype: Any = torch.int64) -> tuple[Any, ...]:
    if dtype not in (torch.int64, torch.int32):
        raise Unknown
    return (input,)


def _table(input: Any, weight: Any, padding_idx: int | None = None, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    usual = {"max_norm": None, "norm_type": 2.0, "scale_grad_by_freq": False, "sparse": False}
    if padding_idx not in (None, -1) or usual != usual | dict(zip(usual, args, strict=False)) | kwargs:
        raise Unknown
    return input, weight, *weight.shape


def _reshape(input: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return (input,)


def _turn(input: Any, one: int, other: int) -> tuple[Any, ...]:
    if input.dim() != 3 or {one % 3, other % 3} != {1, 2}:
        raise Unknown
    return (input,)


def _convolution(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> tuple[Any, ...]:
    window = tuple(weight.shape[2:])
    even = padding == "same" and not all(n % 2 for n in window)
    if even or _set(dilation) != {1}:
        raise Unknown
    if isinstance(padding, str):
        padding = [n // 2 for n in window] if padding == "same" else 0
    return input, weight, bias, *_flat(window, padding, stride), groups


def _flat(window: Sequence[int], padding: Any, stride: Any) -> tuple[Pair, Pair, Pair]:
    """Windows, the zeros around and steps, of a row as of an image one high."""
    if len(window) == 2:
        return _pair(window), _pair(padding), _pair(stride)
    (wide,), (left,), (right,) = (n if isinstance(n, Sequence) else [n] for n in (window, padding, stride))
    return (1, wide), (0, left), (1, right)


def _groups(input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> tuple[Any, ...]:
    return input, weight, bias, num_groups, eps


def _pool(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> tuple[Any, ...]:
    if ceil_mode or return_indices or _set(dilation) != {1}:
        raise Unknown
    cell = [kernel_size] * (input.dim() - 2) if isinstance(kernel_size, int) else kernel_size
    return input, "largest", *_flat(cell, padding, kernel_size if stride is None else stride)


def _mean_pool(
    input: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False, *args: Any
) -> tuple[Any, ...]:
    if ceil_mode or _set(padding) != {0} or args[1:] not in ((), (None,)):
        raise Unknown
    return input, "mean", *_pool(input, kernel_size, stride, padding)[2:]


def _adaptive(input: Any, output_size: Any) -> tuple[Any, ...]:
    image = input.shape[2:]
    wanted = [output_size] * len(image) if isinstance(output_size, int) else output_size
    cell = [n // (m or n) for n, m in zip(image, wanted, strict=True)]
    if any(n % (m or n) for n, m in zip(image, wanted, strict=True)):
        raise Unknown
    return input, "mean", *_flat(cell, 0 if len(cell) == 2 else [0], cell)


def _mean(input: Any, dim: Any, keepdim: bool = False) -> tuple[Any, ...]:
    places = [n % input.dim() for n in (dim if isinstance(dim, Sequence) else [dim])]
    if input.dim() == 3 and places == [1] and not keepdim:
        return input, "tokens"
    if input.dim() < 3 or sorted(places) != [*range(2, input.dim())]:
        raise Unknown
    return _adaptive(input, 1)


_tensor: Any = Tensor
READS: set[Any] = {  # of a tensor's form, which say nothing of its numbers
    *(getattr(_tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device")),
    Tensor.size,
    Tensor.dim,
    Tensor.is_floating_point,
}
GATES = {torch.gru: 3, torch.lstm: 4}
RESHAPES: set[Any] = {torch.flatten, Tensor.flatten, Tensor.reshape, Tensor.view}
VIEWS: set[Any] = {*RESHAPES, Tensor.transpose, Tensor.permute, Tensor.unbind, Tensor.chunk}
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
    **dict.fromkeys((torch.transpose, Tensor.transpose), ("turn", _turn)),
    Tensor.__getitem__: ("columns", _columns),
    **dict.fromkeys((Tensor.long, Tensor.int, Tensor.to), ("integers", _integers)),
    F.embedding: ("table", _table),
    torch.cat: ("cat", _cat),
    **dict.fromkeys((F.conv1d, F.conv2d), ("convolution", _convolution)),
    F.group_norm: ("groups", _groups),
    **dict.fromkeys((F.max_pool1d, F.max_pool2d), ("pool", _pool)),
    **dict.fromkeys((F.avg_pool1d, F.avg_pool2d), ("pool", _mean_pool)),
    **dict.fromkeys((F.adaptive_avg_pool1d, F.adaptive_avg_pool2d), ("pool", _adaptive)),
    **dict.fromkeys((torch.mean, Tensor.mean), ("pool", _mean)),
}


def known(net: Net, sample: torch.Size) -> list[Layer] | str:
    """The layers of a task's model on samples of this shape, or the first that is unknown ("": another reason)."""
    if not all(q.requires_grad for q in net.model.parameters()):
        return ""
    try:
        trained, evaluated = (_calls(net, sample, training) for training in (True, False))
        if [_plain(c) for c in trained] != [_plain(c) for c in evaluated]:
            return ""
        try:
            return _Chain(trained, tuple(sample)).layers
        except Unknown as first:
            try:
                return _Images(trained, tuple(sample)).layers
            except Unknown as e:
                return _unknown(net, e) or _unknown(net, first)
    except Unknown as e:
        return _unknown(net, e)
    except Exception:  # of the model's own on samples of zeros, which it need not take
        return ""


def _unknown(net: Net, e: Unknown) -> str:
    """The layer at which a pass or its reading ended, as `2 (BatchNorm2d)`, or what the pass did between layers."""
    model, inside = net.workspace(True)[0], [frame.f_locals for frame, _ in walk_tb(e.__traceback__)]
    modules = [at["self"] for at in inside if isinstance(at.get("self"), nn.Module)]
    calls, did = ([at[name] for at in inside if name in at] for name in ("call", "func"))
    if not modules and calls:
        owned = [name.rpartition(".")[0] for name, q in model.named_parameters() if q.requires_grad]
        if not calls[-1].owned:
            return f"{calls[-1].kind} in its place"
        modules = [model.get_submodule(owned[calls[-1].owned[0]])]
    name = next((name for name, m in model.named_modules() if modules and m is modules[-1]), "")
    return f"{name} ({type(modules[-1]).__name__})" if name else getattr(did[-1], "__name__", "") if did else ""


def _calls(net: Net, sample: torch.Size, training: bool) -> list[Call]:
    module, parameters = net.workspace(training)
    x = torch.zeros(3 if training else 2, *sample, dtype=torch.int64 if net.integers else net.dtype)
    with Recorder(x, parameters) as recorder:
        end = recorder.value(module(x))
    calls = recorder.calls
    inside = sorted(calls, key=lambda c: c.kind != "place")  # a module's own parameters come before its layers'
    if end != len(calls) or [k for c in inside for k in c.owned] != [*range(len(parameters))]:
        raise Unknown
    return calls


def _plain(call: Call) -> Call:
    """The call without the share that it drops."""
    return call._replace(options=()) if call.kind == "dropout" else call


Made = list[tuple[Layer, int | None]]  # parts of a row, each with the parameter that is its table


class _Chain:
    """The layers that calls amount to. Raises Unknown where they are no chain."""

    def __init__(self, calls: list[Call], sample: tuple[int, ...]):
        self.layers: list[Layer] = []
        self._shape = sample
        begin = self._front(calls)
        ends = [-1] * begin + [len(self.layers)]  # layers that each value is the result of
        needed = {min(c.x, *c.others) for c in calls[begin:] if c.kind == "add"}
        for k, call in enumerate(calls[begin:], begin):
            self._kept = len(self.layers) in {ends[v] for v in needed if v <= k}
            if max(call.x, *call.others, -1) != k:
                raise Unknown
            if call.kind == "add":
                self._add(ends[min(call.x, *call.others)], call)
            else:
                self._take(call)
            self._shape = call.shape
            ends.append(len(self.layers))
        last = self.layers[-1]
        if last.operation != "linear" or last.window != (0, 0) or last.bent:
            raise Unknown

    def _front(self, calls: list[Call]) -> int:
        """Layers that make a row of columns of samples and of tables; returns the number of their calls."""
        if len(self._shape) != 1:
            return 0
        n, begin, shapes = self._shape[0], 0, [self._shape, *(c.shape for c in calls)]
        plain: Made = [(_as_they_are(0, n, n), None)]
        values, integers = [plain], set[int]()
        for k, call in enumerate(calls):
            parts = values[call.x]
            made: Made
            (first, *_), raw = parts[0][0].columns, len(parts) == 1 and parts[0][1] is None
            if call.kind == "columns" and raw:
                made = [(_as_they_are(first + call.options[0], call.options[1], n), None)]
            elif call.kind == "integers" and raw:
                made = parts
            elif call.kind == "table" and raw:
                rows, d = call.options
                table = Layer(d, rows, False, operation="table", columns=(first, parts[0][0].inputs, n))
                made = [(table, call.owned[0])]
            elif call.kind == "cat" and len(call.shape) == 1 and not integers & {call.x, *call.others}:
                made = [part for v in (call.x, *call.others) for part in values[v]]
            elif call.kind == "reshape" and call.shape == (prod(shapes[call.x]),):
                made = parts
            else:
                break
            if call.kind == "integers" or (call.x in integers and call.kind in ("columns", "reshape")):
                integers.add(k + 1)
            values.append(made)
            begin, self._shape = k + 1, call.shape
        tables = [owned for _, owned in values[begin] if owned is not None]
        if begin in integers or len(self._shape) != 1 or tables != [*range(sum(c.kind == "table" for c in calls))]:
            raise Unknown
        self.layers = [] if values[begin] == plain else [part for part, _ in values[begin]]
        return begin

    def _take(self, call: Call) -> None:
        kind, owned, rows = call.kind, len(call.owned), len(self._shape) == 1
        if kind == "convolution":
            self._convolve(call)
        elif kind == "pool":
            what, cell, around, step = call.options if len(call.options) == 4 else ("mean", (), (), ())
            if what != "largest" or around != (0, 0) or step != cell or len(self._shape) != 3:
                raise Unknown
            self._on_images(pool=cell)
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
            kind += " tanh" if call.options == ("tanh",) else ""
            if kind not in ACTIVATIONS:
                raise Unknown
            self._bend(activation=kind)

    def _add(self, skip: int, call: Call) -> None:
        if not 0 <= skip < len(self.layers) or self.layers[skip].window != (0, 0) or call.shape != self._shape:
            raise Unknown
        if call.shape != (self.layers[skip].inputs,):
            raise Unknown
        self._bend(skip=skip)

    def _bend(self, **fields: Any) -> None:
        """Add an activation, dropout or addition to the layer below, or to a new one where something lies between."""
        last = self.layers[-1] if self.layers else None
        if len(self._shape) != 1:
            self._on_images(**fields)
            return
        if last is None or last.window != (0, 0) or last.columns[2] or self._kept or not last.free([*fields]):
            width = self._shape[0]
            self.layers.append(Layer(width, width, False, operation="same", weight=False))
        self.layers[-1] = self.layers[-1]._replace(**fields)

    def _convolve(self, call: Call) -> None:
        window, around, step, groups = call.options
        if (
            len(self._shape) != 3 or groups != 1 or step != (1, 1) or any(n.window == (0, 0) for n in self.layers)
        ):  # behind another layer
            raise Unknown
        channels, *image = self._shape
        layer = Layer(channels, call.shape[0], len(call.owned) == 2, "", window, around, _pair(image))
        self.layers.append(layer)

    def _on_images(self, **fields: Any) -> None:
        """Add a convolution's activation or its pooling, in either order."""
        last = self.layers[-1]
        whole = len(self._shape) == 3 and last.window != (0, 0) and not self._kept
        if not whole or fields.get("activation", "ReLU") not in ("ReLU", "Tanh", "Sigmoid"):
            raise Unknown
        if not {"activation", "pool"} >= fields.keys() or any(
            getattr(last, k) != getattr(Layer(1, 1, True), k) for k in fields
        ):
            raise Unknown
        self.layers[-1] = last._replace(**fields)


class _Images(_Chain):
    """The layers that calls amount to on images as rows of channels, and then on rows; a value may be taken twice."""

    def __init__(self, calls: list[Call], sample: tuple[int, ...]):
        uses = Counter(v for c in calls for v in (c.x, *c.others))
        ends, shapes, calls = self._begin(calls, sample, uses[0] == 1)
        since = 0  # the value from which on tokens come first
        for call in calls:
            made = len(self.layers)
            if min(call.x, *call.others, len(shapes)) < since:
                raise Unknown
            if call.kind == "turn":
                if self._tokens or len(shapes[call.x]) != 2:
                    raise Unknown
                self._tokens, since = True, len(shapes)
            below, *others = sorted((call.x, *call.others), key=ends.__getitem__, reverse=True)
            self._shape, base = shapes[below], ends[below]
            self._kept = base != made or any(uses[v] > 1 and end == made for v, end in enumerate(ends))
            if call.kind == "turn":
                pass
            elif call.kind == "add":
                if len(others) != 1 or shapes[others[0]] != call.shape or self._shape != call.shape:
                    raise Unknown
                self._bend(skip=ends[others[0]])
            else:
                self._take(call)
            if base != made and len(self.layers) > made:
                self.layers[made] = self.layers[made]._replace(base=base)
            ends.append(len(self.layers) if base == made or len(self.layers) > made else base)
            shapes.append(call.shape)
        last = self.layers[-1]
        if last.operation != "linear" or last.bent or any(n.operation == "linear" and n.base >= 0 for n in self.layers):
            raise Unknown

    def _begin(
        self, calls: list[Call], sample: tuple[int, ...], once: bool
    ) -> tuple[list[int], list[tuple[int, ...]], list[Call]]:
        """Take samples, or a table of them: the layers and shapes of the values so far, and the calls that follow."""
        n = prod(sample)
        self._tokens = calls[0].kind in ("recurrent", "table", "linear", "norm")
        ends, shapes = [1], [sample]
        if calls[0].kind == "table" and len(sample) == 1 and once:
            rows, d = calls[0].options
            self.layers = [Layer(d, rows, False, operation="table", columns=(0, n, n), taps=1)]
            ends, shapes, calls = [0, 1], [sample, calls[0].shape], calls[1:]
        elif len(sample) in (2, 3):
            channels = sample[-1 if self._tokens else 0]
            places = (0, n // channels, n)
            self.layers = [Layer(channels, channels, False, operation="image", weight=False, columns=places,
                                 taps=int(not self._tokens))]  # fmt: skip
        else:
            raise Unknown
        return ends, shapes, calls

    def _take(self, call: Call) -> None:
        kind, rows, owned = call.kind, len(self._shape) == 1, len(call.owned)
        channels, image = self._channels(), self._image()
        if self._tokens and not rows:
            self._take_tokens(call, channels, image)
            return
        if kind == "convolution" and not rows:
            window, around, step, groups = call.options
            taps = window[1] if len(self._shape) == 2 and channels > groups else 0
            if any(a >= n for a, n in zip(around, window, strict=True)):
                raise Unknown
            self.layers.append(
                Layer(channels, call.shape[0], owned == 2, "", window, around, image, (1, 1), kind, step=step,
                      groups=groups, taps=taps)
            )  # fmt: skip
        elif kind == "groups" and not rows:
            groups, eps = call.options
            self.layers.append(Layer(channels, channels, owned == 2, operation=kind, weight=owned > 0, eps=eps,
                                     groups=groups))  # fmt: skip
        elif kind == "pool" and not rows and call.options != ("tokens",):
            what, cell, around, step = call.options
            self.layers.append(
                Layer(channels, channels, False, "", cell, around, image, (1, 1), what, False, step=step)
            )
        elif kind == "reshape" and len(self._shape) == 3 and call.shape == (channels, prod(image)):
            pass  # whose rows are the same
        elif kind == "reshape" and call.shape == (prod(self._shape),):
            if prod(image) > 1:
                (n,) = call.shape
                self.layers.append(Layer(n, n, False, operation="row", weight=False, taps=1))
        elif rows or (kind in ACTIVATIONS or kind == "GELU" or (kind == "dropout" and not call.options[0])):
            super()._take(call)
        else:
            raise Unknown

    def _take_tokens(self, call: Call, channels: int, image: Pair) -> None:
        """A call on rows of numbers, one for each token."""
        kind, owned = call.kind, len(call.owned)

        def linear(inputs: int, outputs: int, bias: bool) -> None:
            self.layers.append(Layer(inputs, outputs, bias, "", (1, 1), (0, 0), image, (1, 1), "convolution"))

        if kind == "recurrent":
            (gates, layers), h = call.options, call.shape[-1]
            for _ in range(layers):
                bias = owned == 4 * layers
                linear(channels, gates * h, bias)
                self.layers.append(Layer(gates * h, h, bias, operation=kind, groups=gates))
                channels = h
        elif kind == "linear":
            linear(channels, call.shape[-1], owned == 2)
        elif kind == "norm" and call.options[0] == (channels,):
            self.layers.append(
                Layer(channels, channels, owned == 2, operation=kind, weight=owned > 0, eps=call.options[1])
            )
        elif kind == "attention":
            n = call.shape[-1]
            self.layers.append(Layer(3 * n, n, False, operation=kind, weight=False, groups=call.options[0]))
        elif kind == "place":
            self.layers.append(Layer(channels, channels, False, operation=kind, weight=prod(image)))
        elif kind == "pool" and call.options == ("tokens",):
            self.layers.append(
                Layer(channels, channels, False, "", image, (0, 0), image, (1, 1), "mean", False, step=image)
            )
        elif kind == "columns":  # a window of one token
            at, wide = call.options[0], image[1]
            self.layers.append(Layer(channels, channels, False, "", (1, 1), (0, -at), image, (1, 1), "mean", False,
                                     step=(1, wide)))  # fmt: skip
        elif kind == "reshape" and call.shape == (prod(self._shape),):
            (n,) = call.shape
            self.layers.append(Layer(n, n, False, operation="row", weight=False))
        elif kind in ACTIVATIONS or kind == "GELU" or (kind == "dropout" and not call.options[0]):
            super()._take(call)
        else:
            raise Unknown

    def _channels(self) -> int:
        return self._shape[-1 if self._tokens else 0]

    def _image(self) -> Pair:
        if self._tokens:
            return 1, prod(self._shape[:-1])
        high, wide = (1, 1, *self._shape[1:])[-2:]
        return high, wide

    def _bend(self, **fields: Any) -> None:
        if self._kept or self.layers[-1].operation == "image" or not self.layers[-1].free([*fields]):
            width = self._channels()
            self.layers.append(Layer(width, width, False, operation="same", weight=False))
        self.layers[-1] = self.layers[-1]._replace(**fields)


def _as_they_are(first: int, count: int, of: int) -> Layer:
    return Layer(count, count, False, operation="columns", weight=False, columns=(first, count, of))


def _set(value: int | Sequence[int]) -> set[int]:
    return {value} if isinstance(value, int) else {*value}


def _pair(value: int | Sequence[int]) -> Pair:
    high, wide = (value, value) if isinstance(value, int) else value
    return high, wide
