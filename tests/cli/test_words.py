"""What the command line says about itself, the methods and the data."""

import inspect
import itertools

import pytest
from typer import Context

import polyfed
import polyfed.algorithms
from polyfed.base.settings import kebab, settings_of
from polyfed.cli import app, command_line, commands
from polyfed.cli.describe import certificates, citation
from polyfed.cli.late import late
from polyfed.cli.options import Command
from polyfed.core.algorithm import REGISTRY

METHODS = [*polyfed.algorithms.shipped()]
COMMANDS = [
    *("run", "compare", "tune", "resume", "report", "export", "admit", "coalitions", "leave", "regress", "algorithms"),
    *("data list", "data fetch", "data inspect"),
]


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_described_in_full(cli, name):
    said = cli("algorithms", name)
    cls = REGISTRY[name]
    assert said.status == 0
    for s in settings_of(cls):
        line = next(x for x in said.out.splitlines() if x.startswith(f"{kebab(s.name)} "))
        assert s.doc.split()[0] in line.split(), f"{s.name} has no meaning: {line}"
        assert s.source, f"{s.name}: whose default is it?"
    assert len(certificates(cls)) >= 2
    assert "Sent per client and round" in said.out
    assert citation(cls) in said.out
    for line in certificates(cls):
        assert line in " ".join(said.out.split())


def test_the_list_names_every_method(cli):
    listed = cli("algorithms").out
    assert all(name in listed for name in METHODS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_has_an_example(cli, command):
    said = cli(*command.split(), "--help").done()
    assert f"polyfed {command.split()[0]}" in " ".join(said.out.split("Options")[0].split("Usage")[1].split()[3:])


command_line()  # with those of the packages beside the core
EVERY = [c.callback for c in app.registered_commands if c.callback]


@pytest.mark.parametrize("command", EVERY, ids=lambda c: c.__name__)
def test_help_says_what_every_argument_is_and_fills_its_lines(cli, command):
    said = cli(command.__name__.replace("_", "-"), "--help").out.replace("│", " ")
    about = command.__doc__.replace("[dim]", "").replace("[/dim]", "")
    assert all(word in said.split() for word in about.split()), "a word in brackets is taken for a style"
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if parameter.annotation is Context:
            continue
        (about,) = parameter.annotation.__metadata__
        if about.hidden:
            continue
        assert about.help
        assert all(word in said.split() for word in about.help.split()), f"{parameter.name} has no meaning"
    prose = said.split("╭─")[0].split("\n")
    paragraph = ""
    for line, following in itertools.pairwise(line.strip() for line in prose):
        paragraph = paragraph or line
        if line and following and not paragraph.startswith("polyfed "):
            assert len(f"{line} {following.split()[0]}") > 76, f"broken early: {line}"
        paragraph = paragraph if line else ""


DECLARED = [c for c in vars(commands).values() if isinstance(c, type) and c.__module__ == commands.__name__]


@pytest.mark.parametrize("command", [c for c in DECLARED if issubclass(c, Command)], ids=lambda c: c.__name__)
def test_a_command_has_its_function_which_takes_what_was_asked_for(command):
    (taken,) = inspect.signature(late(*command.place), eval_str=True).parameters.values()
    assert taken.annotation is command


def test_version(cli):
    said = cli("--version")
    assert (said.status, said.out) == (0, f"polyfed {polyfed.__version__}\n")


def test_data_sets_are_listed_and_shown(cli, tmp_path):
    assert "heart-disease" in cli("data", "list").out
    said = cli("data", "inspect", "heart-disease", "--out", "x.svg").done()
    assert "switzerland" in said.out
    assert "CC BY 4.0" in said.out
    assert (tmp_path / "x.svg").read_text().lstrip().startswith("<?xml")
