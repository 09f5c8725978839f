"""Registries: things that have settings by their names, made from a table or from `name:value,key=value`."""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from polyfed.base import plugins
from polyfed.base.errors import ConfigError, PolyfedError, closest
from polyfed.base.settings import Configured, settings_of, types_of
from polyfed.base.text import parse, read, toml_of
from polyfed.base.values import Misfit, expected, found, near, none_of, shown

T = TypeVar("T")


class Registry(dict[str, T]):
    """Things by name, which the setting `key` gives; installed packages add more by entry points of `group`."""

    def __init__(
        self,
        key: str,
        refusal: type[PolyfedError] = ConfigError,
        group: tuple[str, str, Callable[[Any], bool]] | None = None,
    ):
        super().__init__()
        self.key, self.refusal, self.group = key, refusal, group
        self._added: dict[str, plugins.Plugin] = {}
        self._homes: dict[str, str] = {}  # of what is not imported yet, by names without hyphens

    def add(self, name: str, thing: T) -> T:
        """Register a class or a function. Its own file may redefine it; another file may not take its name."""
        if thing.__module__ != self._homes.get(_plain(name)):
            self.load(name)
        earlier = self.get(name)
        if earlier is not None and not _same_file(earlier, thing):
            one, other = (self._home(name, x) for x in (earlier, thing))
            raise self.refusal(f"{self.key}: found {name!r} twice, {one} and {other}, expected one name for each")
        self[name] = thing
        return thing

    def offer(self, homes: Mapping[str, str]) -> None:
        """Register what modules have, or add on their import, for when it is asked for by name (without hyphens)."""
        self._homes |= homes
        for name in [*super().__iter__()]:  # which may be taken
            self.load(name)

    def load(self, name: str | None = None) -> None:
        """Import what is offered: all of it, or what goes by this name."""
        for key in [*self._homes] if name is None else [_plain(name)]:
            if home := self._homes.pop(key, None):
                try:
                    module = plugins.sibling(home, f"{self.key}: {name}")
                except ConfigError as e:  # a package that is not installed
                    self._homes[key] = home
                    if name is not None:
                        raise self.refusal(str(e)) from None
                else:
                    if key not in self and (thing := vars(module).get(key)) is not None:
                        self[key] = thing

    def __iter__(self) -> Iterator[str]:
        self.load()
        return super().__iter__()

    def items(self) -> Any:
        self.load()
        return super().items()

    def values(self) -> Any:
        self.load()
        return super().values()

    def names(self) -> list[str]:
        """All names, those of installed packages too."""
        return sorted({*self, *(p.name for p in self._plugins())})

    def knows(self, name: str) -> bool:
        """True where something goes by this name, here or in an installed package."""
        self.load(name)
        return name in self or bool(self._plugins(name))

    def find(self, name: Any) -> T:
        """Return the thing of this name. Raises an error that names the nearest known one."""
        if not isinstance(name, str) or not self.knows(name):
            near = closest(name, self.names()) if isinstance(name, str) and len(name) < 100 else ""
            raise self.refusal(f"{self.key}: unknown {shown(name)}{near}; known: {', '.join(self.names())}")
        if name not in self:
            self._adopt(name)
        return self[name]

    def origin(self, name: str) -> "plugins.Plugin | None":
        """The installed package that this name is from; None for polyfed's own and for a user's file."""
        if name in self and name not in self._added:
            root = _root(self[name])
            for plugin in self._plugins(name) if root != plugins.OURS else ():
                if plugin.root == root and plugin.package != plugins.OURS:
                    self._added[name] = plugin
        return self._added.get(name)

    def gather(self) -> list[str]:
        """Load what all installed packages add. Returns a line for each thing that could not be."""
        refused: list[str] = []
        for plugin in self._plugins():
            try:
                self.find(plugin.name)
                if plugin.package != plugins.OURS and self.origin(plugin.name) != plugin:
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
        if plugin.package != plugins.OURS:
            self._added[name] = plugin

    def _home(self, name: str, thing: Any) -> str:
        """Origin of a name's thing, for an error."""
        root = _root(thing)
        ours = [] if root == plugins.OURS or self.group is None else plugins.of(self.group[0])
        package = next((f" ({p})" for p in ours if p.root == root), "")
        return f"{getattr(thing, '__qualname__', name)} of {thing.__module__}{package}"

    def make(self, name: Any, settings: Mapping[str, Any], spell: Callable[[str], str] = str) -> Any:
        """An instance of the class of this name; `spell` writes the names of settings in errors."""
        cls: Any = self.find(name)
        spelt = {s.name: spell(s.name) for s in settings_of(cls)}
        for key in settings:
            if key not in spelt:
                has = ", ".join(sorted(spelt.values())) or "none"
                near = closest(spell(key), spelt.values())
                self._refuse(key, f"{cls.table}.{spell(key)}: {name} has no such setting{near}; it has {has}")
        self._complete(name, cls, settings, spell)
        return cls(**{key: none_of(value, types_of(cls)[key]) for key, value in settings.items()})

    def _refuse(self, key: str, text: str) -> NoReturn:
        error = self.refusal(text)
        error.key = key
        raise error from None

    def read(self, text: str, place: str, **more: Any) -> Any:
        """An instance from `name:value,key=value`; values go to the settings in order, `more` to those beyond text."""
        name, values, named = parse(text, place, self.refusal)
        cls: Any = self.find(name)
        settings = arguments(cls, values, named, place, text, self.refusal) | more
        self._complete(name, cls, settings)
        return cls(**settings)

    def _complete(self, name: str, cls: Any, settings: Mapping[str, Any], spell: Callable[[str], str] = str) -> None:
        for s in settings_of(cls):
            if s.default is dataclasses.MISSING and s.name not in settings:
                self._refuse(s.name, f"{cls.table}.{spell(s.name)}: is missing; {name} needs {s.takes}")


def _plain(name: str) -> str:
    return name.replace("-", "")


def _root(thing: Any) -> str:
    return str(getattr(thing, "__module__", "")).partition(".")[0]


def _same_file(one: Any, other: Any) -> bool:
    files = [getattr(sys.modules.get(x.__module__), "__file__", None) for x in (one, other)]
    return one.__module__ == other.__module__ or (files[0] is not None and files[0] == files[1])


def arguments(
    cls: type,
    values: Sequence[str],
    named: Mapping[str, str],
    place: str,
    text: str,
    refusal: type[PolyfedError] = ConfigError,
) -> dict[str, Any]:
    """Read the words that `parse` found as settings of `cls`, by their types."""
    hints: dict[str, Any] = {
        k: h for k, h in types_of(cls).items() if not (isinstance(h, type) and issubclass(h, Configured))
    }
    has = ", ".join(key.replace("_", "-") for key in hints) or "none"
    if len(values) > len(hints):
        raise refusal(
            f"{place}: found {shown(values[len(hints)])} in {shown(text)}, expected settings of {cls.__name__}: {has}"
        )
    out: dict[str, Any] = {}
    for key, value in [*zip(hints, values, strict=False), *named.items()]:
        if key not in hints or key in out:
            item = f"{key}={value}"
            raise refusal(f"{place}: found {shown(item)} in {shown(text)}, expected settings of {cls.__name__}: {has}")
        try:
            out[key] = read(value, hints[key])
        except Misfit:
            typed = next(iter(toml_of(value)), value)
            problem = found(value, expected(hints[key], typed), near(hints[key], value))
            raise refusal(f"{place}.{key.replace('_', '-')} of {cls.__name__}: {problem}") from None
    return out
