"""Data from formulas of papers: their published sizes, draws, models and closed forms."""

import numpy as np
import pytest
import torch

from polyfed.base.errors import ConfigError
from polyfed.data import fedcet_quadratics, fpfc, load


@pytest.mark.parametrize(("seed", "smallest", "largest", "total"), [(0, 250, 25810, 205795), (1, 250, 21850, 159350)])
def test_fpfc_sizes_are_the_papers(seed, smallest, largest, total):
    data = fpfc("s1", seed=seed)
    assert (data.sizes.min(), data.sizes.max(), data.sizes.sum()) == (smallest, largest, total)
    assert data.x.shape == (total, 60)


@pytest.mark.parametrize(
    ("scenario", "sizes", "small"),
    [
        ("s1", [25] * 4, [5] * 4),
        ("s2", [10, 40, 10, 40], [2, 8, 2, 8]),
        ("s3", [50, 50], [8, 8]),
        ("s4", [50], [12]),
        ("s5", [1] * 50, [1] * 12),
    ],
)
def test_fpfc_clusters(scenario, sizes, small):
    full, reduced = fpfc(scenario), fpfc(scenario, scale="small")
    assert np.bincount(full.clusters).tolist() == sizes
    assert np.bincount(reduced.clusters).tolist() == small
    assert (np.diff(full.clusters) >= 0).all()
    assert 250 <= reduced.sizes.min() <= reduced.sizes.max() <= 1500


def test_fpfc_draws_in_the_released_order():
    """The first numbers, drawn again step by step from legacy RandomState."""
    rng = np.random.RandomState(3)
    sizes = (rng.lognormal(4, 2, 20).astype(int) + 50) * 5
    means = rng.normal(0, 1, 4)
    models = [(rng.normal(m, 1, (10, 60)), rng.normal(m, 1, 10)) for m in means]
    size = min(sizes[0], 1500)
    x = rng.random_sample((size, 60))
    noise = np.array([rng.normal(0, 0.5, 10) for _ in range(size)])
    data = fpfc("s1", seed=3, scale="small")
    W, b = models[0]
    np.testing.assert_allclose(data.weights[0], W, rtol=1e-6)
    np.testing.assert_array_equal(data.x[:size], x)
    assert (data.y[:size] == (x @ W.T + b + noise).argmax(1)).mean() > 0.999


def test_fpfc_features():
    uniform, normal = fpfc("s1", scale="small"), fpfc("s1", scale="small", features="normal")
    assert 0 <= uniform.x.min() < uniform.x.max() < 1
    assert abs(normal.x.mean()) < 0.01
    assert normal.x.std() == pytest.approx(1, abs=0.01)


def test_fpfc_labels_depend_on_the_cluster():
    data = fpfc("s1", scale="small")
    owner = data.clusters[data.groups]
    answers = np.stack([(data.x @ w.T + b).argmax(1) for w, b in zip(data.weights, data.biases, strict=True)])
    hits = np.array([[(row == data.y)[owner == c].mean() for row in answers] for c in range(4)])
    assert hits.diagonal().min() > 0.75
    assert (hits.diagonal() - np.where(np.eye(4, dtype=bool), 0, hits).max(1)).min() > 0.25


def test_fpfc_as_a_data_set():
    fed = load("fpfc-s1", scale="small").partition()
    total = fed.train.counts + fed.validation.counts + fed.test.counts
    assert total.tolist() == fpfc("s1", scale="small").sizes.tolist()
    np.testing.assert_allclose(fed.test.counts / total, 0.2)
    np.testing.assert_allclose(fed.validation.counts / total, 0.16, atol=0.5 / 250)  # to the nearest sample
    assert np.bincount(fed.clusters).tolist() == [5] * 4
    assert fed.train.x.dtype == torch.float32


def test_fcube():
    """Two octants each, across the centre; one linear model is right everywhere, and every client has both classes."""
    data = load("fcube")
    octants = [{tuple(row) for row in np.sign(data.x[data.groups == i]).astype(int)} for i in range(4)]
    assert all(len(o) == 2 and {tuple(-np.array(row)) for row in o} == o for o in octants)
    assert len(set.union(*octants)) == 8
    assert ((data.x[:, 0] > 0) == data.y).all()
    assert np.bincount(data.groups).tolist() == [1250] * 4
    assert all(abs(data.y[data.groups == i].mean() - 0.5) < 0.06 for i in range(4))


@pytest.mark.parametrize(("shares", "expected"), [("10:90", (0.1, 0.9)), ("30:70", (0.3, 0.7)), ("linear", None)])
def test_mixtures_have_the_shares_that_they_say(shares, expected):
    data = load("mixtures", shares=shares, clients=10)
    first, models, source = data.meta["shares"][:, 0], data.meta["weights"], data.meta["source"]
    wanted = (np.arange(10) + 0.5) / 10 if expected is None else np.repeat(expected, 5)
    np.testing.assert_allclose(first, wanted, atol=0.5 / 100)
    scores = np.einsum("ncd,nd->nc", models[source], data.x.astype(np.float64))
    assert (scores.argmax(1) == data.y).mean() > 0.995
    assert 100 <= np.bincount(data.groups).min() <= np.bincount(data.groups).max() <= 200
    assert data.partition().clusters.tolist() == (first <= 0.5).astype(int).tolist()


def test_fedcet_closed_form():
    """x* = mean_i mean_j b_ij / 2, f_i the paper's up to the stated constant, Hessian 4 I."""
    fed = fedcet_quadratics(seed=2)
    b = fed.meta["measurements"]
    assert (b.shape, np.abs(b).max() <= 10) == ((10, 10, 60), True)
    np.testing.assert_allclose(fed.meta["optimum"], b.mean((0, 1)) / 2, atol=1e-12)
    w = np.random.default_rng(0).standard_normal(60)
    for i in range(10):
        x, y = (t.numpy() for t in fed.train.client(i))
        paper = ((w - b[i]) ** 2).sum(1).mean() + (w**2).sum()
        assert ((x @ w - y) ** 2).mean() + fed.meta["constant"][i] == pytest.approx(paper)
        np.testing.assert_allclose(2 * x.T @ (x @ w - y) / len(y), 4 * w - 2 * b[i].mean(0), atol=1e-10)
        np.testing.assert_allclose(2 * x.T @ x / len(y), 4 * np.eye(60), atol=1e-12)


def test_what_cannot_be_drawn_is_refused(refused):
    with refused("scenario", "'s6'"):
        fpfc("s6")
    with refused("features of fpfc-s1", "'gamma'"):
        load("fpfc-s1", features="gamma")
    with refused("data.options.feature: fpfc-s1 has no such option", "mean 'features'"):
        load("fpfc-s1", feature="n")
    with pytest.raises(ConfigError, match="seed of fpfc: found"):
        fpfc("s1", seed=2**32)
    with pytest.raises(ConfigError, match="clients of fedcet_quadratics: found 0, expected an integer of at least 1"):
        fedcet_quadratics(clients=0)
