"""FlexCFL: decomposed cosines against numpy's SVD, planted groups, FedAvg in each."""

import numpy as np
import pytest
import torch
from certify import certifies
from problems import centres, fit_points, zero_linear
from sklearn.metrics import adjusted_rand_score

import polyfed as pf
from polyfed.algorithms.flexcfl import decomposed

POINTS = np.array([[5.0, 1], [5.5, 0], [-1, 6], [0.5, 5.5], [0, 7.2], [4.6, 0.5]])
GROUP = np.array([0, 0, 1, 1, 1, 0])


@certifies(pf.FlexCFL, by="numpy's SVD")
def test_cosines_with_the_first_singular_directions():
    D = np.random.default_rng(0).normal(size=(7, 20))
    _, _, V = np.linalg.svd(D, full_matrices=False)
    expected = D @ V[:3].T / np.linalg.norm(D, axis=1, keepdims=True)
    found = decomposed(torch.as_tensor(D), 3).numpy()
    assert np.allclose(np.abs(found), np.abs(expected), atol=1e-10)
    gram = [E @ E.T for E in (found, expected)]  # whatever the signs of the directions
    assert np.allclose(*gram, atol=1e-10)


def test_lengths_do_not_matter_and_orthogonal_groups_have_two_rows():
    D = np.zeros((5, 6))
    D[[0, 2], 1], D[[1, 3, 4], 4] = [3, 0.5], [-2, -9, -0.1]
    rows = decomposed(torch.as_tensor(D), 2).numpy().round(12)
    assert len(np.unique(rows, axis=0)) == 2
    assert (rows[0] == rows[2]).all()


@certifies(pf.FlexCFL, by="planted groups and their means in numpy")
def test_groups_and_models_by_hand():
    """A group starts at the mean of its clients' first models; then it is FedAvg."""
    lr, steps = 0.3, 2
    kept = (1 - lr) ** steps
    run = fit_points(centres(POINTS), pf.FlexCFL(lr, k=2, first_epochs=1), 3, 2, local_steps=steps)
    assert adjusted_rand_score(GROUP, run.clusters) == 1
    for g in (0, 1):
        mean = POINTS[GROUP == g].mean(0)
        w = (1 - (1 - lr)) * mean  # one step on all samples is an epoch
        for _ in range(3):
            w = mean + kept * (w - mean)
        assert np.allclose(run.personal[GROUP == g], w, atol=1e-12)


@certifies(pf.FlexCFL, by="identity with FedAvg at one group")
def test_one_group_is_fedavg_from_the_mean_of_the_first_models():
    a = fit_points(centres(POINTS), pf.FlexCFL(0.3, k=1), 3, 2).personal
    b = fit_points(centres(POINTS), pf.FedAvg(0.3), 4, 2).personal
    assert torch.allclose(a, b, atol=1e-13)


def test_later_clients_join_by_direction_and_found_a_group_where_there_is_none():
    run = fit_points(centres(POINTS), pf.FlexCFL(0.3, k=2), 15, 2, fraction=0.5)
    assert adjusted_rand_score(GROUP, run.clusters) == 1
    alone = fit_points(centres(np.array([[1.0, 0], [-1, 0.1]])), pf.FlexCFL(0.3, k=2), 6, 2, fraction=0.5)
    assert len(set(alone.clusters.tolist())) == 2


def test_the_step_between_groups():
    """Each group's model moves by the others' directions, of the models as averaged."""
    plain, moved = (
        fit_points(centres(POINTS), pf.FlexCFL(0.3, k=2, between=b), 1, 2).server["w"].numpy() for b in (0.0, 0.1)
    )
    unit = plain / np.linalg.norm(plain, axis=1, keepdims=True)
    assert np.allclose(moved, plain + 0.1 * unit[::-1], atol=1e-13)


@pytest.mark.parametrize("k", [3, 5])
def test_a_group_without_clients_pulls_nobody_and_stays_at_the_start(k):
    """Of two clients: the step between groups is that of two groups, however many were asked for."""
    points = np.array([[4.0, 1], [-1, 5]])
    for between in (0.0, 0.1):
        two, more = (fit_points(centres(points), pf.FlexCFL(0.3, k=g, between=between), 3, 2) for g in (2, k))
        assert torch.allclose(two.personal, more.personal, atol=1e-13)
        there = more.server["direction"].any(1)
        assert int(there.sum()) == 2
        assert not more.server["w"][~torch.as_tensor(there)].any()
        plain = fit_points(centres(points), pf.FlexCFL(0.3, k=k), 3, 2)
        assert torch.allclose(plain.personal, more.personal, atol=1e-13) == (between == 0)


def started(start: float, method, rounds: int, **how):
    """As fit_points, from a start that is not zero, on two clients in opposite directions from it."""
    fed = centres(np.array([[start + 4.0, start], [start - 4, start + 1]]))
    model = zero_linear(2)
    torch.nn.init.constant_(model.weight, start)
    how = {"local_steps": 1, "batch_size": None, "evaluate_every": 0, "loss": "mse"} | how
    return pf.fit(model, fed, method, rounds=rounds, **how)


def test_groups_are_counted_from_the_start_wherever_it_is():
    """Models from a far start are those from zero, moved; a group that nobody of a round is in keeps its model."""
    for given in ({}, {"fraction": 0.5, "seed": 1}):
        near, far = (started(start, pf.FlexCFL(0.3, k=4), 6, **given).personal - start for start in (0.0, 50.0))
        assert torch.allclose(near, far, atol=1e-11)
        assert near.abs().max() > 1
    two, more = (started(50.0, pf.FlexCFL(0.3, k=k, between=0.1), 2).personal for k in (2, 4))
    assert torch.allclose(two, more, atol=1e-12), "a group without clients stands at the start, and pulls nobody"


def test_the_pull_of_a_model_at_zero_is_none_and_not_nan():
    points = np.array([[4.0, 0], [-4, 0.0]])
    run = fit_points(centres(points), pf.FlexCFL(0.3, k=1, between=0.1), 3, 2)
    assert run.personal.isfinite().all()
    assert run.personal.abs().max() < 1e-12
