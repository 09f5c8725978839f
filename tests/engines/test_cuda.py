"""An accelerator computes what the CPU computes. Skipped where there is none."""

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
import polyfed.algorithms
from polyfed.core.algorithm import REGISTRY
from polyfed.engines.local import make_plan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no usable CUDA device")
METHODS = [c for c in REGISTRY.values() if c.__module__.startswith(f"{polyfed.algorithms.__name__}.")]


def federation() -> pf.Federation:
    rng = np.random.default_rng(0)
    data = [(rng.normal(size=(m, 1, 6, 6)).astype(np.float32), np.arange(m) % 3) for m in (5, 40, 12, 30, 13, 31)]
    return pf.Federation.from_arrays(data, test_fraction=0.2)


def model(kind: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "mlp":
            return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3))
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.parametrize("cls", METHODS, ids=lambda c: c.name)
def test_cuda_agrees_with_the_cpu(cls, kind):
    settings = {"rounds": 2, "batch_size": 8, "dtype": torch.float64}
    cpu = pf.fit(model(kind), federation(), cls(), device="cpu", **settings)
    cuda = pf.fit(model(kind), federation(), cls(), device="cuda", **settings)
    assert cuda.personal.device.type == "cuda"
    assert (cuda.personal.cpu() - cpu.personal).abs().max() < 1e-8
    assert cuda.ledger.drop(columns="seconds").equals(cpu.ledger.drop(columns="seconds"))


@pytest.mark.parametrize("cls", METHODS, ids=lambda c: c.name)
def test_resumed_on_cuda(cls, tmp_path):
    settings = {"batch_size": 8, "device": "cuda"}
    straight = pf.fit(model("mlp"), federation(), cls(), rounds=4, **settings)
    pf.fit(model("mlp"), federation(), cls(), rounds=2, out=tmp_path, **settings)
    resumed = pf.fit(model("mlp"), federation(), cls(), rounds=4, out=tmp_path, resume=True, **settings)
    assert torch.allclose(resumed.personal, straight.personal, atol=1e-6)


def test_on_an_accelerator_the_cohort_is_one_chunk():
    task = pf.Task(model("cnn"), device="cuda")
    plan = make_plan(task, 50, 8)
    assert (plan.chunk, plan.workers, plan.path) == (50, 1, "vectorised")
