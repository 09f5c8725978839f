"""The commands that this package adds to polyfed; what they do is in command.py."""

from pathlib import Path

from polyfed.cli.options import Experiment, argument, option


class Reproduce(
    Experiment,
    module="command",
    takes=("data_dir", "device", "portable", "quiet"),
    asks="record",
    idle=dict.fromkeys(
        ("scale", "seeds", "out", "record", "algorithm", "force", "rehearse", "yes", "data_dir", "device", "portable",
         "quiet"),
        "without NAME",
    ),
):  # fmt: skip
    """Repeat an experiment of a paper. A second call with the same folder continues where the first one stopped.

    The folder's record.jsonl.gz has every number of every run that is over: --from goes on from it in another folder,
    polyfed verify trains its runs again.

    [dim]polyfed reproduce fpfc/table1[/dim]
    """

    name: str | None = argument("A recipe, such as fpfc/table1; without it, all are listed.", None)
    scale: str = option(
        "small: minutes on two cores; paper: the real thing; middle: between, where a recipe has it.", "small"
    )
    seeds: str | None = option("Number of seeds, or a list of them: 5 or 0,3,7.")
    out: Path | None = option("Folder for the results. Default: runs/reproduce/<recipe>-<scale>.")
    record: Path | None = option(
        "Go on from a record, the file that an earlier call wrote; nothing is computed twice.", None, None, "--from"
    )
    algorithm: list[Path] | None = option(
        "Python file with a method of yours, which joins a board; may be repeated.", None, "FILE.py"
    )
    force: bool = option("Start over, whatever the folder holds.", False)
    rehearse: bool = option("Run two rounds of everything, to check the set-up.", False)
    yes: bool = option("Start a long run without asking.", False, None, "--yes", "-y")


class DataFetch(Experiment, group="data", module="command", takes=("data_dir",)):
    """Download a data set from its public source and check it: mnist, fashion-mnist, cifar10 or cifar100.

    [dim]polyfed data fetch fashion-mnist --data-dir ~/data[/dim]
    """

    name: str = argument("A data set.")
