"""polyfed data: the catalogue of data sets, and a federation as a table and a picture."""

from pathlib import Path

import numpy as np
from rich.table import Table as Grid
from rich.text import Text

from polyfed import report
from polyfed.base.errors import ConfigError, Fault, Faults
from polyfed.base.part import CHECK
from polyfed.base.plugins import sibling
from polyfed.cli.commands import DataInspect, DataList
from polyfed.cli.describe import package
from polyfed.cli.given import collect
from polyfed.cli.screen import grid, say, stdout
from polyfed.data import about
from polyfed.data.datasets import LOADERS, tables_at
from polyfed.data.federation import Federation
from polyfed.data.readers import is_url
from polyfed.data.tables import Table, sheets_of, surveyed
from polyfed.runs.build import Parts
from polyfed.runs.config import Experiment, resolve
from polyfed.runs.numbers import described
from polyfed.runs.ownership import spare

ROWS, COLUMNS, MANY, SITES = 40, 12, 200, 8  # clients, classes, columns and sites of columns shown in the terminal
SHADES = " ░▒▓█"


def data_list(_: DataList) -> None:
    table = grid("name", "what it is", tight=("name",))
    refused = LOADERS.gather()
    for name in sorted(LOADERS):
        description = Text.assemble(about(name).partition("\n")[0], package(LOADERS.origin(name)))
        table.add_row(Text(name, "cyan"), description)
    note = Text("\nAny folder of CSV or npz files, one per client, is a data set too.", "dim")
    stdout.print(table, *(Text(f"\n{line}", "red") for line in refused), note, sep="\n")


def data_inspect(o: DataInspect) -> None:
    typed, out = collect(o), o.out
    file = Path(o.name) if o.name.endswith(".toml") else None
    if file is not None:
        del typed["data"]["name"]
    experiment = resolve(file, typed)
    if out is not None and out.suffix.lower() not in (".svg", ".png", ".pdf"):
        raise ConfigError(f"--out: found {str(out)!r}, expected a name ending in .svg, .png or .pdf")
    if out is not None:
        spare(out, Path(experiment.data.name))
    parts = Parts(experiment)
    table, faults = tables_of(experiment)
    if table is not None:
        stdout.print(columns_of(table), "", *([sites_of(table), ""] if 1 < len(table.sheets) <= SITES else []))
        for flag in table.audit.flags:
            stdout.print(Text(f"! {flag}", "red"), soft_wrap=True)
    if faults:
        raise Faults(experiment.data.name, faults)
    fed = parts.federation(experiment.seeds[0])
    say(_headline(fed))
    stdout.print(table_of(fed))
    shown = [f"{CHECK}{flag}" for flag in table.audit.flags] if table else []
    for note in (_more(fed), *(f"- {note}" for note in fed.notes if note not in shown)):
        stdout.print(Text(note, "red" if CHECK in note else "dim"), soft_wrap=True)
    if out is not None:
        figure = report.partition_figure(report.Study([described(fed.describe())]))
        assert figure is not None
        say(f"picture: {report.save(figure, out)}")
    if out is not None and table is not None:
        draw = sibling("polyfed_audit.figures", "the picture of columns").distribution_figure
        if (drawn := draw(table.audit.parts, table.audit.flagged)) is not None:
            say(f"picture: {report.save(drawn, out.with_stem(f'{out.stem}-columns'))}")


def tables_of(experiment: Experiment) -> tuple[Table | None, list[Fault]]:
    """The CSV files of an experiment on a folder of them, and all that stands in the way of using them."""
    place = experiment.data.name
    if LOADERS.knows(place) or not (is_url(place) or Path(place).exists()):
        return None, []
    if (found := tables_at(place, experiment.columns)) is None:
        return None, []
    sheets, faults = sheets_of(*found)
    return surveyed(sheets, found[1], faults)


def columns_of(table: Table) -> Grid:
    """One row per column: what it holds over all files, and what becomes of it."""
    shown = grid("column", "type", "values", tight=("column", "type"))
    shown.add_column("gaps", justify="right", no_wrap=True)
    shown.add_column("becomes")
    for c in list(table.survey.values())[:MANY]:
        gaps, becomes = f"{c.gaps / c.cells:.0%}" if c.gaps else "", table.becomes(c)
        style = "red" if becomes.startswith("refused") else "dim" if becomes.startswith("left out") else ""
        shown.add_row(Text(c.name, "cyan"), c.kind, Text(c.shown), gaps, Text(becomes, style))
    if len(table.survey) > MANY:
        shown.add_row(f"... and {len(table.survey) - MANY} more", "", "", "", "")
    return shown


def sites_of(table: Table) -> Grid:
    """One row per column: median and quartiles, or the commonest values, of every site; gaps in per cent."""
    shown = grid("column", *(sheet.name for sheet in table.sheets), tight=("column",))
    for name, at in list(table.audit.parts.items())[:MANY]:
        cells = [at.get(s.name) for s in table.sheets]
        gaps = [f", {p.gaps / p.rows:.0%} gaps" if p is not None and p.gaps else "" for p in cells]
        row = ["" if p is None else f"{p.shown or f'{p.distinct} texts'}{g}" for p, g in zip(cells, gaps, strict=True)]
        shown.add_row(Text(name, "cyan"), *map(Text, row))
    shown.add_row(Text("rows", "dim"), *(Text(str(len(s.lines)), "dim") for s in table.sheets))
    return shown


def _headline(fed: Federation) -> str:
    m = fed.meta
    kind = "regression" if fed.classes is None else f"{fed.classes} classes"
    shape = " × ".join(map(str, fed.input_shape))
    parts = (f"{m['dataset']}: {fed.n} clients", f"partition {m['partition']}", f"seed {m['seed']}")
    return ", ".join((*parts, f"test {m['test']}", f"inputs {shape}", kind))


def table_of(fed: Federation) -> Grid:
    """One row per client: samples per split, cluster, and its classes as counts (few) or shades (many)."""
    frame = fed.summary()
    names = [str(c) for c in frame.columns]
    classes = [c for c in names if c.startswith("class_")]
    few = len(classes) <= COLUMNS
    labels = (fed.meta.get("preparation") or {}).get("labels") or [c.removeprefix("class_") for c in classes]
    plain = [c for c in names if c not in classes and (c != "validation" or fed.validation is not None)]
    table = grid()
    for c in plain:
        table.add_column(c, justify="left" if c == "client" else "right")
    for label in labels if few else []:
        table.add_column(label, justify="right", min_width=3)
    if classes and not few:
        table.add_column("training samples per class, darkest: most", no_wrap=True)
    for row in frame.head(ROWS).to_dict("records"):
        shown = [Text(str(row[c])) for c in (*plain, *(classes if few else []))]
        if classes and not few:
            shown.append(_shades(np.array([row[c] for c in classes], dtype=float)))
        table.add_row(*shown)
    return table


def _shades(counts: np.ndarray) -> Text:
    level = np.ceil(counts / max(counts.max(), 1) * (len(SHADES) - 1)).astype(int)
    return Text("".join(SHADES[k] for k in level))


def _more(fed: Federation) -> str:
    frame = fed.summary()
    left = f"... and {fed.n - ROWS} more clients; " if fed.n > ROWS else ""
    t = frame["train"]
    return f"{left}training samples per client: {t.min()} to {t.max()}, median {t.median():.0f}, {t.sum():,} in all"
