"""The papers' theorems as statements about runs: what they say never rises, or falls at a rate, does so here."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from matrices import MultiOutput, matrix
from problems import LeastSquares, centres, fit_points, pair_vectors

import polyfed as pf
from polyfed.algorithms.fedcet import paper_step


def penalty(t, lam, a, xi):
    """The smoothed SCAD (3)."""
    scad = np.where(t <= a * lam, (a * lam * t - (t**2 + lam**2) / 2) / (a - 1), lam**2 * (a + 1) / 2)
    scad = np.where(t <= lam, lam * t, scad)
    return np.where(t <= xi, lam * t**2 / (2 * xi) + xi * lam / 2, scad)


class Lagrangian:
    """A callback: sum_i f_i + (1/m) sum_(i<j) [g(theta) + v (w_i - w_j - theta) + rho/2 ||w_i - w_j - theta||^2], and
    the squared norm of its gradient in w, after every round, where f_i(w) = 1/2 ||w - c_i||^2.
    """

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
    fpfc = pf.FPFC(0.04, lam=0.5, xi=0.1, merge=False)
    assert "does not meet condition (13)" in fpfc.theory()
    fpfc = replace(fpfc, rho=max(3.0, 2 * fpfc.lam / fpfc.xi, 2 / (fpfc.a - 1)) + 0.01)
    assert "meets condition (13)" in fpfc.theory()
    seen = Lagrangian(fpfc, points)
    fit_points(centres(points), fpfc, rounds=200, dim=3, local_steps=4, fraction=fraction, callbacks=[seen])
    values, sums = np.array(seen.values), np.cumsum(seen.slopes)
    assert (np.diff(values) <= 1e-9 * abs(values[0])).all()
    assert values[-1] < values[0] - 1e-3
    assert sums[-1] < 1.01 * sums[len(sums) // 2]


@pytest.mark.parametrize("tau", [2, 5])
def test_fedcets_lyapunov_function_falls_every_round(tau):
    """FedCET, Corollary 1: ||x - x*||^2 + (tau a / c) ||d + grad f(x*)||^2 contracts, at the proven step."""
    problem = LeastSquares(seed=0, curvature=1.5)
    L, mu, seen = problem.smoothness, problem.convexity, []
    a = paper_step(L, mu, tau)
    c = mu / (2 * mu * a + 8)
    slopes = np.stack([problem.gradient(i, problem.optimum) for i in range(problem.clients)])

    def note(progress):
        d = progress.run.loop.engine.rows.gather(torch.arange(problem.clients))["d"].numpy()
        gap = progress.run.personal.numpy() - problem.optimum
        seen.append((gap**2).sum() + tau * a / c * ((d + slopes) ** 2).sum())

    problem.fit(pf.FedCET(lr="paper", smoothness=L, convexity=mu), 60, steps=tau, callbacks=[note])
    ratios = np.array(seen[1:]) / seen[:-1]
    assert (ratios < 1).all()
    assert ratios[-1] == pytest.approx(ratios[-20], abs=1e-2)


def test_fedacss_gradient_falls_at_the_rate_of_theorem_2_1():
    """(3) with alpha = lam beta and (5) with beta = 1/sqrt(K): min ||grad||^2 = O(1/sqrt(K)) of F + lam R."""
    rng, lam = np.random.default_rng(0), 0.5
    points = np.repeat([[2.0, 1, 0], [1.0, 2, 0]], 4, 0) + 0.3 * rng.normal(size=(8, 3))

    def least(K):
        seen, beta = [], K**-0.5

        def note(progress):
            W = progress.run.personal.numpy()
            unit = W / np.linalg.norm(W, axis=1, keepdims=True)
            S = (unit @ unit.T).clip(0)
            S /= S.sum(1, keepdims=True)
            seen.append(((W - points + lam * (W - S @ W)) ** 2).sum())

        fit_points(centres(points), pf.FedACS(beta, quantile=None, alpha=lam * beta), rounds=K, dim=3, callbacks=[note])
        return min(seen[1:])

    scaled = [least(K) * K**0.5 for K in (25, 100, 400)]
    assert scaled[0] >= scaled[1] >= scaled[2]


def test_fedslrs_potential_never_rises():
    """FedSLR, Theorems 1 and 2: for eta_g <= 1/(2L), with phase I solved, the augmented Lagrangian of (P1),
    (1/M) sum_i [f_i(w_i) + <g_i, w - w_i> + ||w - w_i||^2 / (2 eta_g)] + lam ||w||_*, falls to the least value of (P1).
    """
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
    problem.fit(method, 150, steps=40, callbacks=[note])
    W = problem.solution()
    least = np.mean([f(W, i) for i in range(10)]) + problem.lam * np.linalg.norm(W, "nuc")
    assert (np.diff(values) <= 1e-9).all()
    assert values[-1] == pytest.approx(least, abs=1e-4)
