"""Values: what a type takes, checked by pydantic to rules of our own, and in words; errors are made of the words."""

import collections.abc
import math
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union

from polyfed.base.errors import closest

MOST = 2**63 - 1  # what an integer tensor holds
COUNTED = 10**9  # a bound on counts, which is not worth a word where it was kept
LONGEST = 4000  # characters of one value
NAME = 255  # bytes of a file's name


class Limits(NamedTuple):
    """Bounds on a number, for types that have no field of their own: Annotated[int, Limits(ge=1)]."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None


FREE = Limits()
COUNT = Annotated[int, Limits(ge=1, le=COUNTED)]
NOT_NEGATIVE = Annotated[float, Limits(ge=0, le=1e6)]


class Words(NamedTuple):
    """Says what a setting takes, where its type does not: Annotated[str, Words("an expression in k")]."""

    words: str


# whether a type takes a value

UNIONS = (types.UnionType, Union)
MAPPINGS = (dict, collections.abc.Mapping)
MANIFOLD = (list, tuple, collections.abc.Sequence, collections.abc.Iterable)
WHOLE = {"ge": math.ceil, "gt": math.floor, "le": math.floor, "lt": math.ceil}  # a bound, for integers


class Misfit(ValueError):
    """A value is not of a type, or not within its bounds."""


def unboxed(value: Any) -> Any:
    """A value that a file can hold: numpy's scalars as Python's."""
    return value.item() if "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].generic) else value


def fitted(value: Any, hint: Any) -> Any:
    """`value` as the type takes it, or Misfit: integers become numbers, lists tuples, numpy's scalars Python's."""
    spelled = repr(hint)  # int | float equals float | int, and does not take 1 alike
    cached = _FITS.get(spelled)
    if cached is None or cached[0] != hint:
        cached = _FITS[spelled] = hint, fit_of(hint)
    return cached[1](value)


_FITS: dict[str, tuple[Any, Callable[[Any], Any]]] = {}


def fit_of(hint: Any) -> Callable[[Any], Any]:
    """`fitted` of one type."""
    from pydantic import TypeAdapter, ValidationError  # here, since help does without

    check = TypeAdapter[Any](_strict(hint)).validator.validate_python

    def fit(value: Any) -> Any:
        try:
            return check(value)
        except ValidationError:
            raise Misfit from None

    return fit


def _strict(hint: Any, rules: tuple[Any, ...] = ()) -> Any:
    """The type for pydantic, with our rules, such as Limits, that annotate it."""
    import pydantic as p

    hint = tuple[Any, ...] if hint is tuple else hint
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _strict(arguments[0], (*rules, *arguments[1:]))
    inner: Any = Any
    if origin in UNIONS:
        each: Any = Union[tuple(_strict(a, rules) for a in arguments)]  # noqa: UP007  # pyrefly: ignore[invalid-annotation]
        inner = Annotated[each, p.Field(union_mode="left_to_right")]
    elif hint in (int, float):
        inner = _number(hint, rules)
    elif hint is bool:
        inner = Annotated[bool, p.Strict()]
    elif hint in (None, type(None)) or origin is Literal:
        inner = hint
    elif origin is tuple:
        inner = tuple[tuple(a if a is ... else _strict(a) for a in arguments)]  # pyrefly: ignore[invalid-annotation]
    elif origin in MAPPINGS:
        inner = dict[_strict(arguments[0]), _strict(arguments[1])]  # pyrefly: ignore[invalid-annotation]
    elif origin in MANIFOLD:
        inner = _listed(origin, _strict(arguments[0]))
    holds = _test(hint, origin, arguments)

    def looked_at(value: Any) -> Any:
        value = unboxed(value)
        if not holds(value):
            raise Misfit
        return value

    return Annotated[inner, p.BeforeValidator(looked_at)]


def _number(hint: Any, rules: Iterable[Any]) -> Any:
    """An integer below 2^63, or a number that is endless only where that is its bound."""
    from pydantic import Field, Strict

    limits: dict[str, Any] = _tightest([*rules, Limits(ge=-MOST, le=MOST) if hint is int else Limits(gt=-math.inf)])
    if hint is float:
        return Annotated[float, Strict(), Field(allow_inf_nan=limits.get("le") == math.inf, **limits)]
    return Annotated[int, Strict(), Field(**{k: WHOLE[k](b) for k, b in limits.items() if math.isfinite(b)})]


def _tightest(rules: Iterable[Any]) -> dict[str, float]:
    """The bounds that say more than the others of their kind."""
    given = {key: [b for r in rules if (b := getattr(r, key, None)) is not None] for key in Limits._fields}
    return {key: (max if key in ("ge", "gt") else min)(bounds) for key, bounds in given.items() if bounds}


def _listed(origin: Any, inner: Any) -> Any:
    """A list or its like: a tuple, a range, an array, a column of a table. Only of a list a new one is made."""
    from pydantic import WrapValidator

    def listed(value: Any, each: Callable[[Any], Any]) -> Any:
        like = [hasattr(value, name) for name in ("__iter__", "__len__", "__getitem__")]
        if origin is collections.abc.Iterable and like[0] and not like[2]:  # it may have no end
            return value
        dim = getattr(value, "ndim", None)
        if not all(like) or dim == 0 or isinstance(value, str | bytes | Mapping):
            raise Misfit
        items = each(value.tolist() if dim == 1 else [*value])
        return items if origin is list else value

    return Annotated[list[inner], WrapValidator(listed)]


def _test(hint: Any, origin: Any, arguments: tuple[Any, ...]) -> Callable[[Any], bool]:
    """Return the test that a value must pass before pydantic sees it."""
    kind = origin or hint
    if hint is str:
        return lambda v: isinstance(v, str) and "\0" not in v and len(v) <= LONGEST
    if hint is Path:
        return lambda v: isinstance(v, Path) and _openable(v)
    if origin in UNIONS and Path in arguments:
        return lambda v: not isinstance(v, str) or _openable(v)
    if origin is Literal:
        return lambda v: type(v) in {type(a) for a in arguments}  # 1 equals True
    if kind is tuple:
        return lambda v: isinstance(v, list | tuple)
    if kind is Callable:
        return callable
    if hint is float:
        return lambda v: isinstance(v, int | float)  # pydantic takes an array of no dimensions
    free = hint is Any or hint is int or origin in (*UNIONS, *MANIFOLD, *MAPPINGS)
    return lambda v: free or not isinstance(kind, type) or isinstance(v, kind)


def _openable(path: str | Path) -> bool:
    return "\0" not in str(path) and all(len(part.encode(errors="replace")) <= NAME for part in Path(path).parts)


def allows_none(hint: Any) -> bool:
    """True where None is a value of this type."""
    if typing.get_origin(hint) is Annotated:
        return allows_none(typing.get_args(hint)[0])
    return type(None) in typing.get_args(hint) or hint is Any


def none_of(value: Any, hint: Any) -> Any:
    """TOML has no null: "none" where the type allows it."""
    return None if isinstance(value, str) and value == "none" and allows_none(hint) else value


# what a type takes, in words

WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "none"}
NAMED = {  # classes, by their names: not all of them are loaded
    "Path": "a path",
    "Module": "a torch.nn.Module, such as polyfed.models.build makes",
    "Federation": "a polyfed.Federation, such as Federation.from_arrays makes",
    "Contender": "a method such as polyfed.FedAvg(lr=0.1)",
    "Algorithm": "a method such as polyfed.FedAvg(lr=0.1)",
    "Tensor": "a tensor",
    "SupportsFloat": "a number",
    "ndarray": "an array",
}
MANY = {int: "integers", float: "numbers", str: "texts"}


def words(hint: Any, rules: Iterable[Any] = ()) -> str:
    """Say what a setting of this type takes."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return words(arguments[0], [*rules, *(m for a in arguments[1:] for m in getattr(a, "metadata", (a,)))])
    rules = [*rules]
    stated = next((r.words for r in rules if isinstance(r, Words)), None)
    if stated is not None:
        return stated
    if origin in (types.UnionType, Union):
        arguments = tuple(a for a in arguments if a is not str or Path not in arguments)  # a path may be text
        return either(list(dict.fromkeys(word for a in arguments for word in _alternatives(a, rules))))
    if origin is Literal:
        return either(_alternatives(hint))
    if hint in (int, float):
        return WORDS[hint] + bounds(rules)
    if origin is tuple and ... not in arguments:
        return f"({', '.join(map(words, arguments))})"
    if origin in MANIFOLD or hint in MANIFOLD:
        inner = (
            typing.get_args(arguments[0])[0]
            if arguments and typing.get_origin(arguments[0]) is Annotated
            else (*arguments, None)[0]
        )
        each = f", each {words(inner)}" if isinstance(inner, type) else ""
        return f"a list of {MANY[inner]}" if inner in MANY else f"a list{each}"
    if origin is Callable:
        return "a function"
    if isinstance(hint, type) and hint not in WORDS and origin is None and hint.__module__ != "builtins":
        return NAMED.get(hint.__name__, f"{'an' if hint.__name__[0] in 'AEIOU' else 'a'} {hint.__name__}")
    return WORDS.get(hint, "a table" if origin in (dict, collections.abc.Mapping) or hint is dict else "a value")


def spelled(hint: Any) -> str:
    """A type as a docstring names it: float or None."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return spelled(arguments[0])
    if origin is Literal:
        return " or ".join(f'"{a}"' if isinstance(a, str) else str(a) for a in arguments)
    if origin in UNIONS:
        return " or ".join(dict.fromkeys(map(spelled, arguments)))
    if origin is not None and origin is not Callable:
        return f"{origin.__name__}[{', '.join(map(spelled, arguments))}]"
    fixed = {type(None): "None", ...: "...", Callable: "callable"}.get(origin or hint)
    return fixed or getattr(hint, "__name__", str(hint))


def _alternatives(hint: Any, rules: Iterable[Any] = ()) -> list[str]:
    if typing.get_origin(hint) is Literal:
        return [str(a).lower() if isinstance(a, bool) else str(a) for a in typing.get_args(hint)]
    return [words(hint, () if hint is type(None) else rules)]


def expected(hint: Any, value: Any) -> str:
    """Say what a setting takes, where `value` was refused."""
    text = words(hint)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > COUNTED:
        return f"{text}, at most {COUNTED}" if 0 < value <= MOST else f"{text}, below 2^63"
    if isinstance(value, float) and not math.isfinite(value):
        return text.replace("a number", "a finite number")
    if isinstance(value, str | Path) and NAMED["Path"] in text:
        return text.replace(NAMED["Path"], f"a path whose names have at most {NAME} bytes and no NUL")
    if isinstance(value, str) and ("\0" in value or len(value) > LONGEST):
        return f"{text}, at most {LONGEST} characters and none of them NUL"
    return text


def bounds(rules: Iterable[Any]) -> str:
    """Bounds in words, to go behind "a number"."""
    limit = {key: value for key, value in _tightest(rules).items() if value < COUNTED}
    shown = {key: str(value) if isinstance(value, int) else f"{value:g}" for key, value in limit.items()}
    if "ge" in limit and ("le" in limit or "lt" in limit):
        return (
            f" from {shown['ge']} to {shown['le']}" if "le" in limit else f" from {shown['ge']} to below {shown['lt']}"
        )
    names = (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below"))
    parts = [f"{word} {shown[key]}" for key, word in names if key in limit]
    return (" of " if parts and parts[0].startswith("at") else " ") + " and ".join(parts) if parts else ""


def either(words: Sequence[str]) -> str:
    """a, b or c"""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def found(value: Any, expected: str, near: str = "") -> str:
    """The half of an error that every wrong value shares: found ..., expected ..."""
    return f"found {shown(value)}{near}, expected {expected}"


def shown(value: Any, most: int = 80) -> str:
    """A value as an error shows it: in one line, and cut where it is long."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # an integer of thousands of digits; lists within lists; an object whose repr fails
        text = f"{'an' if isinstance(value, int) else 'a'} {type(value).__name__} too long to print"
    return text if len(text) <= most else f"{text[:most]}..."


def near(hint: Any, value: Any) -> str:
    """` (did you mean 'x'?)` for the choice of a type that is nearest to a word."""
    return closest(value, choices(hint)) if isinstance(value, str) and len(value) < 100 else ""


def choices(hint: Any) -> list[str]:
    """The words that a type allows."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return [a for a in arguments if isinstance(a, str)]
    return [word for a in arguments for word in choices(a)]
