"""Yardstick: a row of a comparison that sends nothing. A rule of its own fits its models, which are judged like a
method's; the pooled model, an oracle, is the run's own trained on everybody's data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from polyfed.base.settings import setting
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


@dataclass(frozen=True)
class PooledOracle(Yardstick):
    """One model trained on all clients' samples together, as one client would train it. Not available in practice.

        w <- w - lr * grad f(w),    f the mean loss over everybody's samples

    Notes
    -----
    It trains for the run's rounds, with the run's epochs or local steps, its batch size and its optimiser; every client
    takes part in every round, and attacks, robust rules and schedules do not apply. No bytes are counted: no protocol
    would move the data themselves.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of SGD.")

    name = "pooled-oracle"
    role = "oracle"

    def fit(self, train: Split, classes: int | None, pooled: Callable[[float], Outputs]) -> Sequence[Outputs]:
        return [pooled(self.lr)] * train.n
