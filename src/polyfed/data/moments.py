"""Medians, means and deviations of columns over several clients, who only say sums: what a server would add up."""

import math
from collections.abc import Callable, Sequence

import numpy as np


def moments(rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(mean, deviation) of every column of the rows [n_i, d] of some clients: sums, then squares about the mean."""
    n = sum(len(x) for x in rows)
    mean = total([x.sum(0) for x in rows]) / n
    return mean, deviation(mean, total([np.square(x - mean).sum(0) for x in rows]) / n)


def total(sums: Sequence[np.ndarray]) -> np.ndarray:
    """The sum [d] of some clients' sums, rounded once: as integers have it, whatever hides them."""
    return np.array([math.fsum(of) for of in zip(*sums, strict=True)])


def deviation(mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """The deviation of every column; that of a constant one is 1."""
    std = np.sqrt(variance)
    return np.where(std <= 1e-12 * np.abs(mean), 1.0, std)  # below that it is rounding of a constant


def filling(rows: Sequence[np.ndarray]) -> np.ndarray:
    """The mean of every column of the rows [n_i, d] of some clients, NaN left out; 0 for a column without a value."""
    sums = total([np.where(np.isnan(x), 0.0, x).sum(0) for x in rows])
    return sums / np.maximum(sum(((~np.isnan(x)).sum(0) for x in rows), start=np.zeros(rows[0].shape[1])), 1)


def median(rows: Sequence[np.ndarray]) -> np.ndarray:
    """The median of each column of the clients' rows [n_i, d], as `medians` has it, NaN left out; 0 without values."""
    x = np.concatenate(rows)
    there = (~np.isnan(x)).sum(0)
    keys = np.sort(np.where(np.isnan(x), np.iinfo(np.int64).max, ordered(x)), axis=0)
    ranks = (np.maximum(there - 1, 0) // 2, there // 2)
    low, high = (ordered(np.take_along_axis(keys, at[None], 0)[0].view(np.float64)).view(np.float64) for at in ranks)
    return np.where(there > 0, low + (high - low) / 2, 0.0)


def medians(count: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]], columns: int, ways: int = 1) -> np.ndarray:
    """[columns] medians found from counts alone, by a search over the ordered floats; 0 without a value.

    `count` maps thresholds [k, columns] to the numbers of values [columns] and of those at most each threshold.
    """
    low = [[-(1 << 63)] * columns for _ in range(2)]  # for each of the middle ranks; Python's integers do not wrap
    high = [[(1 << 63) - 1] * columns for _ in range(2)]
    there = np.zeros(columns, dtype=np.int64)
    while low != high:
        at = [
            [a + (b - a) * j // (ways + 1) for a, b in zip(low[r], high[r], strict=True)]
            for r in range(2)
            for j in range(1, ways + 1)
        ]
        there, counts = count(np.array(at, dtype=np.int64))
        for r in range(2):
            for c in range(columns):
                rank = (int(there[c]) - 1) // 2 if r == 0 else int(there[c]) // 2
                for j in range(ways):
                    k = r * ways + j
                    if counts[k, c] > rank:
                        high[r][c] = min(high[r][c], at[k][c])
                        break
                    low[r][c] = max(low[r][c], min(at[k][c] + 1, high[r][c]))
    middle = [ordered(np.array(lows, dtype=np.int64).view(np.float64)).view(np.float64) for lows in low]
    return np.where(there > 0, middle[0] + (middle[1] - middle[0]) / 2, 0.0)


def ordered(x: np.ndarray) -> np.ndarray:
    """The bits of floats as integers in the order of the floats; the same again turns them back."""
    bits = np.ascontiguousarray(x, dtype=np.float64).view(np.int64)
    return bits ^ ((bits >> 63) & np.iinfo(np.int64).max)
