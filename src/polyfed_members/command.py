"""polyfed admit adds clients to a finished run; polyfed leave trains again without some of its clients."""

from pathlib import Path

from polyfed.base.errors import ConfigError, DataError, RunError
from polyfed.cli.console import show_table
from polyfed.cli.folders import claimed
from polyfed.cli.run import execute
from polyfed.cli.screen import say, stdout
from polyfed.face import Run
from polyfed.runs import schema
from polyfed.runs.config import resolve
from polyfed.runs.ownership import config_of, spare, unsealed
from polyfed_members.commands import Admit, Leave
from polyfed_members.leave import compared, leaving, without


def admit(o: Admit) -> None:
    if o.start not in ("offered", "common"):
        raise ConfigError(f"start: found {o.start!r}, expected offered or common")
    opened = Run.open(o.run)
    if not o.data.exists():
        raise DataError(f"--data {o.data}: no such file or folder")
    newcomers = opened.newcomers(o.data, o.target)
    with claimed(o.out, f"admit-{o.run.resolve().name}") as folder:
        admission = opened.admit(newcomers, o.exchanges, start=o.start)
        admission.save(folder)
    stdout.print()
    show_table(admission.summary())
    say(f"\nmodels, table and figure: {folder}")


def leave(o: Leave) -> int:
    run, config = o.run, config_of(o.run)
    if o.out is not None:
        spare(o.out, run)
    started = "start" in unsealed(config)
    folders = [run] if config.name == "config.toml" else sorted(run.glob("runs/*-seed*"))
    if not folders or any(not (f / "summary.json").exists() for f in folders):
        raise RunError(f"{run}: is not finished; finish it with: polyfed resume {run}")
    everyone = schema.federation(folders[0]).names
    names = leaving(o.client, everyone)
    if started and config.name == "config.toml":
        raise ConfigError(f"{run}: started from another run, whose models have seen {', '.join(names)}")

    def said(folder: Path) -> None:
        departure = compared(run, folder, names)
        page = departure.save()
        stdout.print()
        stdout.print(departure.answer, style="bold", markup=False)
        show_table(departure.summary())
        say(f"\nwhat it costs: {page}\nthe runs without {', '.join(names)}: {folder}")

    return execute(without(resolve(config), names, everyone), o.out, o.force, o.quiet, left=said)
