"""Convolutions in the compiled kernel: whom it leaves alone, which networks it takes, and where they run."""

import pytest
import torch
from test_kernel import OUT, needed, split_of
from torch import nn

from polyfed import models
from polyfed.compute.batches import Work
from polyfed.compute.compiled import path_of
from polyfed.compute.optimizers import Optimizer
from polyfed.compute.task import Task


def _two():
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 6, 20), nn.ReLU(), nn.Linear(20, OUT),
    )  # fmt: skip


def odd():
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


def _behind(layer):
    return nn.Sequential(nn.Conv2d(1, 4, 3), layer)


UNKNOWN = [
    nn.Conv2d(1, 4, 3, dilation=2), nn.Conv2d(1, 4, 2, padding="same"),
    nn.Conv2d(1, 4, 3, padding=1, padding_mode="circular"),
    *map(_behind, (
        nn.Dropout(), nn.InstanceNorm2d(4), nn.AvgPool2d(2, padding=1), nn.AdaptiveAvgPool2d(2),
        nn.AdaptiveMaxPool2d(1), nn.MaxPool2d(4, ceil_mode=True), nn.Upsample(scale_factor=2),
    )),
]  # fmt: skip


@needed
@pytest.mark.parametrize("layer", UNKNOWN, ids=str)
def test_the_module_trains_what_the_kernel_does_not_know(layer):
    split = split_of(inputs=(1, 9, 9))
    size = nn.Flatten()(layer(split.x[:1].float())).shape[1]
    task = Task(nn.Sequential(layer, nn.Flatten(), nn.Linear(size, OUT)))
    split = task.place(split)
    assert path_of(task.net, None, split) == "client by client"


@needed
def test_settings_that_the_kernel_does_not_know_leave_a_network_to_torch():
    split = split_of(inputs=(1, 8, 12))
    assert path_of(Task(models.build("lenet", (16, 13), OUT)).net, None, split_of(inputs=(16, 13))) == "native"
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
        assert path_of(Task(model, **settings).net, work, split) == "client by client"
