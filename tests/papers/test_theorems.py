"""The papers' theorems as statements about runs: what they say never rises, or falls at a rate, does so here."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from matrices import MultiOutput, matrix, soft
from problems import LeastSquares, centres, fit_points, pair_vectors

import polyfed as pf
from polyfed.algorithms.fedcet import paper_step
from polyfed.algorithms.fpfc import proven
from polyfed.algorithms.fpfc.penalty import Fusion
from polyfed.base.errors import ConfigError


def penalty(t, lam, a, xi):
    """The smoothed SCAD (3)."""
    scad = np.where(t <= a * lam, (a * lam * t - (t**2 + lam**2) / 2) / (a - 1), lam**2 * (a + 1) / 2)
    scad = np.where(t <= lam, lam * t, scad)
    return np.where(t <= xi, lam * t**2 / (2 * xi) + xi * lam / 2, scad)


class Lagrangian:
    """A callback: sum_i f_i + (1/m) sum_(i<j) [g(theta) + v (w_i - w_j - theta) + rho/2 ||w_i - w_j - theta||^2], and
    the squared norm of its gradient in w, after every round, where f_i(w) = 1/2 ||w - c_i||^2."""

    def __init__(self, method, points):
        self.method, self.points, self.values, self.slopes = method, points, [], []

    def __call__(self, progress):
        server, m = progress.run.server, len(self.points)
        w, method = server["w"].numpy(), self.method
        i, j = np.triu_indices(m, 1)
        delta, c = pair_vectors(server).numpy(), server["c"].numpy()[:, None]
        theta, v = c * delta, method.rho * (1 - c) * delta
        off = w[i] - w[j] - theta
        g = penalty(np.linalg.norm(theta, axis=1), method.lam, method.a, method.xi)
        pairs = g.sum() + (v * off).sum() + method.rho / 2 * (off**2).sum()
        self.values.append(((w - self.points) ** 2).sum() / 2 + pairs / m)
        slope, pull = w - self.points, (v + method.rho * off) / m
        np.add.at(slope, i, pull)
        np.add.at(slope, j, -pull)
        self.slopes.append((slope**2).sum())


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_fpfcs_augmented_lagrangian_never_rises_under_condition_13(fraction):
    """FPFC, Lemma 2; and Theorem 2: the mean squared gradient over K rounds is O(1/K), its sum is bounded."""
    rng = np.random.default_rng(0)
    points = np.repeat([[2.0, 0, 0], [-2.0, 0, 0]], 4, 0) + 0.3 * rng.normal(size=(8, 3))
    assert "does not meet condition (13)" in pf.FPFC(0.04, lam=0.5, xi=0.1).theory()
    fpfc, steps = proven(smoothness=1.0, lam=0.5, xi=0.1, merge=False)
    assert "meets condition (13)" in fpfc.theory()
    seen = Lagrangian(fpfc, points)
    fit_points(centres(points), fpfc, rounds=200, dim=3, local_steps=steps, fraction=fraction, callbacks=[seen])
    values, sums = np.array(seen.values), np.cumsum(seen.slopes)
    assert (np.diff(values) <= 1e-9 * abs(values[0])).all()
    assert values[-1] < values[0] - 1e-3
    assert sums[-1] < 1.01 * sums[len(sums) // 2]


@pytest.mark.parametrize(("lam", "a", "xi"), [(0.6, 3.7, 0.1), (1.5, 2.2, 0.4), (0.05, 1.5, 0.04)])
def test_the_smoothed_penalty_is_near_scad_and_its_gradient_lipschitz(lam, a, xi):
    """FPFC, Proposition 1: P <= P~ <= P + xi lam / 2 for the smoothed SCAD (3) and SCAD (2), both ends reached; and its
    gradient has the Lipschitz constant max(lam / xi, 1 / (a - 1)), no smaller one. Of the gradient that FPFC uses,
    integrated from P~(0) = xi lam / 2."""
    g = Fusion(lam, a=a, xi=xi)
    t = np.linspace(0, 2 * a * lam, 200_001)
    slope = (g.weight(torch.from_numpy(t)) * torch.from_numpy(t)).numpy()
    smooth = xi * lam / 2 + np.concatenate([[0], np.cumsum((slope[1:] + slope[:-1]) / 2 * np.diff(t))])
    above = smooth - penalty(t, lam, a, xi=-1.0)
    assert above.min() == pytest.approx(0, abs=1e-9)
    assert above.max() == pytest.approx(xi * lam / 2, abs=1e-9)
    rng, constant = np.random.default_rng(0), max(lam / xi, 1 / (a - 1))
    x = torch.from_numpy(rng.normal(size=(100_000, 3)) * a * lam * rng.uniform(0, 1.2, (100_000, 1)))
    y = x + 1e-3 * lam * torch.from_numpy(rng.normal(size=x.shape))
    at = [g.weight(z.norm(dim=1))[:, None] * z for z in (x, y)]
    quotients = (at[0] - at[1]).norm(dim=1) / (x - y).norm(dim=1)
    assert quotients.max() <= constant * (1 + 1e-9)
    assert np.abs(np.diff(slope) / np.diff(t)).max() == pytest.approx(constant, rel=1e-6)


def test_the_dual_is_the_penaltys_gradient_and_the_lagrangian_lies_above_the_objective():
    """FPFC, what Lemma 2 and Theorem 2 rest on (in our words: the texts of Lemmas 1 and 3 are not at hand). After every
    update v = grad P~(theta), so that v moves by at most max(lam/xi, 1/(a-1)) times as far as theta. With rho above
    that constant the augmented Lagrangian is at least objective (1) at the devices' models; the two meet in the end."""
    rng, m = np.random.default_rng(0), 8
    points = np.repeat([[2.0, 0, 0], [-2.0, 0, 0]], 4, 0) + 0.3 * rng.normal(size=(m, 3))
    fpfc, steps = proven(smoothness=1.0, lam=0.5, xi=0.1, merge=False)
    (i, j), seen, pairs, values = np.triu_indices(m, 1), Lagrangian(fpfc, points), [], []

    def note(progress):
        w, c = progress.run.server["w"].numpy(), progress.run.server["c"].numpy()[:, None]
        delta = pair_vectors(progress.run.server).numpy()
        pairs.append((c * delta, fpfc.rho * (1 - c) * delta))
        apart = np.linalg.norm(w[i] - w[j], axis=1)
        values.append(((w - points) ** 2).sum() / 2 + penalty(apart, fpfc.lam, fpfc.a, fpfc.xi).sum() / m)

    fit_points(centres(points), fpfc, rounds=200, dim=3, local_steps=steps, callbacks=[seen, note])
    constant = max(fpfc.lam / fpfc.xi, 1 / (fpfc.a - 1))
    assert fpfc.rho > constant
    for (theta, v), (after, moved) in pairwise(pairs):
        t = torch.from_numpy(theta)
        slope = (fpfc.fusion.weight(t.norm(dim=1))[:, None] * t).numpy()
        assert np.abs(v - slope).max() < 1e-9
        far = np.linalg.norm(moved - v, axis=1) - constant * np.linalg.norm(after - theta, axis=1)
        assert far.max() < 1e-9
    assert (np.array(seen.values) >= np.array(values) - 1e-9).all()
    assert seen.values[-1] == pytest.approx(values[-1], abs=1e-6)


@pytest.mark.parametrize(("smoothness", "a"), [(0.5, 3.7), (4.0, 3.7), (0.1, 1.2)])
def test_the_proven_local_steps_solve_the_local_problem(smoothness, a):
    """FPFC, Theorem 1 and Remark 4: T steps of 1/(L_f + rho) leave `shrink` of the distance to the solution of
    f_i + rho/2 ||w - zeta||^2, whatever curvature between -L_f and L_f the loss has; one step less does not."""
    fpfc, steps = proven(smoothness, lam=0.5, shrink=0.01, xi=0.4, a=a)
    assert "meets condition (13)" in fpfc.theory()
    assert fpfc.rho > 3 * smoothness
    left = [np.abs(1 - fpfc.lr * (np.linspace(-smoothness, smoothness) + fpfc.rho)) ** t for t in (steps - 1, steps)]
    assert left[1].max() <= 0.01 < left[0].max()


@pytest.mark.parametrize(("wrong", "where"), [
    ({"smoothness": 0.0}, "smoothness"), ({"smoothness": np.inf}, "smoothness"), ({"shrink": 1.0}, "shrink"),
    ({"shrink": 0.0}, "shrink"),     ({"rho": 3.0}, "rho"), ({"penalty": "l1"}, "SCAD"),
])  # fmt: skip
def test_what_can_not_be_proven_is_refused(wrong, where):
    with pytest.raises(ConfigError, match=where):
        proven(**({"smoothness": 1.0, "lam": 0.5} | wrong))


def test_fpfc_is_the_oracle_at_the_rate_of_theorem_3():
    """FPFC, Theorem 3, for a linear model with squared loss: the estimator that knows the clusters, least squares on a
    cluster's pooled samples, is what FPFC ends at, and its error falls as one over the root of the samples."""
    true = np.array([[1.0, 1, 1], [-1, -1, -1]])

    def error(n, seed):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(6, n, 3))
        y = (x @ true.repeat(3, 0)[:, :, None])[..., 0] + 0.3 * rng.normal(size=(6, n))
        data = pf.Federation.from_arrays([*zip(x, y, strict=True)], test=[*zip(x, y, strict=True)])
        model = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)
        torch.nn.init.zeros_(model.weight)
        run = pf.fit(model, data, pf.FPFC(0.1, lam=0.8), rounds=100, local_steps=10, batch_size=None, loss="mse",
                     evaluate_every=0)  # fmt: skip
        oracle = [np.linalg.lstsq(x[k].reshape(-1, 3), y[k].ravel(), rcond=None)[0] for k in (slice(3), slice(3, 6))]
        assert run.personal.numpy() == pytest.approx(np.repeat(oracle, 3, 0), abs=1e-3)
        return ((run.personal.numpy() - true.repeat(3, 0)) ** 2).sum(1).max()

    few, many = (np.mean([error(n, seed) for seed in range(5)]) ** 0.5 for n in (40, 640))
    assert 3 < few / many < 5.3  # the root of 16 is 4


@pytest.mark.parametrize("tau", [2, 5])
def test_fedcets_inequality_15_holds_in_every_round(tau):
    """FedCET, Theorem 1 as printed, at the largest provable weight c = mu / (2 (mu a + 4)), for Algorithm 1's step, for
    half of it, and for the theorem's own bound, printed 2 tau L and meant 1/(2 tau L). M = (I - 11'/N)^+ / c - a I is
    (1/c - a) I where d lies, for its sum over clients is zero. Corollary 1: with Algorithm 1's step the left side, a
    weighted sum of ||x - x*||^2 and ||d - d*||^2, falls in every round."""
    problem = LeastSquares(seed=0, curvature=1.5)
    L, mu, k = problem.smoothness, problem.convexity, (1 + 2 / tau) ** (2 * tau - 2)
    slopes = np.stack([problem.gradient(i, problem.optimum) for i in range(problem.clients)])
    for a in (paper_step(L, mu, tau), paper_step(L, mu, tau) / 2, 1 / (2 * tau * L)):
        c, seen = mu / (2 * (mu * a + 4)), []

        def note(progress, seen=seen):
            d = progress.run.trained.engine.rows.gather(torch.arange(problem.clients))["d"].numpy()
            assert np.abs(d.sum(0)).max() < 1e-9 * max(1, np.abs(d).max())
            gap = progress.run.personal.numpy() - problem.optimum
            seen.append([(gap**2).sum(), ((d + slopes) ** 2).sum()])

        problem.fit(pf.FedCET(a, weight=c * a), 60, steps=tau, callbacks=[note])
        x, d = np.array(seen).T
        at, t = tau * mu * a, tau * a
        left = (1 - at) * x / t + (1 / c - a + (1 - at) * t) * d
        of_x = 1 + L * mu * t**2 + 2 * tau**3 / mu * k * L**4 * a**3 - 2 * at - tau**4 * k * L**4 * a**4
        of_d = 1 / c - a + (2 / at - 1) * tau**3 * k * L**2 * a**3
        assert (left[1:] <= (of_x * x / t + of_d * d)[:-1] * (1 + 1e-12)).all()
        if a <= paper_step(L, mu, tau):
            assert of_x <= 1 - at
            assert (left[1:] < left[:-1]).all()


def fedacs_slope(run, points, lam):
    """The squared norm of grad F + lam R, at the models of a run."""
    W = run.personal.numpy()
    unit = W / np.linalg.norm(W, axis=1, keepdims=True)
    S = (unit @ unit.T).clip(0)
    S /= S.sum(1, keepdims=True)
    return ((W - points + lam * (W - S @ W)) ** 2).sum()


def two_groups():
    return np.repeat([[2.0, 1, 0], [1.0, 2, 0]], 4, 0) + 0.3 * np.random.default_rng(0).normal(size=(8, 3))


def test_fedacss_gradient_falls_at_the_rate_of_theorem_2_1():
    """(3) with alpha = lam beta and (5) with beta = 1/sqrt(K): min ||grad||^2 = O(1/sqrt(K)) of F + lam R."""
    points, lam = two_groups(), 0.5

    def least(K):
        seen, method = [], pf.FedACS(K**-0.5, quantile=None, alpha=lam * K**-0.5)
        note = lambda progress: seen.append(fedacs_slope(progress.run, points, lam))  # noqa: E731
        fit_points(centres(points), method, rounds=K, dim=3, callbacks=[note])
        return min(seen[1:])

    scaled = [least(K) * K**0.5 for K in (25, 100, 400)]
    assert scaled[0] >= scaled[1] >= scaled[2]


def test_fedacss_gradient_vanishes_with_falling_steps():
    """FedACS, Theorem 2.1 (7): beta_k = alpha_k / lam, sum alpha_k infinite, sum alpha_k^2 finite, here 1/(2j) in
    five rounds each: lim inf ||grad||^2 = 0 of F + lam R. A step that does not fall ends short of it."""
    points, lam = two_groups(), 0.5

    def slopes(betas):
        seen, run = [], None
        for beta in betas:
            method = pf.FedACS(beta, quantile=None, alpha=lam * beta)
            run = fit_points(centres(points), method, rounds=5, dim=3, start=run)
            seen.append(fedacs_slope(run, points, lam))
        return np.array(seen)

    falling, held = slopes(1 / (2 * j) for j in range(1, 41)), slopes([0.5] * 40)
    least = np.minimum.accumulate(falling)
    assert (least[[9, 19, 39]] < least[[4, 9, 19]] / 2).all()
    assert least[-1] < 0.02 * held.min()


def test_fedslrs_potential_falls_at_a_linear_rate():
    """FedSLR, Theorem 1: for eta_g <= 1/(2L), with phase I solved, the augmented Lagrangian of (P1),
    (1/M) sum_i [f_i(w_i) + <g_i, w - w_i> + ||w - w_i||^2 / (2 eta_g)] + lam ||w||_*, never rises. Theorem 2: under the
    Lojasiewicz inequality with exponent 1/2, which least squares with the nuclear norm has where ranks have settled,
    its distance to the least value of (P1) falls as q^t: by the same factor in every ten rounds, down to rounding."""
    problem, eta = MultiOutput(), 0.5  # L = 0.8
    before, values = {"w": np.zeros((16, 12)), "g": np.zeros((10, 16, 12))}, []

    def f(W, i):
        x, y = problem.data[i]
        return ((x @ W.T - y) ** 2).mean()

    def note(progress):
        g = progress.run.server["g"].view(10, 16, 12).numpy().copy()
        w = [before["w"] - eta * (g[i] - before["g"][i]) for i in range(10)]
        before.update(w=matrix(progress.run).copy(), g=g)
        gap = [before["w"] - w[i] for i in range(10)]
        parts = [f(w[i], i) + (g[i] * gap[i]).sum() + (gap[i] ** 2).sum() / (2 * eta) for i in range(10)]
        values.append(np.mean(parts) + problem.lam * np.linalg.norm(before["w"], "nuc"))

    method = pf.FedSLR(1 / (0.8 + 1 / eta), eta_g=eta, lam=problem.lam, personal_epochs=0, form="all-duals")
    problem.fit(method, 200, steps=40, callbacks=[note])
    W = problem.solution()
    least = np.mean([f(W, i) for i in range(10)]) + problem.lam * np.linalg.norm(W, "nuc")
    gap = np.array(values) - least
    assert (np.diff(values) <= 1e-12).all()
    assert gap[-1] < 1e-11 * gap[0]
    factors = gap[30::10] / gap[20:-10:10]
    assert factors.max() < 0.35
    assert np.ptp(np.log(factors)) < 0.35  # a straight line over t; as 1/t it would go from -.4 to -.05


def test_fedslrs_potential_falls_as_a_power_where_theta_is_above_a_half():
    """FedSLR, Theorem 2: x^4 has the exponent 3/4 at its least value, so that with theta > 1/2 the distance to it falls
    as T^(-1/(2 theta - 1)) = T^-2, to a quarter in twice as many rounds, and at no linear rate."""
    values = []

    class Number(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))

        def forward(self, x):
            return x * self.w

    ones = [(np.ones((2, 1)), np.zeros(2))] * 3
    data = pf.Federation.from_arrays(ones, test=ones, task="regression")
    pf.fit(
        Number(), data, pf.FedSLR(0.3, eta_g=1.0, lam=0.0, personal_epochs=0), rounds=81, local_steps=15,
        batch_size=None, loss=lambda out, _: (out**4).mean() / 4, dtype="float64", evaluate_every=0,
        callbacks=[lambda progress: values.append(progress.run.server["w"].item() ** 4 / 4)],
    )  # fmt: skip
    found = np.array(values)
    assert found[[40, 80]] / found[[20, 40]] == pytest.approx(0.25, abs=0.02)


def test_fedslrs_personal_parts_come_to_rest_at_the_rate_of_theorem_3():
    """FedSLR, Theorem 3: with full gradients and a step below 1/L the mean over K rounds of the squared gradient
    mapping of (P2), (p - prox(p - eta grad f_i(w + p))) / eta, is O(1/K): its sum over rounds is bounded."""
    problem, eta, mu, slopes = MultiOutput(), 0.5, 0.005, []
    lr = 1 / (0.8 + 1 / eta)
    before = {"w": np.zeros((16, 12)), "p": np.zeros((10, 16, 12))}

    def note(progress):
        w, p = before["w"], before["p"]
        moved = [soft(p[i] - lr * problem.gradient(i, w + p[i]), lr * mu) for i in range(10)]
        slopes.append(sum((((p[i] - moved[i]) / lr) ** 2).sum() for i in range(10)))
        rows = progress.run.trained.engine.rows.gather(torch.arange(10))
        before.update(w=matrix(progress.run).copy(), p=rows["p"].view(10, 16, 12).numpy().copy())

    method = pf.FedSLR(lr, eta_g=eta, lam=problem.lam, mu=mu, personal_epochs=1, form="all-duals")
    problem.fit(method, 1500, steps=5, callbacks=[note])
    sums = np.cumsum(slopes)
    assert sums[-1] < 1.01 * sums[len(sums) // 2]
    assert slopes[-1] < 1e-8 * slopes[0]
    assert 0.01 < (before["p"] != 0).mean() < 0.99  # neither part of the problem is trivial
