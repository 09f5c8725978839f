"""Arguments of public calls, checked as settings are: by the types that the call declares, and in the same words."""

import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, Union

from polyfed.base.errors import ConfigError, PolyfedError
from polyfed.base.settings import Configured, found, is_list, is_mapping, shown
from polyfed.base.values import MOST, Misfit, expected, fitted, near

T = TypeVar("T")


def checked(thing: T) -> T:
    """A function, or a class's public methods, with a ConfigError for arguments not of their declared types."""
    given: Any = thing
    if not inspect.isclass(given):
        return _checking(given)
    made = () if issubclass(given, Configured) else ("__init__",)  # settings are checked anyway
    for name, member in [*vars(given).items()]:
        function = getattr(member, "__func__", member)
        if isinstance(function, types.FunctionType) and (not name.startswith("_") or name in made):
            again: Any = member.__class__  # staticmethod or classmethod
            guarded = _checking(function, getattr(given, "scope", dict[str, Any]))
            setattr(given, name, guarded if member is function else again(guarded))
    return thing


Scope = Callable[[], dict[str, Any]]  # what types are written with, see `Configured.scope`


def _checking(function: Callable[..., Any], scope: Scope = dict[str, Any]) -> Any:
    whose, rules = function.__qualname__.removesuffix(".__init__"), functools.cache(lambda: _rules(function, scope()))

    @functools.wraps(function)
    def wrapper(*args: Any, **given: Any) -> Any:
        each, rest, named, more = rules()
        taken = [(each[k] if k < len(each) else rest).taken(value, whose) for k, value in enumerate(args)]
        return function(*taken, **{key: named.get(key, more).taken(value, whose) for key, value in given.items()})

    return wrapper


class _Rule(NamedTuple):
    """Rule for one argument; instances of `classes` always fit, so that most calls cost next to nothing."""

    name: str
    hint: Any
    classes: tuple[type, ...]

    def taken(self, value: Any, whose: str) -> Any:
        """The value as the argument takes it; a list or a table stays the caller's own."""
        if isinstance(value, self.classes) or (self.hint is int and type(value) is int and abs(value) <= MOST):
            return value
        try:
            fit: Any = fitted(value, self.hint)
        except Misfit:
            problem = found(value, expected(self.hint, value), near(self.hint, value))
            raise ConfigError(f"{self.name} of {whose}: {problem}") from None
        own = fit.__class__ is not tuple and any(test(value) and test(fit) for test in (is_mapping, is_list))
        return value if own else fit


FREE = _Rule("", Any, (object,))  # anything goes


def _rules(function: Callable[..., Any], scope: dict[str, Any]) -> tuple[list[_Rule], _Rule, dict[str, _Rule], _Rule]:
    """The rules of a function: by position, of `*args`, by name, of `**given`."""
    hints, kinds = _hints(function, scope), inspect.signature(function).parameters
    named = {key: FREE if (hint := hints.get(key, Any)) is Any else _Rule(key, hint, _classes(hint)) for key in kinds}
    each = [named[key] for key, p in kinds.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = [named.pop(key) for key, p in kinds.items() if p.kind is p.VAR_POSITIONAL]
    more = [named.pop(key) for key, p in kinds.items() if p.kind is p.VAR_KEYWORD]
    return each, next(iter(rest), FREE), named, next(iter(more), FREE)


def _hints(function: Callable[..., Any], scope: dict[str, Any]) -> dict[str, Any]:
    """The types of a function's parameters; a public name that its file imports for types alone is looked up."""
    parameters = {key: hint for key, hint in function.__annotations__.items() if key != "return"}
    public = sys.modules["polyfed"]
    while True:
        try:
            holder: Any = types.SimpleNamespace(__annotations__=parameters)
            return typing.get_type_hints(holder, function.__globals__, scope, include_extras=True)
        except NameError as e:
            name = str(e.name)
            if name not in public.__all__:
                raise
            scope[name] = getattr(public, name)


def _classes(hint: Any) -> tuple[type, ...]:
    if typing.get_origin(hint) in (types.UnionType, Union):
        return tuple(c for one in typing.get_args(hint) for c in _classes(one))
    plain = isinstance(hint, type) and typing.get_origin(hint) is None
    return (hint,) if plain and hint not in (int, float, str, tuple, Path) else ()


def answer(
    subject: str, function: Callable[..., Any], *given: Any, takes: Any = Any, through: tuple[type[Exception], ...] = ()
) -> Any:
    """Return a user's function's result as the type `takes`; ConfigError names the function, the setting `subject`.

    Errors of `through` are the function's own and pass.
    """
    try:
        value = function(*given)
    except (PolyfedError, *through):
        raise
    except Exception as e:
        problem = " ".join(str(e).split())[:200]
        raise ConfigError(f"{subject}: {_known_as(function)} failed: {type(e).__name__}: {problem}") from e
    if takes is Any or (isinstance(takes, type) and isinstance(value, takes)):  # at once: some are called in every step
        return value
    try:
        return fitted(value, takes)
    except Misfit:
        problem = found(value, expected(takes, value))
        raise ConfigError(f"{subject}: {_known_as(function)} gave something else: {problem}") from None


def _known_as(function: Any) -> str:
    """A user's function by its name and the line that it begins in."""
    while isinstance(function, functools.partial):
        function = next(filter(callable, function.args), function.func)
    code = getattr(function, "__code__", None)
    place = "" if code is None else f" ({code.co_filename.rpartition('/')[2]}, line {code.co_firstlineno})"
    return f"{getattr(function, '__name__', shown(function))}{place}"
