"""Where commands print: apart from console.py, so that what needs no results imports nothing that shows them."""

import getpass
import sys

from rich.console import Console
from rich.table import Table

from polyfed.base.errors import ConfigError
from polyfed.runs import stop

WIDE = 140  # columns for tables that go to a file or a pipe

stdout = Console(width=None if sys.stdout.isatty() else WIDE, highlight=False)
stderr = Console(stderr=True, width=None if sys.stderr.isatty() else WIDE, highlight=False)


def asked(prompt: str) -> bytes:
    """What is typed at the terminal, which does not show it."""
    if not sys.stdin.isatty():
        raise ConfigError("found no terminal to ask for a passphrase at; --passphrase FILE")
    return getpass.getpass(prompt).encode()


def say(line: str, to: Console = stdout) -> None:
    """Print a line as it is, however long."""
    to.print(line, soft_wrap=True, markup=False)


def interrupted(then: str, since: int) -> int:
    """Say how a command that was cut short goes on, and return its exit status; see `stop.status`."""
    say(f"polyfed: interrupted; {then}", stderr)
    return stop.status(since)


def grid(*headers: str, tight: tuple[str, ...] = ()) -> Table:
    """A table without lines. tight: the columns that are never broken"""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for header in headers:
        table.add_column(header, no_wrap=header in tight)
    return table
