"""IFCA and HypCluster: planted clusters in closed form, Algorithm 1 in numpy, FedAvg at k = 1, and the known traps."""

import numpy as np
import pytest
import torch
from certify import certifies
from problems import Point, centres, fit_points
from sklearn.metrics import adjusted_rand_score

import polyfed as pf
from polyfed.algorithms._shared.clusters import starts
from polyfed.base.errors import ConfigError
from polyfed.compute.task import Task


def two_groups(n=10, dim=4, distance=5.0, seed=0):
    """[n, dim] points about +v and -v in turn, and their groups."""
    rng = np.random.default_rng(seed)
    v = rng.normal(size=dim)
    group = np.arange(n) % 2
    points = distance * np.where(group[:, None] == 0, 1, -1) * v / np.linalg.norm(v)
    return points + 0.1 * rng.normal(size=(n, dim)), group


def of_sizes(points, sizes):
    """f_i = 1/2 ||w - c_i||^2 on sizes[i] times as many samples."""
    d = points.shape[1]
    axes = [np.tile(np.sqrt(d / 2) * np.eye(d), (m, 1)) for m in sizes]
    data = [(x, x @ c) for x, c in zip(axes, points, strict=True)]
    return pf.Federation.from_arrays(data, test=data)


@certifies(pf.HypCluster, pf.IFCA, by="clusters and models in closed form")
@pytest.mark.parametrize("method", [pf.IFCA, pf.HypCluster])
@pytest.mark.parametrize("seed", [0, 1])
def test_planted_clusters_and_their_means(method, seed):
    """With one exact local solve a cluster's model is the mean of its clients' optima."""
    points, group = two_groups()
    run = fit_points(centres(points), method(1.0, k=2, init_scale=0.5, seed=seed), rounds=4, dim=4)
    assert adjusted_rand_score(group, run.clusters) == 1
    expected = np.stack([points[group == g].mean(0) for g in group])
    assert np.allclose(run.personal, expected, atol=1e-12)


def by_hand(theta, points, sizes, cohorts, lr, steps, averaging, weighted):
    """Algorithm 1 in numpy, for f_i = 1/2 ||w - c_i||^2."""
    theta = theta.copy()
    for cohort in cohorts:
        pick = {i: int(((theta - points[i]) ** 2).sum(1).argmin()) for i in cohort}
        before = theta.copy()
        for j in range(len(theta)):
            inside = [i for i in cohort if pick[i] == j]
            if averaging == "gradient":
                theta[j] -= lr / len(cohort) * sum((before[j] - points[i] for i in inside), np.zeros(points.shape[1]))
            elif inside:
                after = [points[i] + (1 - lr) ** steps * (before[j] - points[i]) for i in inside]
                theta[j] = np.average(after, axis=0, weights=[sizes[i] if weighted else 1 for i in inside])
    return theta


@certifies(pf.IFCA, by="Algorithm 1 in numpy, several rounds")
@pytest.mark.parametrize(
    ("averaging", "weighted", "k"),
    [("model", False, 3), ("model", True, 3), ("gradient", False, 3), ("model", False, 8)],
)
def test_a_round_by_hand(averaging, weighted, k):
    """Several rounds at half participation; with eight models some are never picked, and stay."""
    points, _ = two_groups(n=9, seed=1)
    sizes = [1, 3, 2, 5, 1, 2, 4, 1, 2]
    method = pf.IFCA(0.3, k=k, weighted=weighted, init_scale=3.0, averaging=averaging)
    settings = {"dim": 4, "fraction": 0.5, "local_steps": 4}
    start = fit_points(of_sizes(points, sizes), method, rounds=0, **settings).server["w"].numpy()
    run = fit_points(of_sizes(points, sizes), method, rounds=6, **settings)
    cohorts = [list(c) for _, c in run.ledger.groupby("round")["client"]]
    expected = by_hand(start, points, sizes, cohorts, 0.3, 4, averaging, weighted)
    assert np.allclose(run.server["w"], expected, atol=1e-12)
    if k == 8:
        assert (expected == start).all(1).any()


@certifies(pf.IFCA, by="the planted one, and numpy")
@pytest.mark.parametrize("weighted", [False, True])
def test_the_start_nearest_to_the_clients_is_kept(weighted):
    """Of six sets of starts; then it is that seed's run, after an exchange of six times k models and six numbers."""
    points = 5.0 * np.array([[1, 1], [1, -1], [-1, 1], [-1, -1]])[np.arange(12) % 4]
    sizes = 1 + np.arange(12) % 5
    fed, task = of_sizes(points, sizes), Task(Point(2), "mse", device="cpu")
    sets = [starts(task, task.w0, 4, s, 3.0).numpy() for s in range(6)]
    distances = [((w[None] - points[:, None]) ** 2).sum(-1).min(1) for w in sets]
    nearest = int(np.argmin([np.average(d, weights=sizes if weighted else None) for d in distances]))
    runs = [
        fit_points(fed, pf.IFCA(0.5, k=4, init_scale=3.0, weighted=weighted, seed=s, restarts=r), rounds=4, dim=2)
        for s, r in ((0, 6), (nearest, 1))
    ]
    assert torch.allclose(runs[0].personal, runs[1].personal, rtol=0, atol=1e-12)
    extra = runs[0].ledger.set_index(["round", "client"]) - runs[1].ledger.set_index(["round", "client"])
    assert set(extra.loc[extra["down_bytes"] > 0, "down_bytes"]) == {6 * 4 * 2 * 8}
    assert set(extra.loc[extra["up_bytes"] > 0, "up_bytes"]) == {6 * 8}
    assert (extra["down_bytes"] > 0).sum() == len(points)


def images():
    rng = np.random.default_rng(0)
    data = []
    for i in range(5):
        x = rng.normal(size=(20, 6))
        data.append((x, (x[:, 0] * (-1) ** i > 0).astype(int)))
    return pf.Federation.from_arrays(data, test=data)


def mlp():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2)).double()


@pytest.mark.parametrize("averaging", ["model", "gradient"])
def test_shared_layers_are_sent_once_and_averaged_over_all(averaging):
    run = pf.fit(
        mlp(), images(), pf.IFCA(0.1, k=3, shared_layers=("body",), averaging=averaging), rounds=3, local_steps=3,
        evaluate_every=0,
    )  # fmt: skip
    body, head = 6 * 5 + 5, 5 * 2 + 2
    w = run.server["w"]
    assert torch.equal(w[:, :body], w[:1, :body].expand(3, -1))
    assert len(w[:, body:].unique(dim=0)) == 3
    assert not torch.equal(w[0, :body], run.trained.task.w0[:body])
    assert set(run.ledger["down_bytes"]) == {8 * (body + 3 * head)}


def test_a_client_never_asked_gets_the_largest_cluster():
    points, _ = two_groups(n=7)
    sizes = [1, 1, 1, 1, 9, 1, 1]
    fed = of_sizes(points, sizes)
    run = fit_points(fed, pf.IFCA(0.5, init_scale=0.5), rounds=1, dim=4, fraction=3 / 7)
    asked = set(run.ledger["client"])
    mass = [sum(sizes[i] for i in asked if run.server["cluster"][i] == j) for j in range(2)]
    largest = run.server["w"][int(np.argmax(mass))]
    for i in set(range(7)) - asked:
        assert torch.equal(run.personal[i], largest)


def test_starts_are_keyed():
    task = Task(mlp())
    torch.manual_seed(1)
    a = starts(task, task.w0, 3, 0, None)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    b = starts(task, task.w0, 4, 0, None)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(a, b[:3])
    assert torch.equal(a[0], task.w0)
    assert not torch.equal(a, starts(task, task.w0, 3, 1, None))
    assert (a[1:].std(1) > 0.1).all()


def test_a_model_that_cannot_be_drawn_again_is_refused():
    task = Task(Point(3), "mse")
    with pytest.raises(ConfigError, match=r"init_scale.*Point"):
        starts(task, task.w0, 2, 0, None)
    assert starts(task, task.w0, 2, 0, 0.1).shape == (2, 3)
