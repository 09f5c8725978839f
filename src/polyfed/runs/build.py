"""From a checked experiment to the objects it names: data set, federation, model, methods, arguments of `fit`."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from polyfed import models
from polyfed.base.errors import ConfigError, DataError, closest
from polyfed.compute.augment import augmentation
from polyfed.compute.narrow import HALF
from polyfed.data.dataset import Dataset
from polyfed.data.datasets import LOADERS, check_options, load, names, options
from polyfed.data.federation import Federation
from polyfed.data.partition import parse
from polyfed.data.readers import located
from polyfed.data.shared import with_global
from polyfed.models.start import under
from polyfed.runs.config import Experiment, Method, Model, Settings, delays_at, model_table
from polyfed.runs.released import each_as_released
from polyfed.runs.steps import local_steps_of
from polyfed.runs.trainer import Trainer, prepare
from polyfed.runs.userfile import model_from, only_model

CLIENTS = 20  # where the data has no clients of its own and no number is given


class Parts:
    """Parts that an experiment is made of. The data set is read once; federations and models follow from the seed.

    `experiment` is complete: partition, clients, test rule, model and loss are those that are used.
    """

    def __init__(self, experiment: Experiment):
        self._asked = experiment
        self._federations: dict[int, Federation] = {}
        self.unknown: set[str] = set()  # lines on what the kernel does not know, after `check`

    @cached_property
    def dataset(self) -> Dataset:
        """The data set, before it is divided among clients."""
        d = self._asked.data
        if not LOADERS.knows(d.name) and "/" not in d.name and not os.path.exists(d.name):
            choices = f"known: {', '.join(names())}, or a folder"
            raise ConfigError(f"data.name: unknown data set {d.name!r}{closest(d.name, names())}; {choices}")
        check_options(d.name, d.options, ConfigError)
        columns = self._asked.columns.given
        if LOADERS.knows(d.name) and (others := [key for key in columns if key != "split"]):
            key = others[0].replace("_", "-")
            own = f"; set data.options.{key}" if key in options(d.name) else ""
            raise ConfigError(f"columns.{key}: for folders of CSV files; {d.name} knows its columns{own}")
        dataset = load(d.name, d.dir, without=d.without or (), **{**d.options, **columns})
        if dataset.preparation is not None and dataset.preparation.survival:
            raise ConfigError(
                "columns.task: found survival, expected classes or regression; a Cox model is fitted by "
                f"polyfed regress {d.name} --model cox --time {columns['time']} --event {columns['event']}"
            )
        return dataset

    def federation(self, seed: int) -> Federation:
        """The federation of one seed: the same for every method."""
        if seed not in self._federations:
            self._federations.clear()
            d, how, clients = self._asked.data, *self._dealt()
            settings: dict[str, Any] = {"test_fraction": d.test_fraction, "validation_fraction": d.validation_fraction}
            settings |= {"test_samples": d.test_samples, "without": d.without or ()}
            at = seed if d.seed is None else d.seed
            fed = self.dataset.partition(how, clients, at, d.test, **settings)
            more = d.global_file
            self._federations[seed] = fed if more is None else with_global(fed, more, self._asked.columns)
        return self._federations[seed]

    def _dealt(self) -> tuple[str, int | None]:
        """(partition, clients), with defaults for what was not given."""
        d, natural = self._asked.data, self.dataset.groups is not None
        how = d.partition or ("natural" if natural else "iid" if self.dataset.classes is None else "dirichlet:0.5")
        try:
            parse(how)
        except DataError as e:
            raise ConfigError(f"data.partition: {e}") from None
        if how.startswith("natural") and d.without:
            return how, None  # however many there were
        return how, d.clients if d.clients is not None or how.startswith("natural") else CLIENTS

    def leaving(self, clients: Sequence[str]) -> "Parts":
        """The same experiment on the same data set without these clients, of whom nothing but its classes is used."""
        e = self._asked
        parts = Parts(
            dataclasses.replace(e, data=dataclasses.replace(e.data, without=[*(e.data.without or ()), *clients]))
        )
        parts.dataset = self.dataset
        return parts

    def check_without(self) -> None:
        """Raise ConfigError for a client to leave out that the data do not have."""
        e = self._asked
        if e.data.without:
            whole = Parts(dataclasses.replace(e, data=dataclasses.replace(e.data, without=None)))
            everyone = whole.federation(e.seeds[0]).names
            for name in e.data.without:
                if name not in everyone:
                    raise ConfigError(f"data.without: no client {name!r}{closest(name, everyone)} in {e.data.name}")

    def model(self, seed: int) -> nn.Module:
        """The model that every method of this seed starts from."""
        fed = self.federation(seed)
        return make_model(self.experiment.model, fed.input_shape, fed.outputs, seed)

    def check(self) -> None:
        """Raise what a run of some method would be refused with; nothing has been written then."""
        if self.experiment.single:
            self.unknown.add(self.trainer.unknown)
            return
        seed = self.experiment.seeds[0]
        model, federation, training = self.model(seed), self.federation(seed), self.training(seed)
        methods = {m.label: m.algorithm for m in self.experiment.methods}
        for algorithm, its in each_as_released(methods, training).values():
            self.unknown.add(prepare(model, federation, algorithm, its).unknown)

    @cached_property
    def trainer(self) -> Trainer:
        """The run of an experiment that is a single one, ready to begin."""
        (method,), (seed,) = self.experiment.methods, self.experiment.seeds
        model, federation, training = self.model(seed), self.federation(seed), self.training(seed)
        return prepare(model, federation, method.algorithm, training, describe=self.describe(method))

    @cached_property
    def experiment(self) -> Experiment:
        """The experiment with nothing left open."""
        e = self._asked
        how, clients = self._dealt()
        fed = self.federation(e.seeds[0])
        local_steps_of(e.settings.local_steps, fed.names)  # what only the data can tell is said before a run begins
        augmentation(e.settings.augment, fed.input_shape)
        test = str(fed.meta["test"]).partition(":")[0]
        name = e.data.name if LOADERS.knows(e.data.name) else located(e.data.name)
        data = dataclasses.replace(e.data, name=name, partition=how, clients=clients, test=test)  # pyrefly: ignore[bad-argument-type]
        model = backed(e.model)
        if model.file is not None:
            file = Path(model.file).expanduser().resolve()
            model = dataclasses.replace(model, file=str(file), name=model.name or only_model(file))
        elif model.name is None:
            model = dataclasses.replace(model, name=models.default(fed))
        loss = e.settings.loss or fed.loss
        schedule = e.settings.schedule
        if isinstance(schedule, Mapping) and "delays" in schedule:
            schedule = {**schedule, "delays": delays_at(schedule["delays"], Path())}
        settings = dataclasses.replace(e.settings, loss=loss, schedule=schedule)
        if settings.portable:
            if settings.device.startswith("cuda"):
                raise ConfigError(f"portable: found device {settings.device}, expected cpu")
            settings = dataclasses.replace(settings, device="cpu")
        return dataclasses.replace(e, data=data, model=model, settings=settings)

    def training(self, seed: int | None = None) -> Settings:
        """Settings of a run of this seed."""
        s = self.experiment.settings
        return dataclasses.replace(s, seed=s.seed if seed is None else seed, seeds=None)

    def describe(self, method: Method) -> dict[str, Any]:
        """Describe for config.toml what `fit` does not know."""
        e = self.experiment
        tables = {"data": e.data.dump(), "model": model_table(e.model), "algorithm": method.table()}
        tables |= {"columns": columns} if (columns := e.columns.dump()) else {}
        return tables | {"portable": e.settings.portable or None}


def backed(m: Model) -> Model:
    """The table with its backbone's path in full and its digest. Raises ConfigError for another digest than it has."""
    if m.backbone is None:
        return m
    path = Path(m.backbone).expanduser().resolve()
    digest, expected = models.digest_of(path), m.backbone_digest
    if expected not in (None, digest):
        raise ConfigError(f"model.backbone: {path}: found digest {digest}, expected {expected}")
    whole = path.is_dir()
    if whole and (m.file is not None or m.name not in (None, "transformers")):
        raise ConfigError(f"model.backbone: {path} is a folder, a model of its own; expected no other name and no file")
    return dataclasses.replace(m, name="transformers" if whole else m.name, backbone=str(path), backbone_digest=digest)


def make_model(m: Model, input_shape: tuple[int, ...], outputs: int, seed: int) -> nn.Module:
    """The model of a [model] table, for inputs of this shape and this many outputs."""
    made = _made(backed(m), input_shape, outputs, seed)
    return made if m.backbone else under(made, seed)


def _made(m: Model, input_shape: tuple[int, ...], outputs: int, seed: int) -> nn.Module:
    assert m.name is not None
    path = None if m.backbone is None else Path(m.backbone)
    whole = path is not None and path.is_dir()
    if m.file is not None:
        given = {"input_shape": input_shape, "outputs": outputs, "seed": seed}
        made = model_from(Path(m.file), m.name, given, m.options)
    else:
        options = {**m.options, "backbone": m.backbone} if whole else m.options
        made = models.build(m.name, input_shape, outputs, seed=seed, **options)
    if path is not None and not whole:
        made = models.pretrained(made, path)
    if m.batchnorm is not None:
        made = models.with_statistics(made) if m.batchnorm == "statistics" else models.replace_batchnorm(made)
    if m.adapter is None:
        return made.float() if any(q.dtype in HALF for q in made.parameters()) else made
    return models.adapted(made, m.adapter, seed)
