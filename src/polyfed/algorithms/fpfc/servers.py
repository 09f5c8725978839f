"""FPFC's two servers, `pairs` and `devicedual`, modules with functions of the same names, and the choice of one."""

from typing import Any

from torch import Tensor

from polyfed.algorithms.fpfc import devicedual, pairs
from polyfed.core.algorithm import Needs, Server, State

# start(w, n, fusion)                        the state before the first round, from a common model or from clients'
# current(state, fusion)                     the state for the present settings, which a path may have changed
# messages(state, ids)                       [s, q] what clients solve towards
# advance(state, ids, w_new, fusion, t)      the state after round t
# clusters(state, nu)                        [n] labels
# memory(n, q, itemsize=...)                 bytes at the peak
# report(state)                              further findings


MOST_PAIRED = 200  # clients up to which solver "auto" keeps a vector per pair
LARGE = 1.0  # GB of pairs above which the plan says what the other solver would take
AXES = {  # of both servers' states; all else is free, for pairs in a list are no [n, n]
    **dict.fromkeys(("centre", "settings", "common"), "shared"),
    **dict.fromkeys(("w", "Q", "groups"), "each"),
    "G": "pairs",
}


def of(method: Any, n: int):
    """The module that is the server of n clients."""
    dual = method.solver == "device-dual" or (method.solver == "auto" and n > MOST_PAIRED)
    method.require(method.xi > 0 or not dual, "xi", "a number above 0 with solver device-dual")
    return devicedual if dual else pairs


def by_axes(state: State) -> Server:
    """A server's tensors, sorted by their axes."""
    sorts = ("shared", "each", "pairs", "free")
    shared, each, pairs, free = ({k: t for k, t in state.items() if AXES.get(k, "free") == axes} for axes in sorts)
    return Server(shared, each, pairs, free)


def plan(method: Any, n: int, w: Tensor) -> str:
    """The solver, the reason, and the server's peak memory, for n clients whose models to fuse are like w: [..., q]."""
    server = of(method, n)
    size, least = (s.memory(n, w.shape[-1], itemsize=w.element_size()) / 1e9 for s in (server, devicedual))
    other = f", with device-dual {least:.2g} GB" if server is pairs and size > LARGE and method.xi > 0 else ""
    return f"solver {server.NAME} ({_why(method, n)}), server memory up to {size:.2g} GB{other}"


def needs(method: Any) -> Needs:
    """FPFC's needs; `synchronous` says what rules out an asynchronous run."""
    if method.solver == "pairs":
        return Needs()
    auto = method.solver == "auto"
    why = f"{{n}} clients, more than {MOST_PAIRED}" if auto else "as asked for"
    late = f'with solver device-dual ({why}; solver "pairs" can) needs replies in their round'
    return Needs(synchronous=late, beyond=MOST_PAIRED if auto else 0)


def _why(method: Any, n: int) -> str:
    if method.solver != "auto":
        return "as asked for"
    return f"{n:,} clients, {'more than' if n > MOST_PAIRED else 'up to'} {MOST_PAIRED}"
