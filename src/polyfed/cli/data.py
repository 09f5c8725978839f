"""polyfed data: list the data sets, fetch one, see how it is divided among clients."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from polyfed.cli import complete
from polyfed.cli import options as o

data = typer.Typer(help="List, fetch and inspect data sets.", no_args_is_help=True)
Name = Annotated[
    str, Argument(help="A data set, or a folder of CSV or npz files.", show_default=False, autocompletion=complete.data)
]


@data.command("list")
def list_() -> int:
    """List the data sets that polyfed knows by name.

    [dim]polyfed data list[/dim]
    """
    from polyfed.cli.inspect import catalogue
    from polyfed.cli.screen import stdout

    stdout.print(catalogue())
    return 0


@data.command()
def fetch(
    name: Annotated[str, Argument(help="A data set.", show_default=False)],
    data_dir: o.DataDir = None,
) -> int:
    """Download a data set from its public source and check it.

    [dim]polyfed data fetch fashion-mnist --data-dir ~/data[/dim]
    """
    from polyfed.cli.screen import stdout
    from polyfed.data import fetch as get

    for path in get(name, Path(data_dir).expanduser() if data_dir else None):
        stdout.print(str(path), soft_wrap=True)
    return 0


@data.command()
def inspect(
    name: Name,
    target: o.Target = None,
    standardise: o.Standardise = None,
    drop: o.Drop = None,
    weights: o.Weights = None,
    partition: o.Partition = None,
    clients: o.Clients = None,
    data_dir: o.DataDir = None,
    seed: o.Seed = None,
    set: o.Set = None,
    out: Annotated[Path | None, Option(help="Picture of the partition.", metavar="FILE.svg|.png|.pdf")] = None,
) -> int:
    """Show the clients of a partition: samples, classes, and caveats about the data; of CSV files every column first.

    [dim]polyfed data inspect digits --partition dirichlet:0.3 --clients 8 --out digits.svg[/dim]
    """
    given = o.collect({**locals(), "data": name})
    from polyfed.cli.inspect import show
    from polyfed.runs.config import resolve

    show(resolve(None, given), out)
    return 0
