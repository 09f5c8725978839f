"""polyfed new-method and polyfed check: for the author of a method."""

import re
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

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

from polyfed.testing import check_method


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


def new_method(
    name: Annotated[str, Argument(help="Name of the method, such as fed-mine.", show_default=False)],
    folder: Annotated[Path, Option(help="Where the files go.", metavar="DIR")] = Path(),
) -> int:
    """Write the files of a method of your own: method, test and experiment. All three run as they are.

    [dim]polyfed new-method fed-mine
    polyfed check fed_mine.py[/dim]
    """
    import polyfed.algorithms  # noqa: F401  (registers the methods)
    from polyfed.base.errors import ConfigError
    from polyfed.cli.screen import stdout
    from polyfed.core.algorithm import REGISTRY

    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise ConfigError(f"name: found {name!r}, expected lower-case letters and digits, words joined by hyphens")
    if REGISTRY.knows(name):
        whose = f"one of {plugin}" if (plugin := REGISTRY.origin(name)) else "a built-in method"
        raise ConfigError(f"name: found {name!r}, which is {whose}, expected a new name")
    module, cls = name.replace("-", "_"), "".join(word.capitalize() for word in name.split("-"))
    files = {f"{module}.py": METHOD, f"test_{module}.py": TEST, f"{module}.toml": CONFIG}
    for file in files:
        if (folder / file).exists():
            raise ConfigError(f"{folder / file}: already exists; nothing was written")
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        (folder / file).write_text(text.format(name=name, module=module, cls=cls))
        stdout.print(str(folder / file), markup=False, highlight=False)
    stdout.print(f"\nnext: polyfed check {folder / module}.py, polyfed run {folder / module}.toml", markup=False)
    return 0


def check(
    file: Annotated[
        Path,
        Argument(
            help="Python file with a method, or the name of a method.", metavar="FILE.py|NAME", show_default=False
        ),
    ],
    row: Annotated[str | None, Option(help="Only rows whose name contains this.", metavar="WORD")] = None,
) -> int:
    """Check your own method against the conformance table that every built-in method passes.

    [dim]polyfed check fed_mine.py[/dim]
    """
    import polyfed.algorithms  # noqa: F401  (registers the methods)
    from polyfed.base.errors import ConfigError
    from polyfed.cli.screen import stdout
    from polyfed.core.algorithm import REGISTRY
    from polyfed.runs.userfile import algorithms_of
    from polyfed.testing import NotConformant, check_method

    named = not file.suffix and not file.exists()
    names = [REGISTRY.find(str(file)).name] if named else algorithms_of(file.resolve())
    if not names:
        raise ConfigError(f"{file}: found no method, expected a class that derives from polyfed.Algorithm")
    for name in names:
        try:
            for found in check_method(REGISTRY.make(name, {}), row):
                stdout.print(f"{name}: {found.name}: {found.outcome}", markup=False, highlight=False, soft_wrap=True)
        except NotConformant as e:
            raise ConfigError(f"{file}: {e}") from None
    return 0
