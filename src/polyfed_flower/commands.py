"""The commands that this package adds to polyfed; what they do is in command.py."""

from pathlib import Path
from typing import Literal

from polyfed.cli.options import Command, argument, option

GROUPS = {"flower": "Run experiments on Flower: its simulation, or a SuperLink and SuperNodes."}


class FlowerNew(Command, group="flower", module="command"):
    """Write a Flower app that runs an experiment, in Flower's simulation or on your SuperLink and SuperNodes.

    [dim]polyfed flower new experiment.toml app
    flwr run app --stream[/dim]
    """

    experiment: Path = argument("Experiment file (TOML) with one method.", ..., "FILE.toml")
    folder: Path = argument("The app's folder.", ..., "APP")


class FlowerSite(Command, group="flower", module="command"):
    """Be a SuperNode's site: a process of your own, which alone reads the rows and asks you before anything leaves.

    The SuperNode runs as another user, with --node-config 'site="SOCKET"'.

    [dim]polyfed flower site /run/polyfed/bern.sock --name bern --data bern.csv --vault vault[/dim]
    """

    socket: Path = argument("Socket to listen at, in a folder that the SuperNode's user may enter.", ..., "SOCKET")
    data: Path = option("The site's own file, CSV or npz, or its folder of images, LABEL/IMAGE.", ..., "FILE")
    vault: Path = option("Folder for what the site keeps, a folder in it for each run.", ..., "DIR")
    name: str | None = option("The site's name. Default: that of its file.", None, "NAME")
    backbone: Path | None = option("Pretrained weights of the experiment's model here.", None, "PATH")
    allow: list[str] | None = option(
        "Let leave the site what is made of samples, as polyfed client has it.", None, "A,B"
    )
    metrics: Literal["none", "aggregate", "own"] = option("What the server writes down of how good models are.", "own")
    policy: Path | None = option("What this site answers at most. Default: careful settings of ours.", None, "FILE")
    yes: str | None = option(
        "Agree to these terms and no others; policy: to all that it allows.", None, "DIGEST|policy"
    )
