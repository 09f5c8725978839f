"""Who takes part: sizes, frequencies, and nobody who is not there."""

import numpy as np
import pytest

from polyfed import native
from polyfed.base.errors import ConfigError
from polyfed.base.randomness import client_keys, mix, priorities
from polyfed.core.schedule import Availability, Bernoulli, Uniform, sample

KEYS = client_keys([f"client-{i}" for i in range(10)])


@pytest.mark.parametrize(("fraction", "size"), [(1.0, 10), (0.3, 3), (0.7, 7), (0.35, 3), (0.01, 1)])
def test_uniform_draws_the_floor_of_the_fraction_and_at_least_one(fraction, size):
    schedule = Uniform(fraction)
    for t in range(20):
        ids = schedule.cohort(0, t, KEYS)
        assert len(ids) == size == schedule.size(10)
        assert (np.diff(ids) > 0).all()
        turn = schedule.turn(0, t, KEYS)
        assert (turn.send == ids).all()
        assert (turn.take == ids).all()


def test_bernoulli_is_by_itself_and_never_empty():
    sizes = [len(Bernoulli(0.3).cohort(0, t, KEYS)) for t in range(2000)]
    assert abs(np.mean(sizes) - 3) < 5 * np.sqrt(10 * 0.3 * 0.7 / 2000) + 0.7**10
    assert np.var(sizes) == pytest.approx(10 * 0.3 * 0.7, rel=0.15)
    rare = [Bernoulli(0.001).cohort(0, t, KEYS) for t in range(50)]
    assert all(len(ids) >= 1 for ids in rare)
    assert len({int(ids[0]) for ids in rare}) > 5
    assert (Bernoulli(1.0).cohort(0, 0, KEYS) == np.arange(10)).all()


def test_availability_picks_only_who_is_there():
    trace = np.zeros((2, 10), dtype=bool)
    trace[0, :4] = trace[1, 6:] = True
    for t in range(20):
        ids = Availability(trace, 0.5).cohort(0, t, KEYS)
        assert len(ids) == 2
        assert trace[t % 2, ids].all()
    with pytest.raises(ConfigError, match="no client is reachable in round 1"):
        Availability(np.array([[True], [False]])).cohort(0, 1, KEYS[:1])


def test_a_sample_is_the_clients_with_the_smallest_priorities():
    for n in (1, 2, 30, 5000):
        keys = client_keys([f"client-{i}" for i in range(n)])
        for m in {0, 1, n // 2, n - 1, n, n + 3}:
            for t in range(20):
                order = np.argsort(priorities(7, "cohort", t, keys))
                assert np.array_equal(sample(7, "cohort", t, keys, m), np.sort(order[:m])), (n, m, t)


@pytest.mark.parametrize("by", ["0", *native.SETS])
@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 1000, 300_000])
def test_numpy_and_the_kernel_draw_the_cohorts_of_the_priorities(n, by, monkeypatch):
    monkeypatch.setenv("POLYFED_NATIVE", by)  # a set that is not there: the widest one
    keys = mix(5, np.arange(n))
    for seed, t in ((0, 0), (0, 1), (2**32, 10**6)):
        draw = priorities(seed, "cohort", t, keys)
        order = np.argsort(draw)
        for share in (0.3, min(1.0, 100.5 / n)):
            cohort = Uniform(share).cohort(seed, t, keys)
            assert np.array_equal(cohort, np.sort(order[: Uniform(share).size(n)]))
        for chance in (1e-9, min(1.0, 20 / n), 0.9):
            cohort = Bernoulli(chance).cohort(seed, t, keys)
            assert np.array_equal(cohort, np.sort(order[: max(1, (draw / 2.0**64 < chance).sum())]))


@pytest.mark.parametrize("wrong", [0, -0.1, 1.5, float("nan")])
def test_shares_outside_of_zero_to_one_are_refused(wrong):
    with pytest.raises(ConfigError, match=r"schedule\.fraction of Uniform: found"):
        Uniform(wrong)
    with pytest.raises(ConfigError, match=r"schedule\.probability of Bernoulli: found"):
        Bernoulli(wrong)
