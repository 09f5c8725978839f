"""polyfed admit: add clients to a finished run that did not take part in its training."""

from polyfed.base.errors import ConfigError, DataError
from polyfed.cli.commands import Admit
from polyfed.cli.console import show_table
from polyfed.cli.folders import claimed
from polyfed.cli.screen import say, stdout
from polyfed.face import Run


def admit(o: Admit) -> None:
    if o.start not in ("offered", "common"):
        raise ConfigError(f"start: found {o.start!r}, expected offered or common")
    opened = Run.open(o.run)
    if not o.data.exists():
        raise DataError(f"--data {o.data}: no such file or folder")
    newcomers = opened.newcomers(o.data, o.target)
    with claimed(o.out, f"admit-{o.run.resolve().name}") as folder:
        found = opened.admit(newcomers, o.exchanges, start=o.start)
        found.save(folder)
    stdout.print()
    show_table(found.summary())
    say(f"\nmodels, table and figure: {folder}")
