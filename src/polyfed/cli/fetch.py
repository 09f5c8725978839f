"""polyfed data fetch: apart from data.py, so that a download does not wait for what draws."""

from pathlib import Path

from polyfed.cli.commands import DataFetch
from polyfed.cli.screen import say
from polyfed.data import fetch


def data_fetch(o: DataFetch) -> None:
    for path in fetch(o.name, Path(o.data_dir).expanduser() if o.data_dir else None):
        say(str(path))
