"""FedCET against the paper's two-step form, the exact optimum, the paper's rates and its step search."""

import numpy as np
import pytest
import torch
from certify import certifies
from problems import LeastSquares, Point

import polyfed as pf
from polyfed.algorithms.fedcet import paper_step

DIM, CLIENTS = 60, 10


def paper_problem(seed):
    """Section 4: f_i(x) = mean_j ||x - b_ij||^2 + ||x||^2, b uniform in [-10, 10]^60; L = mu = 4."""
    B = np.random.default_rng(seed).uniform(-10, 10, (CLIENTS, 10, DIM))
    return B, B.mean((0, 1)) / 2


def ridge(output, target):
    return (output - target).square().sum(1).mean() + output.square().sum(1).mean()


def errors(algorithm):
    """|| mean_i x_i - x* || after every round, the paper's e(k), tau = 2."""
    B, optimum = paper_problem(0)
    fed, seen = pf.Federation.from_arrays([(b, b) for b in B], test=[(b, b) for b in B]), []
    pf.fit(
        Point(DIM), fed, algorithm, rounds=105, loss=ridge, local_steps=2, batch_size=None, evaluate_every=0,
        callbacks=[lambda now: seen.append(np.linalg.norm(now.run.personal.numpy().mean(0) - optimum))],
    )  # fmt: skip
    return np.array(seen)


def fedcet_round(H, state, a, ca, steps=2):
    """One round where f_i(x) = x' H_i x / 2; x and d: [n, dim, columns]."""
    x, d = state
    for _ in range(steps):
        x = x - a * (H @ x + d)
    gap = x - x.mean(0)
    return x - ca * gap, d + ca / a * gap


def fedtrack_round(H, state, a, steps=2):
    x = np.repeat(state[0].mean(0)[None], len(H), 0)
    own, y = H @ x, x
    for _ in range(steps):
        y = y - a * (H @ y - own + own.mean(0))
    return (np.repeat(y.mean(0)[None], len(H), 0),)


def scaffold_round(H, state, a, steps=2):
    """Option II, everybody."""
    x, c = np.repeat(state[0].mean(0)[None], len(H), 0), state[1]
    y = x
    for _ in range(steps):
        y = y - a * (H @ y - c + c.mean(0))
    return np.repeat(y.mean(0)[None], len(H), 0), c - c.mean(0) + (x - y) / (steps * a)


def iteration_matrix(step, H, parts):
    """Of a round that is linear in `parts` tensors [n, dim], column by column."""
    n, dim = H.shape[:2]
    eye = np.eye(parts * n * dim).reshape(parts, n, dim, -1)
    return np.concatenate([part.reshape(n * dim, -1) for part in step(H, list(eye))])


PAPER = paper_step(4.0, 4.0, 2)
ROUNDS = {  # the methods at the steps of Figure 1, their rounds, and their tensors
    pf.FedCET(lr="paper", smoothness=4.0, convexity=4.0): (
        lambda H, s: fedcet_round(H, s, PAPER, 4 * PAPER / (2 * 4 * PAPER + 8)), 2),
    pf.FedTrack(lr=1 / (18 * 2 * 4)): (lambda H, s: fedtrack_round(H, s, 1 / (18 * 2 * 4)), 1),
    pf.Scaffold(lr=1 / (81 * 2 * 4)): (lambda H, s: scaffold_round(H, s, 1 / (81 * 2 * 4)), 2),
}  # fmt: skip
EQUAL = np.stack([4 * np.eye(1)] * CLIENTS)  # the axes decouple, so one stands for sixty


@certifies(pf.FedCET, by="the rates of Figure 1")
@certifies(pf.FedTrack, by="an eigenvalue of its iteration")
@pytest.mark.parametrize(
    ("method", "digits"), list(zip(ROUNDS, (0.886, 0.945, 0.988), strict=True)), ids=[m.name for m in ROUNDS]
)
def test_contraction_on_the_papers_problem(method, digits):
    """e(k + 1) / e(k) is the mean's eigenvalue in the iteration matrix: with equal Hessians it goes its own way."""
    step, parts = ROUNDS[method]
    M = iteration_matrix(step, EQUAL, parts)
    mean = np.zeros(len(M))
    mean[:CLIENTS] = 1 / CLIENTS
    rate = (mean @ M)[:CLIENTS].sum()
    assert np.allclose((mean @ M)[:CLIENTS], rate * mean[:CLIENTS], atol=1e-12)
    assert np.abs(np.linalg.eigvals(M) - rate).min() < 1e-12
    e = errors(method)
    assert np.allclose(e[20:101] / e[19:100], rate, rtol=1e-6)
    assert rate == pytest.approx(digits, abs=5e-4)


@certifies(pf.FedCET, by="its powers, in numpy")
@pytest.mark.parametrize(("tau", "rounds"), [(2, 30), (5, 30), (10, 30), (10, 2)])
def test_unlike_hessians_follow_the_iteration_matrix(tau, rounds):
    """All models and duals: the start, then powers of the matrix. Few rounds show the weight's own rounding."""
    problem = LeastSquares(seed=7, clients=6, dim=5)
    a, H, n, dim = 0.9 / (tau * problem.smoothness), np.stack(problem.H), 6, 5
    ca = min(1 / 2, 3.5 / (tau + 2))
    own = np.stack([problem.gradient(i, problem.optimum) for i in range(n)])
    x, d = np.repeat(-problem.optimum[None], n, 0)[..., None], own[..., None]  # errors of x = 0 and d = 0
    state = np.stack(fedcet_round(H, (x, d), a, ca, steps=2)).ravel()
    M = iteration_matrix(lambda H, s: fedcet_round(H, s, a, ca, tau), H, 2)
    x, d = (np.linalg.matrix_power(M, rounds) @ state).reshape(2, n, dim)
    run = problem.fit(pf.FedCET(lr=a), rounds=rounds, steps=tau)
    assert np.allclose(run.personal, problem.optimum + x, rtol=0, atol=1e-11)
    assert np.allclose(run.trained.engine.rows.gather(torch.arange(n))["d"], d - own, rtol=0, atol=1e-9)
    centred = np.kron(np.eye(n) - 1 / n, np.eye(dim))
    kept = M @ np.block([[np.eye(n * dim), np.zeros_like(centred)], [np.zeros_like(centred), centred]])
    assert np.abs(np.linalg.eigvals(kept)).max() < 1


def two_step_form(gradients, start, a, c, tau, rounds):
    """Algorithm 2 as printed, with old gradients; gradients[i](x). Returns x [n, p] after each exchange."""
    n = len(gradients)
    before = np.stack([start] * n)
    now = before - a * np.stack([g(x) for g, x in zip(gradients, before, strict=True)])
    for t in range(-1, rounds * tau):
        z = np.stack([2 * x - y - a * g(x) + a * g(y) for g, x, y in zip(gradients, now, before, strict=True)])
        if t == -1:  # x(-1) came from a plain step
            z = np.stack([x - a * g(x) for g, x in zip(gradients, now, strict=True)])
        before = now
        now = c * a * z.mean(0) + (1 - c * a) * z if (t + 1) % tau == 0 else z
    return now


@certifies(pf.FedCET, by="identity with Algorithm 2 as printed")
@pytest.mark.parametrize("tau", [1, 2, 5])
def test_the_two_forms_agree(tau):
    problem = LeastSquares(seed=2, clients=4, dim=5)
    a = 0.5 / (tau * problem.smoothness)
    run = problem.fit(pf.FedCET(lr=a, weight=0.25), rounds=20, steps=tau)
    gradients = [lambda x, i=i: problem.gradient(i, x) for i in range(problem.clients)]
    expected = two_step_form(gradients, np.zeros(problem.dim), a, 1 / (4 * a), tau, 20)
    assert np.abs(run.personal.numpy() - expected).max() < 1e-9


@certifies(pf.FedCET, by="the step search, literally")
@pytest.mark.parametrize(("L", "mu", "tau"), [(4.0, 4.0, 2), (4.0, 1.0, 5), (10.0, 0.5, 3)])
def test_the_search_of_algorithm_1(L, mu, tau):
    """The definition: grow a from a0 by h while both conditions hold. Bisection finds the same to within h."""
    k = (1 + 2 / tau) ** (2 * tau - 2)
    a = 0.999 * min(1 / (2 * tau * L), mu**2 / (2 * tau * k * L**3), mu / (5 * tau * k * L**2))
    h = 0.001 * a

    def holds(a):
        first = 1 - tau * mu * a + tau * L**2 * (tau * a - 2 / mu) * k * a > 0
        return first and (1 - tau * L * a) * tau * mu * a + tau**3 * L**4 * (tau * a - 2 / mu) * k * a**3 > 0

    while holds(a + h):
        a += h
    assert abs(paper_step(L, mu, tau) - a) <= 1.001 * h


def heterogeneous(kind, seed):
    """Quadratics with mu = 1, L = 4 and random full Hessians, or a spectrum ten times wider."""
    problem = LeastSquares(seed=seed, clients=10, dim=12)
    rng = np.random.default_rng(seed)
    top = 40.0 if kind == "wide" else 4.0
    data, problem.H, problem.b = [], [], []
    for _ in range(10):
        values = rng.uniform(1, top, 12)
        Q = np.linalg.qr(rng.normal(size=(12, 12)))[0]
        X = np.sqrt(12 * values / 2)[:, None] * Q.T  # mean (x.w - y)^2 has Hessian Q diag(values) Q'
        y = X @ rng.normal(size=12) * 3
        data.append((X, y))
        problem.H.append(2 * X.T @ X / 12)
        problem.b.append(2 * X.T @ y / 12)
    problem.optimum = np.linalg.solve(sum(problem.H), sum(problem.b))
    problem.data, problem.federation = data, pf.Federation.from_arrays(data, test=data)
    return problem


@certifies(pf.FedCET, by="1e-10 within 200 rounds")
@pytest.mark.parametrize(("kind", "seed"), [("full", 1), ("wide", 2)])
def test_the_adaptive_step_needs_no_constant(kind, seed):
    """1e-10 in at most 200 rounds from a first guess of 1e-4, with full participation."""
    problem = heterogeneous(kind, seed)
    run = problem.fit(pf.FedCET(first_lr=1e-4), rounds=200)
    assert problem.error(run.personal) < 1e-10


@certifies(pf.FedCET, by="the optimum, a < 1/mu")
def test_the_adaptive_step_with_one_step_a_round():
    """Full batches, tau = 1: the optimum, and a step between 1/L and 1/mu of the flattest direction of any client."""
    problem = LeastSquares(seed=7, clients=6, dim=5)
    run = problem.fit(pf.FedCET(first_lr=1e-4), rounds=250, steps=1)
    assert problem.error(run.personal) < 1e-10
    assert 1 / problem.smoothness * (1 - 1e-9) <= run.findings["step"] <= 1 / problem.convexity


@pytest.mark.parametrize("fraction", [1.0, 0.4])
@pytest.mark.parametrize("steps", [1, 5, [1, 2, 1, 5, 1, 30]])
def test_what_the_server_knows_of_a_client_is_the_clients_own_curvature(steps, fraction):
    """||H v|| / ||v|| is between mu_i and L_i whatever v is; who is absent, or has stopped moving, is not forgotten."""
    problem = LeastSquares(seed=7, clients=6, dim=5)
    seen = []
    note = lambda progress: seen.append(progress.run.server["smoothness"].numpy().copy())  # noqa: E731
    run = problem.fit(pf.FedCET(), rounds=60, local_steps=steps, fraction=fraction, callbacks=[note])
    assert ((np.diff(seen, axis=0) < 0).sum(1) <= round(6 * fraction)).all()
    tau = np.broadcast_to(steps, 6)
    length = tau if isinstance(steps, int) else tau * np.minimum(1, 7 / (tau + 2))  # tau_i in units of the common a
    known = run.server["smoothness"].numpy() / length
    low, high = (np.array([np.linalg.eigvalsh(H)[end] for H in problem.H]) for end in (0, -1))
    assert (run.clients["rounds"] > 0).all()
    assert (known >= 0.98 * low).all()
    assert (known <= high * (1 + 1e-6)).all()


def steep(factor, seed=3, clients=20):
    """Least squares whose first client is `factor` times as curved as it was, and so as the others."""
    problem = LeastSquares(seed=seed, clients=clients, dim=5)
    X, y = problem.data[0]
    problem.data[0] = np.sqrt(factor) * X, np.sqrt(factor) * y
    problem.H[0], problem.b[0] = factor * problem.H[0], factor * problem.b[0]
    problem.optimum = np.linalg.solve(sum(problem.H), sum(problem.b))
    problem.federation = pf.Federation.from_arrays(problem.data, test=problem.data)
    return problem


@certifies(pf.FedCET, by="two of ten clients")
def test_few_clients_and_many_steps():
    """The weight for full participation blows up the variance of a mean over two of ten; the default does not."""
    problem = LeastSquares(seed=1, clients=10, dim=5)
    start = np.linalg.norm(problem.optimum)
    run = problem.fit(pf.FedCET(), rounds=100, steps=20, fraction=0.2)
    assert problem.error(run.server["w"]) < start
    full = problem.fit(pf.FedCET(weight=3.5 / 22), rounds=100, steps=20, fraction=0.2)
    assert problem.error(full.server["w"]) > 100 * start


def test_the_steepest_client_bounds_the_step():
    """a <= 1 / (tau mu_0) where every move of client 0 shows at least mu_0, more than the L_i are on average."""
    problem = steep(40)
    lowest = np.linalg.eigvalsh(problem.H[0])[0]
    assert lowest > np.mean([np.linalg.eigvalsh(H)[-1] for H in problem.H])  # an average would be too small
    run = problem.fit(pf.FedCET(), rounds=50)
    assert run.findings["step"] <= 1 / (5 * 0.98 * lowest)


def test_the_step_grows_again_where_the_curvature_falls():
    """f_i(w) = sum cosh(w - c_i): cosh c_i is about 10 at the start, below 2 at the optimum, which is known."""
    # sum_i sinh(x - c_i) = 0: tanh x = sum sinh c_i / sum cosh c_i
    c = np.random.default_rng(0).uniform(2.5, 3.5, (6, 1, 4))
    optimum = np.arctanh(np.sinh(c).sum(0) / np.cosh(c).sum(0))[0]
    seen = []
    run = pf.fit(
        Point(4), pf.Federation.from_arrays([(x, x) for x in c], test=[(x, x) for x in c]), pf.FedCET(), rounds=100,
        loss=lambda output, target: (output - target).cosh().sum(1).mean(), local_steps=2, batch_size=None,
        evaluate_every=0, callbacks=[lambda progress: seen.append(float(progress.run.server["a"]))],
    )  # fmt: skip
    assert np.abs(run.personal.numpy() - optimum).max() < 1e-6
    assert seen[-1] > 3 * min(seen[5:])


@certifies(pf.FedCET, by="the bound on c a, from both sides")
@pytest.mark.parametrize("tau", [15, 30])
def test_many_local_steps(tau):
    """c a (tau + 2) < 4: a weight just above the bound diverges however small the step, the default converges."""
    problem = LeastSquares(seed=7, clients=6, dim=5)
    step = 0.5 / (tau * problem.smoothness)
    assert problem.error(problem.fit(pf.FedCET(lr=step), rounds=200, steps=tau).personal) < 1e-5
    assert problem.error(problem.fit(pf.FedCET(), rounds=200, steps=tau).personal) < 1e-8
    beyond = pf.FedCET(lr=step / 100, weight=4.4 / (tau + 2))
    assert problem.error(problem.fit(beyond, rounds=200, steps=tau).personal) > 1e3


@pytest.mark.parametrize("lr", ["adaptive", "fixed"])
def test_unlike_numbers_of_steps_keep_the_optimum(lr):
    """c is the same for all, so sum_i d_i = 0 and the fixed point is the optimum of the plain mean."""
    problem = LeastSquares(seed=7, clients=6, dim=5)
    algorithm = pf.FedCET() if lr == "adaptive" else pf.FedCET(lr=0.1 / problem.smoothness)
    run = problem.fit(algorithm, rounds=200, local_steps=[2, 3, 5, 8, 20, 50])
    assert problem.error(run.personal) < 1e-8
    assert np.abs(run.trained.engine.rows.gather(torch.arange(6))["d"].numpy().sum(0)).max() < 1e-9


def test_mini_batches_measure_curvature_on_one_batch():
    """||g(w) - g(w')|| / ||w - w'|| of one batch is at most its 2 max_j ||x_j||^2; between two batches it is not."""
    problem = LeastSquares(seed=3, clients=6, dim=5)
    bound = 2 * max((X**2).sum(1).max() for X, _ in problem.data)
    run = problem.fit(pf.FedCET(), rounds=200, batch_size=4)
    assert 0 < float(run.server["smoothness"].max()) <= 5 * bound
    assert run.findings["step"] >= 1 / (5 * bound)
