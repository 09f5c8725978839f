"""Settings: declared once, as a dataclass field with its type, default, bounds and source, and checked from that alone.

    @dataclass(frozen=True)
    class Ditto(Algorithm):
        lam: float = setting(0.1, ge=0, source="FedSLR's comparison")
        order: Literal["first", "hf"] = setting("first", source="paper")

`Registry` holds the things that have settings by their names; `parse` reads them from `name:value,key=value`.
"""

import collections.abc
import dataclasses
import inspect
import json
import math
import operator
import re
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, time
from functools import cache
from pathlib import Path
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    NoReturn,
    TypeAlias,
    TypeGuard,
    TypeVar,
    Union,
)

from polyfed.base import plugins
from polyfed.base.errors import ConfigError, PolyfedError, closest

MOST = 2**63 - 1  # what an integer tensor holds
COUNTED = 10**9  # a bound on counts, which is not worth a word where it was kept
LONGEST = 4000  # characters of one value
NAME = 255  # bytes of a file's name
DEEPEST = 20  # lists and tables within each other
BEGINS, ENDS = r"(?<![\w.])\.(?=\d)", r"(?<=\d)\.(?![\d.])"  # the points of .5 and 5.
Toml: TypeAlias = "str | float | date | time | Sequence[Toml] | Mapping[str, Toml] | None"


T = TypeVar("T")


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


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is known about a setting besides its type and default.

    source: whose choice the default is, such as "paper"     doc: one line
    decides: whether it decides the numbers of a run, or only how they are computed
    step_size: whether it is a step size of a method, which a decaying step size scales
    """

    limits: Limits = FREE
    source: str = ""
    doc: str = ""
    decides: bool = True
    step_size: bool = False


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
) -> Any:
    """A dataclass field that is a setting.

    Parameters
    ----------
    default : object
        Its default; without one the setting must be given.
    factory : callable
        Makes a default that must not be shared, such as a dict.
    ge, gt, le, lt : float or None
        Bounds of a number: at least, above, at most, below.
    source : str
        Whose choice the default is, such as "paper".
    doc : str
        What it means, in one line.
    decides : bool
        Whether it decides the numbers of a run, or only how they are computed.
    step_size : bool
        Whether it is a local step size of a method: it is at least 0, and `lr_decay` scales it. A field named `lr` is.

    Returns
    -------
    dataclasses.Field
        Typed as anything, so that a type checker accepts it as the field's default.
    """
    if default is not dataclasses.MISSING and factory is not dataclasses.MISSING:
        raise ConfigError(f"setting: found the default {shown(default)} and a factory, expected one of them")
    known = Setting(Limits(ge, gt, le, lt), source, doc, decides, step_size)
    return dataclasses.field(default=default, default_factory=factory, metadata={"setting": known})


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
    found: list[Described] = []
    for f in _fields(cls):
        s, hint = f.metadata.get("setting", Setting()), types_of(cls)[f.name]
        found.append(Described(f.name, words(hint), _default(f), s.doc, s.source, s.decides))
    return tuple(found)


class Configured:
    """Base of frozen dataclasses whose fields are settings: all of them are checked whenever one is made.

    A subclass with conditions across fields has a `__post_init__` that begins with `super().__post_init__()`, and says
    them with `self.require`.
    """

    table: ClassVar[str] = ""  # what goes before a setting's name in an error: "algorithm" for algorithm.lr
    refusal: ClassVar[type[PolyfedError]] = ConfigError

    def __post_init__(self) -> None:
        hints = types_of(type(self))
        for f in _fields(type(self)):
            given = getattr(self, f.name)
            try:
                value = fitted(given, hints[f.name])
            except Misfit:
                self.refuse(f.name, expected(hints[f.name], given), near(hints[f.name], given))
            if value is not given:
                object.__setattr__(self, f.name, value)

    def require(self, condition: bool, key: str, expected: str) -> None:
        """Refuse the value of the setting `key` unless `condition` holds."""
        if not condition:
            self.refuse(key, expected)

    def refuse(self, key: str, expected: str, near: str = "") -> NoReturn:
        """Raise the error for a value of the setting `key`. near: the choice that may have been meant."""
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
        """What the types of the settings are written with, where a class imports it late."""
        return {}


def kebab(name: str) -> str:
    """local_epochs -> local-epochs"""
    return name.replace("_", "-")


def found(value: Any, expected: str, near: str = "") -> str:
    """The half of an error that every wrong value shares: found ..., expected ..."""
    return f"found {shown(value)}{near}, expected {expected}"


def near(hint: Any, value: Any) -> str:
    """` (did you mean 'x'?)` for the choice of a type that is nearest to a word."""
    return closest(value, choices(hint)) if isinstance(value, str) and len(value) < 100 else ""


def choices(hint: Any) -> list[str]:
    """The words that a type allows."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return [a for a in arguments if isinstance(a, str)]
    return [word for a in arguments for word in choices(a)]


def shown(value: Any, most: int = 80) -> str:
    """A value as an error shows it: in one line, and cut where it is long."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # an integer of thousands of digits; lists within lists; an object whose repr fails
        text = f"{'an' if isinstance(value, int) else 'a'} {type(value).__name__} too long to print"
    return text if len(text) <= most else f"{text[:most]}..."


# values and types

TESTS = (("ge", operator.ge), ("gt", operator.gt), ("le", operator.le), ("lt", operator.lt))


class Misfit(ValueError):
    """A value is not of a type, or not within its bounds."""


def is_numpy(value: Any, kind: str) -> bool:
    """Whether a value is of this type of numpy, which help does without."""
    return "numpy" in sys.modules and isinstance(value, getattr(sys.modules["numpy"], kind))


def unboxed(value: Any) -> Any:
    """A value that a file can hold: numpy's scalars as Python's."""
    return value.item() if is_numpy(value, "generic") else value


def fitted(value: Any, hint: Any, rules: Sequence[Any] = ()) -> Any:
    """`value` as the type `hint` takes it, or Misfit: integers become numbers, lists tuples, numpy's scalars Python's.

    rules: what annotates the type, such as Limits
    """
    value = unboxed(value)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return fitted(value, arguments[0], (*rules, *arguments[1:]))
    if origin in (types.UnionType, Union):
        if Path in arguments and isinstance(value, str):
            fitted(Path(value), Path)
        for one in arguments:
            try:
                return fitted(value, one, rules)
            except Misfit:
                continue
        raise Misfit
    if hint is Any or isinstance(hint, TypeVar):
        return value
    if hint is None or hint is type(None):
        return _require(value is None, value)
    if origin is Literal:
        return _require(any(type(a) is type(value) and a == value for a in arguments), value)
    if hint is bool:
        return _require(isinstance(value, bool), value)
    if hint is int:
        fits = isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MOST
        return _require(fits and _within(value, rules), value)
    if hint is float:
        return _number(value, rules)
    if hint is str:
        return _require(isinstance(value, str) and "\0" not in value and len(value) <= LONGEST, value)
    if hint is Path:
        _require(isinstance(value, Path) and "\0" not in str(value), value)
        return _require(all(len(part.encode(errors="replace")) <= NAME for part in value.parts), value)
    if origin is tuple or hint is tuple:
        return _tuple(value, arguments)
    listed = origin is collections.abc.Iterable and hasattr(value, "__getitem__")  # what has no end is not looked into
    if listed or origin in (list, collections.abc.Sequence):
        inner = [fitted(v, arguments[0]) for v in _items(value)]
        return inner if origin is list else value
    if origin in (dict, collections.abc.Mapping):
        _require(isinstance(value, Mapping), value)
        return {fitted(k, arguments[0]): fitted(v, arguments[1]) for k, v in value.items()}
    if origin is Callable or hint is Callable:
        return _require(callable(value), value)
    kind = origin or hint
    return _require(not isinstance(kind, type) or isinstance(value, kind), value)


def _require(condition: bool, value: Any) -> Any:
    if not condition:
        raise Misfit
    return value


def _items(value: Any) -> Iterable[Any]:
    """What is in a list or its like: a tuple, a range, an array, a column of a table."""
    dim, other = getattr(value, "ndim", None), isinstance(value, str | bytes | Mapping)
    _require(all(hasattr(value, name) for name in ("__iter__", "__len__", "__getitem__")) and not other, value)
    _require(dim != 0, value)
    return value.tolist() if dim == 1 else value


def _number(value: Any, rules: Sequence[Any]) -> float:
    _require(isinstance(value, int | float) and not isinstance(value, bool), value)
    try:
        number = float(value)
    except OverflowError:
        raise Misfit from None
    endless = number == math.inf and any(getattr(rule, "le", None) == math.inf for rule in rules)
    return _require((endless or math.isfinite(number)) and _within(number, rules), number)


def _tuple(value: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    _require(isinstance(value, list | tuple), value)
    if not arguments:
        return tuple(value)
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(fitted(v, arguments[0]) for v in value)
    _require(len(value) == len(arguments), value)
    return tuple(fitted(v, a) for v, a in zip(value, arguments, strict=True))


def _within(value: float, rules: Iterable[Any]) -> bool:
    limits = ((test, getattr(rule, key, None)) for rule in rules for key, test in TESTS)
    return all(limit is None or test(value, limit) for test, limit in limits)


def allows_none(hint: Any) -> bool:
    """Whether None is a value of this type."""
    if typing.get_origin(hint) is Annotated:
        return allows_none(typing.get_args(hint)[0])
    return type(None) in typing.get_args(hint) or hint is Any


# types in words

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
MANIFOLD = (list, tuple, collections.abc.Sequence, collections.abc.Iterable)
MANY = {int: "integers", float: "numbers", str: "texts"}


def words(hint: Any, rules: Iterable[Any] = ()) -> str:
    """What a setting of this type takes."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return words(arguments[0], [*rules, *(m for a in arguments[1:] for m in getattr(a, "metadata", (a,)))])
    rules = list(rules)
    said = next((r.words for r in rules if isinstance(r, Words)), None)
    if said is not None:
        return said
    if origin in (types.UnionType, Union):
        arguments = tuple(a for a in arguments if a is not str or Path not in arguments)  # a path may be text
        return either(list(dict.fromkeys(word for a in arguments for word in _alternatives(a, rules))))
    if origin is Literal:
        return either(_alternatives(hint))
    if hint in (int, float):
        return WORDS[hint] + bounds(rules)
    if origin in MANIFOLD or hint in MANIFOLD:
        inner = typing.get_args(arguments[0])[0] if arguments and _is_annotated(arguments[0]) else (*arguments, None)[0]
        each = f", each {words(inner)}" if isinstance(inner, type) else ""
        return f"a list of {MANY[inner]}" if inner in MANY else f"a list{each}"
    if origin is Callable:
        return "a function"
    if isinstance(hint, type) and hint not in WORDS and origin is None and hint.__module__ != "builtins":
        return NAMED.get(hint.__name__, f"{'an' if hint.__name__[0] in 'AEIOU' else 'a'} {hint.__name__}")
    return WORDS.get(hint, "a table" if origin in (dict, collections.abc.Mapping) or hint is dict else "a value")


def _alternatives(hint: Any, rules: Iterable[Any] = ()) -> list[str]:
    if typing.get_origin(hint) is Literal:
        return [str(a).lower() if isinstance(a, bool) else str(a) for a in typing.get_args(hint)]
    return [words(hint, () if hint is type(None) else rules)]


def expected(hint: Any, value: Any) -> str:
    """What a setting takes, where `value` was refused."""
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
    limit = {key: value for r in rules for key in Limits._fields if (value := getattr(r, key, None)) is not None}
    limit = {key: value for key, value in limit.items() if value < COUNTED}
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


def _is_annotated(hint: Any) -> bool:
    return typing.get_origin(hint) is Annotated


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
    """The options `given` to a function as its annotations take them, or an error for the first that does not fit.

    skip: leading parameters that are no options     where: goes before an option's name     of: whose options
    """
    known = options_of(function, skip)
    out: dict[str, Any] = {}
    for key, value in given.items():
        if key not in known:
            has = ", ".join(known) or "none"
            raise refusal(f"{where}{key}: {of} has no such option{closest(key, known)}; it has {has}")
        try:
            out[key] = fitted(none_of(value, known[key]), known[key])
        except Misfit:
            said = found(value, expected(known[key], value), near(known[key], value))
            raise refusal(f"{where}{key}{f' of {of}' if of else ''}: {said}") from None
    return out


def none_of(value: Any, hint: Any) -> Any:
    """TOML has no null: "none" where the type allows it."""
    return None if isinstance(value, str) and value == "none" and allows_none(hint) else value


# registries


class Registry(dict[str, T]):
    """Things by name: methods, attacks, rules, ...

    key: the setting that names one, such as "algorithm.name"
    group: of entry points, by which installed packages add more, and what each must be
    """

    def __init__(
        self,
        key: str,
        refusal: type[PolyfedError] = ConfigError,
        group: tuple[str, str, Callable[[Any], bool]] | None = None,
    ):
        super().__init__()
        self.key, self.refusal, self.group = key, refusal, group
        self._added: dict[str, plugins.Plugin] = {}

    def add(self, name: str, thing: T) -> T:
        """Register a class or a function. Its own file may redefine it; another file may not take its name."""
        known = self.get(name)
        if known is not None and not _same_file(known, thing):
            one, other = (self._home(name, x) for x in (known, thing))
            raise self.refusal(f"{self.key}: found {name!r} twice, {one} and {other}, expected one name for each")
        self[name] = thing
        return thing

    def names(self) -> list[str]:
        """All names, those of installed packages too."""
        return sorted({*self, *(p.name for p in self._plugins())})

    def knows(self, name: str) -> bool:
        """Whether something goes by this name, here or in an installed package."""
        return name in self or bool(self._plugins(name))

    def find(self, name: Any) -> T:
        """What goes by this name. Raises an error that names the nearest known one."""
        if not isinstance(name, str) or not self.knows(name):
            near = closest(name, self.names()) if isinstance(name, str) and len(name) < 100 else ""
            raise self.refusal(f"{self.key}: unknown {shown(name)}{near}; known: {', '.join(self.names())}")
        if name not in self:
            self._adopt(name)
        return self[name]

    def origin(self, name: str) -> "plugins.Plugin | None":
        """The installed package that what goes by this name is from; None for polyfed and for a user's own file."""
        if name in self and name not in self._added:
            root = _root(self[name])
            for plugin in self._plugins(name) if root != plugins.OURS else ():
                if plugin.root == root:
                    self._added[name] = plugin
        return self._added.get(name)

    def gather(self) -> list[str]:
        """Load what all installed packages add. Returns a line for each thing that could not be."""
        refused: list[str] = []
        for plugin in self._plugins():
            try:
                self.find(plugin.name)
                if self.origin(plugin.name) != plugin:
                    raise ConfigError(
                        f"{self.key}: {plugin.name!r} of {plugin} is refused; {plugins.OURS} has one of this name"
                    )
            except PolyfedError as e:
                refused.append(str(e))
        return list(dict.fromkeys(refused))

    def _plugins(self, name: str | None = None) -> "list[plugins.Plugin]":
        return [] if self.group is None else plugins.of(self.group[0], name)

    def _adopt(self, name: str) -> None:
        """Load what an installed package adds under this name. Raises an error that names the package."""
        assert self.group is not None
        group, expected, fits = self.group
        try:
            plugin = plugins.find(group, name)
            assert plugin is not None
            thing = plugin.load()
            if not fits(thing) or getattr(thing, "name", name) != name:
                raise ConfigError(f"{name}: the package {plugin} has {shown(thing)}, expected {expected}, of this name")
            self.setdefault(name, thing)
        except PolyfedError as e:
            raise self.refusal(f"{self.key}: {e}") from None
        self._added[name] = plugin

    def _home(self, name: str, thing: Any) -> str:
        """Where something of this name is from, for an error."""
        root = _root(thing)
        ours = [] if root == plugins.OURS or self.group is None else plugins.of(self.group[0])
        package = next((f" ({p})" for p in ours if p.root == root), "")
        return f"{getattr(thing, '__qualname__', name)} of {thing.__module__}{package}"

    def make(self, name: Any, settings: Mapping[str, Any], spell: Callable[[str], str] = str) -> Any:
        """An instance of the class of this name. Raises an error for settings that it does not have or that do not fit.

        spell: how an error writes the names of settings
        """
        cls: Any = self.find(name)
        known = {f.name: spell(f.name) for f in _fields(cls)}
        for key in settings:
            if key not in known:
                has = ", ".join(sorted(known.values())) or "none"
                near = closest(spell(key), known.values())
                self._refuse(key, f"{cls.table}.{spell(key)}: {name} has no such setting{near}; it has {has}")
        missing = [f.name for f in _fields(cls) if _default(f) is dataclasses.MISSING and f.name not in settings]
        if missing:
            needs = words(types_of(cls)[missing[0]])
            self._refuse(missing[0], f"{cls.table}.{spell(missing[0])}: is missing; {name} needs {needs}")
        return cls(**{key: none_of(value, types_of(cls)[key]) for key, value in settings.items()})

    def _refuse(self, key: str, text: str) -> NoReturn:
        error = self.refusal(text)
        error.key = key
        raise error from None

    def read(self, text: str, what: str, **more: Any) -> Any:
        """An instance from `name:value,key=value`; values go to the settings in their order.

        what: the setting that the text stands for     more: settings that text cannot say
        """
        name, values, named = parse(text, what, self.refusal)
        cls: Any = self.find(name)
        return cls(**arguments(cls, values, named, what, text, self.refusal), **more)


def _root(thing: Any) -> str:
    return str(getattr(thing, "__module__", "")).partition(".")[0]


def _same_file(one: Any, other: Any) -> bool:
    files = [getattr(sys.modules.get(x.__module__), "__file__", None) for x in (one, other)]
    return one.__module__ == other.__module__ or (files[0] is not None and files[0] == files[1])


# what a file or a caller gave


def is_table(value: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a value is a table of a TOML or JSON file."""
    return isinstance(value, dict)


def table_in(text: str | bytes) -> dict[str, Any]:
    """The table that a JSON file holds. Raises ValueError for anything else."""
    try:
        found: Any = json.loads(text)
    except RecursionError:
        raise ValueError("lists within lists without end") from None
    if not is_table(found):
        raise ValueError(f"found a {type(found).__name__}, expected a table")
    return found


def is_mapping(value: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether a value is a table, also one that cannot be changed."""
    return isinstance(value, Mapping)


def is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    """Whether a value is a list, a tuple or their like; text is none."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def is_whole(value: Any) -> bool:
    """Whether a value is an integer; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


# text


def value_of(text: str, what: str = "value") -> Any:
    """A setting typed as text: a TOML value, or else the text itself. Raises ConfigError for what is neither.

    Numbers may begin or end with their point, as TOML's may not: .25, [.1, 1.]
    """
    _readable(text, what)
    if "\n" in text:
        return text
    pointed = text if "'" in text or '"' in text else re.sub(ENDS, ".0", re.sub(BEGINS, "0.", text))
    for typed in (text, pointed):
        try:
            return tomllib.loads(f"x = {typed}")["x"]
        except tomllib.TOMLDecodeError:
            continue
        except (ValueError, RecursionError):  # an integer of thousands of digits
            raise ConfigError(f"{what}: {found(text, 'a value of fewer digits')}") from None
    return text


def _readable(text: str, what: str, refusal: type[PolyfedError] = ConfigError) -> None:
    depth = deepest = 0
    for c in text:
        depth += (c in "[{") - (c in "]}")
        deepest = max(deepest, depth)
    if "\0" in text or len(text) > LONGEST or deepest > DEEPEST:
        limits = f"at most {LONGEST} characters, none of them NUL, and at most {DEEPEST} nested brackets"
        raise refusal(f"{what}: {found(text, limits)}")


def plain(value: Toml, where: Callable[[str], str] = str, key: str = "", depth: int = 0) -> None:
    """Raise ConfigError for what no setting can be: text with NUL or without end, integers beyond 2^63, deep nesting.

    value: a table as TOML gives it     where: says where a key is from
    """
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


def parse(text: str, what: str, refusal: type[PolyfedError] = ConfigError) -> tuple[str, list[str], dict[str, str]]:
    """`name:value,value,key=value` -> (name, values, {key: value}), all as text; keys in snake_case.

    Commas within brackets or quotes belong to their value. Values go before keys.
    """
    _readable(text, what, refusal)
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
                f"{what}: found {shown(item)} in {shown(text)}, expected name:key=value,key=value, each key once"
            )
        else:
            named[key] = tail.strip()
    return name.strip(), values, named


def arguments(
    cls: type,
    values: Sequence[str],
    named: Mapping[str, str],
    what: str,
    text: str,
    refusal: type[PolyfedError] = ConfigError,
) -> dict[str, Any]:
    """What `parse` found as settings of `cls`, read as their types take them."""
    hints: dict[str, Any] = {
        k: h for k, h in types_of(cls).items() if not (isinstance(h, type) and issubclass(h, Configured))
    }
    has = ", ".join(key.replace("_", "-") for key in hints) or "none"
    if len(values) > len(hints):
        raise refusal(
            f"{what}: found {shown(values[len(hints)])} in {shown(text)}, expected settings of {cls.__name__}: {has}"
        )
    out: dict[str, Any] = {}
    for key, value in [*zip(hints, values, strict=False), *named.items()]:
        if key not in hints or key in out:
            item = f"{key}={value}"
            raise refusal(f"{what}: found {shown(item)} in {shown(text)}, expected settings of {cls.__name__}: {has}")
        try:
            out[key] = read(value, hints[key])
        except Misfit:
            typed = next(iter(_typed(value)), value)
            said = found(value, expected(hints[key], typed), near(hints[key], value))
            raise refusal(f"{what}.{key.replace('_', '-')} of {cls.__name__}: {said}") from None
    return out


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
    for candidate in (text, *_lists(text, hint), *_typed(text)):
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


def _typed(text: str) -> list[Any]:
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
    typed = [[v for p in part for v in _typed(p)] for part in parts]
    return [typed if pairs else [v for part in typed for v in part]]
