"""Recalibrated: FedAvg's common model, and the best intercept for every client in closed form."""

import numpy as np
import pytest
import torch
from certify import certifies
from scipy.optimize import minimize

import polyfed as pf

CLASSES = 3


@pytest.fixture(scope="module")
def federation():
    rng = np.random.default_rng(5)

    def draw(i, n):
        y = rng.choice(CLASSES, n, p=np.roll([0.8, 0.15, 0.05], i))
        y[:CLASSES] = range(CLASSES)
        return rng.normal(size=(n, 4)) + y[:, None], y

    return pf.Federation.from_arrays([draw(i, n) for i, n in enumerate((40, 25, 60))], [draw(i, 20) for i in range(3)])


def train(fed, method, rounds=4, outputs=CLASSES, **settings):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, outputs)).double()
    return pf.fit(net, fed, method, rounds=rounds, local_epochs=2, batch_size=16, **settings)


def outputs(run, i, common=None):
    x, y = run.federation.train.client(i)
    w = run.personal[i] if common is None else common
    return run.trained.task.outputs(w, x.double()), y


@certifies(pf.Recalibrated, by="an independent optimiser")
@pytest.mark.parametrize("slope", [False, True])
def test_it_is_the_best_intercept(federation, slope):
    """The same minimum as scipy's, from the common model that was received, with the same penalty on the slope."""
    common = train(federation, pf.FedAvg(0.3), rounds=3).server["w"]
    run = train(federation, pf.Recalibrated(0.3, slope=slope))
    for i in range(3):
        z, y = outputs(run, i, common)

        def loss(theta, z=z, y=y):
            a = theta[3] if slope else 1.0
            value = torch.nn.functional.cross_entropy(a * z + torch.tensor(theta[:3]), y)
            return float(value) + (a - 1) ** 2 / (2 * len(y))

        best = minimize(loss, [0, 0, 0, 1], method="BFGS", tol=1e-10).x
        expected = (best[3] if slope else 1.0) * z + torch.tensor(best[:3])
        found, _ = outputs(run, i)
        assert torch.allclose(found.softmax(1), expected.softmax(1), atol=1e-5)


@pytest.mark.parametrize("far", [3.0, 12.0, 30.0])
def test_a_common_model_that_is_sure_and_wrong_is_recalibrated_all_the_same(far):
    """Where probabilities are all but one, a whole step of Newton's method goes millions too far."""
    fed = pf.Federation.from_arrays([(np.zeros((8, 4)), [0, 1] * 4)], test_fraction=0.0)
    model = torch.nn.Linear(4, 2).double()
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor([0.0, far]))
    run = pf.fit(model, fed, pf.Recalibrated(0.0), rounds=1)
    z, _ = outputs(run, 0)
    assert z.softmax(1).mean(0).numpy() == pytest.approx([0.5, 0.5])


@certifies(pf.Recalibrated, by="closed form")
def test_the_mean_error_is_zero():
    rng = np.random.default_rng(0)
    sites = [(rng.normal(size=(n, 4)), rng.normal(size=n) + 10 * i) for i, n in enumerate((30, 20))]
    run = train(pf.Federation.from_arrays(sites), pf.Recalibrated(0.01), outputs=1)
    for i in range(2):
        z, y = outputs(run, i)
        assert abs(float((z[:, 0] - y).mean())) < 1e-10


def test_the_best_line_of_numbers():
    """With the slope it is least squares of y on (1, z), drawn to a slope of 1 by one sample's worth."""
    rng = np.random.default_rng(0)
    sites = [
        (x := rng.normal(size=(n, 4)), 3 * x[:, :2] + rng.normal(size=(n, 2)) + 10 * i) for i, n in ((0, 30), (1, 20))
    ]
    fed = pf.Federation.from_arrays(sites, task="regression")
    common = train(fed, pf.FedAvg(0.01), rounds=3, outputs=2).server["w"]
    run = train(fed, pf.Recalibrated(0.01, slope=True), outputs=2)
    for i in range(2):
        z, y = outputs(run, i, common)
        n = len(z)  # the loss is half the sum of squares, and so is the penalty
        design = np.c_[z.T.reshape(-1), np.repeat(np.eye(2), n, axis=0)]
        design, target = np.r_[design, [[1, 0, 0]]], np.r_[y.T.reshape(-1), 1.0]
        a, *c = np.linalg.lstsq(design, target, rcond=None)[0]
        found, _ = outputs(run, i)
        assert np.allclose(found, a * z.numpy() + c, atol=1e-8)


def test_a_class_that_a_client_has_not_seen_counts_as_half_a_sample():
    rng = np.random.default_rng(0)
    sites = [(rng.normal(size=(n, 4)), y) for n, y in ((20, np.ones(20, int)), (30, np.arange(30) % 3))]
    run = train(pf.Federation.from_arrays(sites), pf.Recalibrated(0.1))
    z, _ = outputs(run, 0)
    expected = torch.tensor([0.5, len(z), 0.5]).double() / (len(z) + 1)
    assert torch.allclose(z.softmax(1).mean(0), expected, atol=1e-10)


def test_a_model_that_ranks_backwards_gets_no_slope(federation):
    """The slope is at least zero: where it would be negative, the shares of the classes are all that is left."""
    model = torch.nn.Linear(4, CLASSES).double()
    with torch.no_grad():
        model.weight.copy_(-5.0 * torch.arange(CLASSES)[:, None].expand(-1, 4))
    run = pf.fit(model, federation, pf.Recalibrated(0.0, slope=True), rounds=1)
    for i in range(3):
        z, y = outputs(run, i)
        assert torch.allclose(z.softmax(1), (torch.bincount(y) / len(y)).double().expand(len(y), -1), atol=1e-10)
