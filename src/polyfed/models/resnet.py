"""ResNet-18 (He et al., 2016) with GroupNorm in place of BatchNorm, as federated work uses it (Reddi et al., 2021)."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from polyfed.base.arguments import checked
from polyfed.base.values import COUNT
from polyfed.models.cnn import add_channel, image_shape

WIDTHS = (64, 128, 256, 512)


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, before: int, after: int, stride: int, groups: int):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, after)
        same = stride == 1 and before == after
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.GroupNorm(groups, after))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class GlobalMean(nn.Module):
    """[b, c, h, w] -> [b, c]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


@checked
def resnet18(
    input_shape: tuple[int, ...],
    outputs: COUNT,
    stem: Literal["cifar", "imagenet"] = "cifar",
    groups: Literal[1, 2, 4, 8, 16, 32, 64] = 2,
    bias: bool | None = None,
) -> nn.Module:
    """ResNet-18 with GroupNorm. stem: "cifar" (3x3, no pooling) or "imagenet" (7x7 stride 2, 3x3 pooling stride 2).

    bias: of the last layer; None: as FedSLR, "imagenet" only. 11,173,952 parameters for CIFAR-10, 11,220,032 for
    CIFAR-100, 11,279,112 for Tiny ImageNet (stem "imagenet").
    """
    channels, _, _ = image_shape(input_shape, "resnet18")
    first: list[nn.Module] = (
        [nn.Conv2d(channels, 64, 3, padding=1, bias=False), nn.GroupNorm(groups, 64), nn.ReLU()]
        if stem == "cifar"
        else [
            nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False),
            nn.GroupNorm(groups, 64),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        ]
    )
    blocks: list[nn.Module] = []
    before = 64
    for after in WIDTHS:
        stride = 1 if after == before else 2
        blocks += [Block(before, after, stride, groups), Block(after, after, 1, groups)]
        before = after
    head = nn.Linear(512, outputs, bias=stem == "imagenet" if bias is None else bias)
    return nn.Sequential(*add_channel(input_shape), *first, *blocks, GlobalMean(), head)
