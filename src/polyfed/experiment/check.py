"""Checking tables of settings: pydantic finds what is wrong, one line here says it: which key, from where, what was
found, what is allowed, and the closest known name.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from polyfed.core.errors import ConfigError, PolyfedError, closest
from polyfed.core.settings import expected, found, none_of, words


def kebab(name: str) -> str:
    """local_epochs -> local-epochs"""
    return name.replace("_", "-")


class Table(BaseModel):
    """Base of every table: kebab-case keys, exact types, nothing unknown."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, alias_generator=kebab)


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
            if not isinstance(table, dict) or part not in table:
                return f"{self.file}: {key}" if self.file is not None else key
            table = table[part]
        return key

    def said(self, error: PolyfedError, key: str) -> ConfigError:
        """An error about a setting of `key`, with the file it was set in and its name as files have it."""
        text, full = str(error), f"{key}.{kebab(error.key)}" if error.key else key
        if error.key:
            text = text.replace(f".{error.key} of", f".{kebab(error.key)} of", 1)
        return ConfigError(f"{self(full).removesuffix(full)}{text}")


def table_of(value: Any, key: str, where: Where) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where(key)}: {found(value, f'a table [{key}]')}")
    return value


def check(
    model: type[T], values: Mapping[str, Any], prefix: str, where: Where, tables: Iterable[str] = (), of: str = ""
) -> T:
    """`values` as a `model`, or ConfigError for the first key that is wrong."""
    fields = {kebab(name): field for name, field in model.model_fields.items()}
    values = {k: none_of(v, fields[k].annotation) if k in fields else v for k, v in values.items()}
    try:
        return model.model_validate(values)
    except ValidationError as e:
        error = e.errors()[0]
    key = str(error["loc"][0])
    name = where(f"{prefix}.{key}" if prefix else key)
    if error["type"] == "extra_forbidden":
        known = [*fields, *tables]
        what = f"unknown setting of {of}" if of else "unknown key"
        raise ConfigError(f"{name}: {what}{closest(key, known)}; known: {', '.join(sorted(known)) or 'none'}")
    if error["type"] == "missing":
        raise ConfigError(f"{name}: is missing; {of or 'the experiment'} needs {words(_hint(fields[key]))}")
    raise ConfigError(f"{name}: {found(values[key], expected(_hint(fields[key]), values[key]))}")


def _hint(field: Any) -> Any:
    return Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
