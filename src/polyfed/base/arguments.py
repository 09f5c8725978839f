"""Arguments of public calls, checked as settings are: by the types that the call declares, and in the same words."""

import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, Union

from polyfed.base.errors import ConfigError, PolyfedError
from polyfed.base.settings import Configured, Misfit, expected, fitted, found, near, shown

T = TypeVar("T")
KINDS = [getattr(inspect.Parameter, k) for k in ("POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD", "VAR_POSITIONAL")]
KINDS += [inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD]


def checked(thing: T) -> T:
    """A function that refuses wrong arguments: a ConfigError in one line, by the types that it declares.

    Of a class: its public methods, and what makes one unless its fields are settings. A call that does not fit the
    signature stays Python's own TypeError.
    """
    if not isinstance(thing, type):
        return typing.cast("T", _checking(typing.cast("Callable[..., Any]", thing)))
    made = () if issubclass(thing, Configured) else ("__init__",)
    members: list[tuple[str, Any]] = [*vars(thing).items()]
    for name, member in members:
        kind: Any = member.__class__ if isinstance(member, staticmethod | classmethod) else _itself
        function: Any = getattr(member, "__func__", member)
        if isinstance(function, types.FunctionType) and (not name.startswith("_") or name in made):
            setattr(thing, name, kind(_checking(function, getattr(thing, "scope", dict))))
    return typing.cast("T", thing)


def _itself(function: T) -> T:
    return function


Scope = Callable[[], dict[str, Any]]  # what types are written with, see `Configured.scope`


def _checking(function: Callable[..., Any], scope: Scope = dict) -> Callable[..., Any]:
    whose, rules = function.__qualname__.removesuffix(".__init__"), functools.cache(lambda: _rules(function, scope()))

    @functools.wraps(function)
    def wrapper(*args: Any, **given: Any) -> Any:
        each, rest, named, more = rules()
        changed: dict[int, Any] = {}
        for k, value in enumerate(args):
            rule = each[k] if k < len(each) else rest
            if rule is not None and not isinstance(value, rule.classes):
                changed[k] = rule.taken(value, whose)
        for key, value in given.items():
            rule = named.get(key, more)
            if rule is not None and not isinstance(value, rule.classes):
                given[key] = rule.taken(value, whose)
        if changed:
            args = tuple(changed.get(k, value) for k, value in enumerate(args))
        return function(*args, **given)

    return wrapper


class _Rule(NamedTuple):
    """What an argument takes. classes: those whose every instance fits, so that most calls cost next to nothing"""

    name: str
    hint: Any
    classes: tuple[type, ...]

    def taken(self, value: Any, whose: str) -> Any:
        try:
            fit = fitted(value, self.hint)
        except Misfit:
            said = found(value, expected(self.hint, value), near(self.hint, value))
            raise ConfigError(f"{self.name} of {whose}: {said}") from None
        lists = list | Mapping
        return value if isinstance(value, lists) and isinstance(fit, lists) else fit  # a list stays the caller's own


class _Rules(NamedTuple):
    """The rules of a function: by position, of `*args`, by name, of `**given`; None where anything goes."""

    each: list[_Rule | None]
    rest: _Rule | None
    named: dict[str, _Rule | None]
    more: _Rule | None


def _rules(function: Callable[..., Any], scope: dict[str, Any]) -> _Rules:
    hints = _hints(function, scope)
    found: dict[Any, dict[str, _Rule | None]] = {kind: {} for kind in KINDS}
    for p in inspect.signature(function).parameters.values():
        hint = hints.get(p.name, Any)
        found[p.kind][p.name] = None if hint is Any else _Rule(p.name, hint, _classes(hint))
    first, both, rest, named, more = found.values()
    one = [next(iter(rules.values()), None) for rules in (rest, more)]
    return _Rules([*first.values(), *both.values()], one[0], both | named, one[1])


def _hints(function: Callable[..., Any], scope: dict[str, Any]) -> dict[str, Any]:
    """The types of a function's parameters; a public name that its file imports for types alone is looked up."""
    parameters = {key: hint for key, hint in function.__annotations__.items() if key != "return"}
    public = sys.modules["polyfed"]
    while True:
        try:
            asked: Any = types.SimpleNamespace(__annotations__=parameters)
            return typing.get_type_hints(asked, function.__globals__, scope, include_extras=True)
        except NameError as e:
            if e.name is None or e.name not in public.__all__:
                raise
            scope[e.name] = getattr(public, e.name)


def _classes(hint: Any) -> tuple[type, ...]:
    if typing.get_origin(hint) in (types.UnionType, Union):
        return tuple(c for one in typing.get_args(hint) for c in _classes(one))
    plain = isinstance(hint, type) and typing.get_origin(hint) is None
    return (hint,) if plain and hint not in (int, float, str, tuple) else ()


def answer(
    what: str, function: Callable[..., Any], *given: Any, takes: Any = Any, through: tuple[type[Exception], ...] = ()
) -> Any:
    """What a user's function gives, as the type `takes` has it. Raises ConfigError, which names the function, where it
    fails or gives something else.

    what: the setting that the function is     through: errors of the function's own that mean something to the caller
    """
    try:
        value = function(*given)
    except (PolyfedError, *through):
        raise
    except Exception as e:
        said = " ".join(str(e).split())[:200]
        raise ConfigError(f"{what}: {_known_as(function)} failed: {type(e).__name__}: {said}") from e
    if takes is Any or (isinstance(takes, type) and isinstance(value, takes)):  # at once: some are called in every step
        return value
    try:
        return fitted(value, takes)
    except Misfit:
        said = found(value, expected(takes, value))
        raise ConfigError(f"{what}: {_known_as(function)} gave something else: {said}") from None


def _known_as(function: Any) -> str:
    """A user's function by its name and the line that it begins in."""
    while isinstance(function, functools.partial):
        function = next(filter(callable, function.args), function.func)
    code = getattr(function, "__code__", None)
    place = "" if code is None else f" ({code.co_filename.rpartition('/')[2]}, line {code.co_firstlineno})"
    return f"{getattr(function, '__name__', shown(function))}{place}"
