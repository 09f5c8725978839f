"""The options that `run` and `compare` share: each is a key of the experiment file, and its help what the key says."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

from typer import Option

from polyfed.cli import complete, portable
from polyfed.experiment import training as tables

T = TypeVar("T", bound=tables.Table)
DATA, TRAIN, WHERE = "Data and model", "Training", "Results and machine"


def _help(table: type[Any], name: str) -> str:
    return next(f.metadata["setting"].doc for f in fields(table) if f.name == name)


def option(table: type[tables.Table], name: str, panel: str, metavar: str | None = None, **more: Any) -> Any:
    """The option of a setting, typed as text; the setting's own type reads it."""
    return Option(help=_help(table, name), metavar=metavar, rich_help_panel=panel, **more)


def read(table: type[T], given: Mapping[str, Any]) -> T:
    """The settings of a table among a command's arguments; text is read as the setting's type takes it."""
    from polyfed.core.settings import kebab, typed_as, types_of
    from polyfed.experiment import check

    found = {name: (given[name], hint) for name, hint in types_of(table).items() if given.get(name) is not None}
    typed = {kebab(name): typed_as(v, hint) if isinstance(v, str) else v for name, (v, hint) in found.items()}
    return check.read_table(table, typed, check.Where(None, {}, {}))


Data = Annotated[str | None, option(tables.Data, "name", DATA, autocompletion=complete.data)]
DataDir = Annotated[str | None, option(tables.Data, "dir", DATA, "DIR")]
Target = Annotated[str | None, option(tables.Columns, "target", DATA, "COLUMN")]
Standardise = Annotated[str | None, option(tables.Columns, "standardise", DATA, "SCOPE")]
Drop = Annotated[str | None, option(tables.Columns, "drop", DATA, "A,B,...")]
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

KEYS = {
    "data": "data.name",
    "data_dir": "data.dir",
    "target": "columns.target",
    "standardise": "columns.standardise",
    "drop": "columns.drop",
    "partition": "data.partition",
    "clients": "data.clients",
    "model": "model.name",
    "lr": "algorithm.lr",
}  # and the settings of a run under their own names


def collect(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings among a command's arguments, nested as in an experiment file; --set beats a named option."""
    if given.get("portable"):
        portable.pin()  # before torch is imported
    from polyfed.core.settings import kebab, typed_as, types_of, value_of
    from polyfed.experiment.config import assign

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
