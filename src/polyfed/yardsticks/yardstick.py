"""Yardstick: a row of a comparison that exchanges nothing and whose model is not the run's vector.

`runs/measured.py` fits one and has its outputs judged. The event loop sees a method that does nothing.
"""

from typing import ClassVar, Literal

from torch import Tensor

from polyfed.base.errors import ConfigError
from polyfed.compute.task import Task
from polyfed.core.algorithm import Algorithm, Down, State


class Yardstick(Algorithm, abstract=True):
    """Base of all yardsticks; `role` is "yardstick" for what a site can have, "oracle" for what nobody can."""

    role: ClassVar[Literal["yardstick", "oracle"]] = "yardstick"
    step_sizes = ()

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

    def init_server(self, task: Task, w0: Tensor, n: int) -> State:
        return {}

    def downlink(self, server: State, round: object) -> Down:
        return Down()

    def personal(self, client: State, down: State) -> Tensor:
        raise ConfigError(f"{self.name} is a yardstick: it has results, and no torch model to deploy")
