"""Verdicts on constructed numbers: what must count as a gain, a loss, noise, or as undecided."""

import math

import pytest

from polyfed.core.scores import RMSE
from polyfed.report.pairs import ONE_SEED, UNCLEAR, UNTESTED, interval, sample_std, verdict

ROLES = {"local": "own", "fedavg": "common", "ditto": "personalised"}


def seeds(*values):
    return dict(enumerate(values))


def test_interval_is_students_t():
    """d = 1, 2, 3: mean 2, std 1, t(0.975, 2 degrees of freedom) = 4.302653."""
    found = interval([1.0, 2.0, 3.0])
    half = 4.302652729749464 / math.sqrt(3)
    assert (found.mean, found.low, found.high) == pytest.approx((2.0, 2 - half, 2 + half))
    assert found.seeds == 3


def test_interval_holds_jointly_over_comparisons():
    """Bonferroni: two comparisons take the quantile 1 - 0.05/4, t(0.9875, 2) = 6.205347."""
    found = interval([1.0, 2.0, 3.0], comparisons=2)
    assert found.high - found.mean == pytest.approx(6.205347 / math.sqrt(3), rel=1e-6)


def test_std_over_seeds_is_the_sample_std():
    assert sample_std([1.0, 3.0]) == pytest.approx(math.sqrt(2))
    assert math.isnan(sample_std([1.0]))


def test_one_pair_has_no_interval():
    found = interval([0.5])
    assert found.mean == 0.5
    assert found.sign is None


def test_equal_differences_are_not_taken_for_certainty():
    """Three seeds that all differ by one of twenty samples: the floor keeps zero inside the interval."""
    assert interval([0.05] * 3, floor=0.5 / 20).sign == 0
    assert interval([0.05] * 3).sign == 1


def test_clear_gain():
    v = verdict({"local": seeds(0.70, 0.72, 0.71), "ditto": seeds(0.80, 0.83, 0.81)}, ROLES)
    assert v.text == "personalised (ditto)"
    assert v.gains["ditto"].mean == pytest.approx(0.31 / 3)


def test_clear_loss_of_every_shared_method_means_own():
    own, worse = seeds(0.80, 0.82, 0.81, 0.80), seeds(0.60, 0.61, 0.62, 0.60)
    v = verdict({"local": own, "fedavg": worse, "ditto": seeds(0.7, 0.71, 0.7, 0.71)}, ROLES)
    assert (v.text, v.choice) == ("own", "local")


def test_one_method_that_may_be_as_good_forbids_the_verdict_own():
    own, noisy = seeds(0.80, 0.82, 0.81), seeds(0.60, 0.95, 0.80)
    assert verdict({"local": own, "fedavg": seeds(0.6, 0.6, 0.6), "ditto": noisy}, ROLES).text == UNCLEAR


def test_noise():
    assert verdict({"local": seeds(0.7, 0.8, 0.75), "fedavg": seeds(0.8, 0.7, 0.78)}, ROLES).text == UNCLEAR


def test_pairing_finds_a_small_steady_gain_under_a_large_common_variation():
    own = [0.5, 0.6, 0.7, 0.8]
    gain = (0.02, 0.021, 0.019, 0.02)
    v = verdict({"local": seeds(*own), "fedavg": seeds(*(x + d for x, d in zip(own, gain, strict=True)))}, ROLES)
    assert v.text == "common"


def test_only_seeds_that_both_have_are_paired():
    v = verdict({"local": {0: 0.5, 1: 0.6}, "fedavg": {1: 0.7, 2: 0.9}}, ROLES)
    assert v.gains["fedavg"].seeds == 1
    assert v.text == ONE_SEED


def test_single_seed_decides_nothing():
    v = verdict({"local": seeds(0.5), "ditto": seeds(0.9)}, ROLES)
    assert (v.text, v.choice, v.best) == (ONE_SEED, None, "ditto")


def test_simpler_model_is_named_when_personalising_adds_nothing_clear():
    own, common = seeds(0.60, 0.61, 0.62), seeds(0.80, 0.81, 0.82)
    assert verdict({"local": own, "fedavg": common, "ditto": seeds(0.84, 0.78, 0.83)}, ROLES).text == "common"
    assert (
        verdict({"local": own, "fedavg": common, "ditto": seeds(0.90, 0.91, 0.92)}, ROLES).text
        == "personalised (ditto)"
    )


def test_lower_is_better():
    rmse = {"local": seeds(2.0, 2.1, 2.0), "fedavg": seeds(1.0, 1.1, 1.05)}
    v = verdict({k: {s: RMSE.merit(x) for s, x in found.items()} for k, found in rmse.items()}, ROLES)
    assert v.text == "common"
    assert v.gains["fedavg"].mean > 0


def test_without_own_model_the_common_one_is_the_reference():
    v = verdict({"fedavg": seeds(0.6, 0.61, 0.6), "ditto": seeds(0.8, 0.8, 0.81)}, ROLES)
    assert (v.reference, v.text) == ("fedavg", "personalised (ditto)")


def test_client_without_test_samples():
    nothing = seeds(math.nan, math.nan)
    assert verdict({"local": nothing, "fedavg": nothing}, ROLES).text == UNTESTED
