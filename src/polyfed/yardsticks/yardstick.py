"""Yardstick: a row of a comparison that sends nothing. A rule of its own fits its models, which are judged like a
method's."""

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

from torch import Tensor

from polyfed.compute.split import Split
from polyfed.compute.task import Task
from polyfed.core.algorithm import Contender

Outputs = Callable[[Tensor], Tensor]  # inputs [b, ...] -> a model's outputs, in the targets' own units


class Yardstick(Contender, abstract=True):
    """Base of all yardsticks; `role` is "yardstick" for what a site can have, "oracle" for what no site can."""

    role: ClassVar[Literal["yardstick", "oracle"]] = "yardstick"

    def check(self, task: Task) -> None:
        """Raise ConfigError, in one line, where the yardstick does not fit the methods' task."""

    def fit(self, train: Split, classes: int | None, pooled: Callable[[float], Outputs]) -> Sequence[Outputs]:
        """Fit a model for every client: [n] of inputs [b, ...] -> outputs. classes: None for numbers

        pooled: step size -> the run's model, trained as the run trains on all clients' samples together.
        """
        raise NotImplementedError
