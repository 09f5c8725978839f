"""Medians, means and deviations of columns over several clients, who only say sums: what a server would add up."""

from collections.abc import Callable, Sequence

import numpy as np


def moments(rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(mean, deviation) of every column of the rows [n_i, d] of some clients: sums, then squares about the mean."""
    n = sum(len(x) for x in rows)
    mean = sum((x.sum(0) for x in rows), start=np.zeros(rows[0].shape[1])) / n
    return mean, deviation(mean, sum((np.square(x - mean).sum(0) for x in rows), start=np.zeros(len(mean))) / n)


def deviation(mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """The deviation of every column; that of a constant one is 1."""
    found = np.sqrt(variance)
    return np.where(found <= 1e-12 * np.abs(mean), 1.0, found)


def median(rows: Sequence[np.ndarray]) -> np.ndarray:
    """The median of every column of the rows [n_i, d] of some clients, NaN left out, by adding up counts alone.

    A bisection over the ordered floats: how many values are at most t? 0 for a column without a value.
    """
    keys = [ordered(x) for x in rows]
    missing = [np.isnan(x) for x in rows]

    def count(f: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
        return sum((f(k, gap) for k, gap in zip(keys, missing, strict=True)), start=np.zeros(rows[0].shape[1], int))

    n = count(lambda _, gap: (~gap).sum(0))
    middle: list[np.ndarray] = []
    for rank in ((n - 1) // 2, n // 2):
        low = np.full(len(n), np.iinfo(np.int64).min)
        high = np.full(len(n), np.iinfo(np.int64).max)
        while (low < high).any():
            at = (low & high) + ((low ^ high) >> 1)  # their mean, rounded down, where a sum would overflow
            enough = count(lambda k, gap, at=at: ((k <= at) & ~gap).sum(0)) > rank
            low, high = np.where(enough, low, np.minimum(at, high - 1) + 1), np.where(enough, at, high)
        middle.append(ordered(low.view(np.float64)).view(np.float64))
    return np.where(n > 0, middle[0] + (middle[1] - middle[0]) / 2, 0.0)


def ordered(x: np.ndarray) -> np.ndarray:
    """The bits of floats as integers in the order of the floats; the same again turns them back."""
    bits = np.ascontiguousarray(x, dtype=np.float64).view(np.int64)
    return bits ^ ((bits >> 63) & np.iinfo(np.int64).max)
