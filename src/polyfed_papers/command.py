"""polyfed reproduce: a paper's experiment, its figures next to ours; polyfed data fetch."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from polyfed.base.errors import ConfigError
from polyfed.cli.console import Show, show_table
from polyfed.cli.describe import package
from polyfed.cli.folders import claimed
from polyfed.cli.screen import interrupted, say, stdout
from polyfed.data.datasets import default_dir
from polyfed.report import Table
from polyfed.report.table import Cell
from polyfed.runs import ownership as files
from polyfed.runs import stop
from polyfed.runs.userfile import algorithms_of
from polyfed_papers.commands import DataFetch, Reproduce
from polyfed_papers.fetch import fetch
from polyfed_papers.recipes import Bench, Outcome, Recipe, find, gather, origin
from polyfed_papers.recipes.recipe import Size, estimate, write
from polyfed_papers.recipes.record import load, pack, unpack
from polyfed_papers.recipes.said import claims_table, settings_table

LONG = 60  # minutes from which a run is asked about


def reproduce(o: Reproduce) -> int:
    if o.name is None:
        return _list()
    scale, record = o.scale, o.record
    r = find(o.name)
    if scale not in r.sizes:
        raise ConfigError(f"--scale: found {scale!r}, expected {' or '.join(r.sizes)} for {r.name}")
    joining = [name for file in o.algorithm or () for name in algorithms_of(file.resolve())]
    if joining and not r.joins:
        raise ConfigError(
            f"--algorithm: {r.name} takes no further method; the boards do: polyfed reproduce board/small"
        )
    folder = o.out or Path("runs") / "reproduce" / f"{r.name.replace('/', '-')}-{'rehearsal' if o.rehearse else scale}"
    before = load(record) if record is not None else None
    portable = o.portable or (before is not None and before.about.portable)
    experiment = f"{r.name} {scale}{' rehearsal' * o.rehearse}{' portable' * portable}"
    if before is not None and str(before.about) != experiment:
        raise ConfigError(f"--from {record}: found a record of {before.about}, expected one of {experiment}")
    which = before.about.seeds if before is not None and o.seeds is None else _seeds(o.seeds, r.counted)
    device = o.device or ("cpu" if portable else before.about.device if before is not None else "auto")
    if portable and device.startswith("cuda"):
        raise ConfigError(f"--portable: found device {device}, expected cpu")
    size: Any = scale
    where, takes = o.data_dir or default_dir(), r.minutes.get(size)
    if takes is not None:
        takes *= len(which) / len(r.counted)
    elif not o.rehearse:
        stdout.print("training three rounds of every kind of method, to see how long all will take")
        takes = estimate(r, size, which, where, device)
    _say_before(r, size, which, takes)
    if (takes or 0) > LONG and not (o.yes or o.rehearse or not sys.stdin.isatty() or typer.confirm("Start?")):
        return 1
    since = stop.interruptions()
    with _claimed(folder, experiment, o.force):
        if before is not None:
            unpack(before, folder)
        with Show(False, o.quiet) as show:
            bench = Bench(folder, size, which, where, device, show, o.rehearse, record, portable, joining)
            try:
                outcome = r.outcome(bench)
            except KeyboardInterrupt:
                return interrupted(f"what is finished is in {folder}, the same command goes on from there", since)
            finally:
                if r.recorded:
                    pack(bench, r.name)
        page = write(r, bench, outcome)
    _say_after(outcome, page)
    return 0


def data_fetch(o: DataFetch) -> None:
    for path in fetch(o.name, Path(o.data_dir).expanduser() if o.data_dir else None):
        say(str(path))


@contextmanager
def _claimed(folder: Path, experiment: str, force: bool) -> Iterator[None]:
    """The recipe's folder, locked: a new one, that of the same recipe, or with `force` any of ours."""
    mark, text = folder / "recipe.txt", f"{experiment}\n"
    same = not force and mark.is_file()
    if same and mark.read_text("utf-8") != text:
        raise ConfigError(f"--out {folder}: holds {mark.read_text('utf-8').strip()}; choose another, or use --force")
    with claimed(folder, "", force, resume=same):
        if not mark.is_file():
            files.put(mark, text.encode())
        yield


def _seeds(given: str | None, default: list[int]) -> list[int]:
    if given is None:
        return default
    parts = given.removesuffix(",").split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise ConfigError(f"--seeds: found {given!r}, expected how many, or which: 5 or 0,3,7 or 3,")
    numbers = [int(part) for part in parts]
    found = numbers if "," in given else list(range(numbers[0]))
    if not found or len(set(found)) < len(found):
        raise ConfigError(f"--seeds: found {given!r}, expected at least one, all of them different")
    return found


def _list() -> int:
    def time(r: Recipe, scale: Size) -> Cell:
        return Cell(minutes(r.minutes[scale]).replace(" ", "\u00a0"))  # never broken over lines

    recipes, broken = gather()
    rows = [
        (
            Cell("\n".join((r.name, *r.also))),
            time(r, "small"),
            time(r, "paper"),
            Cell(r.title + package(origin(r))[0]),
            Cell(", ".join(r.data) or "–"),
        )
        for r in recipes.values()
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


def _say_before(r: Recipe, scale: Any, seeds: list[int], takes: float | None) -> None:
    stdout.print(f"[bold]{r.name}[/bold]: {r.title}")
    stdout.print(r.about, markup=False)
    where = {"small": "two cores", "paper": r.machine}.get(scale, "this machine, by three rounds")
    time = minutes(takes or 0)
    about = "a few" if time == "seconds" else "about"
    stdout.print(f"seeds {seeds}; {about} {time} on {where}\n", markup=False)
    show_table(settings_table(r.settings(scale)))


def _say_after(outcome: Outcome, page: Path) -> None:
    for table in outcome.tables:
        stdout.print()
        show_table(table)
    if outcome.claims:
        stdout.print()
        show_table(claims_table(outcome.claims))
    for note in outcome.notes:
        stdout.print(f"- {note}", markup=False)
    say(f"\nwritten: {page}")
