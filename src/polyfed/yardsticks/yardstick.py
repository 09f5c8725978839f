"""Yardstick: a row of a comparison that sends nothing. Its models are fitted by a rule of its own; their answers are
judged like a method's.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

from torch import Tensor

from polyfed.compute.split import Split
from polyfed.compute.task import Task
from polyfed.core.algorithm import Contender

Outputs = Callable[[Tensor], Tensor]  # inputs [b, ...] -> what a model puts out, in the targets' own units


class Yardstick(Contender, abstract=True):
    """Base of all yardsticks; `role` is "yardstick" for what a site can have, "oracle" for what no site can."""

    role: ClassVar[Literal["yardstick", "oracle"]] = "yardstick"

    def check(self, task: Task) -> None:
        """Refuse what cannot be measured.

        Parameters
        ----------
        task : Task
            Model and loss of the methods beside it.

        Raises
        ------
        ConfigError
            In one line, what does not fit.
        """

    def fit(self, train: Split, classes: int | None, pooled: Callable[[float], Outputs]) -> Sequence[Outputs]:
        """Fit a model for every client.

        Parameters
        ----------
        train : Split
            The clients' training samples.
        classes : int or None
            Number of classes; None for numbers.
        pooled : callable
            Step size -> the run's model, trained as the run trains on all clients' samples together.

        Returns
        -------
        sequence of callable
            [n] of inputs [b, ...] -> outputs.
        """
        raise NotImplementedError
