"""FLamby's federations: its splits, its loss, and what the user is told whose folder lacks the data."""

import numpy as np
import pytest
import torch

from polyfed.algorithms import FedAvg
from polyfed.base.errors import DataError
from polyfed_papers.flamby import POOLED, best_step
from polyfed_papers.flamby.cases import heart, in_regions, over_all, tcga, within_batch
from polyfed_papers.recipes import Bench


def test_the_hospitals_are_split_as_published():
    """199/104, 172/89, 30/16 and 85/45 patients with 13 inputs; own scaling has own mean 0 and deviation 1."""
    case = heart()
    assert [(len(a), len(b)) for (a, _), (b, _) in zip(case.train, case.test, strict=True)] == [
        (199, 104), (172, 89), (30, 16), (85, 45),
    ]  # fmt: skip
    data = case.federation("centre")
    assert data.input_shape == (13,)
    for k in range(4):
        x = data.train.client(k)[0].double().numpy()
        assert np.allclose(x.mean(0), 0, atol=1e-6)
        varied = x.std(0) > 0
        assert np.allclose(x.std(0, ddof=1)[varied], 1, atol=1e-5)
    pooled = case.federation("pooled", pooled=True)
    assert pooled.names == (POOLED,)
    assert (pooled.train.counts.tolist(), pooled.test.counts.tolist()) == ([486], [254])


def test_the_regions_are_split_as_published(data_dir):
    train, test, columns = in_regions(data_dir("tcga_brca"))
    sizes = [(248, 63), (156, 40), (164, 42), (129, 33), (129, 33), (40, 11)]
    assert [(len(a), len(b)) for (a, _), (b, _) in zip(train, test, strict=True)] == sizes
    assert len(columns) == 39


def test_a_missing_folder_is_said_in_one_line(tmp_path):
    with pytest.raises(DataError, match=r"tcga_brca/brca\.csv: not there; put brca\.csv and train_test_split\.csv"):
        tcga(tmp_path)


def test_the_loss_of_a_batch():
    """Risks 0, log 2, log 3; two die: 1/(1 + 2 + 3) and 2/(2 + 3), over three. Without a death nothing moves."""
    risk = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64).log().requires_grad_()
    target = torch.tensor([[5.0, 1.0], [7.0, 1.0], [9.0, 0.0]], dtype=torch.float64)
    assert within_batch(risk, target).item() == pytest.approx(-np.log(1 / 6 * 2 / 5) / 3)
    within_batch(risk, target * torch.tensor([1.0, 0.0])).backward()
    assert not risk.grad.any()


@pytest.mark.parametrize("n", [1, 2, 40, 200])
def test_sorted_by_time_the_loss_is_the_same(n):
    """Value and gradient, with ties among all times."""
    rng = np.random.default_rng(n)
    target = torch.tensor(np.stack([rng.integers(1, n // 2 + 2, n), rng.integers(0, 2, n)], 1).astype(float))
    risk = torch.tensor(rng.standard_normal((n, 1)), requires_grad=True)
    values = [loss(risk, target) for loss in (within_batch, over_all)]
    one, other = (torch.autograd.grad(v, risk)[0] for v in values)
    assert values[1].item() == pytest.approx(values[0].item(), abs=1e-12)
    assert torch.allclose(one, other, atol=1e-14)


def test_the_step_is_the_one_with_least_loss_on_validation_patients(tmp_path):
    """Not one at an end of the grid: a step too small has not trained, one too large overfits or diverges."""
    case = heart()
    work = {"rounds": 10, "local_steps": 5, "batch_size": None, "evaluate_every": 0}
    bench = Bench(tmp_path)
    assert 1e-4 < best_step(bench, "step", case, case.federation("pooled"), FedAvg, work, range(2)) < 100
    assert bench.tuning() == ["tuned by validation: 1 choices of 12 trials; edges left: 0"]
