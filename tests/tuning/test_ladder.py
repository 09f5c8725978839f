"""The rule by which settings are chosen: what a search tries, where it ends, and what counts as an edge."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import polyfed as pf
from polyfed.base.values import Limits
from polyfed_tuning.ladder import Ladder, climb

SHARE = Limits(ge=0, le=1)


@pytest.mark.parametrize("best", [0.3, 0.003, 7.0, 40.0])
def test_a_choice_that_falls_towards_an_edge_ends_inside(best):
    """A planted objective whose best step lies in the grid, below it or above it; a score is never asked for twice."""
    asked = Counter()

    def score(at):
        asked[at] += 1
        return -abs(np.log(at[0] / best))

    found = climb(score, [Ladder((0.03, 0.1, 0.3, 1.0))], 16)
    tried = sorted(value for (value,) in found.tried)
    assert tried[0] < found.best[0] < tried[-1]
    assert found.edges == 0
    assert abs(np.log(found.best[0] / best)) < 0.3
    assert set(asked.values()) == {1}


@pytest.mark.parametrize(("falls", "limit"), [(1, 0.0), (-1, 1.0)])
def test_a_limit_that_means_something_is_tried_and_is_no_edge(falls, limit):
    """All alone, or one cluster; and without the limit's trial the choice counts as one at an edge."""
    found = climb(lambda at: -falls * at[0], [Ladder((0.2, 0.4, 0.6), SHARE)], 10)
    assert (found.best, found.edges) == ((limit,), 0)
    assert climb(lambda at: -falls * at[0], [Ladder((0.2, 0.4, 0.6), SHARE)], 3).edges == 1


def test_several_settings_are_chosen_together():
    """The best of one depends on the other; options without an order are all tried, and are at no edge."""
    ladders = [Ladder((0.1, 0.2, 0.3), Limits(ge=0)), Ladder.options(3)]
    found = climb(lambda at: (at[1] == 2) - abs(at[0] - (0.6 if at[1] == 2 else 0.2)), ladders, 24)
    assert found.best == (pytest.approx(0.6), 2)
    assert {kind for _, kind in found.tried} == {0, 1, 2}
    assert found.edges == 0


@given(st.lists(st.integers(2, 5), min_size=1, max_size=3), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_every_method_gets_the_same_number_of_trials(shape, trials, seed):
    """However rough its score: of different values the best is chosen, or one that is at no edge where the best is."""
    rng, scores = np.random.default_rng(seed), {}

    def score(at):
        return scores.setdefault(at, rng.normal())

    found = climb(score, [Ladder(tuple(np.arange(1.0, n + 1))) for n in shape], trials)
    assert len(found.tried) == len(scores) == trials
    assert found.tried[found.best] == max(scores.values()) or found.edges == 0


def test_no_number_of_trials_ends_at_an_edge_once_all_neighbours_are_no_better():
    """Along a ridge on which finer steps move both settings in turn: the trials may end between two of them."""

    def score(at):
        a, b = np.log(at)
        return -((a - b - 0.35) ** 2) - 0.1 * (a + b + 3.1) ** 2

    ladders = [Ladder((0.03, 0.1, 0.3)), Ladder((0.1, 0.3, 1.0))]
    assert [t for t in range(12, 60) if climb(score, ladders, t).edges] == []


@pytest.mark.parametrize("diverged", [-np.inf, np.nan])
@pytest.mark.parametrize("least", [0, 1, 6])
def test_what_diverges_is_left_behind(least, diverged):
    """Where the middle diverges too, or all but one place."""
    found = climb(lambda at: diverged if at[0] > least else at[0], [Ladder.options(7)], 7)
    assert found.best == (least,)


@pytest.mark.parametrize("diverged", [-np.inf, np.nan])
def test_a_search_ends_where_everything_diverges(diverged):
    found = climb(lambda at: diverged, [Ladder((0.03, 0.1, 0.3)), Ladder((1.0, 2.0, 4.0))], 12)
    assert len(found.tried) == 12
    assert found.best == (0.1, 2.0)


@pytest.mark.parametrize(
    ("values", "limits", "up", "after"),
    [
        ((0.5, 0.6, 0.7), Limits(), True, 0.8),
        ((0.5, 1.0, 1.5), Limits(ge=0), False, 0.0),
        ((0.4, 1.0, 1.6), Limits(ge=0), False, 0.0),  # not below where it ends
        ((0.0, 0.5, 1.0), Limits(ge=0), False, None),
        ((0.01, 0.1, 1.0), Limits(gt=0), True, 10.0),
        ((0.01, 0.1, 1.0), Limits(gt=0), False, 0.001),
        ((0.01, 0.1, 1.0), Limits(ge=0), False, 0.001),
        ((0.1, 0.2, 0.3), Limits(gt=0), False, 0.05),  # half the way to what it cannot be
        ((0.25, 0.5, 0.75, 0.9), SHARE, True, 1.0),
        ((0.7,), SHARE, True, None),  # one value is no search
    ],
)
def test_a_grid_goes_on_by_its_last_step_or_ratio(values, limits, up, after):
    assert Ladder(values, limits).beyond(values, up) == (None if after is None else pytest.approx(after))


def test_ratios_come_to_an_end_at_zero():
    assert Ladder((0.01, 0.1, 1.0), Limits(ge=0)).beyond((0.001, 0.01, 0.1, 1.0), False) == 0


def test_a_setting_ends_where_its_method_says():
    assert Ladder.of(pf.FPFC(), "lam", (0.5, 1.0)).limits.ge == 0
    assert Ladder.of(pf.FedACS(), "quantile", (0.5, 0.75)).limits[::2] == (0, 1)
    assert Ladder.of(pf.IFCA(), "k", (2, 3)).whole
    assert Ladder.of(pf.FedAvg(), "lr", (0.1, 0.2)).beyond((0.1, 0.2), False) == pytest.approx(0.05)
