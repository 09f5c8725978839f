"""The commands that this package adds to polyfed; what they do is in command.py."""

from pathlib import Path

from polyfed.cli.options import WHERE, Command, Shared, argument, option


class Admit(Command, module="command"):
    """Add new clients to a finished run by the method's own rule, and report each one's model after every exchange.

    The run and its clients stay as they are. A file's name is the client's. Its rows are prepared as
    those of the run were: scaled with the run's mean and variance, or with its own where every client was.

    [dim]polyfed admit runs/a/runs/ditto-seed0 --data oslo.csv --exchanges 20[/dim]
    """

    run: Path = argument("Folder of a run.")
    data: Path = option("A CSV or npz file per newcomer: one file, or a folder of them.", ...)
    exchanges: int = option("Rounds that every new client takes part in.", 10, "N")
    start: str = option(
        "offered: the best of the method's models (such as a cluster's); common: the initial model.", "offered"
    )
    target: str | None = option("Target column of CSV files. Default: the run's, else the last.", None, "COLUMN")
    out: Path | None = option("Folder for the results. Default: runs/<time>-admit-<run>.", panel=WHERE)


class Leave(Shared, takes=("out", "force", "quiet"), asks="run", module="command"):
    """Train again without some clients, every other draw the same, and report what that costs those who stay.

    The new folder is, bit for bit, that of a federation that never had them; the old one stays as it is. What it costs
    is written beside the new one, as FOLDER-cost.html and .csv. Models are trained anew from the start: there is no
    approximate unlearning.

    [dim]polyfed leave runs/a --client va[/dim]
    """

    run: Path = argument("Folder of a run or of a comparison.")
    client: list[str] = option("Who leaves, by name; repeatable.", ..., "NAME")
