"""StoCFL: planted clusters from two clients a round on, FedAvg and Local at the ends of tau, merges by hand."""

import numpy as np
import pytest
import torch
from certify import certifies
from problems import LeastSquares, centres, fit_points
from sklearn.metrics import adjusted_rand_score

import polyfed as pf

POINTS = np.array([[5.0, 1], [5.5, 0], [-5, 2], [-4, 1.5], [-5.2, 2.2], [4.6, 0.5]])
GROUP = [0, 0, 1, 1, 1, 0]


@certifies(pf.StoCFL, by="planted directions")
@pytest.mark.parametrize("fraction", [1.0, 0.34])
def test_planted_clusters_under_any_participation(fraction):
    """With mu = 0 the clusters' models go to the means of their clients' optima. The first client is one of them: the
    released FEMNIST script never observes client 0."""
    run = fit_points(centres(POINTS), pf.StoCFL(0.5, tau=0.5, mu=0.0), 12, 2, fraction=fraction)
    assert adjusted_rand_score(GROUP, run.clusters) == 1
    if fraction == 1:
        expected = np.stack([POINTS[np.array(GROUP) == g].mean(0) for g in GROUP]) * (1 - 0.5**12)
        assert np.allclose(run.personal, expected, atol=1e-12)
        assert np.allclose(run.server["psi"], -POINTS * (1 - 0.5**20), atol=1e-12)


@certifies(pf.StoCFL, by="identities with FedAvg and Local at the ends of tau")
def test_the_ends_of_tau():
    problem = LeastSquares(seed=3, clients=6, dim=5)
    together, apart = (problem.fit(pf.StoCFL(0.05, tau=tau, mu=0.0), rounds=4) for tau in (-1.0, 1.1))
    mean = problem.fit(pf.FedAvg(0.05, weighted=False), rounds=4).personal
    assert torch.allclose(together.personal, mean, atol=1e-12)
    assert torch.allclose(together.server["common"], mean[0], atol=1e-12)
    assert torch.allclose(apart.personal, problem.fit(pf.Local(0.05), rounds=4).personal, atol=1e-12)
    assert torch.allclose(apart.server["common"], mean[0], atol=1e-12)


@certifies(pf.StoCFL, by="its equations in numpy")
def test_rounds_with_a_pull_by_hand():
    """Both groups are held near omega as it was received."""
    lr, mu, omega, theta = 0.3, 0.7, np.zeros(2), np.zeros((2, 2))
    group = np.array(GROUP)
    for _ in range(3):
        new = np.stack([theta[g] for g in group])
        for _ in range(2):
            new = new - lr * (new - POINTS + mu * (new - omega))
        own = POINTS + (1 - lr) ** 2 * (omega - POINTS)
        theta, omega = np.stack([new[group == g].mean(0) for g in (0, 1)]), own.mean(0)
    run = fit_points(centres(POINTS), pf.StoCFL(lr, tau=0.5, mu=mu), 3, 2, local_steps=2)
    assert np.allclose(run.personal, theta[group], atol=1e-12)
    assert np.allclose(run.server["common"], omega, atol=1e-12)


def merged(psi, tau, samples=None):
    psi = torch.as_tensor(np.asarray(psi, dtype=float))
    samples = torch.ones(len(psi)) if samples is None else torch.tensor(samples)
    return pf.StoCFL(tau=tau)._merged(psi, torch.arange(len(psi)), samples).tolist()


def angle(degrees):
    return np.stack([np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))], 1)


def test_pairs_merge_in_falling_cosine_by_their_means():
    """0 and 20 degrees merge first; their mean, at 10, is too far from 45 for 30 degrees, though 20 is near enough."""
    assert merged(angle([0, 20, 45]), np.cos(np.deg2rad(30)))[2] == 2
    assert len(set(merged(angle([0, 20, 35]), np.cos(np.deg2rad(30))))) == 1
    assert len(set(merged(angle([0, 90, 180, 270]), -0.5))) == 2


def test_the_larger_cluster_keeps_its_name():
    """Then the one with more samples; whichever comes first."""
    assert merged(angle([0, 40, 41]), 0.7)[0] in (1, 2)
    assert merged(angle([0, 10]), 0.7, [3, 5]) == [1, 1]
    assert merged(angle([0, 10]), 0.7, [5, 3]) == [0, 0]


def test_clients_not_met_yet_are_in_no_merge():
    assert merged(angle([0, 1, 2]), 0.9, [4, 0, 4]) == [0, 1, 0]
