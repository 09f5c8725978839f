"""Every command: its help, its arguments and its options. What it does is in the module of its name."""

from pathlib import Path
from typing import Literal

from polyfed.cli import complete
from polyfed.cli.options import Command, Experiment, Shared, argument, every, option

GROUPS = {"data": "List, fetch and inspect data sets."}


class Run(Experiment, takes=every(), asks="experiment"):
    """Run an experiment and report it.

    Without arguments: heart disease in four hospitals; own, common and personalised models beside what costs
    nothing (the commonest class, own trees) and what nobody can have (everybody's data); ten seeds.

    [dim]polyfed run experiment.toml --set algorithm.lr=0.05 --seeds 5
    polyfed run --data fashion-mnist --data-dir DIR --partition dirichlet:0.5 --clients 20 --rounds 5[/dim]
    """

    experiment: Path | None = argument("Experiment file (TOML); a run's config.toml is one.", None, "[FILE.toml]")
    algorithm: list[str] | None = option(
        "Run just this method, name or name:key=value; repeatable.", None, "NAME", autocompletion=complete.methods
    )


class Compare(Experiment, takes=every(), module="run"):
    """Compare methods on the same partition, test samples and start, over several seeds (default: 5).

    Yardsticks, which send nothing, are named like methods: own-trees, own-linear, commonest, pooled-oracle.

    [dim]polyfed compare local fedavg ditto:lam=0.1 ditto:lam=1 --data digits --clients 10 --rounds 50
    polyfed compare local fedavg recalibrated own-trees pooled-oracle[/dim]
    """

    methods: list[str] = argument(
        "Names, with settings where wanted: ditto:lam=0.1,lr=0.05", autocompletion=complete.methods
    )


class Resume(Shared, takes=("quiet",), asks="run"):
    """Continue an interrupted run or comparison, with the same numbers as if it had never stopped.

    Bit for bit on processors with the same instructions, and with --portable on every x86 processor with AVX2; a change
    of processor is noted in log.txt.

    Finished runs of a comparison are kept as they are.

    [dim]polyfed resume runs/20250131-120000-heart-disease[/dim]
    """

    run: Path = argument("Folder of a run or of a comparison.")
    rounds: str | None = option("Continue to N rounds in total.", None, "N", key="rounds")


class Verify(Experiment, takes=("data_dir",), asks="run"):
    """Train a finished run again in a temporary folder and compare server, models and history bit for bit.

    The folder is not changed. Exit status 0: all come out again, 1: something does not. Bits are equal on processors
    with the same instructions, and for a run with --portable on every x86 processor with AVX2, by the same versions of
    torch and numpy; elsewhere a run comes out again to rounding, and it is said to how many digits. A run of a record,
    which polyfed reproduce writes, is trained by its recipe; --data-dir is for that.

    [dim]polyfed verify runs/a --run ditto-seed0[/dim]
    """

    run: Path = argument("Folder of a run or of a comparison, or the record of a recipe (a file).")
    only: str | None = option("One run of a comparison, or KEY/LABEL-seedK of a record.", None, "LABEL-seedK", "--run")


class Report(
    Command,
    idle={
        "of": "without --table | with --paper",
        "figures": "with --paper | with --table without --out",
        "out": "with --paper",
    },
):
    """Write report.html from run folders, or print one table; of coalitions, write all files but the runs again.

    Comparisons are put side by side, each with its answer; runs are put together.

    [dim]polyfed report runs/a --figures
    polyfed report runs/before runs/after --out both.html
    polyfed report runs/a --table csv --of clients > clients.csv
    polyfed report runs/fashion runs/cifar --paper > table.tex[/dim]
    """

    runs: list[Path] = argument("Run or comparison folders, or one of coalitions.")
    out: Path | None = option("File to write. Default: report.html in the first folder, or beside-SECOND.html.")
    figures: bool = option("Write the figures as SVG, PDF and PNG beside the page.", False)
    table: Literal["text", "markdown", "latex", "csv"] | None = option(
        "Print one table in this form; without --out, write no page."
    )
    of: Literal["methods", "clients", "gains", "costs", "results"] = option("The table that --table prints.", "methods")
    paper: bool = option("Print one table over several data sets, in LaTeX.", False)


class Predict(Command):
    """Predict the target of new rows, which are prepared as the training rows were.

    A row per row: prediction, and for classes a probability each; for a regression a number in the target's unit.

    [dim]polyfed export answer/runs/ditto-seed0 --client west
    polyfed predict west.safetensors new-patients.csv --out predictions.csv[/dim]
    """

    model: Path = argument("A model that polyfed export wrote (.safetensors), or the folder of a run.")
    rows: Path = argument("CSV file with the columns of the training files.")
    client: str | None = option("Of a run: the client's name, or its number from 0.")
    encoding: str | None = option("Encoding of the rows, if not UTF-8, such as cp1252.", None, "NAME")
    strict: bool = option("Refuse rows outside the ranges and categories of the training rows.", False)
    out: Path | None = option("File for the predictions. Default: print them.", None, "FILE.csv")


class Algorithms(Command, module="describe"):
    """List the methods, or describe one.

    [dim]polyfed algorithms fpfc[/dim]
    """

    name: str | None = argument("A method.", None, autocompletion=complete.methods)


class Config(Command):
    """List the keys of an experiment file: default, what each takes, and what it means.

    [dim]polyfed config local-steps
    polyfed config --toml > experiment.toml[/dim]
    """

    key: str | None = argument("A key, or a table such as data.", None)
    as_toml: bool = option("Print an experiment file with every default, for polyfed run.", False, None, "--toml")


class DataList(Command, group="data"):
    """List the data sets that polyfed knows by name.

    [dim]polyfed data list[/dim]
    """


class DataInspect(
    Experiment,
    group="data",
    takes=("target", "site", "query", "split", "test_file", "standardise", "drop", "weights", "encoding", "partition",
           "clients", "data_dir", "seed", "set"),
):  # fmt: skip
    """Show the clients of a partition: samples, classes, and caveats about the data; of CSV files every column first.

    [dim]polyfed data inspect digits --partition dirichlet:0.3 --clients 8 --out digits.svg[/dim]
    """

    name: str = argument(
        "A data set, a folder of CSV or npz files, or an experiment file (.toml).",
        key="data.name",
        autocompletion=complete.data,
    )
    out: Path | None = option(
        "Picture of the partition; of CSV files also of every column at every site, as FILE-columns.",
        None,
        "FILE.svg|.png|.pdf",
    )
