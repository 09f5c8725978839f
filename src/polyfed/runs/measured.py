"""A yardstick's run: its scores are those of any run; what gave them is no vector of a torch model, but its answers."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from threadpoolctl import threadpool_limits  # pyright: ignore[reportMissingTypeStubs]
from torch import Tensor

from polyfed.compute import evaluation
from polyfed.compute.split import Split, restored
from polyfed.compute.task import Task
from polyfed.data.federation import Federation
from polyfed.runs.result import Result, splits
from polyfed.runs.trained import raw
from polyfed.yardsticks.own import Own

EVERYBODY = "everybody"  # the one client of a pooled training


@dataclass(frozen=True, eq=False)
class Answers:
    """What a yardstick answers for every client's samples, by split: [n] tensors; none where it diverged."""

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

    def answers(self, test: Split) -> Iterator[tuple[int, Tensor]]:
        for i, t in enumerate(self.outputs.get("test", ())):
            if len(t):
                yield i, t.to(self.task.device, self.task.dtype)

    def digest(self) -> str:
        found = hashlib.sha256()
        for t in self.outputs.get("test", ()):
            if len(t):
                found.update(raw(t.to(self.task.device, self.task.dtype)))
        return found.hexdigest()


def fitted(yardstick: Own, fed: Federation) -> dict[str, list[Tensor]]:
    """The outputs of what every client fits on its own samples."""
    found: dict[str, list[Tensor]] = {name: [] for name in splits(fed)}
    with threadpool_limits(1):  # a pool of threads would not survive the fork of the next run
        for i in range(fed.n):
            weight = None if fed.train.shares is None else fed.train.shares[fed.train.rows(i)]
            answers = yardstick.fitted(*fed.train.client(i), fed.classes, weight)
            for name, split in splits(fed).items():
                found[name].append(answers(split.client(i)[0]))
    return found


def answered(run: Result, task: Task, fed: Federation) -> dict[str, list[Tensor]]:
    """The outputs of the one model of a pooled training for every client's samples."""
    w, unit = run.personal[0], run.federation.train.units([0])
    return {
        name: [restored(task.outputs(w, x.to(task.device)).cpu(), unit) for x, _ in map(split.client, range(fed.n))]
        for name, split in splits(fed).items()
    }


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
    )  # fmt: skip
