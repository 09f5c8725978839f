"""The game's numbers against brute force: orders of joining, definitions of stability, exact means of the sampling."""

from itertools import combinations, permutations, product

import numpy as np
import pytest

from polyfed_games import values as game


def random_gains(n, seed=0):
    """A gain of every member in every coalition; none alone."""
    rng = np.random.default_rng(seed)
    found = {c: rng.normal(size=n) for c in range(1, 1 << n)}
    return found | {1 << i: np.zeros(n) for i in range(n)}


def value(weights, gains, receiver):
    return sum(w * gains[c][receiver] for c, w in weights.items())


def by_orders(n, gains, receiver, giver):
    """The Shapley value as it is defined: the mean change over all orders of the others."""
    others, found = [k for k in range(n) if k != receiver], []
    for order in permutations(others):
        before = game.coalition([receiver, *order[: order.index(giver)]])
        found.append(gains[before | 1 << giver][receiver] - gains[before][receiver])
    return np.mean(found)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_the_shapley_value_is_the_mean_over_all_orders_and_is_shared_out_in_full(n):
    gains = random_gains(n)
    for i in range(n):
        phi = {j: value(game.shapley(n, i, j), gains, i) for j in range(n) if j != i}
        assert phi == pytest.approx({j: by_orders(n, gains, i, j) for j in phi}, abs=1e-12)
        assert sum(phi.values()) == pytest.approx(gains[game.everyone(n)][i], abs=1e-12)  # efficiency


def test_a_step_of_a_walk_is_an_unbiased_sample_of_the_shapley_value():
    """The law of one walk in full: given that j joins i in it the mean change is the value; pairs are met evenly."""
    n, gains = 4, random_gains(4, seed=3)
    length = {1: 1 / 2, 2: 1 / 2 - 1 / 3, 3: 1 / 3}  # P(exactly p newcomers), from P(at least p) = 1/p, at most n - 1
    for i, j in permutations(range(n), 2):
        total = met = 0.0
        for (p, chance), order in product(length.items(), permutations(range(n))):
            for after, before in game.joinings([order[: p + 1]], i, j):
                total += chance / 24 * (gains[after][i] - gains[before][i])
                met += chance / 24
        assert met == pytest.approx(1 / n)
        assert total / met == pytest.approx(value(game.shapley(n, i, j), gains, i))


def test_the_walks_have_the_lengths_that_this_takes_and_follow_from_the_seed():
    n, count = 20, 200
    orders = game.walks(n, count, seed=5)
    for p in range(1, n):
        assert abs(sum(len(w) > p for w in orders) - count / p) <= 1
    assert orders == game.walks(n, count, 5) != game.walks(n, count, 6)
    assert all(len(set(w)) == len(w) for w in orders)
    first = np.bincount([w[0] for w in game.walks(4, 4000, 0)])
    assert abs(first / 1000 - 1).max() < 0.15


def test_bell_numbers_and_the_core_is_not_judged_where_coalitions_are_not_known():
    assert [sum(1 for _ in game.partitions(n)) for n in range(1, 8)] == [1, 2, 5, 15, 52, 203, 877]
    assert all(sum(p) == 31 for p in game.partitions(5))
    part = {c: gain for c, gain in random_gains(4).items() if c != 0b0101}
    assert game.stability((0b0011, 0b1100), part, 4).core is None


@pytest.mark.parametrize("seed", range(6))
def test_stability_is_what_its_definition_says(seed):
    """Against plain loops over players and sets, for every partition of four."""
    n, gains = 4, random_gains(4, seed)
    for p in game.partitions(n):
        home = {i: c for c in p for i in game.members(c)}
        moves = [(i, t) for i in range(n) for t in (*p, 0) if t != home[i]]
        wish = [(i, t) for i, t in moves if gains[t | 1 << i][i] > gains[home[i]][i]]
        let = [(i, t) for i, t in wish if all(gains[t | 1 << i][j] >= gains[t][j] for j in game.members(t))]
        blocks = [
            s for k in range(1, n + 1) for s in combinations(range(n), k)
            if all(gains[game.coalition(s)][i] > gains[home[i]][i] for i in s)
        ]  # fmt: skip
        found = game.stability(p, gains, n)
        assert (found.nash, found.individual, found.core) == (not wish, not let, not blocks)


def test_who_is_indifferent_lets_a_newcomer_in():
    """Player 0 gains by joining 1, to whom it is all the same: allowed. If 1 loses the least bit, it is not."""
    for change, held in ((0.0, False), (-1e-9, True)):
        gains = {0b01: np.zeros(2), 0b10: np.zeros(2), 0b11: np.array([1.0, change])}
        found = game.stability((0b01, 0b10), gains, 2)
        assert (found.nash, found.individual) == (False, held)


def test_the_planted_partition_is_found_and_is_stable_in_every_sense():
    """Two groups whose members help each other, and a player who harms all but is helped by them."""
    worth = np.full((7, 7), -1.0)
    worth[:3, :3] = worth[3:6, 3:6] = 1.0
    worth[6, :6] = 0.1
    gains = {
        c: np.array([sum(worth[i, j] for j in game.members(c) if j != i) for i in range(7)]) for c in range(1, 128)
    }
    partition, found = game.most_stable(gains, 7, range(7))
    assert sorted(partition) == [0b111, 0b111000, 0b1000000] == sorted(game.grouped(worth))
    assert found.core
    assert found.individual
    assert not found.nash  # the seventh would join anybody, but none would have it
    assert found.against["nash"].movers == (6,)
    assert game.labels(sorted(partition), 7) == [0, 0, 0, 1, 1, 1, 2]
