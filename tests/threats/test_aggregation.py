"""Robust rules against their definitions by brute force, what they share, and how many outliers they bear."""

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.optimize import minimize

from polyfed import threats
from polyfed.core.algorithm import Round
from polyfed.core.uplinks import Uplinks
from polyfed_threats import aggregation

RULES = [
    threats.Median(), threats.TrimmedMean(0.2), threats.Krum(0.2), threats.MultiKrum(0.2), threats.GeometricMedian(),
    threats.NormClipping(),
]  # fmt: skip


def values(s=9, p=7, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(s, p)))


@pytest.mark.parametrize("s", [1, 2, 5, 8])
def test_median(s):
    v = values(s)
    assert np.allclose(threats.Median()(v), np.median(v, axis=0))


@pytest.mark.parametrize(("s", "share"), [(1, 0.2), (5, 0.2), (10, 0.3), (10, 0.49), (7, 0.0)])
def test_trimmed_mean(s, share):
    v = values(s)
    assert np.allclose(threats.TrimmedMean(share)(v), stats.trim_mean(v, share, axis=0))


def krum_scores(v, f):
    """The definition, in double loops."""
    s = len(v)
    scores = []
    for i in range(s):
        others = sorted(float(((v[i] - v[j]) ** 2).sum()) for j in range(s) if j != i)
        scores.append(sum(others[: s - f - 2]))
    return np.array(scores)


@pytest.mark.parametrize(("s", "f"), [(5, 1), (9, 3), (12, 4)])
def test_krum(s, f):
    v = values(s)
    scores = krum_scores(v, f)
    assert np.allclose(threats.Krum(f / s).scores(v), scores)
    assert torch.equal(threats.Krum(f / s)(v), v[scores.argmin()])
    assert np.allclose(threats.MultiKrum(f / s)(v), v.numpy()[scores.argsort()[: s - f]].mean(0))


@pytest.mark.parametrize("seed", range(3))
def test_geometric_median(seed):
    """The sum of distances is least: a general minimiser finds nothing better, and the gradient vanishes."""
    v = values(8, 3, seed).numpy()

    def total(z):
        return np.linalg.norm(v - z, axis=1).sum()

    found = threats.GeometricMedian()(torch.from_numpy(v)).numpy()
    best = minimize(total, v.mean(0), tol=1e-12)
    assert np.allclose(found, best.x, atol=1e-5)
    assert total(found) <= best.fun + 1e-10
    gap = found - v
    assert np.linalg.norm((gap / np.linalg.norm(gap, axis=1, keepdims=True)).sum(0)) < 1e-6


def test_a_geometric_median_that_is_an_upload():
    """Three corners and the point between them, which is the minimiser."""
    v = torch.tensor([[0.0, 0.0], [1.0, 0.0], [-0.5, 3**0.5 / 2], [-0.5, -(3**0.5) / 2]], dtype=torch.float64)
    assert torch.allclose(threats.GeometricMedian()(v), v[0], atol=1e-6)


@pytest.mark.parametrize("bound", [None, 0.5, 2.0, 1e6])
def test_norm_clipping(bound):
    v = values()
    norms = np.linalg.norm(v, axis=1)
    limit = np.median(norms) if bound is None else bound
    expected = np.mean([row * min(1, limit / size) for row, size in zip(v.numpy(), norms, strict=True)], axis=0)
    assert np.allclose(threats.NormClipping(bound)(v), expected)
    assert torch.equal(threats.NormClipping(bound)(0 * v), torch.zeros(7, dtype=v.dtype))


def test_a_sum_under_a_rule_is_what_the_rule_takes_for_the_mean_times_the_weight():
    rows, weights = {"w": values(5)}, torch.tensor([1.0, 2.0, 0.5, 4.0, 1.5], dtype=torch.float64)
    round = Round(0, 5, 0, torch.arange(5), weights, torch.zeros(5, dtype=torch.int64))
    median = torch.tensor(np.median(rows["w"].numpy(), axis=0))
    robust, plain = Uplinks(rows, round, rule=threats.Median()), Uplinks(rows, round)
    assert torch.allclose(robust.sum("w"), 5 * median)
    assert torch.allclose(robust.sum("w", weights), 9 * median)
    assert torch.allclose(plain.sum("w", weights), (weights[:, None] * rows["w"]).sum(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", RULES, ids=[r.name for r in RULES])
def test_what_the_rules_share(rule, dtype, monkeypatch):
    """Equal uploads are returned; neither the order of uploads nor blocks of columns matter; nothing is written to."""
    v, near = values(9, 100).to(dtype), {"rtol": 0, "atol": 1e-9 if dtype == torch.float64 else 1e-5}
    before, whole = v.clone(), rule(v)
    assert (whole.shape, whole.dtype) == ((100,), dtype)
    assert torch.equal(v, before)
    assert torch.allclose(rule(v[:1].expand(6, -1)), v[0], **near)
    assert torch.allclose(rule(v[torch.randperm(9)]), whole, **near)
    if rule.name != "norm-clipping" and dtype == torch.float64:
        by = 3 + values(1, 100)[0]
        assert torch.allclose(rule(v + by), whole + by, atol=1e-6)
    monkeypatch.setattr(aggregation, "BLOCK", 40)
    assert torch.allclose(rule(v), whole, **near)


def attacked(s, f, seed=0, size=1e6):
    """s uploads within 1 of each other in norm, the last f of them replaced by far ones that agree."""
    v = 0.3 * torch.tanh(values(s, 5, seed))
    if f:
        v[s - f :] = size * (1 + 0.1 * values(f, 5, seed + 1))
    return v


@pytest.mark.parametrize("f", [0, 1, 4, 9])
def test_a_median_bears_less_than_half(f):
    """With 9 of 19 false the coordinate median lies among honest values, the geometric one near them; no mean does."""
    v = attacked(19, f)
    honest = v[: 19 - f]
    for rule in (threats.Median(), threats.TrimmedMean(9 / 19)):
        value = rule(v)
        assert (value >= honest.amin(0)).all()
        assert (value <= honest.amax(0)).all()
    # the bound of Minsker (2015): distance to the honest centre at most 2 (1 - a) / (1 - 2 a) times their radius
    a, centre = f / 19, honest.mean(0)
    radius = float((honest - centre).norm(dim=1).max())
    away = float((threats.GeometricMedian()(v) - centre).norm())
    assert away <= 2 * (1 - a) / (1 - 2 * a) * radius
    assert f == 0 or v.mean(0).norm() > 1e4


@pytest.mark.parametrize(("s", "f"), [(5, 1), (11, 4), (23, 10)])
@pytest.mark.parametrize("seed", range(3))
def test_krum_picks_an_honest_upload(s, f, seed):
    """For s >= 2 f + 3, though the false ones all but agree; multi-Krum averages honest ones only."""
    v = attacked(s, f, seed)
    v[s - f :] = v[-1]
    chosen = threats.Krum(f / s)(v)
    assert (v[: s - f] == chosen).all(1).any()
    assert threats.MultiKrum(f / s)(v).norm() < 1
