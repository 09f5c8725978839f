"""The command that this package adds to polyfed; what it does is in command.py."""

from pathlib import Path

from polyfed.cli.options import Experiment, argument, option


class DataRepair(Experiment, group="data", module="command", takes=("target", "drop", "set")):
    """Propose repairs of a folder of CSV files, as an experiment file to read, correct and run.

    Each is a line with what was found above it. The sites' files stay as they are, and nothing is repaired before you
    use the file.

    [dim]polyfed data repair hospitals --target died --out hospitals.toml[/dim]
    """

    name: str = argument("A folder of CSV files.", key="data.name")
    out: Path | None = option("File to write. Default: <folder>.toml here.", None, "FILE.toml")
