"""Experiment files: TOML with kebab-case keys, checked key by key before anything is computed. One line says what is
wrong: which key, from where, what was found, what is allowed, and the closest known name.

Command line beats file beats default. Whatever a run was made of is written back in the same form, so that a run
folder's config.toml is an experiment file. `build.py` turns an `Experiment` into data, models and methods.
"""

import copy
import dataclasses
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

import polyfed.algorithms  # registers the methods
import polyfed.yardsticks  # noqa: F401
from polyfed.base.errors import ConfigError, PolyfedError, closest
from polyfed.base.settings import found, is_list, is_table, kebab, none_of, shown, types_of
from polyfed.base.text import parse, plain, value_of
from polyfed.core.algorithm import REGISTRY, Contender
from polyfed.core.algorithm import check as check_algorithm
from polyfed.data.datasets import LOADERS
from polyfed.data.readers import is_url, located
from polyfed.models import MODELS
from polyfed.runs.packages import installed, packages
from polyfed.runs.released import each_as_released
from polyfed.runs.training import Columns, Data, Model, Settings, Table
from polyfed.runs.userfile import algorithms_of

T = TypeVar("T", bound=Table)
COMPARED = ("local", "fedavg", "ditto")  # what is compared when no method is named
METHODS = "\n".join(f'[[algorithms]]\nname = "{name}"\n' for name in COMPARED)  # the same in an experiment file
TABLES = ("data", "columns", "model", "algorithm", "algorithms")
MODEL = (
    "name",
    "file",
    "backbone",
    "backbone-digest",
    "batchnorm",
    "adapter",
)  # of [model]; other keys are the model's options
INFORMATION = (
    "format",
    "plan",
    "privacy-plan",
    "privacy-says",
    "initial-weights",
    "versions",
    "packages",
)  # of a run's config.toml, which decide nothing


# keys of earlier files, and what they are in lr-schedule, with what they were unless set
MOMENTS = ("momentum", "beta1", "beta2", "eps")
DECAY = {"cosine": ("rounds", 0), "lr-decay": ("factor", 1.0), "lr-decay-every": ("every", 1), "warmup": ("warmup", 0)}


# What `polyfed run` does without arguments: the hospitals, cut as in FLamby (two thirds to train), each method
# with the same number of full-batch steps, enough of them for every loss to have settled; and what costs nothing.
MAIN_JOB: dict[str, Any] = {
    "rounds": 60,
    "local-steps": 5,
    "batch-size": "full",
    "seeds": 10,
    "evaluate-every": 5,
    "metrics": "accuracy,auc",
    "data": {"name": "heart-disease", "test-fraction": 0.34},
    "model": {"name": "linear"},
    "algorithms": [
        {"name": "local", "lr": 0.1},
        {"name": "fedavg", "lr": 0.1},
        {"name": "recalibrated", "lr": 0.1},
        {"name": "ditto", "lr": 0.1, "lam": 0.1, "personal-epochs": 5},
        {"name": "commonest"},
        {"name": "own-trees"},
        {"name": "pooled-oracle", "lr": 0.1},
    ],
}


# one table


class Where:
    """Names a key, and the file it was set in where that was not the command line.

    given: the keys at the top of the file
    """

    def __init__(self, file: Path | None, given: Mapping[str, Any], command: Mapping[str, Any]):
        self.file, self.given, self.command = file, set(given), command

    def __call__(self, key: str) -> str:
        table: Any = self.command
        for part in key.split("."):
            if not is_table(table) or part not in table:
                return f"{self.file}: {key}" if self.file is not None else key
            table = table[part]
        return key

    def said(self, error: PolyfedError, table: str = "") -> ConfigError:
        """An error about a setting of a table, with the file it was set in and its name as files have it."""
        full, last = kebab(".".join(filter(None, [table, error.key]))), error.key.rpartition(".")[2]
        text = re.sub(rf"^((?:[\w-]+\.)*){last}\b", rf"\g<1>{kebab(last)}", str(error)) if last else str(error)
        return ConfigError(f"{self(full).removesuffix(full)}{text}")


def table_of(value: Any, key: str, where: Where) -> dict[str, Any]:
    if not is_table(value):
        raise ConfigError(f"{where(key)}: {found(value, f'a table [{key}]')}")
    return value


def read_table(cls: type[T], values: Mapping[str, Any], where: Where, also: Iterable[str] = ()) -> T:
    """A table of a file, keys in kebab-case, or ConfigError for the first key that is wrong.

    also: further keys that the file may have
    """
    types = {kebab(name): hint for name, hint in types_of(cls).items()}
    for key in values:
        if key not in types:
            keys = [*types, *also]
            name = where(f"{cls.table}.{key}" if cls.table else key)
            raise ConfigError(f"{name}: unknown key{closest(key, keys)}; known: {', '.join(sorted(keys))}")
    try:
        return cls(**{key.replace("-", "_"): none_of(value, types[key]) for key, value in values.items()})
    except PolyfedError as e:
        raise where.said(e, cls.table) from None


# an experiment


@dataclass(frozen=True)
class Method:
    """One method of an experiment: its hyper-parameters, where its file is, and the label it goes by."""

    algorithm: Contender
    file: str | None = None
    label: str = ""

    def table(self) -> dict[str, Any]:
        """As [algorithm] of a TOML file. TOML has no null: "none" where none is not the default."""
        table: dict[str, Any] = {"name": self.algorithm.name} | ({"file": self.file} if self.file else {})
        for f in dataclasses.fields(self.algorithm):
            value = getattr(self.algorithm, f.name)
            if value is not None:
                table[kebab(f.name)] = list(value) if is_list(value) else value
            elif f.default is not None:
                table[kebab(f.name)] = "none"
        return table


@dataclass(frozen=True)
class Experiment:
    """A checked experiment. `name` is what its run folder is called after."""

    settings: Settings
    data: Data
    model: Model
    methods: tuple[Method, ...]
    name: str
    columns: Columns = dataclasses.field(default_factory=Columns)

    @property
    def seeds(self) -> list[int]:
        s = self.settings
        return s.seeds if isinstance(s.seeds, list) else list(range(s.seed, s.seed + (s.seeds or 1)))

    @property
    def single(self) -> bool:
        """True for one run, and not a comparison of several."""
        return len(self.methods) == 1 and len(self.seeds) == 1

    def toml(self) -> dict[str, Any]:
        """The whole experiment as an experiment file."""
        tables = {"data": self.data.dump(), "model": model_table(self.model)}
        tables |= {"columns": columns} if (columns := self.columns.dump()) else {}
        tables |= {"packages": [*added]} if (added := self.packages()) else {}
        return self.settings.dump() | {"seeds": self.seeds} | tables | {"algorithms": [m.table() for m in self.methods]}

    def packages(self) -> dict[str, str]:
        """The installed packages beside polyfed that it needs, and their versions."""
        methods = [m.algorithm for m in self.methods]
        if self.model.file is None and self.model.name is not None:
            MODELS.find(self.model.name)  # which looks among the packages
        return packages(methods, self.data.name, self.model.name, self.settings.metrics)


def model_of(table: Mapping[str, Any], where: Where) -> Model:
    """A [model] table: what is no setting of `Model` is an option of the model."""
    own = {key: value for key, value in table.items() if key in MODEL}
    options = {key.replace("-", "_"): value for key, value in table.items() if key not in own}
    return dataclasses.replace(read_table(Model, own, where), options=options)


def model_table(model: Model) -> dict[str, Any]:
    """The [model] table of a file."""
    table = model.dump()
    return {**{kebab(k): v for k, v in table.pop("options", {}).items()}, **table}


# reading and layering


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file, or ConfigError in one line. Paths in it are taken from its folder."""
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        near = closest(path.name, [p.name for p in path.parent.glob("*.toml")])
        raise ConfigError(f"{path}: no such file{near}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file in UTF-8") from None
    except OSError as e:
        data = f"; of data: --data {path}" if path.is_dir() else ""
        raise ConfigError(f"{path}: cannot be read ({e.strerror or e}){data}") from None
    except (ValueError, RecursionError) as e:  # TOMLDecodeError, an integer of thousands of digits, lists within lists
        raise ConfigError(f"{path}: not valid TOML ({shown(str(e)).strip(chr(39))})") from None
    plain(content, lambda key: f"{path}: {key}")
    tables = [content.get(key) for key in ("data", "columns", "model", "algorithm")]
    listed = content.get("algorithms")
    for table in [*tables, *(listed if is_list(listed) else ())]:
        for key in ("dir", "file", "backbone", "tokenizer", "test-file", "global-file", "name"):
            if is_table(table) and isinstance(table.get(key), str):
                place = path.parent / Path(table[key]).expanduser()
                if key != "name" or ("/" in table[key] and (os.path.exists(place) or is_url(table[key]))):
                    table[key] = located(table[key], path.parent)
    if is_table(schedule := content.get("schedule")) and "delays" in schedule:
        schedule["delays"] = delays_at(schedule["delays"], path.parent)
    return content


def delays_at(delays: Any, folder: Path) -> Any:
    """A setting of `schedule.delays` with the path of its file in full, read relative to `folder`."""
    if not isinstance(delays, str) or not delays.startswith("file:"):
        return delays
    return f"file:{(folder / Path(delays.removeprefix('file:')).expanduser()).resolve()}"


def assign(table: dict[str, Any], text: str) -> None:
    """Put `a.b=value`, as given to --set, into nested tables."""
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts) or len(parts) > 4:
        raise ConfigError(f"--set: {found(text, 'key=value, such as algorithm.lr=0.05')}")
    plain(key)
    for part in parts[:-1]:
        inner: Any = table.setdefault(part, {})
        if not is_table(inner):
            raise ConfigError(f"--set: found {shown(text)}, but {part!r} is not a table")
        table = inner
    table[parts[-1]] = value_of(value.strip(), f"--set {key.strip()}")


def method_of(text: str) -> dict[str, Any]:
    """`ditto:lam=0.1,lr=0.05` -> an [algorithm] table."""
    name, values, named = parse(text, "method")
    if values:
        raise ConfigError(f"method: {found(text, 'name:key=value,key=value, such as ditto:lam=0.1')}")
    return {"name": name} | {kebab(key): value_of(value, f"algorithm.{kebab(key)}") for key, value in named.items()}


def defaults_for(file: Path | None, command: Mapping[str, Any]) -> dict[str, Any]:
    """The lowest layer: the built-in experiment, when no file and no other data set is named."""
    usual, data = MAIN_JOB["data"]["name"], command.get("data", {})
    named = data.get("name", usual) if is_table(data) else ""
    return MAIN_JOB if file is None and named == usual else {}


def merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Two layers of settings, table by table; `high` wins."""
    out = copy.deepcopy(dict(low))
    if "local-steps" in high or "local-epochs" in high:
        out = {k: v for k, v in out.items() if k not in ("local-steps", "local-epochs")}
    for key, value in high.items():
        both = is_table(value) and is_table(out.get(key))
        out[key] = merge(out[key], value) if both else copy.deepcopy(value)
    return out


def resolve(
    file: Path | None = None,
    command: Mapping[str, Any] | None = None,
    methods: Iterable[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> Experiment:
    """Layer and check all settings.

    file: an experiment file     command: settings from the command line, nested as in a file
    methods: "name" or "name:key=value,..." that replace the file's methods (whose settings they keep)
    defaults: lowest layer, used for what neither names

    Raises ConfigError with one line for the first thing that is wrong.
    """
    given = _of_this_program(read_toml(file), file) if file is not None else {}
    command = dict(command or {})
    plain(command)
    methods, typed = [*methods], {k: v for k, v in command.items() if k != "algorithm"}
    if (given | typed).get("as-released"):  # the built-in experiment's work is nobody's wish
        left = ("local-steps", "batch-size", *(["algorithms"] if methods else ()))
        defaults = {k: v for k, v in (defaults or {}).items() if k not in left}
    layers = merge(merge(defaults or {}, given), typed)
    where = Where(file, given, command)
    over = table_of(command.get("algorithm", {}), "algorithm", where)
    settings = read_table(Settings, {k: v for k, v in layers.items() if k not in TABLES}, where, TABLES)
    if settings.local_epochs is not None and settings.local_steps is not None:
        raise ConfigError(f"{where('local-epochs')}: conflicts with local-steps; leave out one of them")
    data = read_table(Data, table_of(layers.get("data", {}), "data", where), where)
    if data.dir is not None:
        if "dir" in command.get("data", {}) and not LOADERS.knows(data.name):
            raise ConfigError(f"{where('data.dir')}: has no effect on {data.name}, which is a path")
        data = dataclasses.replace(data, dir=_absolute(data.dir))
    if data.global_file is not None:
        data = dataclasses.replace(data, global_file=_absolute(data.global_file))
    columns = read_table(Columns, table_of(layers.get("columns", {}), "columns", where), where)
    tokenizer, test_file = (None if p is None else _absolute(p) for p in (columns.tokenizer, columns.test_file))
    columns = dataclasses.replace(columns, tokenizer=tokenizer, test_file=test_file)
    model = model_of(table_of(layers.get("model", {}), "model", where), where)
    chosen = _chosen(layers, [method_of(text) for text in methods], over, where)
    for m in chosen:
        try:
            check_algorithm(m.algorithm, settings.dtype or torch.float32)
        except ConfigError as e:
            raise where.said(e, "algorithm") from None
    pairs = each_as_released({str(i): m.algorithm for i, m in enumerate(chosen)}, settings)
    chosen = [dataclasses.replace(m, algorithm=pairs[str(i)][0]) for i, m in enumerate(chosen)]
    name = file.stem if file is not None and file.stem not in ("config", "comparison") else Path(data.name).stem
    return Experiment(settings, data, model, tuple(label(chosen)), name, columns)


def _chosen(layers: Mapping[str, Any], typed: list[dict[str, Any]], over: dict[str, Any], where: Where) -> list[Method]:
    """The methods: those typed by name, else those of the file. What is typed with a name beats all else."""
    shared, own = _methods(layers, where)
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []  # of the file, typed
    if typed:
        if "name" in over and any(t["name"] != over["name"] for t in typed):
            clash = found(over["name"], ", ".join(dict.fromkeys(t["name"] for t in typed)))
            raise ConfigError(f"algorithm.name: {clash}, which the command line names too; leave out one of them")
        over = {k: v for k, v in over.items() if k != "name"}
        for t in typed:
            of_file = [table for table in own if table.get("name") == t["name"]]
            pairs += [(table, t) for table in (of_file if len(t) == 1 and of_file else of_file[:1] or [{}])]
    elif "name" in over or "file" in over:  # another method than the file's
        shared = {}
        pairs.append(({}, {}))
    else:
        pairs = [(table, {}) for table in own]
    built = [_method(shared, table, over, t, where) for table, t in pairs]
    _used(shared | over, built, where)
    return built


def _of_this_program(given: dict[str, Any], file: Path) -> dict[str, Any]:
    """Without what a run's config.toml only reports; refuses that of a run whose data came from a Python program."""
    installed(given.get("packages", []), f"{file}: packages")
    given = of_earlier({k: v for k, v in given.items() if k not in INFORMATION})
    data, model = given.get("data"), given.get("model")
    if is_table(data) and is_list(data.get("sites")):
        then = "run the experiment's own file with polyfed server, with --resume to go on"
        raise ConfigError(f"{file}: its data are at its sites: {', '.join(map(str, data['sites']))}; {then}")
    if is_table(data) and data.pop("digest", None) is not None and "name" not in data:
        raise ConfigError(
            f"{file}: this run was started from Python with data of its own, so it can be repeated and resumed only "
            "there: polyfed.fit(..., out=folder, resume=True)"
        )
    if is_table(model):
        model.pop("parameters", None)
    return given


def of_earlier(table: dict[str, Any]) -> dict[str, Any]:
    """A file of before `optimizer`, `lr-schedule` and `engine` took what is now theirs."""
    kept = {key: value for key, value in table.items() if key not in (*MOMENTS, *DECAY, "address")}
    if moments := ",".join(f"{key}={table[key]}" for key in MOMENTS if key in table):
        kept["optimizer"] = f"{table.get('optimizer', 'sgd')}:{moments}"
    if table.get("engine") == "ray" and "address" in table:
        kept["engine"] = f"ray:{table['address']}"
    changed = {key: table[key] for key, (_, usual) in DECAY.items() if table.get(key, usual) != usual}
    if {"cosine", "lr-decay"} <= {*changed}:
        raise ConfigError("lr-decay: found it with cosine, expected one of them: lr-schedule has one form")
    form = "cosine" if "cosine" in changed else "exponential" if "lr-decay" in changed else "constant"
    if form != "constant" or "warmup" in changed:
        kept["lr-schedule"] = f"{form}:{','.join(f'{DECAY[key][0]}={value}' for key, value in changed.items())}"
    return kept


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve())


def _methods(layers: Mapping[str, Any], where: Where) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(settings for all methods, one table per method) from [algorithm] and [[algorithms]]."""
    one = table_of(layers.get("algorithm", {}), "algorithm", where)
    many = layers.get("algorithms")
    if many is not None and not (is_list(many) and many and all(map(is_table, many))):
        raise ConfigError(f"{where('algorithms')}: found {many!r}, expected [[algorithms]] tables")
    if "name" in one or "file" in one:
        if {"algorithm", "algorithms"} <= where.given:
            raise ConfigError(
                f"{where('algorithm.name')}: conflicts with [[algorithms]]; leave out one of them (without a name, "
                "[algorithm] holds settings for all)"
            )
        return {}, [one]
    return one, [dict(t) for t in many] if many else [{"name": name} for name in COMPARED]


def _method(
    shared: dict[str, Any], own: dict[str, Any], over: dict[str, Any], typed: dict[str, Any], where: Where
) -> Method:
    """One method from four layers, weakest first: settings for all methods in the file, its own table, settings for
    all methods on the command line, those typed with its name. A setting for all may be foreign to some.
    """
    own = own | typed
    over = {k: v for k, v in over.items() if k not in typed}
    head = {k: v for k, v in (own | over).items() if k in ("name", "file")}
    file, name = head.get("file"), head.get("name")
    for key, value in head.items():
        if not isinstance(value, str):
            raise ConfigError(f"{where(f'algorithm.{key}')}: found {value!r}, expected text")
    if file is not None:
        file = _absolute(file)
        names = algorithms_of(Path(file))
        if name is None and len(names) != 1:
            raise ConfigError(f"{file}: holds {', '.join(names) or 'no method'}; name one with algorithm.name")
        name = name or names[0]
    if name is None:
        raise ConfigError(f"{where('algorithm')}: found no name, expected one of {', '.join(REGISTRY.names())}")
    cls = REGISTRY.find(name)
    keys = {kebab(f.name) for f in dataclasses.fields(cls)}
    values = {k: v for k, v in shared.items() if k in keys}
    values |= {k: v for k, v in own.items() if k not in ("name", "file")}
    values |= {k: v for k, v in over.items() if k in keys}
    try:
        return Method(REGISTRY.make(name, {k.replace("-", "_"): v for k, v in values.items()}, kebab), file)
    except ConfigError as e:
        raise where.said(e, "algorithm") from None


def _used(shared: Mapping[str, Any], methods: list[Method], where: Where) -> None:
    """A setting for all methods must be known to one of them at least."""
    settings = {kebab(f.name) for m in methods for f in dataclasses.fields(m.algorithm)}
    for key in shared:
        if key not in settings and key not in ("name", "file"):
            names = ", ".join(dict.fromkeys(m.algorithm.name for m in methods))
            raise ConfigError(
                f"{where(f'algorithm.{key}')}: unknown setting of {names}{closest(key, settings)}; "
                f"known: {', '.join(sorted(settings))}"
            )


def label(methods: list[Method]) -> list[Method]:
    """Give every method the label of its runs: its name, with what differs where a name comes twice."""
    out: list[Method] = []
    for m in methods:
        same = [o.algorithm for o in methods if o.algorithm.name == m.algorithm.name]
        if sum(o == m.algorithm for o in same) > 1:
            raise ConfigError(f"algorithms: {m.algorithm.name} is listed twice with the same settings")
        fields = [f.name for f in dataclasses.fields(m.algorithm)]
        differ = [f for f in fields if len({repr(getattr(o, f)) for o in same}) > 1]
        shown = [f"{kebab(f)}={_word(getattr(m.algorithm, f))}" for f in differ]
        out.append(dataclasses.replace(m, label="-".join([m.algorithm.name, *shown])))
    return out


def _word(value: Any) -> str:
    text = "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value).lower()
    return "".join(c if c.isalnum() or c in "._+-" else "_" for c in text)
