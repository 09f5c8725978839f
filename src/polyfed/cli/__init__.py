"""The command line. `commands` declares what every command takes; what it does is in a module of its own, which is
imported when it is called, so that help is instant.

Every error is one line on stderr, `polyfed: ...`: exit status 2 for a wrong setting or command, 1 for anything else,
130 after Ctrl-C, 143 after SIGTERM.
"""

import atexit
import codecs
import errno
import gc
import io
import logging
import os
import re
import sys
from collections.abc import Sequence
from functools import cache
from inspect import cleandoc, signature
from typing import Annotated, Any, Literal

import typer

from polyfed import __version__
from polyfed.base import plugins
from polyfed.base.errors import ConfigError, Faults, PolyfedError, closest, printable
from polyfed.cli import commands, portable
from polyfed.cli.options import Command, callback, word
from polyfed.runs import stop

ABOUT = """
Federated learning when one model does not fit all.

Start with [bold]polyfed run[/bold]: four hospitals, three methods beside own models and yardsticks, ten seeds; no
download, under a minute.
"""

COMPLETE = "_POLYFED_COMPLETE"
HELP = {"help_option_names": ["-h", "--help"]}
ANYTHING = {"ignore_unknown_options": True, "allow_extra_args": True}
PLAIN = {"−": "-", "→": "->", "≤": "<=", "≥": ">="}  # in streams that lack such a letter, as pipes on Windows
app = typer.Typer(
    context_settings=HELP, name="polyfed", rich_markup_mode="rich", no_args_is_help=True, pretty_exceptions_enable=False
)
groups: dict[str, typer.Typer] = {}


def _add(module: Any) -> None:
    """Add the commands of a module and its groups of them, in the order of their declarations."""
    for name, about in vars(module).get("GROUPS", {}).items():
        groups[name] = typer.Typer(no_args_is_help=True, help=about)
    for command in vars(module).values():
        if isinstance(command, type) and issubclass(command, Command) and command.__module__ == module.__name__:
            groups.get(command.group, app).command(word(command))(callback(command))


def _absent(name: str, package: str) -> None:
    """A command whose package is not installed: it says so, whatever it is given."""
    group, _, last = name.rpartition(" ")

    @groups.get(group, app).command(last, help=f"Needs the package {package}.", context_settings=ANYTHING)
    def absent() -> None:
        raise ConfigError(f"polyfed {name} {plugins.missing(package)}")


_add(commands)
_CORE = frozenset(str(c.name) for c in app.registered_commands)


@cache
def _beside() -> None:
    """Add the commands of the packages beside the core, and all groups."""
    for package, brought in ((p, c) for p, c in plugins.SIBLINGS.items() if c):
        try:
            _add(plugins.sibling(f"{package}.commands", ""))
        except ConfigError:
            for name in brought:
                _absent(name, package)
    for name, group in groups.items():
        app.add_typer(group, name=name)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"polyfed {__version__}")
        raise typer.Exit


@app.callback(help=ABOUT)
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an unexpected error.")] = False,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"] | None,
        typer.Option("--log-level", help="Print what is logged from this level on, with the time. Before the command."),
    ] = None,
) -> None:
    if log_level is not None:
        logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", force=True)
        logging.getLogger("polyfed").setLevel(log_level.upper())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit. arguments: sys.argv without the program's name, when not given."""
    gc.set_threshold(700, 10, 100)  # what packages load stays: 400,000 objects, else gone through six times meanwhile
    atexit.register(gc.freeze)  # and once more at the end
    codecs.register_error("plain", lambda e: (PLAIN.get(str(e.object[e.start]), "?"), e.start + 1))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            stream.reconfigure(errors="plain")
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug, portable.own_process = "--debug" in given, arguments is None
    if COMPLETE in os.environ:  # the shell asks what may follow
        _beside()
        app(prog_name="polyfed")
    sys.exit(call([a for a in given if a != "--debug"], debug))


def call(arguments: Sequence[str], debug: bool = False) -> int:
    """Run one command; returns the exit status, having said in one line what went wrong."""
    since = stop.interruptions()
    try:
        with stop.terminable():
            whole = command_line(arguments)  # called as such it turns an interruption into a silent 130
            with whole.make_context("polyfed", list(arguments)) as context:
                return whole.invoke(context) or 0
    except typer.Exit as e:
        return e.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return _say("interrupted", stop.status(since))
    except BrokenPipeError:  # the reader of our output has gone
        sys.stderr.close()
        return 1
    except Exception as e:
        if debug:
            raise
        if type(e).__name__ == "NoArgsIsHelpError":  # the help has been printed
            return 2
        if hasattr(e, "format_message"):  # a usage error found by typer
            message = str(e.format_message())
            if wrong := re.search(r"'([^']*)' is not one of '(.*)'", message):  # of a choice, it does not suggest any
                message += closest(wrong[1], wrong[2].split("', '"))
            once = dict.fromkeys(re.split(r"(?<=[.?]) ", message))  # typer and click both suggest the nearest command
            return _say(" ".join(once) + _help(arguments), 2)
        if isinstance(e, OSError) and (line := _of_file(e)):
            return _say(line, 1)
        userfile = sys.modules.get("polyfed.runs.userfile")  # without it there are no mistakes of the user's own
        if userfile and (mistake := userfile.blamed(e)) is not None:
            return _say(str(mistake), 1)
        if isinstance(e, Faults) and len(e.faults) > 1:
            listed = "".join(f"\n  - {printable(fault)}" for fault in e.faults)
            print(f"polyfed: {printable(e.where)}: {len(e.faults)} faults{listed}", file=sys.stderr)
            return 1
        if isinstance(e, PolyfedError):
            return _say(str(e), 2 if isinstance(e, ConfigError) else 1)
        return _say(
            f"unexpected {type(e).__name__}: {e}; this is a bug in polyfed; please report it with the output of the "
            "same command run with --debug",
            1,
        )


def command_line(arguments: Sequence[str] = ()) -> Any:
    """The whole command line; the core's alone where these arguments name a command of it, which starts faster."""
    return _built(next((a for a in arguments if not a.startswith("-")), "") in _CORE)


@cache
def _built(core: bool) -> Any:
    if not core:
        _beside()
    return _legible(typer.main.get_command(app))


def _legible(command: Any) -> Any:
    """The command with help whose paragraphs break where the terminal does (examples keep their lines), and with what
    its arguments are: the typer that Flower holds back loses that under click 8.5."""
    for sub in getattr(command, "commands", {}).values():
        _legible(sub)
    paragraphs = cleandoc(command.help or "").split("\n\n")
    command.help = "\n\n".join(p if p.startswith("[dim]") else " ".join(p.split()) for p in paragraphs)
    hints = signature(command.callback).parameters if command.callback else {}
    for parameter in command.params:
        if parameter.param_type_name == "argument" and not parameter.help:
            parameter.help = hints[parameter.name].annotation.__metadata__[0].help
    return command


def _of_file(e: OSError) -> str:
    """A file or folder that cannot be used, wherever a command met it, in one line; nothing for other errors."""
    path = str(e.filename or "")
    path = f"{path[:100]}...{path[-40:]}" if len(path) > 200 else path
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"cannot write{path and ' '}{path}: the disk is full; what was written before is kept"
    return f"{path}: {(e.strerror or str(e)).lower()}" if path else ""


def _help(arguments: Sequence[str]) -> str:
    name = next((a for a in arguments if a in command_line().commands), "")
    return f" (see polyfed {name} --help)".replace("  ", " ")


def _say(line: str, status: int) -> int:
    print(f"polyfed: {' '.join(line.split())}", file=sys.stderr)
    return status
