"""FedAvg-FT: FedAvg's common model, and fine-tuning from it in closed form."""

import numpy as np
import pytest
import torch
from certify import certifies
from problems import LeastSquares

import polyfed as pf


@pytest.fixture(scope="module")
def problem():
    return LeastSquares(seed=3, clients=6, dim=5)


@certifies(pf.FedAvgFT, by="identity")
@pytest.mark.parametrize("weighted", [True, False])
def test_the_common_model_is_fedavg(problem, weighted):
    a = problem.fit(pf.FedAvgFT(0.02, weighted=weighted), rounds=5, batch_size=8, fraction=0.5)
    b = problem.fit(pf.FedAvg(0.02, weighted=weighted), rounds=5, batch_size=8, fraction=0.5)
    assert torch.equal(a.server["w"], b.server["w"])
    columns = ["round", "client", "down_bytes", "up_bytes"]
    assert a.ledger[columns].equals(b.ledger[columns])


@certifies(pf.FedAvgFT, by="identity")
def test_without_fine_tuning_it_deploys_what_it_received(problem):
    before = problem.fit(pf.FedAvg(0.02), rounds=2).server["w"]
    run = problem.fit(pf.FedAvgFT(0.02, finetune_epochs=0), rounds=3)
    assert torch.equal(run.personal, before.expand(6, -1))


@certifies(pf.FedAvgFT, by="closed form")
def test_fine_tuning_is_gradient_descent_from_the_common_model(problem):
    """w_i* + (I - lr H_i)^k (w - w_i*), with w the common model received in the last round."""
    w = problem.fit(pf.FedAvg(0.02), rounds=2).server["w"].numpy()
    run = problem.fit(pf.FedAvgFT(0.02, finetune_epochs=7, finetune_lr=0.05), rounds=3)
    for i, (H, b) in enumerate(zip(problem.H, problem.b, strict=True)):
        own = np.linalg.solve(H, b)
        expected = own + np.linalg.matrix_power(np.eye(5) - 0.05 * H, 7) @ (w - own)
        assert np.allclose(run.personal[i], expected, atol=1e-12)


def test_long_fine_tuning_is_local(problem):
    run = problem.fit(pf.FedAvgFT(0.02, finetune_epochs=800, finetune_lr=0.1), rounds=2)
    own = [np.linalg.solve(H, b) for H, b in zip(problem.H, problem.b, strict=True)]
    assert np.allclose(run.personal, np.stack(own), atol=1e-9)
