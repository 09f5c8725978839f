"""polyfed coalitions: who gains from whom."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from polyfed.cli import options as o
from polyfed.cli.compare import SEEDS

if TYPE_CHECKING:
    from polyfed.games.result import Coalitions
    from polyfed.runs.config import Experiment

AGAINST = ("fpfc", "ifca", "fedacs")  # what coalitions are held against unless methods are named
USUAL = {"evaluate-every": 0, "data": {"validation-fraction": 0.2}}


@o.shared(*o.ON_RAY)
def coalitions(
    method: Annotated[str, Argument(help="What coalitions train with: name, or name:key=value.")] = "fedavg",
    against: Annotated[
        list[str] | None,
        Option(
            help="Method whose clusters or mixing weights are held against the coalitions; repeatable, or none. "
            f"Default: {', '.join(AGAINST)}.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    samples: Annotated[
        int | None,
        Option(
            help="Sample coalitions: how often each client joins each other. Default: all coalitions up to 8 clients, "
            "else 10.",
            metavar="N",
            show_default=False,
        ),
    ] = None,
    **given: Any,
) -> int:
    """Train the coalitions of the clients and report who gains from whom, and which coalitions would hold.

    Every client's score in every coalition, what each other client is worth to it (Shapley value, leave-one-out), the
    coalition it would choose by validation data, and stable partitions. polyfed resume continues.

    [dim]polyfed coalitions --seeds 10
    polyfed coalitions ditto --data digits --partition dirichlet:0.3 --clients 6 --against fpfc:lam=0.3[/dim]
    """
    typed = o.collect(given)
    from polyfed.base.errors import ConfigError
    from polyfed.runs.config import defaults_for, merge, resolve

    if samples is not None and samples < 1:
        raise ConfigError(f"samples: found {samples}, expected an integer of at least 1")
    others = AGAINST if against is None else [] if against == ["none"] else against
    low = merge(merge(defaults_for(None, typed), {"seeds": SEEDS}), USUAL)
    found = resolve(None, typed, [method, *others], low)
    return play(found, samples, given["out"], given["force"], given["quiet"])


def play(
    experiment: "Experiment", samples: int | None, out: Path | None, force: bool, quiet: bool, resume: bool = False
) -> int:
    """Train (or go on with) the coalitions of an experiment in `out`, report them, and return the exit status."""
    from collections.abc import Sequence

    from polyfed.cli.console import Show
    from polyfed.cli.folders import claimed
    from polyfed.cli.portable import pin
    from polyfed.games.run import Game, Made
    from polyfed.runs import ownership as files
    from polyfed.runs import stop
    from polyfed.runs.build import Parts

    if experiment.settings.portable:
        pin()
    parts = Parts(experiment)
    experiment = parts.experiment
    methods = experiment.methods
    if not resume:
        parts.check_without()

    def make(seed: int, without: Sequence[str]) -> Made:
        here = parts.leaving(without) if without else parts
        tables = {k: v for k, v in here.describe(methods[0]).items() if k != "algorithm"}
        return here.model(seed), here.federation(seed), tables

    parts.check()
    federation = parts.federation(experiment.seeds[0])
    described = {m.label: {"algorithm": m.table()} for m in methods[1:]}
    game = Game(
        make, federation, [m.algorithm for m in methods], [m.label for m in methods], parts.training(),
        experiment.seeds, samples, lambda label: described.get(label, {}),
    )  # fmt: skip
    since = stop.interruptions()
    with claimed(out, f"coalitions-{experiment.name}", force, resume) as folder:
        try:
            with Show(False, quiet) as show:
                found = game.play(folder, resume, show, experiment.toml())
        except KeyboardInterrupt:
            from polyfed.cli.execute import _say_interrupted

            _say_interrupted(folder)
            return stop.status(since)
        files.forget_old(folder)
        say(found, folder / "report.html")
    return 0


def say(found: "Coalitions", page: Path) -> None:
    """Print the answer, the tables, and where the page is."""
    from polyfed.cli.console import show_table, stdout
    from polyfed.games.show import answer, tables

    stdout.print()
    stdout.print(answer(found), style="bold", markup=False)
    for table in tables(found):
        stdout.print()
        show_table(table)
    stdout.print(f"\ntables, picture and page: {page}", soft_wrap=True, markup=False)


def go_on(run: Path, quiet: bool) -> int:
    """Continue the coalitions of a folder."""
    from polyfed.runs.config import resolve
    from polyfed.runs.ownership import unsealed

    table = unsealed(run / "coalitions.toml")
    told = table.pop("coalitions")
    if "name" not in table.get("data", {}):
        from polyfed.base.errors import ConfigError

        raise ConfigError(f"{run}: its data were given in Python; continue with polyfed.coalitions(..., resume=True)")
    return play(resolve(None, table), told.get("samples"), run, False, quiet, resume=True)
