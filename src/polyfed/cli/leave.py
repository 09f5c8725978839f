"""polyfed leave: train a run or a comparison again without some of its clients."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from polyfed.cli import options as o
from polyfed.cli.portable import asked_by, pin


def leave(
    run: Annotated[Path, Argument(help="Folder of a run or of a comparison.", show_default=False)],
    client: Annotated[list[str], Option(help="Who leaves, by name; repeatable.", metavar="NAME", show_default=False)],
    out: o.Out = None,
    force: o.Force = False,
    quiet: o.Quiet = False,
) -> int:
    """Train again without some clients, every other draw the same, and report what that costs those who stay.

    The new folder is, bit for bit, that of a federation that never had them; the old one stays as it is. Models are
    trained anew from the start: there is no approximate unlearning.

    [dim]polyfed leave runs/a --client va[/dim]
    """
    if asked_by(run):
        pin()
    from polyfed.base.errors import RunError
    from polyfed.cli.console import show_table, stdout
    from polyfed.cli.execute import execute
    from polyfed.runs import schema as reading
    from polyfed.runs.config import resolve
    from polyfed.runs.ownership import config_of, spare, unsealed
    from polyfed.studies.leave import compared, leaving, without

    config = config_of(run)
    if out is not None:
        spare(out, run)
    unsealed(config)
    folders = [run] if config.name == "config.toml" else sorted(run.glob("runs/*-seed*"))
    if not folders or any(not (f / "summary.json").exists() for f in folders):
        raise RunError(f"{run}: is not finished; finish it with: polyfed resume {run}")
    everyone = reading.federation(folders[0]).names
    names = leaving(client, everyone)
    if config.name == "config.toml" and "start" in unsealed(config):
        from polyfed.base.errors import ConfigError

        raise ConfigError(f"{run}: started from another run, whose models have seen {', '.join(names)}")

    def said(folder: Path) -> None:
        found = compared(run, folder, names)
        found.save()
        stdout.print()
        show_table(found.summary())
        stdout.print(
            f"\nwhat it costs: {folder / 'leave.html'}\nthe runs without {', '.join(names)}: {folder}",
            soft_wrap=True, markup=False,
        )  # fmt: skip

    return execute(without(resolve(config), names, everyone), out, force, quiet, left=said)
