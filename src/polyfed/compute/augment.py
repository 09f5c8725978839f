"""Augmentation of training batches: keyed draws per sample, on the samples' own device, without a loop over samples.
The key is of (seed, round, client, step, sample): neither chunk, order nor engine changes what a sample becomes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from polyfed.base.errors import ConfigError
from polyfed.base.randomness import uniform
from polyfed.base.registry import Registry
from polyfed.base.settings import Configured, found, setting


class Draws:
    """Uniform draws for N samples of keys [N] uint64: each depends on the key and on how many were drawn before."""

    def __init__(self, keys: np.ndarray, device: torch.device | str = "cpu"):
        self._keys, self._device, self._drawn = keys, device, 0

    def uniform(self) -> Tensor:
        """[N] float64 in [0, 1); another draw with every call."""
        self._drawn += 1
        return torch.as_tensor(uniform(self._keys, self._drawn), device=self._device)


Augmentation = Callable[[Tensor, Draws], Tensor]


@dataclass(frozen=True)
class Flip(Configured):
    """Mirror left and right with probability `p`. x: [N, C, H, W] -> the same shape."""

    table: ClassVar[str] = "augment"
    p: float = setting(0.5, ge=0, le=1, doc="Probability of an image to be changed.")

    def __call__(self, x: Tensor, draws: Draws) -> Tensor:
        return torch.where((draws.uniform() < self.p)[:, None, None, None], x.flip(-1), x)


@dataclass(frozen=True)
class Crop(Configured):
    """Pad with zeros on every side and cut the old size out at a random place. x: [N, C, H, W] -> the same shape."""

    table: ClassVar[str] = "augment"
    padding: int = setting(4, ge=1, doc="Zeros on every side.")
    p: float = setting(1.0, ge=0, le=1, doc="Probability of an image to be changed.")

    def __call__(self, x: Tensor, draws: Draws) -> Tensor:
        height, width = x.shape[-2:]
        cut = draws.uniform() < self.p
        row, inside_rows = self._source(draws.uniform(), cut, height)
        column, inside_columns = self._source(draws.uniform(), cut, width)
        at = (row[:, :, None] * width + column[:, None, :]).flatten(1)
        cropped = x.flatten(2).gather(2, at[:, None].expand(-1, x.shape[1], -1)).view_as(x)
        # zero in the units of x: where inputs are normalised, the mean
        return cropped.masked_fill(~(inside_rows[:, :, None] & inside_columns[:, None, :])[:, None], 0)

    def _source(self, u: Tensor, cut: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """[N, size] the position that every position is taken from, and True where it lies inside the image."""
        shift = torch.where(cut, (u * (2 * self.padding + 1)).long() - self.padding, 0)
        position = torch.arange(size, device=u.device) + shift[:, None]
        return position.clamp(0, size - 1), (position >= 0) & (position < size)


@dataclass(frozen=True)
class Steps:
    """Augmentations one after another."""

    steps: tuple[Flip | Crop, ...]

    def __call__(self, x: Tensor, draws: Draws) -> Tensor:
        for step in self.steps:
            x = step(x, draws)
        return x


AUGMENTATIONS: Registry[type[Flip] | type[Crop]] = Registry("augment")
AUGMENTATIONS.add("flip", Flip)
AUGMENTATIONS.add("crop", Crop)


def augmentation(given: str | Augmentation | None, shape: Sequence[int]) -> Augmentation | None:
    """The `augment` of `fit`, checked against the inputs' shape [C, H, W]. Raises ConfigError where it does not fit."""
    if not isinstance(given, str):
        if given is None or callable(given):
            return given
        raise ConfigError(f"augment: {found(given, EXPECTED)}")
    steps = steps_of(given)
    if len(shape) != 3:
        raise ConfigError(f"augment: {given!r} needs images [channels, height, width]; inputs are of shape {[*shape]}")
    for step in steps:
        if isinstance(step, Crop) and step.padding >= min(shape[1:]):
            raise ConfigError(f"augment: found {given!r}, expected a crop below the images' size, {[*shape[1:]]}")
    return Steps(steps)


EXPECTED = "steps joined by '+', such as 'flip+crop:4' or 'flip+crop:4,p=0.5', or a callable"


def steps_of(given: str) -> tuple[Flip | Crop, ...]:
    """The steps of a text, for any images. Raises ConfigError for a text that has none."""
    try:
        return tuple(AUGMENTATIONS.read(part.strip(), "augment") for part in given.split("+"))
    except ConfigError as e:
        raise ConfigError(f"{e}; an augmentation is {EXPECTED}") from None
