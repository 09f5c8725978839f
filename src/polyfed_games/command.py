"""polyfed coalitions: who gains from whom."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from polyfed.base.errors import ConfigError
from polyfed.cli.commands import Resume
from polyfed.cli.console import Show, show_table
from polyfed.cli.folders import claimed
from polyfed.cli.given import collect
from polyfed.cli.run import SEEDS, go_on, prepared
from polyfed.cli.screen import interrupted, say, stdout
from polyfed.runs import ownership as files
from polyfed.runs import stop
from polyfed.runs.build import Parts
from polyfed.runs.config import Experiment, defaults_for, merge, resolve
from polyfed_games import result
from polyfed_games.commands import AGAINST, Coalitions
from polyfed_games.run import Game, Made
from polyfed_games.show import answer, details, tables

USUAL = {"evaluate-every": 0, "data": {"validation-fraction": 0.2}}


def coalitions(o: Coalitions) -> int:
    typed, samples, against = collect(o), o.samples, o.against
    if samples is not None and samples < 1:
        raise ConfigError(f"samples: found {samples}, expected an integer of at least 1")
    others = AGAINST if against is None else [] if against == ["none"] else against
    low = merge(merge(defaults_for(None, typed), {"seeds": SEEDS}), USUAL)
    experiment = resolve(None, typed, [o.method, *others], low)
    return play(experiment, samples, o.out, o.force, o.quiet)


def play(
    experiment: Experiment, samples: int | None, out: Path | None, force: bool, quiet: bool, resume: bool = False
) -> int:
    """Train (or go on with) the coalitions of an experiment in `out`, report them, and return the exit status."""
    parts = prepared(experiment, fresh=not resume)
    experiment, methods = parts.experiment, parts.experiment.methods

    @lru_cache(1)
    def left(without: tuple[str, ...]) -> Parts:
        return parts.leaving(without) if without else parts

    def make(seed: int, without: Sequence[str]) -> Made:
        here = left(tuple(without))
        return here.model(seed), here.federation(seed)

    def described(label: str, without: Sequence[str]) -> dict[str, Any]:
        method = next((m for m in methods[1:] if m.label == label), None)
        played = left(tuple(without)).describe(method or methods[0])
        return {key: of for key, of in played.items() if method is not None or key != "algorithm"}

    game = Game(
        make, parts.federation(experiment.seeds[0]), [m.algorithm for m in methods], [m.label for m in methods],
        parts.training(), experiment.seeds, samples, described,
    )  # fmt: skip
    since = stop.interruptions()
    with claimed(out, f"coalitions-{experiment.name}", force, resume) as folder:
        try:
            with Show(False, quiet, experiment.seeds) as show:
                played = game.play(folder, resume, show, experiment.toml())
        except KeyboardInterrupt:
            return interrupted(go_on(folder), since)
        tell(played, folder / "report.html")
    return 0


def tell(played: result.Coalitions, page: Path) -> None:
    """Print the answer, the tables, and where the page is."""
    stdout.print()
    stdout.print(answer(played), style="bold", markup=False)
    stdout.print(" ".join(details(played)), style="dim", markup=False)
    for table in tables(played):
        stdout.print()
        show_table(table)
    say(f"\ntables, picture and page: {page}")


def rebuilt(run: Path) -> None:
    """Write again what a folder holds beside its runs."""
    played = result.Coalitions.open(run)
    tell(played, played.save())


def resumed(run: Path, o: Resume) -> int:
    """Continue the coalitions of a folder."""
    if o.rounds is not None:
        raise ConfigError(f"--rounds: {run} holds coalitions, which keep their number of rounds")
    table = files.unsealed(run / "coalitions.toml")
    told = table.pop("coalitions")
    if "name" not in table.get("data", {}):
        raise ConfigError(f"{run}: its data were given in Python; continue with polyfed.coalitions(..., resume=True)")
    return play(resolve(None, table), told.get("samples"), run, False, o.quiet, resume=True)
