"""Keyed randomness: every draw is a function of (seed, purpose, round, client), so there is no generator state.

Clients are keyed by hashes of their names: order, chunk or engine cannot change a client's numbers.
"""

from collections.abc import Sequence
from functools import cache
from hashlib import blake2b

import numpy as np

WEYL = np.uint64(0x9E3779B97F4A7C15)  # of splitmix64, and the shifts and factors of its first two steps
STEPS = tuple((np.uint64(k), np.uint64(f)) for k, f in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)))
BLOCK = 1 << 15  # clients whose draws are made at a time: they stay in a core's cache


@cache
def key_of(text: str) -> int:
    """64-bit key of a name or purpose, the same on every machine."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def client_keys(names: Sequence[str]) -> np.ndarray:
    """[n] uint64 keys of the clients' names."""
    parts = (names[k : k + BLOCK] for k in range(0, len(names), BLOCK))  # a digest of 8 bytes is an object of 41
    words = b"".join([b"".join([blake2b(name.encode(), digest_size=8).digest() for name in part]) for part in parts])
    return np.frombuffer(words, dtype="<u8").astype(np.uint64)


def mix(*values: int | np.ndarray) -> np.ndarray:
    """Hash integers or uint64 arrays that broadcast into uint64 (the splitmix64 finaliser, applied once per value)."""
    with np.errstate(over="ignore"):  # products wrap around, as the hash has them
        h = WEYL
        for value in values:
            whole = isinstance(value, np.ndarray)
            v = value.astype(np.uint64, copy=False) if whole else np.uint64(value & 0xFFFFFFFFFFFFFFFF)
            h = h ^ v
            h += WEYL
            for shift, factor in STEPS:
                h ^= h >> shift
                h *= factor
            h ^= h >> np.uint64(31)
    return np.asarray(h)


def uniform(*values: int | np.ndarray) -> np.ndarray:
    """`mix` as float64 in [0, 1), element by element."""
    return (mix(*values) >> np.uint64(11)) * 2.0**-53


def generator_key(seed: int, purpose: str, round: int, client: int | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two words of a generator's key; of many at once for many clients."""
    return mix(seed, key_of(purpose)), mix(round, client)


def generator(seed: int, purpose: str, round: int = 0, client: int = 0) -> np.random.Generator:
    """A generator for one purpose, round and client (`client` is a key of `client_keys`)."""
    key = np.stack(generator_key(seed, purpose, round, int(client)))
    return np.random.Generator(np.random.Philox(key=key))


class Rekeyed:
    """One generator that is given the keys of others in turn: their draws, at a seventh of the cost of making them."""

    def __init__(self) -> None:
        self._bits = np.random.Philox(key=np.zeros(2, dtype=np.uint64))
        self._generator, self._start = np.random.Generator(self._bits), self._bits.state

    def __call__(self, key: np.ndarray) -> np.random.Generator:
        """The generator with this key ([2] uint64), at its beginning; the last one is gone."""
        self._start["state"]["key"] = key
        self._bits.state = self._start
        return self._generator


def priorities(seed: int, purpose: str, round: int, keys: np.ndarray) -> np.ndarray:
    """[n] uint64, one independent uniform draw per client: the m smallest are a uniform sample of m clients."""
    return mix(seed, key_of(purpose), round, keys)


def below(bound: int, h: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Where `mix(..., keys)`, of a hash h so far, is below a multiple of 2^33, which its last shift leaves."""
    (g, s), few = np.empty((2, min(BLOCK, len(keys))), dtype=np.uint64), list[np.ndarray]()
    for k in range(0, len(keys), BLOCK):
        block = keys[k : k + BLOCK]
        g, s = g[: len(block)], s[: len(block)]
        np.bitwise_xor(block, h, out=g)
        g += WEYL
        for shift, factor in STEPS:
            np.right_shift(g, shift, out=s)
            g ^= s
            g *= factor
        few.append(k + np.flatnonzero(g < np.uint64(bound)))
    return np.concatenate(few)
