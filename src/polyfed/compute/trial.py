"""A trial of a model: a client's step has to be a function of (parameters, samples, key), or threads, kills and
resumes would change a run. So torch's random numbers are keyed, and anything else that changes between passes is
refused."""

import logging
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from polyfed.base.errors import ModelError
from polyfed.base.randomness import mix
from polyfed.base.typed import BatchNorm, named_modules, unwatched
from polyfed.compute.dropout import DROPOUTS, dropped, key_from

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
PASSES = 8  # of a model that draws random numbers, which may leave out other parameters in each
MODAL = ("drop", "attention", "rrelu")  # of functions that draw or do not, as they are told
APART = 1e-2  # of the largest output: more than rounding makes of a sample alone and among others
Functions = frozenset[Callable[..., Any]] | None
log = logging.getLogger("polyfed")
_generators = threading.Lock()


class Keyed(TorchDispatchMode):
    """Lets the k-th random operation draw from (key, k), whatever other threads do; `count` is the next k.

    Dropout has masks of its own (`dropout.py`); operations that are given a generator of their own are left alone.
    still: torch functions that draw nothing, which are not watched; None: unknown, so `calls` says which drew
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # or the first operation of a program loads torch's compiler, which is slow
        return False

    def __init__(self, key: int, device: torch.device, count: int = 0, still: Functions = None):
        super().__init__()
        self.key, self.count, self.drew, self.still = key, count, False, still
        self.calls = dict[Callable[..., Any] | None, bool]()  # None: outside of torch's functions
        self._dropout = _Dropout(self)
        self._inside: Callable[..., Any] | None = None
        self.generators = [torch.default_generator]
        if device.type == "cuda":
            self.generators.append(torch.cuda.default_generators[device.index])

    def __enter__(self) -> Self:
        self._dropout.__enter__()
        return super().__enter__() if self.still is None else self

    def __exit__(self, *raised: Any) -> None:  # pyrefly: ignore[bad-override]
        if self.still is None:
            super().__exit__(*raised)
        self._dropout.__exit__(*raised)

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A torch function's result, whose operations may be random but for those that are `still`."""
        if self.still is None:
            self._inside = func
            self.calls.setdefault(func, False)
            made = func(*args, **kwargs)
            self._inside = None
            return made
        if func in self.still:
            return func(*args, **kwargs)
        super().__enter__()
        try:
            return func(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        drawn = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) and kwargs.get("generator") is None
        if not drawn:
            return func(*args, **kwargs)
        self.calls[self._inside] = True
        # threads share torch's generators: each operation seeds them, draws, and puts them back as they were
        with _generators:
            before = [g.get_state() for g in self.generators]
            try:
                for g in self.generators:
                    g.manual_seed(int(mix(self.key, self.count)))
                seeded = [g.get_state() for g in self.generators]
                result = func(*args, **kwargs)
                # some operations may draw and do not: attention whose dropout is zero
                self.drew |= any(
                    not torch.equal(g.get_state(), s) for g, s in zip(self.generators, seeded, strict=True)
                )
            finally:
                for g, state in zip(self.generators, before, strict=True):
                    g.set_state(state)
        self.count += 1
        return result


class _Dropout(TorchFunctionMode):
    """The dropouts among these operations, whose masks are the same on every device and for many clients at once."""

    def __init__(self, keyed: Keyed):
        super().__init__()
        self._keyed, self._key = keyed, key_from(keyed.key)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in DROPOUTS:
            with unwatched() if self._keyed.still is None else nullcontext():
                made = dropped(func, self._key, self._keyed.count, *args, **kwargs)
            if made is not None:
                self._keyed.count, self._keyed.drew = self._keyed.count + 1, True
                return made
        return self._keyed.call(func, args, kwargs)


def reason(e: BaseException) -> str:
    """An error of the user's own code in one line, with its type where the text alone says too little."""
    text = next(iter(str(e).strip().splitlines()), "")
    return (
        text if text and isinstance(e, RuntimeError | TypeError | ValueError) else f"{type(e).__name__} {text}".strip()
    )


def still(model: nn.Module) -> list[str]:
    """Names of the frozen modules, which are in evaluation mode while the rest trains."""
    # modules whose parameters are all frozen, with everything inside, such as a backbone's dropout, and modules of
    # buffers alone, such as a BatchNorm without scale, that were given in evaluation mode
    return [
        name
        for name, m in named_modules(model)
        if not any(q.requires_grad for q in m.parameters())
        and (any(True for _ in m.parameters()) or (not m.training and any(True for _ in m.buffers())))
    ]


def check_structure(model: nn.Module, training: Callable[[nn.Module], object]) -> None:
    """Refuse models that cannot be laid out as a vector, and BatchNorm that normalises by the batch."""
    who = type(model).__name__
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, t in tensors:
        if nn.parameter.is_lazy(t):
            raise ModelError(f"{who}: {name!r} has no shape yet (a lazy layer); run the model once on a batch first")
        if t.is_meta:
            raise ModelError(f"{who}: {name!r} is on the meta device and has no values; load or initialise it first")
    if not any(q.requires_grad for q in model.parameters()):
        raise ModelError(f"{who} has no trainable parameters")
    modes = [(m, m.training) for m in model.modules()]
    training(model)
    for name, m in named_modules(model):
        if isinstance(m, BatchNorm) and (m.training or m.running_mean is None):
            why, freeze = "it has no running statistics, so that a sample's output depends on those beside it", ""
            if m.running_mean is not None:
                why = "its running statistics are not part of what clients exchange"
                freeze = ", or freeze it: requires_grad_(False) and eval()"
            raise ModelError(
                f"layer {name!r} is {type(m).__name__}: {why}; replace it by GroupNorm with "
                "polyfed.models.replace_batchnorm(model), or give it statistics that clients exchange with "
                f"polyfed.models.with_statistics(model){freeze}"
            )
    for m, mode in modes:
        m.training = mode


def train_twice(
    module: nn.Module,
    parameters: list[nn.Parameter],
    step: Callable[[], tuple[Tensor, Tensor]],
    evaluate: Callable[[], Tensor],
    who: str,
) -> tuple[bool, Functions]:
    """(whether the model draws random numbers, `Keyed.still`). Raises ModelError where no key makes it repeatable."""
    # step: one training pass -> (output, loss); evaluate: outputs in evaluation mode
    device = parameters[0].device
    outside = _outside()
    before = {name: _image(t) for name, t in _tensors(module)}
    with Keyed(0, device) as evaluated:
        first = evaluate()
    with Keyed(0, device) as keyed:
        made, loss = step()
    output = made.detach()
    _check_unchanged(module, before)
    if _outside() != outside:
        raise ModelError(f"{who} draws from Python's or numpy's global generator, which is unkeyed; draw from torch's")
    for key in range(1, PASSES if keyed.drew and not loss.requires_grad else 1):  # which may use what that one left out
        with Keyed(key, device):
            made, loss = step()
        if loss.requires_grad:
            break
    if not made.requires_grad:
        raise ModelError(f"{who}: its output does not depend on its trainable parameters (detached, or under no_grad?)")
    if not loss.requires_grad:
        raise ModelError(f"loss: it does not depend on the output of {who} (constant or detached?)")
    with Keyed(0, device) as backwards:
        grads: list[Tensor | None] = [*torch.autograd.grad(loss, parameters, allow_unused=True)]
    if not keyed.drew:
        _warn_of_unused(module, [q for q, g in zip(parameters, grads, strict=True) if g is None], who)
    if backwards.drew:
        raise ModelError(f"{who} draws random numbers in its backward pass (does it checkpoint a random layer?)")
    with Keyed(0, device):
        again = step()[0]
    with Keyed(0, device):
        last = evaluate()
    if not same(output, again.detach()) or not same(first, last):
        raise ModelError(
            f"{_culprit(module, step, device) or who} gives other outputs in a second pass on the same samples: it "
            "keeps something between passes, or draws from a generator of its own, so a run could not be repeated"
        )
    with Keyed(1, device):
        if not same(first, evaluate()):
            raise ModelError(f"{who} gives random outputs in evaluation mode; draw only where self.training is true")
    return keyed.drew or evaluated.drew, _still(keyed, evaluated)


def _still(*tried: Keyed) -> Functions:
    """Functions of which no call drew in these passes; None where something outside of functions did."""
    drew = {func for one in tried for func, some in one.calls.items() if some}
    still = {f for f in tried[0].calls if f and not any(word in f.__name__ for word in MODAL)}
    return None if None in drew else frozenset(still - drew)


def _check_unchanged(module: nn.Module, before: dict[str, Tensor]) -> None:
    """Raise ModelError for a tensor of the model that is no longer as in `before`, its image by name."""
    for name, t in _tensors(module):
        if name not in before or not same(before[name], _image(t)):
            kind = "parameter" if isinstance(t, nn.Parameter) else "buffer"
            raise ModelError(
                f"{_layer(module, name)} changes its {kind} {name.rpartition('.')[2]!r} in a forward pass, so that a "
                "client's result depends on those before it; replace it, or freeze it: requires_grad_(False) and eval()"
            )


def _warn_of_unused(module: nn.Module, unused: list[nn.Parameter], who: str) -> None:
    """Log the parameters that got no gradient."""
    if unused:
        name_of = {id(q): name for name, q in module.named_parameters()}
        named = ", ".join(repr(name_of[id(q)]) for q in unused[:3])
        more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
        log.warning("%s: the loss of the samples tried does not depend on %s%s; their gradient is 0", who, named, more)


def alone(run: Callable[[Tensor], Tensor], x: Tensor, who: str, training: bool) -> None:
    """Raise ModelError for a model that fails on one sample, or gives one an output of another shape."""
    where = "in training" if training else "in evaluation"
    together = run(x)[:1].detach()
    try:
        one = run(x[:1]).detach()
    except Exception as e:
        raise ModelError(f"{who} takes {len(x)} samples at once and fails on one {where}: {reason(e)}") from None
    if one.shape != together.shape:
        raise ModelError(
            f"{who} returns output of shape {[*one.shape]} for one sample {where}, expected {[*together.shape]} as of "
            "several; a squeeze() without an axis?"
        )
    # in evaluation other numbers are allowed
    if not training and (one - together).abs().max() > APART * together.abs().max():
        log.warning("%s: what it returns for a sample depends on those beside it, in evaluation too", who)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal, NaN included; on an accelerator, whose sums may be taken in any order, up to rounding."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.allclose(a, b, rtol=0.0 if a.device.type == "cpu" else 1e-3, atol=0.0, equal_nan=True)


def _outside() -> tuple[object, ...]:
    _, words, position, *_ = np.random.get_state()
    return random.getstate(), np.asarray(words).tobytes(), position


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_buffers()
    yield from module.named_parameters()


def _image(t: Tensor) -> Tensor:
    """A record to see whether a tensor has changed: a copy, or the sum of a frozen parameter, which may be large."""
    if isinstance(t, nn.Parameter) and not t.requires_grad:
        return t.detach().sum()
    return t.detach().clone()


def _layer(module: nn.Module, name: str) -> str:
    layer = name.rpartition(".")[0]
    kind = type(module.get_submodule(layer)).__name__
    return f"layer {layer!r} ({kind})" if layer else kind


def _culprit(module: nn.Module, step: Callable[[], object], device: torch.device) -> str | None:
    """The first layer whose output differs between two equal passes."""
    outputs: list[tuple[str, Tensor]] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda _, __, out: outputs.append((name, out.detach().clone())) if isinstance(out, Tensor) else None

    hooks = [m.register_forward_hook(watch(name)) for name, m in named_modules(module)]
    passes: list[list[tuple[str, Tensor]]] = []
    for _ in range(2):
        with Keyed(0, device):
            step()
        passes.append(outputs.copy())
        outputs.clear()
    for hook in hooks:
        hook.remove()
    for (name, a), (_, b) in zip(*passes, strict=False):
        if not same(a, b):
            return _layer(module, f"{name}.")
    return None
