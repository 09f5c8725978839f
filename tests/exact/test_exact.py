"""Exact methods of one vector each way: boxes in plain numpy, the optimum under drift, identities, rates, refusals."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from certify import certifies
from problems import LeastSquares

import polyfed as pf
from polyfed.base.errors import ConfigError
from polyfed.base.randomness import client_keys, generator_key, uniform
from polyfed.core.messages import Round
from polyfed_exact.loop import OneVector, geometric
from polyfed_exact.unbiased import COMPRESSORS, places

private = pytest.importorskip("polyfed_testing.stage").private
N, D = 8, 7


@pytest.fixture(scope="module")
def problem():
    return LeastSquares(seed=1, clients=N, dim=D)


def taus(run):
    """The local steps of every round, which are the same for all who take part in it."""
    steps = run.ledger.groupby("round").steps
    assert (steps.min() == steps.max()).all()
    return steps.max().tolist()


def gradients(problem, x):
    return np.stack([problem.gradient(i, x[i]) for i in range(problem.clients)])


def here(n, t, seed=0, ids=None):
    """A round of these clients."""
    ids = torch.arange(n) if ids is None else torch.as_tensor(ids)
    return Round(t, n, 0, ids, torch.ones(len(ids)), torch.full_like(ids, t), seed)


def masks(method, names, t, ids):
    """[n, d] 0 or 1, of the clients `ids` of a round."""
    key = torch.from_numpy(client_keys(names).astype("int64"))
    round = here(len(names), t, ids=ids)
    at = method.places(method.slots({"key": key}, round), D, round)
    q = np.zeros((len(names), D + 1))
    for i, of in zip(ids, at.tolist(), strict=True):
        q[i, of] = 1
    return q[:, :D]


def cohorts(run):
    return [of.client.tolist() for _, of in run.ledger.groupby("round")]


def scaffnew_box(problem, method, run):
    """Mishchenko et al., the box per iteration: theta is 1 at the last step of each round."""
    g, p = method.lr, method.p
    x, h = np.zeros((N, D)), np.zeros((N, D))
    for tau in taus(run):
        for theta in [0] * (tau - 1) + [1]:
            hat = x - g * (gradients(problem, x) - h)
            if theta:
                z = hat.mean(0)
                h, x = h + p / g * (z - hat), np.stack([z] * N)
            else:
                x = hat
    return x[0], h


def led_box(problem, method, run):
    """Alghunaim's Algorithm 1, in phi and y, with W = (1 - mixing) I + mixing J."""
    W = (1 - method.mixing) * np.eye(N) + method.mixing / N
    x, y = np.zeros((N, D)), np.zeros((N, D))
    for tau in taus(run):
        phi = x
        for _ in range(tau):
            phi = phi - method.lr * gradients(problem, phi) - y / tau
        x = W @ phi
        y = y + phi - x
    return phi.mean(0), -y / (method.lr * taus(run)[-1])


def tamuna_box(problem, method, run):
    """TAMUNA with its cohorts and masks; with all clients it is CompressedScaffnew."""
    g, p, z, h = method.lr, method.p, np.zeros(D), np.zeros((N, D))
    for t, (tau, cohort) in enumerate(zip(taus(run), cohorts(run), strict=True)):
        c = len(cohort)
        s = min(c, max(2, round(method.keep * c)))
        x = np.stack([z] * N)
        for _ in range(tau):
            x = x - g * (gradients(problem, x) - h)
        q = masks(method, problem.federation.names, t, cohort)
        assert (q.sum(0) == s).all()
        assert {math.floor(s * D / c), math.ceil(s * D / c)} >= {*q[cohort].sum(1)}
        z = (q * x).sum(0) / s
        chi = N * (s - 1) / (s * (N - 1))
        h = h + p * chi / g * q * (z - x)
    return z, h


def locodl_box(problem, method, run):
    """LoCoDL with rand-k, in u and v."""
    g, p, m = method.lr, method.p, method.m
    k = math.ceil(method.keep * D)
    omega = D / k - 1 if method.keep < 1 else 0
    rho = chi = 1 / (1 + method.omega / N)
    x, y, u, v = np.zeros((N, D)), np.zeros(D), np.zeros((N, D)), np.zeros(D)
    assert omega <= method.omega + 1e-12
    for t, tau in enumerate(taus(run)):
        for _ in range(tau):
            x = x - g * (gradients(problem, x) - m * x - u)
            y = y - g * (m * y - v)
        keys = generator_key(0, "locodl", t, client_keys(problem.federation.names))
        at = places(D, method.keep, np.stack(np.broadcast_arrays(*keys), -1)).numpy()
        d = np.zeros((N, D))
        for i in range(N):
            d[i, at[i]] = D / k * (x - y)[i, at[i]]
        mean = d.sum(0) / (2 * N)
        x, y = (1 - rho) * x + rho * (y + mean), y + rho * mean
        u = u + p * chi / (g * (1 + 2 * method.omega)) * (mean - d)
        v = v + p * chi / (g * (1 + 2 * method.omega)) * mean
    return y, u


def gradskip_box(problem, method, run):
    """GradSkip per iteration; a client's coins are 1 until its own draw, which ends its gradients in the ledger."""
    g, p, q = method.lr, method.p, np.broadcast_to(method.q, N)
    x, h = np.zeros((N, D)), np.zeros((N, D))
    for t, (_, of) in enumerate(run.ledger.groupby("round")):
        u, tau = uniform(*generator_key(0, "own steps", t, client_keys(problem.federation.names))), geometric(p, 0, t)
        taken = np.zeros(N)
        for k in range(tau):
            eta, grad = (u < 1 - q ** (k + 1)) == 0, gradients(problem, x)  # P(eta_1 = ... = eta_k = 1) = q^k
            moved = np.linalg.norm(grad - h, axis=1) > 0
            hat = np.where(eta[:, None], x - g * (grad - h), x)
            h = np.where(eta[:, None], h, grad)
            x, taken = hat, taken + moved
        assert of.steps.tolist() == taken.tolist()
        z = (x - g / p * h).mean(0)
        h, x = h + p / g * (z - x), np.stack([z] * N)
    return z, h


def scafflix_box(problem, method, run):
    """Scafflix in x and h, the own optima by plain descent."""
    g, p, a = method.lr, method.p, np.broadcast_to(method.alpha, N)[:, None]
    own = np.zeros((N, D))
    for _ in range(method.own_steps):
        own = own - g * gradients(problem, own)
    x, h = np.zeros((N, D)), np.zeros((N, D))
    for t, tau in enumerate(taus(run)):
        for _ in range(tau - method.own_steps * (t == 0)):
            x = x - g / a * (gradients(problem, a * x + (1 - a) * own) - h)
        z = (a**2 * x).sum(0) / (a**2).sum()
        h, x = h + p * a / g * (z - x), np.stack([z] * N)
    return z, h


LR = 0.05
BOXES = [
    (pf.Scaffnew(LR, p=0.3), scaffnew_box, {}),
    (pf.LED(LR), led_box, {}),
    (pf.LED(LR, mixing=0.5), led_box, {"steps": 1}),
    (pf.CompressedScaffnew(LR, p=0.3, keep=0.5), tamuna_box, {}),
    (pf.TAMUNA(LR, p=0.3), tamuna_box, {"fraction": 0.5}),
    (pf.TAMUNA(LR, p=0.3, keep=0.6), tamuna_box, {"fraction": 0.7}),
    (pf.LoCoDL(LR, p=0.3, keep=0.5, m=0.4), locodl_box, {}),
    (pf.Scafflix(LR, p=0.3, alpha=0.4), scafflix_box, {}),
    (pf.Scafflix(LR, p=0.3, alpha=tuple(np.linspace(0.2, 1, N))), scafflix_box, {}),
    (pf.GradSkip(LR, p=0.3, q=(1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.2, 0.0)), gradskip_box, {}),
]
each_box = pytest.mark.parametrize(("method", "box", "how"), BOXES, ids=lambda v: getattr(v, "name", ""))


@certifies(
    pf.Scaffnew,
    pf.LED,
    pf.CompressedScaffnew,
    pf.TAMUNA,
    pf.LoCoDL,
    pf.Scafflix,
    pf.GradSkip,
    by="its box in plain numpy, with the coins, cohorts and masks of the run",
)
@each_box
def test_the_box(problem, method, box, how):
    run = problem.fit(method, rounds=12, **how)
    w, h = box(problem, method, run)
    assert np.allclose(run.server["w"], w, rtol=0, atol=1e-12)
    mine = private(run)
    assert np.allclose(mine.get("h", mine.get("u")), h, rtol=0, atol=1e-11)
    assert np.linalg.norm(w) > 1e-2


@certifies(
    pf.Scaffnew,
    pf.LED,
    pf.CompressedScaffnew,
    pf.TAMUNA,
    pf.LoCoDL,
    pf.Scafflix,
    pf.GradSkip,
    by="the centralised optimum under drift, and dual variables that add up to zero",
)
@each_box
def test_the_optimum_under_drift(problem, method, box, how):
    method = replace(method, own_steps=1500) if method.name == "scafflix" else method
    run = problem.fit(method, rounds=700 if how.get("fraction") or method.name == "locodl" else 250, **how)
    alone = np.stack([np.linalg.solve(H, b) for H, b in zip(problem.H, problem.b, strict=True)])
    a = np.broadcast_to(getattr(method, "alpha", 1.0), N)  # sum_i a_i (H_i (a_i x + (1 - a_i) x_i*) - b_i) = 0
    H, b = np.stack(problem.H), np.stack(problem.b)
    right = (a[:, None] * (b - (1 - a)[:, None] * np.einsum("ijk,ik->ij", H, alone))).sum(0)
    optimum = np.linalg.solve((a[:, None, None] ** 2 * H).sum(0), right)
    assert np.linalg.norm(run.server["w"].numpy() - optimum) < 1e-12
    for apart in method.conserved(run.server, private(run)).values():
        assert apart.abs().max() < 1e-12
    if (a == 1).all():
        deployed = run.personal.numpy()
        assert np.linalg.norm(deployed - optimum, axis=1).max() < 1e-12


TIMES = pf.Delays("uniform")
SCHEDULES = [
    pf.Uniform(),
    pf.Timed(pf.Uniform(), TIMES),
    pf.Uniform(0.5),
    pf.Timed(pf.Uniform(0.5), TIMES),
    pf.Bernoulli(0.5),
    pf.Availability(((True,) * 5 + (False,) * 3, (False,) * 3 + (True,) * 5)),
    pf.Asynchronous(TIMES),
]


@pytest.mark.parametrize("place", range(len(SCHEDULES)))
def test_duals_add_up_to_zero_under_every_schedule_that_is_allowed(problem, place):
    """All clients may be needed, or uniform cohorts; every one of these has two exchanges or waits for a cohort."""
    for method in [method for method, *_ in BOXES] + [pf.FedCET(LR), pf.Scaffold(LR)]:
        needs = method.needs
        if place < (2 if needs.everyone else 4 if needs.uniform else 6):
            run = problem.fit(method, rounds=6, schedule=SCHEDULES[place])
            assert all(apart.abs().max() < 1e-12 for apart in method.conserved(run.server, private(run)).values())
        elif place < 6 or needs.exchanges > 1:
            with pytest.raises(ConfigError, match=method.name):
                problem.fit(method, rounds=6, schedule=SCHEDULES[place])


@certifies(pf.Scaffnew, pf.LED, pf.CompressedScaffnew, pf.TAMUNA, pf.Scafflix, by="gradient descent, of one client")
@pytest.mark.parametrize("cls", [pf.Scaffnew, pf.LED, pf.CompressedScaffnew, pf.TAMUNA, pf.Scafflix])
def test_one_client_descends(cls):
    alone = LeastSquares(seed=3, clients=1, dim=4)
    run = alone.fit(cls(LR, **({"alpha": 1.0} if cls is pf.Scafflix else {})), rounds=6)
    w = np.zeros(4)
    for _ in range(sum(taus(run))):
        w = w - LR * alone.gradient(0, w)
    assert np.allclose(run.server["w"], w, rtol=0, atol=1e-12)


class Weighted(OneVector, abstract=True):
    """The loop with other weights."""

    name = "weighted"
    rho, sigma = 1.0, 1.0

    def weights(self, data):
        return self.rho, self.sigma


@certifies(pf.LED, pf.Scaffold, pf.FedCET, by="one loop with other weights")
def test_one_loop_with_three_weights(problem):
    """SCAFFOLD II is rho 1, sigma 1/K in one vector each way; FedCET rho = sigma = c a, after a start of two steps."""
    led, scaffold = (problem.fit(m, rounds=20) for m in (pf.LED(LR), pf.Scaffold(LR)))
    assert torch.allclose(led.server["w"], scaffold.server["w"], rtol=0, atol=1e-12)
    gaps = private(scaffold)["c"] - scaffold.server["c"]
    assert torch.allclose(private(led)["h"], gaps, rtol=0, atol=1e-11)
    loop = Weighted(LR)
    object.__setattr__(loop, "rho", 0.4)
    object.__setattr__(loop, "sigma", 0.4)
    mine = problem.fit(loop, rounds=21, steps=lambda t: 2 if t == 0 else 5)
    theirs = problem.fit(pf.FedCET(lr=LR, weight=0.4), rounds=20)
    assert torch.allclose(private(mine)["x"], private(theirs)["w"], rtol=0, atol=1e-12)
    assert torch.allclose(private(mine)["h"], -private(theirs)["d"], rtol=0, atol=1e-11)


@certifies(pf.CompressedScaffnew, pf.TAMUNA, pf.Scafflix, pf.GradSkip, by="Scaffnew in the limit")
@pytest.mark.parametrize(
    "other",
    [pf.CompressedScaffnew(LR, p=0.3), pf.TAMUNA(LR, p=0.3), pf.Scafflix(LR, p=0.3, alpha=1), pf.GradSkip(LR, p=0.3)],
)
def test_all_is_scaffnew_where_nothing_is_left_out(problem, other):
    a, b = (problem.fit(m, rounds=20) for m in (other, pf.Scaffnew(LR, p=0.3)))
    assert torch.allclose(a.server["w"], b.server["w"], rtol=0, atol=1e-12)
    assert torch.allclose(private(a)["h"], private(b)["h"], rtol=0, atol=1e-11)


@certifies(pf.LoCoDL, by="gradient descent on the mean with half the step, where p = 1 and nothing is left out")
def test_locodl_without_compression_and_with_one_step_descends(problem):
    run, w = problem.fit(pf.LoCoDL(LR, p=1.0, keep=1.0, m=0.4), rounds=30), np.zeros(D)
    for _ in range(30):
        w = w - LR / 2 * np.mean([problem.gradient(i, w) for i in range(N)], axis=0)
    assert np.allclose(run.server["w"], w, rtol=0, atol=1e-12)


@certifies(pf.Scaffnew, by="the factor of its theorem, from any state, in expectation over the coin")
def test_the_factor_of_scaffnew(problem):
    """E Psi+ = sum|a_i|^2 + (1 - p^2) sum|b_i|^2 / p^2, which is at most (1 - min(g mu, p^2)) Psi; no draw in it."""
    rng, method = np.random.default_rng(0), pf.Scaffnew.theory(problem.smoothness, problem.convexity)
    g, p, star = method.lr, method.p, gradients(problem, np.stack([problem.optimum] * N))
    x, h = rng.normal(size=(N, D)), rng.normal(size=(N, D))
    h = h - h.mean(0)

    def psi(x, h):
        return ((x - problem.optimum) ** 2).sum() + (g / p) ** 2 * ((h - star) ** 2).sum()

    hat = x - g * (gradients(problem, x) - h)
    z = hat.mean(0)
    expected = p * psi(np.stack([z] * N), h + p / g * (z - hat)) + (1 - p) * psi(hat, h)
    a = x - problem.optimum - g * (gradients(problem, x) - star)
    assert expected == pytest.approx((a**2).sum() + (1 - p**2) * ((g * (h - star)) ** 2).sum() / p**2, rel=1e-12)
    assert expected <= (1 - min(g * problem.convexity, p**2)) * psi(x, h)
    assert method.lr == 1 / problem.smoothness
    assert method.p == pytest.approx(math.sqrt(problem.convexity / problem.smoothness))


@certifies(pf.LED, pf.LoCoDL, by="the settings for which its rate is proven")
@pytest.mark.parametrize(
    ("method", "lr", "p"),
    [
        (pf.LED.theory(2.0, 0.5), 1 / 2, None),
        (pf.LED.theory(2.0, 0.5, 3), 1 / (81 * 3 * 2), None),
        (pf.LoCoDL.theory(2.0, 0.5, 8), 1 / 2, math.sqrt(0.5 / (2 * 2))),
        (pf.LoCoDL.theory(2.0, 0.1, 2, 0.25), 1 / 2, math.sqrt(4 * (1 + 3 / 2) * 0.1 / (2 * 2))),
        (pf.LoCoDL.theory(2.0, 2.0, 2, 0.25), 1 / 2, 1.0),
    ],
)
def test_the_provable_settings(method, lr, p):
    assert method.lr == pytest.approx(lr, rel=1e-15)
    assert p is None or method.p == pytest.approx(p, rel=1e-15)


@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
def test_the_steps_of_a_round_are_geometric(p):
    drawn = np.array([geometric(p, 3, t) for t in range(20000)])
    for m in range(4):
        share, expected = (drawn > m).mean(), (1 - p) ** m
        assert abs(share - expected) <= 5 * math.sqrt(expected * (1 - expected) / len(drawn))
    assert [geometric(p, 3, t) for t in range(50)] == drawn[:50].tolist()


@pytest.mark.parametrize("name", COMPRESSORS)
def test_compressors_are_unbiased_and_of_their_variance(name):
    compress, v = COMPRESSORS[name], torch.from_numpy(np.random.default_rng(1).normal(size=9))
    v[2] = 0
    keys = np.random.default_rng(2).integers(1 << 60, size=(40000, 2)).astype("uint64")
    rows = v.expand(len(keys), -1)
    found = compress.unpack(compress.pack(rows, 0.4, keys), 9, 0.4, keys)
    off = (found - v).square().sum(1).mean() / v.square().sum()
    assert (found.mean(0) - v).abs().max() < 0.05
    assert off <= compress.omega(0.4) * 1.02
    assert (found[:, 2] == 0).all()


@pytest.mark.parametrize(
    ("method", "how", "down", "up"),
    [
        (pf.Scaffnew(LR), {}, 8 * D, 8 * D),
        (pf.CompressedScaffnew(LR, keep=0.5), {}, 8 * D + 8, 8 * math.ceil(4 * D / 8)),
        (pf.TAMUNA(LR, keep=0.5), {"fraction": 0.5}, 8 * D + 8 + 8 * math.ceil(2 * D / 4), 8 * math.ceil(2 * D / 4)),
        (pf.GradSkip(LR, q=0.5), {}, 8 * D, 8 * D),
        (pf.LoCoDL(LR, keep=0.5), {}, 8 * D, 8 * math.ceil(D / 2) + 16),
        (pf.LoCoDL(LR, compressor="natural"), {}, 8 * D, 2 * D + 16),
    ],
    ids=lambda v: getattr(v, "name", ""),
)
def test_bytes_by_formula(problem, method, how, down, up):
    book = problem.fit(method, rounds=3, **how).ledger
    assert {*book.down_bytes} == {down}
    assert {*book.up_bytes} == {up}


@pytest.mark.parametrize(
    ("make", "how", "words"),
    [
        (lambda: pf.Scaffnew(p=0.0), {}, "p of Scaffnew: found 0.0"),
        (lambda: pf.LoCoDL(p=1.5), {}, "p of LoCoDL: found 1.5"),
        (lambda: pf.GradSkip(q=(0.5, 0.5)), {}, "q of GradSkip: found (0.5, 0.5), expected one number, or"),
        (lambda: pf.Scafflix(alpha=(0.5, 0.0)), {}, "alpha of Scafflix: found (0.5, 0.0), expected numbers above 0"),
        (lambda: pf.LoCoDL(compressor="top"), {}, "found 'top', expected an unbiased one: rand or natural"),
        (pf.Scaffnew, {"fraction": 0.5}, "fraction: found 4 of 8 clients a round, expected all with scaffnew"),
        (pf.LED, {"optimizer": "adam"}, "optimizer: found 'adam', expected plain sgd with led"),
        (pf.TAMUNA, {"schedule": pf.Bernoulli(0.5)}, "found 4 of 8 clients by bernoulli, expected at least 2, uniform"),
        (pf.TAMUNA, {"fraction": 0.1}, "found 1 of 8 clients by uniform, expected at least 2"),
        (lambda: pf.Scaffnew.theory(1.0, 2.0), {}, "found L = 1 and mu = 2, expected 0 < mu <= L"),
        *((lambda cls=cls: cls.theory(0.0, 0.0), {}, "found L = 0 and mu = 0, expected 0 < mu <= L")
          for cls in (pf.Scaffnew, pf.LED, pf.Scafflix, pf.GradSkip)),
        (lambda: pf.LED.theory(1.0, 0.1, 0), {}, "found tau = 0, expected at least 1"),
        (lambda: pf.LoCoDL.theory(1.0, 0.1, 0), {}, "found clients = 0, expected at least 1"),
        (lambda: pf.LoCoDL.theory(1.0, 0.1, 8, 0.0), {}, "keep of LoCoDL: found 0.0"),
        (lambda: pf.CompressedScaffnew.theory(1.0, 0.1, 0), {}, "found clients = 0, expected at least 1"),
        (lambda: pf.TAMUNA.theory(1.0, 0.1, 8, 9), {}, "found a cohort of 9, expected at least 2 and at most 8"),
        (lambda: pf.TAMUNA.theory(1.0, 0.1, 8, 1), {}, "found a cohort of 1, expected at least 2 and at most 8"),
    ],
)  # fmt: skip
def test_what_is_refused_before_training(problem, make, how, words):
    with pytest.raises(ConfigError) as e:
        problem.fit(make(), rounds=1, callbacks=[lambda _: pytest.fail("it trained")], **how)
    assert words in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("method", [pf.LED(LR), pf.Scaffnew(LR)], ids=["led", "scaffnew"])
def test_clients_of_unlike_epochs_take_the_same_steps(problem, method):
    run = problem.fit(method, rounds=3, local_steps=None, batch_size=6)
    assert len({*problem.federation.train.counts}) > 1
    assert (taus(run) == [5, 5, 5]) == isinstance(method, pf.LED)


@pytest.mark.parametrize(("method", "slope"), [("scaffnew", 0.5), ("led", 1.0), ("fedcet", 1.0)])
def test_exchanges_grow_with_kappa_or_its_root(method, slope):
    """Clients that share the weak direction: to 1e-4 of the first error (FedCET 0.1), up to kappa 10^4 (LED 90)."""
    counts = []
    kappas = (10, 30, 90) if method == "led" else (10, 100, 1000, 10000)
    share = 0.1 if method == "fedcet" else 1e-4
    for kappa in kappas:
        rng, values, data = np.random.default_rng(0), np.geomspace(1 / kappa, 1, 5), []
        for _ in range(4):
            of = values.copy()
            of[1:-1] *= rng.uniform(0.5, 1, 3)
            X = np.diag(np.sqrt(5 * of / 2))
            data.append((X, X @ (rng.normal(size=5) / of)))
        small = LeastSquares(seed=0, clients=4, dim=5)
        small.data, small.federation = data, pf.Federation.from_arrays(data, test=data)
        small.H = [2 * X.T @ X / 5 for X, _ in data]
        small.optimum = np.linalg.solve(sum(small.H), sum(2 * X.T @ y / 5 for X, y in data))
        start, seen = np.linalg.norm(small.optimum), []

        def near(progress, small=small, start=start, seen=seen):
            seen.append(small.error(progress.run.server["w"]))
            return seen[-1] < share * start

        made = {"scaffnew": pf.Scaffnew.theory(1.0, 1 / kappa), "led": pf.LED(1.0), "fedcet": pf.FedCET(1.0)}[method]
        small.fit(made, rounds=30 * kappa, steps=2 if method == "fedcet" else 1, callbacks=[near])
        counts.append(len(seen))
    found = np.polyfit(np.log(kappas), np.log(counts), 1)[0]
    assert abs(found - slope) < 0.08, counts
