"""Trainer: a run that is ready to begin. `prepare` puts its parts together and checks them, `Trainer.run` trains."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from polyfed.core import checkpoint
from polyfed.core.algorithm import Algorithm, outlined
from polyfed.core.algorithm import check as check_algorithm
from polyfed.core.augment import augmentation
from polyfed.core.batches import Work
from polyfed.core.check import check
from polyfed.core.compiled import PATH, path_of
from polyfed.core.engine import Engine, Silent
from polyfed.core.errors import ConfigError, Diverged, RunError
from polyfed.core.losses import Loss
from polyfed.core.randomness import client_keys
from polyfed.core.rounds import Loop, refuse_late
from polyfed.core.rows import Rows
from polyfed.core.schedule import Schedule, Uniform
from polyfed.core.settings import kebab
from polyfed.core.split import Split
from polyfed.core.task import Task
from polyfed.core.typed import plain
from polyfed.core.worker import Plan
from polyfed.data.federation import Federation
from polyfed.engines.local import LocalEngine, check_rows, cores, make_plan, make_rows, pick_device
from polyfed.experiment.folder import RunFolder, versions
from polyfed.experiment.history import grouping, record
from polyfed.experiment.measured import Measured
from polyfed.experiment.rehearsal import adds_up, check_optimizer, check_robust
from polyfed.experiment.resume import continue_from, digest
from polyfed.experiment.run import Run, splits
from polyfed.experiment.start import start_from
from polyfed.experiment.steps import between_evaluations, local_steps_of, recorded
from polyfed.experiment.stop import interruptible
from polyfed.experiment.training import Training
from polyfed.experiment.watching import Callback, Progress
from polyfed.experiment.weights import noted, weights_of
from polyfed.threats import Attack, Forging
from polyfed.yardsticks import Yardstick

Saved = tuple[dict[str, Any], dict[str, Any], list[str]]  # a checkpoint: tensors, what is said of them, warnings


@dataclass(frozen=True)
class Trainer:
    """Everything that a run needs; nothing has been trained or written yet. `prepare` makes one.

    Parameters
    ----------
    task : Task
        Model and loss.
    federation : Federation
        The clients; under an attack on labels, with their labels changed.
    algorithm : Algorithm
        The method.
    training : Training
        With every setting resolved.
    work : Work
        What a client does in a round.
    schedule : Schedule
        Who takes part and when.
    cohort : int
        Clients in a round, at most.
    plan : Plan
        How clients are run on this machine.
    attackers : array [n] of bool
        Who attacks.
    note : str or None
        A line for the log about the robust rule.
    start : Run or None
        The run to start from.
    describe : dict
        Further tables of config.toml.
    elsewhere : callable or None
        Makes the engine where the clients are not here, and the federation is an outline.
    billed : array or None
        [3, n] messages, bytes down and bytes up before the first round.
    """

    task: Task
    federation: Federation
    algorithm: Algorithm
    training: Training
    work: Work
    schedule: Schedule
    cohort: int
    plan: Plan
    attackers: np.ndarray
    note: str | None = None
    start: Run | None = None
    describe: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    elsewhere: "Callable[[Trainer], Engine] | None" = None
    billed: np.ndarray | None = None

    def run(self, out: str | Path | None = None, resume: bool = False, callbacks: Sequence[Callback] = ()) -> Run:
        """Train.

        Parameters
        ----------
        out : str, Path or None
            Run folder, new or empty; without it nothing is written.
        resume : bool
            Continue from the checkpoint in `out`, if there is one.
        callbacks : sequence of callable
            Called with a `Progress` after every round; one that returns True ends the run.

        Returns
        -------
        Run
            The trained state and everything that was measured on the way.
        """
        store = RunFolder(Path(out), self.training.checkpoint_every) if out is not None else None
        with store.locked() if store is not None else contextlib.nullcontext():
            saved = None if store is None else _saved(store, resume)
            data: dict[str, Split] = splits(self.federation)
            if self.elsewhere is None:
                data = {name: self.task.place(split) for name, split in data.items()}
            loop = self._loop(data, store, saved)
            first = loop.t
            kind = Measured if isinstance(self.algorithm, Yardstick) else Run
            run = kind(loop, self.federation, self._settings(loop), folder=store.path if store else None)
            if saved is not None and store is not None:
                continue_from(run, store, *saved)
            elif self.billed is not None:
                exchanges, down, up = self.billed
                zero = np.zeros(loop.n)
                loop.ledger.record(-1, np.arange(loop.n), exchanges, down, up, zero, zero)
            if store is not None:
                store.begin(run, fresh=saved is None)
                for line in filter(None, (run.plan, self.note)):
                    store.log(line)
            return _Session(run, first, data, store, callbacks, self).train()

    def _loop(self, data: dict[str, Split], store: RunFolder | None, saved: Saved | None) -> Loop:
        """The event loop before its first round, or with the state of `start`."""
        t, task, names = self.training, self.task, self.federation.names
        keys = client_keys(names)
        planned = saved is not None and t.chunk is None and t.workers is None
        plan = self.plan
        if planned and saved is not None:
            before = Plan(**saved[1]["fingerprint"]["plan"])
            gone = before.path == PATH != plan.path
            plan = dataclasses.replace(before, path=plan.path) if gone else before
        added = t.robust is None and adds_up(self.algorithm, self.cohort * task.p)
        place = store.path if store else None
        rows = partial(make_rows, self.algorithm, task, len(names), self.cohort, place, saved and saved[0], added)
        engine = self._engine(data, rows, plan, place) if self.elsewhere is None else self.elsewhere(self)
        forge = None if t.attack is None else Forging(t.attack, keys, t.seed)
        loop = Loop(
            task, data["train"].counts, names, self.algorithm, self.schedule, engine, t.seed, t.step_sizes,
            forge, t.robust,
        )  # fmt: skip
        if self.start is not None:
            start_from(loop, self.start)
        return loop

    def _engine(self, data: dict[str, Split], rows: Callable[[], Rows], plan: Plan, folder: Path | None) -> Engine:
        t, task, names = self.training, self.task, self.federation.names
        if t.engine == "local":
            return LocalEngine(task, data, rows(), client_keys(names), self.work, t.seed, plan, t.step_sizes)
        try:
            from polyfed.engines.ray import RayEngine
        except ImportError:
            raise ConfigError("engine: ray is not installed; pip install 'polyfed[ray]'") from None
        make = partial(_checked, t, task.model, task.loss, task.device, plain(task.class_weights), task.found)
        return RayEngine(
            make, dict(splits(self.federation)), names, self.algorithm, self.work, t.seed, plan, t.step_sizes,
            workers=t.workers or min(cores(), len(names)), folder=folder and folder / "rows", address=t.address,
        )  # fmt: skip

    def _settings(self, loop: Loop) -> dict[str, Any]:
        """The run's config.toml."""
        start, method, loss = self.start, dataclasses.asdict(self.algorithm), self.training.loss
        settings: dict[str, Any] = {
            **self.training.dump(),
            "local-steps": recorded(self.work.steps),
            "loss": loss if isinstance(loss, str) else getattr(loss, "__name__", "callable"),
            "rounds": loop.t + self.training.rounds,
            "start": None if start is None else {"algorithm": start.loop.algorithm.name, "rounds": start.loop.t},
            "algorithm": {"name": self.algorithm.name} | {kebab(k): v for k, v in method.items()},
            "model": {"name": type(self.task.model).__name__, "parameters": self.task.p},
            "data": {"clients": self.federation.n, "digest": digest(self.federation)},
            "plan": dataclasses.asdict(loop.engine.plan),
            "versions": versions(),
        }
        for key, value in self.describe.items():
            known = settings.get(key)
            settings[key] = known | value if isinstance(known, dict) and isinstance(value, dict) else value
        return settings


def _checked(
    t: Training, model: nn.Module, loss: Loss, device: torch.device, weights: list[float] | None, found: dict[str, Any]
) -> Task:
    """The same task in another process."""
    return t.task(model, loss, device, class_weights=weights).adopt(found)


def prepare(
    model: nn.Module,
    federation: Federation,
    algorithm: Algorithm,
    training: Training,
    *,
    start: Run | None = None,
    describe: Mapping[str, Any] | None = None,
) -> Trainer:
    """Put the parts of a run together and check that they fit.

    Parameters
    ----------
    model : nn.Module
        Its present parameters are the common start.
    federation : Federation
        The clients and their data.
    algorithm : Algorithm
        The method.
    training : Training
        How to train.
    start : Run or None
        A run to start from, see `fit`.
    describe : dict or None
        Further tables of config.toml.

    Returns
    -------
    Trainer
        Ready to train.

    Raises
    ------
    ConfigError, ModelError, DataError
        Something does not fit.
    """
    _check_kinds(model, federation, algorithm)
    t, loss = training, training.loss or ("mse" if federation.classes is None else "cross-entropy")
    if getattr(loss, "whole", False) and t.batch_size is not None:
        name = getattr(loss, "__name__", "loss")
        raise ConfigError(f"batch-size: found {t.batch_size}, expected full: the loss {name} is no mean over samples")
    attackers = np.zeros(federation.n, dtype=bool)
    if t.attack is not None:
        attackers = _attackers(t.attack, t.seed, federation)
        federation = t.attack.poison(federation, t.seed)
    weights = weights_of(t.class_weights, loss, federation.describe()) if t.class_weights is not None else None
    federation = federation if t.class_weights is None else noted(federation, t.class_weights)
    task = t.task(model, loss, pick_device(t.device), class_weights=weights)
    check_algorithm(algorithm, task.dtype)
    if len(federation.train.x) == 0:
        raise ConfigError("federation: no client has a training sample")
    check(task, federation.train, federation.classes, type(model).__name__)
    schedule, steps = t.schedule_for(federation.names), local_steps_of(t.local_steps, federation.names)
    work = Work(t.epochs, steps, t.batch_size, augmentation(t.augment, federation.input_shape))
    note = None
    if isinstance(algorithm, Yardstick):
        algorithm.check(task)
    else:
        # what the method refuses is said here, before anything is written; a server's state may be larger than memory
        if schedule.late(federation.n):
            refuse_late(algorithm, federation.n)
        outlined(algorithm, task, federation.n)
        check_optimizer(algorithm, task, federation, work)
        note = t.robust and check_robust(algorithm, t.robust, model, loss, federation, work, schedule)
    cohort = schedule.size(federation.n) if isinstance(schedule, Uniform) else federation.n
    every = t.evaluate_every
    if every is None:
        found, share = splits(federation), cohort / federation.n
        looked = sum(len(found[name].x) for name in watched(found))
        keys = client_keys(federation.names)
        every = between_evaluations(looked, federation.train.counts, keys, work, share, task.p)
    path = path_of(task, work, federation.train)
    counts = federation.train.counts
    most = min(int(counts.max()), work.batch_size or int(counts.max()))
    plan = make_plan(task, cohort, work.per_step(counts), t.chunk, t.workers, path, most)
    t = dataclasses.replace(
        t, loss=loss, dtype=task.dtype, local_epochs=None if steps else t.epochs, evaluate_every=every
    )
    return Trainer(task, federation, algorithm, t, work, schedule, cohort, plan, attackers, note, start, describe or {})


def _check_kinds(model: Any, federation: Any, algorithm: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: found {model!r}, expected a torch.nn.Module; polyfed.models.build makes one by name")
    if not isinstance(federation, Federation):
        found = type(federation).__name__
        raise ConfigError(
            f"federation: found a {found}, expected a polyfed.Federation, such as Federation.from_arrays makes"
        )
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(f"algorithm: found {algorithm!r}, expected a method such as polyfed.FedAvg(lr=0.1)")


def _attackers(attack: Attack, seed: int, federation: Federation) -> np.ndarray:
    """[n] bool: who attacks. Raises ConfigError if that is no client or every client."""
    found = attack.attackers(seed, client_keys(federation.names))
    if found.all() or (attack.ratio > 0 and not found.any()):
        who = "all, and no client is left to measure" if found.all() else "none of them"
        raise ConfigError(f"attack.ratio: found {attack.ratio:g}, which of {federation.n} clients is {who}")
    return found


def _saved(store: RunFolder, resume: bool) -> Saved | None:
    """The last checkpoint of a run that is resumed. Raises RunError for a used folder that is not."""
    if not resume:
        store.refuse_used()
    if resume and checkpoint.checkpoints(store.path / "checkpoint"):
        return checkpoint.load(store.path / "checkpoint", partial(check_rows, store.path))
    store.forget_rows()  # of a run that was killed before its first checkpoint
    return None


def watched(data: Mapping[str, Split]) -> list[str]:
    """The splits that are evaluated on the way."""
    return [name for name in data if name != "train"] or [*data]


class _Session:
    """A run under way: training, evaluation, history, checkpoints.

    first: rounds done before it, by the run it starts from     data: the splits, on the device
    """

    def __init__(
        self,
        run: Run,
        first: int,
        data: dict[str, Split],
        store: RunFolder | None,
        callbacks: Sequence[Callback],
        trainer: Trainer,
    ):
        self.run, self.loop, self.first, self.store, self.callbacks = run, run.loop, first, store, callbacks
        self.rounds, self.every = run.settings["rounds"], trainer.training.evaluate_every or 0
        self.trainer, self.attackers = trainer, trainer.attackers
        self.watched = watched(data)
        self.all_of_them = [*dict.fromkeys([*self.watched, *data])]  # in this order, whatever was evaluated before
        self.evaluated: dict[str, int] = {}  # a split -> when it was, last

    def train(self) -> Run:
        """Train until the last round, a callback or Ctrl-C ends it. What was reached is saved whatever happens."""
        run, loop, store = self.run, self.loop, self.store
        threads, begun = torch.get_num_threads(), loop.t
        if store is not None:
            loop.say = store.log
        torch.set_num_threads(1)
        try:
            self._rounds()
            self._evaluate([name for name in self.all_of_them if self.evaluated.get(name) != loop.t])
        except Diverged as e:
            raise Diverged(f"{e}{self._diverged()}") from e
        except RunError as e:  # what could not be written now cannot be written again
            if store is not None and isinstance(e, Silent) and loop.whole and loop.t > begun:
                store.rescue(run, e)
            raise
        except Exception as e:
            if store is not None and loop.whole and loop.t > begun:
                store.rescue(run, e)
            raise
        finally:
            loop.engine = loop.engine.close()
            torch.set_num_threads(threads)
        run.status = "finished" if loop.t >= self.rounds or run.ended else "interrupted"
        if store is not None:
            store.finish(run)
        return run

    def _rounds(self) -> None:
        run, loop, store = self.run, self.loop, self.store
        if isinstance(run, Measured):
            run.measure(self.trainer)
            self.rounds = loop.t if run.deploys == "yardstick" else self.rounds
            if loop.t >= self.rounds and all(r["round"] != loop.t for r in run.records):  # and not resumed after it
                self._tell(self._evaluate(self.watched))
            return
        with interruptible(terminable=store is not None) as interrupted:
            if loop.t == self.first and not run.records and self.every > 0:
                run.ended = self._tell(self._evaluate(self.watched))
            while loop.t < self.rounds and not run.ended and not interrupted.is_set():
                start = time.perf_counter()
                loop.step()
                run.seconds += time.perf_counter() - start
                due = loop.t == self.rounds or (self.every > 0 and loop.t % self.every == 0)
                if due:
                    loop.check()
                run.ended = self._tell(self._evaluate(self.watched) if due else [])
                if store is not None and loop.t < self.rounds:
                    store.checkpoint(run)

    def _evaluate(self, splits: list[str]) -> list[dict[str, Any]]:
        """The records of this round; attackers have no metrics."""
        run = self.run
        records: list[dict[str, Any]] = []
        for name in splits:
            run.final[name] = {k: np.where(self.attackers, np.nan, v) for k, v in run.scored(name).items()}
            self.evaluated[name] = self.loop.t
            records.append(record(run, name))
        if records:
            records[0] |= grouping(run)
        return records

    def _tell(self, records: list[dict[str, Any]]) -> bool:
        """Keep the records and call the callbacks; whether one of them ends the run."""
        run = self.run
        run.records += records
        if self.store is not None and records:
            self.store.record(run, records)
        said = [callback(Progress(self.loop.t, self.rounds, records, run)) for callback in self.callbacks]
        return any(answer is True or answer is np.True_ for answer in said)

    def _diverged(self) -> str:
        """Save the last finite state; where it is."""
        self.run.status = "diverged"
        if self.store is None:
            return ""
        if self.loop.whole:
            self.store.checkpoint(self.run, force=True)
        with contextlib.suppress(Diverged):
            self._evaluate(self.all_of_them)
        self.store.finish(self.run)
        found = checkpoint.checkpoints(self.store.path / "checkpoint")
        return f"; the last finite state is {found[-1]}" if found else ""
