"""The commands that this package adds to polyfed; what they do is in command.py."""

from pathlib import Path

from polyfed.cli.options import Command, argument, option


class New(Command, module="command"):
    """Write a project that runs as it is: two made-up sites, a model and an experiment, to be replaced by your own.

    [dim]polyfed new hospitals
    polyfed run hospitals/experiment.toml[/dim]
    """

    folder: Path = argument("The project's folder.", ..., "NAME")


class NewMethod(Command, module="command"):
    """Write the files of a method of your own: method, test and experiment. All three run as they are.

    [dim]polyfed new-method fed-mine
    polyfed check fed_mine.py[/dim]
    """

    name: str = argument("Name of the method, such as fed-mine.")
    folder: Path = option("Where the files go.", Path(), "DIR")


class Check(Command, module="command"):
    """Check your own method against the conformance table that every built-in method passes.

    [dim]polyfed check fed_mine.py[/dim]
    """

    file: Path = argument("Python file with a method, or the name of a method.", ..., "FILE.py|NAME")
    row: str | None = option("Only rows whose name contains this.", None, "WORD")
