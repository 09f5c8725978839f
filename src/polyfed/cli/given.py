"""The settings among a command's options."""

from collections.abc import Mapping
from typing import Any, TypeVar

from polyfed.base.settings import kebab, typed_as, types_of, value_of
from polyfed.cli.options import FILE, Command
from polyfed.runs.config import Where, assign, read_table
from polyfed.runs.training import Table

T = TypeVar("T", bound=Table)


def collect(command: Command) -> dict[str, Any]:
    """The settings of a command, nested as in an experiment file; --set beats a named option."""
    table: dict[str, Any] = {}
    for name, spec in command.specs.items():
        key, value = spec.key, getattr(command, name)
        if not key or value is None or value is False:
            continue
        parent, _, last = key.rpartition(".")
        if key == "columns.drop":
            value = [column.strip() for column in value.split(",")]
        elif isinstance(value, str):
            text = f"[{value}]" if key == "seeds" and "," in value else value
            hint = types_of(FILE[parent]).get(last.replace("-", "_")) if parent in FILE else None
            value = value_of(text) if hint is None else typed_as(text, hint)
        (table.setdefault(parent, {}) if parent else table)[last] = value
    for text in getattr(command, "set", None) or ():
        assign(table, text)
    return table


def read(table: type[T], given: Mapping[str, Any]) -> T:
    """The settings of a table among what is given by name; text is read as the setting's type takes it."""
    values = {name: (given[name], hint) for name, hint in types_of(table).items() if given.get(name) is not None}
    typed = {kebab(name): typed_as(v, hint) if isinstance(v, str) else v for name, (v, hint) in values.items()}
    return read_table(table, typed, Where(None, {}, {}))
