"""FedNova, FedExP, q-FedAvg, TERM and AFL: how updates are averaged, by their equations in numpy."""

import numpy as np
import pytest
import torch
from certify import certifies
from problems import LeastSquares, centres, fit_points
from scipy.optimize import brentq

import polyfed as pf

THREE = np.array([[0.0, 2.0], [1.0, -1.0], [4.0, 0.5]])


STEPS = np.array([1, 6, 3])


@certifies(pf.FedNova, by="the fixed point in closed form")
def test_fixed_point_under_unequal_steps():
    """As lr falls FedNova's point is the optimum, the mean of the c_i, and FedAvg's is weighted by tau_i."""
    share, apart = 1 - (1 - 0.1) ** STEPS, []
    for method, weight in ((pf.FedNova(0.1), share / STEPS), (pf.FedAvg(0.1), share)):
        found = fit_points(centres(THREE), method, 100, 2, local_steps=STEPS.tolist()).server["w"].numpy()
        assert np.allclose(found, weight @ THREE / weight.sum(), atol=1e-10)
        apart.append(np.linalg.norm(found - THREE.mean(0)))
    assert apart[0] < apart[1] / 2


@certifies(pf.FedNova, by="sums of a geometric series in numpy")
@pytest.mark.parametrize("effective", ["norm", "steps"])
def test_a_round_with_the_proximal_term(effective):
    lr, mu = 0.1, 2.0
    run = fit_points(centres(THREE), pf.FedNova(lr, mu=mu, effective=effective), 1, 2, local_steps=STEPS.tolist())
    moves, norms = np.zeros((3, 2)), np.zeros(3)
    for i in range(3):
        for _ in range(STEPS[i]):
            moves[i] -= lr * ((moves[i] - THREE[i]) + mu * moves[i])
            norms[i] = (1 - lr * mu) * norms[i] + 1
    scale = norms.mean() if effective == "norm" else STEPS.mean()
    assert np.allclose(run.server["w"], scale * (moves / norms[:, None]).mean(0), atol=1e-12)


@certifies(pf.FedExP, by="closed form: m orthogonal moves of one length")
def test_orthogonal_moves_are_stretched_by_half_their_number():
    """m moves lr e_i: sum ||D_i||^2 / (2 m ||D||^2) = m / 2. Deployed is the mean of two common models."""
    for m in (1, 2, 6):
        for averaged in (True, False):
            run = fit_points(centres(3 * np.eye(m)), pf.FedExP(0.5, eps=0.0, averaged=averaged), 1, m)
            expected = max(1, m / 2) * np.full(m, 1.5 / m)
            assert np.allclose(run.server["w"], expected, atol=1e-14)
            assert np.allclose(run.personal, expected / 2 if averaged else expected, atol=1e-14)


@certifies(pf.FedExP, by="its equations in numpy, both kinds of weights")
def test_rounds_of_fedexp_by_hand():
    problem, eps, lr = LeastSquares(seed=4, clients=5, dim=4), 0.01, 0.03
    share = np.array([len(y) for _, y in problem.data], dtype=float)
    for weighted in (False, True):
        p = share / share.sum() if weighted else np.full(5, 0.2)
        x = np.zeros(4)
        for _ in range(4):
            w = np.stack([x] * 5)
            for i in range(5):
                for _ in range(3):
                    w[i] -= lr * problem.gradient(i, w[i])
            D = w - x
            mean = p @ D
            step = max(1, (p @ (D**2).sum(1)) / (2 * (mean @ mean + eps)))
            x = x + step * mean
        run = problem.fit(pf.FedExP(lr, eps=eps, weighted=weighted), rounds=4, steps=3)
        assert np.allclose(run.server["w"], x, atol=1e-12)


POINTS = np.array([[0.0, 0.5], [0.3, 0.0], [4.0, -1.0], [1.0, 1.0]])


def moves(x, lr, steps):
    """x - w_i after steps on 1/2 ||w - c_i||^2, and the losses at x."""
    return (1 - (1 - lr) ** steps) * (x - POINTS), ((x - POINTS) ** 2).sum(1) / 2


@certifies(pf.QFedAvg, by="Algorithm 2 in numpy")
@pytest.mark.parametrize("q", [0.5, 2.0])
def test_rounds_by_hand(q):
    """The loss is that at x, before training: of all samples, not what training saw."""
    lr, x = 0.2, np.zeros(2)
    for _ in range(3):
        dw, F = moves(x, lr, 4)
        L = 1 / lr
        h = q * F ** (q - 1) * ((L * dw) ** 2).sum(1) + L * F**q
        x = x - (F[:, None] ** q * L * dw).sum(0) / h.sum()
    run = fit_points(centres(POINTS), pf.QFedAvg(lr, q=q), 3, 2, local_steps=4)
    assert np.allclose(run.server["w"], x, atol=1e-12)


@certifies(pf.QFedAvg, by="TERM and AFL in numpy and scipy")
def test_term_and_afl_by_hand():
    lr, q = 0.2, 0.3
    for form in ("term", "afl"):
        x, weight = np.zeros(2), np.full(4, 0.25)
        for _ in range(3):
            dw, F = moves(x, lr, 4)
            if form == "term":
                weight = np.exp(q * F) / np.exp(q * F).sum()
            else:
                v = weight + q * F  # the projection is (v - level)+ with the sum 1
                level = brentq(lambda at, v=v: np.maximum(v - at, 0).sum() - 1, v.min() - 1, v.max(), xtol=1e-15)
                weight = np.maximum(v - level, 0)
            x = x - weight @ dw
        run = fit_points(centres(POINTS), pf.QFedAvg(lr, q=q, form=form), 3, 2, local_steps=4)
        assert np.allclose(run.server["w"], x, atol=1e-12)


@certifies(pf.QFedAvg, by="AFL's step on its weights in numpy and scipy, where part of the clients take part")
def test_the_step_on_afls_weights_does_not_depend_on_the_cohorts_share():
    lr, q, rounds = 0.2, 0.03, 5
    method = pf.QFedAvg(lr, q=q, form="afl")
    run = fit_points(centres(POINTS), method, rounds, 2, local_steps=4, fraction=0.5, seed=3)
    cohorts = [frame["client"].to_numpy() for _, frame in run.ledger.groupby("round")]
    assert len({tuple(c) for c in cohorts}) > 1
    x, weight = np.zeros(2), np.full(4, 0.25)
    for cohort in cohorts:
        dw, F = moves(x, lr, 4)
        v, mass = weight[cohort] + q * F[cohort], weight[cohort].sum()
        level = brentq(lambda at, v=v, m=mass: np.maximum(v - at, 0).sum() - m, v.min() - 1, v.max(), xtol=1e-15)
        weight[cohort] = np.maximum(v - level, 0)
        x = x - weight[cohort] @ dw[cohort] / mass
    assert np.allclose(run.server["w"], x, atol=1e-12)
    assert np.allclose(run.server["weight"] / 4, weight, atol=1e-12)


@pytest.mark.parametrize("scale", [1e-12, 1e3])
def test_powers_do_not_overflow(scale):
    """Of losses near 1e-25 or 1e6 to the power of 100, which no float64 holds."""
    run = fit_points(centres(scale * POINTS), pf.QFedAvg(0.1, q=100.0), 3, 2)
    assert torch.isfinite(run.server["w"]).all()
    assert run.server["w"].abs().max() > 0
