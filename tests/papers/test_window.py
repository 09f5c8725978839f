"""The window for FPFC's lambda: closed forms, what the method sets, and advice during a run."""

import numpy as np
import pytest
import torch
from problems import LeastSquares

import polyfed as pf
from polyfed_papers.window import WindowAdvice, window_for


def test_the_window_of_a_federation_is_that_of_its_closed_forms():
    """Least squares: groups' and common minimisers and all gradients from the Hessians, with numpy alone."""
    problem, groups = LeastSquares(seed=0, clients=6, dim=4), np.array([0, 0, 0, 1, 1, 1])
    window = window_for(problem.model(), problem.federation, groups, "mse")
    H, b, m = problem.H, problem.b, 6
    alpha = [np.linalg.solve(sum(H[i] for i in g), sum(b[i] for i in g)) for g in ((0, 1, 2), (3, 4, 5))]
    own = np.stack([problem.gradient(i, alpha[k]) for i, k in enumerate(groups)])
    merged = np.stack([problem.gradient(i, problem.optimum) for i in range(m)])
    spread = max(np.linalg.norm(own[i] - own[j]) for i in range(6) for j in range(6) if groups[i] == groups[j])
    assert window.necessary == pytest.approx(m / 2 * np.linalg.norm(own, axis=1).max(), rel=1e-5)
    assert window.sufficient == pytest.approx(m / 3 * spread, rel=1e-5)
    assert window.unbiased == pytest.approx(np.linalg.norm(alpha[0] - alpha[1]) / 3.7, rel=1e-6)
    cut = max(np.linalg.norm(merged[groups == k].mean(0)) for k in (0, 1))
    assert window.excluded == pytest.approx(m / 3 * cut, rel=1e-5)


def test_the_window_takes_a_and_penalty_from_the_method():
    problem, groups = LeastSquares(seed=0, clients=6, dim=4), np.array([0, 0, 0, 1, 1, 1])

    def window(which, **settings):
        return window_for(problem.model(), problem.federation, which, "mse", method=pf.FPFC(**settings))

    plain, wide, l1 = window(groups), window(groups, a=10.0), window(groups, penalty="l1")
    assert wide.unbiased == pytest.approx(plain.unbiased * 3.7 / 10, rel=1e-9)
    assert l1.unbiased == 0  # the group norm pulls at every distance
    assert "no lam leaves them unbiased: this penalty pulls at every distance" in l1.lines()
    assert wide[:2] == plain[:2] == l1[:2]
    assert window(np.zeros(6)).lines()[-1] == "one group: nothing bounds lam from above"


def test_the_window_leaves_shared_layers_out():
    """Slope and intercept; with the intercept shared, only the slope's gradients and distances bound lam."""
    rng, slopes = np.random.default_rng(0), [1.0, 1.2, -1.0, -1.3]
    x = [rng.normal(size=(30, 1)) for _ in slopes]
    fed = pf.Federation.from_arrays([(x[i], s * x[i][:, 0] + 5 * i) for i, s in enumerate(slopes)], test_fraction=0)
    module, groups = torch.nn.Linear(1, 1, dtype=torch.float64), np.array([0, 0, 1, 1])

    def gradients(i, w):  # of the mean squared error, as (slope, intercept)
        at = np.concatenate([fed.train.client(i)[0].numpy(), np.ones((fed.train.counts[i], 1))], 1)
        return 2 * at.T @ (at @ w - fed.train.client(i)[1].numpy()) / len(at)

    def fitted(members):
        H = sum(np.column_stack([gradients(i, e) - gradients(i, np.zeros(2)) for e in np.eye(2)]) for i in members)
        return np.linalg.solve(H, -sum(gradients(i, np.zeros(2)) for i in members))

    alpha = [fitted(m) for m in ((0, 1), (2, 3))]
    window = window_for(module, fed, groups, "mse", method=pf.FPFC(shared_layers="bias"))
    assert window.necessary == pytest.approx(4 * max(abs(gradients(i, alpha[i // 2])[0]) for i in range(4)), rel=1e-4)
    assert window.unbiased == pytest.approx(abs(alpha[0][0] - alpha[1][0]) / 3.7, rel=1e-5)


def test_advice_during_a_run_is_the_window_of_the_groups_found():
    problem = LeastSquares(seed=0, clients=6, dim=4)
    advice = WindowAdvice(every=20)
    run = pf.fit(
        problem.model(), problem.federation, pf.FPFC(lr=0.05, lam=0.3), rounds=40, loss="mse", local_steps=5,
        batch_size=None, callbacks=[advice],
    )  # fmt: skip
    assert [t for t, _, _ in advice.found] == [20, 40]
    _, clusters, window = advice.found[-1]
    assert clusters == len(set(run.clusters.tolist()))
    again = window_for(problem.model(), problem.federation, run.clusters, "mse")
    assert window == pytest.approx(again, rel=1e-4)
    assert advice.lines()[0] == f"round 40, {clusters} clusters:"
