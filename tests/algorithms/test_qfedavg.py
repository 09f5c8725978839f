"""q-FedAvg, TERM and AFL: their equations in numpy, FedAvg at zero, and the minimax point."""

import numpy as np
import pytest
import torch
from certify import certifies
from problems import LeastSquares, centres, fit_points
from scipy.optimize import brentq

import polyfed as pf
from polyfed.base.errors import ConfigError

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


@certifies(pf.QFedAvg, by="identity with FedAvg at zero")
def test_without_fairness_it_is_fedavg():
    problem = LeastSquares(seed=3, clients=6, dim=5)
    plain, weighted = (problem.fit(pf.FedAvg(0.05, weighted=w), rounds=5).personal for w in (False, True))
    for form, expected in (("q", plain), ("afl", plain), ("term", weighted)):
        found = problem.fit(pf.QFedAvg(0.05, q=0.0, form=form), rounds=5).personal
        assert torch.allclose(found, expected, atol=1e-12)


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


@pytest.mark.parametrize("more", [{"optimizer": "adam"}, {"optimizer": "momentum"}, {"clip_norm": 1.0}])
def test_steps_that_stand_for_no_gradient_are_refused(more):
    with pytest.raises(ConfigError, match="q-fedavg"):
        fit_points(centres(POINTS), pf.QFedAvg(0.1), 1, 2, **more)
    for form in ("term", "afl"):
        fit_points(centres(POINTS), pf.QFedAvg(0.1, form=form), 1, 2, **more)


@certifies(pf.QFedAvg, by="the minimax point")
def test_strong_tilt_ends_at_the_least_largest_loss():
    """Of 0, 0.2 and 1 on a line the point 0.5 has the smallest largest loss; the mean is 0.4."""
    points = np.array([[0.0], [0.2], [1.0]])
    tilted = fit_points(centres(points), pf.QFedAvg(0.05, q=50.0, form="term"), 100, 1).server["w"]
    powers = fit_points(centres(points), pf.QFedAvg(1.0, q=20.0), 150, 1).server["w"]
    assert abs(float(tilted) - 0.5) < 0.01
    assert abs(float(powers) - 0.5) < 0.02


@pytest.mark.parametrize("scale", [1e-12, 1e3])
def test_powers_do_not_overflow(scale):
    """Of losses near 1e-25 or 1e6 to the power of 100, which no float64 holds."""
    run = fit_points(centres(scale * POINTS), pf.QFedAvg(0.1, q=100.0), 3, 2)
    assert torch.isfinite(run.server["w"]).all()
    assert run.server["w"].abs().max() > 0
