"""Messages as bytes: a head in JSON and tensors, in safetensors' format. Nothing is unpickled.

What a message says of itself (names, types, shapes, sizes) is read and checked before a byte of its tensors is.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from safetensors.torch import save as _save  # pyright: ignore[reportUnknownVariableType]

from polyfed.base.errors import RunError
from polyfed.core.messages import Form, State, form_of

HEAD = 1 << 20  # bytes of a head at most
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Message(NamedTuple):
    """What one side says to the other. head: JSON-able; what it means is said in `Site`."""

    head: dict[str, Any]
    tensors: State = {}  # noqa: RUF012  (never written to)

    @property
    def bytes(self) -> int:
        """Of the tensors, as the ledger counts them."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


def pack(message: Message) -> bytes:
    """The message as bytes."""
    apart = {name: t.detach().cpu().contiguous().clone() for name, t in message.tensors.items()}
    return cast(bytes, _save(apart, {"head": json.dumps(message.head)}))


def unpack(data: bytes, most: int, who: str) -> Message:
    """The message in `data`.

    most: bytes of tensors that are accepted     who: from whom it is, for errors
    Raises RunError, in one line, for anything that `pack` would not have made.
    """
    try:
        size = int.from_bytes(data[:8], "little")
        if not 2 <= size <= min(HEAD, len(data) - 8):
            raise ValueError(f"its head says {size} bytes")
        says: dict[str, Any] = json.loads(data[8 : 8 + size])
        head = json.loads(says.pop("__metadata__")["head"])
        if not isinstance(head, dict):
            raise ValueError("its head is no table")
        found, largest = 0, (0, "")
        for name, about in says.items():
            if about["dtype"] not in DTYPES:
                raise ValueError(f"{name!r} is of type {about['dtype']}")
            numbers = math.prod(int(k) for k in about["shape"])
            size_of_it = numbers * torch.empty((), dtype=DTYPES[about["dtype"]]).element_size()
            found, largest = found + size_of_it, max(largest, (size_of_it, name))
        if found > most or found != len(data) - 8 - size:
            what = f"{found:,} bytes of tensors{largest[1] and f', most of them {largest[1]!r}'}"
            raise ValueError(f"it is said to have {what}, expected at most {most:,}, as sent")
        return Message(cast(dict[str, Any], head), load(data))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, SafetensorError) as e:
        raise RunError(f"{who}: not a message ({' '.join(str(e).split()) or type(e).__name__})") from None


def fits(message: Message, expected: Mapping[str, Form], who: str) -> None:
    """Raise RunError unless a message has the names, shapes and types that are `expected`, and finite numbers."""
    needed = {name for name, form in expected.items() if not form.optional}
    for name in sorted((message.tensors.keys() - expected.keys()) | (needed - message.tensors.keys())):
        what = "has" if name in message.tensors else "lacks"
        raise RunError(f"{who}: the message {what} tensor {name!r}, expected {', '.join(sorted(expected)) or 'none'}")
    for name, t in message.tensors.items():
        form = expected[name]
        same = t.dim() == len(form.shape) and all(k in (None, m) for k, m in zip(form.shape, t.shape, strict=True))
        if not same or t.dtype != form.dtype or t.numel() > form.most:
            raise RunError(f"{who}: tensor {name!r} is {form_of(t)}, expected {form}")
        if t.is_floating_point() and not torch.isfinite(t.sum()) and not torch.isfinite(t).all():
            raise RunError(f"{who}: tensor {name!r} holds NaN or infinity")
