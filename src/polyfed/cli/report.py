"""polyfed report: rebuild the page of one or more runs, or write one table."""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

if TYPE_CHECKING:
    from polyfed.report import Study, Table


class Form(StrEnum):
    """How a table is written."""

    text = "text"
    markdown = "markdown"
    latex = "latex"
    csv = "csv"


class Which(StrEnum):
    """The tables of a report."""

    methods = "methods"
    clients = "clients"
    gains = "gains"
    costs = "costs"
    results = "results"


def report(
    runs: Annotated[list[Path], Argument(help="Run or comparison folders, or one of coalitions.", show_default=False)],
    out: Annotated[Path | None, Option(help="File to write. Default: report.html in the first folder.")] = None,
    figures: Annotated[
        bool, Option("--figures", help="Write the figures as SVG, PDF and PNG beside the page.")
    ] = False,
    table: Annotated[Form | None, Option(help="Print one table in this form; without --out, write no page.")] = None,
    of: Annotated[Which, Option(help="The table that --table prints.")] = Which.methods,
    paper: Annotated[bool, Option("--paper", help="Print one table over several data sets, in LaTeX.")] = False,
) -> int:
    """Write report.html from run folders, or print one table; of coalitions, write all files but the runs again.

    [dim]polyfed report runs/a runs/b --out both.html --figures
    polyfed report runs/a --table csv --of clients > clients.csv
    polyfed report runs/fashion runs/cifar --paper > table.tex[/dim]
    """
    from polyfed.cli.console import results, show_table, stdout
    from polyfed.report import read, write_report
    from polyfed.runs.ownership import spare

    if out is not None and not out.is_dir():
        spare(out, *runs)
    if games := [path for path in runs if (path / "coalitions.toml").exists()]:
        return _coalitions(runs, games[0], out is None and not figures and table is None and not paper)
    form = Form.latex if paper and table is None else table
    if form is None or (out is not None and not paper):
        page = write_report(runs, out, figures=figures)
        if form is None:
            results(read(runs), page)
            return 0
    made = _paper(runs) if paper else _table(read(runs), of, form)
    if isinstance(made, str):
        stdout.file.write(made)
    elif form is Form.text:
        show_table(made)
    else:
        stdout.file.write(str(made.to(form.value)))
    return 0


def _coalitions(runs: Sequence[Path], folder: Path, plain: bool) -> int:
    """Rebuild what a folder of coalitions holds beside its runs."""
    from polyfed.base.errors import ConfigError
    from polyfed.cli.coalitions import say
    from polyfed.games.result import Coalitions

    if len(runs) > 1 or not plain:
        raise ConfigError(f"{folder}: holds coalitions; report takes such a folder alone and without options")
    found = Coalitions.open(folder)
    say(found, found.save())
    return 0


def _table(study: "Study", of: Which, form: Form) -> "Table | str":
    """The table that was asked for; the results as CSV text."""
    from polyfed import report
    from polyfed.base.errors import ConfigError, RunError

    if of is Which.results:
        if form is not Form.csv:
            raise ConfigError(f"--of results: found --table {form.value}, expected --table csv")
        return report.results(study).to_csv(index=False)
    if of is Which.gains:
        gains = report.gain_table(study)
        if gains is None:
            raise RunError("--of gains: there is nothing to compare; expected runs of several methods")
        return gains
    if of is Which.clients:
        return report.client_table(study, every=True)
    return report.compare_table(study) if of is Which.methods else report.cost_table(study)


def _paper(runs: Sequence[Path]) -> "Table":
    """Runs on the same data belong together, whatever folder they are in."""
    from polyfed.report import paper_table, read

    groups: dict[tuple[str, ...], list[Path]] = {}
    for path in runs:
        first = read(path)
        about = (first.first.about.dataset, first.first.about.partition, first.metric.name)
        groups.setdefault(tuple(map(str, about)), []).append(path)
    return paper_table([read(paths) for paths in groups.values()])
