"""Synthetic problems: their own models, and optima against independent closed forms."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from polyfed.base.errors import ConfigError
from polyfed.data import diagonal_quadratics, heterogeneous_quadratics, least_squares, load


def test_fedprox_synthetic():
    """Labels are those of each client's own model; alpha sets the models apart, beta the inputs."""
    data = load("synthetic", alpha=0.5, beta=2.0, clients=40)
    W, b = data.meta["weights"], data.meta["biases"]
    wide = np.random.default_rng(0).choice(len(data), 500, replace=False)
    scores = np.einsum("ncd,nd->nc", W[data.groups[wide]], data.x[wide].astype(np.float64)) + b[data.groups[wide]]
    assert (scores.argmax(1) == data.y[wide]).mean() > 0.995  # inputs are rounded to float32
    assert np.bincount(data.groups).min() >= 50
    residual = data.x - np.stack([data.x[data.groups == i].mean(0) for i in range(40)])[data.groups]
    np.testing.assert_allclose(residual.std(0), np.arange(1, 61) ** -0.6, rtol=0.1)

    def spread(alpha, beta):  # of the clients' means over coordinates, 1/60 of the variance within them beside
        data = load("synthetic", alpha=alpha, beta=beta, clients=60)
        inputs = np.stack([data.x[data.groups == i].mean(0) for i in range(60)])
        return data.meta["weights"].mean((1, 2)).std(), inputs.mean(1).std()

    assert spread(0, 0)[0] < 0.1 < spread(3, 0)[0]
    assert spread(0, 0)[1] < 0.3 < spread(0, 3)[1]
    assert load("synthetic").partition().n == 30


def mean_gradient(fed, w):
    parts = [[t.numpy() for t in fed.train.client(i)] for i in range(fed.n)]
    return np.mean([2 * x.T @ (x @ w - y) / len(y) for x, y in parts], axis=0)


@pytest.mark.parametrize("samples", [50, [5, 40, 200]])
def test_least_squares_optimum_has_zero_mean_gradient(samples):
    fed = least_squares(3, samples, 8, heterogeneity=2.0, seed=5, curvature=0.5)
    assert fed.train.x.dtype == torch.float64
    assert np.abs(mean_gradient(fed, fed.meta["optimum"])).max() < 1e-10
    assert np.abs(mean_gradient(fed, fed.meta["optimum"] + 0.1)).max() > 1e-2
    for i in range(3):
        x, y = (t.numpy() for t in fed.train.client(i))
        assert np.abs(x.T @ (x @ fed.meta["local_optima"][i] - y)).max() < 1e-9
    assert fed.classes is None


def test_heterogeneous_quadratics():
    fed = heterogeneous_quadratics(clients=4, dim=6, mu=1, L=4, seed=3)
    h, c = fed.meta["curvatures"], fed.meta["centres"]
    assert {(*h.min(1), *h.max(1))} == {(1.0,) * 4 + (4.0,) * 4}
    np.testing.assert_allclose(fed.meta["optimum"], (h * c).sum(0) / h.sum(0), atol=1e-10)
    found = minimize(
        lambda w: np.mean([0.5 * (h[i] * (w - c[i]) ** 2).sum() for i in range(4)]), np.zeros(6), tol=1e-12
    )
    np.testing.assert_allclose(found.x, fed.meta["optimum"], atol=1e-4)
    w = np.ones(6)
    for i in range(4):
        x, y = (t.numpy() for t in fed.train.client(i))
        assert ((x @ w - y) ** 2).mean() == pytest.approx(0.5 * (h[i] * (w - c[i]) ** 2).sum())


@pytest.mark.parametrize(
    ("words", "do"),
    [
        (("curvatures", "[2, 3]", "[2, 4]"), lambda: diagonal_quadratics(np.ones((2, 3)), np.ones((2, 4)))),
        (("mu = 4", "L = 1"), lambda: heterogeneous_quadratics(mu=4, L=1)),
        (("samples",), lambda: least_squares(3, [1, 2], 4)),
    ],
)
def test_what_cannot_be_drawn_is_refused(refused, words, do):
    with refused(*words):
        do()
    with pytest.raises(ConfigError, match="clients of least_squares: found 0, expected an integer of at least 1"):
        least_squares(clients=0)
