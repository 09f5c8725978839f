"""What samples add to a score: its mean is the score, its variance the score's; and by hand where n is small."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import rankdata

from polyfed.metrics import terms
from polyfed.metrics.metric import Predictions
from polyfed.metrics.scores import KNOWN, named


def seen(kind: str, n: int = 120, seed: int = 0) -> Predictions:
    """Outputs that know something of their targets, with ties."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    if kind == "survival":
        risk = normal(n, 1).mul(4).round() / 4
        time = (normal(n).abs() * (-risk[:, 0] / 2).exp() * 8).round() + 1
        return Predictions(risk, torch.stack([time, (normal(n) > -0.3).double()], 1))
    if kind == "labels":
        y = (normal(n, 3) > 0.3).double()
        return Predictions(y + normal(n, 3), y)
    if kind == "tokens":  # sequences of 1 to 6 tokens that count
        y = torch.randint(4, (n, 6), generator=g)
        y[torch.arange(6) > torch.randint(6, (n, 1), generator=g)] = -100
        return Predictions(normal(n, 6, 4) + torch.nn.functional.one_hot(y.clamp(min=0), 4) * normal(n, 1, 1).exp(), y)
    if kind == "numbers":
        y = normal(n, 2)
        return Predictions(y + normal(n, 2), y)
    y = torch.randint(2 if kind == "two classes" else 4, (n,), generator=g)
    z = normal(n, int(y.max()) + 1).mul(2).round() / 2
    return Predictions(z + torch.nn.functional.one_hot(y), y)


def test_ranks_are_those_of_scipy():
    score = np.random.default_rng(0).integers(0, 5, (200, 9)).astype(float)
    score[::3, 0], score[::7, 1] = math.nan, math.inf
    np.testing.assert_array_equal(terms.ranks(score), rankdata(score, axis=-1))


WITH = [m for m in (*KNOWN.values(), named("pinball:0.9")) if m.terms]
CASES = [
    (m, k)
    for m in WITH
    for k in ("two classes", "classes", "numbers", "labels", "survival", "tokens")
    if m.fits(seen(k))
]


def test_every_score_with_a_range_has_terms():
    """Of those that are not means of samples anyway; but for the calibration error, whose bins tear it."""
    finite = {m.name for m in KNOWN.values() if m.per == "client" and math.isfinite(m.span)}
    assert finite - {"ece"} <= {m.name for m in WITH}


@pytest.mark.parametrize(("metric", "kind"), CASES, ids=[f"{m.name}, {k}" for m, k in CASES])
def test_their_mean_is_the_score_and_their_variance_the_scores(metric, kind):
    """150 samples of 120: the deviation of their scores is known to 6 %."""
    scores, said = [], []
    for seed in range(150):
        found = seen(kind, seed=seed)
        added = np.asarray(metric.terms(found))
        if seed < 3:  # scikit-learn takes its time
            assert added.mean() == pytest.approx(metric.of(found), abs=1e-12)
        scores.append(added.mean())
        said.append(added.var(ddof=1) / len(added))
    assert math.sqrt(np.mean(said)) == pytest.approx(np.std(scores), rel=0.2)


@pytest.mark.parametrize(
    "name", ["auc", "average-precision", "balanced-accuracy", "f1", "r2", "concordance", "token-accuracy", "perplexity"]
)
def test_where_there_is_no_score_there_are_no_terms(name):
    others = {"r2": "numbers", "concordance": "survival", "token-accuracy": "tokens", "perplexity": "tokens"}
    metric, kind = KNOWN[name], others.get(name, "two classes")
    found = seen(kind, 20)
    target = found.target * 0 - 100 * (kind == "tokens")
    none = Predictions(found.output, target)
    if name == "balanced-accuracy":  # of one class: the score says so
        assert math.isnan(metric.of(none))
        return
    assert np.isnan(metric.terms(none)).all()


def test_jackknife_by_hand():
    """Squared errors 1 and 7: 2 less the root without each, sqrt 7 and 1."""
    assert terms.rmse(np.array([1.0, 7.0])) == pytest.approx([2 + (1 - 7**0.5) / 2, 2 + (7**0.5 - 1) / 2])


@pytest.mark.parametrize("kind", ["two classes", "survival"])
def test_the_jackknife_is_that_of_the_scores_without_each_sample(kind):
    found = seen(kind, 30)
    metric = KNOWN["average-precision" if kind == "two classes" else "concordance"]
    keep = [[j for j in range(30) if j != k] for k in range(30)]
    without = np.array([metric.of(Predictions(found.output[k], found.target[k])) for k in keep])
    assert metric.terms(found) == pytest.approx(metric.of(found) + 29 * (without.mean() - without))
