"""The device-dual form of FPFC's server: its prox against rule (6), brute vectors and its own unmerged form; its fixed
points against minimisers of objective (1) in closed form; and plain FPFC on the same problems."""

import re

import numpy as np
import pytest
import torch
from certify import certifies
from problems import LeastSquares, centres, fit_points
from scipy.sparse.csgraph import connected_components
from sklearn.metrics import adjusted_rand_score
from test_fpfc import fit_two_layers, softmax

import polyfed as pf
from polyfed.algorithms.fpfc import devicedual
from polyfed.algorithms.fpfc.method import FPFC
from polyfed.algorithms.fpfc.penalty import Fusion, shrinkage
from polyfed.base.errors import ConfigError
from polyfed.core.schedule import Asynchronous, Delays


def planted(sizes, d, seed=0, apart=6.0, within=0.05):
    """Points [m, d] in groups `apart` from each other, and their groups."""
    rng = np.random.default_rng(seed)
    corners = np.linalg.qr(rng.normal(size=(d, d)))[0][: len(sizes)] * apart / np.sqrt(2)
    group = np.repeat(np.arange(len(sizes)), sizes)
    return torch.as_tensor(corners[group] + within / np.sqrt(d) * rng.normal(size=(len(group), d))), group


def everyone(state):
    return torch.arange(len(state["Q"]))


def z_of(state):
    return devicedual.prox_rows(state, everyone(state))


def settled(state, fusion, steps=3000):
    """The state after many majorisation steps at the same P."""
    nobody = torch.arange(0)
    for _ in range(steps):
        old, state = state, devicedual.update(state, nobody, state["w"][nobody], fusion)
        if state["Om"].shape == old["Om"].shape and torch.allclose(state["Om"], old["Om"], rtol=1e-12, atol=1e-14):
            break
    return state


def train(a, fusion, rounds, start="cold", fraction=0.5, seed=0, after=None):
    """f_i(w) = 1/2 ||w - a_i||^2 with exact local solves; `after(state)` is called at the end of every round."""
    rng = torch.Generator().manual_seed(seed)
    state = devicedual.start(a if start == "local" else a.new_zeros(a.shape[1]), len(a), fusion)
    for _ in range(rounds):
        ids = torch.randperm(len(a), generator=rng)[: max(1, int(fraction * len(a)))].sort().values
        y = devicedual.messages(state, ids)
        state = devicedual.update(state, ids, (a[ids] + fusion.rho * y) / (1 + fusion.rho), fusion)
        if after is not None:
            after(state)
    return state


def penalty_of(D, fusion):
    """g(D): SCAD or the norm, smoothed below xi."""
    lam, a, xi = fusion.lam, fusion.a, fusion.xi
    tip = torch.where(D <= xi, lam * D**2 / (2 * xi) + xi * lam / 2, lam * D)
    if fusion.penalty == "l1":
        return tip
    taper = (a * lam * D - (D**2 + lam**2) / 2) / (a - 1)
    return torch.where(D <= lam, tip, torch.where(D <= a * lam, taper, lam**2 * (a + 1) / 2))


def objective(w, fusion):
    """The fusion part of (1), 1/m sum_{i<j} g(||w_i - w_j||), of models [m, d]."""
    return penalty_of(torch.pdist(w), fusion).sum() / len(w)


def full_prox(G, fusion, tol=1e-9):
    """The prox without nodes, z = A P, iterated from P until the bound on ||z_i - z*_i|| is below `tol` for every i."""
    m = len(G)
    mu = 1 - (1 / ((fusion.a - 1) * fusion.rho) if fusion.penalty == "scad" else 0)
    W = devicedual._hollow(fusion.weight(devicedual._distances(G).sqrt()))
    for _ in range(10_000):
        A = devicedual._operator(G.new_ones(m), W, fusion, m)
        D = devicedual._distances(A @ G @ A.T).sqrt()
        new = devicedual._hollow(fusion.weight(D))
        if float(((new - W).abs() * D).sum(1).max()) <= tol * m * fusion.rho * mu:
            break
        W = new
    return A


# ---- the penalty and its prox ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lam", "rho", "xi"), [(0.7, 1.0, 1e-4), (0.7, 1.0, 0.1), (2.0, 0.6, 0.3)])
@pytest.mark.parametrize("penalty", ["scad", "l1"])
def test_two_clients_are_the_proximal_step_of_rule_6(penalty, lam, rho, xi):
    """For m = 2 the prox acts on the difference alone, and is rule (6) of it; the mean stays."""
    fusion, e = Fusion(lam, rho, xi=xi, penalty=penalty, delta=xi), torch.tensor([0.6, 0.8], dtype=torch.float64)
    for t in np.linspace(0.01, 1.3 * 3.7 * lam, 4):
        P = torch.stack([1 + t * e, torch.ones(2, dtype=torch.float64)])
        c = float(shrinkage(torch.tensor([t]), lam, rho, 3.7, xi, penalty))
        A = full_prox(P @ P.T, fusion, tol=1e-11)
        state = settled(devicedual.start(P, 2, fusion), fusion)
        for z in (A @ P, z_of(state)):
            assert torch.allclose(z.mean(0), P.mean(0), atol=1e-12)
            # the group norm is smoothed below xi as well, where rule (6) leaves a corner
            assert (z[0] - z[1] - c * t * e).norm() < (1e-7 if penalty == "scad" else 1.01 * xi)


@pytest.mark.parametrize("delta", [1e-4, 0.05])
def test_nodes_give_the_prox_of_the_unmerged_form(delta):
    """Groups that fuse and groups that stay apart: merged and full prox agree to 1e-6."""
    P, group = planted([12, 20, 8], 30, within=0.1)
    fusion = Fusion(1.0, delta=delta)
    A = full_prox(P @ P.T, fusion, tol=1e-11)
    state = settled(devicedual.start(P, 40, fusion), fusion)
    assert len(state["f"]) == 3
    assert adjusted_rand_score(group, state["groups"]) == 1
    assert (z_of(state) - A @ P).norm(dim=1).max() < 1e-6


def test_one_client_that_moved_is_not_held_by_the_many():
    """m clients at one point and one 10 away: it is pulled by lam at most, though it hardly moves the node's mean."""
    P = torch.zeros(400, 3, dtype=torch.float64)
    fusion = Fusion(0.6)
    state = devicedual.start(P[0], 400, fusion)
    state = devicedual.update(state, torch.tensor([7]), P[[7]] + 10.0 * torch.eye(3).double()[[0]], fusion)
    state = settled(state, fusion)
    P[7, 0] = 10
    A = full_prox(P @ P.T, fusion, tol=1e-10)
    assert (z_of(state) - A @ P).norm(dim=1).max() < 1e-6
    assert devicedual.clusters(state, 0.1).bincount().tolist() == [399, 1]


# ---- coefficients against vectors ------------------------------------------------------------------------------------


def explicit_prox(P, groups, Om, fusion):
    """The minimiser of the bound in vectors: an m x m Laplacian with one weight in each node, the root of w = g'/D."""
    m = len(P)
    W = Om[groups][:, groups].copy()
    for g in range(len(Om)):
        at = np.flatnonzero(groups == g)
        if len(at) > 1:
            pairs = P[at][:, None] - P[at]
            p = np.sqrt((pairs**2).sum(-1).sum() / (len(at) * (len(at) - 1)))
            s, low, high = W[at[0]][groups != g].sum(), 0.0, fusion.lam / fusion.xi
            for _ in range(200):  # bisection: the weight that the distance it leads to asks for
                w = (low + high) / 2
                D = torch.tensor(p / (1 + (len(at) * w + s) / (m * fusion.rho)), dtype=torch.float64)
                low, high = (w, high) if float(fusion.weight(D)) > w else (low, w)
            W[np.ix_(at, at)] = w
    np.fill_diagonal(W, 0)
    z = np.linalg.solve(np.eye(m) + (np.diag(W.sum(1)) - W) / (m * fusion.rho), P)
    square = ((z[:, None] - z) ** 2).sum(-1)
    member = np.eye(len(Om))[groups]
    mean_square = (member.T @ square @ member) / np.outer(member.sum(0), member.sum(0))
    return z, np.sqrt(mean_square)


@certifies(pf.FPFC, by="identity, device-dual")
@pytest.mark.parametrize("start", ["cold", "local"])
def test_coefficients_are_the_explicit_vectors(start, monkeypatch):
    """80 rounds with nodes splitting and joining: z, distances and P equal those of plain vectors to 1e-9."""
    used, majorise = [], devicedual._majorise
    monkeypatch.setattr(devicedual, "_majorise", lambda n, Om, *r: used.append(Om.clone()) or majorise(n, Om, *r))
    a, _ = planted([5, 7, 4], 6, within=0.4)
    fusion, rng = Fusion(1.2), np.random.default_rng(1)
    state = devicedual.start(a if start == "local" else a[0], 16, fusion)
    P = (a if start == "local" else a[0].expand(16, -1)).numpy().copy()
    nodes, error = set(), 0.0
    for _ in range(80):
        z, D = explicit_prox(P, state["groups"].numpy(), used[-1].numpy(), fusion)
        off = ~np.eye(len(D), dtype=bool)
        error = max(error, np.abs(z_of(state).numpy() - z).max())
        error = max(error, np.abs(devicedual.node_distances(state).numpy() - D)[off].max(initial=0))
        ids = np.sort(rng.choice(16, 6, replace=False))
        w = (a.numpy()[ids] + 2 * z[ids] - P[ids]) / 2
        P[ids] += w - z[ids]
        state = devicedual.update(state, torch.as_tensor(ids), torch.as_tensor(w), fusion)
        error = max(error, np.abs((state["Q"] + state["centre"]).numpy() - P).max())
        nodes.add(len(state["f"]))
    assert error < 1e-9
    assert 1 < len(state["f"]) < 16
    assert start == "local" or len(nodes) > 3


# ---- training --------------------------------------------------------------------------------------------------------


@certifies(pf.FPFC, by="closed form, device-dual")
@pytest.mark.parametrize("start", ["cold", "local"])
@pytest.mark.parametrize("fraction", [1.0, 0.3])
def test_fixed_points_minimise_objective_1(start, fraction):
    """SCAD leaves far groups alone: w_i - mean a = (a_i - mean a) / (1 + n lam / (m xi)), in every group."""
    a, group = planted([6, 10, 8], 12)
    fusion = Fusion(1.0)
    state = train(a, fusion, 200, start, fraction)
    expected = a.clone()
    for g in range(3):
        mine = a[group == g]
        expected[group == g] = mine.mean(0) + (mine - mine.mean(0)) / (1 + len(mine) / (24 * fusion.xi))
    assert (state["w"] - expected).norm(dim=1).max() < 1e-8
    assert adjusted_rand_score(group, devicedual.clusters(state, 0.1)) == 1


def test_group_norm_shifts_the_means():
    """l1, two groups: each mean moves towards the other by lam times the other's share of clients."""
    a, group = planted([6, 10], 12)
    fusion = Fusion(1.0, penalty="l1")
    state = train(a, fusion, 300)
    means = [a[group == g].mean(0) for g in range(2)]
    way = (means[1] - means[0]) / (means[1] - means[0]).norm()
    for g, shift in ((0, 10 / 16 * way), (1, -6 / 16 * way)):
        assert (state["w"][group == g].mean(0) - means[g] - shift).norm() < 1e-6
    assert adjusted_rand_score(group, devicedual.clusters(state, 0.1)) == 1


@pytest.mark.parametrize("start", ["cold", "local"])
@pytest.mark.parametrize("lam", [0.3, 1.0, 3.0])
def test_nodes_stay_legal(start, lam):
    """After every round f ||P_i - P_j|| <= delta within nodes, seen in vectors; labels are dense; Om is symmetric."""
    a, _ = planted([9, 12, 5, 14], 10, within=0.6)
    fusion = Fusion(lam)

    def check(state):
        P, groups = state["Q"], state["groups"]
        together = groups[:, None] == groups
        assert ((state["f"][groups, None] * torch.cdist(P, P))[together] <= 0.05 + 1e-7).all()
        assert groups.unique().tolist() == list(range(len(state["f"])))
        assert torch.equal(state["G"], state["G"].T)
        assert torch.allclose(state["G"], P @ P.T, atol=1e-9)
        assert torch.allclose(state["Om"], state["Om"].T, rtol=1e-6)
        assert torch.allclose(state["B"].sum(1), torch.ones(len(state["B"])).double())

    train(a, fusion, 60, start, fraction=0.2, after=check)


@pytest.mark.parametrize("start", ["cold", "local"])
def test_planted_groups_are_found_in_float32(start):
    a, group = planted([40] * 5, 100, apart=8.0, within=0.1)
    state = train(a.float(), Fusion(1.0), 200 if start == "cold" else 10, start, fraction=0.1)
    assert adjusted_rand_score(group, devicedual.clusters(state, 0.1)) == 1


@certifies(pf.FPFC, by="both solvers end in one minimum of (1)")
@pytest.mark.parametrize("lam", [1.5, 4.0])
def test_same_minimum_as_pairs(lam):
    """On quadratics with unlike Hessians: models, objective and clusters of plain FPFC, at convergence."""
    problem = LeastSquares(seed=0, clients=8, dim=4, spread=0.5)
    runs = [problem.fit(a, rounds=300) for a in (FPFC(0.05, lam=lam), FPFC(0.05, lam=lam, solver="device-dual"))]
    w = [run.server["w"] for run in runs]
    losses = [sum(float(w[i] @ H @ w[i] / 2 - w[i] @ b) for i, (H, b) in enumerate(quadratics(problem))) for w in w]
    total = [loss + float(objective(v, Fusion(lam))) for loss, v in zip(losses, w, strict=True)]
    assert (w[0] - w[1]).norm(dim=1).max() < 1e-7
    assert total[0] == pytest.approx(total[1], abs=1e-9)
    assert runs[0].clusters.tolist() == runs[1].clusters.tolist()


def quadratics(problem):
    return [(torch.as_tensor(H), torch.as_tensor(b)) for H, b in zip(problem.H, problem.b, strict=True)]


@pytest.mark.parametrize(
    ("task", "lam", "rounds", "accuracy"),
    [
        pytest.param("s1", 0.65, 2000, 0.880, marks=pytest.mark.long),
        *(pytest.param(f"s{k}", lam, 600, None, marks=pytest.mark.long) for k, lam in ((3, 0.6), (4, 0.4), (5, 0.4))),
    ],
)  # fmt: skip
def test_synthetic_problems_as_plain_fpfc(task, lam, rounds, accuracy):
    """The true clusters (small); the accuracy of pairs, or of an independent implementation, within 0.01."""
    pytest.importorskip("polyfed_papers", reason="its data set is the papers'")
    fed, found = pf.data.load(f"fpfc-{task}", scale="small", seed=0).partition(seed=0), []
    for solver in ("device-dual", "pairs") if accuracy is None else ("device-dual",):
        run = pf.fit(
            softmax(0), fed, FPFC(0.1, lam=lam, solver=solver), rounds=rounds, fraction=0.3, local_epochs=10,
            batch_size=None, evaluate_every=0,
        )  # fmt: skip
        found.append(run.clients["test_accuracy"].mean())
        assert solver == "pairs" or adjusted_rand_score(fed.clusters, run.clusters) == 1
    assert found[0] == pytest.approx(accuracy or found[1], abs=0.01)


def test_components_by_blocks_are_those_of_the_graph():
    """Chains and cliques across blocks of rows, numbered by their first member."""
    near = torch.as_tensor(np.random.default_rng(0).random((700, 700)) < 0.0008)
    near = near | near.T
    label = devicedual._components(700, near.__getitem__, near.device)
    count, expected = connected_components(near.numpy(), directed=False)
    assert 20 < count < 700
    assert torch.equal(label, devicedual.first_seen(torch.as_tensor(expected)))


# ---- state -----------------------------------------------------------------------------------------------------------


def test_a_kept_operator_still_moves_the_points():
    """refresh=False: P moves by w - z under the former operator; the next majorisation step makes up for it."""
    a, _ = planted([9, 12, 5], 10, within=0.6)
    fusion, ids = Fusion(1.0), torch.arange(0, 26, 3)
    state = train(a, fusion, 15)
    P, z, B = state["Q"].clone(), z_of(state), state["B"]
    state = devicedual.update(state, ids, a[ids], fusion, refresh=False)
    assert torch.allclose(state["Q"][ids], P[ids] + a[ids] - z[ids], atol=1e-12)
    assert state["B"] is B
    assert torch.allclose(state["G"], state["Q"] @ state["Q"].T, atol=1e-9)


def test_memory_is_known_before_the_run():
    """Shapes on the meta device are those of the largest state; the estimate covers every state that occurs."""
    a, _ = planted([9, 12, 5], 10, within=0.6)
    largest = devicedual.start(a[0].to("meta"), 26, Fusion(1.0))
    seen = []
    train(a, Fusion(0.2), 40, fraction=0.3, after=lambda s: seen.append((bytes_of(s), len(s["f"]))))
    assert max(n for _, n in seen) > 20
    assert max(size for size, _ in seen) <= bytes_of(largest) <= devicedual.memory(26, 10, itemsize=8)
    assert devicedual.memory(1000, 100_000, nodes=5, participants=100) < 1.2e9


def bytes_of(state):
    return sum(t.numel() * t.element_size() for t in state.values())


@pytest.mark.parametrize(("m", "d"), [(50, 10), (1000, 610), (1000, 100_000), (10_000, 610)])
def test_twice_the_state_on_the_meta_device_covers_the_working_space(m, d):
    """By which a run is admitted or refused; the participants' own vectors are counted with the cohort."""
    state = devicedual.start(torch.zeros(d, device="meta"), m, Fusion(1.0))
    assert 2 * bytes_of(state) >= devicedual.memory(m, d, participants=0) - 1


# ---- the solver of FPFC ----------------------------------------------------------------------------------------------


def test_auto_takes_pairs_up_to_200_clients():
    a = np.random.default_rng(0).normal(size=(201, 2))
    for n, solver, other in ((200, "pairs", "device-dual"), (201, "device-dual", "pairs")):
        runs = [fit_points(centres(a[:n]), FPFC(0.3, solver=s), 2, 2, fraction=0.1) for s in ("auto", solver, other)]
        assert torch.equal(runs[0].personal, runs[1].personal)
        assert runs[0].server.keys() == runs[1].server.keys() != runs[2].server.keys()
        plan = runs[0].plan
        assert plan.startswith(f"solver {solver} ({n} clients, {'up to' if n == 200 else 'more than'} 200)")
        assert re.search(r"server memory up to [\d.]+ GB;", plan)
    assert runs[0].findings["nodes"] == len(runs[0].server["f"])


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("shared", ["0", "2"])
def test_shared_layers_are_beside_the_solver(shared, fraction):
    """Without a penalty both solvers send every client its own layers back: the same models, and the same bytes."""
    settings = {"lam": 0.0, "shared_layers": shared, "merge": False}
    runs = [fit_two_layers(FPFC(0.05, solver=s, **settings), fraction=fraction) for s in ("pairs", "device-dual")]
    at = runs[0].trained.task.layout.mask(shared)
    assert runs[1].server["Q"].shape == (4, int((~at).sum()))
    assert (runs[0].personal - runs[1].personal).abs().max() < 1e-12
    assert torch.equal(runs[1].personal[:, at], runs[1].server["common"].expand(4, -1))
    assert runs[0].trained.ledger.totals() == runs[1].trained.ledger.totals()


def test_a_path_goes_on_under_another_lambda():
    """From next to no fusion to lam 2.5: the groups fuse, at the minimum of (1) in closed form; then back to none."""
    a, group = planted([6, 10, 8], 12, apart=12.0, within=0.3)
    xi, lam = 1e-4, 2.5

    def at(lam):
        return FPFC(0.3, lam=lam, xi=xi, solver="device-dual", merge=False)

    model, more = centres(a.numpy()), {"local_steps": 10, "workers": 1}
    run = fit_points(model, at(0.002), 20, 12, **more)
    assert len(set(run.clusters)) == 24
    run = fit_points(model, at(lam), 400, 12, start=run, **more)
    expected = a.clone()
    for g in range(3):
        mine = a[group == g]
        expected[group == g] = mine.mean(0) + (mine - mine.mean(0)) / (1 + len(mine) * lam / (24 * xi))
    assert (run.server["w"] - expected).norm(dim=1).max() < 1e-6
    assert adjusted_rand_score(group, run.clusters) == 1
    run = fit_points(model, at(0.0), 200, 12, start=run, **more)
    assert (run.server["w"] - a).norm(dim=1).max() < 1e-6


def test_the_first_message_under_another_lambda_is_of_that_lambda():
    """Nothing but P and w is carried over: what is sent is 2 z - P after `reweigh`."""
    a, _ = planted([6, 10, 8], 12)
    run = fit_points(centres(a.numpy()), FPFC(0.3, lam=0.3, solver="device-dual"), 20, 12, fraction=0.5)
    before = {k: v.clone() for k, v in run.server.items()}
    fpfc, round = FPFC(0.3, lam=2.0, solver="device-dual"), run.trained.round(np.arange(24))
    sent = fpfc.downlink(run.server, round).each["zeta"]
    expected = devicedual.messages(devicedual.reweigh(before, Fusion(2.0)), torch.arange(24))
    assert torch.equal(sent, expected)
    assert all(torch.equal(v, run.server[k]) for k, v in before.items())


def test_late_replies_are_refused():
    problem = LeastSquares(seed=0, clients=6, dim=4)
    late = Asynchronous(Delays("uniform", 0, 20))
    with pytest.raises(
        ConfigError, match=r'^fpfc with solver device-dual \(as asked.*"pairs" can\) .* asynchronously$'
    ):
        problem.fit(FPFC(0.05, solver="device-dual"), 0, schedule=late)
    with pytest.raises(ConfigError, match=r"device-dual \(201 clients, more than 200;"):
        LeastSquares(seed=0, clients=201, dim=2).fit(FPFC(0.05), 0, schedule=late)
    one = Asynchronous(Delays("uniform", 0, 20), concurrency=1)
    assert problem.fit(FPFC(0.05, solver="device-dual"), 20, schedule=one).trained.t == 20
