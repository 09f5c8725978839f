"""FeSEM: k-means on models, FedAvg at one centre, Local at as many centres as clients."""

import numpy as np
import pytest
import torch
from certify import certifies
from problems import LeastSquares, centres, fit_labels, fit_points, labelled
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score

import polyfed as pf
from polyfed.algorithms._shared.clusters import distances, kmeans

POINTS = np.array([[5.0, 1], [5.5, 0], [-5, 2], [-4, 1.5], [-5.2, 2.2], [4.6, 0.5]])
GROUP = [0, 0, 1, 1, 1, 0]


@certifies(pf.FeSEM, by="identities with FedAvg at one centre and with Local at n")
def test_one_centre_is_fedavg_and_n_are_local():
    problem = LeastSquares(seed=3, clients=6, dim=5)
    one, mean = (problem.fit(m, rounds=5).personal for m in (pf.FeSEM(0.05, k=1), pf.FedAvg(0.05, weighted=False)))
    assert torch.allclose(one, mean, atol=1e-12)
    own, alone = (problem.fit(m, rounds=5).personal for m in (pf.FeSEM(0.05, k=6), pf.Local(0.05)))
    assert torch.allclose(own, alone, atol=1e-12)


def test_weights_are_the_numbers_of_samples():
    """At one centre, on clients of 24, 9 and 30 samples."""
    one, mean = (fit_labels(labelled(), m, rounds=3) for m in (pf.FeSEM(0.1, k=1, weighted=True), pf.FedAvg(0.1)))
    assert torch.allclose(one.personal, mean.personal, atol=1e-12)


@certifies(pf.FeSEM, by="planted clusters and their means")
@pytest.mark.parametrize("lr", [1.0, 0.3])
def test_planted_clusters_after_one_round(lr):
    """The first assignment is made on trained models, never on the equal starts."""
    run = fit_points(centres(POINTS), pf.FeSEM(lr, k=2), 1, 2)
    assert adjusted_rand_score(GROUP, run.clusters) == 1
    expected = np.stack([lr * POINTS[np.array(GROUP) == g].mean(0) for g in GROUP])
    assert np.allclose(run.personal, expected, atol=1e-12)


@certifies(pf.FeSEM, by="k-means of scikit-learn on the clients' models")
def test_rounds_are_steps_of_kmeans():
    """From the same centres, one iteration on the models that the cohort has trained from theirs."""
    points = np.random.default_rng(1).normal(size=(6, 2)) * 3
    run = fit_points(centres(points), pf.FeSEM(0.4, k=3), 1, 2)
    w, label = run.server["w"].numpy(), run.server["cluster"].numpy()
    for rounds in (2, 3):
        models = w[label] + 0.4 * (points - w[label])
        one = KMeans(3, init=w, n_init=1, max_iter=1, algorithm="lloyd").fit(models)
        nearest = ((models[:, None] - w) ** 2).sum(2).argmin(1)
        w = np.stack([models[nearest == k].mean(0) if (nearest == k).any() else w[k] for k in range(3)])
        label = nearest
        run = fit_points(centres(points), pf.FeSEM(0.4, k=3), rounds, 2)
        assert np.allclose(run.server["w"], w, atol=1e-12)
        assert run.server["cluster"].tolist() == label.tolist()
        assert np.allclose(np.sort(one.cluster_centers_, 0), np.sort(w, 0), atol=1e-9)


def test_the_objective_of_kmeans_never_rises():
    points = torch.as_tensor(np.random.default_rng(0).normal(size=(40, 3)))
    found = []
    for iterations in range(8):
        c, label = kmeans(points, points[:0], 4, iterations)
        found.append(float((points - c[label]).square().sum()))
        assert torch.equal(label, distances(points, c).argmin(1))
    assert (np.diff(found) <= 1e-12).all()
    assert found[-1] < found[0]


def test_a_cluster_of_one_client_is_trained_and_an_empty_one_stays():
    """One client far away has a centre of its own, which becomes its optimum. Of two points no third centre is made."""
    points = np.full((6, 2), 1.0)
    points[4] = -9
    run = fit_points(centres(points), pf.FeSEM(0.5, k=2), 40, 2)
    assert np.allclose(run.personal, points, atol=1e-9)
    three = fit_points(centres(points), pf.FeSEM(0.5, k=3), 40, 2)
    assert np.allclose(three.personal, points, atol=1e-9)


def test_clients_met_later_join_the_centre_that_they_move_towards():
    """A client that is new trains from the mean of the centres; with one centre as its start, it would stay there."""
    for seed in range(3):
        run = fit_points(centres(POINTS), pf.FeSEM(0.2, k=2), 30, 2, fraction=0.5, seed=seed)
        assert adjusted_rand_score(GROUP, run.clusters) == 1
