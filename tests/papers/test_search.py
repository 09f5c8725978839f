"""The climb by which recipes choose settings on validation data."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyfed_papers.search import uphill


@pytest.mark.parametrize("at", [(k, j) for k in range(6) for j in range(5)])
def test_a_single_hill_is_climbed_wherever_it_is(at):
    assert uphill(lambda k: -((k[0] - at[0]) ** 2) - 2 * abs(k[1] - at[1]), (6, 5)) == at


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(0, 2**32 - 1))
def test_no_neighbour_is_better(shape, seed):
    """On any grid, with equal scores too; and no place is scored twice."""
    grid, asked = np.random.default_rng(seed).integers(0, 5, shape), Counter()

    def score(at):
        asked[at] += 1
        return grid[at]

    at = uphill(score, shape)
    assert max(asked.values(), default=1) == 1
    for axis, length in enumerate(shape):
        for k in (at[axis] - 1, at[axis] + 1):
            if 0 <= k < length:
                assert grid[(*at[:axis], k, *at[axis + 1 :])] <= grid[at]


@pytest.mark.parametrize("least", [0, 1, 6])
def test_what_diverges_is_left_behind(least):
    """Where the middle diverges too, or all but one place."""
    assert uphill(lambda at: -np.inf if at[0] > least else at[0], (7,)) == (least,)
