"""polyfed resume: continue an interrupted run or comparison where it stopped."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from polyfed.cli import options as o
from polyfed.cli.portable import asked_by, pin


def resume(
    run: Annotated[Path, Argument(help="Folder of a run or of a comparison.", show_default=False)],
    rounds: Annotated[str | None, Option(help="Continue to N rounds in total.", metavar="N")] = None,
    quiet: o.Quiet = False,
) -> int:
    """Continue an interrupted run or comparison, with the same numbers as if it had never stopped.

    Bit for bit on processors with the same instructions, and with --portable on every x86 processor with AVX2; a change
    of processor is noted in log.txt.

    Finished runs of a comparison are kept as they are.

    [dim]polyfed resume runs/20250131-120000-heart-disease[/dim]
    """
    if asked_by(run):
        pin()
    from polyfed.base.errors import ConfigError
    from polyfed.cli.execute import execute
    from polyfed.cli.folders import is_search
    from polyfed.runs.config import resolve
    from polyfed.runs.ownership import MARK, config_of, is_ours, locked, settle, unsealed

    if (run / "coalitions.toml").is_file():
        from polyfed.cli.coalitions import go_on

        if rounds is not None:
            raise ConfigError(f"--rounds: {run} holds coalitions, which keep their number of rounds")
        return go_on(run, quiet)
    if is_search(run) and is_ours(run):
        raise ConfigError(f"{run}: holds a search; the same polyfed tune command with --out {run} continues it")
    if not (run / MARK).is_file():
        unsealed(config_of(run))  # a folder of somebody else is not even marked
    with locked(run):
        settle(run)
        unsealed(config_of(run))
        found = resolve(config_of(run), o.collect({"rounds": rounds}))
        return execute(found, run, quiet=quiet, resume=True)
