"""An option that would have no effect is refused in one line, and not ignored."""

import re
import subprocess
import sys
from typing import Literal, get_args, get_origin

import pytest

from polyfed.cli import commands
from polyfed.cli.options import Command, word

ALL = [c for c in vars(commands).values() if isinstance(c, type) and issubclass(c, Command)]
COMMANDS = [c for c in ALL if c.__module__ == commands.__name__]
CASES = [
    (command, name, case)
    for command in COMMANDS
    for name, cases in command.idle.items()
    for case in cases.split(" | ")
    if name in command.names
]
IGNORED = [  # what was ignored without a word once
    ("report runs --of clients", "--of"),
    ("report runs --table csv --figures", "--figures"),
    ("report runs --paper --out page.html", "--out"),
    ("report runs --paper --table csv --of costs", "--of"),
    ("run --force", "--force"),
    ("compare local fedavg --force", "--force"),
    ("tune --out a --force --resume", "--force"),
    ("privacy e.toml --out a", "--out"),
    ("reproduce --scale small", "--scale"),
    ("server e.toml --resume", "--resume"),
    ("server e.toml --at-once 3", "--at-once"),
    ("client --key k --data d --vault v --dry-run --yes policy", "--yes"),
    ("run --data . --data-dir .", "data.dir"),
    ("regress digits --model linear --ties breslow", "--ties"),
]


def written(command: type[Command], name: str) -> list[str]:
    """A field as it is given on the command line, with some value."""
    spec, hint = command.specs[name], command.parameters[name].annotation.__origin__
    kinds = [hint, *get_args(hint)]
    choices = next((get_args(k) for k in kinds if get_origin(k) is Literal), ())
    value = choices[0] if choices else "1"
    if spec.info.__class__.__name__ == "ArgumentInfo":
        return [value]
    names = [spec.info.default, *(spec.info.param_decls or ())]
    option = next((n for n in names if isinstance(n, str)), f"--{name.replace('_', '-')}")
    return [option] if bool in kinds else [option, value]


@pytest.mark.parametrize(("command", "name", "case"), CASES, ids=lambda c: c if isinstance(c, str) else word(c))
def test_what_the_table_calls_idle_is_refused(cli, command, name, case):
    beside = [other.lower().replace("-", "_") for other in re.findall(r"(?<!out)with (?:--)?([\w-]+)", case)]
    assert {n.lower().replace("-", "_") for n in re.findall(r"with(?:out)? (?:--)?([\w-]+)", case)} <= {*command.specs}
    needed = [n for n in command.names if command.specs[n].default is ... and n not in beside]
    words = [w for n in dict.fromkeys([*needed, *beside, name])
             for w in written(command, n)]  # fmt: skip
    cli(*([command.group] if command.group else []), word(command), *words).line(
        2, f"polyfed: {written(command, name)[0]}: has no effect "
    )


@pytest.mark.parametrize(("line", "option"), IGNORED)
def test_an_option_without_effect_is_refused(cli, tmp_path, line, option):
    (tmp_path / "keys").mkdir()
    cli(*line.split()).line(2, f"polyfed: {option}: has no effect")


def test_python_dash_m_is_the_command():
    found = [subprocess.run([*start, "rnu"], capture_output=True, text=True, check=False) for start in (
        [sys.executable, "-m", "polyfed"], [sys.executable, "-c", "from polyfed.cli import main; main()"])]  # fmt: skip
    assert [f.returncode for f in found] == [2, 2]
    assert found[0].stderr == found[1].stderr
    assert "Did you mean 'run'?" in found[0].stderr
    usage = subprocess.run([sys.executable, "-m", "polyfed", "--help"], capture_output=True, text=True, check=True)
    assert "Usage: polyfed [OPTIONS] COMMAND" in usage.stdout
