"""Softmax or linear regression: one linear layer on the flattened input."""

from math import prod

from torch import nn

from polyfed.core.errors import ConfigError, closest

STARTS = {"normal": nn.init.normal_, "zeros": nn.init.zeros_}


def linear(input_shape: tuple[int, ...], outputs: int, bias: bool = True, init: str = "default") -> nn.Module:
    """One linear layer: softmax regression under cross-entropy, linear regression under mse.

    init: "default" is PyTorch's, uniform on +-1/sqrt(inputs); "normal" N(0, 1), as FPFC's released code has it; "zeros"
    """
    if init != "default" and init not in STARTS:
        raise ConfigError(
            f"model.init: found {init!r}{closest(str(init), STARTS)}; known: default, {', '.join(STARTS)}"
        )
    layer = nn.Linear(prod(input_shape), outputs, bias=bias)
    if init != "default":
        for q in layer.parameters():
            STARTS[init](q)
    return nn.Sequential(nn.Flatten(), layer)
