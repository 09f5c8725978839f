"""Choosing settings on validation data: a climb on a wide grid, which ends where the neighbours are worse and costs no
more for a wider one.
"""

from collections.abc import Callable, Sequence
from functools import cache
from math import inf


def uphill(score: Callable[[tuple[int, ...]], float], shape: Sequence[int]) -> tuple[int, ...]:
    """A place on a grid that no neighbour along an axis is better than, from the middle along one axis after another.

    score: of a place, computed once for each; the higher the better, minus infinity where it diverged
    shape: of the grid
    """
    score, at, before = cache(score), tuple(length // 2 for length in shape), None
    while at != before:
        before = at
        for axis, length in enumerate(shape):
            for step in (1, -1):
                while 0 <= (k := at[axis] + step) < length:
                    there = (*at[:axis], k, *at[axis + 1 :])
                    if score(there) <= score(at) > -inf:
                        break
                    at = there
    return at
