"""Checking tables of settings: pydantic finds what is wrong, one line here says it: which key, from where, what was
found, what is allowed, and the closest known name.
"""

import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from polyfed.core.errors import ConfigError, closest


def kebab(name: str) -> str:
    """local_epochs -> local-epochs"""
    return name.replace("_", "-")


class Table(BaseModel):
    """Base of every table: kebab-case keys, exact types, nothing unknown."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, alias_generator=kebab)


T = TypeVar("T", bound=Table)


@dataclass(frozen=True)
class Words:
    """Says what a key takes, where its type does not: Annotated[str, Words("an expression in k")]."""

    words: str


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


def table_of(value: Any, key: str, where: Where) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where(key)}: found {value!r}, expected a table [{key}]")
    return value


def check(
    model: type[T], values: Mapping[str, Any], prefix: str, where: Where, tables: Iterable[str] = (), of: str = ""
) -> T:
    """`values` as a `model`, or ConfigError for the first key that is wrong."""
    fields = {kebab(name): field for name, field in model.model_fields.items()}
    values = {
        k: None if v == "none" and k in fields and _allows_none(fields[k].annotation) else v for k, v in values.items()
    }
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
        raise ConfigError(f"{name}: is missing; {of or 'the experiment'} needs {expected(fields[key])}")
    raise ConfigError(f"{name}: found {values[key]!r}, expected {expected(fields[key])}")


def _allows_none(annotation: Any) -> bool:
    return type(None) in typing.get_args(annotation) or annotation is Any


def expected(field: FieldInfo) -> str:
    """What a key takes, in words."""
    return _words(field.annotation, field.metadata)


WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "none"}


def _words(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        inner = [m for a in arguments[1:] for m in (a.metadata if isinstance(a, FieldInfo) else [a])]
        return _words(arguments[0], inner)
    if origin in (types.UnionType, typing.Union):
        words = [_words(a, metadata if a is not type(None) else ()) for a in arguments]
        return _either(list(dict.fromkeys(words)))
    if origin is Literal:
        return _either([str(a) for a in arguments])
    if origin in (list, tuple):
        return "a list of integers" if "int" in str(arguments) else "a list"
    limits = []
    for m in metadata:
        if isinstance(m, Words):
            return m.words
        pattern = getattr(m, "pattern", None)
        if pattern:
            return "auto, cpu or cuda"
        for kind, word in ((Ge, "at least"), (Gt, "above"), (Le, "at most"), (Lt, "below")):
            if isinstance(m, kind):
                limits.append(f"{word} {getattr(m, kind.__name__.lower())}")
    of = " of " if annotation is int and limits else " "
    return WORDS.get(annotation, "a table" if origin is dict else "a value") + (
        of + " and ".join(limits) if limits else ""
    )


def _either(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
