"""From a checked experiment to the things themselves: data set, federation, model, methods, arguments of `fit`."""

import dataclasses
import importlib.util
import inspect
import os
import sys
import traceback
import zlib
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from polyfed.core.algorithm import REGISTRY
from polyfed.core.augment import augmentation
from polyfed.core.errors import ConfigError, DataError, ModelError, PolyfedError, closest
from polyfed.core.settings import kebab
from polyfed.data.dataset import Dataset
from polyfed.data.datasets import check_options, load, names
from polyfed.data.federation import Federation
from polyfed.data.partition import parse
from polyfed.experiment.config import Experiment, Method, Model, Settings, delays_at, model_table
from polyfed.experiment.steps import local_steps_of

CLIENTS = 20  # where the data has no clients of its own and no number is given


class Parts:
    """What an experiment is made of. The data set is read once; federations and models follow from the seed.

    `experiment` is complete: partition, clients, test rule, model and loss are those that are used.
    """

    def __init__(self, experiment: Experiment):
        self._asked = experiment
        self._federations: dict[int, Federation] = {}

    @cached_property
    def dataset(self) -> Dataset:
        """The data set, before it is dealt out."""
        d = self._asked.data
        if d.name not in names() and "/" not in d.name and not os.path.exists(d.name):
            known = f"known: {', '.join(names())}, or a folder"
            raise ConfigError(f"data.name: unknown data set {d.name!r}{closest(d.name, names())}; {known}")
        check_options(d.name, d.options, ConfigError)
        return load(d.name, d.dir, **d.options)

    def federation(self, seed: int) -> Federation:
        """The federation of one seed: the same for every method."""
        if seed not in self._federations:
            self._federations.clear()
            d, how, clients = self._asked.data, *self._dealt()
            settings: dict[str, Any] = {"test_fraction": d.test_fraction, "validation_fraction": d.validation_fraction}
            settings["test_samples"] = d.test_samples
            at = seed if d.seed is None else d.seed
            self._federations[seed] = self.dataset.partition(how, clients, at, d.test, **settings)
        return self._federations[seed]

    def _dealt(self) -> tuple[str, int | None]:
        """(partition, clients), with what stands in for what was not said."""
        d, natural = self._asked.data, self.dataset.groups is not None
        how = d.partition or ("natural" if natural else "iid" if self.dataset.classes is None else "dirichlet:0.5")
        try:
            parse(how)
        except DataError as e:
            raise ConfigError(f"data.partition: {e}") from None
        return how, d.clients if d.clients is not None or how.startswith("natural") else CLIENTS

    def model(self, seed: int) -> nn.Module:
        """The model that every method of this seed starts from."""
        fed = self.federation(seed)
        return make_model(self.experiment.model, fed.input_shape, fed.outputs, seed)

    @cached_property
    def experiment(self) -> Experiment:
        """The experiment with nothing left open."""
        e = self._asked
        how, clients = self._dealt()
        fed = self.federation(e.seeds[0])
        local_steps_of(e.settings.local_steps, fed.names)  # what only the data can tell is said before a run begins
        augmentation(e.settings.augment, fed.input_shape)
        test = str(fed.meta["test"]).partition(":")[0]
        name = e.data.name if e.data.name in names() else str(Path(e.data.name).resolve())
        data = dataclasses.replace(e.data, name=name, partition=how, clients=clients, test=test)
        model = e.model
        if model.file is not None:
            file = Path(model.file).expanduser().resolve()
            model = dataclasses.replace(model, file=str(file), name=model.name or _only_model(file))
        elif model.name is None:
            from polyfed import models

            model = dataclasses.replace(model, name=models.default(fed))
        loss = e.settings.loss or ("mse" if fed.classes is None else "cross-entropy")
        schedule = e.settings.schedule
        if isinstance(schedule, Mapping) and "delays" in schedule:
            schedule = {**schedule, "delays": delays_at(schedule["delays"], Path())}
        settings = dataclasses.replace(e.settings, loss=loss, schedule=schedule)
        if settings.portable:  # the plan of another machine follows from its cores, and decides the order of sums
            if settings.device.startswith("cuda"):
                raise ConfigError(f"portable: found device {settings.device}, expected cpu")
            settings = dataclasses.replace(settings, device="cpu", workers=settings.workers or 1)
        return dataclasses.replace(e, data=data, model=model, settings=settings)

    def training(self, seed: int | None = None) -> Settings:
        """How a run of this seed trains."""
        s = self.experiment.settings
        return s if seed is None else dataclasses.replace(s, seed=seed, seeds=None)

    def describe(self, method: Method) -> dict[str, Any]:
        """What config.toml says beyond what `fit` knows."""
        e = self.experiment
        tables = {"data": e.data.dump(), "model": model_table(e.model), "algorithm": method.table()}
        return tables | {"portable": e.settings.portable or None}


def make_model(m: Model, input_shape: tuple[int, ...], outputs: int, seed: int) -> nn.Module:
    """The model of a [model] table, for inputs of this shape and this many outputs."""
    assert m.name is not None
    if m.file is not None:
        return _user_model(
            Path(m.file), m.name, {"input_shape": input_shape, "outputs": outputs, "seed": seed}, m.options
        )
    from polyfed import models

    return models.build(m.name, input_shape, outputs, seed=seed, **m.options)


# the user's own files


def algorithms_of(path: Path) -> list[str]:
    """The names of the methods that a file defines; they are registered by importing it."""
    module = _import(path)
    return [name for name, cls in REGISTRY.items() if cls.__module__ == module.__name__]


def _import(path: Path) -> ModuleType:
    try:
        source = path.read_bytes()
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read ({(e.strerror or str(e)).lower()})") from None
    return _execute(path, zlib.crc32(source))


@lru_cache
def _execute(path: Path, digest: int) -> ModuleType:
    """Import a file once per content. Raises ConfigError naming the line for whatever goes wrong in it."""
    name = f"polyfed_user_{path.stem}_{zlib.crc32(str(path).encode()):08x}_{digest:08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: expected a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except PolyfedError:
        raise
    except (Exception, SystemExit) as e:
        raise ConfigError(f"{path}{_line(e, path)}: {_reason(e)}") from e
    return module


def _line(error: BaseException, path: Path) -> str:
    if isinstance(error, SyntaxError) and error.lineno:
        return f", line {error.lineno}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return f", line {lines[-1]}" if lines else ""


def _reason(error: BaseException) -> str:
    text = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _only_model(path: Path) -> str:
    module = _import(path)
    found = [n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, nn.Module) and _own(v, module)]
    if len(found) != 1:
        raise ConfigError(f"model.name: is missing; {path} defines {', '.join(found) or 'no nn.Module class'}")
    return found[0]


def _own(value: Any, module: ModuleType) -> bool:
    return getattr(value, "__module__", None) == module.__name__


def _user_model(path: Path, name: str, given: dict[str, Any], options: Mapping[str, Any]) -> nn.Module:
    """Call `name` of the file with what it takes of `given` (input_shape, outputs, seed), and its options."""
    module = _import(path)
    make: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(make):
        known = [n for n, v in vars(module).items() if callable(v) and _own(v, module)]
        raise ConfigError(f"model.name: {path} has no {name!r}{closest(name, known)}; it has {', '.join(known)}")
    takes = inspect.signature(make).parameters
    every = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    for key in options:
        if key not in takes and not every:
            raise ConfigError(f"model.{kebab(key)}: {name} takes no such argument{closest(key, takes)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(given["seed"])
        try:
            made = make(**{k: v for k, v in given.items() if k in takes}, **options)
        except PolyfedError:
            raise
        except (Exception, SystemExit) as e:
            raise ModelError(f"{path}{_line(e, path)}: {name} failed with {_reason(e)}") from e
    if not isinstance(made, nn.Module):
        raise ModelError(f"{path}: {name} made a {type(made).__name__}, expected an nn.Module")
    return made
