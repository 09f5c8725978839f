"""The federated fit is the pooled one: coefficients, standard errors and log-likelihood, against statsmodels; errors of
Cox that are robust against lifelines."""

import warnings

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import polyfed as pf
import polyfed_clinical as clinical
from polyfed.base.errors import ConfigError
from polyfed_clinical import secured
from polyfed_privacy.fixed import narrow

TIGHT = 1e-8


def assert_near(found: np.ndarray, expected: np.ndarray):
    np.testing.assert_allclose(found, expected, rtol=TIGHT, atol=TIGHT)


def module(name: str):
    return pytest.importorskip(name, reason=f"{name.split('.')[0]} is not installed")


def dealt(table: pd.DataFrame, x: list[str], y: list[str], n: int = 3):
    """(x, *y) of `n` sites, row by row in turn."""
    parts = [table.iloc[k::n] for k in range(n)]
    return [(part[x].astype(float), *(part[c] for c in y)) for part in parts]


def hospitals(target: str | None = None):
    fed = pf.data.load("heart-disease", standardise=None).partition(test_fraction=0)
    tables = [pd.DataFrame(fed.train.client(i)[0].double().numpy(), columns=fed.meta["columns"]) for i in range(4)]
    if target is None:
        return [(x, fed.train.client(i)[1].numpy()) for i, x in enumerate(tables)]
    return [(x.drop(columns=target), x[target]) for x in tables]


def synthetic(model: str, seed: int = 0):
    """Five sites of unlike size and unlike inputs."""
    rng, found = np.random.default_rng(seed), []
    for i, n in enumerate((40, 60, 90, 150, 400)):
        x = rng.normal(i / 4, 1 + i / 5, size=(n, 4)) * [1, 10, 0.01, 1] + [0, 100, 0, 0]
        eta = (x - [0, 100, 0, 0]) @ [0.3, -0.04, 20, -0.2] - 0.5
        y = {
            "logistic": lambda eta=eta: [rng.random(len(eta)) < 1 / (1 + np.exp(-eta))],
            "poisson": lambda eta=eta, n=n: [rng.poisson(np.exp(eta) * (e := rng.uniform(0.2, 3, n))), e],
            "linear": lambda eta=eta, n=n: [eta + rng.normal(size=n)],
            "cox": lambda eta=eta, n=n: [np.ceil(9 * rng.exponential(np.exp(-eta))), rng.random(n) < 0.6],
        }[model]()
        found.append((x, *(np.asarray(c, float) for c in y)))
    return found


def shipped(model: str):
    """Data that come with statsmodels and lifelines."""
    if model == "cox":
        rossi = module("lifelines.datasets").load_rossi()
        return dealt(rossi, ["fin", "age", "race", "wexp", "mar", "paro", "prio"], ["week", "arrest"])
    data = module("statsmodels.api").datasets
    if model == "logistic":
        fair = data.fair.load_pandas().data
        fair["any"] = (fair["affairs"] > 0).astype(float)
        return dealt(fair, [c for c in fair if c not in ("affairs", "any")], ["any"])
    if model == "poisson":
        randhie = data.randhie.load_pandas().data
        return dealt(randhie, [c for c in randhie if c != "mdvis"], ["mdvis"])
    longley = data.longley.load_pandas().data  # whose columns are nearly dependent
    return dealt(longley, [c for c in longley if c != "TOTEMP"], ["TOTEMP"], 2)


def brca(data_dir):
    """Six regions of TCGA-BRCA; without the columns that repeat others, and two whose estimate is infinite."""
    folder = data_dir("tcga_brca") / "tcga_brca"
    table = pd.read_csv(folder / "brca.csv").merge(pd.read_csv(folder / "train_test_split.csv"), on="pid")
    out = {"pid", "E", "T", "fold", "fold2", "race_white", "synchronous_malignancy_Not Reported"}
    columns = [c for c in table if c not in out and not c.startswith(("primary_diagnosis", "tumor_stage_stage ii"))]
    columns.remove("tumor_stage_stage ia")
    return [(part[columns], part["T"], part["E"]) for _, part in table.groupby(table["fold2"].str[-1])]


SETS = {
    "logistic": [hospitals, synthetic, shipped],
    "poisson": [lambda: hospitals("oldpeak"), synthetic, shipped],
    "linear": [lambda: hospitals("thalach"), synthetic, shipped],
}
CASES = [(model, k) for model in SETS for k in range(3)]


def sites_of(model: str, k: int):
    make = SETS[model][k]
    sites = make() if k == 0 else make(model)
    if model == "poisson" and k == 0:  # ST depression in tenths, as a count
        sites = [(x, np.round(np.clip(10 * y, 0, None))) for x, y in sites]
    return sites


def pooled(sites):
    return tuple(np.concatenate([np.asarray(part, float) for part in parts]) for parts in zip(*sites, strict=True))


def near(found, expected, scale=1.0):
    """Whether the largest difference is below 1e-8, relative where numbers are large."""
    gap = np.abs(np.asarray(found) - np.asarray(expected)) / np.maximum(np.abs(np.asarray(expected)), scale)
    assert gap.max() < TIGHT, gap.max()


def reference_of(model, sites, intercepts, **errors):
    """statsmodels' fit of the pooled rows, of standardised columns; [P, P] that brings its numbers back."""
    sm = module("statsmodels.api")
    x, y, *exposure = pooled(sites)
    mean, scale = x.mean(0), x.std(0)
    first = np.ones((len(x), 1))
    if intercepts == "site":
        first = np.repeat(np.eye(len(sites)), [len(s[1]) for s in sites], axis=0)
    X = np.c_[first, (x - mean) / scale]  # or its own steps would end early
    if model == "linear":
        reference = sm.OLS(y, X).fit(**errors)
    else:
        family = {"logistic": sm.families.Binomial(), "poisson": sm.families.Poisson()}[model]
        extra = {"exposure": exposure[0]} if exposure else {}
        reference = sm.GLM(y, X, family=family, **extra).fit(tol=1e-14, tol_criterion="params", **errors)
    back = np.diag(np.r_[np.ones(first.shape[1]), 1 / scale])
    back[: first.shape[1], first.shape[1] :] = -mean / scale
    return reference, back


@pytest.mark.parametrize("intercepts", ["common", "site"])
@pytest.mark.parametrize(("model", "k"), CASES)
def test_all_of_it_is_statsmodels(model, k, intercepts):
    sites = sites_of(model, k)
    reference, back = reference_of(model, sites, intercepts)
    found = clinical.fit(sites, model, intercepts=intercepts)
    slopes = found.coefficients[-sites[0][0].shape[1] :]
    inner, m = back[-len(slopes) :, -len(slopes) :].diagonal(), len(slopes)
    if intercepts == "common":
        near(found.coefficients["estimate"], back @ reference.params)
    else:
        near(found.sites["intercept"], (back @ reference.params)[:-m])
        near(found.sites["intercept_se"], np.sqrt((back @ reference.cov_params() @ back.T).diagonal())[:-m])
    near(slopes["estimate"] / inner, reference.params[-m:])
    near(found.covariance, back @ reference.cov_params() @ back.T)
    near(found.loglik, reference.llf)
    near(slopes["upper"] / inner, reference.conf_int()[-m:, 1], np.abs(reference.params[-m:]).max())
    assert np.abs(slopes["p"].to_numpy() - reference.pvalues[-m:]).max() < TIGHT


@pytest.mark.parametrize("model", ["logistic", "poisson", "linear"])
def test_one_intercept_is_held_against_one_per_site_by_the_likelihood_ratio(model):
    sites = synthetic(model)
    small, large = (reference_of(model, sites, kind)[0].llf for kind in ("common", "site"))
    for kind in ("common", "site"):
        test = clinical.fit(sites, model, intercepts=kind).test
        near(test.statistic, 2 * (large - small))
        assert test.df == 4
        assert test.p == pytest.approx(stats.chi2.sf(2 * (large - small), 4), rel=1e-6)


@pytest.mark.parametrize("intercepts", ["common", "site"])
@pytest.mark.parametrize("model", ["logistic", "poisson", "linear"])
def test_robust_errors_are_statsmodels(model, intercepts):
    """HC0; and in clusters of three rows, with its correction for few of them."""
    sites = synthetic(model)
    clusters = [np.arange(len(s[1])) // 3 for s in sites]
    groups = np.unique(np.concatenate([1000 * i + c for i, c in enumerate(clusters)]), return_inverse=True)[1]
    for found, errors in (
        (clinical.fit(sites, model, intercepts=intercepts, errors="robust"), {"cov_type": "HC0"}),
        (
            clinical.fit(sites, model, intercepts=intercepts, clusters=clusters),
            {"cov_type": "cluster", "cov_kwds": {"groups": groups}},
        ),
    ):
        reference, back = reference_of(model, sites, intercepts, **errors)
        near(found.covariance, back @ reference.cov_params() @ back.T)
        m = sites[0][0].shape[1]
        assert np.abs(found.coefficients["p"].to_numpy()[-m:] - reference.pvalues[-m:]).max() < TIGHT


def without_ties(sites):
    rng = np.random.default_rng(3)
    return [(x, time + rng.uniform(0, 0.5, len(time)), event) for x, time, event in sites]


def lifelines_fit(sites, groups=None, **how):
    x, time, event = pooled(sites)
    table = pd.DataFrame(x, columns=[f"x{i}" for i in range(x.shape[1])]).assign(time=time, event=event)
    table["site"] = np.repeat(np.arange(len(sites)), [len(s[1]) for s in sites])
    options = {"strata": ["site"], "fit_options": {"precision": 1e-13, "max_steps": 500}} | how
    if groups is not None:
        table["group"], options["cluster_col"] = groups, "group"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of low variance
        return module("lifelines").CoxPHFitter().fit(table, "time", "event", **options)


def test_robust_errors_of_cox_are_those_of_lifelines():
    """Lin and Wei's, by rows and by clusters, where no two died at one time."""
    sites = without_ties(synthetic("cox"))
    clusters = [np.arange(len(s[1])) // 3 for s in sites]
    groups = np.concatenate([1000 * i + c for i, c in enumerate(clusters)])
    for given, how in ((None, {"errors": "robust"}), (groups, {"clusters": clusters})):
        found = clinical.fit(sites, "cox", **how)
        near(found.coefficients["se"], lifelines_fit(sites, given, robust=True).standard_errors_)


def test_a_spline_is_statsmodels_on_the_same_basis():
    sites = synthetic("logistic")
    found = clinical.fit(sites, splines={"x2": 4})
    (knots,) = found.knots.values()
    wide = [(np.c_[x[:, :1], spline(x[:, 1], knots), x[:, 2:]], y) for x, y in sites]
    reference, back = reference_of("logistic", wide, "site")
    near(found.covariance, back @ reference.cov_params() @ back.T)
    near(found.loglik, reference.llf)
    m = len(reference.params)
    for test, which in (("all terms", [m - 5, m - 4, m - 3]), ("beyond a line", [m - 4, m - 3])):
        wald = reference.wald_test(np.eye(m)[which], scalar=True)
        near(found.joint.loc[("x2", test), "chi2"], wald.statistic)


def spline(x, knots):
    """Harrell's basis (2.25), term by term."""
    t, k = np.array(knots), len(knots)
    plus = lambda a: np.maximum(a, 0) ** 3  # noqa: E731
    return np.stack([x, *(
        (plus(x - t[j]) - plus(x - t[k - 2]) * (t[k - 1] - t[j]) / (t[k - 1] - t[k - 2])
         + plus(x - t[k - 1]) * (t[k - 2] - t[j]) / (t[k - 1] - t[k - 2])) / (t[k - 1] - t[0]) ** 2
        for j in range(k - 2)
    )], 1)  # fmt: skip


@pytest.mark.parametrize("far", [1e6, 1e8])
def test_a_column_far_from_zero_is_statsmodels(far):
    """Squares of 1e12 and more would leave nothing of a variance of one."""
    sm = module("statsmodels.api")
    sites = [(x + np.array([far, 0, 0, 0]), 1e8 * y) for x, y in synthetic("linear")]
    x, y = pooled(sites)
    x = np.c_[x[:, 0] - far, (x - x.mean(0))[:, 1:] / x.std(0)[1:]]
    reference, found = sm.OLS(y, sm.add_constant(x)).fit(), clinical.fit(sites, "linear", intercepts="common")
    scale = np.r_[1, pooled(sites)[0].std(0)[1:]]
    near(found.coefficients["estimate"][1:] * scale / reference.bse[1:], reference.params[1:] / reference.bse[1:])
    near(found.coefficients["se"][1:] * scale, reference.bse[1:])
    assert found.sites["meta"].all()


@pytest.mark.parametrize("k", range(3))
@pytest.mark.parametrize("ties", ["efron", "breslow"])
def test_cox_is_that_of_statsmodels_stratified_by_site(ties, k, data_dir):
    phreg = module("statsmodels.duration.hazard_regression").PHReg
    sites = [synthetic, shipped, lambda _: brca(data_dir)][k]("cox")
    x, time, event = pooled(sites)
    strata = np.repeat(np.arange(len(sites)), [len(s[1]) for s in sites])
    scale = x.std(0)
    reference = phreg(time, (x - x.mean(0)) / scale, event, ties=ties, strata=strata)
    found = clinical.fit(sites, "cox", ties=ties)
    beta = found.coefficients["estimate"].to_numpy() * scale
    se = np.sqrt(np.diag(np.linalg.inv(-reference.hessian(beta))))
    # where the score is zero there is the maximum, of a concave function
    assert np.abs(se * reference.score(beta)).max() < TIGHT
    near(found.coefficients["se"] * scale, se)
    near(found.loglik, reference.loglike(beta))


def agree(found, plain):
    """A fit through secure sums, and the same in the open."""
    for name in ("coefficients", "meta", "heterogeneity"):
        table = getattr(found, name)
        assert_near(table.to_numpy(float), getattr(plain, name).loc[table.index].to_numpy(float))
        assert table.notna().all(axis=None), "a fit without residuals has no standard error, and weighs nothing"
    assert found.loglik == pytest.approx(plain.loglik, rel=TIGHT)
    assert found.totals == plain.totals
    assert (found.test is None) == (plain.test is None)
    if found.test is not None and plain.test is not None:
        assert found.test.df == plain.test.df
        assert found.test.statistic == pytest.approx(plain.test.statistic, abs=TIGHT)


@pytest.mark.parametrize("model", ["logistic", "poisson", "linear", "cox"])
@pytest.mark.parametrize("intercepts", ["site", "common"])
def test_through_secure_sums_the_fit_is_the_pooled_one(model, intercepts, monkeypatch):
    """Against Newton's method with an intercept for each site, whose matrix the server then has."""
    if model == "cox" and intercepts == "common":
        return
    sites = {"logistic": hospitals, "linear": lambda: hospitals("chol")}.get(model, lambda: synthetic(model))()
    own, received, door = set(), [], secured.secure.Server
    taken, wide = door.take, secured.wide
    monkeypatch.setattr(secured, "wide", lambda v: [own.update(np.round(v, 9)), wide(v)][1])
    monkeypatch.setattr(door, "take", lambda s, name, a: (received.append(a.words), taken(s, name, a))[1])
    how = {"intercepts": intercepts if model != "cox" else None, "errors": "robust" if model == "poisson" else "model"}
    found = clinical.fit(sites, model, **how, sums="secure")
    agree(found, clinical.fit(sites, model, **how))
    assert found.sites.columns.empty
    assert found.own.empty
    read = {round(v, 9) for words in received for v in narrow(words)}
    assert len(received) > 20
    assert not read & (own - {0.0, 1.0})


def test_secure_sums_of_two_sites_are_refused():
    with pytest.raises(ConfigError, match="found 2 sites, expected at least 3"):
        clinical.fit(synthetic("linear")[:2], "linear", sums="secure")


@pytest.mark.parametrize(
    ("model", "outcome", "silent"),
    [("logistic", 1.0, True), ("logistic", 0.0, True), ("poisson", 0.0, True), ("poisson", 1.0, False),
     ("cox", 0.0, True), ("cox", 1.0, False), ("linear", 1.0, False), ("linear", 0.0, False)],
)  # fmt: skip
@pytest.mark.parametrize("errors", ["model", "robust", "clusters"])
def test_through_secure_sums_a_site_of_one_outcome_says_what_it_says_in_the_open(model, outcome, silent, errors):
    """Nothing beside an intercept of its own: the fit is that without the site. Against one for all it counts."""
    sites, rng = synthetic(model), np.random.default_rng(3)
    x, *y = sites[1]
    y = [rng.permutation(y[0]), np.full(len(x), outcome)] if model == "cox" else [np.full(len(x), outcome), *y[1:]]
    every = [*sites, (x + 0.3 * rng.normal(size=x.shape) * x.std(0), *y)]
    for intercepts in ["site", "common"] if model != "cox" else [None]:
        groups = [np.arange(len(s[1])) // 3 for s in every]
        how = {"clusters": groups} if errors == "clusters" else {"errors": errors}
        how["intercepts"] = intercepts
        found, plain = clinical.fit(every, model, **how, sums="secure"), clinical.fit(every, model, **how)
        agree(found, plain)
        if intercepts != "common":
            how |= {"clusters": groups[:-1]} if errors == "clusters" else {}
            without = clinical.fit(sites, model, **how, sums="secure").coefficients.to_numpy(float)
            same = np.allclose(found.coefficients.to_numpy(float), without, rtol=1e-6, atol=1e-9)
            assert same == silent
