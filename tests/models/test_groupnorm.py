"""BatchNorm is replaced everywhere, on a copy, with its scale and shift."""

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.base.errors import ConfigError, ModelError
from polyfed.models import replace_batchnorm


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        shared = nn.BatchNorm2d(6)
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3), shared, nn.ReLU(), nn.ModuleDict({"norm": shared})["norm"])
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(6 * 6 * 6, 5), nn.BatchNorm1d(5, affine=False))

    def forward(self, x):
        return self.head(self.body(x))


def norms(model, kind):
    return [m for m in model.modules() if isinstance(m, kind)]


def test_no_batchnorm_is_left_and_the_outputs_are_finite():
    model = Nested()
    nn.init.uniform_(model.body[1].weight)
    with pytest.raises(ModelError, match="replace_batchnorm"):
        pf.Task(model)
    made = replace_batchnorm(model)
    assert not norms(made, nn.modules.batchnorm._BatchNorm)
    assert len(norms(model, nn.modules.batchnorm._BatchNorm)) == 2, "the model itself must not change"
    assert made.body[1] is made.body[3], "a layer used twice stays one layer"
    assert torch.equal(made.body[1].weight, model.body[1].weight)
    assert made.body[1].weight is not model.body[1].weight
    assert (made.body[1].num_groups, made.head[2].num_groups, made.head[2].affine) == (2, 1, False)
    for batch in (1, 4):
        assert torch.isfinite(made(torch.randn(batch, 3, 8, 8))).all()
    assert pf.Task(made).p == pf.Task(nn.Sequential(made)).p


@pytest.mark.parametrize(
    ("channels", "groups", "made"), [(64, 2, 2), (64, 32, 32), (6, 4, 3), (7, 4, 1), (1, 2, 1), (2, 2, 1), (30, 32, 15)]
)
def test_the_groups_divide_the_channels(channels, groups, made):
    layer = replace_batchnorm(nn.BatchNorm1d(channels), groups)
    assert isinstance(layer, nn.GroupNorm)
    assert (layer.num_groups, layer.num_channels) == (made, channels)


def test_precision_training_mode_and_frozen_parameters_are_kept():
    layer = nn.BatchNorm2d(4, eps=1e-3).double().eval()
    layer.weight.requires_grad_(False)
    made = replace_batchnorm(layer)
    assert isinstance(made, nn.GroupNorm)
    assert (made.weight.dtype, made.training, made.eps) == (torch.float64, False, 1e-3)
    assert (made.weight.requires_grad, made.bias.requires_grad) == (False, True)


def test_what_cannot_be_replaced_is_said():
    with pytest.raises(ConfigError, match="groups: found 0"):
        replace_batchnorm(nn.BatchNorm2d(4), 0)
    with pytest.raises(ModelError, match="run the model once"):
        replace_batchnorm(nn.LazyBatchNorm2d())
