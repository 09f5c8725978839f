"""Softmax or linear regression: one linear layer on the flattened input."""

from math import prod
from typing import Literal

from torch import nn

from polyfed.base.arguments import checked
from polyfed.base.values import COUNT

STARTS = {"normal": nn.init.normal_, "zeros": nn.init.zeros_}


@checked
def linear(
    input_shape: tuple[int, ...],
    outputs: COUNT,
    bias: bool = True,
    init: Literal["default", "normal", "zeros"] = "default",
) -> nn.Module:
    """One linear layer: softmax regression under cross-entropy, linear regression under mse.

    init: "default" is PyTorch's, uniform on +-1/sqrt(inputs); "normal" N(0, 1), as FPFC's released code has it; "zeros"
    """
    layer = nn.Linear(prod(input_shape), outputs, bias=bias)
    if init != "default":
        for q in layer.parameters():
            STARTS[init](q)
    return nn.Sequential(nn.Flatten(), layer)
