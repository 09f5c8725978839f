"""Completion after TAB: names of methods, data sets and settings.

Methods are looked up in the source text and among entry points: importing them would make TAB wait for torch. The
others do wait.
"""

import itertools
import re
from pathlib import Path

from polyfed.base import plugins
from polyfed.base.lazy import homes
from polyfed.cli.late import late

HEAD = re.compile(r'^class (\w+)|^    name = "(.+)"', re.M)


def methods(incomplete: str) -> list[str]:
    """The methods that begin so."""
    src = Path(__file__).parents[2]
    public, name_of = homes(src / "polyfed/algorithms/__init__.py"), dict[str, str]()
    places = {src / module.replace(".", "/") for module in public.values()}  # none of a package that is not installed
    for path in itertools.chain(*((*at.parent.glob(f"{at.name}.py"), *at.glob("*.py")) for at in places)):
        cls = ""
        for begun, name in HEAD.findall(path.read_text("utf-8")):
            cls = begun or cls
            name_of[cls] = name or cls.lower()
    names = {*(name_of[cls] for cls in public if cls in name_of), *(p.name for p in plugins.of("polyfed.methods"))}
    return sorted(name for name in names if name.startswith(incomplete))


def data(incomplete: str) -> list[str]:
    """The named data sets that begin so."""
    return [name for name in late("polyfed.data", "names")() if name.startswith(incomplete)]


def settings(incomplete: str) -> list[str]:
    """The keys of an experiment file that begin so, ready for their value."""
    return [
        f"{key.name}="
        for key in late("polyfed.cli.config", "keys")()
        if key.name.islower() and key.name.startswith(incomplete)
    ]
