"""APPLE: its two steps in numpy, with the gradient of the weights as autograd has it; Local and a closed form."""

import numpy as np
import pytest
import torch
from certify import certifies
from problems import LeastSquares, fit_labels, labelled, two_layers
from torch.func import functional_call

import polyfed as pf


@certifies(pf.APPLE, by="its equations in numpy")
@pytest.mark.parametrize("form", ["exponential", "cosine"])
def test_rounds_by_hand(form):
    """p starts at the shares of samples; both steps are taken from the same point; the pull is of mu ||p - p0||^2."""
    problem, lr, lr_p, mu, fade = LeastSquares(seed=2, clients=4, dim=3), 0.03, 0.05, 0.4, 3
    sizes = np.array([len(y) for _, y in problem.data], dtype=float)
    p0 = sizes / sizes.sum()
    core, p = np.zeros((4, 3)), np.tile(p0, (4, 1))
    for t in range(4):
        lam = 0 if t >= fade else 1e-3 ** (t / fade) if form == "exponential" else (np.cos(np.pi * t / fade) + 1) / 2
        new, new_p = core.copy(), p.copy()
        for i in range(4):
            mine, q = core.copy(), p[i].copy()
            for _ in range(3):
                g = problem.gradient(i, q @ mine)
                slope = mine @ g
                mine[i] = mine[i] - lr * q[i] * g
                q = q - lr_p * (slope + 2 * lam * mu * (q - p0))
            new[i], new_p[i] = mine[i], q
        core, p = new, new_p
    run = problem.fit(pf.APPLE(lr, weight_lr=lr_p, mu=mu, fade=fade, form=form), rounds=4, steps=3)
    assert np.allclose(run.server["core"], core, atol=1e-12)
    assert np.allclose(run.server["p"], p, atol=1e-12)
    assert np.allclose(run.personal, p @ core, atol=1e-12)
    assert np.abs(p - p0).max() > 0.01


@certifies(pf.APPLE, by="autograd in the weights")
def test_the_gradient_of_a_weight_is_a_sum_over_all_parameters():
    """<g, c_j>: neither a mean, nor one in which a bias weighs as much as a dense layer."""
    fed, lr_p = labelled(), 0.3
    method = pf.APPLE(0.0, weight_lr=lr_p, mu=0.0)
    run = fit_labels(fed, method, rounds=1, local_steps=1)
    core = run.server["core"]
    p0 = torch.tensor([24.0, 9.0, 30.0]).double() / 63
    layout, net = run.trained.task.layout, two_layers()
    for i in range(3):
        x, y = fed.train.client(i)
        p = p0.clone().requires_grad_()
        w = p @ core
        out = functional_call(net, layout.named(w), (x.double(),))
        (slope,) = torch.autograd.grad(torch.nn.functional.cross_entropy(out, y), p)
        assert torch.allclose(run.server["p"][i], p0 - lr_p * slope, atol=1e-12)


@certifies(pf.APPLE, by="closed form at fixed weights")
def test_with_fixed_weights_a_step_is_scaled_by_the_own_weight():
    problem = LeastSquares(seed=2, clients=4, dim=3)
    run = problem.fit(pf.APPLE(0.1, weight_lr=0.0), rounds=1, steps=1)
    share = np.array([len(y) for _, y in problem.data]) / sum(len(y) for _, y in problem.data)
    expected = np.stack([-0.1 * s * problem.gradient(i, np.zeros(3)) for i, s in enumerate(share)])
    assert np.allclose(run.server["core"], expected, atol=1e-13)


def test_a_federation_of_one_is_local():
    problem = LeastSquares(seed=2, clients=1, dim=3)
    a = problem.fit(pf.APPLE(0.05, weight_lr=0.0), rounds=3).personal
    assert torch.allclose(a, problem.fit(pf.Local(0.05), rounds=3).personal, atol=1e-13)


def test_bytes():
    """n core models, their weights and p0, and the client's place down; one model and n weights up."""
    problem = LeastSquares(seed=2, clients=4, dim=3)
    frame = problem.fit(pf.APPLE(0.05), rounds=2).ledger
    assert set(frame["down_bytes"]) == {8 * (4 * 3 + 4 + 4 + 1)}
    assert set(frame["up_bytes"]) == {8 * (3 + 4)}
