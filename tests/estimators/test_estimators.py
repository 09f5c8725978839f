"""scikit-learn's own checks of an estimator, and what sites add to them."""

import numpy as np
import pytest
import sklearn
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

import polyfed as pf


@pytest.mark.parametrize(
    "estimator", [pf.FederatedClassifier(rounds=20), pf.FederatedRegressor(rounds=20)], ids=["classes", "numbers"]
)
def test_scikit_learn_finds_nothing_wrong(estimator):
    found = check_estimator(estimator, on_skip=None)  # which raises what fails
    assert len(found) > 45
    assert {row["status"] for row in found} == {"passed", "skipped"}
    assert {row["check_name"] for row in found if row["status"] == "skipped"} <= {"check_array_api_input"}


def opposite(n=200):
    """Two sites of which one calls good what the other calls bad."""
    rng = np.random.default_rng(0)
    x, sites = rng.normal(size=(n, 2)), rng.choice(["north", "south"], n)
    return x, np.where((x[:, 0] > 0) == (sites == "north"), "good", "bad"), sites


def test_every_site_has_the_model_that_its_method_makes():
    x, y, sites = opposite()
    own = pf.FederatedClassifier(pf.Local(0.1), rounds=20).fit(x, y, sites=sites)
    assert own.score(x, y, sites=sites) > 0.95
    assert own.score(x, y, sites=np.where(sites == "north", "south", "north")) < 0.05
    assert own.predict_proba(x, sites=sites).sum(1) == pytest.approx(1.0)
    common = pf.FederatedClassifier(pf.FedAvg(0.1), rounds=20).fit(x, y, sites=sites)
    assert (common.predict(x) == common.predict(x, sites=sites)).all()
    assert common.score(x, y) < 0.7
    with pytest.raises(ValueError, match="has no common model; give the site of every row"):
        own.predict(x)
    with pytest.raises(ValueError, match="sites: found 'east', expected one of north, south"):
        own.predict(x[:1], sites=["east"])


def test_the_common_regression_of_all_sites_is_least_squares():
    """With one local step on all of a site's rows FedAvg is gradient descent on the pooled squared loss."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 3)) * [1, 50, 0.01] + 7
    y = 1000 + x @ [3.0, 0.2, 800.0] + rng.normal(size=90)
    found = pf.FederatedRegressor(pf.FedAvg(0.3), rounds=200, settings={"batch_size": None})
    found.fit(x, y, sites=np.repeat([0, 1, 2], [20, 30, 40]))
    assert found.predict(x) == pytest.approx(LinearRegression().fit(x, y).predict(x), rel=1e-9)


def test_sites_are_routed_through_pipelines_and_cross_validation():
    x, y, sites = opposite()
    with sklearn.config_context(enable_metadata_routing=True):
        estimator = pf.FederatedClassifier(pf.Local(0.1), rounds=20)
        estimator.set_fit_request(sites=True).set_score_request(sites=True)
        pipeline = make_pipeline(StandardScaler(), estimator)
        scores = cross_val_score(pipeline, x, y, params={"sites": sites}, cv=3)
    assert scores.min() > 0.9
