"""CFL: the bipartition against brute force, planted clusters over two levels, FedAvg where nobody disagrees."""

from itertools import combinations

import numpy as np
import pytest
import torch
from certify import certifies
from problems import Given, centres, fit_points
from sklearn.metrics import adjusted_rand_score

import polyfed as pf
from polyfed.algorithms.cfl import bipartition


def across(S, part):
    return float(S[part][:, ~part].max())


def random_similarities(m, seed):
    X = np.random.default_rng(seed).normal(size=(m, 3))
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    return torch.as_tensor(X @ X.T)


@certifies(pf.CFL, by="brute force over all bipartitions")
@pytest.mark.parametrize("m", [2, 3, 5, 8])
def test_bipartition_is_optimal(m):
    """No bipartition has a smaller largest similarity across: all of them are tried."""
    for seed in range(20):
        S = random_similarities(m, seed)
        part = bipartition(S)
        assert 0 < int(part.sum()) < m
        best = np.inf
        for size in range(1, m // 2 + 1):
            for chosen in combinations(range(m), size):
                other = torch.zeros(m, dtype=torch.bool).index_fill(0, torch.tensor(chosen), True)
                best = min(best, across(S, other))
        assert across(S, part) == pytest.approx(best, abs=1e-12)


def test_equal_similarities_still_give_two_parts():
    assert 0 < int(bipartition(torch.ones(4, 4)).sum()) < 4


GROUPS = np.array([2, 0, 3, 1, 0, 2, 1, 3, 3, 2, 1, 0])  # nowhere in order: positions in a cluster are no ids


def four(seed=0, spread=0.05):
    """Twelve optima about the corners of a flat rectangle, away from the start."""
    corners = np.array([[10.0, 3, 0], [10, -3, 0], [-10, 3, 0], [-10, -3, 0]]) + 20
    return corners[GROUPS] + spread * np.random.default_rng(seed).normal(size=(12, 3))


@certifies(pf.CFL, by="planted clusters and their optima")
def test_four_planted_clusters_need_two_levels():
    """Split along the long side, then, much later, each half along the short one: the right clients, their optima."""
    points = four()
    method = pf.CFL(0.5, eps1=0.05, eps2=0.5)
    first = fit_points(centres(points), method, rounds=12, dim=3)
    assert adjusted_rand_score(GROUPS // 2, first.clusters) == 1
    run = fit_points(centres(points), method, rounds=60, dim=3)
    assert adjusted_rand_score(GROUPS, run.clusters) == 1
    assert len(run.server["w"]) == 7  # the root, two halves, four leaves
    expected = np.stack([points[g == GROUPS].mean(0) for g in GROUPS])
    assert np.allclose(run.personal, expected, atol=1e-9)


def agreeing(seed=0):
    """Clients with unlike Hessians and sizes whose losses have one common minimiser."""
    rng = np.random.default_rng(seed)
    w = rng.normal(size=5)
    X = [rng.normal(size=(int(rng.integers(10, 30)), 5)) for _ in range(6)]
    return pf.Federation.from_arrays([(x, x @ w) for x in X], test=[(x, x @ w) for x in X])


@certifies(pf.CFL, by="identity, never split")
@pytest.mark.parametrize("weighted", [True, False])
def test_without_disagreement_it_is_fedavg(weighted):
    """At a common optimum all updates vanish together: never split at any scale, and FedAvg to the last digits."""
    for eps in (1.0, 0.01):
        method = pf.CFL(0.05, eps1=eps, eps2=4 * eps, weighted=weighted)
        run = fit_points(agreeing(), method, rounds=30, dim=5, local_steps=3)
        same = fit_points(agreeing(), pf.FedAvg(0.05, weighted=weighted), rounds=30, dim=5, local_steps=3)
        assert len(run.server["w"]) == 1
        assert torch.allclose(run.personal, same.personal, atol=1e-12)


@certifies(pf.CFL, by="the bound, from both sides")
@pytest.mark.parametrize(("slack", "parts"), [(-1e-9, 2), (1e-9, 1)])
def test_the_gamma_test(slack, parts):
    """Two updates 2 t apart: sqrt((1 - cos 2t) / 2) = sin t, so gamma_max is compared with sin t."""
    t = 0.7
    points = np.array([[np.cos(t), np.sin(t)], [np.cos(t), -np.sin(t)]])
    method = pf.CFL(1.0, eps1=10.0, eps2=0.5, gamma_max=np.sin(t) + slack)
    assert len(set(fit_points(centres(points), method, rounds=1, dim=2).clusters)) == parts


@certifies(pf.CFL, by="eps2 and the longest update")
@pytest.mark.parametrize(("eps2", "parts"), [(1.4, 2), (1.6, 1)])
def test_one_client_that_would_still_move_is_enough(eps2, parts):
    """The second criterion is the longest update, 1.5 here, neither the mean length, .8, nor the shortest."""
    points = np.array([[3.0, 0], [-3, 0], [0.2, 0], [-0.2, 0]])
    run = fit_points(centres(points), pf.CFL(0.5, eps1=0.1, eps2=eps2, gamma_max=None), rounds=1, dim=2)
    assert len(set(run.clusters)) == parts


def test_a_split_cluster_goes_on_from_its_model():
    """Both parts start at the model that is split, moved by the mean of their own updates."""
    points = np.array([[3.0, 0], [3.2, 0], [-3, 0], [-3.4, 0]])
    run = fit_points(centres(points), pf.CFL(0.25, eps1=1.0, eps2=0.5), rounds=1, dim=2)
    assert np.allclose(run.personal[:, 0], [0.775, 0.775, -0.8, -0.8], atol=1e-12)


@certifies(pf.CFL, by="planted clusters, half asked")
@pytest.mark.parametrize("seed", range(3))
def test_absent_clients_find_their_part_later(seed):
    """With half of the clients in a round the halves are found, then everybody's: nobody is sorted by an old update."""
    rng = np.random.default_rng(seed)
    group = rng.permutation(np.arange(12) % 2)
    points = np.where(group[:, None] == 0, 5.0, -5.0) * np.array([1.0, 0.2, 0]) + 0.05 * rng.normal(size=(12, 3))
    run = fit_points(
        centres(points), pf.CFL(0.5, eps1=1.5, eps2=2.0), rounds=60, dim=3, fraction=0.5, seed=seed
    )  # fmt: skip
    assert adjusted_rand_score(group, run.clusters) == 1
    assert np.abs(run.personal.numpy() - points).max() < 0.3


def test_who_is_absent_does_not_decide_a_split():
    """Three alike clients take part, three unlike ones never do: no split, as zeros for those would give."""
    points = np.array([[4.0, 0]] * 3 + [[-4.0, 0]] * 3)
    settings = {"rounds": 10, "dim": 2, "schedule": Given(((0, 1, 2),))}
    run = fit_points(centres(points), pf.CFL(0.5, eps1=1.0, eps2=0.5, gamma_max=None), **settings)
    assert len(run.server["w"]) == 1
    assert np.allclose(run.personal[:3], points[:3], atol=0.01)
