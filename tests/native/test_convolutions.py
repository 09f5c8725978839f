"""Convolutions in the compiled kernel: whom it leaves alone, which networks it takes, and where they run."""

import numpy as np
import pytest
import torch
from test_kernel import OUT, SIZES, batches, needed
from torch import nn

import polyfed as pf
from polyfed import models
from polyfed.base.errors import RunError
from polyfed.compute.batches import Work
from polyfed.compute.compiled import path_of
from polyfed.compute.optimizers import Optimizer
from polyfed.compute.solvers import local_sgd
from polyfed.compute.split import Split
from polyfed.compute.task import Task

WORK = Work(epochs=2, batch_size=5)


def _two():
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 6, 20), nn.ReLU(), nn.Linear(20, OUT),
    )  # fmt: skip


def _odd():
    """Windows, zeros, cells and channels of no square and no vector, sums across both, activations in either order."""
    act = nn.Tanh()
    return nn.Sequential(
        nn.Conv2d(2, 5, (3, 2), padding=(1, 0)), act, nn.MaxPool2d((2, 3)),
        nn.Sequential(nn.Conv2d(5, 17, 2, bias=False), nn.Identity(), nn.Sigmoid()),
        nn.Conv2d(17, 33, (1, 3), padding="same"), nn.MaxPool2d((1, 2)), nn.ReLU(),
        nn.Flatten(), nn.Linear(33 * 4, 9), act, nn.Linear(9, OUT),
    )  # fmt: skip


def net(make=_two):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return make()


def split_of(shape, sizes=SIZES):
    rng = np.random.default_rng(0)

    def client(n):
        return torch.tensor(rng.normal(size=(n, *shape))), torch.tensor(rng.integers(0, OUT, n))

    return Split.of([client(n) for n in sizes])


@needed
def test_a_client_comes_out_the_same_whoever_is_trained_with_it_and_a_diverging_one_is_seen():
    task = Task(net(_odd))
    split = task.place(split_of((2, 11, 10)))
    w = task.w0 + 0.02 * torch.randn(len(SIZES), task.p)
    lr = torch.full((len(SIZES), 1), 0.05)
    calm = local_sgd(task, w, batches(split, WORK, True), lr)
    lr[1] = 1e30
    found = local_sgd(task, w, batches(split, WORK, True), lr)
    assert found[1].isnan().any()
    for i in (0, 2, 3, 4):
        alone = local_sgd(task, w[[i]], batches(split, WORK, True, [i]), 0.05)[0]
        assert torch.equal(found[i], calm[i])
        assert torch.equal(alone, calm[i])


def _behind(layer):
    return nn.Sequential(nn.Conv2d(1, 4, 3), layer)


UNKNOWN = [
    nn.Conv2d(1, 4, 3, stride=2), nn.Conv2d(1, 4, 3, dilation=2), nn.Conv2d(1, 4, 2, padding="same"),
    nn.Conv2d(1, 4, 3, padding=1, padding_mode="circular"), nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(1, 4, 3)),
    *map(_behind, (
        nn.GELU(), nn.Dropout(), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3, groups=2), nn.AvgPool2d(2),
        nn.MaxPool2d(3, 2), nn.MaxPool2d(2, padding=1), nn.MaxPool2d(4, ceil_mode=True),
        nn.Sequential(nn.ReLU(), nn.Sigmoid()),
    )),
]  # fmt: skip


@needed
@pytest.mark.parametrize("layer", UNKNOWN, ids=str)
def test_the_module_trains_what_the_kernel_does_not_know(layer):
    split = split_of((1, 9, 9))
    size = nn.Flatten()(layer(split.x[:1].float())).shape[1]
    task = Task(nn.Sequential(layer, nn.Flatten(), nn.Linear(size, OUT)))
    split = task.place(split)
    assert path_of(task, None, split) == "client by client"


@needed
def test_settings_that_the_kernel_does_not_know_leave_a_network_to_torch():
    split = split_of((1, 8, 12))
    assert path_of(Task(models.build("lenet", (16, 13), OUT)), None, split_of((16, 13))) == "native"
    frozen = net()
    frozen[0].bias.requires_grad_(False)
    twice = nn.Conv2d(1, 1, 3, padding=1)
    for model, settings, work in (
        (net(), {"optimizer": Optimizer("momentum")}, None),
        (net(), {"class_weights": [2.0] * OUT}, None),
        (net(), {"bf16": True}, None),
        (net(), {"loss": nn.functional.cross_entropy}, None),
        (net(), {}, Work(augment=lambda x, draws: x)),
        (frozen, {}, None),
        (nn.Sequential(twice, nn.ReLU(), twice, nn.Flatten(), nn.Linear(96, OUT)), {}, None),
    ):
        assert path_of(Task(model, **settings), work, split) == "client by client"


@needed
def test_a_run_on_images_goes_on_only_by_the_path_it_began_on(tmp_path, monkeypatch):
    split = split_of((1, 8, 12), sizes=(13, 6, 3))
    parts = [(x.float().numpy(), y.numpy()) for x, y in (split.client(c) for c in range(split.n))]
    fed, whole = pf.Federation.from_arrays(parts, parts, classes=OUT), {}
    for switch, path in (("1", "native"), ("0", "client by client")):
        monkeypatch.setenv("POLYFED_NATIVE", switch)
        run = pf.fit(net(), fed, pf.FedAvg(lr=0.1), rounds=1, batch_size=5, out=tmp_path / switch)
        assert run.trained.engine.plan.path == path
        whole[switch] = pf.fit(net(), fed, pf.FedAvg(lr=0.1), rounds=2, batch_size=5).personal
    with pytest.raises(RunError, match="by the path 'native', here it is 'client by client'"):
        pf.fit(net(), fed, pf.FedAvg(lr=0.1), rounds=2, batch_size=5, out=tmp_path / "1", resume=True)
    monkeypatch.setenv("POLYFED_NATIVE", "1")
    for switch in "01":
        run = pf.fit(net(), fed, pf.FedAvg(lr=0.1), rounds=2, batch_size=5, out=tmp_path / switch, resume=True)
        assert torch.equal(run.personal, whole[switch])
