"""The mathematics of the intervals: identities, other people's functions, and coverage in a short simulation."""

import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_1samp
from sklearn.metrics import roc_auc_score

from polyfed.metrics import terms
from polyfed.metrics.scores import KNOWN
from polyfed.report import intervals
from polyfed.report.intervals import Spread
from polyfed.report.pairs import evidence


def delong(one, other, ill):
    """(difference of two areas, its variance): that of placements' differences in each class over its size."""
    pairs = [(s[ill][:, None] > s[~ill]) + 0.5 * (s[ill][:, None] == s[~ill]) for s in (one, other)]
    gap = pairs[0] - pairs[1]
    return gap.mean(), gap.mean(1).var(ddof=1) / ill.sum() + gap.mean(0).var(ddof=1) / (~ill).sum()


def test_one_test_set_gives_delongs_interval_of_an_area():
    """And the bootstrap's: patients drawn anew within each class; 1500 draws know a deviation to 2 %."""
    rng = np.random.default_rng(0)
    ill = rng.random(300) < 0.3
    one = rng.normal(size=300) + ill
    other = one + rng.normal(size=300)
    found = intervals.spread((terms.auc(one, ill) - terms.auc(other, ill))[None])
    gain, variance = delong(one, other, ill)
    assert found.gain == pytest.approx(gain) == roc_auc_score(ill, one) - roc_auc_score(ill, other)
    assert found.sampling == pytest.approx(variance, rel=1e-9)
    rng, sick, well = np.random.default_rng(1), np.flatnonzero(ill), np.flatnonzero(~ill)
    drawn = []
    for _ in range(1500):
        at = np.r_[rng.choice(sick, len(sick)), rng.choice(well, len(well))]
        drawn.append(terms.auc(one[at], ill[at]).mean() - terms.auc(other[at], ill[at]).mean())
    assert math.sqrt(variance) == pytest.approx(np.std(drawn), rel=0.08)


def test_one_split_is_the_paired_t_test():
    gain = np.random.default_rng(0).normal(0.3, 1, 50)
    found = intervals.spread(gain[None])
    assert found.sampling == pytest.approx(gain.var(ddof=1) / 50)
    assert intervals.p_value(found.gain, found.sampling or 0, 49) == pytest.approx(ttest_1samp(gain, 0).pvalue)


def test_degrees_of_freedom_of_one_split():
    """1000 patients of whom two methods disagree on 6 say no more than 6 patients do. At kurtosis 7 a variance from n
    samples has n/3; ten that look even may be of that kind. The smallest class leaves one fewer than it has samples."""
    gain, rng = np.zeros(1000), np.random.default_rng(0)
    gain[:6] = [1, -1, 1, 1, -1, 1]
    assert intervals.spread(gain[None]).freedom == pytest.approx(12, abs=1)
    assert intervals.spread(rng.normal(size=(1, 1000))).freedom > 300
    assert intervals.spread(np.tile([1.0, -1.0], 5)[None]).freedom == pytest.approx(3)
    for size in (2, 5):
        classes = (np.arange(60) < size).astype(int)
        assert intervals.spread(rng.normal(size=(1, 60)), 1.0, classes=classes).freedom == size - 1


def test_a_score_without_bounds_shows_no_more_than_the_smaller_of_two_classes_does():
    """Of 60 patients three are ill: three degrees of freedom; if none is, nothing is known of the ill: one."""
    values, ill = np.random.default_rng(0).normal(size=(1, 60)), np.arange(60)
    for few, freedom in ((0, 1), (1, 1), (3, 3)):
        assert intervals.spread(values, classes=(ill < few) * 1, of_two=0).freedom == freedom
    assert intervals.spread(values, classes=ill % 2, of_two=0).freedom == intervals.spread(values).freedom
    added = [(np.c_[ill, ill < 3], values[0])]
    for name in ("brier", "log-loss", "accuracy"):
        found = evidence(KNOWN[name], values.mean(1), added, (0.3, 200), 1.0).spread.freedom
        assert (found == 3) == (name != "accuracy")


def test_agreement_everywhere_leaves_half_a_sample_either_way_where_a_score_has_bounds():
    assert intervals.spread(np.zeros((1, 98)), span=1.0).sampling == pytest.approx(1e-4)
    assert intervals.spread(np.zeros((1, 98))).sampling == 0
    assert intervals.spread(np.array([[0.3]])).sampling is None
    assert intervals.spread(np.array([[0.3]]), span=1.0).sampling == pytest.approx(1 + 1 / 9)


def test_clusters_by_sample_are_unbiased_for_stable_models():
    """What a patient adds is fixed and who is tested is drawn: the variance of the mean over S splits, over patients
    and draws, is v/n (1 + (1 - f)/(S f))."""
    rng, found, means, n, m, s = np.random.default_rng(0), [], [], 60, 20, 4
    for _ in range(3000):
        patient = rng.normal(size=n)
        values = np.full((s, n), math.nan)
        for row in values:
            at = rng.permutation(n)[:m]
            row[at] = patient[at]
        spread = intervals.spread(values)
        found.append(spread.sampling)
        means.append(spread.gain)
    exact = (1 + (1 - m / n) / (s * m / n)) / n
    assert np.var(means) == pytest.approx(exact, rel=0.08)
    assert np.mean(found) == pytest.approx(exact, rel=0.03)


def test_mean_of_sites_adds_their_variances():
    rng = np.random.default_rng(0)
    sites = [intervals.spread(rng.normal(size=(1, n))) for n in (20, 50, 90)]
    whole = intervals.mean_spread(sites)
    assert whole.gain == pytest.approx(np.mean([s.gain for s in sites]))
    assert whole.sampling == pytest.approx(sum(s.sampling or 0 for s in sites) / 9)
    assert min(s.freedom for s in sites) < whole.freedom < sum(s.freedom for s in sites)


def test_samples_and_splits_add_up():
    """a + s^2 max(1/S, f/(1 - f)/3): at f = 1/4 a ninth of s^2 from nine splits on, on a fixed test set always 1/S.
    Degrees of freedom by Satterthwaite. Without samples it is Nadeau and Bengio's."""
    d = np.array([1.0, 2.0, 4.0])
    a, square = 0.5, d.var(ddof=1)
    assert intervals.variance(Spread(d), share=0.25) == pytest.approx((square * (1 / 3 + 1 / 3), 2))
    assert intervals.variance(Spread(d), None)[0] == pytest.approx(square / 3)
    var, freedom = intervals.variance(Spread(d, a, 20.0), share=0.25)
    assert var == pytest.approx(a + square / 3)
    assert freedom == pytest.approx(var**2 / (a**2 / 20 + (square / 3) ** 2 / 2))
    many = Spread(np.tile([1.0, -1.0], 8), a, 20.0)
    assert intervals.variance(many, 0.25)[0] == pytest.approx(a + 16 / 15 / 9)
    assert intervals.variance(many, None)[0] == pytest.approx(a + 16 / 15 / 16)


def test_a_sample_alone_in_one_of_five_classes_moves_a_fifth_of_the_score():
    """Of two classes: the whole score, or half of a mean over both; half of it is taken, either way."""
    values = np.random.default_rng(0).normal(size=(1, 41))
    five, two = np.r_[0, np.arange(40) % 4 + 1], np.r_[0, np.ones(40, dtype=int)]
    plain = intervals.spread(values, 1.0).sampling or 0
    for classes, of_two, part in ((five, 1, 1 / 5), (five, 2, 1 / 5), (two, 1, 1.0), (two, 2, 1 / 2)):
        found = intervals.spread(values, 1.0, classes=classes, of_two=of_two)
        assert (found.sampling or 0) - plain == pytest.approx(part**2 / 4)


def test_holm():
    """0.01 <= 0.05/4, 0.015 <= 0.05/3, but 0.03 > 0.05/2: the last is not looked at."""
    p = np.array([0.03, 0.01, math.nan, 0.015, 0.04])
    assert intervals.holm(p).tolist() == [False, True, False, True, False]


def test_effort():
    """Stable models, 200 patients, a third tested: with more splits the variance falls to v/n and no further. With
    degrees of freedom enough four times as many patients see half the gain; few of them become more, and what one
    sample may hide becomes less, so that fewer patients do."""
    spread = Spread(np.random.default_rng(0).normal(0, 0.05, 5), 1 / 200 * 1.4, 150.0)
    seen = [intervals.seen(spread, 1 / 3, k) for k in (5, 10, 20, 80)]
    assert seen == sorted(seen, reverse=True)
    found, easy, hopeless = (intervals.needed(spread, 1 / 3, gain) for gain in (seen[0] / 2, seen[1] * 1.001, 1e-4))
    plenty, few, rare = (replace(spread, freedom=f, bound=b) for f, b in ((1e9, 0.0), (3.0, 0.0), (1e9, 0.003)))
    half, root = (intervals.seen(plenty, 1 / 3, 5, times=k) for k in (4.0, 1.0))
    assert root / half == pytest.approx(2)
    assert found.times == pytest.approx(4, rel=0.02)
    for one in (few, rare):
        times = intervals.needed(one, 1 / 3, intervals.seen(one, 1 / 3, 5) / 2).times
        assert 1 < times < 3.9
        assert intervals.seen(one, 1 / 3, 5, times=times) == pytest.approx(intervals.seen(one, 1 / 3, 5) / 2, rel=0.02)
    assert 5 < (easy.splits or 0) <= 10
    assert hopeless.splits is None


def test_what_is_seen_of_stable_models_is_as_the_formulas_say():
    """Without any spread over splits, a/(1 + (1 - f)/(4 f)) (1 + (1 - f)/(10 f)): f = 1/5, from 4 splits to 10. Of one
    split of many samples (1.960 + 0.842) standard errors are seen four times in five, as by a z test."""
    found, z = intervals.seen(Spread(np.zeros(4), 1e-4, 1e6), 0.2, 10), 1.959964 + 0.841621
    assert found == pytest.approx(z * math.sqrt(1e-4 * 1.4 / 2), rel=1e-4)
    assert intervals.seen(Spread(np.array([0.0]), 1e-4, 1e6), None, 1) == pytest.approx(1e-2 * z, rel=1e-3)


def areas(rng, ill, n=60):
    """(what each of `ill` + n patients adds to the gain in AUC of two equally good models, who is ill)."""
    y, common = np.arange(ill + n) < ill, rng.normal(size=ill + n)
    one, other = (0.7 * (common + rng.normal(size=ill + n)) + 1.2 * y for _ in range(2))
    return terms.auc(one, y) - terms.auc(other, y), y.astype(int)


def balanced(rng, ill, n=60):
    """As `areas`, of two models that are right three times in four."""
    y = (np.arange(ill + n) < ill).astype(int)
    one, other = (rng.random(ill + n) < 0.75 for _ in range(2))
    return terms.balanced_accuracy(one, y) - terms.balanced_accuracy(other, y), y


def survivals(rng, dead, n=60):
    """As `areas`, of concordance with `dead` events and n censored."""
    risk = rng.normal(size=dead + n)
    time, event = rng.exponential(np.exp(-risk)), rng.permutation(np.arange(dead + n) < dead)
    one, other = (terms.concordance(risk + rng.normal(size=dead + n), time, event) for _ in range(2))
    return one - other, np.where(event, 1, -1)


def covered(found, truth=0.0, share=0.3):
    return abs(found.gain - truth) <= intervals.half_width(*intervals.variance(found, share))


@pytest.mark.parametrize("draw", [areas, balanced, survivals])
@pytest.mark.parametrize("few", [1, 2, 3])
def test_coverage_where_a_class_has_one_to_three_samples(draw, few):
    """Of 200 intervals, 94 % would be fewer than 178 once in a thousand. Without regard for classes one sample gives 49
    (AUC), 62 and 54 % and two give 91, 95 and 91 %."""
    rng, held = np.random.default_rng(few), []
    while len(held) < 200:
        values, classes = draw(rng, few)
        if np.isfinite(values).all():
            held.append(covered(intervals.spread(values[None], 1.0, classes=classes)))
    assert sum(held) > 178


def test_samples_that_sites_share_are_counted_once():
    """Two sites that test the same patients know no more than one of them; if they are others', half the variance."""
    values = np.random.default_rng(0).normal(size=(1, 80))
    one, same, other = (intervals.spread(values, ids=ids) for ids in (np.arange(80), np.arange(80), np.arange(80, 160)))
    assert intervals.mean_spread([one, same]).sampling == pytest.approx(one.sampling, rel=0.01)
    assert intervals.mean_spread([one, other]).sampling == pytest.approx((one.sampling or 0) / 2)


REPEATS = 120


@pytest.fixture(scope="module")
def simulated():
    path = Path(__file__).resolve().parents[2] / "benchmarks/coverage.py"
    spec = importlib.util.spec_from_file_location("coverage_benchmark", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module, module.part(("linear", "even", 4, REPEATS)) + module.part(("linear", "zero rmse", 4, REPEATS))


@pytest.mark.parametrize("design", ["S=2", "S=3", "S=5", "S=10", "5 folds, S=10"])
def test_coverage_of_the_true_gain(simulated, design):
    """An interval that holds it 93 % of the time falls below the bound by chance once in a thousand designs, taking the
    four sites of a population for one draw. Student's t over the splits, as it was before, falls below it."""
    module, rows = simulated
    bound = 0.93 - 3.1 * math.sqrt(0.93 * 0.07 / REPEATS)
    found = {r["rule"]: r for r in module.chosen(rows, design=design, scenario="even", target="procedure")}
    assert np.mean(found["polyfed"]["covered"][:-1]) > bound
    assert found["polyfed"]["covered"][-1] > bound
    shorter = [p < b for p, b in zip(found["polyfed"]["half"], found["Nadeau-Bengio"]["half"], strict=True)]
    assert all(shorter)
    if design == "S=10":
        assert np.mean(found["t"]["covered"][:-1]) < bound
        assert found["t"]["covered"][-1] < bound


def test_wrong_verdicts_where_no_site_gains(simulated):
    """At most 5 % of the federations have any; t over ten splits calls a fifth of them wrongly."""
    module, rows = simulated
    by = {r["rule"]: r for r in module.chosen(rows, design="S=10", scenario="zero rmse")}
    assert by["polyfed"]["any"] < 0.05 + 3.1 * math.sqrt(0.05 * 0.95 / REPEATS)
    assert by["t"]["any"] > 0.2
