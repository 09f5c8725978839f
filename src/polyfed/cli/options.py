"""The options that `run` and `compare` share: each is a key of the experiment file under a name of its own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from polyfed.cli import portable

DATA, TRAIN, WHERE = "Data and model", "Training", "Results and machine"

Data = Annotated[
    str | None, Option(help="Data set (see polyfed data list), or a folder of files.", rich_help_panel=DATA)
]
DataDir = Annotated[str | None, Option(help="Folder that holds downloaded data.", metavar="DIR", rich_help_panel=DATA)]
Partition = Annotated[
    str | None, Option(help="How samples are dealt out: iid, dirichlet:0.5, natural, ...", rich_help_panel=DATA)
]
Clients = Annotated[str | None, Option(help="Number of clients.", metavar="N", rich_help_panel=DATA)]
Model = Annotated[str | None, Option(help="linear, mlp, cnn, lenet or resnet18.", rich_help_panel=DATA)]
Rounds = Annotated[str | None, Option(help="Communication rounds.", metavar="N", rich_help_panel=TRAIN)]
Fraction = Annotated[str | None, Option(help="Share of clients per round.", metavar="X", rich_help_panel=TRAIN)]
Epochs = Annotated[str | None, Option(help="Local passes per round.", metavar="N", rich_help_panel=TRAIN)]
Steps = Annotated[
    str | None,
    Option(help="Local steps per round instead: 5, ceil(k/20), uniform(1, 10).", metavar="N", rich_help_panel=TRAIN),
]
Batch = Annotated[str | None, Option(help="Samples per step, or full.", metavar="N", rich_help_panel=TRAIN)]
Lr = Annotated[str | None, Option(help="Step size of every method.", metavar="X", rich_help_panel=TRAIN)]
Metrics = Annotated[
    str | None,
    Option(
        help="What models are judged by, the first leads: auc,brier; else accuracy, or rmse for numbers.",
        metavar="NAMES",
        rich_help_panel=TRAIN,
    ),
]
Seed = Annotated[str | None, Option(help="First seed.", metavar="N", rich_help_panel=TRAIN)]
Seeds = Annotated[str | None, Option(help="How many seeds, or which: 5 or 0,3,7.", rich_help_panel=TRAIN)]
Device = Annotated[str | None, Option(help="auto, cpu or cuda.", rich_help_panel=WHERE)]
Dtype = Annotated[str | None, Option(help="float32 or float64.", rich_help_panel=WHERE)]
Set = Annotated[
    list[str] | None,
    Option("--set", help="Any key of the experiment file, such as algorithm.lr=0.05.", metavar="KEY=VALUE"),
]
Out = Annotated[Path | None, Option(help="Folder for the results; else runs/<time>-<name>.", rich_help_panel=WHERE)]
Force = Annotated[bool, Option("--force", help="Replace the results in --out.", rich_help_panel=WHERE)]
Portable = Annotated[
    bool,
    Option("--portable", help="The same bits on every x86 processor with AVX2; slower.", rich_help_panel=WHERE),
]
Quiet = Annotated[bool, Option("--quiet", "-q", help="No progress.", rich_help_panel=WHERE)]

KEYS = {
    "data": "data.name",
    "data_dir": "data.dir",
    "partition": "data.partition",
    "clients": "data.clients",
    "model": "model.name",
    "rounds": "rounds",
    "fraction": "fraction",
    "local_epochs": "local-epochs",
    "local_steps": "local-steps",
    "batch_size": "batch-size",
    "lr": "algorithm.lr",
    "metrics": "metrics",
    "seed": "seed",
    "seeds": "seeds",
    "device": "device",
    "dtype": "dtype",
    "portable": "portable",
}
TEXT = (
    "data",
    "data_dir",
    "partition",
    "model",
    "metrics",
    "device",
    "dtype",
)  # never numbers, whatever they look like


def collect(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings among a command's arguments, nested as in an experiment file; --set beats a named option."""
    if given.get("portable"):
        portable.pin()  # before torch is imported
    from polyfed.core.settings import value_of
    from polyfed.experiment.config import assign

    table: dict[str, Any] = {}
    for name, key in KEYS.items():
        value = given.get(name)
        if value is None or value is False:
            continue
        *parents, last = key.split(".")
        into = table
        for parent in parents:
            into = into.setdefault(parent, {})
        into[last] = (
            value
            if name in TEXT or value is True
            else value_of(f"[{value}]" if name == "seeds" and "," in value else value)
        )
    for text in given.get("set") or ():
        assign(table, text)
    return table
