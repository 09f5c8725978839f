"""A yardstick's run: its scores are those of any run; what gave them is no vector of a torch model, but its answers."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from threadpoolctl import threadpool_limits
from torch import Tensor

from polyfed.base.errors import ConfigError
from polyfed.compute import evaluation
from polyfed.compute.split import Split
from polyfed.compute.task import Task
from polyfed.core.algorithm import Algorithm, Contender, Down, Round, State
from polyfed.data.federation import Federation
from polyfed.data.shared import NAME
from polyfed.runs.result import splits
from polyfed.runs.trained import raw
from polyfed.yardsticks.yardstick import Outputs, Yardstick

EVERYBODY = "everybody"  # the one client of a pooled training


@dataclass(frozen=True, eq=False)
class Answers:
    """Answers of a yardstick for every client's samples, by split: [n] tensors; none where it diverged."""

    task: Task
    federation: Federation
    deploys: str
    outputs: Mapping[str, list[Tensor]]

    def scored(self, split: str) -> dict[str, np.ndarray]:
        if not self.outputs:
            return {m: np.full(self.federation.n, np.nan) for m in ("loss", *(str(m) for m in self.task.scores))}
        data, everyone = splits(self.federation)[split], range(self.federation.n)
        targets, units = [data.client(i)[1].cpu() for i in everyone], [data.units([i]) for i in everyone]
        return evaluation.judged(self.task, self.outputs[split], targets, units)

    def shared(self, rows: Split) -> dict[str, np.ndarray]:
        outputs, y = self.outputs.get(NAME, ()), rows.y.cpu()
        return evaluation.judged(self.task, outputs, [y] * len(outputs), [rows.units([0])] * len(outputs))

    def answers(self, test: Split) -> Iterator[tuple[int, Tensor]]:
        for i, t in enumerate(self.outputs.get("test", ())):
            if len(t):
                yield i, t.to(self.task.device, self.task.dtype)

    def digest(self) -> str:
        sha = hashlib.sha256()
        for t in self.outputs.get("test", ()):
            if len(t):
                sha.update(raw(t.to(self.task.device, self.task.dtype)))
        return sha.hexdigest()


@dataclass(frozen=True)
class Unsent(Algorithm, abstract=True):
    """A method without state and messages, in the place of a yardstick in the event loop. of: its name"""

    name: ClassVar[str] = "a yardstick"

    of: str

    def init_server(self, task: Task, w0: Tensor, n: int) -> State:
        return {}

    def downlink(self, server: State, round: Round) -> Down:
        return Down()

    def personal(self, task: Task, client: State, down: State) -> Tensor:
        raise ConfigError(f"{self.of} is a yardstick: it has results, and no torch model to deploy")


def looped(entry: Contender) -> Algorithm:
    """Return what the event loop runs for a row: the method itself, or an empty one."""
    return entry if isinstance(entry, Algorithm) else Unsent(entry.name)


def outputs_of(yardstick: Yardstick, fed: Federation, pooled: Callable[[float], Outputs]) -> dict[str, list[Tensor]]:
    """Fit a yardstick and return its answers for every client's samples. pooled: see `Yardstick.fit`"""
    with threadpool_limits(1):  # a pool of threads would not survive the fork of the next run
        models = yardstick.fit(fed.train, fed.classes, pooled)
        return {
            name: [answers(split.client(i)[0]) for i, answers in enumerate(models)]
            for name, split in splits(fed).items()
        } | ({} if fed.shared is None else {NAME: [answers(fed.shared.x) for answers in models]})


def together(federation: Federation) -> Federation:
    """One client that has everybody's samples."""

    def pooled(split: Split) -> Split:
        unit = split.unit  # of clients with units of their own, targets are trained on as they are
        one = None if unit is None or not (unit == unit[:1]).all() else unit[:1]
        return Split(split.x, split.y, np.array([0, len(split.x)]), one, split.shares)

    validation = federation.validation
    return Federation(
        pooled(federation.train), pooled(federation.test), (EVERYBODY,),
        None if validation is None else pooled(validation), federation.classes, meta={"partition": "pooled"},
        tokens=federation.tokens,
    )  # fmt: skip
