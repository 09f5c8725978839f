"""FedAMP, HeurFedAMP, APPLE and FedFomo: models mixed for each client, by their equations in numpy."""

import numpy as np
import pytest
import torch
from certify import certifies
from problems import LeastSquares, centres, fit_labels, fit_points, labelled, two_layers
from torch.func import functional_call

import polyfed as pf
from polyfed.algorithms.fedamp import messages
from polyfed.base.errors import ConfigError


@certifies(pf.FedAMP, by="optimality conditions")
@pytest.mark.parametrize("alpha", [None, 0.1])
def test_stationary_point_of_the_objective(alpha):
    """Exact local solves converge to grad f_i(w_i) + lam/2 grad_i A(W) = 0, f_i = 1/2 ||w - c_i||^2."""
    c = np.random.default_rng(1).normal(size=(5, 3))
    sigma, lam = 3.0, 0.8
    algorithm = pf.FedAMP(1.0, lam=lam, sigma=sigma, alpha=alpha)
    step = algorithm.step(5)
    algorithm = pf.FedAMP(1 / (1 + lam / step), lam=lam, sigma=sigma, alpha=alpha)  # one step solves it
    run = fit_points(centres(c), algorithm, rounds=300, dim=3)
    W = run.personal.numpy()
    K = np.exp(-((W[:, None] - W[None]) ** 2).sum(2) / sigma) / sigma
    pull = lam * (K[:, :, None] * (W[:, None] - W[None])).sum(1)
    assert np.abs(W - c + pull).max() < 1e-9
    assert np.abs(pull).max() > 0.05


def test_no_weight_is_negative():
    W = torch.randn(30, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 1e-3
    A = messages(W, 100.0 / 29, 100.0)
    assert (A >= -1e-15).all()
    assert torch.allclose(A.sum(1), torch.ones(30, dtype=torch.float64))
    with pytest.raises(ConfigError, match=r"at most sigma/\(n-1\) = 25"):
        fit_points(centres(np.eye(5)), pf.FedAMP(0.1, alpha=26.0), rounds=1, dim=5)


def by_distance(W, alpha, sigma):
    """FedAMP's u_i, from the definition: sum_j xi_ij w_j with xi_ij = alpha exp(-||w_i - w_j||^2 / sigma) / sigma."""
    U = W.copy()
    for i in range(len(W)):
        for j in range(len(W)):
            U[i] += alpha / sigma * np.exp(-((W[i] - W[j]) ** 2).sum() / sigma) * (W[j] - W[i])
    return U


def by_cosine(W, sigma, own):
    """HeurFedAMP's u_i: `own` of w_i, the rest shared by exp(sigma cos(w_i, w_j))."""
    N = W / np.linalg.norm(W, axis=1, keepdims=True)
    E = np.exp(sigma * N @ N.T) * (1 - np.eye(len(W)))
    return own * W + (1 - own) * (E / E.sum(1, keepdims=True)) @ W


@certifies(pf.FedAMP, by="Algorithm 1 by hand, from u_i")
@certifies(pf.HeurFedAMP, by="the rounds by hand, from u_i")
@pytest.mark.parametrize(
    ("method", "mix"),
    [
        (pf.FedAMP(0.03, lam=3.0, sigma=2.0, alpha=0.25), lambda W: by_distance(W, 0.25, 2.0)),
        (pf.HeurFedAMP(0.03, lam=3.0, alpha=0.25, sigma=4.0, self_weight=0.3), lambda W: by_cosine(W, 4.0, 0.3)),
    ],
    ids=lambda m: getattr(m, "name", ""),
)
def test_rounds_in_numpy(method, mix):
    """Algorithm 1: local descent on f_i(w) + lam / (2 alpha) ||w - u_i||^2 from u_i, in steps too short to solve it.

    After so few steps the result still depends on where they began, and on lam / alpha = 12 as it could not on 3/4.
    """
    problem = LeastSquares(seed=4, clients=4, dim=3)
    W = np.zeros((4, 3))
    for t in range(3):
        U = mix(W) if t else W  # in the first round all models are equal
        W = U.copy()
        for _ in range(2):
            G = np.stack([problem.gradient(i, w) for i, w in enumerate(W)])
            W = W - 0.03 * (G + 3.0 / 0.25 * (W - U))
    assert np.abs(mix(W) - W).max() > 0.01
    assert np.allclose(problem.fit(method, rounds=3, steps=2).personal, W, atol=1e-13)


@pytest.mark.parametrize("method", [pf.FedAMP(0.05), pf.HeurFedAMP(0.05)], ids=lambda m: m.name)
def test_absent_clients_are_mixed_in_as_the_server_last_saw_them(method):
    problem = LeastSquares(seed=1, clients=6, dim=3)
    run = problem.fit(method, rounds=4, steps=2)
    sent = method.downlink(run.server, run.trained.round(np.array([1, 4]))).each["u"]
    everyone = method.weights(run.server["w"]) @ run.server["w"]
    assert torch.allclose(sent, everyone[[1, 4]], atol=1e-12)
    alone = method.weights(run.server["w"][[1, 4]]) @ run.server["w"][[1, 4]]
    assert (sent - alone).abs().max() > 1e-4


@certifies(pf.APPLE, by="its equations in numpy")
@pytest.mark.parametrize("form", ["exponential", "cosine"])
def test_rounds_of_apple_by_hand(form):
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


POINTS = np.random.default_rng(2).normal(size=(5, 3)) * 2


def loss_of(w):
    """[client, model]: 1/2 ||w_n - c_i||^2."""
    return ((w[None] - POINTS[:, None]) ** 2).sum(2) / 2


@certifies(pf.FedFomo, by="its equations in numpy")
def test_rounds_of_fedfomo_by_hand():
    """All models sent: theta_i is the model after local training, weights are positive parts that add up to one, and
    the server adds up the weights before they are cut."""
    lr, w, P = 0.3, np.zeros_like(POINTS), np.zeros((5, 5))
    for _ in range(4):
        F, gap = loss_of(w), w[None] - w[:, None]  # gap[i, n] = theta_n - theta_i
        length = np.linalg.norm(gap, axis=2)
        v = (np.diag(F)[:, None] - F) / np.where(length > 0, length, 1)
        P += v
        u = np.maximum(v, 0)
        u = u / np.where(u.sum(1, keepdims=True) > 0, u.sum(1, keepdims=True), 1)
        w = w + np.einsum("in,ind->id", u, gap)
        w = w - lr * (w - POINTS)
    run = fit_points(centres(POINTS), pf.FedFomo(lr, models=4, validation=0.0), 4, 3)
    assert np.allclose(run.personal, w, atol=1e-12)
    assert np.allclose(run.server["P"], P, atol=1e-12)
    assert (P < 0).any()


@certifies(pf.FedFomo, by="identity with Local")
def test_without_models_or_better_ones_it_is_local():
    """Far apart, nobody else's model is ever better. In the first round all are equal: nothing is divided by 0."""
    far = centres(np.array([[9.0, 0], [-9, 0], [0, 9], [0, -9]]))
    b = fit_points(far, pf.FedFomo(0.4, validation=0.0), 5, 2).personal
    assert torch.allclose(b, fit_points(far, pf.Local(0.4), 5, 2).personal, atol=1e-13)


@certifies(pf.FedFomo, by="planted groups")
def test_groups_find_each_other():
    """No model of the other group is ever better: once all have been tried, only those of the own group are sent."""
    group = np.arange(10) % 2
    points = np.where(group[:, None] == 0, 4.0, -4.0) + np.random.default_rng(0).normal(size=(10, 2))
    run = fit_points(centres(points), pf.FedFomo(0.2, models=9, validation=0.0), 4, 2)
    state = {k: torch.as_tensor(v) for k, v in run.server.items()}
    assert (run.server["P"].numpy()[group[:, None] != group] < 0).all()
    few = pf.FedFomo(models=4, epsilon=0.0)
    sent = few._sent(state, pf.Round(4, 10, 0, torch.arange(10), torch.ones(10), torch.full((10,), 4)))
    assert (group[sent.numpy()] == group[:, None]).all()


def test_the_first_models_are_drawn_and_places_are_explored():
    """Not the first ones by index, and not the same in every round while epsilon lasts; nobody is sent its own."""
    method, n = pf.FedFomo(models=3, epsilon=0.5, decay=0.05), 40
    key = torch.arange(1, n + 1) * 7919
    P = torch.zeros(n, n).double()
    at = [pf.Round(t, n, 0, torch.arange(n), torch.ones(n), torch.full((n,), t)) for t in range(12)]
    sent = [method._sent({"P": P, "key": key}, r).numpy() for r in at]
    assert all((s != np.arange(n)[:, None]).all() and all(len({*row}) == 3 for row in s.tolist()) for s in sent)
    assert len(np.unique(sent[0])) > n / 2
    known = {"P": torch.arange(n).expand(n, -1).double(), "key": key}
    best = [(np.sort(method._sent(known, r).numpy()[:30], 1) == [37, 38, 39]).mean() for r in at]
    assert 0.3 < best[0] < 0.8
    assert best[-1] == 1.0


@pytest.mark.parametrize("validation", [0.3, 0.0])
def test_validation_samples_do_not_train(validation):
    """Without models, a client that sets 30 % apart is Local on the other 70 %."""
    fed = labelled((30, 20, 11))
    run = fit_labels(fed, pf.FedFomo(0.2, models=0, validation=validation), rounds=2)
    alone = fit_labels(fed, pf.Local(0.2), rounds=2)
    assert torch.equal(run.personal, alone.personal) is (validation == 0)
