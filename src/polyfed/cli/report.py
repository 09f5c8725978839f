"""polyfed report: rebuild the page of one or more runs, or print its table."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from typer import Argument, Option


class Form(StrEnum):
    """What is printed."""

    text = "text"
    markdown = "markdown"
    latex = "latex"
    csv = "csv"


def report(
    runs: Annotated[list[Path], Argument(help="Run or comparison folders.", show_default=False)],
    out: Annotated[Path | None, Option(help="File to write. Default: report.html in the first folder.")] = None,
    table: Annotated[Form, Option(help="How the tables are printed.")] = Form.text,
) -> int:
    """Write report.html from run folders and print the tables.

    [dim]polyfed report runs/a runs/b --out both.html
    polyfed report runs/a --table latex > table.tex[/dim]
    """
    from polyfed.cli.console import results, stdout
    from polyfed.report import client_table, compare_table, read, write_report

    page = write_report(runs, out)
    study = read(runs)
    if table is Form.text:
        results(study, page)
        return 0
    stdout.file.write(f"{compare_table(study, table.value)}\n{client_table(study, table.value, every=True)}")
    return 0
