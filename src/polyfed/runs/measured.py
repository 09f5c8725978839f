"""Measured: the Run of a yardstick. Its results are those of any run; what gave them is no vector of a torch model."""

import dataclasses
import hashlib
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
from threadpoolctl import threadpool_limits  # pyright: ignore[reportMissingTypeStubs]
from torch import Tensor

from polyfed.algorithms.local import Local
from polyfed.compute import evaluation
from polyfed.compute.split import Split, restored
from polyfed.data.federation import Federation
from polyfed.runs.result import Run, raw, splits
from polyfed.yardsticks import PooledOracle, Yardstick
from polyfed.yardsticks.own import Own

if TYPE_CHECKING:
    from polyfed.runs.trainer import Trainer

EVERYBODY = "everybody"  # the one client of a pooled training


class Measured(Run):
    """A run of a yardstick: `outputs` are what it answers for every client's samples, by split."""

    outputs: Mapping[str, list[Tensor]]

    def measure(self, trainer: "Trainer") -> None:
        """Fit the yardstick and keep its outputs. A pooled model is trained in a run folder of its own, `training`."""
        yardstick, start = self.loop.algorithm, time.perf_counter()
        if isinstance(yardstick, PooledOracle):
            self.outputs = self._pooled(yardstick, trainer)
        else:
            assert isinstance(yardstick, Own)
            self.outputs = self._own(yardstick)
            self.seconds += time.perf_counter() - start

    def _own(self, yardstick: Own) -> dict[str, list[Tensor]]:
        fed = self.federation
        found: dict[str, list[Tensor]] = {name: [] for name in splits(fed)}
        with threadpool_limits(1):  # a pool of threads would not survive the fork of the next run
            for i in range(fed.n):
                weight = None if fed.train.shares is None else fed.train.shares[fed.train.rows(i)]
                answers = yardstick.fitted(*fed.train.client(i), fed.classes, weight)
                for name, split in splits(fed).items():
                    found[name].append(answers(split.client(i)[0]))
        return found

    def _pooled(self, yardstick: PooledOracle, trainer: "Trainer") -> dict[str, list[Tensor]]:
        from polyfed.runs.fit import fit

        task, fed = trainer.task, self.federation
        how = dataclasses.replace(
            trainer.training, fraction=1.0, schedule=None, attack=None, robust=None, chunk=None, evaluate_every=0
        )
        run = fit(
            task.module(task.w0), together(fed), Local(yardstick.lr), how,
            out=self.folder and self.folder / "training", resume=True, callbacks=[lambda _: None],
        )  # fmt: skip
        self.loop.t, self.seconds, w = run.rounds, run.seconds, run.personal[0]
        unit = run.federation.train.units([0])
        return {
            name: [restored(task.outputs(w, x.to(task.device)).cpu(), unit) for x, _ in map(split.client, range(fed.n))]
            for name, split in splits(fed).items()
        }

    def scored(self, name: str) -> dict[str, np.ndarray]:
        if not hasattr(self, "outputs"):  # it diverged
            return {m: np.full(self.federation.n, np.nan) for m in ("loss", *(str(m) for m in self.metrics))}
        split = splits(self.federation)[self._split(name)]
        targets = [split.client(i)[1].cpu() for i in range(self.federation.n)]
        units = [split.units([i]) for i in range(self.federation.n)]
        return evaluation.judged(self.loop.task, self.outputs[name], targets, units)

    def answers(self, block: int = 0) -> Iterator[tuple[int, Tensor]]:
        task = self.loop.task
        for i, t in enumerate(getattr(self, "outputs", {}).get("test", ())):
            if len(t):
                yield i, t.to(task.device, task.dtype)

    @property
    def deploys(self) -> str:
        yardstick = self.loop.algorithm
        assert isinstance(yardstick, Yardstick)
        return yardstick.role

    def digest_of_models(self, block: int = 0) -> str:
        found = hashlib.sha256()
        for _, t in self.answers():
            found.update(raw(t))
        return found.hexdigest()


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
