"""polyfed new-method and polyfed check, for the author of a method."""

import re

import polyfed.algorithms  # noqa: F401  (registers the methods)
from polyfed.base.errors import ConfigError
from polyfed.cli.folders import write_new
from polyfed.cli.screen import say
from polyfed.core.algorithm import REGISTRY
from polyfed.runs.userfile import algorithms_of
from polyfed_testing.commands import Check, New, NewMethod
from polyfed_testing.new import project
from polyfed_testing.table import REMEDIES, NotConformant, check_method

METHOD = '''"""{cls}: say here what it does. Cite the paper, and its equations by number."""

from dataclasses import dataclass

from polyfed import Algorithm, local_sgd, setting


@dataclass(frozen=True)
class {cls}(Algorithm):
    """One sentence on what the method does.

        w_i = local SGD from w on f_i        w <- sum_i n_i w_i / sum_i n_i

    The indented lines are the paper's equations; here is room for what it leaves open.
    """

    lr: float = setting(0.1, ge=0, source="ours", doc="Step size of local SGD.")

    name = "{name}"

    def local_update(self, task, client, down, data, round):
        return {{}}, {{"w": local_sgd(task, down["w"], data, self.lr)}}

    def aggregate(self, server, up, round):
        return {{"w": up.mean("w", round.samples)}}
'''
TEST = '''"""{cls}: the conformance table. Add what proves it right: an optimum, an identity, a rate."""

from {module} import {cls}

from polyfed_testing.table import check_method


def test_conformance():
    check_method({cls}())
'''
CONFIG = """# polyfed run {module}.toml
rounds = 20
local-steps = 5
batch-size = "full"
seeds = 3

[data]
name = "heart-disease"

[[algorithms]]
name = "local"

[[algorithms]]
file = "{module}.py"
"""


def new(o: New) -> None:
    write_new({o.folder / file: text for file, text in project().items()})
    say(f"\nnext: polyfed data inspect {o.folder / 'sites'}, polyfed run {o.folder / 'experiment.toml'}")


def new_method(o: NewMethod) -> None:
    name, folder = o.name, o.folder
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise ConfigError(f"name: found {name!r}, expected lower-case letters and digits, words joined by hyphens")
    if REGISTRY.knows(name):
        whose = f"one of {plugin}" if (plugin := REGISTRY.origin(name)) else "a built-in method"
        raise ConfigError(f"name: found {name!r}, which is {whose}, expected a new name")
    module, cls = name.replace("-", "_"), "".join(word.capitalize() for word in name.split("-"))
    texts = {f"{module}.py": METHOD, f"test_{module}.py": TEST, f"{module}.toml": CONFIG}
    write_new({folder / file: text.format(name=name, module=module, cls=cls) for file, text in texts.items()})
    say(f"\nnext: polyfed check {folder / module}.py, polyfed run {folder / module}.toml")


def check(o: Check) -> None:
    file = o.file
    named = not file.suffix and not file.exists()
    names = [REGISTRY.find(str(file)).name] if named else algorithms_of(file.resolve())
    if not names:
        raise ConfigError(f"{file}: found no method, expected a class that derives from polyfed.Algorithm")
    broken = list[str]()
    for name in names:
        try:
            for row in check_method(REGISTRY.make(name, {}), o.row):
                say(f"{name}: {row.name}: {row.outcome}")
        except NotConformant as e:
            for row in e.rows:
                if row.name not in e.broken:
                    say(f"{name}: {row.name}: {row.outcome}")
            for row in e.rows:
                if row.name in e.broken:
                    say(f"{name}: BROKEN: {row.name}: {row.outcome}; {REMEDIES[row.name]}")
            broken += str(e).splitlines()
    if broken:
        more = f" (and {len(broken) - 1} more, listed above)" if len(broken) > 1 else ""
        raise ConfigError(f"{file}: {broken[0]}{more}")
