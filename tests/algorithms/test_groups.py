"""FeSEM, StoCFL, FlexCFL and FedSoft: planted groups, and their rounds by hand."""

import numpy as np
import pytest
import torch
from certify import certifies
from problems import centres, fit_points, zero_linear
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score

import polyfed as pf
from polyfed.algorithms.flexcfl import decomposed

POINTS = np.array([[5.0, 1], [5.5, 0], [-5, 2], [-4, 1.5], [-5.2, 2.2], [4.6, 0.5]])


GROUP = [0, 0, 1, 1, 1, 0]


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


@certifies(pf.StoCFL, by="planted directions")
@pytest.mark.parametrize("fraction", [1.0, 0.34])
def test_planted_clusters_under_any_participation(fraction):
    """The means of their clients' optima, client 0 among them, whom the released FEMNIST script never observes."""
    run = fit_points(centres(POINTS), pf.StoCFL(0.5, tau=0.5, mu=0.0), 12, 2, fraction=fraction)
    assert adjusted_rand_score(GROUP, run.clusters) == 1
    if fraction == 1:
        expected = np.stack([POINTS[np.array(GROUP) == g].mean(0) for g in GROUP]) * (1 - 0.5**12)
        assert np.allclose(run.personal, expected, atol=1e-12)
        assert np.allclose(run.server["psi"], -POINTS * (1 - 0.5**20), atol=1e-12)


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
    """0 and 20 degrees merge first; their mean, at 10, is too far from 45 for 30 degrees, though 20 is near enough. The
    larger cluster keeps its name, then the one with more samples; clients that are not met yet are in no merge."""
    assert merged(angle([0, 20, 45]), np.cos(np.deg2rad(30)))[2] == 2
    assert len(set(merged(angle([0, 20, 35]), np.cos(np.deg2rad(30))))) == 1
    assert len(set(merged(angle([0, 90, 180, 270]), -0.5))) == 2
    assert merged(angle([0, 40, 41]), 0.7)[0] in (1, 2)
    assert merged(angle([0, 10]), 0.7, [3, 5]) == [1, 1]
    assert merged(angle([0, 10]), 0.7, [5, 3]) == [0, 0]
    assert merged(angle([0, 1, 2]), 0.9, [4, 0, 4]) == [0, 1, 0]


CORNERS = np.array([[5.0, 1], [5.5, 0], [-1, 6], [0.5, 5.5], [0, 7.2], [4.6, 0.5]])
CORNER = np.array([0, 0, 1, 1, 1, 0])


@certifies(pf.FlexCFL, by="numpy's SVD")
def test_cosines_with_the_first_singular_directions():
    D = np.random.default_rng(0).normal(size=(7, 20))
    _, _, V = np.linalg.svd(D, full_matrices=False)
    expected = D @ V[:3].T / np.linalg.norm(D, axis=1, keepdims=True)
    found = decomposed(torch.as_tensor(D), 3).numpy()
    assert np.allclose(np.abs(found), np.abs(expected), atol=1e-10)
    gram = [E @ E.T for E in (found, expected)]  # whatever the signs of the directions
    assert np.allclose(*gram, atol=1e-10)


@certifies(pf.FlexCFL, by="planted groups and their means in numpy")
def test_groups_and_models_by_hand():
    """A group starts at the mean of its clients' first models; then it is FedAvg."""
    lr, steps = 0.3, 2
    kept = (1 - lr) ** steps
    run = fit_points(centres(CORNERS), pf.FlexCFL(lr, k=2, first_epochs=1), 3, 2, local_steps=steps)
    assert adjusted_rand_score(CORNER, run.clusters) == 1
    for g in (0, 1):
        mean = CORNERS[CORNER == g].mean(0)
        w = (1 - (1 - lr)) * mean  # one step on all samples is an epoch
        for _ in range(3):
            w = mean + kept * (w - mean)
        assert np.allclose(run.personal[CORNER == g], w, atol=1e-12)


def test_later_clients_join_by_direction_and_found_a_group_where_there_is_none():
    run = fit_points(centres(CORNERS), pf.FlexCFL(0.3, k=2), 15, 2, fraction=0.5)
    assert adjusted_rand_score(CORNER, run.clusters) == 1
    alone = fit_points(centres(np.array([[1.0, 0], [-1, 0.1]])), pf.FlexCFL(0.3, k=2), 6, 2, fraction=0.5)
    assert len(set(alone.clusters.tolist())) == 2


def test_the_step_between_groups():
    """Each group's model moves by the others' directions, of the models as averaged."""
    plain, moved = (
        fit_points(centres(CORNERS), pf.FlexCFL(0.3, k=2, between=b), 1, 2).server["w"].numpy() for b in (0.0, 0.1)
    )
    unit = plain / np.linalg.norm(plain, axis=1, keepdims=True)
    assert np.allclose(moved, plain + 0.1 * unit[::-1], atol=1e-13)


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


FOUR = np.array([[5.0, 1], [5.5, 0], [-5, 2], [-4, 1.5]])


def mixtures(shares, n=20, dim=3, seed=0):
    """Clients with a share of samples of y = a x and the rest of y = b x; (federation, a, b)."""
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(2, dim)) * 3
    data = []
    for share in shares:
        x = rng.normal(size=(n, dim))
        data.append((x, np.where(np.arange(n) < share * n, x @ a, x @ b)))
    return pf.Federation.from_arrays(data, test=data, task="regression"), a, b


@certifies(pf.FedSoft, by="mixtures with known shares")
def test_importances_are_counted_sample_by_sample():
    """Not by mean losses, which would give a client of 0.3 and 0.7 wholly to one centre; centres are the sources."""
    shares = (0.1, 0.3, 0.5, 0.9)
    fed, a, b = mixtures(shares)
    task = pf.Task(zero_linear(3), "mse")
    method = pf.FedSoft(0.0, k=2, init_scale=1.0)
    prepared = {"w": torch.as_tensor(np.stack([a, b]))[None].expand(4, -1, -1)}
    client = {"w": torch.zeros(4, 3).double(), "u": torch.zeros(4, 2).double()}
    own, up = method.local_update(task, client, prepared, whole(fed), first_round())
    expected = np.stack([shares, 1 - np.array(shares)], 1)
    assert np.allclose(up["importance"], expected, atol=1e-12)
    assert torch.equal(own["u"], up["importance"])


def whole(fed):
    from polyfed.base.randomness import client_keys
    from polyfed.compute.batches import Batches, Work

    return Batches(fed.train, np.arange(fed.n), client_keys(fed.names), Work(batch_size=None), 0, 0)


def first_round():
    ids = torch.arange(4)
    return pf.Round(0, 4, 0, ids, torch.full((4,), 20.0).double(), ids * 0)


@certifies(pf.FedSoft, by="its equations in numpy")
def test_rounds_of_fedsoft_by_hand():
    """Centres weighted by importance times samples: the last client has its samples three times over."""
    lr, lam, steps = 0.2, 0.8, 3
    method = pf.FedSoft(lr, k=2, lam=lam, tau=2, init_scale=4.0, seed=5)
    pairs = [centres(FOUR).train.client(i) for i in range(4)]
    data = [tuple(t.tile((3 if i == 3 else 1, *[1] * (t.dim() - 1))) for t in pair) for i, pair in enumerate(pairs)]
    fed, n = pf.Federation.from_arrays(data, test=data, task="regression"), np.array([1, 1, 1, 3])
    start = fit_points(fed, method, 0, 2).server["w"].numpy()
    run = fit_points(fed, method, 4, 2, local_steps=steps)
    c, w, u = start.copy(), np.zeros((4, 2)), np.zeros((4, 2))
    scale = np.sqrt(FOUR.shape[1] / 2)  # the samples of `centres` are the axes, scaled
    for t in range(4):
        if t % 2 == 0:
            losses = (scale * (c[None] - FOUR[:, None])) ** 2  # [client, centre, sample]
            best = losses.argmin(1)
            u = np.maximum([(best == s).mean(1) for s in (0, 1)], 1e-4).T
        for _ in range(steps):
            w = w - lr * (w - FOUR + lam * (u[:, :1] * (w - c[0]) + u[:, 1:] * (w - c[1])))
        c = np.stack([(n * u[:, s]) @ w / (n @ u[:, s]) for s in (0, 1)])
    assert np.allclose(run.personal, w, atol=1e-12)
    assert np.allclose(run.server["w"], c, atol=1e-12)
