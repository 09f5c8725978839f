"""FedFomo: its weights in numpy, Local without models, and who is sent whose model."""

import numpy as np
import pytest
import torch
from certify import certifies
from problems import LeastSquares, centres, fit_labels, fit_points, labelled

import polyfed as pf

POINTS = np.random.default_rng(2).normal(size=(5, 3)) * 2


def loss(w):
    """[client, model]: 1/2 ||w_n - c_i||^2."""
    return ((w[None] - POINTS[:, None]) ** 2).sum(2) / 2


@certifies(pf.FedFomo, by="its equations in numpy")
def test_rounds_by_hand():
    """All models sent: theta_i is the model after local training, weights are positive parts that add up to one, and
    the server adds up the weights before they are cut."""
    lr, w, P = 0.3, np.zeros_like(POINTS), np.zeros((5, 5))
    for _ in range(4):
        F, gap = loss(w), w[None] - w[:, None]  # gap[i, n] = theta_n - theta_i
        length = np.linalg.norm(gap, axis=2)
        v = (np.diag(F)[:, None] - F) / np.where(length > 0, length, 1)
        P += v
        u = np.maximum(v, 0)
        u = u / np.where(u.sum(1, keepdims=True) > 0, u.sum(1, keepdims=True), 1)
        w = w + np.einsum("in,ind->id", u, gap)
        w = w - lr * (w - POINTS)
    run = fit_points(centres(POINTS), pf.FedFomo(lr, models=4, validation=0.0), 4, 3)
    assert np.allclose(run.personal, w, atol=1e-12)
    assert np.allclose(run.server["P"], P, atol=1e-12)
    assert (P < 0).any()


@certifies(pf.FedFomo, by="identity with Local")
def test_without_models_or_better_ones_it_is_local():
    """Far apart, nobody else's model is ever better. In the first round all are equal: nothing is divided by 0."""
    problem = LeastSquares(seed=3, clients=6, dim=5)
    a = problem.fit(pf.FedFomo(0.05, models=0, validation=0.0), rounds=4).personal
    assert torch.equal(a, problem.fit(pf.Local(0.05), rounds=4).personal)
    far = centres(np.array([[9.0, 0], [-9, 0], [0, 9], [0, -9]]))
    b = fit_points(far, pf.FedFomo(0.4, validation=0.0), 5, 2).personal
    assert torch.allclose(b, fit_points(far, pf.Local(0.4), 5, 2).personal, atol=1e-13)


@certifies(pf.FedFomo, by="planted groups")
def test_groups_find_each_other():
    """No model of the other group is ever better: once all have been tried, only those of the own group are sent."""
    group = np.arange(10) % 2
    points = np.where(group[:, None] == 0, 4.0, -4.0) + np.random.default_rng(0).normal(size=(10, 2))
    run = fit_points(centres(points), pf.FedFomo(0.2, models=9, validation=0.0), 4, 2)
    state = {k: torch.as_tensor(v) for k, v in run.server.items()}
    assert (run.server["P"].numpy()[group[:, None] != group] < 0).all()
    few = pf.FedFomo(models=4, epsilon=0.0)
    sent = few._sent(state, pf.Round(4, 10, 0, torch.arange(10), torch.ones(10), torch.full((10,), 4)))
    assert (group[sent.numpy()] == group[:, None]).all()


def test_the_first_models_are_drawn_and_places_are_explored():
    """Not the first ones by index, and not the same in every round while epsilon lasts; nobody is sent its own."""
    method, n = pf.FedFomo(models=3, epsilon=0.5, decay=0.05), 40
    key = torch.arange(1, n + 1) * 7919
    P = torch.zeros(n, n).double()
    at = [pf.Round(t, n, 0, torch.arange(n), torch.ones(n), torch.full((n,), t)) for t in range(12)]
    sent = [method._sent({"P": P, "key": key}, r).numpy() for r in at]
    assert all((s != np.arange(n)[:, None]).all() and all(len({*row}) == 3 for row in s.tolist()) for s in sent)
    assert len(np.unique(sent[0])) > n / 2
    known = {"P": torch.arange(n).expand(n, -1).double(), "key": key}
    best = [(np.sort(method._sent(known, r).numpy()[:30], 1) == [37, 38, 39]).mean() for r in at]
    assert 0.3 < best[0] < 0.8
    assert best[-1] == 1.0


@pytest.mark.parametrize("validation", [0.3, 0.0])
def test_validation_samples_do_not_train(validation):
    """Without models, a client that sets 30 % apart is Local on the other 70 %."""
    fed = labelled((30, 20, 11))
    run = fit_labels(fed, pf.FedFomo(0.2, models=0, validation=validation), rounds=2)
    alone = fit_labels(fed, pf.Local(0.2), rounds=2)
    assert torch.equal(run.personal, alone.personal) is (validation == 0)
