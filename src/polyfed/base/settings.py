"""Settings: declared once, as dataclass fields with type, default, bounds and source, and checked from that alone."""

import dataclasses
import inspect
import json
import re
import textwrap
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, NamedTuple, NoReturn, TypeGuard

from polyfed.base.errors import ConfigError, PolyfedError, closest
from polyfed.base.text import split as split
from polyfed.base.text import typed_as as typed_as
from polyfed.base.text import value_of as value_of
from polyfed.base.values import (
    FREE,
    Limits,
    Misfit,
    expected,
    fit_of,
    fitted,
    found,
    near,
    none_of,
    shown,
    spelled,
    words,
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A setting's limits, source and meaning, as its field's metadata."""

    limits: Limits = FREE
    source: str = ""  # of the default, such as "paper"
    doc: str = ""
    decides: bool = True  # it decides the numbers of a run, not only how they are computed
    step_size: bool = False  # a step size of a method, which a decaying step size scales
    tune: bool = False  # a method's result hinges on it, so that it is chosen by validation


def setting(
    default: Any = dataclasses.MISSING,
    *,
    factory: Any = dataclasses.MISSING,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    source: str = "",
    doc: str = "",
    decides: bool = True,
    step_size: bool = False,
    tune: bool = False,
) -> Any:
    """A dataclass field that is a setting.

    Parameters
    ----------
    default : object
        The default; without one the setting must be given.
    factory : callable
        Maker of a default that must not be shared, such as a dict.
    ge, gt, le, lt : float or None
        Bounds of a number: at least, above, at most, below.
    source : str
        Source of the default, such as "paper".
    doc : str
        Meaning, in one line.
    decides : bool
        False for a setting that changes only how the numbers of a run are computed.
    step_size : bool
        True for a local step size of a method, at least 0 and scaled by `lr_schedule`. A field named `lr` is one.
    tune : bool
        True if the method's result hinges on it: `tune` chooses it, and `polyfed compare` says where it was left.

    Returns
    -------
    dataclasses.Field
        Typed as anything, so that a type checker accepts it as the field's default.
    """
    if default is not dataclasses.MISSING and factory is not dataclasses.MISSING:
        raise ConfigError(f"setting: found the default {shown(default)} and a factory, expected one of them")
    described = Setting(Limits(ge, gt, le, lt), source, doc, decides, step_size, tune)
    return dataclasses.field(default=default, default_factory=factory, metadata={"setting": described})


class Described(NamedTuple):
    """One setting: its name, what it takes in words, its default (MISSING if there is none), and what `Setting` has."""

    name: str
    takes: str
    default: Any
    doc: str
    source: str
    decides: bool


@cache
def settings_of(cls: type) -> tuple[Described, ...]:
    """The settings of a dataclass, in their order."""
    settings: list[Described] = []
    for f in _fields(cls):
        s, hint = f.metadata.get("setting", Setting()), types_of(cls)[f.name]
        settings.append(Described(f.name, words(hint), _default(f), s.doc, s.source, s.decides))
    return tuple(settings)


def hinges(method: Any) -> list[dataclasses.Field[Any]]:
    """The settings on which a method's result hinges."""
    return [f for f in dataclasses.fields(method) if f.metadata.get("setting", Setting()).tune]


SECTION = r"^(?=([A-Z]\w+)\n-{3,}$)"  # of a numpydoc docstring


class _Docstring:
    """A docstring with the class's settings as its parameters, when it is asked for."""

    def __init__(self, text: str):
        self.text = inspect.cleandoc(text)

    def __get__(self, instance: Any, cls: type) -> str:
        prose, *rest = re.split(SECTION, self.text, maxsplit=1, flags=re.M)
        if not vars(cls).get("__match_args__") or rest[:1] == ["Parameters"]:  # not made yet, or has them by hand
            return self.text
        return "\n\n".join([prose.rstrip(), f"Parameters\n----------\n{parameters(cls)}", *rest[1:]])


def parameters(cls: type) -> str:
    """The settings of a class as the Parameters section of a numpydoc docstring has them."""
    entries = [
        (f"{f.name} : {spelled(types_of(cls)[f.name])}", f.metadata.get("setting", Setting()).doc) for f in _fields(cls)
    ]
    return "\n".join(f"{head}\n{textwrap.indent(textwrap.fill(doc, 112), ' ' * 4)}".rstrip() for head, doc in entries)


class Configured:
    """Base of frozen dataclasses whose fields are settings: all of them are checked whenever one is made.

    A subclass states conditions across fields with `self.require` in a `__post_init__` that first calls super's.
    """

    table: ClassVar[str] = ""  # what goes before a setting's name in an error: "algorithm" for algorithm.lr
    refusal: ClassVar[type[PolyfedError]] = ConfigError

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if text := cls.__dict__.get("__doc__"):
            type.__setattr__(cls, "__doc__", _Docstring(text))

    def __post_init__(self) -> None:
        for key, fit in _fits(type(self)).items():
            given = getattr(self, key)
            try:
                value = fit(given)
            except Misfit:
                hint = types_of(type(self))[key]
                self.refuse(key, expected(hint, given), near(hint, given))
            if value is not given:
                object.__setattr__(self, key, value)

    def require(self, condition: bool, key: str, expected: str) -> None:
        """Refuse the value of the setting `key` unless `condition` holds."""
        if not condition:
            self.refuse(key, expected)

    def refuse(self, key: str, expected: str, near: str = "") -> NoReturn:
        """Raise the error for a value of the setting `key`; `near` is the choice that may have been meant."""
        where = f"{self.table}.{key}" if self.table else key
        error = self.refusal(f"{where} of {type(self).__name__}: {found(getattr(self, key), expected, near)}")
        error.key = key
        raise error from None

    @classmethod
    def implied(cls, name: str) -> Limits:
        """Bounds of a setting that follow from its name, whatever its field says."""
        return FREE

    @classmethod
    def scope(cls) -> dict[str, Any]:
        """Names in the annotations of the settings that a class imports late."""
        return {}


def kebab(name: str) -> str:
    """local_epochs -> local-epochs"""
    return name.replace("_", "-")


# what a class or a function takes


def _fields(cls: type) -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(cls) if f.init and not f.name.startswith("_")]


def _default(f: dataclasses.Field[Any]) -> Any:
    return f.default if f.default_factory is dataclasses.MISSING else f.default_factory()


@cache
def types_of(cls: type) -> dict[str, Any]:
    """The type of every setting of a class, with its bounds."""
    hints = _types(cls, cls.__name__)
    out: dict[str, Any] = {}
    for f in _fields(cls):
        own = f.metadata.get("setting", Setting()).limits
        implied = cls.implied(f.name) if issubclass(cls, Configured) else FREE
        rules = [r for r in (own, implied) if r != FREE]
        out[f.name] = Annotated[(hints[f.name], *rules)] if rules else hints[f.name]
    return out


@cache
def _fits(cls: type) -> dict[str, Callable[[Any], Any]]:
    return {key: fit_of(hint) for key, hint in types_of(cls).items()}


@cache
def options_of(function: Callable[..., Any], skip: int) -> dict[str, Any]:
    """The types of a function's options: its parameters behind the first `skip`."""
    hints = _types(function, getattr(function, "__name__", "the function"))
    taken = list(inspect.signature(function).parameters.values())[skip:]
    return {p.name: hints.get(p.name, Any) for p in taken if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _types(of: Any, name: str) -> dict[str, Any]:
    scope: dict[str, Any] | None = of.scope() if hasattr(of, "scope") else None
    try:
        return typing.get_type_hints(of, localns=scope, include_extras=True)
    except NameError as e:
        raise ConfigError(f"{name}: a type of its settings is unknown ({e})") from None


def options(
    function: Callable[..., Any],
    given: Mapping[str, Any],
    skip: int = 0,
    where: str = "",
    of: str = "",
    refusal: type[PolyfedError] = ConfigError,
) -> dict[str, Any]:
    """The options `given` to a function, as the annotations behind its first `skip` parameters take them."""
    hints = options_of(function, skip)
    out: dict[str, Any] = {}
    for key, value in given.items():
        if key not in hints:
            has = ", ".join(hints) or "none"
            raise refusal(f"{where}{key}: {of} has no such option{closest(key, hints)}; it has {has}")
        try:
            out[key] = fitted(none_of(value, hints[key]), hints[key])
        except Misfit:
            problem = found(value, expected(hints[key], value), near(hints[key], value))
            raise refusal(f"{where}{key}{f' of {of}' if of else ''}: {problem}") from None
    return out


# what a file or a caller gave


def is_table(value: Any) -> TypeGuard[dict[str, Any]]:
    """True for a table of a TOML or JSON file."""
    return isinstance(value, dict)


def table_in(text: str | bytes) -> dict[str, Any]:
    """The table that a JSON file holds. Raises ValueError for anything else."""
    try:
        table: Any = json.loads(text)
    except RecursionError:
        raise ValueError("lists within lists without end") from None
    if not is_table(table):
        raise ValueError(f"found a {type(table).__name__}, expected a table")
    return table


def is_mapping(value: Any) -> TypeGuard[Mapping[str, Any]]:
    """True for a table, also one that cannot be changed."""
    return isinstance(value, Mapping)


def is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    """True for a list, a tuple or their like, but not for text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
