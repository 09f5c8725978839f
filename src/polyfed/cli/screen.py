"""Where commands print: apart from console.py, so that what needs no results imports nothing that shows them."""

import getpass
import sys

from rich.console import Console

from polyfed.base.errors import ConfigError

WIDE = 140  # columns for tables that go to a file or a pipe

stdout = Console(width=None if sys.stdout.isatty() else WIDE, highlight=False)
stderr = Console(stderr=True, width=None if sys.stderr.isatty() else WIDE, highlight=False)


def asked(what: str) -> bytes:
    """What is typed at the terminal, which does not show it."""
    if not sys.stdin.isatty():
        raise ConfigError("found no terminal to ask for a passphrase at; --passphrase FILE")
    return getpass.getpass(what).encode()
