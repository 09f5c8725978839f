"""FPFC: its proximal step against brute force, its dual-only storage against the plain (theta, v) loop, its limits, and
the clusters it must find."""

import numpy as np
import pytest
import torch
from certify import certifies
from problems import LeastSquares, centres, fit_points, pair_vectors
from scipy.optimize import linprog
from sklearn.metrics import adjusted_rand_score
from torch import nn

import polyfed as pf
from polyfed.algorithms.fpfc import pairs, servers
from polyfed.algorithms.fpfc.pairs import pair_index
from polyfed.algorithms.fpfc.penalty import shrinkage
from polyfed.algorithms.fpfc.window import lambda_window
from polyfed.base.errors import ConfigError
from polyfed.compute.task import Task
from polyfed.core.algorithm import Round
from polyfed.core.schedule import Asynchronous, Delays


def smoothed_scad(t, lam, a, xi):
    """Equations (2) and (3)."""
    t = np.asarray(t, dtype=float)
    out = np.where(t <= lam, lam * t, (a * lam * t - (t**2 + lam**2) / 2) / (a - 1))
    out = np.where(t > a * lam, lam**2 * (a + 1) / 2, out)
    return np.where(t <= xi, lam * t**2 / (2 * xi) + xi * lam / 2, out)


def c(t, lam, rho=1.0, a=3.7, xi=1e-4, penalty="scad"):
    return shrinkage(torch.as_tensor(np.atleast_1d(t), dtype=torch.float64), lam, rho, a, xi, penalty).numpy()


@certifies(pf.FPFC, by="brute-force minimisation")
@pytest.mark.parametrize(("lam", "rho", "a", "xi"), [(0.7, 1, 3.7, 1e-4), (2, 0.5, 3.7, 0.3), (1, 2, 2.2, 0.5)])
def test_rule_6_is_the_proximal_step(lam, rho, a, xi):
    """argmin_theta g(theta) + rho/2 (theta - t)^2 by brute force, on a grid of t and at the three thresholds."""
    edges = [xi + lam / rho, lam + lam / rho, a * lam]
    for t in [*np.linspace(0.01, 1.5 * a * lam, 60), *edges, *(e + 1e-6 for e in edges)]:
        theta = c(t, lam, rho, a, xi)[0] * t
        grid = np.linspace(0, 1.2 * t, 40001)
        value = smoothed_scad(grid, lam, a, xi) + rho / 2 * (grid - t) ** 2
        mine = smoothed_scad(theta, lam, a, xi) + rho / 2 * (theta - t) ** 2
        assert mine <= value.min() + 1e-9
        assert abs(theta - grid[value.argmin()]) < 2e-4 * max(1, t)


class Plain:
    """Algorithm 2 as printed: theta and v for all ordered pairs, double loops, numpy."""

    def __init__(self, gradients, start, lam, rho=1.0, a=3.7, xi=1e-4):
        n = len(gradients)
        self.g, self.n, self.settings, self.rho = gradients, n, (lam, rho, a, xi), rho
        self.w = np.stack([start] * n)
        self.theta, self.v = np.zeros((2, n, n, len(start)))
        self.branches: set[int] = set()

    def round(self, active, lr, steps):
        zeta = {
            i: np.mean([self.w[j] + self.theta[i, j] - self.v[i, j] / self.rho for j in range(self.n)], axis=0)
            for i in active
        }
        for i in active:
            for _ in range(steps):
                self.w[i] = self.w[i] - lr * (self.g[i](self.w[i]) + self.rho * (self.w[i] - zeta[i]))
        for i in range(self.n):
            for j in range(self.n):
                if i != j and (i in active or j in active):
                    delta = self.w[i] - self.w[j] + self.v[i, j] / self.rho
                    t, (lam, rho, a, xi) = np.linalg.norm(delta), self.settings
                    self.branches.add(int(np.searchsorted([xi + lam / rho, lam + lam / rho, a * lam], t)))
                    self.theta[i, j] = c(t, *self.settings)[0] * delta
                    self.v[i, j] += self.rho * (self.w[i] - self.w[j] - self.theta[i, j])


@pytest.mark.parametrize(("lam", "a", "xi"), [(0.5, 3.7, 0.1), (0.5, 1.5, 0.4)])
def test_condition_13_is_twice_the_penaltys_largest_curvature(lam, a, xi):
    """Up to xi the curvature is lam / xi, and between lam and a lam it is -1 / (a - 1): either is the larger here."""
    t, step = np.linspace(0.001, 1.5 * a * lam, 4001), 1e-4
    values = [smoothed_scad(t + k * step, lam, a, xi) for k in (-1, 0, 1)]
    curvature = np.abs(values[0] - 2 * values[1] + values[2]) / step**2
    smooth = np.min([np.abs(t - edge) for edge in (xi, lam, a * lam)], axis=0) > 2 * step
    assert pf.FPFC(lam=lam, rho=5.0, a=a, xi=xi).least_rho == pytest.approx(2 * curvature[smooth].max(), rel=1e-5)


@certifies(pf.FPFC, by="identity with (theta, v)")
@pytest.mark.parametrize("block", [pairs.BLOCK, 1], ids=["blocks of pairs", "pair by pair"])
@pytest.mark.parametrize(
    ("fraction", "lam", "rho"), [(1.0, 0.5, 1.0), (0.5, 0.5, 1.0), (0.5, 1.2, 2.0), (0.5, 0.0, 1.0)]
)
def test_dual_only_storage_is_the_plain_double_loop(fraction, lam, rho, block, monkeypatch):
    """All w, theta and v agree to 1e-10 over 60 rounds that visit every branch."""
    monkeypatch.setattr(pairs, "BLOCK", block)
    problem = LeastSquares(seed=0, clients=6, dim=4)
    run = problem.fit(pf.FPFC(0.05, lam=lam, rho=rho, merge=False), rounds=60, steps=3, fraction=fraction)
    plain = Plain([lambda w, i=i: problem.gradient(i, w) for i in range(6)], np.zeros(4), lam, rho)
    for _, cohort in run.ledger.groupby("round")["client"]:
        plain.round(set(cohort), 0.05, 3)
    assert np.abs(run.personal.numpy() - plain.w).max() < 1e-10
    for i in range(6):
        for j in range(i + 1, 6):
            at = pair_index(torch.tensor(i), torch.tensor(j), 6)
            delta, factor = pair_vectors(run.server)[at].numpy(), float(run.server["c"][at])
            assert np.abs(factor * delta - plain.theta[i, j]).max() < 1e-10
            assert np.abs(rho * (1 - factor) * delta - plain.v[i, j]).max() < 1e-10
            assert np.linalg.norm(plain.v[i, j]) <= lam + 1e-10
            if np.linalg.norm(plain.theta[i, j]) > 3.7 * lam:
                assert np.abs(plain.v[i, j]).max() < 1e-10
    assert lam == 0 or len(plain.branches) >= 3


def test_the_plan_says_where_the_other_solver_takes_less_memory():
    """For 4950 pairs of 159,010 numbers; not where there is nothing to gain, nor what cannot be chosen."""
    large, small = (Task(nn.Sequential(nn.Linear(784, h), nn.ReLU(), nn.Linear(h, 10))) for h in (200, 2))
    assert "up to 6.4 GB, with device-dual 0.45 GB" in servers.plan(pf.FPFC(), 100, large.w0)
    for method, task in ((pf.FPFC(), small), (pf.FPFC(xi=0.0), large), (pf.FPFC(solver="device-dual"), large)):
        assert "with device-dual" not in servers.plan(method, 100, task.w0)


def test_free_pairs_carry_no_vector():
    """Two tight groups far apart: in the end only pairs within a group have a dual, and only they take memory."""
    points = np.repeat([[0.0, 0.0], [40.0, 0.0]], [3, 4], axis=0) + np.random.default_rng(0).normal(size=(7, 2))
    run = fit_points(centres(points), pf.FPFC(0.2, lam=2.0), rounds=200, dim=2, local_steps=10, fraction=0.5)
    i, j = torch.triu_indices(7, 7, 1)
    within = (i < 3) == (j < 3)
    assert torch.equal(run.server["row"] >= 0, within)
    assert within.sum() <= len(run.server["delta"]) <= 2 * within.sum()
    assert len(set(run.server["row"][within].tolist())) == within.sum()  # a row for each
    apart = torch.pdist(run.server["w"])[~within]
    assert (apart > 3.7 * 2.0).all()


def test_pair_vectors_grow_where_they_are():
    """Of so many numbers that copies of them cost more than all the rest; the rows of a cohort are added at once."""
    w, fusion = 1e-3 * torch.randn(40, 1 << 17), pf.FPFC(lam=0.5).fusion  # room for 409 MB, 40 of which are used
    state, places = pairs.start(torch.zeros(1 << 17), 40, fusion), set()
    for t, i in enumerate((3, 17)):
        state = pairs.advance(state, torch.tensor([i]), w[[i]], fusion, t)
        places.add(state["delta"].data_ptr())
        assert len(state["delta"]) == (state["row"] >= 0).sum() == (39, 77)[t]
    assert len(places) == 1
    alone = pairs.advance(pairs.start(torch.zeros(1 << 17), 40, fusion), torch.tensor([3]), w[[3]], fusion, 0)
    copied = alone | {"delta": alone["delta"].clone()}  # as read from a checkpoint: there is no room behind it
    assert torch.equal(pairs.advance(copied, torch.tensor([17]), w[[17]], fusion, 1)["delta"], state["delta"])


def stationarity(run, points):
    """The largest entry of n grad f_i(w_i) + sum_j v_ij, the KKT conditions of (1), v in numpy."""
    n, w = len(points), run.server["w"].numpy()
    v = np.zeros((n, *w.shape))
    for i in range(n):
        for j in range(i + 1, n):
            at = pair_index(torch.tensor(i), torch.tensor(j), n)
            v[i, j] = (1 - float(run.server["c"][at])) * pair_vectors(run.server)[at].numpy()
            v[j, i] = -v[i, j]
    return np.abs(n * (w - points) + v.sum(1)).max()


def two_groups():
    rng = np.random.default_rng(0)
    return np.concatenate([rng.normal(size=(4, 3)) * 0.05, 8 + rng.normal(size=(4, 3)) * 0.05])


@certifies(pf.FPFC, by="the optimality conditions of (1), replies in time and late")
@pytest.mark.parametrize(
    ("penalty", "xi", "late"), [("scad", 1e-4, False), ("l1", 1e-4, False), ("scad", 0.1, True), ("l1", 1e-4, True)]
)
def test_stationarity_of_objective_1(penalty, xi, late):
    """At the end 0 = n grad f_i(w_i) + sum_j v_ij for every client, two clusters; with l1 objective (1) is convex. Also
    with replies up to many turns late, all clients at work.

    xi is not tiny for late SCAD: duals that cancel along cycles of fused pairs die out by lam / (lam + xi rho) per
    update only, and where pairs are not updated in step they do not cancel exactly."""
    points, how = two_groups(), {"schedule": Asynchronous(Delays("uniform", 0, 20))} if late else {}
    fpfc = pf.FPFC(0.3, lam=1.0, xi=xi, penalty=penalty, merge=False)
    run = fit_points(centres(points), fpfc, rounds=800 if late else 300, dim=3, local_steps=10, **how)
    assert not late or run.ledger["staleness"].max() > 8
    assert stationarity(run, points) < 1e-6
    assert adjusted_rand_score(np.repeat([0, 1], 4), run.clusters) == 1


def test_cluster_models_are_weighted_means():
    rng = np.random.default_rng(0)
    sizes = [1, 2, 5, 1, 4, 3]
    axes = [np.tile(np.eye(2), (n, 1)) for n in sizes]
    data = [(x, x @ (9.0 * (i > 2) + 0.05 * rng.normal(size=2))) for i, x in enumerate(axes)]
    fed = pf.Federation.from_arrays(data, test=data)
    run = fit_points(fed, pf.FPFC(0.3, lam=1.0), rounds=150, dim=2, local_steps=5)
    assert run.clusters.tolist() == [0, 0, 0, 1, 1, 1]
    own = run.server["w"]
    for group in ([0, 1, 2], [3, 4, 5]):
        weights = torch.tensor([sizes[i] for i in group], dtype=torch.float64)[:, None]
        expected = (own[group] * weights).sum(0) / weights.sum()
        assert torch.allclose(run.personal[group], expected.expand(3, -1), atol=1e-12)


# setting out from another run


def test_from_local_models_zeta_is_the_clients_own_model():
    """theta_ij = w_i - w_j and v = 0: zeta_i = w_i at the first exchange, and each client is billed one model up."""
    problem = LeastSquares(seed=0, clients=5, dim=4)
    local = problem.fit(pf.Local(0.05), rounds=20)
    run = problem.fit(pf.FPFC(0.05, lam=0.5), rounds=0, start=local)
    assert torch.equal(run.server["w"], local.personal)
    loop = run.trained
    zeta = loop.algorithm.downlink(run.server, loop.round(np.arange(5))).each["zeta"]
    assert (zeta - local.personal).abs().max() < 1e-14
    assert torch.equal(loop.engine.rows.read("w", torch.arange(5)), local.personal)
    assert loop.ledger.totals() == (0, 5 * 4 * 8)
    assert run.ledger["round"].tolist() == [-1] * 5


@certifies(pf.FPFC, by="a path continued with the same lam, bit for bit")
@pytest.mark.parametrize("settings", [{}, {"shared_layers": "bias"}, {"solver": "device-dual"}], ids=str)
def test_two_legs_are_one(settings):
    """9 + 11 rounds with the same lam are 20, bit for bit; the run that is set out from stays as it was."""
    rng = np.random.default_rng(0)
    data = [(rng.normal(size=(n, 4)), rng.normal(size=n)) for n in (9, 14, 11, 20, 8)]
    fed = pf.Federation.from_arrays(data, test=data)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1, dtype=torch.float64)

    def fit(rounds, start=None):
        return pf.fit(
            model, fed, pf.FPFC(0.05, lam=0.5, **settings), rounds=rounds, loss="mse", fraction=0.5, batch_size=4,
            local_steps=lambda t: 1 + (t + 1) // 4, lr_schedule="exponential:0.9,3", start=start,
        )  # fmt: skip

    first = fit(9)
    before = {k: v.clone() for k, v in first.server.items()}
    one, two = fit(20), fit(11, start=first)
    assert all(torch.equal(before[k], v) for k, v in first.server.items())
    assert all(torch.equal(v, two.server[k]) for k, v in one.server.items())
    everyone = torch.arange(5)
    assert torch.equal(one.trained.engine.rows.read("w", everyone), two.trained.engine.rows.read("w", everyone))
    late = one.ledger[one.ledger["round"] >= 9].reset_index(drop=True).drop(columns="seconds")
    assert late.equals(two.ledger.drop(columns="seconds"))
    assert [r.round for r in two.records] == list(range(9, 21))


def test_what_cannot_be_set_out_from_is_refused():
    problem = LeastSquares(seed=0, clients=3, dim=4)
    local = problem.fit(pf.Local(0.05), rounds=1)
    with pytest.raises(ConfigError, match=r"start: scaffold cannot be warm-started"):
        problem.fit(pf.Scaffold(0.05), rounds=1, start=local)
    with pytest.raises(ConfigError, match=r"start: the run has other clients or another model"):
        LeastSquares(seed=0, clients=4, dim=4).fit(pf.FPFC(0.05), rounds=1, start=local)
    dual = problem.fit(pf.FPFC(0.05, solver="device-dual"), rounds=1)
    with pytest.raises(ConfigError, match="start: the run's state has another form"):
        problem.fit(pf.FPFC(0.05, solver="pairs"), rounds=1, start=dual)


# shared layers


def two_layers(sizes=(9, 14, 11, 20)):
    """Regression on unequal clients and a model of two layers, in float64."""
    rng = np.random.default_rng(1)
    data = [(rng.normal(size=(n, 3)), rng.normal(size=n)) for n in sizes]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()
    return model, pf.Federation.from_arrays(data, test=data)


def fit_two_layers(algorithm, rounds=6, **settings):
    model, fed = two_layers()
    settings = {"local_steps": 3, "batch_size": None, "loss": "mse", "evaluate_every": 0} | settings
    return pf.fit(model, fed, algorithm, rounds=rounds, **settings)


@pytest.mark.parametrize("merge", [True, False])
def test_a_warm_start_with_shared_layers(merge):
    local = fit_two_layers(pf.Local(0.05))
    run = fit_two_layers(pf.FPFC(0.05, lam=0.0, shared_layers="0", merge=merge), rounds=0, start=local)
    shared = run.trained.task.layout.mask("0")
    n = torch.tensor([9.0, 14, 11, 20], dtype=torch.float64)[:, None]
    expected = (n * local.personal[:, shared]).sum(0) / n.sum()
    assert (run.personal[:, shared] - expected).abs().max() < 1e-14
    assert (run.personal[:, ~shared] - local.personal[:, ~shared]).abs().max() < 1e-14


# the window for lambda


def window_of(points, labels, **settings):
    """`lambda_window` where f_i = 1/2 ||w - c_i||^2: the models of groups are means, the gradients differences."""
    c, labels = torch.as_tensor(points, dtype=torch.float64), torch.as_tensor(labels)
    models = torch.stack([c[labels == k].mean(0) for k in labels])
    return lambda_window(models - c, c.mean(0) - c, models, labels, **settings)


def fused_at(points, labels, lam):
    """Whether FPFC with full participation, set out from the groups' models, stays there, to a hundredth."""
    points = np.asarray(points, dtype=np.float64)
    models = np.stack([points[np.equal(labels, k)].mean(0) for k in labels])
    d = points.shape[1]
    local = fit_points(centres(models), pf.Local(0.5), rounds=60, dim=d)  # every client at its group's model
    fpfc = pf.FPFC(0.2, lam=lam, merge=False)
    run = fit_points(centres(points), fpfc, rounds=200, dim=d, local_steps=10, start=local)
    return np.abs(run.personal.numpy() - models).max() < 0.01


PAIRS = [[0.0, 0.0], [0.4, 0.0], [9.0, 9.0], [9.0, 9.6]]  # two groups of two


def test_the_window_is_exact_for_groups_of_two():
    """Of gradients 0.2 and 0.3: stationary from lam = 4 * 0.3 up, unbiased up to the distance of the groups."""
    window = window_of(PAIRS, [0, 0, 1, 1])
    assert window.necessary == pytest.approx(1.2)
    assert window.sufficient == pytest.approx(1.2)
    assert window.unbiased == pytest.approx(np.hypot(8.8, 9.3) / 3.7)
    assert not fused_at(PAIRS, [0, 0, 1, 1], 0.95 * window.necessary)
    assert fused_at(PAIRS, [0, 0, 1, 1], 1.05 * window.sufficient)
    assert fused_at(PAIRS, [0, 0, 1, 1], 0.97 * window.unbiased)
    assert not fused_at(PAIRS, [0, 0, 1, 1], 3 * window.unbiased)


def test_the_sufficient_bound_is_never_below_what_is_needed():
    """The least lam with a flow sum_j v_ij = -m grad f_i, |v_ij| <= lam, by linear programming, is between them."""
    rng = np.random.default_rng(0)
    for g in (2, 3, 4, 5):
        points = np.concatenate([rng.normal(size=g), 50 + rng.normal(size=2)])
        m, labels = g + 2, [0] * g + [1, 1]
        least = 0.0
        for group in (range(g), range(g, m)):
            own = points[list(group)]
            pairs = [(i, j) for i in range(len(own)) for j in range(i + 1, len(own))]
            flow = np.zeros((len(own), len(pairs) + 1))
            for k, (i, j) in enumerate(pairs):
                flow[i, k], flow[j, k] = 1, -1
            bound = np.vstack([np.hstack([s * np.eye(len(pairs)), -np.ones((len(pairs), 1))]) for s in (1, -1)])
            cost = np.append(np.zeros(len(pairs)), 1.0)
            need = -m * (own.mean() - own)
            free = [(None, None)] * len(pairs) + [(0, None)]
            found = linprog(cost, bound, np.zeros(len(bound)), flow, need, free)
            least = max(least, found.x[-1])
        window = window_of(points[:, None], labels)
        assert window.necessary <= least + 1e-9
        assert least <= window.sufficient + 1e-9


def test_one_common_model_is_excluded_below_the_cut_bound():
    """Two tight groups at distance 2, gradients 1 at the mean: a group of g is held from lam = m / (m - g) on."""
    points, labels = [[-1.0], [-1.0], [1.0], [1.0]], [0, 0, 1, 1]
    window = window_of(points, labels)
    assert window.excluded == pytest.approx(2.0)
    assert fused_at(points, [0] * 4, 1.05 * window.excluded)
    assert not fused_at(points, [0] * 4, 0.95 * window.excluded)


def test_the_window_of_one_group_and_of_single_clients():
    points = [[0.0], [1.0], [5.0]]
    one, alone = window_of(points, [0, 0, 0]), window_of(points, [0, 1, 2])
    assert one.unbiased == one.excluded == np.inf
    assert alone.necessary == alone.sufficient == 0
    assert alone.unbiased == pytest.approx(1 / 3.7)
    assert one.lines()[-1] == "one group: nothing bounds lam from above"


def softmax(seed):
    """Softmax regression from N(0, 1), as the released code starts."""
    model, rng = nn.Linear(60, 10), torch.Generator().manual_seed(seed)
    for q in model.parameters():
        nn.init.normal_(q, generator=rng)
    return model


def test_clients_at_the_threshold_itself_are_fused():
    """||theta_ij|| <= nu, at nu = ||theta_ij|| and at 0 alike; a pair that was never updated joins nobody."""
    w = torch.tensor([[0.0], [0.0], [1.0], [1.0]], dtype=torch.float64)
    apart = {"c": torch.ones(6, dtype=torch.float64), "delta": torch.tensor([[0.0], [0.5]], dtype=torch.float64)}
    state = {"w": w, "row": torch.tensor([0, 1, -1, -1, -1, -1])} | apart
    assert pairs.clusters(state, 0.5).tolist() == [0, 0, 0, 1]
    assert pairs.clusters(state, 0.0).tolist() == [0, 0, 1, 2]


@certifies(pf.FPFC, by="planted clusters, ARI 1")
@pytest.mark.parametrize(("rounds", "accuracy"), [(600, 0.838), pytest.param(2000, 0.880, marks=pytest.mark.long)])
def test_s1_finds_its_four_clusters(rounds, accuracy):
    """S1 small, lambda 0.7: ARI 1, and the accuracies of an independent implementation."""
    pytest.importorskip("polyfed_papers", reason="its data set is the papers'")
    fed = pf.data.load("fpfc-s1", scale="small", seed=0).partition(seed=0)
    run = pf.fit(
        softmax(0), fed, pf.FPFC(0.1, lam=0.7), rounds=rounds, fraction=0.3, local_epochs=10, batch_size=None,
        evaluate_every=0,
    )  # fmt: skip
    assert adjusted_rand_score(fed.clusters, run.clusters) == 1
    assert run.clients["test_accuracy"].mean() == pytest.approx(accuracy, abs=0.01)


@pytest.mark.long
def test_the_released_curve():
    """S1, data seed 1, lambda 0.6: test 0.864 (released 0.8633, independent 0.8640), seven clusters of ARI 0.961."""
    pytest.importorskip("polyfed_papers", reason="its data set is the papers'")
    fed = pf.data.load("fpfc-s1", seed=1).partition(seed=1, validation_fraction=0.0)
    run = pf.fit(
        softmax(1), fed, pf.FPFC(0.1, lam=0.6), rounds=2000, fraction=0.3, local_steps=10, batch_size=None, seed=1,
        evaluate_every=0,
    )  # fmt: skip
    assert run.clients["test_accuracy"].mean() == pytest.approx(0.864, abs=0.005)
    assert len(set(run.clusters.tolist())) == 7
    assert adjusted_rand_score(fed.clusters, run.clusters) == pytest.approx(0.961, abs=0.001)


@pytest.mark.parametrize("seed", [0, 1])
def test_housing_and_body_fat_are_two_clusters(seed, data_dir):
    """H&BF, features in [-1, 1], lambda and nu 4, 4 of 8 devices, 100 rounds: ARI 1, and better than training alone."""
    pytest.importorskip("polyfed_papers", reason="its data set is the papers'")
    fed = pf.data.load("housing-bodyfat", data_dir=data_dir("housing_bodyfat")).partition(seed=seed)
    rmse = {}
    for algorithm in (pf.FPFC(0.01, lam=4.0, nu=4.0), pf.Local(0.01)):
        run = pf.fit(
            torch.nn.Linear(14, 1), fed, algorithm, rounds=100, fraction=0.5, local_epochs=20, batch_size=None,
            loss="mse", seed=seed, evaluate_every=0,
        )  # fmt: skip
        rmse[algorithm.name] = run.clients["test_rmse"].mean()
        if algorithm.name == "fpfc":
            assert adjusted_rand_score(fed.clusters, run.clusters) == 1
    assert rmse["fpfc"] < rmse["local"]


@pytest.mark.parametrize("size", [1e3, 1e12, 1e30])
def test_a_far_client_costs_the_others_nothing(size):
    """A free pair whose dual was and is zero adds w_j + (w_i - w_j) = w_i: zeta is as if j were not there but for n."""
    method, n, p = pf.FPFC(lam=0.5), 4, 3
    w = torch.randn(n, p, generator=torch.Generator().manual_seed(0))
    pairs = n * (n - 1) // 2
    server = {
        "w": w.clone(), "samples": torch.ones(n), "delta": torch.zeros(0, p), "c": torch.ones(pairs),
        "row": torch.full((pairs,), -1),
    }  # fmt: skip
    everyone = Round(0, n, 0, torch.arange(n), torch.ones(n), torch.zeros(n))
    near = method.aggregate({k: t.clone() for k, t in server.items()}, {"w": w}, everyone)
    far = w.clone()
    far[-1] = size
    away = method.aggregate({k: t.clone() for k, t in server.items()}, {"w": far}, everyone)
    mine = method.downlink(away, everyone).each["zeta"][:-1]
    alone = {k: (near[k][:-1] if k == "w" else near[k]) for k in near}
    three = [k for k, (i, j) in enumerate((i, j) for i in range(n) for j in range(i + 1, n)) if j < n - 1]
    alone |= {"c": near["c"][three], "row": near["row"][three]}
    rest = Round(0, n - 1, 0, torch.arange(n - 1), torch.ones(n - 1), torch.zeros(n - 1))
    zeta = method.downlink(alone, rest).each["zeta"]
    assert torch.allclose(n * mine - w[:-1], (n - 1) * zeta, atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"penalty": "l1"}, {"solver": "device-dual"}, {"merge": False}], ids=str)
def test_one_client_alone_finds_its_own_minimum(settings):
    x, y = LeastSquares(seed=0).data[0]
    alone = pf.Federation.from_arrays([(x, y)], test_fraction=0.0)
    model = torch.nn.Linear(x.shape[1], 1, bias=False).double()
    run = pf.fit(model, alone, pf.FPFC(0.05, **settings), rounds=200, local_epochs=5, batch_size=None, loss="mse")
    assert run.personal[0].numpy() == pytest.approx(np.linalg.lstsq(x, y, rcond=None)[0].ravel(), abs=1e-9)
