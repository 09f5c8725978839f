"""The command that this package adds to polyfed; what it does is in command.py."""

from pathlib import Path
from typing import Literal

from polyfed.cli.options import Experiment, argument, option

TAKES = ("data_dir", "site", "query", "drop", "encoding", "partition", "clients", "seed", "set")


class Regress(Experiment, takes=TAKES, module="command"):
    """Fit a regression over all sites by federated Newton: coefficients, intervals, heterogeneity, meta-analysis.

    Sites send sums, gradients and information matrices, and no row of data. The result is that of pooled data.

    [dim]polyfed regress hospitals/ --model cox --time days --event died
    polyfed regress hospitals/ --target died --missing complete --per age=10 --spline bmi=4 --cluster patient[/dim]
    """

    data: str = argument(
        "A folder of the sites' tables or npz files, one table or a database's URL with --site, an experiment file "
        "(.toml), a data set, or the folder of a run."
    )
    model: str | None = option("logistic (default), poisson, linear or cox (stratified by site).")
    target: str | None = option("Target column of CSV files; else the last.", None, "COLUMN")
    exposure: str | None = option("Column of exposures, for poisson.", None, "COLUMN")
    time: str | None = option("Column of times, for cox.", None, "COLUMN")
    event: str | None = option("Column of events (1: died), for cox.", None, "COLUMN")
    columns: str | None = option("Columns to use; else all others.", None, "A,B,...")
    intercepts: str | None = option("site: one per site (default); common: one for all. Either is tested.", None)
    missing: Literal["refuse", "complete"] = option(
        "Rows with gaps: refuse them, or complete: leave them out.", "refuse"
    )
    per: list[str] | None = option(
        "Unit of a coefficient: age=10, or age=sd for a standard deviation; repeatable.", None, "COLUMN=UNIT"
    )
    spline: list[str] | None = option(
        "Let a column enter as a restricted cubic spline, with 3 to 7 knots (age=4) or with these (age=40,55,70); "
        "repeatable.",
        None,
        "COLUMN=KNOTS",
    )
    errors: str | None = option("Standard errors: model, or robust (sandwich).", None)
    cluster: str | None = option("Column of what rows belong to, such as patients, for robust errors.", None, "COLUMN")
    ties: str | None = option("efron (default) or breslow, for cox.")
    level: float = option("Of the confidence intervals.", 0.95)
    sums: str = option("secure: read sums over all sites alone, and no site's gradient, matrix or counts.", "plain")
    out: Path | None = option("Write the table there, or as a page in HTML.", None, "FILE.csv|.html|.md|.tex")
