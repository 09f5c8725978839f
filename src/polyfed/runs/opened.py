"""A run read back from its folder. Results come from its files; the models, the method and the server's state from its
last checkpoint. Nothing is written, and the data are looked for only where samples are needed.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import torch
from torch import nn

from polyfed import models
from polyfed.base import checkpoint
from polyfed.base.errors import ConfigError, PolyfedError, RunError
from polyfed.base.randomness import client_keys
from polyfed.base.typed import plain
from polyfed.compute.augment import augmentation
from polyfed.compute.batches import Work
from polyfed.compute.losses import LOSSES, tokens
from polyfed.compute.split import Split
from polyfed.compute.task import Task
from polyfed.core.algorithm import REGISTRY, Contender, State
from polyfed.core.ledger import COLUMNS, Ledger
from polyfed.core.rounds import Loop, part
from polyfed.core.rows import is_mapped
from polyfed.core.schedule import Uniform
from polyfed.core.worker import Plan
from polyfed.data.federation import LEARNT, Federation
from polyfed.engines.local import LocalEngine, check_rows, make_rows, pick_device
from polyfed.metrics import scores
from polyfed.metrics.scores import LOSS
from polyfed.models.start import Start, drawn
from polyfed.runs import ownership as files
from polyfed.runs import schema as reading
from polyfed.runs.build import Parts, make_model
from polyfed.runs.config import INFORMATION, TABLES, Settings, Where, model_of, of_earlier, read_table, resolve
from polyfed.runs.folder import client_model
from polyfed.runs.measured import looped
from polyfed.runs.numbers import Numbers
from polyfed.runs.packages import installed
from polyfed.runs.result import Result, lazy
from polyfed.runs.resume import digest
from polyfed.runs.steps import local_steps_of
from polyfed.runs.trained import Judged, Trained
from polyfed.runs.trainer import fit
from polyfed.runs.training import Training
from polyfed.runs.userfile import algorithms_of
from polyfed.runs.watching import Callback
from polyfed.runs.weights import weights_of

R = TypeVar("R", bound=Result)
NEEDED = ("seed", "dtype", "model", "data", "plan")  # keys of config.toml
SAID = ("data", "columns", "model", "algorithm", "start", "initial-weights", "portable")


def opened(
    folder: str | Path, federation: Federation | None = None, model: Start | None = None, kind: type[R] = Result
) -> R:
    """The result of a run's folder. `status` is "unfinished" where it was killed.

    federation, model: of a run that was started from Python with its own     kind: what is made of it
    """
    kept = Stored(Path(folder), federation, model)
    numbers, final = kept.numbers, {} if kept.numbers.clients is None else reading.final(kept.numbers.clients)
    return kind(
        kept.settings, kept.outline, numbers.records, final, kept.metrics, numbers.status, numbers.summary.rounds,
        numbers.summary.seconds, False, kept.at, kept,
    )  # fmt: skip


class Stored:
    """Source of a result that is a folder: its numbers, its last checkpoint, its data where they were."""

    def __init__(self, folder: Path, federation: Federation | None, model: Start | None):
        config = files.config_of(folder)
        if config.name == "comparison.toml":
            such = next((f", such as {run}" for run in sorted(folder.glob("runs/*-seed*"))), "")
            raise ConfigError(f"{folder}: is a comparison; name one of its runs{such}")
        self.at, self._given, self._own = folder, federation, model
        self._table = files.unsealed(config)
        if missing := [key for key in NEEDED if key not in self._table]:
            raise RunError(f"{config}: the key {missing[0]!r} is missing")
        self.numbers = numbers = Numbers.of(folder)
        self.settings = numbers.config
        judges = numbers.config.judges if numbers.clients is None else []
        self.metrics = tuple(judges or numbers.summary.judges)

    # from the files

    @property
    def ledger(self) -> pd.DataFrame:
        if not (self.at / "ledger.csv").exists():
            return self._billed.frame()
        try:
            return self.numbers.ledger.astype(dict.fromkeys(COLUMNS[:-1], "int64"))
        except (KeyError, ValueError) as e:
            raise RunError(f"{self.at / 'ledger.csv'}: not the ledger of a run ({checkpoint.reason(e)})") from None

    @property
    def _billed(self) -> Ledger:
        """The ledger of the checkpoint."""
        ledger = Ledger()
        ledger.restore(self._state[0]["ledger"])
        return ledger

    def by_client(self) -> Mapping[str, np.ndarray]:
        table = self.numbers.clients
        if table is None:
            return self._billed.by_client(self.outline.n)
        return {key: table[key].to_numpy() for key in ("rounds", "down_bytes", "up_bytes")}

    @lazy
    def findings(self) -> dict[str, Any]:
        if (self.at / "report.json").exists():
            return self.numbers.findings.written()
        return {k: plain(v) for k, v in looped(self.algorithm).describe(self.server).found().items()}

    @cached_property
    def outline(self) -> Federation:
        """Clients, how many samples each has and of which shape, from federation.json; no sample."""
        about, meta = self.numbers.about, self.numbers.about.written()
        parts = {k: _hollow([c.samples(k) for c in about.clients], about) for k in reading.SPLITS}
        validation = parts["validation"] if parts["validation"].counts.any() else None
        return Federation(
            parts["train"], parts["test"], tuple(about.names), validation, about.classes,
            None if about.clusters is None else np.array(about.clusters),
            {key: meta[key] for key in LEARNT if key in meta}, about.tokens,
        )  # fmt: skip

    # from the checkpoint

    @cached_property
    def _state(self) -> tuple[State, dict[str, Any]]:
        """The last checkpoint's tensors and what is said of them."""
        place = self.at / "checkpoint"
        if not checkpoint.checkpoints(place):
            raise RunError(f"{self.at}: has no model yet; finish it with: polyfed resume {self.at}")
        tensors, meta, _ = checkpoint.load(place, partial(check_rows, self.at))
        ended_at = self.numbers.summary.rounds
        if self.numbers.clients is not None and ended_at != meta["t"]:
            raise RunError(
                f"{place}: the last checkpoint is damaged; found one of round {meta['t']}, expected {ended_at}"
            )
        return tensors, meta

    @lazy
    def server(self) -> State:
        tensors, meta = self._state
        return part(tensors, "best.server." if "best" in meta else "server.")

    @lazy
    def algorithm(self) -> Contender:
        """The method."""
        installed(self.settings.packages, f"{self.at / 'config.toml'}: packages")
        table = dict(self._state[1]["fingerprint"]["algorithm"])
        file = table.pop("file", None)
        if file is not None:
            algorithms_of(Path(file))  # which registers them
        return REGISTRY.make(table.pop("name", None), {key.replace("-", "_"): v for key, v in table.items()})

    @cached_property
    def _module(self) -> nn.Module:
        """The model with the parameters that the run began with, and with the frozen tensors of its folder."""
        table = {k: v for k, v in self.settings.model.items() if k != "parameters"}
        if self._own is not None:
            own, words = drawn(self._own, self.settings.seed), table.get("adapter")
            there = words is None or models.is_adapted(own)
            model = copy.deepcopy(own) if there else models.adapted(own, words, self.settings.seed)
        elif self.settings.data.name is None:
            raise RunError(
                f"{self.at}: its model was given in Python ({table.get('name')}); open the folder with "
                "polyfed.Run.open(folder, model=...)"
            )
        else:
            given = model_of(table, self._where)
            model = make_model(given, self.outline.input_shape, self.outline.outputs, self.settings.seed)
        path = self.at / "fixed.safetensors"
        try:
            model.load_state_dict(reading.tensors(path) if path.is_file() else {}, strict=False)
        except RuntimeError as e:
            raise RunError(f"model: not the one of {self.at} ({' '.join(str(e).split())})") from None
        return model

    def _check_layout(self, task: Task) -> None:
        """Raise RunError for a model that is not the run's, as far as the files of its clients' models can tell."""
        first = client_model(self.at, 0, self.numbers.about.names[0])
        expected = {} if first is None else {name: list(t.shape) for name, t in first[0].items()}
        has = {name: list(t.shape) for name, t in task.layout.named(task.w0).items()}
        p = self.settings.model.get("parameters", task.p)
        if task.p != p or (expected and has != expected):
            differ = [name for name in {**expected, **has} if has.get(name) != expected.get(name)] if expected else []
            which = f", not the same at {differ[0]}" if differ else ""
            raise RunError(f"model: not the one of {self.at}: found {task.p:,} parameters, expected {p:,}{which}")

    @lazy
    def trained(self) -> Trained:
        """The state of the last checkpoint, with no samples behind it."""
        tensors, meta = self._state
        fed, t = self.outline, self._training
        assert self.settings.plan is not None, "it is needed"
        plan = Plan(**self.settings.plan.table())
        device = pick_device("auto" if plan.device.startswith("cuda") else "cpu")
        assert t.loss is not None, "every run's config.toml has it"
        weights = weights_of(t.class_weights, t.loss, self.numbers.about.model_dump())
        lost = self._gone("metrics")  # in place of what computes a metric that no file holds
        judges = [m if m.compute or m is LOSS else dataclasses.replace(m, compute=lost) for m in self.metrics]
        task = t.task(self._module, t.loss, device, judges, weights)
        self._check_layout(task)
        steps = local_steps_of(t.local_steps, fed.names)
        work = Work(t.epochs, steps, t.batch_size, augmentation(t.augment, fed.input_shape))
        seed, plan = t.seed, Plan(plan.chunk, 1, str(device), plan.path)
        place = self.at if is_mapped(part(tensors, "client.")) else None
        algorithm = looped(self.algorithm)
        rows = make_rows(algorithm, task, fed.n, 1, place, tensors)
        engine = LocalEngine(task, {"train": fed.train}, rows, client_keys(fed.names), work, seed, plan, t.step_sizes)
        loop = Loop(task, fed.train.counts, fed.names, algorithm, Uniform(), engine, seed, t.step_sizes)
        loop.restore(tensors, meta)
        if loop.best is not None:
            loop.back()
        return Trained.of(loop)

    @property
    def judged(self) -> Judged:
        return self.trained

    # settings

    @property
    def _where(self) -> Where:
        return Where(self.at / "config.toml", self._table, {})

    @property
    def _objects(self) -> list[str]:
        """The settings that were objects of Python, of which config.toml has a word only."""
        s = self._table
        return [
            key
            for key, is_object in (
                ("loss", self.settings.loss not in (*LOSSES, tokens.__name__)),
                ("augment", s.get("augment") == "function"),
                ("metrics", any(scores.known(name) is None for name in self.settings.metrics)),
                ("local-steps", isinstance(s.get("local-steps"), str)),
                ("schedule", isinstance(s.get("schedule"), str)),
            )
            if is_object
        ]

    @cached_property
    def _training(self) -> Settings:
        """Settings of the run; a function that no file holds raises an error when it is used."""
        aside = {*TABLES, *INFORMATION, "start", *self._objects}
        kept = of_earlier({k: v for k, v in self._table.items() if k not in aside})
        gone: dict[str, Any] = {
            key.replace("-", "_"): self._gone(key) for key in self._objects if key not in ("schedule", "metrics")
        }
        return dataclasses.replace(read_table(Settings, kept, self._where, TABLES), **gone)

    def _gone(self, key: str) -> Callable[..., Any]:
        def refuse(*_: Any, **__: Any) -> Any:
            raise self._unknown(key)

        return refuse

    def _unknown(self, key: str) -> ConfigError:
        return ConfigError(
            f"{self.at}: its {key} was a Python object, which no file holds; continue with "
            "polyfed.fit(..., out=folder, resume=True)"
        )

    # with the data

    @lazy
    def federation(self) -> Federation:
        """The clients and their data, with what an attack on the labels has made of them."""
        return self._data(forged=True)

    def _data(self, forged: bool) -> Federation:
        """The run's data, given or read again. forged: with what an attack on the labels has made of them."""
        seed, data = self.settings.seed, self.settings.data
        if self._given is not None:
            fed = self._given
        elif data.sites is not None:
            raise RunError(f"{self.at}: its data are at its sites: {', '.join(data.sites)}")
        elif data.name is None:
            raise RunError(
                f"{self.at}: its data are needed and were given in Python ({self.outline.n} clients); open the "
                "folder with polyfed.Run.open(folder, federation=...)"
            )
        else:
            try:
                fed = Parts(resolve(self.at / "config.toml")).federation(seed)
            except PolyfedError as e:
                raise RunError(
                    f"{self.at}: its data, {data.dir or data.name}, are needed and cannot be read ({e})"
                ) from None
        attack = self._training.attack
        attacked = fed if attack is None else attack.poison(fed, seed)
        if data.digest not in (None, digest(attacked)):
            raise RunError(f"{self.at}: its data are not the ones it was trained on")
        return attacked if forged else fed

    def parts(self) -> tuple[nn.Module, Federation, Training, Contender]:
        """The model with the parameters that it began with, the data, how it was trained, the method.

        Raises RunError for data that cannot be read or have changed, ConfigError for a setting that no file holds.
        """
        if self._objects:
            raise self._unknown(self._objects[0])
        return self._module, self._data(forged=False), self._training, self.algorithm


def stored(run: Result) -> Stored:
    """Return the contents of a run's folder."""
    return run.kept if isinstance(run.kept, Stored) else Stored(run.place(), None, None)


def resume(run: Result, rounds: int | None = None, callbacks: Sequence[Callback] = ()) -> Result:
    """Train the run of a folder on from its last checkpoint, to `rounds` in all or as many as it was to have.

    Raises RunError for data that cannot be read or have changed, ConfigError for a setting that no file holds.
    """
    kept = stored(run)
    model, federation, training, algorithm = kept.parts()
    training = training if rounds is None else dataclasses.replace(training, rounds=rounds)
    described = {key: value for key, value in run.settings.table().items() if key in SAID}
    with files.locked(kept.at):
        return fit(
            model, federation, algorithm, training, out=kept.at, resume=True, callbacks=callbacks, describe=described
        )


def _hollow(counts: list[int], about: reading.About) -> Split:
    """A split with the right number of samples and no values: NaN, in no memory."""
    total, shape = sum(counts), about.inputs or []
    x = torch.full((1,), torch.nan).view([1] * (1 + len(shape))).expand(total, *shape)
    y = (
        x.new_full((1, 1), torch.nan).expand(total, about.outputs or 0)
        if about.classes is None
        else torch.zeros(1).long().expand(total)
    )
    return Split(x, y, np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]))
