"""polyfed config: every key of an experiment file, from the declarations themselves."""

import json
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

from rich.text import Text

from polyfed.base.errors import ConfigError, closest
from polyfed.base.settings import kebab, settings_of
from polyfed.base.values import either
from polyfed.cli.commands import Config
from polyfed.cli.options import FILE
from polyfed.cli.screen import grid, stdout
from polyfed.core.schedule import SCHEDULES
from polyfed.runs.config import METHODS
from polyfed.runs.threats import ATTACKS, RULES
from polyfed.runs.training import Model

LISTED = """# The methods to compare. [algorithm] without a name holds settings for all of them.
# `polyfed algorithms NAME` lists a method's settings; file = "own_method.py" names a method of your own.
"""
LISTED += METHODS


class Key(NamedTuple):
    """A key of an experiment file. default: None where it is not set; only_for: names that have it, if not all do."""

    name: str
    default: Any
    takes: str
    meaning: str
    only_for: tuple[str, ...] = ()

    def says(self) -> str:
        """Its meaning, and for which names of its table it has one."""
        return self.meaning + (f" Only for {', '.join(self.only_for)}." if self.only_for else "")

    def value(self) -> str:
        """Its default as TOML; empty where there is none."""
        return "" if self.default is None else json.dumps(self.default)


def keys() -> list[Key]:
    """Every key, those at the top of a file first; a table's keys begin with its name."""
    named = {"schedule": SCHEDULES, "attack": ATTACKS, "robust": RULES}
    rows: list[Key] = []
    for table in FILE.values():
        at = f"{table.table}." if table.table else ""
        for s in settings_of(table):
            if s.name in named:
                rows += [Key(f"{s.name}.name", None, either(sorted(named[s.name])), s.doc)]
                rows += _named(s.name, named[s.name])
            elif table is Model and s.name == "options":
                rows.append(Key("model.OPTION", None, "see polyfed.models", s.doc))
            else:
                rows.append(
                    Key(f"{at}{kebab(s.name)}", s.default if s.default != {} else None, _of_a_file(s.takes), s.doc)
                )
    return rows


def _named(table: str, registry: dict[str, Any]) -> list[Key]:
    """The settings of whatever a table can name; several that share one are one row."""
    rows: dict[Key, list[str]] = {}
    for name, cls in registry.items():
        for s in settings_of(cls):
            default = s.default if isinstance(s.default, int | float) else None
            if table != "schedule" or s.name not in ("fraction", "delays"):  # a key of its own; written as text
                row = Key(f"{table}.{kebab(s.name)}", default, _of_a_file(s.takes), s.doc)
                rows.setdefault(row, []).append(name)
    listed = [row if len(of) == len(registry) else row._replace(only_for=tuple(of)) for row, of in rows.items()]
    if table == "schedule":
        takes = "uniform:LOW,HIGH, log-normal:MEDIAN,SHAPE or file:PATH.csv"
        listed.append(Key("schedule.delays", None, takes, "Seconds from message to reply, on a virtual clock."))
    return sorted(listed, key=lambda row: row.name)


def _of_a_file(takes: str) -> str:
    return takes.replace(", a function or none", " or none").replace(", a function", "")


def toml() -> str:
    """An experiment file that sets every default; what has none is a comment."""
    parts: list[str] = ["# Every key of an experiment file with its default; a key in a comment is not set.\n"]
    table = ""
    for key in keys():
        head, _, last = key.name.rpartition(".")
        if head in ("data", "columns", "model") and head != table:
            table = head
            parts.append(f"[{head}]\n")
        name = last if head == table else key.name
        text = textwrap.fill(f"{key.says()} Takes {key.takes}.", 118, initial_indent="# ", subsequent_indent="# ")
        live = key.default is not None and not (head and head != table)
        parts.append(f"{text}\n{'' if live else '# '}{name} = {key.value() or '...'}\n")
    return "\n".join([*parts, LISTED])


def config(o: Config) -> None:
    if o.as_toml:
        if o.key is not None:
            raise ConfigError(f"--toml: prints every key; leave out {o.key!r}")
        print(toml(), end="")
        return
    table = grid("key", "default", "takes", "meaning", tight=("key", "default"))
    for row in keys() if o.key is None else _matching(o.key):
        table.add_row(Text(row.name, "cyan"), Text(row.value()), Text(row.takes), Text(row.says()))
    stdout.print(table)
    if o.key is None:
        stdout.print(Text("\nThe keys of [algorithm] are the method's settings: polyfed algorithms NAME", "dim"))


def _matching(typed: str) -> list[Key]:
    """The key of this name, in whichever table, or the keys of the table of this name."""
    wanted = kebab(typed)
    fits: tuple[Callable[[str], bool], ...] = (
        lambda name: name == wanted or name.startswith(f"{wanted}."),
        lambda name: name.rpartition(".")[2] == wanted,
    )
    for fit in fits:
        if matches := [key for key in keys() if fit(key.name)]:
            return matches
    names = dict.fromkeys(name for key in keys() for name in (key.name, key.name.rpartition(".")[2]))
    where = "polyfed config lists the keys of a file, polyfed algorithms NAME the settings of a method"
    raise ConfigError(f"key: unknown {typed!r}{closest(wanted, names)}; {where}")
