"""FedALA: the weights of the mixture by hand on quadratics, and FedAvg wherever the mixture is the common model."""

import numpy as np
import pytest
from certify import certifies
from problems import Given, centres, fit_labels, fit_points, labelled

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
@pytest.mark.parametrize(("passes", "settled", "first"), [(1, 0.1, 1), (50, 1e9, 11), (50, 0.0, 50)])
def test_rounds_by_hand(passes, settled, first):
    """The first training ends after more than ten passes, the last ten of them with losses that hardly differ. What is
    deployed is w_i after training.
    """
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
    for _ in range(12):
        s = own + apart * A
        losses.append((0.5 * (s - point) ** 2)[:, 0])
        A = np.clip(A - eta * (s - point) * apart, 0, 1)
    early, late = (np.std(losses[k : k + 10], axis=0) for k in (1, 2))
    settled = (early + late).mean() / 2
    assert (late < settled).all()
    assert (early > settled).all()
    data = [(np.full((2, 1), np.sqrt(0.5)), np.full((2, 1), np.sqrt(0.5) * c)) for (c,) in point]
    method = pf.FedALA(lr, eta=eta, share=0.5, settled=settled)
    run = fit_points(pf.Federation.from_arrays(data, test=data), method, 2, 1, batch_size=1)
    w, A = by_hand(point, lr, eta, 2, 12)
    assert np.allclose(run.personal, w, atol=1e-12)
    assert np.allclose(private(run)["A"], A, atol=1e-12)


def test_a_contact_at_the_clients_own_model_does_not_spend_the_first_training():
    """Alone in the first rounds a client meets its own model; with the second client's it trains A eleven times."""
    points = np.array([[1.0], [-1.0]])
    method = pf.FedALA(0.4, eta=0.3, passes=50, settled=1e9)
    run = fit_points(centres(points), method, 4, 1, schedule=Given(((0,), (0,), (0, 1), (0, 1))))
    x, w, A, contacts = np.zeros(1), np.zeros((2, 1)), np.ones((2, 1)), [0, 0]
    for cohort in ([0], [0], [0, 1], [0, 1]):
        for i in cohort:
            away = x - w[i]
            passes = 0 if contacts[i] == 0 or not away.any() else 11 if contacts[i] == 1 else 1
            for _ in range(passes):
                A[i] = np.clip(A[i] - 0.3 * (w[i] + away * A[i] - points[i]) * away, 0, 1)
            contacts[i] += contacts[i] == 0 or bool(passes)
            start = w[i] + away * A[i]
            w[i] = start - 0.4 * (start - points[i])
        x = w[cohort].mean(0)
    assert contacts == [2, 2]
    assert np.allclose(run.personal, w, atol=1e-12)
    assert np.allclose(private(run)["A"], A, atol=1e-12)


def test_the_head_is_a_layer_not_a_tensor():
    """Its weights and its bias: 5 x 3 + 3 numbers of the two-layer network."""
    assert private(fit_labels(labelled(), pf.FedALA(0.1), rounds=1))["A"].shape == (3, 18)
