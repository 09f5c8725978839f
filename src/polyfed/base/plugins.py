"""Additions of installed packages, found by their entry points, and the packages beside the core, found by their names.

Entry points are read when a name is not built in or all are listed: those of some hundred packages take 20 ms.
"""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from polyfed.base.errors import ConfigError, PolyfedError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

OURS = "polyfed"  # the distribution, and its first package
SIBLINGS = {  # packages beside the core -> their commands
    "polyfed_export": ("export",),
    "polyfed_sites": ("server", "client", "status", "audit-log", "keys"),
    "polyfed_attack": ("attack",),
    "polyfed_tuning": ("tune",),
    "polyfed_testing": ("new", "new-method", "check"),
    "polyfed_clinical": ("regress",),
    "polyfed_games": ("coalitions",),
    "polyfed_members": ("admit", "leave"),
    "polyfed_privacy": ("privacy", "audit"),
    "polyfed_audit": ("data repair",),
    "polyfed_papers": ("reproduce", "data fetch"),
    "polyfed_flower": ("flower",),
} | {f"polyfed_{name}": () for name in ("adapters", "exact", "groups", "ray", "threats", "estimators", "tables")}


@dataclass(frozen=True)
class Plugin:
    """One entry point of an installed package."""

    group: str
    name: str
    package: str  # as `pip list` has it
    version: str
    entry: "EntryPoint"

    def __str__(self) -> str:
        return f"{self.package} {self.version}"

    @property
    def root(self) -> str:
        """The Python package that it is in."""
        return self.entry.module.partition(".")[0]

    def load(self) -> Any:
        """Import what it names. Raises ConfigError in one line, whatever goes wrong in the package."""
        try:
            return self.entry.load()
        except (Exception, SystemExit) as e:
            why = missing(p) if (p := absent(e)) else f"the package {self} cannot be loaded ({reason(e)})"
            raise ConfigError(f"{self.name}: {why}") from e


def reason(error: BaseException) -> str:
    """An error of other people's code in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def of(group: str, name: str | None = None) -> list[Plugin]:
    """The entry points of a group, or those of one name; by package and name."""
    import sys

    return [p for p in _installed(tuple(sys.path)) if p.group == group and name in (None, p.name)]


@lru_cache
def _installed(path: tuple[str, ...]) -> list[Plugin]:
    """Every entry point for polyfed of the packages on sys.path, `path`."""
    from importlib.metadata import distributions

    by_package: dict[str, list[Plugin]] = {}
    for package in distributions():
        if f"[{OURS}." in (package.read_text("entry_points.txt") or "") and package.name not in by_package:
            entries = [e for e in package.entry_points if e.group.startswith(f"{OURS}.")]
            by_package[package.name] = [Plugin(e.group, e.name, package.name, package.version, e) for e in entries]
    return sorted((p for plugins in by_package.values() for p in plugins), key=lambda p: (p.package, p.name))


def find(group: str, name: str) -> Plugin | None:
    """The entry point of this name. Raises ConfigError where two packages have it."""
    plugins = of(group, name)
    if len(plugins) > 1:
        raise ConfigError(f"{name}: found in two packages, {' and '.join(map(str, plugins))}; uninstall one of them")
    return plugins[0] if plugins else None


def sibling(module: str, why: str) -> Any:
    """A module of a package beside the core; ConfigError names `why` it is needed where it is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as e:
        if package := absent(e):
            raise ConfigError(f"{why} {missing(package)}") from None
        raise


def ours(module: str) -> bool:
    """True for a module of polyfed or of a package beside it."""
    return module.partition(".")[0] in (OURS, *SIBLINGS)


def absent(error: BaseException) -> str | None:
    """The package beside the core that an import has missed, if it was one."""
    package = str(error.name).partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return package if package in SIBLINGS else None


def missing(package: str) -> str:
    """A command that needs a package of polyfed's repository says so."""
    return f"needs the package {package}, which comes with polyfed: install polyfed again (pip install .)"


def require(packages: Iterable[str], where: str = "packages") -> None:
    """Raise ConfigError for the first of these packages that is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    for package in packages:
        try:
            version(package)
        except (PackageNotFoundError, ValueError):
            raise ConfigError(f"{where}: needs the package {package}, which is not installed") from None


def versions() -> dict[str, str]:
    """The packages that add to polyfed, and their versions."""
    import sys

    return {p.package: p.version for p in _installed(tuple(sys.path)) if p.package != OURS}


@contextmanager
def blamed(plugin: Plugin | None, subject: str, refusal: type[PolyfedError]) -> Generator[None, None, None]:
    """Errors of a package's own code as one line that names the package; None: code of polyfed, whose errors pass."""
    try:
        yield
    except PolyfedError:
        raise
    except (Exception, SystemExit) as e:
        if plugin is None:
            raise
        raise refusal(f"{subject}: {plugin} failed with {reason(e)}") from e
