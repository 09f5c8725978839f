"""FedSoft: importances counted sample by sample, its fixed point in closed form, Local without a pull."""

import numpy as np
import torch
from certify import certifies
from problems import LeastSquares, centres, fit_points, zero_linear

import polyfed as pf

POINTS = np.array([[5.0, 1], [5.5, 0], [-5, 2], [-4, 1.5]])


def mixtures(shares, n=20, dim=3, seed=0):
    """Clients with a share of samples of y = a x and the rest of y = b x; (federation, a, b)."""
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(2, dim)) * 3
    data = []
    for share in shares:
        x = rng.normal(size=(n, dim))
        data.append((x, np.where(np.arange(n) < share * n, x @ a, x @ b)))
    return pf.Federation.from_arrays(data, test=data, task="regression"), a, b


@certifies(pf.FedSoft, by="mixtures with known shares")
def test_importances_are_counted_sample_by_sample():
    """Not by mean losses, which would give a client of 0.3 and 0.7 wholly to one centre. Here the centres are the two
    sources: one of them is the start, the other is put in its place in the server's state."""
    shares = (0.1, 0.3, 0.5, 0.9)
    fed, a, b = mixtures(shares)
    task = pf.Task(zero_linear(3), "mse")
    method = pf.FedSoft(0.0, k=2, init_scale=1.0)
    prepared = {"w": torch.as_tensor(np.stack([a, b]))[None].expand(4, -1, -1)}
    client = {"w": torch.zeros(4, 3).double(), "u": torch.zeros(4, 2).double()}
    own, up = method.local_update(task, client, prepared, whole(fed), first_round())
    expected = np.stack([shares, 1 - np.array(shares)], 1)
    assert np.allclose(up["importance"], expected, atol=1e-12)
    assert torch.equal(own["u"], up["importance"])


def whole(fed):
    from polyfed.base.randomness import client_keys
    from polyfed.compute.batches import Batches, Work

    return Batches(fed.train, np.arange(fed.n), client_keys(fed.names), Work(batch_size=None), 0, 0)


def first_round():
    ids = torch.arange(4)
    return pf.Round(0, 4, 0, ids, torch.full((4,), 20.0).double(), ids * 0)


@certifies(pf.FedSoft, by="its equations in numpy")
def test_rounds_by_hand():
    """Two centres, counts in rounds 0 and 2, centres weighted by importance times samples: the last client has its
    samples three times over."""
    lr, lam, steps = 0.2, 0.8, 3
    method = pf.FedSoft(lr, k=2, lam=lam, tau=2, init_scale=4.0, seed=5)
    pairs = [centres(POINTS).train.client(i) for i in range(4)]
    data = [tuple(t.tile((3 if i == 3 else 1, *[1] * (t.dim() - 1))) for t in pair) for i, pair in enumerate(pairs)]
    fed, n = pf.Federation.from_arrays(data, test=data, task="regression"), np.array([1, 1, 1, 3])
    start = fit_points(fed, method, 0, 2).server["w"].numpy()
    run = fit_points(fed, method, 4, 2, local_steps=steps)
    c, w, u = start.copy(), np.zeros((4, 2)), np.zeros((4, 2))
    scale = np.sqrt(POINTS.shape[1] / 2)  # the samples of `centres` are the axes, scaled
    for t in range(4):
        if t % 2 == 0:
            losses = (scale * (c[None] - POINTS[:, None])) ** 2  # [client, centre, sample]
            best = losses.argmin(1)
            u = np.maximum([(best == s).mean(1) for s in (0, 1)], 1e-4).T
        for _ in range(steps):
            w = w - lr * (w - POINTS + lam * (u[:, :1] * (w - c[0]) + u[:, 1:] * (w - c[1])))
        c = np.stack([(n * u[:, s]) @ w / (n @ u[:, s]) for s in (0, 1)])
    assert np.allclose(run.personal, w, atol=1e-12)
    assert np.allclose(run.server["w"], c, atol=1e-12)


@certifies(pf.FedSoft, by="identity with Local without a pull")
def test_without_a_pull_it_is_local():
    problem = LeastSquares(seed=3, clients=6, dim=5)
    a = problem.fit(pf.FedSoft(0.05, lam=0.0, init_scale=1.0), rounds=4).personal
    assert torch.allclose(a, problem.fit(pf.Local(0.05), rounds=4).personal, atol=1e-13)


@certifies(pf.FedSoft, by="the client's optimum in closed form")
def test_many_steps_reach_the_proximal_point():
    """(t + lam sum_s u_s c_s) / (1 + lam sum_s u_s), with the centres that were received."""
    method = pf.FedSoft(0.2, k=2, lam=2.0, init_scale=3.0)
    c = fit_points(centres(POINTS), method, 0, 2).server["w"].numpy()
    run = fit_points(centres(POINTS), method, 1, 2, local_steps=200)
    u = run.server["importance"].numpy()
    expected = (POINTS + 2 * u @ c) / (1 + 2 * u.sum(1, keepdims=True))
    assert np.allclose(run.personal, expected, atol=1e-12)


def test_a_centre_that_explains_nothing_keeps_a_little_importance():
    run = fit_points(centres(POINTS), pf.FedSoft(0.1, k=3, init_scale=50.0, sigma=1e-3), 1, 2)
    assert float(run.server["importance"].min()) == 1e-3
