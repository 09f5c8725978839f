"""A model is a vector: views of it are its layers, nothing is copied, nothing is lost."""

import pytest
import torch
from torch import nn

from polyfed.base.errors import ModelError
from polyfed.compute.layout import Layout


def network() -> nn.Module:
    below = nn.Conv2d(2, 3, 2), nn.GroupNorm(1, 3), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*below, nn.Linear(12, 5), nn.LayerNorm(5), nn.Linear(5, 4))


def test_views_are_the_vector_itself():
    layout = Layout(network())
    for w in (torch.arange(layout.p, dtype=torch.float32), torch.randn(3, layout.p)):
        views = layout.views(w)
        for i in range(len(w) if w.dim() > 1 else 0):
            assert all(torch.equal(a[i], b) for a, b in zip(views, layout.views(w[i]), strict=True))
        assert sum(v.numel() for v in views) == w.numel()
        assert all(v.untyped_storage().data_ptr() == w.untyped_storage().data_ptr() for v in views)
        for v in views:
            v.fill_(-1)
        assert (w == -1).all(), "some entry of the vector belongs to no layer"


def test_convolution_weights_lie_channels_last():
    module = network()
    layout = Layout(module)
    weight = layout.named(layout.flatten(module))["0.weight"]
    assert weight.shape == module[0].weight.shape
    assert weight.is_contiguous(memory_format=torch.channels_last)


def test_masks_partition_the_vector():
    layout = Layout(network())
    head, body, norm = (layout.mask(part) for part in ("head", "body", "norm"))
    assert torch.equal(head, ~body)
    assert not (head & norm).any()
    assert [int(m.sum()) for m in (head, norm)] == [5 * 4 + 4, 2 * 3 + 2 * 5]  # of the last linear layer; of two norms
    assert torch.equal(layout.mask("head", "norm"), head | norm)
    assert [int(layout.mask(name).sum()) for name in ("4", "4.bias")] == [12 * 5 + 5, 5]
    w = torch.zeros(layout.p)
    layout.named(w)["4.bias"].fill_(1)
    assert torch.equal(w.bool(), layout.mask("4.bias"))
    with pytest.raises(KeyError, match=r"no layer 'fc'; the model has 0\.weight"):
        layout.mask("fc")


@pytest.mark.parametrize(
    ("last", "found"),
    [
        (nn.Linear(3, 2, bias=False), "Linear"),
        (nn.Sequential(nn.Linear(3, 2), nn.Softmax(1)), "Softmax"),
        (nn.Bilinear(3, 3, 2), "Bilinear"),
        (nn.Linear(3, 2).requires_grad_(False), "Linear"),
    ],
)
def test_a_last_layer_that_is_not_linear_with_a_bias_is_refused(last, found):
    layout = Layout(nn.Sequential(nn.Linear(4, 3), last))
    with pytest.raises(ModelError, match=rf"its last layer is {found}.*, expected a trained linear layer with a bias"):
        layout.head(torch.zeros(layout.p))
