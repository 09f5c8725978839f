"""Fixed point: numbers as integers modulo 2^64, whose sums are exact in any order, with masks or without."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from polyfed.base.errors import Refusal, RunError

PLACES = {torch.float32: 24, torch.float64: 40}  # binary places: from here on the rounding is that of the floats
WHOLE = 64  # binary places of numbers of two words


class OutOfRange(RunError):
    """A number too large for the sum; it is refused, since a sum that wraps is a wrong number. row: whose it is"""

    def __init__(self, row: int, value: float, most: float):
        super().__init__(
            f"found {value:.6g}, expected numbers between -{most:.6g} and {most:.6g}: their sum would wrap"
        )
        self.row = row
        self.outside = "a number is too large for the sum"


def largest(places: int, total: float) -> float:
    """R with total 2^places R = 2^62: no sum of numbers up to R wraps; total: sum of weights, or number of terms."""
    return 2.0 ** (62 - places) / max(total, 1.0)


def encode(values: Tensor, places: int, total: float, keep: bool = False, out: Tensor | None = None) -> Tensor:
    """Numbers [s, ...] rounded to the lattice 2^-places, as int64 of which sums modulo 2^64 are exact.

    keep: put the rounded numbers in the place of `values`; out: memory, whose allocation would take longer than its
    numbers. Raises OutOfRange for one larger than `largest` allows; none is ever wrapped.
    """
    most = largest(places, total)
    if values.numel() and not max(float(t.abs()) for t in torch.aminmax(values)) <= most:
        flat = values.abs().reshape(len(values), -1)
        row = int((~(flat <= most)).any(1).nonzero()[0])
        wrong = values[row].reshape(-1)[~(flat[row] <= most)]
        raise OutOfRange(row, float(wrong[0]), most)
    # exact in any precision: a factor that is a power of two, and numbers too large for a fraction stay as they are
    scaled = (values.mul_(2.0**places) if keep else values * 2.0**places).round_()
    words = scaled.long() if out is None else out.copy_(scaled)
    if keep:
        values.mul_(2.0**-places)
    return words


def decode(words: Tensor, places: int, dtype: torch.dtype) -> Tensor:
    """Turn sums of `encode` back into numbers."""
    return (words.double() * 2.0**-places).to(dtype)


def wide(values: Sequence[float]) -> np.ndarray:
    """[2 d] words of numbers as integers of 128 bits. Raises Refusal for one whose sum over sites might wrap."""
    words: list[int] = []
    for v in values:
        if not abs(v) < 2.0**50:
            raise Refusal(f"found {v:.6g} in a sum over sites, expected a number below {2.0**50:.3g}: it would wrap")
        numerator, denominator = v.as_integer_ratio()
        x = ((numerator << WHOLE) + denominator // 2) // denominator
        words += [x % 2**64, (x >> 64) % 2**64]
    return np.array(words, dtype=np.uint64)


def narrow(words: np.ndarray) -> list[float]:
    """The numbers of `wide`."""
    pairs = zip(words[::2].tolist(), words[1::2].tolist(), strict=True)
    whole = [low + (high << 64) for low, high in pairs]
    return [(x - (x >> 127 << 128)) / 2**WHOLE for x in whole]
