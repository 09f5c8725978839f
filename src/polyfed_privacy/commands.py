"""The commands that this package adds to polyfed; what they do is in command.py."""

from pathlib import Path

from polyfed.cli import complete
from polyfed.cli.options import Command, Experiment, argument, every, option


class Privacy(
    Experiment, takes=every("track"), asks="experiment", module="command",
    idle={"out": "without --cost", "force": "without --cost | without --out", "quiet": "without --cost"},
):  # fmt: skip
    """Show what an experiment's privacy settings buy without training; with --cost, what they cost.

    The noise, the releases that it is made for, whom one has to trust, what is not covered, and which methods are
    refused, with the reason. --cost trains the first method without privacy and at each epsilon, on the same splits and
    with all data here: a simulation, which is itself not private.

    [dim]polyfed privacy experiment.toml
    polyfed privacy experiment.toml --set privacy.epsilon=1
    polyfed privacy experiment.toml --cost 8,4,2,1 --out runs/cost[/dim]
    """

    experiment: Path | None = argument("Experiment file (TOML).", None, "[FILE.toml]")
    algorithm: list[str] | None = option(
        "Plan just this method, name or name:key=value; repeatable.", None, "NAME", autocompletion=complete.methods
    )
    cost: str | None = option("Train, and compare these epsilons with no privacy.", None, "8,4,2,1")


class Audit(Command, module="command"):
    """Try to break the promise of a private run with rows that were made for it (canaries).

    The run's settings train on rows of which each is there or not by the toss of a coin, and the tosses are guessed
    from the models: a lower bound on epsilon, which finds noise or clipping that is missing. Noise that is a little
    short is found by its variance and fourth moment. Exit status 1: the run is less private than it claims.

    [dim]polyfed audit runs/a[/dim]
    """

    run: Path = argument("Folder of a run or of a comparison.")
