"""polyfed check: the conformance table, for the author of a method."""

import polyfed.algorithms  # noqa: F401  (registers the methods)
from polyfed.base.errors import ConfigError
from polyfed.cli.commands import Check
from polyfed.cli.screen import say
from polyfed.core.algorithm import REGISTRY
from polyfed.runs.userfile import algorithms_of
from polyfed.testing import REMEDIES, NotConformant, check_method


def check(o: Check) -> None:
    file = o.file
    named = not file.suffix and not file.exists()
    names = [REGISTRY.find(str(file)).name] if named else algorithms_of(file.resolve())
    if not names:
        raise ConfigError(f"{file}: found no method, expected a class that derives from polyfed.Algorithm")
    broken = list[str]()
    for name in names:
        try:
            for found in check_method(REGISTRY.make(name, {}), o.row):
                say(f"{name}: {found.name}: {found.outcome}")
        except NotConformant as e:
            for found in e.rows:
                if found.name not in e.broken:
                    say(f"{name}: {found.name}: {found.outcome}")
            for found in e.rows:
                if found.name in e.broken:
                    say(f"{name}: BROKEN: {found.name}: {found.outcome}; {REMEDIES[found.name]}")
            broken += str(e).splitlines()
    if broken:
        more = f" (and {len(broken) - 1} more, listed above)" if len(broken) > 1 else ""
        raise ConfigError(f"{file}: {broken[0]}{more}")
