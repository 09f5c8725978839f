"""A site's file as it is used: read, and repaired as [columns.site.NAME] says.

Repairs have one order: encoding, rename, missing, tables of texts, limits of detection, arithmetic of one column and
units, arithmetic of several in the order written, drop-rows.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from polyfed.base.arithmetic import OWN, Formula, arithmetic, condition
from polyfed.base.columns import DROP_ROWS, ENCODING, MISSING, RENAME, Columns, Repairs, together
from polyfed.base.errors import ConfigError, DataError, Fault
from polyfed.base.part import pasted
from polyfed.base.plugins import sibling
from polyfed.base.settings import is_mapping
from polyfed.base.text import nfc
from polyfed.data.csv_files import IMAGE, LABEL, LIMIT, Sheet, Texts, canonical, cell, sheet_of, spelt
from polyfed.data.readers import MORE, NotUTF8, number, pictures, read_cells

WHOLE = (ENCODING, RENAME, MISSING, DROP_ROWS)  # repairs that are of no one column


def read(
    path: Path | str,
    columns: Columns = Columns(),  # noqa: B008  (immutable)
    site: str | None = None,
    least: int = 1,
) -> Sheet:
    """A repaired file; commas, semicolons or tabs part its cells, whichever its first line has most of."""
    if isinstance(path, Path) and path.is_dir():
        return _pictures(path)
    name = nfc(Path(path).stem if site is None else site)
    sheet = plain(path, columns, together(columns.site, name).get(ENCODING, columns.encoding))
    return mended(replace(sheet, least=least), columns, name)


def plain(place: Path | str, columns: Columns, encoding: str | None = None) -> Sheet:
    """The table of a file, or what the query finds in the database of a URL, as it comes."""
    if isinstance(place, str):
        if columns.query is None:
            raise ConfigError("columns.query: found none, expected what to ask the database, as in select * from t")
        where, frame = sibling("polyfed_tables.readers", "data.name: a database").query(place, columns.query)
        return sheet_of(frame, where)
    if place.suffix.lower() in MORE:
        frame = sibling("polyfed_tables.readers", f"{place}:").read(place, columns.drop)
        return replace(sheet_of(frame, str(place), files=columns.image), lines=[2 + k for k in frame.index])
    header, lines, cells, delimiter = read_cells(place, ",;\t", encoding, columns.image)
    return Sheet(str(place), lines, dict(zip(header, cells, strict=True)), delimiter)


def mended(sheet: Sheet, columns: Columns, name: str) -> Sheet:
    """The rows of the site `name`, repaired, those without a target dropped where these are."""
    return targeted(repaired(sheet, columns.site, name, columns.limits, columns.gaps), columns)


def by_site(sheet: Sheet, columns: Columns) -> list[Sheet]:
    """The repaired rows of each site that a column names; sites by size for numbers, else by the alphabet."""
    column = columns.by or ""
    sheet.need(column, ", the sites")
    if not sheet.lines:
        raise DataError(f"{sheet.where}: found a header and no rows")
    if (gone := sheet.missing(column)).any():
        raise DataError(f"{sheet.at(int(gone.argmax()), column)}: found a gap, expected the row's site", column)
    names = spelt(sheet.texts(column).all)
    at, rest = sheet.positions(column, names), {n: cells for n, cells in sheet.columns.items() if n != column}
    sites = [replace(sheet, columns=rest, client=name).only(np.flatnonzero(at == k)) for k, name in enumerate(names)]
    return [mended(site, columns, site.name) for site in sites]


def read_all(paths: Sequence[Path | str], columns: Columns) -> tuple[list[Sheet], list[Fault]]:
    """The files that can be read, and what is wrong with the others; an encoding is guessed, to find what else is."""
    sheets, faults = list[Sheet](), list[Fault]()
    for path in paths:
        how = columns
        while True:
            try:
                sheets.append(read(path, how))
                break
            except NotUTF8 as e:
                name, encoding = nfc(Path(path).stem), {ENCODING: e.guess}
                repair = {"site": {name: encoding}}
                faults.append(Fault(pasted(str(e), repair), repair))
                how = replace(columns, site={**columns.site, name: {**columns.site.get(name, {}), **encoding}})
            except DataError as e:
                faults.append(Fault(str(e)))
                break
    return sheets, faults


def _pictures(folder: Path) -> Sheet:
    """A folder of images, LABEL/IMAGE, as a table with the columns image and label; without labels the former."""
    files = pictures(folder)
    cells = {IMAGE: [f.relative_to(folder).as_posix() for f in files]}
    cells |= {LABEL: [nfc(f.parent.name) for f in files]} if any(f.parent != folder for f in files) else {}
    return Sheet(str(folder), [*range(1, len(files) + 1)], cells)


def targeted(sheet: Sheet, columns: Columns) -> Sheet:
    """The rows that have a target, where those without one are dropped."""
    if columns.missing_target == "refuse" or any(name not in sheet.columns for name in columns.outcome):
        return sheet
    gone = np.any([sheet.missing(name, columns.gaps) for name in columns.outcome], axis=0)
    return replace(sheet.only(np.flatnonzero(~gone)), dropped=int(gone.sum())) if gone.any() else sheet


def repaired(
    sheet: Sheet,
    site: Mapping[str, Repairs],
    name: str,
    limits: Collection[str],
    gaps: Collection[str] = (),
    used: Collection[str] | None = None,
) -> Sheet:
    """The rows of the site `name` with its own repairs and those of all sites; arithmetic leaves texts of `gaps`.

    Its own ones must fit its file. `used`: of new rows for a model, the columns that go in, which alone are repaired;
    no row is dropped.
    """
    repairs, own = together(site, name), site.get(name, {}) if used is None else {}
    formulas = {n: arithmetic(how, n) for n, how in repairs.items() if isinstance(how, str) and n not in WHOLE}
    needed = {*used} if used is not None else {*sheet.columns, *repairs, *repairs.get(MISSING, ())}
    for n in reversed(formulas):
        needed |= {*formulas[n].names} if n in needed else set()
    sheet = _renamed(sheet, repairs.get(RENAME, {}), own.get(RENAME, ()))
    if there := [n for n in own.get(MISSING, ()) if n in sheet.columns]:
        raise DataError(f"{sheet.where}: has the column {there[0]!r}, which columns.site.{name}.missing says it lacks")
    lost = [n for n in repairs.get(MISSING, ()) if n in needed and n not in sheet.columns]
    sheet = sheet.having({n: [""] * len(sheet.lines) for n in lost})
    for n in own:
        if n not in WHOLE and (n not in formulas or OWN in formulas[n].names):
            sheet.need(n, ", which columns.site repairs")
    tables = {n: how for n, how in repairs.items() if n not in WHOLE and is_mapping(how)}
    cells = {n: _texts(sheet, n, tables.get(n), n in limits, n in own) for n in dict.fromkeys((*tables, *limits))
             if n in needed and n in sheet.columns}  # fmt: skip
    sheet = sheet.having(cells)
    for n, formula in sorted(formulas.items(), key=lambda item: item[1].names != (OWN,)):
        if n in needed and (n in sheet.columns or OWN not in formula.names):
            sheet = sheet.having({n: _computed(sheet, n, formula, gaps)})
    return _kept(sheet, repairs.get(DROP_ROWS, ()), gaps) if used is None else sheet


def _renamed(sheet: Sheet, names: Mapping[str, str], own: Collection[str]) -> Sheet:
    """The columns under their new names; all of `own` must be there."""
    for name in own:
        sheet.need(name, ", which columns.site renames")
    now = [names.get(name, name) for name in sheet.columns]
    if twice := [name for k, name in enumerate(now) if name in now[:k]]:
        raise DataError(f"{sheet.where}: two columns are called {twice[0]!r} after columns.site renames", twice[0])
    orders = {names.get(name, name): order for name, order in sheet.orders.items()}
    return (
        replace(sheet, columns=dict(zip(now, sheet.columns.values(), strict=True)), orders=orders) if names else sheet
    )


def _texts(sheet: Sheet, name: str, table: Mapping[str, str | float] | None, limit: bool, strict: bool) -> list[str]:
    """The cells of a column by a table, which names only texts that are there if `strict`; then limits as values."""
    cells, table = sheet.texts(name), table or {}
    there, at = {*cells.all, *map(cells.key, cells.all)}, {canonical(k): v for k, v in table.items()} | {**table}
    for text in table if strict and sheet.least == 1 else ():
        if text not in there and canonical(text) not in there:
            has = ", ".join(t[:20] for t in cells.all[:5])
            problem = f"no cell {text!r}, which columns.site repairs; found {has}"
            raise DataError(f"{sheet.where}, column {name!r}: {problem}", name)
    often = (cells.rows >= sheet.least).tolist()
    new = [at.get(t, at.get(cells.key(t), t)) if some else t for t, some in zip(cells.all, often, strict=True)]
    texts = [v if isinstance(v, str) else cells.written(v) for v in new]
    texts = [_limit(cells, t) for t in texts] if limit else texts
    return [texts[k] for k in cells.at.tolist()]


def _limit(cells: Texts, text: str) -> str:
    """A number below or above a limit of detection as a value: <5 is 5/√2, >200 is 200."""
    if not (match := LIMIT.fullmatch(text)):
        return text
    value = number(cells.plain(match[2]))
    return text if value is None else cells.written(value / math.sqrt(2) if match[1] in "<≤" else value)


def _computed(sheet: Sheet, name: str, formula: Formula, gaps: Collection[str]) -> list[str]:
    """The cells of a column by arithmetic; one that reads a gap or a text has that text."""
    names = {n: name if n == OWN and name in sheet.columns else n for n in formula.names}
    for n in names.values():
        sheet.need(n, f", of which columns.site computes {name!r}")
    of = {n: sheet.texts(column) for n, column in names.items()}
    # of one column its distinct texts, of several every row
    at = {n: t.at if len(of) > 1 else np.arange(len(t.all)) for n, t in of.items()}
    gone = {n: (t.odd | t.missing(gaps, sheet.least))[at[n]] for n, t in of.items()}
    with np.errstate(all="ignore"):
        try:
            new = np.asarray(formula.value(lambda n: of[n].numbers[at[n]]), dtype=np.float64)
        except (ZeroDivisionError, OverflowError, TypeError):  # of numbers alone
            new = np.full(len(next(iter(at.values()))), np.nan)
    lost = np.any([*gone.values()], axis=0)
    if (wrong := ~np.isfinite(new) & ~lost).any():
        k = int(wrong.argmax())
        found = ", ".join(of[n].all[at[n][k]] for n in of)
        raise DataError(f"{sheet.where}, column {name!r}: {formula.text} of {found} is no finite number", name)
    values, back = np.unique(new, return_inverse=True)
    texts = [cell(v, sheet.comma) for v in values.tolist()]
    cells = [texts[k] for k in back.tolist()]
    for k in lost.nonzero()[0].tolist():
        cells[k] = next(of[n].all[at[n][k]] for n in of if gone[n][k])
    return cells if len(of) > 1 else [cells[k] for k in next(iter(of.values())).at.tolist()]


def _kept(sheet: Sheet, conditions: Sequence[str], gaps: Collection[str]) -> Sheet:
    """The rows of which no condition surely holds; what a gap would decide is not sure."""
    gone = np.zeros(len(sheet.lines), dtype=bool)
    for text in conditions:

        def of(name: str, cell: str | None = None, text: str = text) -> np.ndarray:
            sheet.need(name, f", which drop-rows = {text!r} reads")
            missing = sheet.missing(name, gaps)
            if cell is None:
                return np.where(missing, np.nan, sheet.numbers(name))
            like = missing if cell == "" else sheet.positions(name, [cell]) == 0
            return np.where(missing & ~like & (cell != ""), 0.5, like)

        gone |= condition(text).value(of) == 1
        if gone.all():
            raise DataError(f"{sheet.where}: drop-rows = {text!r} leaves no row")
    return replace(sheet.only(np.flatnonzero(~gone)), removed=int(gone.sum())) if gone.any() else sheet
