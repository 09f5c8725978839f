"""Linear models, and multilayer perceptrons: by default one hidden layer of 200, as in much federated work on MNIST."""

from itertools import pairwise
from math import prod
from typing import Annotated, Literal

from torch import nn

from polyfed.base.arguments import checked
from polyfed.base.errors import ModelError
from polyfed.base.values import COUNT, Limits, Words

LARGEST = 10**9  # weights
SIZE = 8  # numbers that a letter becomes, as in LEAF's model of Shakespeare
LETTERS = Annotated[int, Limits(ge=0, le=1_000_000)]
WIDTH = Annotated[int, Limits(ge=1, le=100_000), Words("widths from 1 to 100000, such as [200]")]
ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid}


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


@checked
def mlp(
    input_shape: tuple[int, ...],
    outputs: COUNT,
    hidden: WIDTH | Annotated[tuple[WIDTH, ...], Words("widths from 1 to 100000, such as [200]")] = (200,),
    activation: Literal["relu", "tanh", "sigmoid"] = "relu",
    letters: LETTERS = 0,
) -> nn.Module:
    """Linear layers of the given hidden widths with an activation (relu, tanh, sigmoid) after each but the last.

    letters: inputs from 0 to letters - 1 stand for letters, each of which becomes 8 numbers.
    """
    first: list[nn.Module] = [nn.Embedding(letters, SIZE)] if letters else []
    widths = [prod(input_shape) * (SIZE if letters else 1), *([hidden] if isinstance(hidden, int) else hidden)]
    size = sum(before * after for before, after in pairwise([*widths, outputs]))
    if size > LARGEST:
        raise ModelError(f"model.hidden of mlp: found {size} weights in all, expected at most {LARGEST}")
    layers: list[nn.Module] = [*first, nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], outputs))
