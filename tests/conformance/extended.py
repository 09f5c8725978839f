"""Extended precision: a run repeated operator by operator in numpy's longdouble (64 bits of mantissa on x86), without a
line of it written twice. Inside the context every floating-point tensor has a shadow; each operator of torch that
makes or changes tensors is worked out a second time from the shadows of what it was given. Integers, masks and
choices are the run's own, so both take the same branches. What the run rounded to float32 on the way, no shadow has
rounded: `error` then shows it, whatever the dtype of what it ended in.
"""

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


def _along(dim):
    return tuple(dim) if isinstance(dim, list | tuple) and len(dim) else (dim if isinstance(dim, int) else None)


def _log_softmax(x, dim, half):
    z = x - x.max(dim, keepdims=True)
    return z - np.log(np.exp(z).sum(dim, keepdims=True))


# arithmetic, by the operator's name; what is not here and only moves numbers is done exactly, the rest in float64
ARITHMETIC = {
    "add": lambda a, b, alpha=1: a + alpha * b,
    "sub": lambda a, b, alpha=1: a - alpha * b,
    "rsub": lambda a, b, alpha=1: b - alpha * a,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
    "reciprocal": lambda a: 1 / a,
    "abs": np.abs,
    "exp": np.exp,
    "sqrt": np.sqrt,
    "pow": lambda a, b: np.power(np.longdouble(a), np.longdouble(b)),
    "addcmul": lambda x, a, b, value=1: x + value * a * b,
    "sum": lambda x, dim=None, keepdim=False: x.sum(_along(dim), keepdims=keepdim),
    "mean": lambda x, dim=None, keepdim=False: x.mean(_along(dim), keepdims=keepdim),
    "bmm": np.matmul,
    "mm": np.matmul,
    "mv": np.matmul,
    "baddbmm": lambda c, a, b, beta=1, alpha=1: alpha * (a @ b) + (beta * c if beta else 0),
    "addmm": lambda c, a, b, beta=1, alpha=1: alpha * (a @ b) + (beta * c if beta else 0),
    "_softmax": lambda x, dim, half: np.exp(_log_softmax(x, dim, half)),
    "_log_softmax": _log_softmax,
    "_log_softmax_backward_data": lambda g, out, dim, dtype: g - np.exp(out) * g.sum(dim, keepdims=True),
}
MOVES = {
    "index_select", "index", "index_copy", "index_put", "gather", "cat", "stack", "copy", "clone", "_to_copy", "repeat",
    "scatter", "diag_embed", "triu", "_unsafe_view", "_foreach_copy", "where",
}  # fmt: skip


class Extended(TorchDispatchMode):
    """Shadows in extended precision for all that torch computes in this thread while the context is open."""

    def __init__(self):
        super().__init__()
        self.shadows: dict[int, tuple[torch.UntypedStorage, np.ndarray]] = {}  # by storage, which is kept alive
        self.taken = 0.0  # largest relative error of the numbers that left torch for Python

    def shadow(self, t: Tensor) -> np.ndarray:
        """What t would hold, as a view of its storage's shadow; a storage not seen before starts as it is."""
        storage = t.untyped_storage()
        if (key := storage._cdata) not in self.shadows:
            flat = torch.empty(0, dtype=t.dtype).set_(storage, 0, (len(storage) // t.element_size(),), (1,))
            self.shadows[key] = storage, flat.numpy().astype(np.longdouble)
        flat = self.shadows[key][1]
        steps = [s * flat.itemsize for s in t.stride()]
        return np.lib.stride_tricks.as_strided(flat[t.storage_offset() :], t.shape, steps)

    def error(self, t: Tensor) -> float:
        """Largest difference between t and its shadow, relative to the shadow's largest entry."""
        exact = self.shadow(t)
        if not exact.size:
            return 0.0
        gap = np.abs(t.detach().numpy().astype(np.longdouble) - exact).max()
        return float(gap / (np.abs(exact).max() or 1))

    @np.errstate(all="ignore")  # memory not yet written to holds anything
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        # shadows are made before the operator changes what it is given
        given = [self.shadow(t) for t in tree_leaves((args, kwargs)) if _floating(t)]
        as_is = view or seeded or "empty" in name or name == "_local_scalar_dense"
        out = None if as_is else self._again(func, name, args, kwargs)
        result = func(*args, **kwargs)
        if name == "_local_scalar_dense" and given and np.isfinite(given[0]):
            self.taken = max(self.taken, float(abs(result - given[0]) / (abs(given[0]) or 1)))
        if out is not None:
            for t, value in zip(_made(result, args), out, strict=True):
                self.shadow(t)[...] = value
        return result

    def _again(self, func, name, args, kwargs):
        """The values of the tensors that `func` makes or changes, from shadows; None if it makes no numbers."""
        name = name if name in MOVES or name in ARITHMETIC else name.rstrip("_")
        kwargs = {k: v for k, v in kwargs.items() if k != "out"}
        if name in ARITHMETIC:
            if not _makes_floats(func, args, kwargs):
                return None
            wide = {k: self._wide(v) for k, v in kwargs.items() if k != "dtype"}
            return [ARITHMETIC[name](*map(self._wide, args), **wide)]
        if func._overloadname == "out":
            func = getattr(func._overloadpacket, "default", func)
        high = self._in_float64(func, args, kwargs, lambda x: x.astype(np.float64))
        source = args[1] if name == "copy" else args[0] if args else None
        if name not in MOVES or (isinstance(source, Tensor) and not source.is_floating_point()):
            return high
        low = self._in_float64(func, args, kwargs, _rest)
        return high and [h + rest for h, rest in zip(high, low, strict=True)]

    def _in_float64(self, func, args, kwargs, part):
        def double(x):
            if _floating(x):
                return torch.from_numpy(np.array(part(self.shadow(x))))
            if isinstance(x, torch.dtype) and x.is_floating_point:
                return torch.float64
            return x.clone() if isinstance(x, Tensor) else x

        args, kwargs = tree_map(double, (args, kwargs))
        made = _made(func(*args, **kwargs), args)
        return [t.numpy().astype(np.longdouble) for t in made] or None

    def _wide(self, x):
        if isinstance(x, Tensor):
            return self.shadow(x) if x.is_floating_point() else x.numpy().astype(np.longdouble)
        return np.longdouble(x) if isinstance(x, float) else x


def _floating(x) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _made(result, args) -> list[Tensor]:
    """The floating-point tensors that an operator gave back, or, if it gives nothing back, changed."""
    return [t for t in tree_leaves(args[:1] if result is None else result) if _floating(t)]


def _makes_floats(func, args, kwargs) -> bool:
    if any(map(_floating, tree_leaves(args))):
        return True
    return _floating(func(*tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, args), **kwargs))


def _rest(x: np.ndarray) -> np.ndarray:
    """What is left of longdoubles beyond float64."""
    high = x.astype(np.float64)
    return np.where(np.isfinite(high), x - high, 0).astype(np.float64)
