"""Text of the user's as settings: TOML values, and things as `name:value,key=value`."""

import re
import tomllib
import types
import typing
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from datetime import date, time
from typing import Annotated, Any, TypeAlias, Union

from polyfed.base.errors import ConfigError, PolyfedError
from polyfed.base.values import LONGEST, MOST, Misfit, fitted, found, none_of, shown

DEEPEST = 20  # lists and tables within each other
BEGINS, ENDS = r"(?<![\w.])\.(?=\d)", r"(?<=\d)\.(?![\d.])"  # the points of .5 and 5.
Toml: TypeAlias = "str | float | date | time | Sequence[Toml] | Mapping[str, Toml] | None"
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # begins a cell that a spreadsheet takes for a formula


def nfc(text: str) -> str:
    """The form in which names, categories and labels are compared: ü as one character, not as u and two dots."""
    return text if unicodedata.is_normalized("NFC", text) else unicodedata.normalize("NFC", text)


def value_of(text: str, place: str = "value") -> Any:
    """A setting typed as text: a TOML value, with points as in .25 and 1. allowed, or else the text itself."""
    _readable(text, place)
    if "\n" in text:
        return text
    pointed = text if "'" in text or '"' in text else re.sub(ENDS, ".0", re.sub(BEGINS, "0.", text))
    for typed in (text, pointed):
        try:
            return tomllib.loads(f"x = {typed}")["x"]
        except tomllib.TOMLDecodeError:
            continue
        except (ValueError, RecursionError):  # an integer of thousands of digits
            raise ConfigError(f"{place}: {found(text, 'a value of fewer digits')}") from None
    return text


def _readable(text: str, place: str, refusal: type[PolyfedError] = ConfigError) -> None:
    depth = deepest = 0
    for c in text:
        depth += (c in "[{") - (c in "]}")
        deepest = max(deepest, depth)
    if "\0" in text or len(text) > LONGEST or deepest > DEEPEST:
        limits = f"at most {LONGEST} characters, none of them NUL, and at most {DEEPEST} nested brackets"
        raise refusal(f"{place}: {found(text, limits)}")


def plain(value: Toml, where: Callable[[str], str] = str, key: str = "", depth: int = 0) -> None:
    """Raise ConfigError for values of no setting: text with NUL or without end, integers beyond 2^63, deep nesting."""
    if isinstance(value, str) and ("\0" in value or len(value) > LONGEST):
        raise ConfigError(f"{where(key)}: {found(value, f'at most {LONGEST} characters, none of them NUL')}")
    if isinstance(value, int) and abs(value) > MOST:
        raise ConfigError(f"{where(key)}: {found(value, 'an integer below 2^63')}")
    if depth > DEEPEST:
        raise ConfigError(f"{where(key)}: {found(value, f'at most {DEEPEST} nested tables or lists')}")
    if isinstance(value, Mapping):
        for k, v in value.items():
            plain(k, where, key or shown(k), depth)
            plain(v, where, f"{key}.{k}" if key else str(k), depth + 1)
    elif isinstance(value, list | tuple):
        for v in value:
            plain(v, where, key, depth + 1)


def parse(text: str, place: str, refusal: type[PolyfedError] = ConfigError) -> tuple[str, list[str], dict[str, str]]:
    """`name:value,value,key=value` -> (name, values, {key: value}), as text; keys in snake_case, after values."""
    _readable(text, place, refusal)
    name, _, rest = text.partition(":")
    values: list[str] = []
    named: dict[str, str] = {}
    for item in split(rest):
        head, equals, tail = item.partition("=")
        key = head.strip().replace("-", "_")
        if not equals and not named:
            values.append(item)
        elif not equals or not key or key in named:
            raise refusal(
                f"{place}: found {shown(item)} in {shown(text)}, expected name:key=value,key=value, each key once"
            )
        else:
            named[key] = tail.strip()
    return name.strip(), values, named


def split(text: str) -> list[str]:
    """Text cut at its commas, but for those within brackets or quotes."""
    parts, depth, quote = [""], 0, ""
    for c in text:
        if quote:
            quote = "" if c == quote else quote
        elif c in "\"'":
            quote = c
        depth += 0 if quote else (c in "[{(") - (c in "]})")
        if c == "," and not quote and depth <= 0:
            parts.append("")
        else:
            parts[-1] += c
    return [part.strip() for part in parts if part.strip()]


def read(text: str, hint: Any) -> Any:
    """Text as the type takes it, or Misfit: words as they are, tuples as 0/90 or 0-1/2-3, all else as in TOML."""
    for candidate in (text, *_lists(text, hint), *toml_of(text)):
        try:
            return fitted(none_of(candidate, hint), hint)
        except Misfit:
            continue
    raise Misfit


def typed_as(text: str, hint: Any) -> Any:
    """Text typed as a setting: a TOML value where the type takes it, else the text itself, whatever it looks like."""
    value = value_of(text)
    for candidate in (value, text):
        try:
            fitted(none_of(candidate, hint), hint)
            return candidate
        except Misfit:
            continue
    return value


def toml_of(text: str) -> list[Any]:
    """The text as a TOML value, if it can be one."""
    try:
        return [value_of(text)]
    except ConfigError:
        return []


def _lists(text: str, hint: Any) -> list[Any]:
    """Text cut at "/", and at "-" where the type is of pairs."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is not tuple:
        return [one for a in arguments if origin in (types.UnionType, Union, Annotated) for one in _lists(text, a)]
    pairs = typing.get_origin(arguments[0]) is tuple
    parts = [part.split("-") if pairs else [part] for part in text.split("/")]
    typed = [[v for p in part for v in toml_of(p)] for part in parts]
    return [typed if pairs else [v for part in typed for v in part]]


def marked(text: str) -> str:
    """A text as a CSV cell; what begins like a formula, or like a text so marked, gets an apostrophe in front."""
    return f"'{text}" if text.startswith(FORMULA) or unmarked(text) != text else text


def unmarked(cell: str) -> str:
    """The text that `marked` was given."""
    return cell[1:] if cell.startswith("'") and cell[1:].startswith((*FORMULA, "'")) else cell
