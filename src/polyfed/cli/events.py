"""What happens between a server and its sites, a line each: on the screen, and in a file for `polyfed status`."""

import time
from pathlib import Path

from polyfed.base.errors import printable
from polyfed.cli.screen import stderr

NAME = "events.log"


class Events:
    """Called with a line, says and notes it. folder: where the file is, as soon as there is one"""

    def __init__(self, folder: Path, quiet: bool = False):
        self.path, self.quiet = folder / NAME, quiet

    def show(self, text: str) -> None:
        """On the screen alone, without what a terminal would obey: others' words may be in it."""
        if not self.quiet:
            text = "\n".join(map(printable, text.split("\n")))
            stderr.print(f"{time.strftime('%H:%M:%S')} {text}", soft_wrap=True, markup=False)

    def __call__(self, line: str) -> None:
        line = printable(" ".join(line.split()))
        self.show(line)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as f:
            f.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")
