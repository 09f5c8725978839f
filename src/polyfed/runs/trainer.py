"""Trainer: a run that is ready to begin. `prepare` puts its parts together and checks them, `Trainer.run`
makes the loop and the session that trains, `fit` does both."""

import contextlib
import dataclasses
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy as np
import torch
from torch import nn

from polyfed import models
from polyfed.algorithms.local import Local
from polyfed.base import checkpoint
from polyfed.base.arguments import checked
from polyfed.base.errors import ConfigError
from polyfed.base.plugins import sibling
from polyfed.base.randomness import client_keys
from polyfed.base.settings import kebab, parameters, settings_of
from polyfed.base.system import cores
from polyfed.base.typed import named_modules, plain
from polyfed.compute.augment import augmentation
from polyfed.compute.batches import Work
from polyfed.compute.check import check
from polyfed.compute.compiled import PATH, dense, path_of, unknown
from polyfed.compute.kept import Kept, kept
from polyfed.compute.losses import Loss
from polyfed.compute.split import Split, restored
from polyfed.compute.task import Task, adopt, findings
from polyfed.core.algorithm import Algorithm, Contender, outlined
from polyfed.core.algorithm import check as check_algorithm
from polyfed.core.engine import Engine
from polyfed.core.messages import size
from polyfed.core.rounds import Loop, refuse_late
from polyfed.core.rows import Rows
from polyfed.core.schedule import Schedule, Timed, Uniform
from polyfed.core.uplinks import Door, Wanted
from polyfed.core.worker import Plan
from polyfed.data.federation import Federation, Outline
from polyfed.engines.local import (
    LocalEngine,
    MemoryPlan,
    check_rows,
    free_memory,
    make_plan,
    make_rows,
    memory_of,
    pick_device,
)
from polyfed.models.start import Start, drawn, words
from polyfed.runs.features import features
from polyfed.runs.folder import RunFolder, versions
from polyfed.runs.measured import Answers, looped, outputs_of, together
from polyfed.runs.packages import packages
from polyfed.runs.rehearsal import check_optimizer, check_robust, sums
from polyfed.runs.released import as_released
from polyfed.runs.result import Result, splits
from polyfed.runs.resume import digest, start_from
from polyfed.runs.schema import Config
from polyfed.runs.session import Saved, Session, watched
from polyfed.runs.steps import between_evaluations, local_steps_of, recorded
from polyfed.runs.threats import Attack
from polyfed.runs.track import check_tracker, tracked
from polyfed.runs.training import Training, training_of
from polyfed.runs.watching import Callback, watchers
from polyfed.runs.weights import noted, weights_of
from polyfed.yardsticks.yardstick import Outputs, Yardstick


@checked
@dataclass(frozen=True)
class Trainer:
    """Everything that a run needs; nothing has been trained or written yet. `prepare` makes one.

    Parameters
    ----------
    task : Task
        Model and loss.
    federation : Federation
        The clients; under an attack on labels, with their labels changed.
    algorithm : Algorithm or Yardstick
        The method.
    training : Training
        With every setting resolved.
    work : Work
        What a client does in a round.
    schedule : Schedule
        Who takes part and when.
    sums : dict
        What replies are added up to, see `Loop`.
    streamed : bool
        Whether that is all that the method takes.
    attackers : array [n] of bool
        Who attacks.
    note : str or None
        A line for the log about the robust rule.
    start : Result or None
        The run to start from.
    describe : dict
        Further tables of config.toml.
    elsewhere : callable or None
        Makes the engine where the clients are not here, and the federation is an outline.
    door : callable or None
        Makes what all messages pass through, of this, the run folder, and whether the run is new.
    billed : array or None
        [3, n] messages, bytes down and bytes up before the first round.
    kept : Kept or None
        The model, cut above its frozen modules; None: all of it is computed at every step.
    looks : tuple of str or None
        The splits that models are evaluated on; None: all.
    """

    task: Task
    federation: Federation
    algorithm: Contender
    training: Training
    work: Work
    schedule: Schedule
    sums: Mapping[tuple[int, int], Wanted]
    streamed: bool
    attackers: np.ndarray
    note: str | None = None
    start: Result | None = None
    describe: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    elsewhere: "Callable[[Trainer], Engine] | None" = None
    door: "Callable[[Trainer, RunFolder | None, bool], Door | None] | None" = None
    billed: np.ndarray | None = None
    kept: Kept | None = None
    looks: tuple[str, ...] | None = None

    @property
    def cohort(self) -> int:
        """Clients in a round, at most."""
        return self.schedule.size(self.federation.n) if isinstance(self.schedule, Uniform) else self.federation.n

    @cached_property
    def plan(self) -> Plan:
        """How clients are run on this machine."""
        t, train, top = self.training, self.federation.train, self.kept.top if self.kept else self.task
        path = path_of(top.net, self.work, train)
        each = self.work.per_step(train.counts)
        return make_plan(top, self.cohort, each, t.chunk, t.workers, path, self._most, dense(top.net, path, train))

    @property
    def unknown(self) -> str:
        """The line that says which layer leaves the whole model to torch, or ""."""
        if isinstance(self.algorithm, Yardstick) or isinstance(self.federation, Outline) or self.kept is not None:
            return ""
        return unknown(self.task.net, self.federation.train.x.shape[1:])

    @cached_property
    def memory(self) -> MemoryPlan | None:
        """What is planned to be taken of it; None where clients are run elsewhere."""
        plan, fed, top = self.plan, self.federation, self.kept.top if self.kept else self.task
        if self.training.engine != "local" or isinstance(fed, Outline):
            return None
        evaluated, base = max(len(split.x) for split in splits(fed).values()), size(self.task.net.fixed)
        method, most = looped(self.algorithm), self._most
        return memory_of(method, top, fed.n, self.cohort, self.streamed, plan, most, evaluated)._replace(base=base)

    @property
    def _most(self) -> int:
        most = int(self.federation.train.counts.max())
        return min(most, self.work.batch_size or most)

    def run(self, out: str | Path | None = None, resume: bool = False, callbacks: Sequence[Callback] = ()) -> Result:
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
        Result
            The trained state and everything that was measured on the way.
        """
        store = RunFolder(Path(out), self.training.checkpoint_every) if out is not None else None
        with store.locked() if store is not None else contextlib.nullcontext():
            saved = None if store is None else _saved(store, resume)
            data: dict[str, Split] = splits(self.federation)
            if self.elsewhere is None:
                data = {name: self.task.place(split) for name, split in data.items()}
            loop = self._loop(data, store, saved)
            session = self._session(loop, store, callbacks)
            if saved is not None and store is not None:
                session.restore(store, saved)
            elif self.billed is not None:
                exchanges, down, up = self.billed
                zero = np.zeros(loop.n)
                loop.ledger.record(-1, np.arange(loop.n), exchanges, down, up, zero, zero)
            if store is not None:
                store.begin(session.result(), fresh=saved is None)
                plan = loop.algorithm.describe(loop.server).findings.get("plan")
                needed = f"memory: {self.memory.words()}" if self.memory and self.memory.base else None
                begun = None if self.start or saved else f"start: {words(self.task.model)}"
                for line in filter(None, (begun, self.unknown, plan, needed, self.note)):
                    store.log(line)
            with tracked(self.training.track, session.result()) as more:
                session.callbacks = (*session.callbacks, *more)
                return session.run()

    def _session(self, loop: Loop, store: RunFolder | None, callbacks: Sequence[Callback]) -> Session:
        every = self.training.evaluate_every or 0
        session = Session(
            loop, self.federation, self._settings(loop), every, self.attackers, store, callbacks, self.looks
        )
        if isinstance(self.algorithm, Yardstick):
            session.measure = partial(self._measure, self.algorithm)
            session.judged = Answers(self.task, self.federation, self.algorithm.role, {})
            session.algorithm = self.algorithm
        return session

    def _measure(self, yardstick: Yardstick, session: Session) -> Answers:
        """Fit a yardstick. A pooled model is trained in a run folder of its own, `training`."""
        task, fed, start, trained = self.task, self.federation, time.perf_counter(), list[Result]()

        def pooled(lr: float) -> Outputs:
            how = dataclasses.replace(
                self.training, fraction=1.0, schedule=None, attack=None, robust=None, chunk=None, track=None,
                evaluate_every=self.training.evaluate_every if self.training.stop else 0,
            )  # fmt: skip
            trainer = prepare(task.module(task.w0), together(fed), Local(lr), how)
            run = trainer.run(None if session.store is None else session.store.path / "training", resume=True)
            trained.append(run)
            w, unit = run.personal[0], run.federation.train.units([0])
            return lambda x: restored(task.outputs(w, x.to(task.device)).cpu(), unit)

        outputs = outputs_of(yardstick, fed, pooled)
        for run in trained:
            session.loop.t, session.seconds = run.rounds, run.seconds
        if not trained:
            session.seconds += time.perf_counter() - start
        return Answers(task, fed, yardstick.role, outputs)

    def _loop(self, data: dict[str, Split], store: RunFolder | None, saved: Saved | None) -> Loop:
        """The event loop before its first round, or with the state of `start`."""
        algorithm = looped(self.algorithm)
        t, task, names = self.training, self.task, self.federation.names
        plan = self.plan
        if saved is not None and t.chunk is None and t.workers is None:
            before = Plan(**saved[1]["fingerprint"]["plan"])
            gone = before.path == PATH != plan.path
            plan = dataclasses.replace(before, path=plan.path) if gone else before
        place = store.path if store else None
        fixed = place, saved and saved[0], self.streamed, 1 if t.stop is None else 2
        rows = partial(make_rows, algorithm, task, len(names), self.cohort, *fixed)
        engine = self._engine(data, rows, plan, place) if self.elsewhere is None else self.elsewhere(self)
        threats = None if t.attack is None else sibling("polyfed_threats.forging", "attack:")
        forge = None if threats is None else threats.Forging(t.attack, client_keys(names), t.seed)
        door = None if self.door is None else self.door(self, store, saved is None)
        loop = Loop(
            task, data["train"].counts, names, algorithm, self.schedule, engine, t.seed, t.step_sizes,
            forge, t.robust, self.sums, door,
        )  # fmt: skip
        if self.start is not None:
            start_from(loop, self.start)
        return loop

    def _engine(self, data: dict[str, Split], rows: Callable[[], Rows], plan: Plan, folder: Path | None) -> Engine:
        t, task, names = self.training, self.task, self.federation.names
        if t.engine == "local":
            if self.kept is not None:
                task, data = self.kept.top, features(self.kept, data, folder)
            return LocalEngine(task, data, rows(), client_keys(names), self.work, t.seed, plan, t.step_sizes)
        weights = plain(task.net.criterion.class_weights)
        make = partial(_checked, t, task.model, task.loss, task.device, weights, findings(task))
        return sibling("polyfed_ray.engine", "engine: ray").RayEngine(
            make, dict(splits(self.federation)), names, looped(self.algorithm), self.work, t.seed, plan, t.step_sizes,
            workers=t.workers or min(cores(), len(names)), folder=folder and folder / "rows",
            address=t.engine.partition(":")[2] or None,
        )  # fmt: skip

    def _settings(self, loop: Loop) -> Config:
        """The run's config.toml."""
        start, method, loss = self.start, dataclasses.asdict(self.algorithm), self.training.loss
        settings: dict[str, Any] = {
            **self.training.dump(),
            "local-steps": recorded(self.work.steps),
            "loss": loss if isinstance(loss, str) else getattr(loss, "__name__", "callable"),
            "rounds": loop.t + self.training.rounds,
            "start": None if start is None else {"algorithm": start.algorithm.name, "rounds": start.trained.t},
            "algorithm": {"name": self.algorithm.name} | {kebab(k): v for k, v in method.items()},
            "model": {"name": type(self.task.model).__name__, "parameters": self.task.p},
            "initial-weights": words(self.task.model) if start is None else None,
            "data": {"clients": self.federation.n, "digest": digest(self.federation)},
            "plan": dataclasses.asdict(loop.engine.plan),
            "versions": versions(),
        }
        for key, value in self.describe.items():
            own = settings.get(key)
            settings[key] = own | value if isinstance(own, dict) and isinstance(value, dict) else value
        data, model = (settings[table].get("name") for table in ("data", "model"))
        added = packages([self.algorithm], data, model, self.training.metrics)
        settings["versions"] |= added
        return Config.of(settings | {"packages": list(added) or None})


def _checked(
    t: Training, model: nn.Module, loss: Loss, device: torch.device, weights: list[float] | None, facts: dict[str, Any]
) -> Task:
    """The same task in another process."""
    return adopt(t.task(model, loss, device, class_weights=weights), facts)


@checked
def prepare(
    model: nn.Module,
    federation: Federation,
    algorithm: Contender,
    training: Training,
    *,
    start: Result | None = None,
    describe: Mapping[str, Any] | None = None,
) -> Trainer:
    """Put the parts of a run together and check that they fit.

    Parameters
    ----------
    model : nn.Module
        Its present parameters are the common start.
    federation : Federation
        The clients and their data.
    algorithm : Algorithm or Yardstick
        The method.
    training : Training
        How to train.
    start : Result or None
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
    RunError
        The memory that is free is less than the run takes.
    """
    algorithm, t = as_released(algorithm, training)
    loss = t.loss or federation.loss
    check_tracker(t.track)
    _check_samples(federation, loss, t)
    privacy = None if t.privacy is None else sibling("polyfed_privacy.run", "privacy:")
    t = t if privacy is None else privacy.settled(t, federation, start is not None)
    attackers, federation = _attacked(t.attack, t.seed, federation)
    weights = None if t.class_weights is None else weights_of(t.class_weights, loss, federation.describe())
    federation = federation if t.class_weights is None else noted(federation, t.class_weights)
    task = t.task(model, loss, pick_device(t.device), class_weights=weights)
    check_algorithm(algorithm, task.dtype)
    check(task, federation.train, federation.classes, type(model).__name__)
    schedule, steps = t.schedule_for(federation.names), local_steps_of(t.local_steps, federation.names)
    work = Work(t.epochs, steps, t.batch_size, augmentation(t.augment, federation.input_shape))
    cut = _kept(task, federation, work, t)
    top, shape = (task, federation.input_shape) if cut is None else (cut.top, cut.shape)
    note, wanted, streamed = None, dict[tuple[int, int], Wanted](), False
    if isinstance(algorithm, Yardstick):
        algorithm.check(task)
    elif isinstance(algorithm, Algorithm):
        _check_method(algorithm, task, federation, work, schedule)
        if t.robust is None:
            wanted, streamed = sums(algorithm, top, shape, federation.classes, federation.outputs)
        else:
            note = check_robust(algorithm, t.robust, model, loss, federation, work, schedule)
    t = dataclasses.replace(t, loss=loss, dtype=task.dtype, local_epochs=None if steps else t.epochs)
    trainer = Trainer(
        task, federation, algorithm, t, work, schedule, wanted, streamed, attackers, note, start, describe or {},
        kept=cut,
    )  # fmt: skip
    if t.evaluate_every is None:
        data, share, keys = splits(federation), trainer.cohort / federation.n, client_keys(federation.names)
        looked = sum(len(data[name].x) for name in watched(data))
        every = between_evaluations(looked, federation.train.counts, keys, work, share, task.p)
        trainer = dataclasses.replace(trainer, training=dataclasses.replace(t, evaluate_every=every))
    if (needed := trainer.memory) is not None:
        run = f"{looped(algorithm).name} with {federation.n} clients and {task.p:,} parameters"
        needed.check(run, free_memory(task.device))
    return trainer if privacy is None else privacy.guarded(trainer)


def _check_samples(federation: Federation, loss: Loss, t: Training) -> None:
    """Raise ConfigError where there is no sample to train on or to stop by, or the loss is none of a batch."""
    if len(federation.train.x) == 0:
        raise ConfigError("federation: no client has a training sample")
    if t.stop is not None and "validation" not in splits(federation):
        then = "validation-fraction above 0 in [data] (from Python Federation.with_validation)"
        raise ConfigError(f"stop: found {t.stop!r} and no validation samples, expected {then}")
    if getattr(loss, "whole", False) and t.batch_size is not None:
        name = getattr(loss, "__name__", "loss")
        raise ConfigError(f"batch-size: found {t.batch_size}, expected full: the loss {name} is no mean over samples")


def _attacked(attack: Attack | None, seed: int, federation: Federation) -> tuple[np.ndarray, Federation]:
    """[n] bool: who attacks, and the clients as that leaves them. Raises ConfigError if it is no client or all."""
    if attack is None:
        return np.zeros(federation.n, dtype=bool), federation
    attackers = attack.attackers(seed, client_keys(federation.names))
    if attackers.all() or (attack.ratio > 0 and not attackers.any()):
        who = "all, and no client is left to measure" if attackers.all() else "none of them"
        raise ConfigError(f"attack.ratio: found {attack.ratio:g}, which of {federation.n} clients is {who}")
    return attackers, attack.poison(federation, seed)


def _kept(task: Task, federation: Federation, work: Work, t: Training) -> Kept | None:
    """The model cut above what is computed once. Raises ConfigError where samples would change after that."""
    here = t.engine == "local" and not isinstance(federation, Outline)
    cut = kept(task, federation.train.x) if here else None
    if cut is not None and work.augment is not None:
        raise ConfigError(
            f"augment: found {t.augment if isinstance(t.augment, str) else 'a function'} with nothing trained below "
            f"{cut.first!r}, so that one feature of each sample is kept; expected none, or a model that trains more"
        )
    return cut


def _check_method(algorithm: Algorithm, task: Task, federation: Federation, work: Work, schedule: Schedule) -> None:
    """What the method refuses, said before anything is written; a server's state may be larger than memory."""
    if schedule.late(federation.n):
        refuse_late(algorithm, federation.n)
    bent = next((name for name, m in named_modules(task.model) if getattr(m, "linear", True) is False), None)
    if (algorithm.linear_only or algorithm.adapter_train) and bent is not None:
        train = f",train={algorithm.adapter_train}" if algorithm.adapter_train else ""
        raise ConfigError(
            f"adapter: found dora, as in layer {bent!r}, which is not linear in what is trained, expected one "
            f"such as lora:r=8{train} for {algorithm.name}"
        )
    outlined(algorithm, task, federation.n)
    check_optimizer(algorithm, task, federation, work)
    n, m, needs = federation.n, schedule.replies(federation.n), algorithm.needs
    if n < needs.clients:
        raise ConfigError(f"clients: found {n}, expected at least {needs.clients} with {algorithm!r}")
    if needs.everyone and m < n:
        raise ConfigError(
            f"fraction: found {m} of {n} clients a round, expected all with {algorithm.name}: {needs.everyone}"
        )
    drawn = schedule.schedule if isinstance(schedule, Timed) else schedule
    if needs.uniform and (1 == m < n or not isinstance(drawn, Uniform)):
        cohort = f"{m} of {n} clients by {type(drawn).__name__.lower()}"
        raise ConfigError(
            f"fraction: found {cohort}, expected at least 2, uniform, with {algorithm.name}: {needs.uniform}"
        )


def _saved(store: RunFolder, resume: bool) -> Saved | None:
    """The last checkpoint of a run that is resumed. Raises RunError for a used folder that is not."""
    if not resume:
        store.refuse_used()
    if resume and checkpoint.checkpoints(store.path / "checkpoint"):
        return checkpoint.load(store.path / "checkpoint", partial(check_rows, store.path))
    store.forget_rows()  # of a run that was killed before its first checkpoint
    return None


@checked
def fit(
    model: Start,
    federation: Federation,
    algorithm: Contender,
    training: Training | None = None,
    *,
    adapter: str | None = None,
    start: Result | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    describe: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Result:
    """Train a model over a federation with a method.

    Parameters
    ----------
    model : nn.Module or callable
        Its present parameters are the common start. A class, or a function that makes a model, is called under the
        seed, which then decides the start too.
    federation : Federation
        The clients and their data.
    algorithm : Algorithm or Yardstick
        The method, such as ``polyfed.FedAvg(lr=0.1)``.
    training : Training, optional
        How to train; ``settings`` override it.
    adapter : str, optional
        Part of the model to train, such as ``"lora:r=8,targets=query+value"``; the rest is frozen, see
        `polyfed.models.adapted`.
    start : Result, optional
        A run on the same clients and model to start from. If it is of the same method (settings may differ), its whole
        state is kept and ``rounds`` more are added to its own. If it is of another method, its clients' models are the
        start, for methods that allow it, and one upload of each is billed as round -1.
    out : path, optional
        Run folder, new or empty; without it nothing is written.
    resume : bool
        Continue from the checkpoint in ``out``, if there is one.
    callbacks : sequence of callables
        Called with a `Progress` after every round; one that returns True ends the run. In a notebook a call without
        any shows its progress.
    describe : mapping, optional
        Further tables for config.toml, such as ``{"data": {...}, "model": {...}}``.
    **settings
        The settings of `Training` by keyword: ``rounds=50, local_epochs=2, ...``.

    Returns
    -------
    Result
        The trained state and everything that was measured on the way; of `polyfed.fit` a `Run`.

    Raises
    ------
    ConfigError, ModelError, DataError
        Before training, when something does not fit.
    Diverged
        When a value is no longer finite.
    RunError
        When a folder cannot be read or written.

    Notes
    -----
    All errors have a one-line message. Ctrl-C ends the run after the round it is in, saved and resumable; the Result's
    status is then "interrupted".
    """
    training = training_of(training, settings)
    model = drawn(model, training.seed)
    if adapter is not None:
        model = models.adapted(model, adapter, training.seed)
        describe = {"model": {"adapter": adapter}, **(describe or {})}
    trainer = prepare(model, federation, algorithm, training, start=start, describe=describe)
    return trainer.run(out, resume, callbacks or watchers())


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """The signature of a function with the settings of a run in the place of its `**settings`."""
    own = inspect.signature(function)
    *named, _ = own.parameters.values()
    kind, taken = inspect.Parameter.KEYWORD_ONLY, set(own.parameters)
    more = [inspect.Parameter(s.name, kind, default=s.default) for s in settings_of(Training) if s.name not in taken]
    return own.replace(parameters=[*named, *more])


SETTINGS = "    **settings\n        The settings of `Training` by keyword: ``rounds=50, local_epochs=2, ...``.\n"
# what help and completion show
fit.__signature__ = _signature(fit)  # pyrefly: ignore[missing-attribute]
fit.__doc__ = str(fit.__doc__).replace(SETTINGS, indent(f"{parameters(Training)}\n", "    "))
