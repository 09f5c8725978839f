"""The samples of many clients, given end to end: where each client's begin, and which of them are held out, found for
all clients by arrays, in no loop over them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations as pairs
from typing import Any

import numpy as np
import torch

from polyfed.base.errors import DataError
from polyfed.base.randomness import BLOCK, client_keys
from polyfed.base.system import memory

FEW = 64  # samples of a client up to which the orders of all clients with as many are drawn at once
EACH = 250  # bytes that a client takes beside its samples: its name, its place in the parts


class Ragged(Sequence[np.ndarray]):
    """An array for each of n clients: all of them end to end, cut when one is asked for."""

    def __init__(self, flat: np.ndarray, counts: np.ndarray):
        self.flat, self.offsets = flat, np.concatenate([[0], np.cumsum(counts)])

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: Any) -> Any:
        i = range(len(self))[i]
        return self.flat[self.offsets[i] : self.offsets[i + 1]]


@dataclass(frozen=True)
class Flat:
    """A split given end to end: client i has the rows offsets[i] to offsets[i + 1] of x and y."""

    x: Any
    y: Any
    offsets: np.ndarray

    @classmethod
    def of(cls, x: Any, y: Any, offsets: Any, split: str) -> "Flat":
        """Raise DataError for offsets that fall, leave the array, or leave some of it out."""
        at, size = _array(offsets, f"offsets, {split}"), _rows(y, f"targets, {split}")
        if at.ndim != 1 or len(at) < 2 or at.dtype.kind not in "iu":
            raise DataError(f"offsets, {split}: found {at.dtype} of shape {list(at.shape)}, expected [n + 1] integers")
        at = at.astype(np.int64)
        if len(falls := np.flatnonzero(at[1:] < at[:-1])):
            i = int(falls[0])
            raise DataError(f"offsets, {split}: fall from {at[i]} to {at[i + 1]} at client {i}, expected them to rise")
        if at[0] != 0 or at[-1] != size:
            raise DataError(f"offsets, {split}: found {at[0]} to {at[-1]}, expected 0 to {size}, the number of samples")
        return cls(_tensor(x), _tensor(y), at)

    @classmethod
    def by(cls, x: Any, y: Any, sites: Any) -> tuple["Flat", list[str]]:
        """Rows in any order, with the name of each one's site; and the names, sorted."""
        at = _array(sites, "sites", None if hasattr(sites, "dtype") else object)  # or of NaN in a list a word is made
        size = _rows(y, "targets, train")
        if at.shape != (size,) or _rows(x, "inputs, train") != size:
            found = f"found {list(at.shape)} for {size} targets and {len(x)} inputs"
            raise DataError(f"sites: {found}, expected a name for each row")
        if len(gaps := np.flatnonzero(_missing(at) | np.ma.getmask(sites))):
            raise DataError(f"sites: found none in row {gaps[0]}, expected a name for each row")
        names, whose, counts = np.unique(at.astype(str), return_inverse=True, return_counts=True)
        order = np.argsort(whose, kind="stable")
        offsets = np.concatenate([[0], np.cumsum(counts)])
        return cls(_tensor(np.asarray(x)[order]), _tensor(np.asarray(y)[order]), offsets), names.tolist()

    def check_fits(self) -> None:
        """Raise DataError where there is no memory for a copy of the samples, with the clients that would fit."""
        n, have = len(self.offsets) - 1, memory()
        need = sum(a.nbytes for a in (self.x, self.y) if hasattr(a, "nbytes")) + n * EACH
        if need > have:
            sizes = f"{n:,} clients take {need / 1e9:.2g} GB and {have / 1e9:.2g} GB of memory are free"
            raise DataError(f"{sizes}; {int(n * have / need):,} would fit")


def _rows(a: Any, what: str) -> int:
    try:
        return len(a)
    except TypeError:
        raise DataError(f"{what}: found {type(a).__name__}, expected an array with a row for each sample") from None


def _array(a: Any, what: str, dtype: Any = None) -> np.ndarray:
    try:
        return np.asarray(a, dtype=dtype)
    except ValueError:
        raise DataError(f"{what}: found rows of unlike length, expected one array") from None


def _missing(names: np.ndarray) -> np.ndarray:
    """[N] True where there is no name: None, NaN, and NA of pandas, of which nobody can say what it equals."""
    if names.dtype.kind == "O":
        return np.array([v is None or str(v != v) != "False" for v in names], dtype=bool)
    return names != names


def _tensor(a: Any) -> Any:
    """An array in torch's hands, in the same memory, where it may stay as it is; else what was given."""
    plain = isinstance(a, np.ndarray) and not np.ma.isMaskedArray(a) and a.flags.carray and a.dtype.isnative
    return torch.from_numpy(a) if plain and a.dtype in (np.float32, np.float64, np.int64) else a


def held(seed: int, purpose: int, names: Sequence[str], counts: np.ndarray, fraction: float) -> np.ndarray:
    """[N] True for the samples that `prepare.held_out` holds of every client, in one order of the same draws."""
    most = np.minimum(np.maximum(1, np.rint(counts * fraction)), counts - 1) * ((counts > 1) & (fraction > 0))
    first, out, keys = np.cumsum(counts) - counts, np.zeros(int(counts.sum()), dtype=bool), client_keys(names)
    for n in np.unique(counts[most > 0]).tolist():
        alike, k = np.flatnonzero(counts == n), int(most[counts == n][0])
        for at in np.split(alike, range(BLOCK, len(alike), BLOCK)):
            out[(first[at, None] + permutations(seed, purpose, keys[at], n)[:, :k]).ravel()] = True
    return out


HALF, LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
STEP = 0x2360ED051FC65DA44385DF649FCCF645  # of PCG64
Wide = tuple[np.ndarray, np.ndarray]  # integers of 128 bits, modulo 2^128: high and low words


def _advanced(state: Wide, add: Wide) -> Wide:
    """The next state of PCG64: state * STEP + add."""
    (high, low), step = state, np.uint64(STEP & (2**64 - 1))
    a, b, c, d = low & LOW, low >> HALF, step & LOW, step >> HALF
    cross = b * c + (a * c >> HALF)
    carry = b * d + (cross >> HALF) + ((a * d + (cross & LOW)) >> HALF)
    new = low * step + add[1]
    return carry + high * step + low * np.uint64(STEP >> 64) + add[0] + (new < add[1]), new


def _seeded(words: Sequence[int | np.ndarray]) -> tuple[Wide, Wide]:
    """State and increment of PCG64(SeedSequence(words)) for four words of 32 bits, arrays [m] among them."""
    factor, start = np.uint32(0x931E8875), np.uint32(0x43B0D7E5)

    def hashed(value: np.ndarray) -> np.ndarray:
        nonlocal start
        value, start = value ^ start, start * factor
        value = value * start
        return value ^ (value >> np.uint32(16))

    pool = [hashed(np.asarray(word, dtype=np.uint32)) for word in words]
    for i, j in pairs(range(4), 2):
        mixed = pool[j] * np.uint32(0xCA01F9DD) - hashed(pool[i]) * np.uint32(0x4973F715)
        pool[j] = mixed ^ (mixed >> np.uint32(16))
    start, factor = np.uint32(0x8B51F9DD), np.uint32(0x58F38DED)
    out = [hashed(pool[k % 4]).astype(np.uint64) for k in range(8)]
    high, low, more, less = (out[k] | out[k + 1] << HALF for k in range(0, 8, 2))
    add = more << np.uint64(1) | less >> np.uint64(63), less << np.uint64(1) | np.uint64(1)
    total = low + add[1]
    return _advanced((high + add[0] + (total < low), total), add), add


def permutations(seed: int, purpose: int, keys: np.ndarray, n: int) -> np.ndarray:
    """[m, n]: `np.random.default_rng([seed, purpose, key]).permutation(n)` of every key [m] uint64, all at once."""
    if n > FEW or seed >= 1 << 32:  # a seed of more words
        return np.stack([np.random.default_rng([seed, purpose, int(key)]).permutation(n) for key in keys])
    m, most = len(keys), 2 * n + 16
    order, words = np.tile(np.arange(n), (m, 1)), np.empty((most, m), dtype=np.uint64)
    with np.errstate(over="ignore"):
        state, add = _seeded([seed, purpose, keys & LOW, keys >> HALF])
        for k in range(0, most, 2):
            state = _advanced(state, add)
            word, turn = state[0] ^ state[1], state[0] >> np.uint64(58)
            word = word >> turn | word << (np.uint64(64) - turn & np.uint64(63))
            words[k], words[k + 1] = word & LOW, word >> HALF
    at, j, again = np.zeros(m, dtype=np.int64), np.zeros(m, dtype=np.int64), np.zeros(m, dtype=bool)
    for i in range(n - 1, 0, -1):  # numpy's shuffle: bits of a word, until they are i at most
        left = np.arange(m)
        while len(left):
            again[left[at[left] >= most]] = True
            left = left[at[left] < most]
            j[left] = words[at[left], left] & np.uint64((1 << i.bit_length()) - 1)
            at[left] += 1
            left = left[j[left] > i]
        j[again], here = 0, np.arange(m)
        order[here, j], order[:, i] = order[:, i].copy(), order[here, j]
    for k in np.flatnonzero(again):  # one that has needed more words
        order[k] = np.random.default_rng([seed, purpose, int(keys[k])]).permutation(n)
    return order
