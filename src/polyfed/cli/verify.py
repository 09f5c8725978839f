"""polyfed verify: train a run again and see whether the same numbers come out."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from polyfed.cli import options as o
from polyfed.cli.portable import asked_by, pin

if TYPE_CHECKING:
    from polyfed.studies.verify import Verdict


def verify(
    run: Annotated[
        Path,
        Argument(help="Folder of a run or of a comparison, or the record of a recipe (a file).", show_default=False),
    ],
    only: Annotated[
        str | None,
        Option(
            "--run",
            help="One run of a comparison, or KEY/LABEL-seedK of a record.",
            metavar="LABEL-seedK",
            show_default=False,
        ),
    ] = None,
    data_dir: o.DataDir = None,
) -> int:
    """Train a finished run again in a temporary folder and compare server, models and history bit for bit.

    The folder is not changed. Exit status 0: all come out again, 1: something does not. Bits are equal on processors
    with the same instructions, and for a run with --portable on every x86 processor with AVX2; elsewhere a run comes
    out again to rounding, and it is said to how many digits. A run of a record, which polyfed reproduce writes, is
    trained by its recipe; --data-dir is for that.

    [dim]polyfed verify runs/a --run ditto-seed0[/dim]
    """
    if asked_by(run):
        pin()
    from polyfed.base.errors import ConfigError, RunError, closest
    from polyfed.cli.screen import stdout
    from polyfed.runs.ownership import config_of
    from polyfed.studies.verify import verify

    equal = True

    def tell(name: str, found: "Verdict") -> None:
        nonlocal equal
        equal = equal and (found.equal or found.rounded)
        stdout.print(f"{name}: {found}", markup=False, soft_wrap=True)
        for part, text in found.parts.items():
            stdout.print(f"  {part:<8} {text}", markup=False, soft_wrap=True)
        for part, (then, now) in found.versions.items():
            stdout.print(f"  {part}: {then} in the run, {now} here", markup=False, soft_wrap=True)

    if run.is_file():
        from polyfed.data.datasets import default_dir
        from polyfed.recipes import record

        record.verify(run, only, data_dir or default_dir(), tell)
        return 0 if equal else 1
    folders = [run]
    if config_of(run).name == "comparison.toml":
        folders = sorted(p.parent for p in (run / "runs").glob("*/config.toml"))
        names = [p.name for p in folders]
        if not folders:
            raise RunError(f"{run}: a comparison without runs")
        if only is not None and only not in names:
            raise ConfigError(f"--run: found {only!r}{closest(only, names)}, expected one of {', '.join(names)}")
        folders = [p for p in folders if only in (None, p.name)]
    elif only is not None:
        raise ConfigError(f"--run: {run} is a run, not a comparison; leave it out")
    for folder in folders:
        tell(str(folder), verify(folder))
    return 0 if equal else 1
