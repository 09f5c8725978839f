"""polyfed reproduce: a paper's experiment, its figures next to ours."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from polyfed.cli import options as o

if TYPE_CHECKING:
    from polyfed.recipes import Outcome, Recipe
    from polyfed.recipes.recipe import Size


def reproduce(
    name: Annotated[str | None, Argument(help="A recipe, such as fpfc/table1; without it, all are listed.")] = None,
    scale: Annotated[
        str, Option(help="small: minutes on two cores; paper: the real thing; middle: between, where a recipe has it.")
    ] = "small",
    seeds: Annotated[str | None, Option(help="Number of seeds, or a list of them: 5 or 0,3,7.")] = None,
    data_dir: o.DataDir = None,
    device: o.Device = None,
    out: Annotated[
        Path | None, Option(help="Folder for the results. Default: runs/reproduce/<recipe>-<scale>.")
    ] = None,
    record: Annotated[
        Path | None,
        Option("--from", help="Go on from a record, the file that an earlier call wrote; nothing is computed twice."),
    ] = None,
    force: Annotated[bool, Option("--force", help="Start over, whatever the folder holds.")] = False,
    rehearse: Annotated[bool, Option("--rehearse", help="Run two rounds of everything, to check the set-up.")] = False,
    yes: Annotated[bool, Option("--yes", "-y", help="Start a long run without asking.")] = False,
    quiet: o.Quiet = False,
) -> int:
    """Repeat an experiment of a paper. A second call with the same folder continues where the first one stopped.

    The folder's record.jsonl.gz has every number of every run that is over: --from goes on from it in another folder,
    polyfed verify trains its runs again.

    [dim]polyfed reproduce fpfc/table1[/dim]
    """
    if name is None:
        return _list()
    from polyfed.base.errors import ConfigError
    from polyfed.cli.console import Show, stdout
    from polyfed.data.datasets import default_dir
    from polyfed.recipes import Bench, find
    from polyfed.recipes.recipe import estimate, write
    from polyfed.recipes.record import load, pack, unpack
    from polyfed.runs import ownership as files
    from polyfed.runs import stop

    r = find(name)
    if scale not in r.sizes:
        raise ConfigError(f"--scale: found {scale!r}, expected {' or '.join(r.sizes)} for {r.name}")
    folder = out or Path("runs") / "reproduce" / f"{r.name.replace('/', '-')}-{'rehearsal' if rehearse else scale}"
    what, before = f"{r.name} {scale}{' rehearsal' if rehearse else ''}", load(record) if record is not None else None
    if before is not None and str(before.about) != what:
        raise ConfigError(f"--from {record}: found a record of {before.about}, expected one of {what}")
    which = before.about.seeds if before is not None and seeds is None else _seeds(seeds, r.seeds)
    device = device or (before.about.device if before is not None else "auto")
    size: Any = scale
    where, takes = data_dir or default_dir(), r.minutes.get(size)
    if takes is not None:
        takes *= len(which) / r.seeds
    elif not rehearse:
        stdout.print("training three rounds of every kind of method, to see how long all will take")
        takes = estimate(r, size, which, where, device)
    _say_before(r, size, which, takes)
    if (takes or 0) > LONG and not (yes or rehearse or _agreed()):
        return 1
    since = stop.interruptions()
    with _claimed(folder, what, force):
        if before is not None:
            unpack(before, folder)
        with Show(False, quiet) as show:
            bench = Bench(folder, size, which, where, device, show, rehearse, record)
            try:
                outcome = r.run(bench)
            except KeyboardInterrupt:
                return _interrupted(folder, stop.status(since))
            finally:
                if r.recorded:
                    pack(bench, r.name)
        page = write(r, bench, outcome)
        files.forget_old(folder)
    _say_after(outcome, page)
    return 0


LONG = 60  # minutes from which a run is asked about


@contextmanager
def _claimed(folder: Path, what: str, force: bool) -> Iterator[None]:
    """The recipe's folder, locked: a new one, that of the same recipe, or one that is emptied for it."""
    from polyfed.base.errors import ConfigError
    from polyfed.cli.folders import claimed
    from polyfed.runs.ownership import holds_results, put

    mark, text = folder / "recipe.txt", f"{what}\n"
    if holds_results(folder) and not mark.is_file() and not (folder / ".old/recipe.txt").is_file():
        raise ConfigError(f"--out {folder}: holds other results than a recipe's; choose another")
    same = not force and mark.is_file()
    if same and mark.read_text() != text:
        raise ConfigError(f"--out {folder}: holds {mark.read_text().strip()}; choose another, or use --force")
    with claimed(folder, "", force, resume=not force):
        if not mark.is_file():
            put(mark, text.encode())
        yield


def _seeds(given: str | None, default: int) -> list[int]:
    from polyfed.base.errors import ConfigError

    if given is None:
        return list(range(default))
    parts = given.split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise ConfigError(f"--seeds: found {given!r}, expected how many, or which: 5 or 0,3,7")
    numbers = [int(part) for part in parts]
    found = numbers if len(numbers) > 1 else list(range(numbers[0]))
    if not found or len(set(found)) < len(found):
        raise ConfigError(f"--seeds: found {given!r}, expected at least one, all of them different")
    return found


def _list() -> int:
    from polyfed.cli.console import show_table, stdout
    from polyfed.cli.describe import package
    from polyfed.recipes import gather, origin
    from polyfed.report import Table
    from polyfed.report.table import Cell

    def time(r: "Recipe", scale: "Size") -> Cell:
        return Cell(minutes(r.minutes[scale]).replace(" ", "\u00a0"))  # never broken over lines

    known, broken = gather()
    rows = [
        (
            Cell("\n".join((r.name, *r.also))),
            time(r, "small"),
            time(r, "paper"),
            Cell(r.title + package(origin(r))[0]),
            Cell(", ".join(r.data) or "–"),
        )
        for r in known.values()
    ]
    show_table(Table("Recipes", ("recipe<", "small", "paper", "what<", "data<"), tuple(rows)))
    for line in broken:
        stdout.print(f"\n{line}", style="red", markup=False)
    stdout.print(
        "\nsmall, paper: about how long; small on two cores, paper on the machine that a recipe names first. "
        "Names in one row are one recipe. "
        "Data are looked for in --data-dir, or where POLYFED_DATA points."
    )
    return 0


def minutes(count: float) -> str:
    """About how long, in words."""
    if count < 1:
        return "seconds"
    if count < 90:
        return f"{count:.0f} min"
    return f"{count / 60:.0f} h" if count < 60 * 48 else f"{count / 60 / 24:.0f} days"


def _say_before(r: "Recipe", scale: Any, seeds: list[int], takes: float | None) -> None:
    from polyfed.cli.console import show_table, stdout
    from polyfed.recipes.recipe import settings_table

    stdout.print(f"[bold]{r.name}[/bold]: {r.title}")
    stdout.print(r.about, markup=False)
    where = {"small": "two cores", "middle": "this machine, by three rounds"}.get(scale, r.machine)
    time = minutes(takes or 0)
    about = "a few" if time == "seconds" else "about"
    stdout.print(f"seeds {seeds}; {about} {time} on {where}\n", markup=False)
    show_table(settings_table(r.settings(scale)))


def _agreed() -> bool:
    import sys

    import typer

    if not sys.stdin.isatty():
        return True
    return typer.confirm("Start?")


def _interrupted(folder: Path, status: int) -> int:
    from polyfed.cli.console import stderr

    text = f"polyfed: interrupted; what is finished is in {folder}, the same command goes on from there"
    stderr.print(text, soft_wrap=True, markup=False)
    return status


def _say_after(outcome: "Outcome", page: Path) -> None:
    from polyfed.cli.console import show_table, stdout
    from polyfed.recipes.recipe import claims_table

    for table in outcome.tables:
        stdout.print()
        show_table(table)
    if outcome.claims:
        stdout.print()
        show_table(claims_table(outcome.claims))
    for note in outcome.notes:
        stdout.print(f"- {note}", markup=False)
    stdout.print(f"\nwritten: {page}", soft_wrap=True, markup=False)
