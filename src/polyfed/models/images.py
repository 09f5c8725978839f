"""Common parts of models for images: the input shape as channels, height and width, and grey images given a channel."""

from torch import nn

from polyfed.base.errors import ModelError


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
