"""The options of commands that train: each is a key of the experiment file, and its help what the key says."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

from typer import Option

from polyfed.cli import complete, portable
from polyfed.runs import training as tables

T = TypeVar("T", bound=tables.Table)
Command = TypeVar("Command", bound=Callable[..., int])
DATA, TRAIN, WHERE = "Data and model", "Training", "Results and machine"


def _help(table: type[Any], name: str) -> str:
    return next(f.metadata["setting"].doc for f in fields(table) if f.name == name)


def option(table: type[tables.Table], name: str, panel: str, metavar: str | None = None, **more: Any) -> Any:
    """The option of a setting, typed as text; the setting's own type reads it."""
    return Option(help=_help(table, name), metavar=metavar, rich_help_panel=panel, **more)


def read(table: type[T], given: Mapping[str, Any]) -> T:
    """The settings of a table among a command's arguments; text is read as the setting's type takes it."""
    from polyfed.base.settings import kebab, typed_as, types_of
    from polyfed.runs import check

    found = {name: (given[name], hint) for name, hint in types_of(table).items() if given.get(name) is not None}
    typed = {kebab(name): typed_as(v, hint) if isinstance(v, str) else v for name, (v, hint) in found.items()}
    return check.read_table(table, typed, check.Where(None, {}, {}))


Data = Annotated[str | None, option(tables.Data, "name", DATA, autocompletion=complete.data)]
DataDir = Annotated[str | None, option(tables.Data, "dir", DATA, "DIR")]
Target = Annotated[str | None, option(tables.Columns, "target", DATA, "COLUMN")]
Standardise = Annotated[str | None, option(tables.Columns, "standardise", DATA, "SCOPE")]
Drop = Annotated[str | None, option(tables.Columns, "drop", DATA, "A,B,...")]
Weights = Annotated[str | None, option(tables.Columns, "weights", DATA, "COLUMN")]
Partition = Annotated[str | None, option(tables.Data, "partition", DATA)]
Clients = Annotated[str | None, option(tables.Data, "clients", DATA, "N")]
Model = Annotated[str | None, option(tables.Model, "name", DATA)]
Rounds = Annotated[str | None, option(tables.Settings, "rounds", TRAIN, "N")]
Fraction = Annotated[str | None, option(tables.Settings, "fraction", TRAIN, "X")]
Epochs = Annotated[str | None, option(tables.Settings, "local_epochs", TRAIN, "N")]
Steps = Annotated[str | None, option(tables.Settings, "local_steps", TRAIN, "N")]
Batch = Annotated[str | None, option(tables.Settings, "batch_size", TRAIN, "N")]
Optimizer = Annotated[str | None, option(tables.Settings, "optimizer", TRAIN, "NAME")]
Lr = Annotated[str | None, Option(help="Step size of every method.", metavar="X", rich_help_panel=TRAIN)]
Metrics = Annotated[str | None, option(tables.Settings, "metrics", TRAIN, "NAMES")]
Seed = Annotated[str | None, option(tables.Settings, "seed", TRAIN, "N")]
Seeds = Annotated[str | None, option(tables.Settings, "seeds", TRAIN)]
Device = Annotated[str | None, option(tables.Settings, "device", WHERE)]
Engine = Annotated[str | None, option(tables.Settings, "engine", WHERE, "NAME")]
Workers = Annotated[str | None, option(tables.Settings, "workers", WHERE, "N")]
Address = Annotated[str | None, option(tables.Settings, "address", WHERE)]
Dtype = Annotated[str | None, option(tables.Settings, "dtype", WHERE)]
Set = Annotated[
    list[str] | None,
    Option(
        "--set",
        help="Set any key of the experiment file, such as algorithm.lr=0.05 (see polyfed config).",
        metavar="KEY=VALUE",
        autocompletion=complete.settings,
    ),
]
Out = Annotated[Path | None, Option(help="Folder for the results. Default: runs/<time>-<name>.", rich_help_panel=WHERE)]
Force = Annotated[bool, Option("--force", help="Replace the results in --out.", rich_help_panel=WHERE)]
Portable = Annotated[bool, Option("--portable", help=_help(tables.Settings, "portable"), rich_help_panel=WHERE)]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Show no progress.", rich_help_panel=WHERE)]

SHARED: dict[str, Any] = {
    "set": Set, "data": Data, "data_dir": DataDir, "target": Target, "standardise": Standardise, "drop": Drop,
    "weights": Weights, "partition": Partition, "clients": Clients, "model": Model, "rounds": Rounds,
    "fraction": Fraction, "local_epochs": Epochs, "local_steps": Steps, "batch_size": Batch, "lr": Lr,
    "optimizer": Optimizer, "metrics": Metrics, "seed": Seed, "seeds": Seeds, "device": Device, "engine": Engine,
    "workers": Workers, "address": Address, "dtype": Dtype, "portable": Portable, "out": Out, "force": Force,
    "quiet": Quiet,
}  # fmt: skip
ON_RAY, FLAGS = ("engine", "workers", "address"), ("portable", "force", "quiet")


def shared(*but: str) -> Callable[[Command], Command]:
    """Put the options of a run, but for some, in the place of a command's `**given`."""

    def put(command: Command) -> Command:
        own = inspect.signature(command)
        *kept, given = own.parameters.values()
        some = [
            given.replace(name=name, kind=given.KEYWORD_ONLY, default=False if name in FLAGS else None, annotation=hint)
            for name, hint in SHARED.items()
            if name not in but
        ]
        command.__signature__ = own.replace(parameters=[*kept, *some])  # pyright: ignore[reportFunctionMemberAccess]
        return command

    return put


KEYS = {
    "data": "data.name",
    "data_dir": "data.dir",
    "target": "columns.target",
    "standardise": "columns.standardise",
    "drop": "columns.drop",
    "weights": "columns.weights",
    "partition": "data.partition",
    "clients": "data.clients",
    "model": "model.name",
    "lr": "algorithm.lr",
}  # and the settings of a run under their own names


def collect(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings among a command's arguments, nested as in an experiment file; --set beats a named option."""
    if given.get("portable"):
        portable.pin()  # before torch is imported
    from polyfed.base.settings import kebab, typed_as, types_of, value_of
    from polyfed.runs.config import assign

    table: dict[str, Any] = {}
    known = {
        "": types_of(tables.Settings),
        "data": types_of(tables.Data),
        "columns": types_of(tables.Columns),
        "model": types_of(tables.Model),
    }
    for name, value in given.items():
        parent, _, last = KEYS.get(name, kebab(name) if name in known[""] else "").rpartition(".")
        if not last or value is None or value is False:
            continue
        if isinstance(value, str):
            if name == "drop":
                table.setdefault(parent, {})[last] = [column.strip() for column in value.split(",")]
                continue
            text = f"[{value}]" if name == "seeds" and "," in value else value
            hint = known.get(parent, {}).get(last.replace("-", "_"))
            value = value_of(text) if hint is None else typed_as(text, hint)
        (table.setdefault(parent, {}) if parent else table)[last] = value
    for text in given.get("set") or ():
        assign(table, text)
    return table
