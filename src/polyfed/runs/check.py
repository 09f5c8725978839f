"""Tables of an experiment file as settings; one line says what is wrong: which key, from where, what was found, what is
allowed, and the closest known name.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from polyfed.base.errors import ConfigError, PolyfedError, closest
from polyfed.base.settings import found, is_table, kebab, types_of
from polyfed.base.values import none_of
from polyfed.runs.training import Table

T = TypeVar("T", bound=Table)


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
            known = [*types, *also]
            name = where(f"{cls.table}.{key}" if cls.table else key)
            raise ConfigError(f"{name}: unknown key{closest(key, known)}; known: {', '.join(sorted(known))}")
    try:
        return cls(**{key.replace("-", "_"): none_of(value, types[key]) for key, value in values.items()})
    except PolyfedError as e:
        raise where.said(e, cls.table) from None
