"""Two small convolutional networks for images, the one of McMahan et al. (2017) and FPFC's LeNet, and what models for
images have in common: the input shape as channels, height and width, and grey images given a channel."""

from torch import nn

from polyfed.base.arguments import checked
from polyfed.base.errors import ModelError
from polyfed.base.values import COUNT


def image_shape(input_shape: tuple[int, ...], name: str) -> tuple[int, int, int]:
    """(channels, height, width) of inputs [C, H, W] or [H, W]. Raises ModelError for any other shape."""
    if len(input_shape) == 2:
        return 1, *input_shape
    if len(input_shape) == 3:
        channels, height, width = input_shape
        return channels, height, width
    raise ModelError(
        f"model {name!r} takes images [channels, height, width] or [height, width]; "
        f"these inputs have shape {list(input_shape)} (linear or mlp take any shape)"
    )


def add_channel(input_shape: tuple[int, ...]) -> list[nn.Module]:
    """The layers that give [H, W] images their channel axis; none for [C, H, W]."""
    return [nn.Unflatten(1, (1, input_shape[0]))] if len(input_shape) == 2 else []


def too_small(name: str, height: int, width: int, least: int) -> ModelError:
    """The error for images that leave nothing after the pooling layers."""
    return ModelError(f"model {name!r} takes images of at least {least}x{least}; these are {height}x{width}")


@checked
def cnn(input_shape: tuple[int, ...], outputs: COUNT) -> nn.Module:
    """The CNN of McMahan et al. (2017): 5x5 convolutions of 32 and 64 channels, each with 2x2 pooling, 512 units.

    1,663,370 parameters for 28x28 grey images and 10 classes.
    """
    channels, height, width = image_shape(input_shape, "cnn")
    if min(height, width) < 4:
        raise too_small("cnn", height, width, 4)
    return nn.Sequential(
        *add_channel(input_shape),
        nn.Conv2d(channels, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (height // 4) * (width // 4), 512),
        nn.ReLU(),
        nn.Linear(512, outputs),
    )


@checked
def lenet(input_shape: tuple[int, ...], outputs: COUNT) -> nn.Module:
    """FPFC's network (Yu et al., 2022): 5x5 convolutions of 6 and 16 channels, each with 2x2 pooling, one linear layer.

    6,582 parameters for 28x28 grey images and 10 classes.
    """
    channels, height, width = image_shape(input_shape, "lenet")
    rows, columns = (height // 2 - 4) // 2, (width // 2 - 4) // 2
    if min(rows, columns) < 1:
        raise too_small("lenet", height, width, 12)
    return nn.Sequential(
        *add_channel(input_shape),
        nn.Conv2d(channels, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * rows * columns, outputs),
    )
