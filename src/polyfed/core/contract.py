"""The contract of a method: what its functions give back. Each breach is one line that names the author's function."""

import inspect
from collections.abc import Set
from typing import Any, cast

import numpy as np
from torch import Tensor

from polyfed.base.errors import MethodError
from polyfed.base.plugins import ours
from polyfed.base.settings import is_table
from polyfed.core.messages import KNOWN, Down, Server, State


def place(thing: Any) -> str:
    """`FILE, line N` of a class or a function; its module where it has no file."""
    try:
        return f"{inspect.getsourcefile(thing)}, line {inspect.getsourcelines(thing)[1]}"
    except (OSError, TypeError):
        return str(getattr(thing, "__module__", thing))


def unwritten(method: object, name: str) -> MethodError:
    """The error for a method that lacks a function it must have."""
    cls = type(method)
    takes = ", ".join(inspect.signature(getattr(cls, name)).parameters)
    return MethodError(f"{place(cls)}: {cls.__name__} has no {name}({takes})")


def takes(cls: type, base: type) -> None:
    """Raise MethodError for a function that cannot be called as the one of the same name in `base`."""
    for name, function in vars(cls).items():
        theirs = getattr(base, name, None)
        if inspect.isfunction(function) and inspect.isfunction(theirs) and not name.startswith("__"):
            found, expected = (list(inspect.signature(f).parameters) for f in (function, theirs))
            try:
                inspect.signature(function).bind(*expected)
            except TypeError:
                found, expected = (", ".join(names[1:]) for names in (found, expected))
                raise MethodError(
                    f"{place(function)}: {name} of {cls.__name__} takes ({found}), expected ({expected})"
                ) from None


def client_state(method: object, value: Any) -> State:
    """Check the result of `init_client`."""
    _require(method, "init_client", _is_state(value), value, "a dict of tensors")
    return value


def server_state(method: object, value: Any, keys: np.ndarray) -> Server:
    """Check the result of `init_server`, by its axes, and draw what it leaves to draw. keys: [n] of the clients"""
    server = value if isinstance(value, Server) else Server(value)
    if server.drawn:
        drawn = {name: draw(keys) for name, draw in server.drawn.items()}
        server = server._replace(each={**server.each, **drawn}, drawn={})
    _require(method, "init_server", all(map(_is_state, server)), value, "a dict of tensors or a Server of such")
    return server


def downlink(method: object, name: str, value: Any, s: int) -> Down:
    """Check the result of `downlink` or `deployment` for s clients."""
    name = "downlink" if getattr(type(method), name).__module__ == "polyfed.core.algorithm" else name
    fits = isinstance(value, Down) and _is_state(value.shared) and _is_state(value.each, s)
    _require(method, name, fits, value, f"Down(shared={{name: tensor}}), or each={{name: tensor of {s} rows}}")
    return value


def update(method: object, value: Any, s: int, private: list[str]) -> tuple[State, State]:
    """Check the result of `local_update` for s clients whose private tensors have the names `private`."""
    pair = list(cast(tuple[Any, ...], value)) if isinstance(value, tuple) else []
    fits = len(pair) == 2 and all(_is_state(part, s) for part in pair)
    _require(method, "local_update", fits, value, f"(private tensors, uplink), two dicts of tensors of {s} rows")
    named = ", ".join(private) or "none"
    new = sorted(pair[0].keys() - private)
    _require(method, "local_update", not new, new, f"private tensors that init_client makes: {named}")
    return pair[0], pair[1]


def next_state(method: object, value: Any, names: Set[str]) -> State:
    """Check the result of `aggregate`, the successor of a state with these names."""
    _require(method, "aggregate", _is_state(value), value, "a dict of tensors")
    left = sorted(names - value.keys() - {KNOWN})
    _require(method, "aggregate", not left, value, f"the whole next state, with {', '.join(left)}")
    return value


def models(method: object, value: Any, s: int, p: int) -> Tensor:
    """Check the models [s, p] that `personal` returned."""
    fits = isinstance(value, Tensor) and value.shape == (s, p)
    _require(method, "personal", fits, value, f"a tensor of shape [{s}, {p}]")
    return value


def _is_state(value: Any, s: int | None = None) -> bool:
    """True for a dict of tensors, of s rows each where s is given."""
    return is_table(value) and all(
        isinstance(t, Tensor) and (s is None or (t.dim() > 0 and len(t) == s)) for t in value.values()
    )


def _require(method: object, name: str, fits: bool, value: Any, expected: str) -> None:
    if not fits:
        cls, function = type(method), getattr(type(method), name)
        theirs = ours(function.__module__)  # inherited from ours: the class is the author's
        where = place(cls if theirs else function)
        raise MethodError(f"{where}: {name} of {cls.__name__} returned {_kind(value)}, expected {expected}")


def _kind(value: Any) -> str:
    """The type of a value, as deep as a contract looks."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if is_table(value):
        return "{" + ", ".join(f"{k!r}: {_kind(v)}" for k, v in value.items()) + "}"
    if type(value) in (tuple, list):
        return f"({', '.join(map(_kind, value))})"
    if isinstance(value, Down | Server):
        return f"{type(value).__name__}({', '.join(f'{k}={_kind(v)}' for k, v in value._asdict().items() if v)})"
    return repr(value) if value is None or isinstance(value, str | int | float) else f"a {type(value).__name__}"
