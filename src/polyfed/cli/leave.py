"""polyfed leave: train a run or a comparison again without some of its clients."""

from pathlib import Path

from polyfed.base.errors import ConfigError, RunError
from polyfed.cli.commands import Leave
from polyfed.cli.console import show_table
from polyfed.cli.run import execute
from polyfed.cli.screen import say, stdout
from polyfed.runs import schema as reading
from polyfed.runs.config import resolve
from polyfed.runs.ownership import config_of, spare, unsealed
from polyfed.studies.leave import compared, leaving, without


def leave(o: Leave) -> int:
    run = o.run
    config = config_of(run)
    if o.out is not None:
        spare(o.out, run)
    unsealed(config)
    folders = [run] if config.name == "config.toml" else sorted(run.glob("runs/*-seed*"))
    if not folders or any(not (f / "summary.json").exists() for f in folders):
        raise RunError(f"{run}: is not finished; finish it with: polyfed resume {run}")
    everyone = reading.federation(folders[0]).names
    names = leaving(o.client, everyone)
    if config.name == "config.toml" and "start" in unsealed(config):
        raise ConfigError(f"{run}: started from another run, whose models have seen {', '.join(names)}")

    def said(folder: Path) -> None:
        found = compared(run, folder, names)
        page = found.save()
        stdout.print()
        show_table(found.summary())
        say(f"\nwhat it costs: {page}\nthe runs without {', '.join(names)}: {folder}")

    return execute(without(resolve(config), names, everyone), o.out, o.force, o.quiet, left=said)
