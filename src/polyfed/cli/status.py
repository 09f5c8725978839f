"""polyfed status: what a server or a site is doing."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

LINES = 10


def status(
    folder: Annotated[Path, Argument(help="A server's run, or a site's vault.", show_default=False)],
    lines: Annotated[
        int, Option("--lines", "-n", help="How many of the last events to show.", metavar="N", min=1)
    ] = LINES,
) -> int:
    """Show whether a server or site runs, who is connected, and its last events."""
    from polyfed.base.errors import RunError
    from polyfed.base.settings import table_in
    from polyfed.cli.events import NAME

    try:
        events = (folder / NAME).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        raise RunError(f"{folder}: no server or site has run here") from None
    try:
        state = table_in((folder / "flower" / "state.json").read_bytes())
        with suppress(PermissionError):  # it runs, as another user
            os.kill(state["pid"], 0)
        print(f"running, process {state['pid']}")
        for site, doing in sorted(state.get("sites", {}).items()):
            print(f"{site}: {doing}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        print("not running")
    rounds = sorted(path.name for path in folder.glob("checkpoint/round-*"))
    if rounds:
        print(f"{int(rounds[-1].removeprefix('round-')[:8])} rounds saved")
    print("\n".join(events[-lines:]))
    return 0
