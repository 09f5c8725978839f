"""Where commands print: apart from console.py, so that what needs no results imports nothing that shows them."""

import sys

from rich.console import Console

WIDE = 140  # columns for tables that go to a file or a pipe

stdout = Console(width=None if sys.stdout.isatty() else WIDE, highlight=False)
stderr = Console(stderr=True, width=None if sys.stderr.isatty() else WIDE, highlight=False)
