"""The compiled kernel for local training (kernel.cpp), which is built where a C++ compiler is; without it, or with
POLYFED_NATIVE=0 in the environment, torch alone trains. ctypes lets go of the interpreter's lock during a call."""

import ctypes
import os
import sys
from collections.abc import Sequence
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

VERSION = 11  # of the call and of its bits, as in kernel.cpp: a library that was built for another is not used
SETS = ("baseline", "avx2", "avx512")
OPERATIONS = (
    "linear", "norm", "same", "table", "columns", "image", "convolution", "groups", "largest", "mean", "row",
    "recurrent", "attention", "place",
)  # fmt: skip
ACTIVATIONS = ("", "ReLU", "Tanh", "Sigmoid", "GELU", "GELU tanh", "SiLU")
LOSSES = ("cross-entropy", "mse")

Pair = tuple[int, int]
Rows = tuple[int, int]  # an address, and from one client's row how many numbers to the next; 0: the same for all

FIELDS = (  # of a Job, addresses with *, float64 with ., else int64
    "layers *shape *real loss clients p *w *start start_each *x integers *y *first *count *steps batch "
    "*keys *seeds seeds_each *lr *keep *kept kept_each terms *term *term_each *by *only only_each "
    "*curvature *pull pull_each *toward toward_each *teacher teacher_each .distill .heat own"
)
TYPES = {"*": ctypes.c_void_p, ".": ctypes.c_double}


class Job(ctypes.Structure):
    """One call to the kernel; see kernel.cpp."""

    _fields_ = [(name.strip("*."), TYPES.get(name[0], ctypes.c_int64)) for name in FIELDS.split()]


class Layer(NamedTuple):
    """A layer, in `operation`, then an activation, dropout and an addition.

    Behind an "image" layers are on rows of channels, one for each place: a "convolution", a norm by "groups" of
    channels, the "largest" or "mean" of windows, a "recurrent" step of `groups` gates whose inputs the layer before has
    multiplied, "attention" of `groups` heads to rows of queries, keys and values, a row added to each "place"; "row"
    makes one row of them.
    """

    inputs: int  # numbers, or channels
    outputs: int  # of a table: its rows of `inputs` numbers
    bias: bool
    activation: str = ""  # one of the first three of ACTIVATIONS behind a convolution
    window: Pair = (0, 0)  # of a convolution; none for another layer
    around: Pair = (0, 0)  # zeros around a convolution's input
    image: Pair = (0, 0)  # a convolution's input
    pool: Pair = (1, 1)  # cells that the largest is taken of
    operation: str = "linear"  # a convolution where there is a window; "norm" of the whole row; "same": none
    weight: int = True  # True where it has weights; of places how many
    eps: float = 0.0  # added to the variance by a norm
    drop: float = 0.0  # share that is dropped
    skip: int = -1  # layer whose input is added, or -1
    columns: tuple[int, int, int] = (0, 0, 0)  # of a sample, as they are or table rows: first, how many, of how many
    step: Pair = (1, 1)  # of windows
    groups: int = 1  # of channels
    base: int = -1  # layer whose input goes in, or -1 for the output of the one before
    taps: int = 0  # of windows, where the model has them last; 1 where channels lie before places

    def free(self, names: Sequence[str]) -> bool:
        """True where the first of these steps behind a layer, and all after it, are not there yet."""
        order = ("activation", "drop", "skip")
        first = min(map(order.index, names))
        return all(getattr(self, name) == self._field_defaults[name] for name in order[first:])

    @property
    def bent(self) -> bool:
        """True where an activation, dropout or addition follows."""
        return not self.free(["activation"])

    @property
    def sample(self) -> int:
        """Numbers of a sample, if this is the first layer."""
        return self.columns[2] or self.inputs * max(1, prod(self.image))

    @property
    def places(self) -> Pair:
        """A convolution's output, pooled: high and wide."""
        high, wide = (n + 2 * a - w + 1 for n, a, w in zip(self.image, self.around, self.window, strict=True))
        return high // self.pool[0], wide // self.pool[1]

    @property
    def numbers(self) -> int:
        """The number of weights and biases."""
        return self.weights + self.biases

    @property
    def weights(self) -> int:
        """The number of weights."""
        whole = ("linear", "table", "convolution", "recurrent")
        rows = self.outputs if self.operation in whole else int(self.weight)
        shared = self.groups if self.operation == "convolution" else 1
        return rows * self.inputs // shared * max(1, prod(self.window))

    @property
    def biases(self) -> int:
        """The number of biases."""
        return self.bias * (self.inputs if self.operation == "recurrent" else self.outputs)


class Kernel:
    """The library, and the widest instruction set that this processor has of those it was compiled for."""

    def __init__(self, library: ctypes.CDLL, set: str | None = None):
        self._library = library
        self.set = set or SETS[library.polyfed_widest()]

    def narrowed(self, set: str) -> "Kernel":
        """The same library with another of the instruction sets that this processor has."""
        return Kernel(self._library, set)

    def train(
        self,
        layers: tuple[Layer, ...],
        loss: str,
        w: int,  # address of [clients, p] results; numbers of `size` bytes, without gaps, as those of x and y
        start: Rows,
        clients: int,
        size: int,
        x: int,  # address of [N, inputs] samples, int64 where `integers`
        y: int,  # address of [N] classes (int64) or [N, outputs] targets
        integers: bool,
        first: np.ndarray,  # [clients] int64, as count and steps
        count: np.ndarray,
        steps: np.ndarray,
        batch: int | None,  # samples per step; None: all
        keys: np.ndarray,  # [clients, 2] uint64 of the Philox generators that draw the orders of batches
        lr: np.ndarray,  # [clients] float64
        keep: np.ndarray | Rows,  # [clients] float64, or rows of [p] factors, one for each number
        seeds: np.ndarray | None = None,  # [clients, steps] uint64 of dropouts
        terms: Sequence[tuple[np.ndarray, Rows]] = (),  # `add` is the sum of factors [clients] times rows
        only: Rows | None = None,  # 0 where nothing is trained
        curvature: int = 0,  # 0, or address of [clients] float64, see below
        toward: tuple[Rows, Rows] | None = None,  # strengths [C] and vectors [C, d] that features are pulled to
        teacher: tuple[Rows, float, float, bool] | None = None,  # models [p], strength, temperature, own class counts
    ) -> None:
        """Local training of some clients: w <- keep w + add - lr gradient from `start`, each client its own steps.

        Steps raise `curvature` to the change of the gradient on the same samples by the length of the step behind it.
        """
        (shape, real), p = _tables(layers)
        kept, keep = (keep, np.ones(clients)) if isinstance(keep, tuple) else ((None, 0), keep)
        by, added = np.array([by for by, _ in terms]), np.array([at for _, at in terms], dtype=np.int64).reshape(-1, 2)
        arrays = [np.ascontiguousarray(a) for a in (first, count, steps, keys, lr, keep, *added.T, by)]
        address = [a.ctypes.data for a in arrays]
        masks = None if seeds is None else np.ascontiguousarray(seeds)
        drawn = (None, 0) if masks is None else (masks.ctypes.data, masks.shape[1])
        job = Job(
            len(layers), shape.ctypes.data, real.ctypes.data, LOSSES.index(loss), clients, p, w, *start, x, integers, y,
            *address[:3], batch or 0, address[3], *drawn, *address[4:6], *kept, len(terms), *address[6:],
            *(only or (None, 0)), curvature,
            *((*toward[0], *toward[1]) if toward else (None, 0, None, 0)),
            *((*teacher[0], *teacher[1:]) if teacher else (None, 0, 0.0, 1.0, True)),
        )  # fmt: skip
        failed = self._library.polyfed_train(ctypes.byref(job), size, SETS.index(self.set))
        if failed:
            raise (
                MemoryError(f"no memory to train {clients} clients")
                if failed == 1
                else IndexError("class or category out of range")
            )

    def renew(self, size: int, count: int, p: int, *addresses: int) -> None:
        """FPFC's pair vectors, w[i] - w[j] + keep delta[row], each in its row if that is not below 0.

        addresses: of w [n, p], i, j [count], delta [rows, p], row, keep [count], and squares [count] float64, to which
        the vectors' sums of squares are added; indices are int64.
        """
        self._rows("polyfed_renew", size, (count, p), addresses)

    def products(self, size: int, n: int, p: int, w: int, m: int, *addresses: int) -> None:
        """Inner products of m rows of w [n, p] with all, and every row's with itself.

        addresses: of ids [m] int64, and [m, n] and [n] float64, to which they are added.
        """
        self._rows("polyfed_products", size, (n, p), (w,), (m,), addresses)

    def mix(self, size: int, p: int, m: int, k: int, together: int, *addresses: int) -> None:
        """m weighted sums of k rows, `together` at a time of the same rows.

        addresses: of weights [m, k], a table [.., p], the rows [m / together, k] int64 of it, and [m, p].
        """
        self._rows("polyfed_mix", size, (p, m, k, together), addresses)

    def _rows(self, name: str, size: int, *numbers: tuple[int, ...]) -> None:
        given = [ctypes.c_int64(n) for some in numbers for n in some]  # an address is as wide
        getattr(self._library, name)(size, SETS.index(self.set), *given)

    def below(self, bound: int, h: int | np.ndarray, keys: np.ndarray) -> np.ndarray | None:
        """Positions that `randomness.below` finds, by whose arguments; None by a library that cannot."""
        if not hasattr(self._library, "polyfed_below"):
            return None
        at, keys = np.empty(len(keys) + 1, dtype=np.int64), np.ascontiguousarray(keys, dtype=np.uint64)
        words = (bound, int(h), keys.ctypes.data, len(keys), at.ctypes.data)  # an address is as wide
        self._library.polyfed_below(SETS.index(self.set), *map(ctypes.c_uint64, words))
        return at[1 : 1 + at[0]].copy()

    def permutations(self, key: np.ndarray, times: int, n: int) -> np.ndarray:
        """[times, n]: the results of NumPy's Generator(Philox(key=key)).permutation(n), call after call."""
        result, key = np.empty((times, n), dtype=np.int64), np.ascontiguousarray(key, dtype=np.uint64)
        self._library.polyfed_permutation(
            ctypes.c_void_p(key.ctypes.data),
            ctypes.c_int64(times),
            ctypes.c_int64(n),
            ctypes.c_void_p(result.ctypes.data),
        )
        return result


@cache
def _tables(layers: tuple[Layer, ...]) -> tuple[tuple[np.ndarray, np.ndarray], int]:
    """The layers as the kernel reads them, whole numbers and others, and the number of their parameters."""
    own = [n.numbers for n in layers if n.operation == "place"]  # a module's own parameters lie before its layers'
    places, place, first = list[Pair](), sum(own), 0
    for k, n in enumerate(layers):  # torch has both weights of a recurrent layer before its biases
        if n.operation == "place":
            places.append((first, 0))
            first += n.numbers
            continue
        after = layers[k + 1].weights if k + 1 < len(layers) and layers[k + 1].operation == "recurrent" else 0
        at, bias_at = (place, place + n.weights + after)
        if n.operation == "recurrent":
            at, bias_at = places[-1][0] + layers[k - 1].weights, place
        places.append((at, bias_at))
        place = bias_at + n.biases
    rows = [(n.inputs, n.outputs, n.bias, ACTIVATIONS.index(n.activation), *n.window, *n.around, *n.image, *n.pool,
             OPERATIONS.index(n.operation), n.weight, n.skip, *n.columns, *n.step, n.groups, n.base, n.taps, *at)
            for n, at in zip(layers, places, strict=True)]  # fmt: skip
    others = np.array([(n.eps, n.drop) for n in layers])
    return (np.array(rows, dtype=np.int64), others), sum(n.numbers for n in layers)


@cache
def built() -> Kernel | None:
    """The kernel, or None where it was not built, or draws other orders than this NumPy."""
    for suffix in EXTENSION_SUFFIXES:
        try:
            library = ctypes.CDLL(str(Path(__file__).with_name(f"_kernel{suffix}")))
            if library.polyfed_version() != VERSION:
                continue
        except (OSError, AttributeError):
            continue
        kernel, key = Kernel(library), np.array([1, 2], dtype=np.uint64)
        rng = np.random.Generator(np.random.Philox(key=key))
        if (kernel.permutations(key, 2, 300) == [rng.permutation(300), rng.permutation(300)]).all():
            return kernel
    return None


@cache
def lament() -> None:
    """Say once that torch trains in the kernel's place, where nobody has switched it off."""
    if os.environ.get("POLYFED_NATIVE") != "0" and built() is None:
        there = any(Path(__file__).with_name(f"_kernel{suffix}").exists() for suffix in EXTENSION_SUFFIXES)
        why = "it is another version's, or this NumPy draws otherwise" if there else "it was not built"
        line = f"polyfed: the compiled kernel is absent here ({why}): torch trains, several times slower"
        print(line, file=sys.stderr)


def kernel() -> Kernel | None:
    """The kernel, where it is built and not switched off; POLYFED_NATIVE may also name an instruction set."""
    wanted = os.environ.get("POLYFED_NATIVE", "")
    full = None if wanted == "0" else built()
    if full is None or wanted not in SETS[: SETS.index(full.set)]:
        return full
    return full.narrowed(wanted)
