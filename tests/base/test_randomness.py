"""Draws depend on (seed, purpose, round, client) and on nothing else, and they are uniform."""

import numpy as np
from scipy.stats import kstest

from polyfed.base.randomness import Rekeyed, client_keys, generator, generator_key, mix, priorities, uniform

NAMES = [f"client-{i}" for i in range(10)]


def test_a_draw_does_not_depend_on_what_was_drawn_before():
    first = generator(3, "batches", 5, 7).permutation(20)
    generator(3, "batches", 4, 7).permutation(20)
    np.random.default_rng(0).random()
    assert (generator(3, "batches", 5, 7).permutation(20) == first).all()


def test_a_generator_that_is_given_another_key_draws_what_one_of_its_own_would():
    rekeyed, keys = Rekeyed(), client_keys(NAMES)
    for k, client in enumerate([*keys, *keys]):
        found = rekeyed(np.stack(generator_key(3, "batches", 5, client)))
        own = generator(3, "batches", 5, int(client))
        for n in (k + 1, 40, 7):
            assert np.array_equal(found.permutation(n), own.permutation(n))
        assert found.integers(0, 1 << 20, dtype=np.int32) == own.integers(0, 1 << 20, dtype=np.int32)


def test_every_part_of_the_key_matters():
    draws = [
        generator(*key).integers(0, 2**63)
        for key in ((0, "a", 0, 0), (1, "a", 0, 0), (0, "b", 0, 0), (0, "a", 1, 0), (0, "a", 0, 1), (0, "a", 1, 1))
    ]
    assert len(set(draws)) == len(draws)


def test_priorities_belong_to_clients_not_to_positions():
    keys, order = client_keys(NAMES), np.array([4, 1, 9, 0, 2, 3, 8, 7, 6, 5])
    assert (priorities(1, "cohort", 3, keys[order]) == priorities(1, "cohort", 3, keys)[order]).all()
    assert (priorities(1, "cohort", 3, keys[:4]) == priorities(1, "cohort", 3, keys)[:4]).all()


def test_mix_is_the_same_for_numbers_and_arrays():
    a = np.array([1, 2, 2**63 + 5], dtype=np.uint64)
    assert mix(7, a).tolist() == [int(mix(7, int(v))) for v in a]


def test_priorities_are_uniform_numbers():
    keys = client_keys([str(i) for i in range(2000)])
    assert kstest(priorities(0, "cohort", 0, keys) / 2.0**64, "uniform").pvalue > 1e-3
    assert kstest(uniform(0, keys), "uniform").pvalue > 1e-3


def test_client_keys_are_the_same_on_every_machine():
    assert client_keys(["oslo"])[0] == client_keys(["bern", "oslo"])[1]
    assert len(set(client_keys([str(i) for i in range(5000)]).tolist())) == 5000
