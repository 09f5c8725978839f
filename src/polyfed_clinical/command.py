"""polyfed regress: one regression over the rows of all sites, with intervals, as if they had been pooled."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from polyfed.base.columns import STRATIFIED
from polyfed.base.errors import ConfigError, DataError, Faults, closest
from polyfed.cli.console import show_table
from polyfed.cli.given import collect
from polyfed.cli.late import late
from polyfed.cli.screen import say
from polyfed.data import load
from polyfed.data.csv_files import Sheet, survey
from polyfed.data.datasets import LOADERS, options, tables_at
from polyfed.data.federation import Federation
from polyfed.data.readers import is_url
from polyfed.data.tables import ROWS, Table, sheets_of
from polyfed.face import Run
from polyfed.runs.config import Where, merge, read_table, read_toml, table_of
from polyfed.runs.ownership import put_out, spare
from polyfed.runs.training import Columns
from polyfed_clinical.commands import Regress
from polyfed_clinical.regression import fit
from polyfed_clinical.summary import ClinicalFit

TAKES = {"poisson": ("target", "exposure"), "cox": ("time", "event")}
# settings of [columns] that a regression has, and those of them that change what cells are
DESCRIBED = (
    "drop", "numbers", "categories", "gaps", "labels", "encoding", "site", "limits", "missing-target", "by", "query",
)  # fmt: skip
READING = ("encoding", "site", "limits", "missing-target", "gaps", "by", "query")


def regress(o: Regress) -> None:
    out = o.out
    forms = {".csv": "csv", ".html": "html", ".md": "markdown", ".tex": "latex"}
    if out is not None and out.suffix not in forms:
        raise ConfigError(f"--out: found {str(out)!r}, expected a name ending in {', '.join(forms)}")
    result = _fitted(o)
    table = result.table()
    show_table(table)
    if out is not None and out.suffix == ".html":
        written = late("polyfed_clinical.page", "write_page")(result, out)
        say(f"report: {written}")
    elif out is not None:
        put_out(out, str(table.to(forms[out.suffix])).encode())
        say(f"table: {out}")


def _fitted(o: Regress) -> ClinicalFit:
    """The regression that the options ask for, of tables or of a named data set."""
    data, typed = o.data, collect(o)
    given = {"target": o.target, "exposure": o.exposure, "time": o.time, "event": o.event}
    if data.endswith(".toml"):
        data, typed, given = _of_file(Path(data), typed, given)
    if o.out is not None:
        spare(o.out, Path(o.data), Path(data))
    model = o.model or ("cox" if o.data.endswith(".toml") and given["time"] is not None else "logistic")
    takes = TAKES.get(model, ("target",))
    wrong = [name for name, value in given.items() if value is not None and name not in takes]
    if o.ties is not None and model != "cox":
        raise ConfigError(f"--ties: has no effect on {model}")
    if wrong:
        raise ConfigError(f"--{wrong[0]}: {model} takes {', '.join(takes)}")
    chosen = [c.strip() for c in o.columns.split(",")] if o.columns else None
    how: dict[str, Any] = {
        "ties": o.ties or "efron", "level": o.level,
        "intercepts": _one_of("intercepts", o.intercepts, ("site", "common")),
        "errors": _one_of("errors", o.errors, ("model", "robust")), "per": _named("per", o.per, _unit),
        "splines": _named("spline", o.spline, _knots), "sums": _one_of("sums", o.sums, ("plain", "secure")),
    }  # fmt: skip
    missing = o.missing
    dealt = typed.pop("data", {}) | {k: typed.pop(k) for k in ("seed",) if k in typed}
    run = (Path(data) / "config.toml").exists()
    own = not LOADERS.knows(data) and not run and (is_url(data) or Path(data).exists())
    if own and (found := tables_at(data, Columns())) is not None:
        if dealt:
            raise ConfigError(f"--{next(iter(dealt))}: of named data sets; {data} has the sites' tables")
        taken = tables(found[0], model, given, chosen, typed, missing == "complete", o.cluster)
        result = replace(fit(taken.sites, model, names=taken.names, clusters=taken.clusters, **how), about=taken.about)
        if taken.left is None:
            return result
        sites = result.sites if result.sums == "secure" else result.sites.assign(left_out=taken.left)
        return replace(result, sites=sites, totals={**result.totals, "left_out": sum(taken.left)})
    if chosen or o.cluster or typed or any(given.values()):
        options = {"columns": chosen, "cluster": o.cluster, "drop": o.drop, "encoding": o.encoding, "set": typed}
        which = next((name for name, value in options.items() if value), takes[0])
        raise ConfigError(f"--{which}: of tables; {data} has none")
    return fit(federation(data, dealt), model, missing=missing, **how)


def _of_file(
    file: Path, typed: Mapping[str, Any], given: Mapping[str, str | None]
) -> tuple[str, dict[str, Any], dict[str, str | None]]:
    """(data, settings, outcome) of an experiment file, below what is typed: how its rows are read, and no training."""
    table = read_toml(file)
    where = Where(file, table, {})
    read_table(Columns, columns := table_of(table.get("columns", {}), "columns", where), where)
    named = table_of(table.get("data", {}), "data", where)
    if not isinstance(named.get("name"), str):
        raise ConfigError(f"{file}: data.name: missing; regress needs the folder of the sites' files")
    apart = [columns[key] for key in ("group", "weights", "split") if columns.get(key, STRATIFIED) != STRATIFIED]
    outcome = {key: columns.get(key) for key in ("target", "time", "event")} if not any(given.values()) else {}
    both = merge({key: value for key, value in columns.items() if key in DESCRIBED}, typed.get("columns", {}))
    both["drop"] = [*both.get("drop", []), *apart]
    dealt = {key: named[key] for key in ("dir", "partition", "clients") if key in named} | typed.get("data", {})
    tables = {"columns": both} | ({"data": dealt} if dealt else {})
    return named["name"], {**typed, **tables}, {**given, **outcome}


def _one_of(option: str, value: str | None, choices: Sequence[str]) -> str | None:
    if value is not None and value not in choices:
        raise ConfigError(f"--{option}: found {value!r}{closest(value, choices)}, expected {' or '.join(choices)}")
    return value


def _named(option: str, given: Sequence[str] | None, read: Callable[[str], Any]) -> dict[str, Any]:
    """{column: value} of a repeatable COLUMN=VALUE; a column's name may hold a =."""
    values = dict[str, Any]()
    for text in given or ():
        column, equals, value = text.rpartition("=")
        try:
            values[column] = read(value)
        except ValueError:
            equals = ""
        if not (equals and column):
            raise ConfigError(f"--{option}: found {text!r}, expected COLUMN={'10 or =sd' if option == 'per' else '4'}")
    return values


def _unit(text: str) -> float | str:
    return text if text == "sd" else float(text)


def _knots(text: str) -> int | list[float]:
    return [float(part) for part in text.split(",")] if "," in text else int(text)


def federation(data: str, dealt: Mapping[str, Any]) -> Federation:
    """All patients of a data set, `dealt` as asked, in its own units if possible; or a run's training samples."""
    if (Path(data) / "config.toml").exists():
        if dealt:
            raise ConfigError(f"--{next(iter(dealt))}: of data sets; the sites of {data} are those of the run")
        return Run.open(data).federation
    raw: dict[str, Any] = {"standardise": None} if LOADERS.knows(data) and "standardise" in options(data) else {}
    how = {key: value for key, value in dealt.items() if key != "dir"}
    return load(data, dealt.get("dir"), **raw).partition(how.pop("partition", None), test_fraction=0.0, **how)


def described(typed: Mapping[str, Any], drop: list[str], **roles: Any) -> Columns:
    """The columns as `typed` on the command line, without `drop`, and in the roles of a regression."""
    settings = typed.get("columns", {})
    for key in [*(k for k in typed if k != "columns"), *(f"columns.{k}" for k in settings if k not in DESCRIBED)]:
        raise ConfigError(f"{key}: regress takes {', '.join(f'columns.{k}' for k in DESCRIBED)}")
    both = dict.fromkeys([*settings.get("drop", []), *drop])
    return read_table(Columns, {**settings, **roles, "drop": [*both], "missing": "refuse"}, Where(None, {}, {}))


class Read(NamedTuple):
    """Sites of a folder."""

    names: list[str]
    sites: list[tuple[Any, ...]]  # (x, target, ...)
    about: str  # the target, and the categories that others are compared with
    left: list[int] | None  # rows left out
    clusters: list[list[str]] | None  # of each row


def tables(
    paths: Sequence[Path | str],
    model: str,
    given: dict[str, str | None],
    columns: list[str] | None,
    typed: Mapping[str, Any],
    complete: bool,
    cluster: str | None,
) -> Read:
    """The tables of all sites, columns taken by name; if `complete`, rows with gaps are left out."""
    cox, sheets = model == "cox", _sheets(paths, model, given, typed)
    first = list(sheets[0].columns)
    wanted = [given["time"], given["event"]] if cox else [given["target"] or first[-1]]
    if cox and None in wanted:
        raise ConfigError(f"--{'event' if wanted[0] else 'time'}: missing; cox needs --time and --event")
    outcome = [name for name in (*wanted, given["exposure"]) if name is not None]
    _check_columns(sheets, outcome, columns or (), cluster)
    aside = [name for name in (given["exposure"], cluster) if name is not None]
    used = columns or [c for c in first if c not in (*outcome, *aside)]
    every = dict.fromkeys(c for sheet in sheets for c in sheet.columns)
    drop = [c for c in every if (columns and c not in (*columns, *wanted)) or c in aside]
    if cox:
        settings = described(typed, drop, task="survival", time=wanted[0], event=wanted[1])
    else:
        task = "auto" if model == "logistic" else "regression"
        settings = described(typed, drop, task=task, target=wanted[0])

    def surveyed() -> Table:
        by_name = survey(sheets, settings)
        named = {n: replace(c, numbers_rows=False) for n, c in by_name.items() if columns}
        return Table(sheets, by_name | named, settings)

    table, rows = surveyed(), [len(sheet.lines) for sheet in sheets]
    if complete:
        needed = [*(c.name for c in table.inputs), *outcome, *aside]
        sheets = [whole(sheet, needed, settings.gaps) for sheet in sheets]
        table = surveyed()
    table.advice = "--missing complete leaves such rows out"
    if problems := table.problems():
        raise Faults(table.where, problems)
    each = zip(sheets, table.targets(), strict=True)
    sites = [_arrays(s, t, table, used, given["exposure"], cox) for s, t in each]
    about = f"time {wanted[0]}, event {wanted[1]} (1: it happened)" if cox else f"target {wanted[0]}"
    about += "" if cox or given["target"] else " (the last column)"
    left = [n - len(sheet.lines) for n, sheet in zip(rows, sheets, strict=True)] if complete else None
    groups = None if cluster is None else [[*map(sheet.texts(cluster).key, sheet.columns[cluster])] for sheet in sheets]
    return Read(
        [sheet.name for sheet in sheets], sites, about + _references(table, None if cox else table.labels), left, groups
    )


def _sheets(
    paths: Sequence[Path | str], model: str, given: Mapping[str, str | None], typed: Mapping[str, Any]
) -> list[Sheet]:
    """The tables of all sites, repaired as `typed`."""
    reading = {key: value for key, value in typed.get("columns", {}).items() if key in READING}
    roles = {"task": "survival", "time": given["time"], "event": given["event"]} if model == "cox" else {}
    if "missing-target" in reading:
        reading |= {key: value for key, value in {"target": given["target"], **roles}.items() if value is not None}
    sheets, faults = sheets_of(paths, read_table(Columns, reading, Where(None, {}, {})))
    if faults:
        raise Faults(str(Path(paths[0]).parent), faults)
    return sheets


def _check_columns(sheets: list[Sheet], outcome: list[str], columns: Sequence[str], cluster: str | None) -> None:
    """Raise ConfigError for a column in two roles, DataError for one that a site does not have."""
    if twice := [name for k, name in enumerate(outcome) if name in (*outcome[:k], *columns)]:
        raise ConfigError(f"column {twice[0]!r}: found in two roles, expected one each")
    for sheet in sheets:
        for name in (*columns, *outcome, *([cluster] if cluster else ())):
            sheet.need(name)


def _arrays(
    sheet: Sheet, target: np.ndarray, table: Table, used: list[str], exposure: str | None, cox: bool
) -> tuple[Any, ...]:
    """A site as `fit` takes it: (x, target, ...)."""
    x: dict[str, Any] = {}
    for c in sorted(table.inputs, key=lambda c: used.index(c.name) if c.name in used else len(used)):
        if c.kind != "category":
            x[c.name] = np.array(sheet.numbers(c.name), dtype=float)
        else:
            at = np.array(sheet.positions(c.name, c.values))
            x |= {f"{c.name}={c.values[k]}": (at == k).astype(float) for k in range(1, len(c.values))}  # against 0
    parts = [target[:, 0], target[:, 1]] if cox else [target.astype(float)]
    return (pd.DataFrame(x), *parts, *([np.array(sheet.numbers(exposure), dtype=float)] if exposure else ()))


def _references(table: Table, labels: list[str] | None) -> str:
    """The classes and categories that others are compared with, and the columns that number rows."""
    text = f": {labels[-1]}, against {', '.join(labels[:-1])}" if labels else ""
    if references := [f"{c.name}={c.values[0]}" for c in table.inputs if c.kind == "category"]:
        text += f"; categories against {', '.join(references)}"
    return text + "".join(f"; {c.name} is {gone}" for c in table.survey.values() if ROWS in (gone := table.becomes(c)))


def whole(sheet: Sheet, needed: Sequence[str], gaps: Sequence[str]) -> Sheet:
    """The rows that have every value that is needed."""
    gone = np.any([sheet.missing(name, gaps) for name in needed if name in sheet.columns], axis=0)
    kept = np.flatnonzero(~gone).tolist()
    if not kept:
        raise DataError(f"{sheet.where}: every row has a gap; at least one without is needed")
    columns = {name: [cells[k] for k in kept] for name, cells in sheet.columns.items()}
    return replace(sheet, lines=[sheet.lines[k] for k in kept], columns=columns)
