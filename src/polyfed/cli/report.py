"""polyfed report: rebuild the page of one or more runs, or write one table."""

from collections.abc import Sequence
from pathlib import Path

from polyfed import report as make
from polyfed.base.errors import ConfigError, RunError
from polyfed.base.plugins import sibling
from polyfed.cli.commands import Report
from polyfed.cli.console import results, show_table, stdout
from polyfed.cli.folders import kind
from polyfed.cli.screen import say
from polyfed.report import Study, Table, read
from polyfed.report.beside import write_beside
from polyfed.report.summary import headline
from polyfed.runs.ownership import spare


def report(o: Report) -> None:
    runs, out = o.runs, o.out
    if out is not None and not out.is_dir():
        spare(out, *runs)
    for path, of in ((path, kind(path)) for path in runs):
        if of is not None:
            if len(runs) > 1 or out is not None or o.figures or o.table is not None or o.paper:
                raise ConfigError(f"{path}: is no run; report takes such a folder alone and without options")
            of.rebuilt(path)
            return
    if len(runs) > 1 and not (o.paper or o.table) and not any((path / "config.toml").exists() for path in runs):
        if o.figures:
            raise ConfigError("--figures: of one report; side by side there are the first charts alone")
        studies, page = write_beside(runs, out)
        for path, study in zip(runs, studies, strict=True):
            stdout.print(f"{path}: {headline(study)}\n", markup=False)
        say(f"report: {page}")
        return
    form = "latex" if o.paper and o.table is None else o.table
    if form is None or (out is not None and not o.paper):
        page = make.write_report(study := read(runs), out, figures=o.figures)
        if form is None:
            results(study, page)
            return
    made = _paper(runs) if o.paper else _table(read(runs), o.of, form)
    if isinstance(made, str):
        stdout.file.write(made)
    elif form == "text":
        show_table(made)
    else:
        stdout.file.write(str(made.to(form)))


def _table(study: Study, of: str, form: str) -> Table | str:
    """The table that was asked for; the results as CSV text."""
    if of == "results":
        if form != "csv":
            raise ConfigError(f"--of results: found --table {form}, expected --table csv")
        return make.results(study).to_csv(index=False, lineterminator="\n")
    if of == "gains":
        gains = make.gain_table(study)
        if gains is None:
            raise RunError("--of gains: there is nothing to compare; expected runs of several methods")
        return gains
    if of == "clients":
        return make.client_table(study, every=True)
    return make.compare_table(study) if of == "methods" else make.cost_table(study)


def _paper(runs: Sequence[Path]) -> Table:
    """Runs on the same data belong together, whatever folder they are in."""
    groups: dict[tuple[str, ...], list[Path]] = {}
    for path in runs:
        first = read(path)
        about = (first.first.about.dataset, first.first.about.partition, first.metric.name)
        groups.setdefault(tuple(map(str, about)), []).append(path)
    return sibling("polyfed_papers.several", "--paper:").paper_table([read(paths) for paths in groups.values()])
