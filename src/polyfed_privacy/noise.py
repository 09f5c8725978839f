"""Discrete Gaussian noise, from a site's own secret: P(x) ~ exp(-x^2 / (2 sigma^2)) on the integers.

Canonne, Kamath, Steinke, "The Discrete Gaussian for Differential Privacy" (NeurIPS 2020), for what it is; drawn here
from a table. Noise lies on the lattice of the numbers that it hides: noise added to floats leaks through their last
bits (Mironov, CCS 2012). Every draw is a function of (secret, context, digest of the request) and of nothing else, so
that a message that is sent again is the same message, and no other message has the same noise.
"""

import secrets
from collections.abc import Iterable
from decimal import Decimal, localcontext
from functools import lru_cache
from hashlib import blake2b, shake_256

import numpy as np

TAIL = 13  # deviations beyond which the table ends: 2e-37 of the mass
FINE = 256  # bits of the table's arithmetic
COARSE = 1024  # largest deviation of a table; wider noise takes buckets of 2^k integers


def new_secret() -> bytes:
    """A site's secret: 32 bytes from the system."""
    return secrets.token_bytes(32)


def keyed(secret: bytes, parts: Iterable[object]) -> bytes:
    """A key [32] for one use: the lengths and texts of the parts decide it."""
    h = blake2b(key=secret, digest_size=32, person=b"polyfed noise")
    for part in parts:
        text = part if isinstance(part, bytes) else str(part).encode()
        h.update(len(text).to_bytes(8, "big") + text)
    return h.digest()


class Stream:
    """Uniform words of a key: SHAKE-256 of (key, block)."""

    def __init__(self, key: bytes):
        self._key, self._block = key, 0

    def take(self, n: int) -> np.ndarray:
        """[n] uint64, never the same twice."""
        self._block += 1
        text = shake_256(self._key + self._block.to_bytes(8, "big")).digest(8 * n)
        return np.frombuffer(text, dtype="<u8").astype(np.uint64, copy=False)


class Gaussian:
    """The discrete Gaussian of one deviation sigma, in units of the lattice.

    A magnitude's bucket comes from a table of 128-bit thresholds, its place in the bucket is uniform and then accepted
    in proportion; a negative zero is rejected. Comparisons that floats cannot decide are decided by more digits.
    """

    def __init__(self, sigma: float):
        if not (0 < sigma < 2.0**50):
            raise ValueError(f"sigma: found {sigma}, expected more than 0 and less than 2^50")
        self.sigma = sigma
        self.width = 1
        while sigma / self.width > COARSE:
            self.width *= 2
        high, low = _thresholds(sigma / self.width)
        self._high, self._low = high, low

    def draw(self, key: bytes, n: int) -> np.ndarray:
        """[n] int64 of a key of this use alone, see `keyed`."""
        stream, out, left = Stream(key), np.empty(n, dtype=np.int64), np.arange(n)
        while len(left):
            x, taken = self._tried(stream, len(left))
            out[left[taken]] = x[taken]
            left = left[~taken]
        return out

    def _tried(self, stream: Stream, n: int) -> tuple[np.ndarray, np.ndarray]:
        """n proposals, and which of them are taken."""
        bucket = self._buckets(stream.take(n), stream)
        rest = stream.take(n)
        place = (rest & np.uint64(self.width - 1)).astype(np.int64)
        negative = rest >> np.uint64(63) == 1
        x = bucket * self.width + place
        taken = ~(negative & (x == 0))
        if self.width > 1:
            taken &= self._accepted(bucket * self.width, place, stream.take(n), stream)
        return np.where(negative, -x, x), taken

    def _buckets(self, u: np.ndarray, stream: Stream) -> np.ndarray:
        bucket = np.searchsorted(self._high, u, side="left")
        for i in np.flatnonzero(np.searchsorted(self._high, u, side="right") != bucket):
            low = int(stream.take(1)[0])
            while bucket[i] < len(self._high) and self._high[bucket[i]] == u[i] and self._low[bucket[i]] <= low:
                bucket[i] += 1
        return bucket.astype(np.int64)

    def _accepted(self, start: np.ndarray, place: np.ndarray, u: np.ndarray, stream: Stream) -> np.ndarray:
        """True with probability exp(-((start + place)^2 - start^2) / (2 sigma^2))."""
        loss = place.astype(np.float64) * (2.0 * start + place) / (2 * self.sigma**2)
        limit, drawn = np.exp(-loss) * 2.0**64, u.astype(np.float64)
        taken = drawn < limit
        for i in np.flatnonzero(np.abs(drawn - limit) < 2.0**64 * 1e-13):
            taken[i] = _below(int(u[i]) << 64 | int(stream.take(1)[0]), int(start[i]), int(place[i]), self.sigma)
        return taken


def _below(u: int, start: int, place: int, sigma: float) -> bool:
    """True where u / 2^128 is below the acceptance, by 80 digits."""
    with localcontext() as context:
        context.prec = 80
        loss = Decimal(place) * (2 * start + place) / (2 * Decimal(sigma) ** 2)
        return Decimal(u) < (-loss).exp() * 2**128


@lru_cache(maxsize=64)
def _thresholds(sigma: float) -> tuple[np.ndarray, np.ndarray]:
    """128-bit cumulative thresholds of magnitudes 0, 1, ...: their upper and lower 64 bits."""
    with localcontext() as context:
        context.prec = 120
        ratio = int((-1 / (2 * Decimal(sigma) ** 2)).exp() * 2**FINE)  # of weight 1 to weight 0
        factor = int((-1 / Decimal(sigma) ** 2).exp() * 2**FINE)  # of a ratio to the one before it
    weight, sums = 1 << FINE, [1 << FINE]
    for _ in range(int(TAIL * sigma) + 2):
        weight = weight * ratio >> FINE
        ratio = ratio * factor >> FINE
        sums.append(sums[-1] + weight)
    cut = [(s << 128) // sums[-1] for s in sums[:-1]]
    high = np.array([t >> 64 for t in cut], dtype=np.uint64)
    low = np.array([t & (2**64 - 1) for t in cut], dtype=np.uint64)
    return high, low
