"""FedExP: the extrapolation in closed form, FedAvg where clients agree, and the rate that it promises."""

import numpy as np
import torch
from certify import certifies
from problems import LeastSquares, centres, fit_points, labelled

import polyfed as pf


@certifies(pf.FedExP, by="closed form: m orthogonal moves of one length")
def test_orthogonal_moves_are_stretched_by_half_their_number():
    """m moves lr e_i have the mean (lr/m) sum e_i, and sum ||D_i||^2 / (2 m ||D||^2) = m / 2. Deployed is the mean of
    the two common models, before and after."""
    for m in (1, 2, 6):
        for averaged in (True, False):
            run = fit_points(centres(3 * np.eye(m)), pf.FedExP(0.5, eps=0.0, averaged=averaged), 1, m)
            expected = max(1, m / 2) * np.full(m, 1.5 / m)
            assert np.allclose(run.server["w"], expected, atol=1e-14)
            assert np.allclose(run.personal, expected / 2 if averaged else expected, atol=1e-14)


@certifies(pf.FedExP, by="identity with FedAvg where clients agree")
def test_of_equal_clients_it_is_fedavg():
    x, y = labelled().train.client(0)
    fed = pf.Federation.from_arrays([(x, y)] * 3, test=[(x, y)] * 3)
    model, how = torch.nn.Linear(4, 3).double(), {"rounds": 4, "local_steps": 3, "batch_size": None}
    a, b = (pf.fit(model, fed, m, **how) for m in (pf.FedExP(0.1), pf.FedAvg(0.1)))
    assert torch.allclose(a.server["w"], b.server["w"], atol=1e-13)


@certifies(pf.FedExP, by="its equations in numpy, both kinds of weights")
def test_rounds_by_hand():
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


@certifies(pf.FedExP, by="the distance to the solutions of a consistent problem, which never rises")
def test_interpolating_clients_get_no_farther_from_a_common_solution():
    rng = np.random.default_rng(0)
    truth = rng.normal(size=12)
    data = [(x := rng.normal(size=(4, 12)), x @ truth) for _ in range(2)]
    fed = pf.Federation.from_arrays(data, test=data, task="regression")
    distance = [float(np.linalg.norm(truth))]
    for rounds in range(1, 8):
        run = fit_points(fed, pf.FedExP(0.02, eps=0.0), rounds, 12, local_steps=5)
        distance.append(float(np.linalg.norm(run.server["w"].numpy() - truth)))
    assert (np.diff(distance) <= 1e-12).all()
    assert distance[-1] < 0.8 * distance[0]
