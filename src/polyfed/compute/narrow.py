"""Frozen parameters in half precision stay so in memory; the module that owns some widens them for its call. The
wider type has every half-precision number, so outputs are those of the model widened as a whole, bit for bit."""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

HALF = (torch.bfloat16, torch.float16)
READS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.RNNBase)  # parameters inside them


def placed(module: nn.Module, device: torch.device | str | None, dtype: torch.dtype | None) -> nn.Module:
    """Move a module to a device and a precision (None: its own) in place, but for frozen half-precision parameters."""
    whole: Any = module  # `to` is made of its _apply
    dtype = dtype or next((q.dtype for q in module.parameters() if q.requires_grad), None)
    kept = set[int]()
    for part in _alone(module):
        if own := [name for name, q in part.named_parameters(recurse=False) if _narrow(q, dtype)]:
            kept |= {id(part.get_parameter(name)) for name in own}
            if not hasattr(part, "_narrow"):
                part.register_forward_pre_hook(_widen)
                part.register_forward_hook(_restore, always_call=True)
            vars(part).update(_narrow=own, _wide=dtype)

    def move(t: Tensor) -> Tensor:
        return t.to(device, dtype if t.is_floating_point() and id(t) not in kept else None)

    return whole._apply(move)


def _narrow(q: nn.Parameter, dtype: torch.dtype | None) -> bool:
    return not q.requires_grad and q.dtype in HALF and dtype is not None and dtype not in HALF


def _alone(module: nn.Module) -> list[nn.Module]:
    """The modules in it whose parameters no module around them reads."""
    if isinstance(module, READS):
        return []
    return [module, *(part for child in module.children() for part in _alone(child))]


Note = Callable[[Tensor], object]
_around = threading.local()  # of a pass, see `saving`


@contextmanager
def saving(narrow: bool, note: Note | None = None) -> Generator[None]:
    """Let hooks around a pass see what its layers save for the backward pass, narrow: but for half precision."""
    before = vars(_around).copy()
    vars(_around).update(narrow=narrow, note=note)
    try:
        yield
    finally:
        vars(_around).clear()
        vars(_around).update(before)


def _widen(module: Any, _: Any) -> None:
    module._kept = {name: module._parameters[name] for name in module._narrow}
    wide = {name: _wider(q, module._wide) for name, q in module._kept.items()}
    module._parameters.update(wide)
    # for the backward pass they are widened again, layer by layer; blocks that are computed again keep nothing anyway
    if torch.is_grad_enabled() and getattr(_around, "narrow", True):
        narrow = {t.data_ptr(): module._kept[name] for name, t in wide.items()}
        module._saved = _saved(narrow, module._wide, getattr(_around, "note", None))
        module._saved.__enter__()


def _wider(q: Tensor, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(q.to(dtype), requires_grad=False)


def _saved(narrow: dict[int, Tensor], dtype: torch.dtype, note: Note | None) -> saved_tensors_hooks:
    """A hook that saves narrow tensors, by the address of their wide copies, in place of those."""

    def pack(t: Tensor) -> Any:
        q = narrow.get(t.untyped_storage().data_ptr())
        if q is not None:
            return q, t.shape, t.stride(), t.storage_offset()
        if note is not None:
            note(t)
        return t

    def unpack(kept: Any) -> Tensor:
        return kept if isinstance(kept, Tensor) else _wider(kept[0], dtype).detach().as_strided(*kept[1:])

    return saved_tensors_hooks(pack, unpack)


def _restore(module: Any, *_: Any) -> None:
    module._parameters.update(module.__dict__.pop("_kept", {}))
    if (saved := module.__dict__.pop("_saved", None)) is not None:
        saved.__exit__()
