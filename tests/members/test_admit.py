"""Newcomers: common models are deployed as they are, personal ones reach their closed forms, groups are the planted
ones; FPFC's newcomer is FPFC with one client more, which alone is asked."""

import numpy as np
import pytest
import torch
from problems import LeastSquares, centres, fit_points, pair_vectors
from test_cfl import GROUPS, four
from test_fpfc import fit_two_layers, softmax, two_layers
from test_pacfl import fit, planted

import polyfed as pf
from polyfed.algorithms.fedacs import mixing
from polyfed.algorithms.fpfc.newcomer import Joining
from polyfed.base.errors import ConfigError, DataError


def named(federation, prefix="new"):
    return pf.Federation.from_arrays(
        [federation.train.client(i) for i in range(federation.n)],
        [federation.test.client(i) for i in range(federation.n)],
        names=[f"{prefix}-{i}" for i in range(federation.n)],
        classes=federation.classes,
        clusters=federation.clusters,
    )


def points(*rows):
    """Newcomers with f_i = 1/2 ||w - c_i||^2."""
    return named(centres(np.array(rows, dtype=np.float64)))


# one common model


@pytest.mark.parametrize("method", [pf.FedAvg(0.05), pf.Scaffold(0.05), pf.FedDyn(0.05), pf.FedCET(0.05)])
def test_a_common_model_is_deployed_as_it_is_for_one_download(method):
    problem = LeastSquares(seed=0, clients=5, dim=4)
    run = problem.fit(method, rounds=10)
    found = pf.admit(run, named(problem.federation), 3)
    assert torch.equal(found.personal, run.server["w"].expand(5, -1))
    assert (found.history["down_bytes"] == 5 * 4 * 8).all()
    assert (found.history["up_bytes"] == 0).all()


def test_dittos_newcomer_solves_its_problem_about_the_frozen_model():
    """argmin 1/2 ||v - c||^2 + lam/2 ||v - x||^2 = (c + lam x) / (1 + lam)."""
    run = fit_points(centres(np.eye(3)), pf.Ditto(0.3, lam=0.5), rounds=20, dim=3)
    c = torch.tensor([4.0, -1.0, 2.0], dtype=torch.float64)
    found = pf.admit(run, points(c.numpy()), 80)
    assert torch.allclose(found.personal[0], (c + 0.5 * run.server["w"]) / 1.5, atol=1e-10)


def test_fedreps_newcomer_fits_a_head_to_the_frozen_body():
    rng = np.random.default_rng(0)
    data = [(rng.normal(size=(20, 3)), rng.normal(size=20)) for _ in range(4)]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)).double()
    fed = pf.Federation.from_arrays(data[:3], data[:3])
    run = pf.fit(model, fed, pf.FedRep(0.2, head_epochs=300), rounds=3, loss="mse", batch_size=None)
    found = pf.admit(run, named(pf.Federation.from_arrays(data[3:], data[3:])), 5)
    body, (x, y) = run.trained.task.layout.mask("body"), data[3]
    assert torch.equal(found.personal[0, body], run.server["w"])
    W, b = run.server["w"][:6].view(2, 3).numpy(), run.server["w"][6:].numpy()
    head = np.linalg.lstsq(np.column_stack([x @ W.T + b, np.ones(len(x))]), y, rcond=None)[0]
    assert np.allclose(found.personal[0, ~body].numpy(), head, atol=1e-6)


# clusters


@pytest.mark.parametrize("method", [pf.IFCA, pf.HypCluster, pf.CLoVE])
def test_the_model_with_the_least_training_loss_is_taken(method):
    run = fit_points(centres(np.array([[5.0, 0], [5, 1], [-5, 0]])), method(0.3, k=2, init_scale=1.0), 30, 2)
    assert len(set(run.clusters)) == 2
    c = np.array([[4.0, 3], [-6, 2], [1, 9]])
    misled = pf.Federation.from_arrays(
        [centres(c).train.client(i) for i in range(3)],
        [centres(-c).train.client(i) for i in range(3)],
        names=["a", "b", "c"],
    )
    found = pf.admit(run, misled, 1)
    w = run.server["w"].numpy()
    best = ((c[:, None] - w) ** 2).sum(2).argmin(1)
    assert np.array_equal(found.personal.numpy(), w[best])
    assert found.history["down_bytes"].tolist() == [3 * 2 * 2 * 8] * 2


def test_cfls_newcomers_walk_down_the_tree_of_splits():
    """Two levels: a newcomer is at its own corner after two exchanges, with the old clients' model."""
    run = fit_points(centres(four()), pf.CFL(0.5, eps1=0.05, eps2=0.5), rounds=60, dim=3)
    assert len(set(run.clusters)) == 4
    found = pf.admit(run, points(*four(seed=1)), 2)
    assert np.array_equal(found.clusters, run.clusters)
    assert torch.equal(found.personal, run.personal)
    assert len(set(GROUPS)) == 4


def test_pacfls_newcomers_join_the_cluster_of_their_subspace():
    fed = planted()
    run = fit(fed.reorder(range(9)), pf.PACFL(basis=2, threshold=20.0))
    assert len(set(run.clusters)) == 3
    found = pf.admit(run, fed.reorder([9, 10, 11]), 2)
    old = [run.clusters[list(fed.clusters[:9]).index(g)] for g in fed.clusters[9:]]
    assert found.clusters.tolist() == old
    models = run.trained.personal(np.array([list(run.clusters).index(k) for k in old]))
    assert torch.equal(found.personal, models)


def test_pacfls_newcomer_far_from_all_founds_a_cluster_of_its_own():
    """It then trains alone, from the common start."""
    fed = planted(groups=3)
    old, new = np.flatnonzero(fed.clusters < 2), np.flatnonzero(fed.clusters == 2)[:1]
    run = fit(fed.reorder(old), pf.PACFL(basis=2, threshold=20.0), batch_size=None)
    found = pf.admit(run, fed.reorder(new), 4)
    assert found.clusters.tolist() == [-1]
    assert torch.allclose(found.personal, fit(fed.reorder(new), pf.Local(), batch_size=None).personal, atol=1e-12)


# models mixed at the server


@pytest.mark.parametrize("pool", ["participants", "all"])
def test_fedacs_mixes_the_newcomers_upload_with_the_frozen_models(pool):
    """Two exchanges in numpy: half a step towards c from zero, then from the mixture (4) of all models."""
    rng = np.random.default_rng(0)
    old, c = rng.normal(size=(6, 3)) + 2, np.array([3.0, 1, 2])
    run = fit_points(centres(old), pf.FedACS(0.5, quantile=0.3, pool=pool), rounds=5, dim=3)
    first = c / 2
    W = torch.cat([run.server["w"], torch.as_tensor(first)[None]])
    u = (mixing(W, 0.3)[-1] @ W).numpy()
    found = pf.admit(run, points(c), 2)
    assert np.allclose(found.personal[0].numpy(), u + 0.5 * (c - u), atol=1e-12)
    assert not np.allclose(u, first)


def test_fedamp_mixes_the_newcomers_upload_with_the_frozen_models():
    """u = w + alpha/sigma sum_j exp(-||w - w_j||^2 / sigma) (w_j - w), alpha = sigma / n; then w <- u - lr (u - c)."""
    old, c = np.array([[1.0, 0], [2, 1], [-1, 3]]), np.array([2.0, 2])
    run = fit_points(centres(old), pf.FedAMP(0.5, lam=0.0, sigma=8.0), rounds=5, dim=2)
    first, W = c / 2, run.server["w"].numpy()
    pulls = np.exp(-((W - first) ** 2).sum(1) / 8) / 3
    u = first + (pulls[:, None] * (W - first)).sum(0)
    found = pf.admit(run, points(c), 2)
    assert np.allclose(found.personal[0].numpy(), u + 0.5 * (c - u), atol=1e-12)


# FPFC

PAIRS = np.array([[0.0, 0.0], [0.4, 0.0], [9.0, 9.0], [9.0, 9.6]])


def fused(**settings):
    fpfc = pf.FPFC(0.2, **{"lam": 1.5, "xi": 0.05} | settings)
    return fit_points(centres(PAIRS), fpfc, rounds=100, dim=2, local_steps=10)


@pytest.mark.parametrize("penalty", ["scad", "l1"])
def test_it_is_fpfc_with_one_client_more_of_which_alone_is_asked(penalty):
    """zeta, theta and clusters of FPFC's own server on all n + 1, started at theta = w_i - w_j, v = 0."""
    rng = np.random.default_rng(0)
    method = pf.FPFC(0.2, lam=0.8, penalty=penalty)
    run = fit_points(centres(rng.normal(size=(5, 3))), method, rounds=6, dim=3)
    task, n, loop = run.trained.task, 5, run.trained
    start = torch.as_tensor(rng.normal(size=3))
    models = torch.cat([run.server["w"], start[None]])
    server, _ = method.warm_start(task, models, torch.ones(n + 1, dtype=torch.float64))
    joining = Joining(method, task, run.server, loop.samples)
    joining.enter(0, 1.0)
    joining.w = start[None]
    round = loop.round(np.array([0]))._replace(n=n + 1, ids=torch.tensor([n]))
    for _ in range(6):
        mine, theirs = (x.downlink(*a).each["zeta"] for x, a in ((joining, [round]), (method, [server, round])))
        assert (mine - theirs).abs().max() < 1e-12
        up = {"w": mine + torch.as_tensor(0.3 * rng.normal(size=(1, 3)))}
        joining.aggregate(up, round)
        server = method.aggregate(server, up, round)
        last = [k * n - k * (k - 1) // 2 + n - 1 - k for k in range(n)]  # pairs (k, n)
        theta = server["c"][last] * pair_vectors(server)[last].norm(dim=1)
        assert (joining.theta - theta).abs().max() < 1e-12


@pytest.mark.parametrize("solver", ["pairs", "device-dual"])
def test_a_newcomer_with_an_old_clients_data_joins_its_cluster_near_its_model(solver):
    run = fused(solver=solver)
    assert run.clusters.tolist() == [0, 0, 1, 1]
    found = pf.admit(run, points(*PAIRS), 40)
    assert np.array_equal(found.clusters, run.clusters)
    assert (found.personal - run.personal).norm(dim=1).max() < 0.05


@pytest.mark.parametrize("start", ["offered", "common"])
def test_the_newcomer_is_stationary_for_objective_1_with_the_others_frozen(start):
    """grad f(w) + 1/(n+1) sum_j g'(||w - w_j||) (w - w_j) / ||w - w_j|| = 0, g the smoothed SCAD (3)."""
    run = fused(merge=False)
    c = np.array([[0.3, 0.5], [8.0, 8.7], [4.0, 5.0]])
    w = pf.admit(run, points(*c), 80, start=start).personal.numpy()
    lam, a, xi = 1.5, 3.7, 0.05
    for wi, ci in zip(w, c, strict=True):
        gap = wi - run.server["w"].numpy()
        t = np.linalg.norm(gap, axis=1)
        slope = np.select([t <= xi, t <= lam, t <= a * lam], [lam * t / xi, lam, (a * lam - t) / (a - 1)], 0.0)
        assert np.abs((wi - ci) + (slope / np.maximum(t, 1e-12) @ gap) / 5).max() < 1e-6


def test_the_layers_that_all_share_stay_as_they_are():
    run = fit_two_layers(pf.FPFC(0.05, lam=0.5, shared_layers="0"))
    found = pf.admit(run, named(two_layers()[1]), 3)
    shared = run.trained.task.layout.mask("0")
    assert torch.equal(found.personal[:, shared], run.server["common"].expand(4, -1))
    assert found.history["up_bytes"].tolist() == [4 * k * 26 * 8 for k in range(4)]


def test_s1_newcomers_join_their_true_clusters():
    """A fifth of the devices of S1 (small) held out, one of each cluster; lambda 0.7, 600 rounds, before which the four
    clusters are not formed. All four join, and are better on average than alone after as many local steps; from the
    common start most stay out of reach of the penalty."""
    fed = pf.data.load("fpfc-s1", scale="small", seed=0).partition(seed=0)
    held, old = np.arange(4, 20, 5), np.setdiff1d(np.arange(20), np.arange(4, 20, 5))
    run = pf.fit(
        softmax(0), fed.reorder(old), pf.FPFC(0.1, lam=0.7), rounds=600, fraction=0.3, local_epochs=10,
        batch_size=None, evaluate_every=0,
    )  # fmt: skip
    found = pf.admit(run, fed.reorder(held), 20)
    assert found.clusters.tolist() == [run.clusters[list(fed.clusters[old]).index(k)] for k in fed.clusters[held]]
    assert len(set(found.clusters)) == 4
    assert (found.history["accuracy"] > found.history["alone"]).all()
    assert (pf.admit(run, fed.reorder(held), 20, start="common").clusters == -1).sum() >= 2


# what it returns and refuses


def test_models_by_name_and_position(tmp_path):
    run = fit_points(centres(np.eye(3)), pf.Ditto(0.3), rounds=2, dim=3)
    found = pf.admit(run, points([1.0, 2, 3], [0, 0, 1]), 2)
    own = [torch.nn.utils.parameters_to_vector(found.model(k).parameters()) for k in (1, -1, "new-1")]
    assert all(torch.equal(w, found.personal[1]) for w in own)
    with pytest.raises(ConfigError, match="no newcomer 'new-2'"):
        found.model("new-2")
    assert found.save(tmp_path / "a") == tmp_path / "a"
    names = sorted(p.relative_to(tmp_path / "a").as_posix() for p in (tmp_path / "a").rglob("*.*"))
    models = ["models/new-0.safetensors", "models/new-1.safetensors"]
    assert names == [".polyfed", "admission.csv", "admission.svg", *models]  # the first marks the folder as polyfed's


def test_a_method_that_cannot_grow_is_named():
    class Pairs(pf.FedAvg):
        name = "pairs-of-clients"

        def init_server(self, task, w0, n):
            return {"w": w0, "pairs": w0.new_zeros(n * (n - 1) // 2)}

        def aggregate(self, server, up, round):
            return server | super().aggregate(server, up, round)

    with pytest.raises(ConfigError, match="cannot extend server tensor 'pairs' of pairs-of-clients by one"):
        pf.admit(fit_points(centres(np.eye(3)), Pairs(), rounds=1, dim=3), points([1.0, 0, 0]))


@pytest.mark.parametrize(
    ("newcomers", "settings", "line"),
    [
        (centres(np.eye(3)), {}, "found the name 'client-0', which a client of the run has"),
        (points([1.0, 2]), {}, r"found inputs of shape \[2\] for 'new-0', expected \[3\]"),
        (points([1.0, 2, 3]), {"exchanges": -1}, "exchanges of admit: found -1, expected an integer of at least 0"),
        (points([1.0, 2, 3]), {"start": "best"}, "start of admit: found 'best', expected offered or common"),
        ([1.0], {}, "newcomers of admit: found .*, expected a polyfed.Federation"),
        (
            pf.Federation.from_arrays([(np.eye(3), [0, 1, 1])], names=["a"]),
            {},
            "found class labels as the targets of 'a', expected numbers",
        ),
    ],
)
def test_refusals(newcomers, settings, line):
    run = fit_points(centres(np.eye(3)), pf.FedAvg(0.3), rounds=1, dim=3)
    with pytest.raises((ConfigError, DataError), match=line):
        pf.admit(run, newcomers, **settings)
