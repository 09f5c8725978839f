"""polyfed admit: add clients to a finished run that did not take part in its training."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from polyfed.cli import options as o


def admit(
    run: Annotated[Path, Argument(help="Folder of a run.", show_default=False)],
    data: Annotated[
        Path, Option(help="A CSV or npz file per newcomer: one file, or a folder of them.", show_default=False)
    ],
    exchanges: Annotated[int, Option(help="Rounds that every new client takes part in.", metavar="N")] = 10,
    start: Annotated[
        str, Option(help="offered: the best of the method's models (such as a cluster's); common: the initial model.")
    ] = "offered",
    target: Annotated[
        str | None, Option(help="Target column of CSV files. Default: the run's, else the last.", metavar="COLUMN")
    ] = None,
    out: Annotated[
        Path | None, Option(help="Folder for the results. Default: runs/<time>-admit-<run>.", rich_help_panel=o.WHERE)
    ] = None,
) -> int:
    """Add new clients to a finished run by the method's own rule, and report each one's model after every exchange.

    The run and its clients stay as they are. A file's name is the client's. Its rows are prepared as
    those of the run were: scaled with the run's mean and variance, or with its own where every client was.

    [dim]polyfed admit runs/a/runs/ditto-seed0 --data oslo.csv --exchanges 20[/dim]
    """
    from polyfed.base.errors import ConfigError, DataError
    from polyfed.cli.console import show_table, stdout
    from polyfed.cli.folders import claimed
    from polyfed.face import Run

    if start not in ("offered", "common"):
        raise ConfigError(f"start: found {start!r}, expected offered or common")
    opened = Run.open(run)
    if not data.exists():
        raise DataError(f"--data {data}: no such file or folder")
    newcomers = opened.newcomers(data, target)
    with claimed(out, f"admit-{run.resolve().name}") as folder:
        found = opened.admit(newcomers, exchanges, start=start)
        found.save(folder)
    stdout.print()
    show_table(found.summary())
    stdout.print(f"\nmodels, table and figure: {folder}", soft_wrap=True, markup=False)
    return 0
