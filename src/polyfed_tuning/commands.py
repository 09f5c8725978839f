"""The command that this package adds to polyfed; what it does is in command.py."""

from polyfed.cli.options import DATA, Experiment, argument, every, of, option
from polyfed_tuning.search import Search

TUNING = "Tuning"


class Tune(
    Experiment, takes=every("seeds", "engine", "workers", "track"),
    module="command",
    idle={"resume": "without --out", "force": "without --out | with --resume"},
):  # fmt: skip
    """Choose lam, or another numeric setting, on validation data, then train the chosen model further.

    --rounds is the maximum per value (default: 1000). After the first rounds it says how long the rest takes. The same
    command with the same --out continues an interrupted search.

    [dim]polyfed tune --data fpfc-s1 --scale small --batch-size full --local-steps 10 --fraction 0.3[/dim]
    [dim]polyfed tune fedacs --setting quantile --grid 0.5,0.67,0.75 --data fpfc-s1 --scale small[/dim]
    """

    method: str = argument("A method, with settings where wanted: fpfc:nu=0.5", "fpfc")
    setting: str | None = of(Search, "setting", TUNING, "NAME")
    regime: str | None = of(Search, "regime", TUNING)
    grid: str | None = of(Search, "grid", TUNING)
    cold_grid: str | None = option("Values for the cold start, where they differ.", panel=TUNING)
    check_every: str | None = of(Search, "check_every", TUNING, "N")
    tolerance: str | None = of(Search, "tolerance", TUNING, "X")
    patience: str | None = of(Search, "patience", TUNING, "N")
    whole: bool = option("Continue a warm path after validation has dropped.", False, panel=TUNING)
    extend: str | None = of(Search, "extend", TUNING, "N")
    train_on: str | None = of(Search, "train_on", TUNING, "N")
    window: bool = option(
        "First print the range of lam compatible with the cluster labels in the data.", False, panel=TUNING
    )
    scale: str | None = option("Scale of a synthetic data set: small or full.", panel=DATA)
    resume: bool = option("Optional: the same command with the same --out continues anyway.", False, hidden=True)
