"""FedSLR, LPGD and GPGD: the solution of (P1) found without any federated code, planted structure, and identities."""

import math

import numpy as np
import pytest
import torch
from certify import certifies
from matrices import MultiOutput, matrix, matrix_model, shrink_singular, soft
from torch import nn

import polyfed as pf
from polyfed.algorithms._shared.lowrank import (
    gkr_parameters,
    places,
    ranks,
    received,
    sheets,
    shrink_layers,
    spectral,
    svt,
)
from polyfed.compute.layout import Layout
from polyfed.compute.task import Task
from polyfed.core.schedule import Schedule


@pytest.fixture(scope="module")
def problem():
    return MultiOutput()


def fast(eta_g):
    """Settings for the common model only, with the largest safe local step."""
    return {"lr": 1 / (0.8 + 1 / eta_g), "eta_g": eta_g, "lam": MultiOutput.lam, "personal_epochs": 0}


@certifies(pf.FedSLR, by="centralised accelerated proximal gradient, to 1e-6")
@pytest.mark.parametrize(
    ("eta_g", "fraction", "rounds"),
    [(0.6, 1.0, 250), (12.0, 1.0, 200), (3.0, 0.3, 350)],
)
def test_solution_of_p1(problem, eta_g, fraction, rounds):
    """Reached from five local steps a round. At eta_g = 1 the misprint of Algorithm 2 could not be seen."""
    run = problem.fit(pf.FedSLR(**fast(eta_g)), rounds, fraction=fraction)
    assert np.abs(matrix(run) - problem.solution()).max() < 1e-6


@certifies(pf.FedSLR, by="centralised accelerated proximal gradient, from sparse uploads")
@pytest.mark.parametrize(("keep", "fraction"), [(0.5, 1.0), (0.2, 0.3)])
def test_sparse_uploads_solve_p1_too(problem, keep, fraction):
    """k = ceil(keep p) values of 8 bytes and positions of 4; what is not sent comes again by itself."""
    run = problem.fit(pf.FedSLR(**fast(3.0), keep=keep), 350, fraction=fraction)
    assert np.abs(matrix(run) - problem.solution()).max() < 1e-6
    assert (run.ledger["up_bytes"] == 12 * math.ceil(keep * run.server["w"].numel())).all()


class ByLoss(Schedule):
    """The three clients whose loss under the common model is largest; and, where asked, one more in turn."""

    def __init__(self, data, one_more):
        self.one_more, self.parts, self.losses = one_more, [data.client(i) for i in range(data.n)], np.zeros(data.n)

    def cohort(self, seed, t, keys):
        return np.unique([*np.argsort(-self.losses)[:3], *[t % len(keys)] * self.one_more])

    def hear(self, progress):
        w = torch.as_tensor(matrix(progress.run))
        self.losses = np.array([float(((x @ w.T - y) ** 2).mean()) for x, y in self.parts])


def test_selection_by_loss_solves_p1_where_everybody_comes_at_times(problem):
    """A.4. By loss alone the same three come for ever, and the common model is theirs."""
    apart = {}
    for one_more in (False, True):
        schedule = ByLoss(problem.federation.train, one_more)
        run = problem.fit(pf.FedSLR(**fast(3.0)), 400, schedule=schedule, callbacks=[schedule.hear])
        apart[one_more] = np.abs(matrix(run) - problem.solution()).max()
    assert apart[True] < 1e-6
    assert apart[False] > 0.1


@certifies(pf.FedSLR, by="sparse uploads of all entries")
def test_all_entries_are_whole_uploads(problem):
    for form in ("mean-dual", "all-duals"):
        whole, sparse = (problem.fit(pf.FedSLR(0.5, keep=k, form=form), 20, fraction=0.3) for k in (None, 1.0))
        assert (whole.personal - sparse.personal).abs().max() < 1e-12


@certifies(pf.FedSLR, by="Algorithms 1/2 against 3")
@pytest.mark.parametrize("fraction", [1.0, 0.3])
def test_both_forms_have_the_same_iterates(problem, fraction):
    settings = {"lr": 0.5, "eta_g": 5.0, "lam": 0.02, "mu": 0.01}
    a = problem.fit(pf.FedSLR(**settings), 60, fraction=fraction)
    b = problem.fit(pf.FedSLR(**settings, form="all-duals"), 60, fraction=fraction)
    assert (a.server["w"] - b.server["w"]).abs().max() < 1e-10
    assert (a.personal - b.personal).abs().max() < 1e-10
    g = b.trained.engine.rows.gather(torch.arange(10))["g"]
    assert (b.server["g"] - g).abs().max() < 1e-12  # the server's copies are the clients' duals
    assert (a.server["g"] - g.mean(0)).abs().max() < 1e-12


COHORTS = [{"fraction": 1.0}, {"fraction": 0.3}, {"schedule": pf.Bernoulli(0.3)}]


each_cohort = pytest.mark.parametrize("who", COHORTS, ids=["all", "some", "random"])


@certifies(pf.FedDyn, by="FedSLR at lam = 0")
@certifies(pf.FedSLR, by="identity at lam = 0")
@each_cohort
def test_biases_and_norms_have_duals_too(who):
    """Without the nuclear norm it is FedDyn; what is no matrix, averaged alone, would be off by eta_g its dual."""
    rng, settings = np.random.default_rng(0), {"rounds": 10, "batch_size": 4, "evaluate_every": 0}
    data = [(rng.normal(size=(n, 2, 4, 4)), rng.integers(3, size=n)) for n in (9, 12, 5, 8, 6)]
    fed = pf.Federation.from_arrays(data, test=data, classes=3)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = small_cnn()
    a = pf.fit(model, fed, pf.FedSLR(0.1, lam=0.0, eta_g=4.0), **settings, **who)
    b = pf.fit(model, fed, pf.FedDyn(0.1, alpha=0.25), **settings, **who)
    assert (a.server["w"] - b.server["w"]).abs().max() < 1e-10
    duals = {k: g for k, g in a.trained.task.layout.named(a.server["g"]).items() if g.dim() == 1}
    assert list(duals) == ["0.bias", "1.weight", "1.bias", "5.bias"]
    assert all(4.0 * g.abs().max() > 1e-3 for g in duals.values())


class Planted:
    """f_i(W) = 1/2 ||W - W_i||^2, W_i = L + S_i: L [20, 16] of rank 3, every S_i with 8 nonzeros. 40 clients."""

    out, inputs, clients, lam, mu = 20, 16, 40, 1.0, 1.0

    def __init__(self, seed=0):
        rng = np.random.default_rng(seed)
        U, V = (np.linalg.qr(rng.normal(size=(d, 3)))[0] for d in (self.out, self.inputs))
        self.L = U * [14.0, 12.0, 10.0] @ V.T
        self.S = np.zeros((self.clients, self.out * self.inputs))
        for row in self.S:
            row[rng.choice(row.size, 8, replace=False)] = rng.choice([-1, 1], 8) * rng.uniform(4, 5, 8)
        self.W = self.L + self.S.reshape(-1, self.out, self.inputs)
        scale = np.sqrt(self.out * self.inputs / 2)
        data = [(scale * np.eye(self.inputs), scale * w.T) for w in self.W]
        self.federation = pf.Federation.from_arrays(data, test=data)

    def fit(self, rounds, eta_g, **kwargs):
        """One full-batch step of 1 / (1 + 1/eta_g) solves (4) exactly; a few solve (7)."""
        algorithm = pf.FedSLR(1 / (1 + 1 / eta_g), lam=self.lam, mu=self.mu, eta_g=eta_g, **kwargs.pop("method", {}))
        settings = {"local_steps": 1, "batch_size": None, "evaluate_every": 0, "loss": "mse"} | kwargs
        return pf.fit(matrix_model(self.out, self.inputs), self.federation, algorithm, rounds=rounds, **settings)


@certifies(pf.FedSLR, by="rank 3 and 320 nonzeros recovered exactly")
@pytest.mark.parametrize(("fraction", "rounds"), [(1.0, 60), (0.1, 600)])
def test_planted_rank_and_support(fraction, rounds):
    """w = svt(mean W_i, lam) and p_i = soft(W_i - w, mu) in closed form: rank 3, all 320 nonzeros, no other."""
    planted = Planted()
    run = planted.fit(rounds, eta_g=2.0, fraction=fraction, method={"personal_epochs": 4})
    w = shrink_singular(planted.W.mean(0), planted.lam)
    assert np.abs(run.server["w"].view(20, 16).numpy() - w).max() < 1e-7
    assert ranks(run.server) == {"weight": 3}
    assert np.linalg.matrix_rank(run.server["w"].view(20, 16).numpy(), tol=1e-6) == 3
    p = run.trained.engine.rows.gather(torch.arange(40))["p"]
    assert np.abs(p.view(40, 20, 16).numpy() - soft(planted.W - w, planted.mu)).max() < 1e-6
    assert ((p != 0).numpy() == (planted.S != 0)).all()
    assert gkr_parameters(run.server, places(run.server)) == 3 * (20 + 16)
    assert (run.parameters == 3 * 36 + 8).all()


@certifies(pf.FedSLR, by="S+S, S+LR and LR+LR")
@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("structure", ["S+S", "S+LR", "LR+LR"])
def test_variants_in_closed_form(structure, fraction):
    """Each part by its own norm: w from the mean of the W_i, p_i from W_i - w, by soft threshold or by svt."""
    planted = Planted()
    planted.mu = 1.5  # with mu = lam the entries of p would lie on the edge of the threshold
    first, second = ({"S": soft, "LR": shrink_singular}[part] for part in structure.split("+"))
    w = first(planted.W.mean(0), planted.lam)
    p = np.stack([second(W - w, planted.mu) for W in planted.W])
    method = {"structure": structure, "personal_epochs": 4}
    run = planted.fit(50 if fraction == 1 else 120, eta_g=2.0, fraction=fraction, method=method)
    found = run.server["w"].view(20, 16).numpy()
    own = run.trained.engine.rows.gather(torch.arange(40))["p"].view(40, 20, 16).numpy()
    assert np.abs(found - w).max() < 1e-7
    assert np.abs(own - p).max() < 1e-6
    if structure.startswith("S"):
        assert ((found != 0) == (w != 0)).all()
        assert 0 < (w != 0).sum() < w.size
    if structure.endswith("LR"):
        assert (np.linalg.matrix_rank(own, tol=1e-5) == np.linalg.matrix_rank(p, tol=1e-9)).all()
    common = (w != 0).sum() if structure.startswith("S") else 3 * 36
    each = (
        np.minimum(320, 36 * np.linalg.matrix_rank(p, tol=1e-9)) if structure.endswith("LR") else (p != 0).sum((1, 2))
    )
    assert (run.parameters == common + each).all()


def test_a_sparse_common_model_goes_down_as_its_nonzeros():
    """8 bytes per nonzero and one bit per parameter, or the dense 8 * 320 bytes where these are fewer."""
    planted, seen = Planted(), [40]  # w_0 = 0

    def note(progress):
        seen.append(min(8 * 320, 8 * int((progress.run.server["w"] != 0).sum()) + 40))

    ledger = planted.fit(6, eta_g=2.0, method={"structure": "S+S"}, callbacks=[note]).ledger
    assert min(seen) < 8 * 300
    for t, group in ledger.groupby("round"):
        assert (group["down_bytes"] == seen[t]).all()


@certifies(pf.FedSLR, by="ridge on w, elastic net on p")
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_weight_decay_in_closed_form(decay):
    """The run's weight decay is a ridge in (P1): w = svt(mean W_i, lam) / (1 + wd); on p only p_weight_decay acts."""
    planted, wd = Planted(), 0.2
    method = {"personal_epochs": 8, "p_weight_decay": decay}
    run = planted.fit(150, eta_g=0.5, weight_decay=wd, local_steps=8, method=method)
    w = shrink_singular(planted.W.mean(0), planted.lam) / (1 + wd)
    assert np.abs(run.server["w"].view(20, 16).numpy() - w).max() < 1e-7
    p = run.trained.engine.rows.gather(torch.arange(40))["p"].view(40, 20, 16).numpy()
    assert np.abs(p - soft(planted.W - w, planted.mu) / (1 + decay)).max() < 1e-6


@certifies(pf.FedSLR, by="bytes from the ranks alone")
@pytest.mark.parametrize("fraction", [1.0, 0.3])
def test_the_downlink_is_billed_as_factors(fraction):
    """Round t sends min(d1 d2, r (d1 + d2)) numbers with r the rank after round t - 1; the uplink is dense."""
    planted, seen = Planted(), [20 * 16]

    def note(progress):
        r = int(np.linalg.matrix_rank(progress.run.server["w"].view(20, 16).numpy(), tol=1e-9))
        seen.append(min(20 * 16, r * 36))

    ledger = planted.fit(6, eta_g=2.0, fraction=fraction, callbacks=[note]).ledger
    assert len(set(seen)) > 1
    for t, group in ledger.groupby("round"):
        assert (group["down_bytes"] == 8 * seen[t]).all()
        assert (group["up_bytes"] == 8 * 320).all()


def test_the_common_model_is_evaluated_beside_the_mixed_one():
    """Every client's metrics of w alone are those of a run that deploys w, at the end and in every round."""
    planted, rounds = Planted(), []
    mixed = planted.fit(5, eta_g=2.0, callbacks=[lambda now: rounds.append(now.run.evaluate(now.run.common))])
    gkr = planted.fit(5, eta_g=2.0, method={"deploy": "gkr"}, evaluate_every=1)
    assert np.array_equal(mixed.evaluate(mixed.common)["rmse"], gkr.final["test"]["rmse"])
    assert np.array_equal(mixed.evaluate(mixed.personal)["rmse"], mixed.final["test"]["rmse"])
    means = gkr.history.query("split == 'test' and round > 0")["rmse"]
    assert [r["rmse"].mean() for r in rounds] == pytest.approx(means.tolist(), rel=1e-12)
    assert (gkr.parameters == gkr_parameters(gkr.server, places(gkr.server))).all()


def test_the_personal_step_decays_with_the_step_size():
    """(7) in round two, from p after round one and against the w received: step and threshold are both decayed."""
    planted, decay = Planted(), 0.5
    first, second = (planted.fit(t, eta_g=2.0, lr_schedule=f"exponential:{decay}") for t in (1, 2))
    w, lr = first.server["w"].view(20, 16).numpy(), 2 / 3
    p = soft(lr * planted.W, lr * planted.mu)
    p = soft(p - lr * decay * (w + p - planted.W), lr * decay * planted.mu)
    found = second.trained.engine.rows.gather(torch.arange(40))["p"].view(40, 20, 16).numpy()
    assert np.abs(found - p).max() < 1e-12


# layers as matrices


def small_cnn():
    return nn.Sequential(
        nn.Conv2d(2, 3, (3, 2), dtype=torch.float64), nn.GroupNorm(1, 3, dtype=torch.float64), nn.ReLU(),
        nn.Conv2d(3, 4, 1, bias=False, dtype=torch.float64), nn.Flatten(), nn.Linear(24, 3, dtype=torch.float64),
    )  # fmt: skip


def test_matricisation_entry_by_entry():
    """[o kh' + a, i kw' + b] = w[o, i, a, b], from the module's own tensor; linear layers as they are."""
    model = small_cnn()
    layout, layers = Layout(model), sheets(Layout(model))
    w = layout.flatten(model)
    assert list(layers) == ["0.weight", "3.weight", "5.weight"]
    kernel, M = model[0].weight, layers["0.weight"].unfold(w)
    assert M.shape == (3 * 3, 2 * 2)
    for o, i, a, b in np.ndindex(*kernel.shape):
        assert M[o * 3 + a, i * 2 + b] == kernel[o, i, a, b]
    assert torch.equal(layers["5.weight"].unfold(w), model[5].weight)
    for sheet in layers.values():
        assert torch.equal(sheet.fold(sheet.unfold(w)), w[sheet.span])


def planted(d1: int, d2: int, values: torch.Tensor) -> torch.Tensor:
    """A float64 matrix with these singular values."""
    g, k = torch.Generator().manual_seed(7), len(values)
    U, V = (torch.linalg.qr(torch.randn(d, k, dtype=torch.float64, generator=g))[0] for d in (d1, d2))
    return (U * values) @ V.T


SPECTRA = {
    "gap": torch.cat([torch.linspace(5, 1, 6), torch.full((34,), 1e-4)]),
    "slow": 5 / torch.arange(1, 41),
    "near": torch.cat([torch.linspace(3, 1, 5), 0.2 + 1e-6 * torch.linspace(-5, 5, 35)]),
    "wide": torch.logspace(5, -5, 40),
    "below": torch.linspace(0.19, 0.01, 40),
    "zero": torch.zeros(40),
}


@pytest.mark.parametrize("amount", [0.2, 1e-3, 1e-9, 0.0])
@pytest.mark.parametrize("shape", [(40, 160), (160, 40), (40, 40), (60, 40)])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_svt_is_exact_for_every_spectrum(spectrum, shape, amount):
    """Against the proximal operator of the same float32 matrix in double precision, whichever way it was computed."""
    M = planted(*shape, SPECTRA[spectrum].double()).float()
    A, B = svt(M, amount)
    U, S, Vh = torch.linalg.svd(M.double(), full_matrices=False)
    exact = (U * (S - amount).clamp(min=0)) @ Vh
    assert torch.linalg.matrix_norm((A @ B).double() - exact, 2) <= 1e-5 * S[0]
    sure = 1e-6 * float(S[0])  # values this close to the amount may fall on either side
    assert (S > amount + sure).sum() <= A.shape[1] <= (S > amount - sure).sum()


@pytest.mark.parametrize("amount", [0.2, 1e-3, 1e-5, 0.0])
@pytest.mark.parametrize("shape", [(40, 160), (160, 40)])
@pytest.mark.parametrize("spectrum", [*SPECTRA, "full"])
def test_the_servers_step_is_exact_for_every_spectrum(spectrum, shape, amount):
    """Also where no singular value vanishes, and in the step after one in which some have."""
    values = torch.linspace(3, 1, 40) if spectrum == "full" else SPECTRA[spectrum]
    w = planted(*shape, values.double()).float().flatten()
    method, task = pf.GPGD(), Task(nn.Linear(shape[1], shape[0], bias=False))
    state = method.init_server(task, w, 1).shared
    for _ in range(2):
        U, S, Vh = torch.linalg.svd(state["w"].double().view(shape), full_matrices=False)
        state = method.shrunk(state, state["w"], amount)
        exact = (U * (S - amount).clamp(min=0)) @ Vh
        assert torch.linalg.matrix_norm(state["w"].double().view(shape) - exact, 2) <= 1e-5 * S[0]
        sure = 1e-6 * float(S[0])
        assert (S > amount + sure).sum() <= state["rank.weight"] <= (S > amount - sure).sum()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_svt_never_makes_numbers_of_what_is_none(bad):
    M = torch.ones(4, 40)
    M[1, 3] = bad
    try:
        A, B = svt(M, 0.1)
    except torch.linalg.LinAlgError:
        return
    assert not torch.isfinite(A @ B).all()


def test_clients_compute_with_the_product_that_was_sent():
    """What the client puts together is bit for bit the server's own model, and 1-d tensors are never shrunk."""
    rng = np.random.default_rng(0)
    data = [(rng.normal(size=(9, 2, 4, 4)), rng.integers(3, size=9)) for _ in range(3)]
    fed = pf.Federation.from_arrays(data, test=data, classes=3)
    run = pf.fit(small_cnn(), fed, pf.FedSLR(0.05, lam=0.1, eta_g=2.0), rounds=4, batch_size=4)
    down = run.trained.algorithm.downlink(run.server, run.trained.round(np.arange(3)))
    factored = {name[2:] for name in down.shared if name.startswith("U.")}
    assert factored
    rows = {name: t.expand(3, *t.shape) for name, t in down.shared.items()}
    w = received(rows, Task(small_cnn()).layout)
    assert torch.equal(w[2], run.server["w"])
    huge = pf.fit(small_cnn(), fed, pf.FedSLR(0.05, lam=1e6, eta_g=2.0), rounds=1, batch_size=4)
    parts = run.trained.task.layout.named(huge.server["w"])
    assert all((v == 0).all() for name, v in parts.items() if v.dim() > 1)
    assert all((v != 0).all() for name, v in parts.items() if v.dim() == 1)


def test_the_released_codes_start_is_an_option():
    planted = Planted()
    model = matrix_model(20, 16)
    nn.init.ones_(model.weight)
    settings = {"local_steps": 1, "batch_size": None, "loss": "mse", "evaluate_every": 0}
    run = pf.fit(model, planted.federation, pf.FedSLR(p_init="weights"), rounds=0, **settings)
    assert (run.personal == 2).all()  # the first mixed model is 2 w_0
    assert (pf.fit(model, planted.federation, pf.FedSLR(), rounds=0, **settings).personal == 1).all()


def alone(problem):
    """The same kind of problem with the first client only."""
    one = object.__new__(MultiOutput)
    one.data, one.clients = problem.data[:1], 1
    one.federation = pf.Federation.from_arrays(one.data, test=one.data)
    return one


def sgd(problem, i, W, lr, steps, amount=0.0):
    for _ in range(steps):
        W = W - lr * problem.gradient(i, W)
        W = shrink_singular(W, amount) if amount else W
    return W


@certifies(pf.GPGD, pf.LPGD, by="the centralised solution for one client")
@pytest.mark.parametrize(("method", "steps"), [(pf.LPGD, 5), (pf.GPGD, 1)])
def test_one_client_solves_p1(problem, method, steps):
    """Full batches and one client: proximal gradient, whose fixed point is the solution for n = 1."""
    one = alone(problem)
    run = one.fit(method(1.2, lam=one.lam), 1500 // steps, steps=steps)
    assert np.abs(matrix(run) - one.solution()).max() < 1e-9


@certifies(pf.LPGD, by="the equations in plain numpy")
def test_one_round_of_lpgd(problem):
    """Every local step shrinks by lr lam; the server takes the plain mean, of higher rank than any of its terms."""
    lr, lam = 1.0, 0.1
    W = np.zeros((problem.out, problem.inputs))
    each = [sgd(problem, i, W, lr, 3, lr * lam) for i in range(problem.clients)]
    run = problem.fit(pf.LPGD(lr, lam=lam), 1, steps=3)
    assert np.abs(matrix(run) - np.mean(each, axis=0)).max() < 1e-12
    assert np.linalg.matrix_rank(matrix(run), tol=1e-9) > max(np.linalg.matrix_rank(w, tol=1e-9) for w in each)


@certifies(pf.GPGD, by="the equations in plain numpy")
@pytest.mark.parametrize("factor", [1, 3])
def test_one_round_of_gpgd(problem, factor):
    """The server shrinks the mean by `steps` lr lam, and sends factors where these are smaller than 16 x 12."""
    lr, lam = 1.0, 0.1
    W = np.zeros((problem.out, problem.inputs))
    for _ in range(2):
        mean = np.mean([sgd(problem, i, W, lr, 3) for i in range(problem.clients)], axis=0)
        W = shrink_singular(mean, factor * lr * lam)
    run = problem.fit(pf.GPGD(lr, lam=lam, steps=factor), 2, steps=3)
    assert np.abs(matrix(run) - W).max() < 1e-12
    rank = np.linalg.matrix_rank(W, tol=1e-9)
    assert run.findings["ranks"] == {"weight": rank}
    assert run.findings["gkr_parameters"] == min(16 * 12, rank * 28)
    after = problem.fit(pf.GPGD(lr, lam=lam, steps=factor), 3, steps=3).ledger
    assert (after[after["round"] == 2]["down_bytes"] == 8 * min(16 * 12, rank * 28)).all()


@certifies(pf.GPGD, pf.LPGD, by="against FedSLR on the same problem")
@pytest.mark.parametrize("method", [pf.LPGD(0.2, lam=0.1), pf.GPGD(0.2, lam=0.1), pf.GPGD(0.2, lam=0.1, steps=5)])
def test_neither_solves_p1(problem, method):
    """After several steps LPGD and GPGD rest off by percents; GPGD is nearer to the solution for lam / K."""
    last = [matrix(problem.fit(method, rounds)) for rounds in (149, 150)]
    assert np.abs(last[1] - last[0]).max() < 1e-7, "not at rest"
    error = np.abs(last[1] - problem.solution(0.1)).max()
    assert error > 0.01
    if method.name == "lpgd":
        assert np.linalg.matrix_rank(last[1], tol=1e-6) == 12
    elif method.steps == 1:
        assert np.abs(last[1] - problem.solution(0.1 / 5)).max() < error / 3


@pytest.mark.parametrize("amount", [1e-8, 1e-4, 0.3, 1.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (20, 20)])
def test_shrunk_layers_are_those_of_the_singular_values(shape, dtype, amount):
    """To the rounding of the layer, whichever way they are found, and of the rank that the values left say."""
    rng = np.random.default_rng(0)
    low = rng.normal(size=(shape[0], 3)) @ rng.normal(size=(3, shape[1]))  # three values of some 20, the rest 1e-3
    for given in (rng.normal(size=shape), low + 1e-4 * rng.normal(size=shape), np.zeros(shape)):
        w = torch.tensor(given, dtype=dtype).flatten()
        layers = sheets(Layout(nn.Linear(shape[1], shape[0], bias=False)))
        bad = torch.full_like(w, torch.nan)
        found = shrink_layers(torch.stack([w, 2 * w, bad]), layers, amount)
        assert found[2].isnan().all()
        whole = shrink_layers(torch.stack([w, 2 * w]), layers, amount)  # a row that is not finite takes another way
        for row, scale in zip([*found[:2], *whole], (1, 2, 1, 2), strict=True):
            U, S, Vh = np.linalg.svd(scale * w.double().view(shape).numpy(), full_matrices=False)
            exact = (U * np.maximum(S - amount, 0)) @ Vh
            rounding = 20 * torch.finfo(dtype).eps * max(S[0], 1e-30)
            assert np.abs(row.double().view(shape).numpy() - exact).max() <= rounding
            left = np.linalg.svd(row.double().view(shape).numpy(), compute_uv=False)
            assert (left[S <= amount] <= rounding).all()


def test_where_the_eigenvalue_solver_does_not_converge_the_singular_values_say_the_same(monkeypatch):
    """Smallest first, as the solver has them, which FlexCFL's directions and FedSLR's cut-off rest on."""
    part = torch.randn(3, 8, 5, dtype=torch.float64)
    gram = part @ part.mT
    exact = torch.linalg.eigvalsh(gram)

    def gives_up(matrix):
        raise torch.linalg.LinAlgError

    monkeypatch.setattr(torch.linalg, "eigh", gives_up)
    values, vectors = spectral(gram)
    assert (values - exact).abs().max() < 1e-12 * exact.max()
    assert ((vectors * values[:, None]) @ vectors.mT - gram).abs().max() < 1e-12 * exact.max()
