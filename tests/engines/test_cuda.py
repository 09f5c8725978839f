"""An accelerator computes what the CPU computes. Skipped where there is none."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polyfed as pf
import polyfed.algorithms
from polyfed import models
from polyfed.algorithms import shipped
from polyfed.base.typed import seeded
from polyfed.compute.batches import Batch
from polyfed.compute.check import check
from polyfed.compute.dropout import Key
from polyfed.compute.dropout import kept as not_dropped
from polyfed.compute.kept import kept
from polyfed.compute.outputs import each_outputs
from polyfed.compute.split import Split
from polyfed.compute.task import Task

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no usable CUDA device")
OTHERS = ("fedbn", "fedem", "fedrc", "knn-per")  # which refuse these nets
OURS = [*shipped().values()]
METHODS = [c for c in OURS if c.name not in OTHERS]


def federation() -> pf.Federation:
    rng = np.random.default_rng(0)
    data = [(rng.normal(size=(m, 1, 6, 6)).astype(np.float32), np.arange(m) % 3) for m in (5, 40, 12, 30, 13, 31)]
    return pf.Federation.from_arrays(data, test_fraction=0.2)


def model(kind: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "mlp":
            return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3))
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(64, 3))


def words(cls) -> str | None:
    """The adapter that a method is for."""
    return f"lora:r=2,train={cls.adapter_train}" if cls.adapter_train else None


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.parametrize("cls", METHODS, ids=lambda c: c.name)
def test_cuda_agrees_with_the_cpu(cls, kind):
    if cls.adapter_train and kind == "cnn":
        pytest.skip("an adapter is for linear layers below the last")
    settings = {"rounds": 2, "batch_size": 8, "dtype": torch.float64, "adapter": words(cls)}
    cpu = pf.fit(model(kind), federation(), cls(), device="cpu", **settings)
    cuda = pf.fit(model(kind), federation(), cls(), device=DEVICE, **settings)
    assert cuda.personal.device.type == DEVICE
    assert (cuda.personal.cpu() - cpu.personal).abs().max() < 1e-8
    assert cuda.ledger.drop(columns="seconds").equals(cpu.ledger.drop(columns="seconds"))


def test_evaluation_and_kept_features_round_no_factors():
    """torch rounds those of convolutions to ten bits on a CUDA device, if nobody says otherwise."""
    x, w = torch.randn(64, 1, 6, 6), {}
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(32, 3))
    for q in net[0].parameters():
        q.requires_grad_(False)
    split = Split(x, torch.arange(64) % 3, np.array([0, 64]))
    for device in ("cpu", DEVICE):
        task = Task(copy.deepcopy(net), device=device)
        check(task, task.place(split), 3)
        there, top = x.to(device), kept(task, x)
        features = torch.empty(64, *top.shape, device=device)
        top.features_(features, there, 1)
        many = each_outputs(task.net, task.w0.expand(2, -1).clone(), there[None].expand(2, *there.shape))
        w[device] = [task.outputs(task.w0, there).cpu(), many.cpu(), features.cpu()]
    for here, far in zip(w["cpu"], w[DEVICE], strict=True):
        assert (far - here).norm() < 1e-6 * here.norm()


def test_attention_of_many_models_at_once():
    """Its fused kernels have no backward pass outside of vmap: it is worked out without them."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts, self.head = nn.Linear(8, 24), nn.Linear(8, 3)

        def forward(self, x):
            q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.parts(x).chunk(3, -1))
            return self.head(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).mean(1))

    data = [(np.random.default_rng(i).normal(size=(12, 6, 8)).astype(np.float32), np.arange(12) % 3) for i in range(4)]
    settings = {"rounds": 2, "batch_size": 4}
    with seeded(0):
        net = Net()
    fed = pf.Federation.from_arrays(data)
    cpu, cuda = (pf.fit(net, fed, pf.Ditto(), device=device, **settings) for device in ("cpu", DEVICE))
    assert cuda.trained.engine.plan.path == "vectorised"
    assert not cuda.trained.task.net.grouped
    assert (cuda.personal.cpu() - cpu.personal).abs().max() < 1e-5


def test_passes_are_recorded_and_give_the_cpus_models(caplog):
    settings = {"rounds": 4, "batch_size": 8, "dtype": torch.float64}
    cpu, cuda = (pf.fit(model("cnn"), federation(), pf.FedAvg(), device=d, **settings) for d in ("cpu", DEVICE))
    assert sum(map(len, cuda.trained.task.net.recorder.made.values())) > 0, caplog.text
    assert (cuda.personal.cpu() - cpu.personal).abs().max() < 1e-8


def test_dropouts_masks_are_the_cpus():
    key = Key(-1234567, 987654321)
    there, here = (not_dropped(key, 3, 100_000, 0.3, torch.device(d)) for d in (DEVICE, "cpu"))
    assert torch.equal(there.cpu(), here)


def test_the_memory_that_is_planned_for_is_enough():
    """What a step of 50 LeNets takes at most, beyond what was there, against what the plan counts with."""
    x, y = torch.randn(50 * 64, 1, 14, 14), torch.zeros(50 * 64, dtype=torch.int64)
    task = Task(models.build("lenet", (1, 14, 14), 3, seed=0), device=DEVICE)
    check(task, Split(x, y, np.array([0, len(x)])), 3)
    batch = Batch(x.view(50, 64, 1, 14, 14).to(DEVICE), y.view(50, 64).to(DEVICE))
    w = task.w0.expand(50, -1).clone()
    task.descend_(w, batch, 0.1)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    task.descend_(w, batch, 0.1)
    assert torch.cuda.max_memory_allocated() - before < 50 * (8 * 4 * task.p + 2 * 64 * task.net.sample_bytes)


def test_a_cohort_larger_than_the_memory_is_run_in_halves(caplog):
    """1,000 clients at once, as ordered, of which a few hundred fit what this process may take."""
    data = [(np.zeros((64, 1, 28, 28), dtype=np.float32), np.arange(64) % 3)] * 1000
    fed = pf.Federation.from_arrays(data, test_fraction=0)
    settings = {"rounds": 1, "batch_size": 64, "device": DEVICE, "evaluate_every": 0}
    net = models.build("lenet", (1, 28, 28), 3, seed=0)
    small = pf.fit(net, fed, pf.FedAvg(), chunk=50, **settings).trained.server["w"]
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(4e9 / total)
    try:
        whole = pf.fit(net, fed, pf.FedAvg(), chunk=1000, **settings).trained.server["w"]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert any("do not fit the memory" in record.message for record in caplog.records)
    assert torch.allclose(whole, small, atol=1e-5)
