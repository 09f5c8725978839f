"""polyfed regress: one regression over the rows of all sites, with intervals, as if they had been pooled."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

if TYPE_CHECKING:
    from polyfed.data.federation import Federation


def regress(
    data: Annotated[
        str, Argument(help="A folder of CSV or npz files, a data set, or the folder of a run.", show_default=False)
    ],
    model: Annotated[str, Option(help="logistic, poisson, linear or cox (stratified by site).")] = "logistic",
    target: Annotated[str | None, Option(help="Target column of CSV files; else the last.", metavar="COLUMN")] = None,
    exposure: Annotated[str | None, Option(help="Column of exposures, for poisson.", metavar="COLUMN")] = None,
    time: Annotated[str | None, Option(help="Column of times, for cox.", metavar="COLUMN")] = None,
    event: Annotated[str | None, Option(help="Column of events (1: died), for cox.", metavar="COLUMN")] = None,
    columns: Annotated[str | None, Option(help="Columns to use; else all others.", metavar="A,B,...")] = None,
    ties: Annotated[str, Option(help="efron or breslow, for cox.")] = "efron",
    level: Annotated[float, Option(help="Of the confidence intervals.")] = 0.95,
    out: Annotated[
        Path | None, Option(help="Write the table there, or as a page in HTML.", metavar="FILE.csv|.html|.md|.tex")
    ] = None,
) -> int:
    """Fit a regression over all sites by federated Newton: coefficients, intervals, heterogeneity, meta-analysis.

    Sites send sums, gradients and information matrices, and no row of data. The result is that of pooled data.

    [dim]polyfed regress hospitals/ --model cox --time days --event died[/dim]
    """
    from polyfed import clinical
    from polyfed.cli.console import show_table, stdout
    from polyfed.core.errors import ConfigError, RunError

    forms = {".csv": "csv", ".html": "html", ".md": "markdown", ".tex": "latex"}
    if out is not None and out.suffix not in forms:
        raise ConfigError(f"--out: found {str(out)!r}, expected a name ending in {', '.join(forms)}")
    given = {"target": target, "exposure": exposure, "time": time, "event": event}
    takes = {"poisson": ("target", "exposure"), "cox": ("time", "event")}.get(model, ("target",))
    wrong = [name for name, value in given.items() if value is not None and name not in takes]
    if wrong:
        raise ConfigError(f"--{wrong[0]}: {model} takes {', '.join(takes)}")
    chosen = [c.strip() for c in columns.split(",")] if columns else None
    if Path(data).is_dir() and any(Path(data).glob("*.csv")) and not (Path(data) / "config.toml").exists():
        names, sites = tables(Path(data), model, given, chosen)
        found = clinical.fit(sites, model, ties=ties, names=names, level=level)
    elif chosen or any(given.values()):
        raise ConfigError(
            f"--{wrong[0] if wrong else 'columns' if chosen else takes[0]}: of CSV files; {data} has none"
        )
    else:
        found = clinical.fit(federation(data), model, ties=ties, level=level)
    table = found.table()
    show_table(table)
    if out is not None and out.suffix == ".html":
        from polyfed.clinical.page import write_page

        stdout.print(f"report: {write_page(found, out)}", soft_wrap=True, markup=False)
    elif out is not None:
        try:
            out.write_text(str(table.to(forms[out.suffix])), encoding="utf-8")
        except OSError as e:
            raise RunError(f"cannot write {out}: {(e.strerror or str(e)).lower()}") from None
        stdout.print(f"table: {out}", soft_wrap=True, markup=False)
    return 0


def federation(data: str) -> "Federation":
    """All patients of a data set, in its own units where it can; or the training samples of a run, as scaled there."""
    from polyfed.data import load
    from polyfed.data.datasets import LOADERS, options
    from polyfed.experiment.run import Run

    if (Path(data) / "config.toml").exists():
        return Run.open(data).federation
    raw = {"standardise": None} if data in LOADERS and "standardise" in options(data) else {}
    return load(data, **raw).partition(test_fraction=0.0)


def tables(
    folder: Path, model: str, given: dict[str, str | None], columns: list[str] | None
) -> tuple[list[str], list[tuple[Any, ...]]]:
    """The sites' names and (x, target, ...) of a folder with a CSV file per site, columns taken by their names."""
    import pandas as pd

    from polyfed.core.errors import ConfigError, DataError, closest
    from polyfed.data import readers

    names, sites = [], []
    for path in readers.client_files(folder):
        if path.suffix.lower() != ".csv":
            raise DataError(f"{path}: expected a CSV file, as the others are")
        header, values, _ = readers.read_csv(path)
        wanted = (
            [given["time"], given["event"]] if model == "cox" else [given["target"] or header[-1], given["exposure"]]
        )
        if model == "cox" and None in wanted:
            raise ConfigError(f"--{'event' if wanted[0] else 'time'}: missing; cox needs --time and --event")
        of_target = [name for name in wanted if name is not None]
        columns = columns or [c for c in header if c not in of_target]
        for name in (*columns, *of_target):
            if name not in header:
                raise DataError(f"{path}: no column {name!r}{closest(name, header)}; it has {', '.join(header)}")
        table = pd.DataFrame(values, columns=header)
        names.append(path.stem)
        sites.append((table[columns], *(table[name] for name in of_target)))
    return names, sites
