"""The federated fit as a protocol: what is sent, who is left out and why, other methods, and what is refused."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

import polyfed as pf
import polyfed_clinical as clinical
from polyfed.base.errors import ConfigError, DataError
from polyfed_clinical.models import named
from polyfed_clinical.newton import ENDLESS, Optimum, why
from polyfed_clinical.page import headline, write_page

RNG = np.random.default_rng(5)
X = RNG.normal(size=(240, 3))
Y = (RNG.random(240) < 1 / (1 + np.exp(-X @ [1.0, -0.5, 0.2]))).astype(float)
SITES = [(X[:40], Y[:40]), (X[40:100], Y[40:100]), (X[100:], Y[100:])]


def survival(n: int = 80, seed: int = 0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 2))
    return x, np.ceil(10 * rng.exponential(np.exp(-x @ [0.5, -0.3]))), rng.integers(0, 2, n).astype(float)


def test_every_byte_is_that_of_a_message():
    """Sums; then p numbers down and 1 + p + p(p + 1)/2 up; then the own fits: 2p, and two of the intercept."""
    found = clinical.fit(SITES)  # to the maximum with one intercept for all, and from there to that with one each
    p, newton = 4, found.rounds - 2
    own = 2 * 8 * (p + 1) + 1 + p
    assert (found.bytes["up"] == 8 * (3 + 2 * 3) + newton * 8 * (1 + p + p * (p + 1) // 2) + own).all()
    assert (found.bytes["down"] == newton * 8 * p + 2 * 8 * 3 + 8 * p).all()
    assert list(found.ledger["round"].unique()) == list(range(found.rounds))
    assert found.ledger["up_bytes"].sum() == found.bytes["up"].sum()
    assert newton <= 10
    found = clinical.fit(SITES, "linear")  # also the squares of the target; its mean and deviation come back
    newton = found.rounds - 2
    assert (found.bytes["up"] == 8 * (4 + 2 * 3) + newton * 8 * (1 + p + p * (p + 1) // 2) + own).all()
    assert (found.bytes["down"] == newton * 8 * p + 2 * 8 * (3 + 1) + 8 * p).all()


@pytest.mark.parametrize(("unit", "zero"), [(1e-9, 0.0), (3e7, 0.0), (1e9, 1e10), (1e12, -1e12), (1.0, 1e7)])
def test_the_unit_of_a_linear_target_does_not_matter(unit, zero):
    """Every site keeps its own fit, and estimates, errors and p values follow."""
    sites = [(x, x @ [1.0, -0.5, 0.2] + y) for x, y in SITES]
    one, far = clinical.fit(sites, "linear"), clinical.fit([(x, zero + unit * y) for x, y in sites], "linear")
    assert far.sites["meta"].all()
    for a, b in ((one.coefficients, far.coefficients), (one.meta, far.meta)):
        assert b["se"].to_numpy() == pytest.approx(unit * a["se"].to_numpy(), rel=1e-6)
        gap = (b["estimate"] - zero * (b.index == "intercept")) / unit - a["estimate"]
        assert (gap.abs() < 1e-6 * a["se"]).all()
        assert b["p"][1:].to_numpy() == pytest.approx(a["p"][1:].to_numpy(), rel=1e-4)
    if (unit, zero) == (3e7, 0.0):
        assert clinical.fit([(x, unit * y) for x, y in sites], "linear", method=pf.FedCET()).arrived
    assert far.loglik == pytest.approx(one.loglik - 240 * np.log(unit), rel=1e-6)


def test_risk_sets_never_cross():
    """A site may count its time from any day: patients are compared within it; without deaths it adds nothing."""
    a, (x, time, event) = survival(), survival(seed=1)
    both = clinical.fit([a, (x, time, event)], "cox")
    later = clinical.fit([a, (x, time + 1000, event)], "cox")
    pd.testing.assert_frame_equal(both.coefficients, later.coefficients, rtol=1e-10)
    x, time, event = survival(seed=2)
    found = clinical.fit([a, survival(seed=1), (x, time, 0 * event)], "cox")
    assert found.loglik == pytest.approx(both.loglik, rel=1e-12)
    assert found.sites["why"].iloc[2] == "no event"


def test_the_meta_analysis_is_the_sites_own_fits_weighed():
    found = clinical.fit(SITES)
    alone = [clinical.fit([site]).coefficients for site in SITES]
    b, se = (np.stack([a[key] for a in alone]) for key in ("estimate", "se"))
    assert found.own["estimate"].to_numpy().reshape(3, 4) == pytest.approx(b, rel=1e-8)
    w = 1 / se**2
    mean = (w * b).sum(0) / w.sum(0)
    middle = np.concatenate([x for x, _ in SITES]).mean(0)
    alone = [clinical.fit([(x - middle, y)]).coefficients for x, y in SITES]
    c, error = (np.stack([a[key] for a in alone]) for key in ("estimate", "se"))
    assert c[:, 1:] == pytest.approx(b[:, 1:], rel=1e-8)  # of slopes nothing is said by where columns are 0
    Q = ((c - (c / error**2).sum(0) / (error**-2).sum(0)) ** 2 / error**2).sum(0)
    assert found.meta["estimate"].to_numpy() == pytest.approx(mean, rel=1e-8)
    assert found.meta["se"].to_numpy() == pytest.approx(w.sum(0) ** -0.5, rel=1e-8)
    assert found.heterogeneity["Q"].to_numpy() == pytest.approx(Q, rel=1e-6)
    assert found.heterogeneity["p"].to_numpy() == pytest.approx(stats.chi2.sf(Q, 2), rel=1e-6)
    assert found.heterogeneity["I2"].to_numpy() == pytest.approx(np.maximum(0, 1 - 2 / Q), abs=1e-6)


@pytest.mark.parametrize("model", ["logistic", "poisson", "linear"])
def test_sites_of_unlike_base_rates_disagree_wherever_columns_are_zero(model):
    """One of five groups has half the others' outcome at any age, counted from 0, from 60 or in months."""
    rng = np.random.default_rng(0)
    ages = [rng.normal(60, 3, 400) for _ in range(5)]
    level = [-1.2, 0, 0, 0, 0]
    mean = [np.exp(0.05 * (age - 60) + up) for age, up in zip(ages, level, strict=True)]
    draw = {
        "logistic": lambda m: (rng.random(400) < m / (1 + m)).astype(float),
        "poisson": lambda m: rng.poisson(m).astype(float),
        "linear": lambda m: np.log(m) + rng.normal(size=400),
    }[model]
    ys = [draw(m) for m in mean]
    found = [
        clinical.fit([(scale * (age[:, None] - zero), y) for age, y in zip(ages, ys, strict=True)], model)
        for zero, scale in ((0.0, 1.0), (60.0, 1.0), (1000.0, 12.0))
    ]
    for f in found:
        assert f.heterogeneity.loc["intercept", "p"] < 1e-9
        assert f.heterogeneity.loc["intercept", "I2"] > 0.8
        pd.testing.assert_frame_equal(f.heterogeneity, found[0].heterogeneity, rtol=1e-6)


def test_intervals_are_walds_and_a_linear_model_has_neither_ratios_nor_events():
    c = clinical.fit(SITES, level=0.9).coefficients
    assert (c["upper"] - c["estimate"]).to_numpy() == pytest.approx(1.6448536269514722 * c["se"].to_numpy(), rel=1e-12)
    assert c["ratio"].to_numpy() == pytest.approx(np.exp(c["estimate"].to_numpy()), rel=1e-12)
    assert "ratio" not in clinical.fit(SITES, "linear").coefficients
    found = Optimum(torch.zeros(2), 0.0, torch.zeros(2, 2), ENDLESS, torch.tensor([False, True]))
    assert "event" not in why(found, named("linear"), ["intercept", "age"])
    assert "age separates those with events" in why(found, named("logistic"), ["intercept", "age"])


@pytest.mark.parametrize(
    ("site", "why"),
    [
        ((X[:30], (X[:30, 0] > 0).astype(float)), "x1 separates"),
        ((X[:30], np.zeros(30)), "no event"),
        ((X[:30], np.ones(30)), "events only"),
        ((X[:30] * [1, 0, 1], Y[:30]), "column x2 is constant there"),
        ((np.c_[X[:30, :2], X[:30, 0] - X[:30, 1]], Y[:30]), "x1, x2, x3 are combinations"),
        ((X[:3], np.array([0.0, 1, 1])), "combinations"),
    ],
)
def test_a_site_without_a_fit_of_its_own_is_named_and_left_out(site, why):
    found = clinical.fit([*SITES, site], names=["a", "b", "c", "odd"], intercepts="common")
    assert list(found.sites["meta"]) == [True, True, True, False]
    assert why in found.sites["why"]["odd"]
    assert any("odd (" in note and why in note for note in found.notes)
    assert found.own.loc["odd"].isna().all(axis=None)
    pd.testing.assert_frame_equal(found.meta, clinical.fit(SITES).meta, rtol=1e-8)
    everything = tuple(np.concatenate(parts) for parts in zip(*SITES, site, strict=True))
    pd.testing.assert_frame_equal(found.coefficients, clinical.fit([everything]).coefficients, rtol=1e-8)


def test_a_column_that_is_constant_within_strata_is_called_so_whatever_rounding_leaves_of_it():
    """Its information is a difference of equal numbers, by rounding now above 0 and now below."""
    for values in np.random.default_rng(0).uniform(size=(12, 3)):
        sites = [(np.c_[x, np.full(len(x), v)], y + 1, y) for v, (x, y) in zip(values, SITES, strict=True)]
        with pytest.raises(DataError, match="column x4 is constant within every site"):
            clinical.fit(sites, "cox")


def test_fedcet_arrives_and_fedavg_says_that_it_does_not():
    newton = clinical.fit(SITES, intercepts="common")
    cet = clinical.fit(SITES, method=pf.FedCET(), local_steps=5)
    avg = clinical.fit(SITES, method=pf.FedAvg(lr=0.5), local_steps=5, rounds=1000)
    assert avg.rounds < 1000, "it has come to rest, and elsewhere"
    gap = {f: (f.coefficients["estimate"] - newton.coefficients["estimate"]).abs().max() for f in (cet, avg)}
    assert gap[cet] < 1e-8
    assert cet.left < 1e-8
    assert gap[avg] > 1e-3
    assert avg.left > 1e-3
    assert any("fedavg has not arrived" in note for note in avg.notes)
    assert not any("arrived" in note for note in cet.notes)
    assert cet.rounds < 300


def test_how_far_a_linear_model_is_from_its_maximum_is_in_standard_errors_of_its_own_noise():
    """The largest distance in errors by the residual variance of where it stopped, in another unit."""
    x, y = np.c_[np.ones(240), (X - X.mean(0)) / X.std(0)], 1e-3 * (X @ [1.0, -0.5, 0.2] + 5 * Y)
    found = clinical.fit([(X[:100], y[:100]), (X[100:], y[100:])], "linear", method=pf.FedAvg(lr=0.01), rounds=20)
    slopes = found.coefficients["estimate"].to_numpy()[1:]
    beta = np.r_[found.coefficients["estimate"].iloc[0] + X.mean(0) @ slopes, slopes * X.std(0)]
    best, inverse = np.linalg.lstsq(x, y, rcond=None)[0], np.linalg.inv(x.T @ x)
    variance = ((y - x @ beta) ** 2).sum() / (240 - 4)
    assert found.left == pytest.approx(np.abs((best - beta) / np.sqrt(variance * inverse.diagonal())).max(), rel=1e-6)
    assert found.left > 1


def test_a_method_that_has_not_arrived_claims_nothing(tmp_path):
    """Separated classes, which Newton's method refuses: any other one goes on towards infinity."""
    sites = [(x[:, :1], (x[:, 0] > 0).astype(float)) for x, _ in SITES]
    found = clinical.fit(sites, method=pf.FedAvg(0.5), rounds=20)
    assert found.left > 1
    assert not found.arrived
    assert found.coefficients[["lower", "upper", "ratio_lower", "ratio_upper", "p"]].isna().all(axis=None)
    assert headline(found).startswith("Fedavg has not arrived")
    assert "differ" not in headline(found)
    assert any("fedavg has not arrived" in note for note in found.notes)
    page = write_page(found, tmp_path / "page.html").read_text()
    assert "has not arrived" in page
    assert "nan" not in str(found).lower()
    there = clinical.fit(SITES, method=pf.FedCET(), local_steps=5)
    assert there.arrived
    assert there.coefficients.notna().all(axis=None)


@pytest.mark.parametrize("method", [pf.FedAvg(lr=3.0), pf.FedAvg(lr=3.0, weighted=False), pf.FedProx(lr=3.0, mu=0.0)])
def test_sites_count_by_their_patients_whatever_a_method_weighs_by(method):
    """With one step a round FedAvg is gradient descent on the pooled loss, from unlike sites to its optimum."""
    found = clinical.fit(SITES, method=method, local_steps=1, rounds=100)
    assert found.left < 1e-6


def test_cox_by_fedcet():
    sites = [survival(n, seed) for seed, n in enumerate((60, 90, 120))]
    newton, found = clinical.fit(sites, "cox"), clinical.fit(sites, "cox", method=pf.FedCET(), local_steps=5)
    assert np.abs(found.coefficients["estimate"] - newton.coefficients["estimate"]).max() < 1e-8
    assert found.loglik == pytest.approx(newton.loglik, rel=1e-12)


def test_complete_cases_are_the_fit_without_the_rows_that_have_gaps():
    whole = [(x.copy(), y.copy()) for x, y in SITES]
    whole[0][0][[3, 5], 1] = np.nan
    whole[2][1][7] = np.nan
    left = [tuple(np.delete(part, at, 0) for part in site) for site, at in zip(SITES, ([3, 5], [], [7]), strict=True)]
    found = clinical.fit(whole, missing="complete")
    pd.testing.assert_frame_equal(found.coefficients, clinical.fit(left).coefficients)
    assert list(found.sites["left_out"]) == [2, 0, 1]
    assert "complete cases: 237 of 240 rows; left out: site-0 2, site-2 1" in found.notes
    with pytest.raises(DataError, match="site 'site-0': every row has a gap"):
        clinical.fit([(X[:3] * np.nan, Y[:3]), *SITES], missing="complete")


@pytest.mark.parametrize("model", ["logistic", "linear"])
def test_units_of_a_coefficient_are_those_of_its_column(model):
    per = clinical.fit(SITES, model, per={"x1": 10, "x2": "sd"})
    plain = clinical.fit([(x / [10, X[:, 1].std(ddof=1), 1], y) for x, y in SITES], model)
    assert list(per.coefficients.index) == ["x1 per 10", f"x2 per SD ({X[:, 1].std(ddof=1):.3g})", "x3"]
    for a, b in ((per.coefficients, plain.coefficients), (per.meta, plain.meta), (per.own, plain.own)):
        assert a.to_numpy() == pytest.approx(b.to_numpy(), rel=1e-8)
    assert per.covariance.to_numpy() == pytest.approx(plain.covariance.to_numpy(), rel=1e-8)


def test_a_site_of_one_outcome_changes_nothing_beside_an_intercept_of_its_own():
    """With an intercept of its own its likelihood goes to one whatever the slopes; against one intercept it counts."""
    ill = (X[:30] + 0.5, np.ones(30))
    found, without = clinical.fit([*SITES, ill]), clinical.fit(SITES)
    assert found.coefficients.to_numpy() == pytest.approx(without.coefficients.to_numpy(), rel=1e-6)
    assert any(note.startswith("left out, as one outcome") and "site-3 (events only)" in note for note in found.notes)
    common = clinical.fit([*SITES, ill], intercepts="common")
    assert found.test.statistic == pytest.approx(2 * (without.loglik - common.loglik), rel=1e-9)
    assert (found.test.df, common.test) == (3, found.test)
    alike = [(X[:40], np.zeros(40)), (X[40:], np.ones(200))]
    with pytest.raises(DataError, match=r"every site's outcomes are all alike, .* intercepts = 'common'"):
        clinical.fit(alike)
    assert any(
        "no test against one per site: every site's" in n for n in clinical.fit(alike, intercepts="common").notes
    )


def test_a_column_of_the_sites_needs_one_intercept_for_all():
    sites = [(np.c_[x, np.full(len(x), k % 2)], y) for k, (x, y) in enumerate(SITES)]
    with pytest.raises(DataError, match="column x4 is constant within every site; intercepts = 'common'"):
        clinical.fit(sites)
    found = clinical.fit(sites, intercepts="common")
    assert "x4" in found.coefficients.index
    assert any("no test against one per site" in note and "x4" in note for note in found.notes)


def test_the_baseline_is_the_outcome_at_the_means_of_all_columns():
    """One site's rows in other places: its intercept at 0 is elsewhere, its baseline not; of no slopes, its mean."""
    found = clinical.fit(SITES)
    slopes, middle = found.coefficients["estimate"], np.concatenate([x for x, _ in SITES]).mean(0)
    log_odds = found.sites["intercept"] + middle @ slopes.to_numpy()
    assert found.sites["baseline"].to_numpy() == pytest.approx(1 / (1 + np.exp(-log_odds)), rel=1e-9)


def test_knots_are_quantiles_of_the_pooled_rows():
    """To within a bin of the histogram, an eighth of a deviation; and the same however rows are dealt out."""
    x = np.concatenate([x for x, _ in SITES])
    for k, shares in ((3, (0.1, 0.5, 0.9)), (5, (0.05, 0.275, 0.5, 0.725, 0.95))):
        knots = clinical.fit(SITES, splines={"x1": k}).knots["x1"]
        assert np.abs(np.array(knots) - np.quantile(x[:, 0], shares)).max() < x[:, 0].std() / 8
        assert clinical.fit([(X, Y)], splines={"x1": k}).knots["x1"] == knots
    for column, said in (((X[:, 0] > 1) * 1.0, "x1, x1' are combinations"), (0 * X[:, 0], "too few distinct values")):
        with pytest.raises(DataError, match=said):
            clinical.fit([(np.c_[column, X[:, 1:]], Y)], splines={"x1": 4})


def test_robust_errors_need_more_clusters_than_coefficients():
    with pytest.raises(DataError, match="found 3 clusters for 6 coefficients"):
        clinical.fit(SITES, clusters=[np.zeros(len(y)) for _, y in SITES])
    found = clinical.fit(SITES, clusters=[np.arange(len(y)) // k for k, (_, y) in zip((20, 3, 3), SITES, strict=True)])
    assert found.sites["why"].iloc[0] == "no more clusters than coefficients"
    assert any("robust, 69 clusters" in note for note in found.notes)


def test_a_federation_gives_names_and_columns_and_a_fit_shows_itself():
    fed = pf.data.load("heart-disease").partition()
    found = clinical.fit(fed, intercepts="common")
    assert list(found.sites.index) == list(fed.names)
    assert list(found.sites["patients"]) == list(fed.train.counts)
    assert list(found.coefficients.index[:3]) == ["intercept", "age", "sex"]
    found = clinical.fit([(pd.DataFrame(x, columns=["a", "b", "c<i>"]), y) for x, y in SITES])
    assert "odds ratio" in str(found)
    assert "c&lt;i&gt;" in found._repr_html_()
    assert "logistic, 3 sites, 240 patients" in repr(found)


def bad(x=None, y=None):
    return [*SITES[1:], (SITES[0][0] if x is None else x, SITES[0][1] if y is None else y)]


def changed(values, at, to):
    new = values.copy()
    new[at] = to
    return new


REFUSED = [
    (bad(x=changed(X[:40], (3, 1), np.nan)), "logistic", "site 'site-2', row 4: column 'x2' is missing"),
    (bad(y=Y[:40] + 1), "logistic", "expected targets of 0 or 1"),
    (bad(y=Y[:40] - 1), "poisson", "found -1, expected counts of 0 or more"),
    (bad(y=Y[:40] + 0.5), "poisson", "expected counts of 0 or more"),
    ([(x, y, 0 * y) for x, y in SITES], "poisson", "found 0, expected exposures above 0"),
    ([(x, y - 1, y) for x, y in SITES], "cox", "expected times of 0 or more"),
    ([(x, y, y + 1) for x, y in SITES], "cox", "expected events of 0 or 1"),
    ([(x, y + 1, 0 * y) for x, y in SITES], "cox", "no site has an event"),
    ([(x, 0 * y) for x, y in SITES], "logistic", "no site has an event"),
    ([(x, 0 * y + 1) for x, y in SITES], "logistic", "every target is 1"),
    ([(x * [1, 1, 0] + 7, y) for x, y in SITES], "logistic", "column 'x3' is constant over all sites"),
    ([(np.c_[x, x[:, 0] + x[:, 2]], y) for x, y in SITES], "linear", "x1, x3, x4 are combinations of one another"),
    ([(x * 0 + k, y + 1, y) for k, (x, y) in enumerate(SITES)], "cox", "constant within every site"),
    ([(x, (x[:, 1] > 0).astype(float)) for x, _ in SITES], "logistic", "no finite estimate; x2 separates"),
    ([(x[:1], y[:1]) for x, y in SITES], "linear", "combinations"),
    ([], "logistic", "no site"),
    ([(X, Y[:-1])], "logistic", r"found \[240, 3\] and \[239\] and \[239\]"),
    (bad(x=X[:40, :2]), "logistic", "2 columns"),
    ([X], "logistic", "expected \\(x, y\\)"),
    ([(X, ["a"] * 240)], "logistic", "not all values are numbers"),
    ([(X, Y)], "cox", "expected"),
    ([(X, Y + 1, Y[:-1])], "cox", r"\[240\] and \[239\], expected \[N, columns\] and times and events"),
    ([(X, Y, Y)], "linear", "found 2 columns as target, expected numbers"),
    ([(X[:4], X[:4, 0] * Y[:4])], "linear", "4 rows for 4 coefficients"),
]


@pytest.mark.parametrize(("sites", "model", "words"), REFUSED)
def test_refused_in_one_line(sites, model, words):
    with pytest.raises(DataError, match=words):
        clinical.fit(sites, model)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": "probit"}, "model: found 'probit'"),
        ({"ties": "exact"}, "ties: found 'exact'"),
        ({"level": 95}, "level of fit: found 95"),
        ({"names": ["a", "a", "b"]}, "names: found 3"),
        ({"columns": ["a"]}, "columns: found 1"),
        ({"columns": ["a", "b", "intercept"]}, "none of them intercept"),
        ({"rounds": 5}, "rounds: a setting of a method"),
        ({"method": pf.Local()}, "local has no common model"),
        ({"method": pf.FedAvg(), "intercepts": "site"}, "intercepts: found 'site', expected 'common'"),
        ({"model": "cox", "intercepts": "common"}, "intercepts: found 'common'; cox is stratified by site"),
        ({"per": {"x4": 10}}, "per: no column 'x4' \\(did you mean"),
        ({"per": {"x1": 0}}, "per: x1: found 0, expected a number above 0, or 'sd'"),
        ({"per": {"x1": 2}, "splines": {"x1": 3}}, "per: x1 is a spline"),
        ({"splines": {"age": 3}}, "splines: no column 'age'"),
        ({"splines": {"x1": 2}}, "splines: x1: found 2, expected 3 to 7 knots"),
        ({"splines": {"x1": [3, 2, 1]}}, "expected 3 to 7 knots, or three places or more, rising"),
        ({"errors": "model", "clusters": [[0], [0], [0]]}, "errors: found 'model', expected 'robust'"),
        ({"clusters": [[0]]}, "clusters: found 1, expected an array per site, 3 of them"),
    ],
)
def test_settings_are_refused_in_one_line(given, words):
    with pytest.raises(ConfigError, match=words):
        clinical.fit(SITES, **given)
