"""FedALA: the weights of the mixture by hand on quadratics, and FedAvg wherever the mixture is the common model."""

import numpy as np
import pytest
import torch
from certify import certifies
from problems import centres, fit_labels, fit_points, labelled

import polyfed as pf
from polyfed.testing.stage import private

POINTS = np.random.default_rng(3).normal(size=(5, 4))


def by_hand(points, lr, eta, rounds, first_passes):
    """f_i = 1/2 ||w - c_i||^2 with one local step a round: (w, A) after `rounds`."""
    w, A, x = np.zeros_like(points), np.ones_like(points), np.zeros(points.shape[1])
    for t in range(rounds):
        for _ in range(0 if t == 0 else first_passes if t == 1 else 1):
            s = w + (x - w) * A
            A = np.clip(A - eta * (s - points) * (x - w), 0, 1)
        s = w + (x - w) * A
        w = s - lr * (s - points)
        x = w.mean(0)
    return w, A


@certifies(pf.FedALA, by="its equations in numpy")
@pytest.mark.parametrize(("passes", "settled", "first"), [(1, 0.1, 1), (50, 1e9, 10), (50, 0.0, 50)])
def test_rounds_by_hand(passes, settled, first):
    """The first training ends after ten passes whose losses hardly differ. What is deployed is w_i after training."""
    run = fit_points(centres(POINTS), pf.FedALA(0.4, eta=0.7, passes=passes, settled=settled), 4, 4)
    w, A = by_hand(POINTS, 0.4, 0.7, 4, first)
    assert np.allclose(run.personal, w, atol=1e-12)
    assert np.allclose(private(run)["A"], A, atol=1e-12)
    assert ((A > 0) & (A < 1)).any()


def test_a_pass_ends_with_its_share_and_is_judged_by_the_last_step_that_trained():
    """Each client has one sample twice, so that half a pass is one step. Its losses by hand: with A after k steps they
    are told from those with A after k + 1, by which the first training would end a pass earlier.
    """
    point, lr, eta = np.array([[1.0], [-1.0]]), 0.4, 0.3
    own = lr * point  # after the first round, from zero
    apart, A, losses = own.mean(0) - own, np.ones_like(point), []
    for _ in range(11):
        s = own + apart * A
        losses.append((0.5 * (s - point) ** 2)[:, 0])
        A = np.clip(A - eta * (s - point) * apart, 0, 1)
    early, late = (np.std(losses[k : k + 10], axis=0) for k in range(2))
    settled = (early + late).mean() / 2
    assert (late < settled).all()
    assert (early > settled).all()
    data = [(np.full((2, 1), np.sqrt(0.5)), np.full((2, 1), np.sqrt(0.5) * c)) for (c,) in point]
    method = pf.FedALA(lr, eta=eta, share=0.5, settled=settled)
    run = fit_points(pf.Federation.from_arrays(data, test=data), method, 2, 1, batch_size=1)
    w, A = by_hand(point, lr, eta, 2, 11)
    assert np.allclose(run.personal, w, atol=1e-12)
    assert np.allclose(private(run)["A"], A, atol=1e-12)


@certifies(pf.FedALA, by="identity with FedAvg")
def test_without_weights_it_is_fedavg():
    common = [fit_labels(labelled(), m, rounds=4).server["w"] for m in (
        pf.FedAvg(0.1), pf.FedALA(0.1, layers=""), pf.FedALA(0.1, eta=0.0), pf.FedALA(0.1)
    )]  # fmt: skip
    assert torch.equal(common[0], common[1])
    assert torch.allclose(common[0], common[2], atol=1e-12)
    assert (common[0] - common[3]).abs().max() > 1e-3


def test_equal_clients_take_in_the_whole_common_model():
    x, y = labelled().train.client(0)
    fed = pf.Federation.from_arrays([(x, y)] * 3, test=[(x, y)] * 3)
    run = fit_labels(fed, pf.FedALA(0.1), rounds=4)
    assert (private(run)["A"] == 1).all()
    assert torch.allclose(run.personal, fit_labels(fed, pf.FedAvg(0.1), rounds=4).personal, atol=1e-12)


def test_the_head_is_a_layer_not_a_tensor():
    """Its weights and its bias: 5 x 3 + 3 numbers of the two-layer network."""
    assert private(fit_labels(labelled(), pf.FedALA(0.1), rounds=1))["A"].shape == (3, 18)
