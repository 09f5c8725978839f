"""Events between a server and its sites, a line each: on the screen, and in a file for polyfed status."""

import time
from pathlib import Path

from polyfed.base.errors import RunError, printable
from polyfed.base.settings import table_in
from polyfed.base.system import alive
from polyfed.cli.screen import stderr
from polyfed_sites.commands import Status

NAME = "events.log"


class Events:
    """Called with a line, notes it and, unless `quiet`, says it with `who` before it."""

    def __init__(self, folder: Path, quiet: bool = False, who: str = ""):
        self.path, self.quiet, self.who = folder / NAME, quiet, who

    def show(self, text: str) -> None:
        """On the screen alone."""
        if not self.quiet:
            self.warn(text)

    def warn(self, text: str) -> None:
        """On the screen, quiet or not, without what a terminal would obey: others' words may be in it."""
        text = "\n".join(map(printable, text.split("\n")))
        stderr.print(f"{time.strftime('%H:%M:%S')} {self.who}{text}", soft_wrap=True, markup=False)

    def __call__(self, line: str) -> None:
        line = printable(" ".join(line.split()))
        self.show(line)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8", newline="\n") as f:
            f.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")


def status(o: Status) -> None:
    folder = o.folder
    try:
        events = (folder / NAME).read_text("utf-8", "replace").splitlines()
    except OSError:
        raise RunError(f"{folder}: no server or site has run here") from None
    _state(folder)
    for run in sorted(path.parent for path in folder.glob(f"*/{NAME}")):
        print(f"\n{run.name}:")
        _state(run)
        print("\n".join(run.joinpath(NAME).read_text("utf-8", "replace").splitlines()[-1:]))
    print("\n".join(events[-o.lines :]))


def _state(folder: Path) -> None:
    """Whether a server or a site runs in a folder, who is there, and how far it is."""
    try:
        state = table_in((folder / "state.json").read_bytes())
        if not alive(state["pid"]):
            raise ProcessLookupError
        print(f"running, process {state['pid']}")
        for site, doing in sorted(state.get("sites", {}).items()):
            print(f"{site}: {doing}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        print("not running")
    rounds = sorted(path.name for path in folder.glob("checkpoint/round-*"))
    if rounds:
        print(f"{int(rounds[-1].removeprefix('round-')[:8])} rounds saved")
