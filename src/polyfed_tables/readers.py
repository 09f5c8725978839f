"""Readers of tables that the core does not know. Every cell comes out as Python's own value: whole numbers with gaps
stay whole, dates stay dates, and an ordered categorical keeps its order. Nothing is unpickled.
"""

import os
import re
import zipfile
from collections.abc import Collection
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, default_collate

from polyfed.base.checkpoint import reason
from polyfed.base.errors import ConfigError, DataError, PolyfedError, few
from polyfed.data.readers import unpacked_at_most

EXTRA = "pip install 'polyfed[tables]'"
SECRET = re.compile("pass(?!file)|pwd|secret|token", re.IGNORECASE)
PATIENT, PATIENCE = ("psycopg", "psycopg2", "pymysql", "mysqldb"), "15"  # drivers that wait for ever, and seconds
MERGED, FORMULA = re.compile(rb'<mergeCell ref="([A-Z0-9:]+)"'), re.compile(rb"<f[ >]")  # in a sheet's XML
DIGITS = 10**15  # from which on a workbook does not hold every whole number
INDEX = re.compile(r"__index_level_\d+__")  # pandas' own name in a parquet file for an index without one


def frame(table: Any, where: str) -> pd.DataFrame:
    """A table that speaks Arrow (of polars, pyarrow, duckdb, ...) as a DataFrame. Raises DataError for another."""
    lazy = callable(getattr(table, "collect", None)) and not hasattr(table, "__arrow_c_stream__")
    table = table.collect() if lazy else table
    if not hasattr(table, "__arrow_c_stream__"):
        raise DataError(
            f"{where}: found a {type(table).__name__}, expected a DataFrame of pandas or polars, or an Arrow table"
        )
    arrow = _library("pyarrow", f"{where}: a table of {type(table).__module__.partition('.')[0]}")
    return _of_arrow(arrow.table(table))


def read(path: Path, unread: Collection[str] = ()) -> pd.DataFrame:
    """A parquet or Excel file; the index counts rows from the header. Raises DataError in one line for what is none.

    Columns in `unread` are not used, and may hold numbers that a workbook has rounded.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        return _parquet(path) if path.suffix.lower() == ".parquet" else _excel(path, unread)
    except PolyfedError:
        raise
    except Exception as e:  # the libraries have errors of their own
        raise DataError(f"{path}: not a readable {path.suffix[1:].lower()} file ({reason(e)})") from None


def query(url: str, text: str) -> tuple[str, pd.DataFrame]:
    """(the database as errors name it, the rows that a query finds there). A password comes from the environment."""
    sql = _library("sqlalchemy", f"{url.partition(':')[0]}: a database")
    try:
        place = sql.engine.make_url(url)
    except Exception:
        form = "dialect://user@host/name, or sqlite:///file"
        raise ConfigError(f"data.name: found no URL of a database before its host, expected {form}") from None
    where = place.set(query={}).render_as_string(hide_password=True)
    secret = place.password
    told = [key for key, value in place.query.items() if SECRET.search(f"{key}={value}")]
    if told or (secret is not None and not secret.startswith("$")):
        then = 'expected the name of a variable, as in "postgresql://me:$DB_PASSWORD@host/clinic"'
        raise ConfigError(f"data.name: found a password in {where}, which results would keep; {then}")
    if secret is not None:
        if not os.environ.get(secret[1:].strip("{}")):
            raise ConfigError(
                f"data.name: {where}: found no variable {secret[1:]} in the environment, expected its password"
            )
        place = place.set(password=os.environ[secret[1:].strip("{}")])
    if place.get_backend_name() == "sqlite" and not Path(place.database or "").is_file():
        raise DataError(f"{where}: no such file")
    try:
        if place.get_dialect().driver in PATIENT and "connect_timeout" not in place.query:
            place = place.update_query_dict({"connect_timeout": PATIENCE})
        engine = sql.create_engine(place)
        with engine.connect() as connection:  # as it is, for : and % are the query's own
            found = connection.exec_driver_sql(text, execution_options={"no_parameters": True})
            names, rows = ([*found.keys()], [tuple(row) for row in found]) if found.returns_rows else ([], [])
        engine.dispose()
    except Exception as e:  # of the library, or of a driver
        why = str(getattr(e, "orig", None) or e).strip().splitlines()[0]
        why = why if secret is None else why.replace(str(place.password), "***")
        raise DataError(f"{where}: the query cannot be answered ({why})") from None
    if not rows:
        raise DataError(f"{where}: the query finds no {'row' if names else 'table'}, expected rows of a select")
    return where, pd.DataFrame(rows, columns=names, dtype=object)


def items(loader: DataLoader[Any], where: str) -> Any:
    """The data set of a DataLoader that hands out each of its items once, as it is. Raises DataError for another."""
    drawn: Any = loader.sampler
    data: Any = loader.dataset
    plain = isinstance(drawn, SequentialSampler) or (isinstance(drawn, RandomSampler) and not drawn.replacement)
    if not plain or len(drawn) < len(data) or type(loader.batch_sampler) not in (type(None), BatchSampler):
        raise DataError(
            f"{where}: the DataLoader has a sampler of its own, expected a data set: Subset(dataset, indices)"
        )
    if loader.batch_size is not None and loader.collate_fn is not default_collate:
        raise DataError(f"{where}: the DataLoader has a collate_fn of its own, expected a data set whose items are so")
    return data


def _parquet(path: Path) -> pd.DataFrame:
    parquet = _library("pyarrow.parquet", f"{path}: a parquet file")
    with parquet.ParquetFile(path) as file:
        about = file.metadata
        _bounded(path, sum(about.row_group(k).total_byte_size for k in range(about.num_row_groups)))
        table = file.read()
    return _of_arrow(table.drop_columns([name for name in table.column_names if INDEX.fullmatch(name)]))


def _excel(path: Path, unread: Collection[str]) -> pd.DataFrame:
    """The one sheet of a workbook that holds anything, without rows and columns that are empty."""
    excel = _library("openpyxl", f"{path}: an Excel file")
    with zipfile.ZipFile(path) as packed:
        _bounded(path, sum(member.file_size for member in packed.infolist()))
        sheets = [packed.read(name) for name in packed.namelist() if name.startswith("xl/worksheets/sheet")]
    if merged := [m for sheet in sheets for m in MERGED.findall(sheet)]:
        found = f"found the merged cells {merged[0].decode()}, expected a value in each"
        raise DataError(f"{path}: {found}; unmerge them (in Excel: Home, Merge & Center)")
    full = {title: cells for title, cells in _cells(excel, path).items() if cells.notna().to_numpy().any()}
    if any(FORMULA.search(sheet) for sheet in sheets):
        for title, cells in _cells(excel, path, data_only=False).items():
            there = cells.notna().to_numpy()
            lost = there & full[title].isna().to_numpy() if title in full else there
            if lost.any():
                row, k = np.argwhere(lost)[0]
                what = f"found the formula {str(cells.iat[row, k])[:40]!r} without its value"
                raise DataError(f"{path}, line {row + 1}, column {k + 1}: {what}; save the file in Excel once")
    if len(full) != 1:
        found = f"sheets {few(full)}" if full else "no cell"
        raise DataError(f"{path}: found {found}, expected one sheet with a table; save it as a file of its own")
    (cells,) = full.values()
    used = cells.dropna(axis=1, how="all").dropna(how="all")
    if (names := used.iloc[0]).isna().any():
        column = 1 + int(names[names.isna()].index[0])
        raise DataError(f"{path}: column {column} has no name, expected names in the first row of the sheet")
    rows = used.iloc[1:]
    for k, name in enumerate(names):
        column = [] if str(name) in unread else rows.iloc[:, k].tolist()
        if (at := next((i for i, v in enumerate(column) if _rounded(v)), None)) is not None:
            problem = f"found {column[at]:.0f}, and a workbook keeps 15 digits of a number; write it as text"
            raise DataError(f"{path}, line {rows.index[at] + 1}, column {str(name)!r}: {problem}, or leave it out")
    return rows.set_axis(names.tolist(), axis=1).set_axis(rows.index - 1)


def _rounded(value: object) -> bool:
    """Whether a workbook may have lost digits of a whole number."""
    return isinstance(value, int | float) and DIGITS <= abs(value) < np.inf and value % 1 == 0


def _cells(excel: Any, path: Path, data_only: bool = True) -> dict[str, pd.DataFrame]:
    """Every sheet's cells by its title."""
    book = excel.load_workbook(path, read_only=True, data_only=data_only)
    try:
        for sheet in book.worksheets:
            sheet.reset_dimensions()  # which some programs write wrong
        rows = {s.title: zip_longest(*s.iter_rows(values_only=True)) for s in book.worksheets}
        return {title: pd.DataFrame([*zip(*columns, strict=True)], dtype=object) for title, columns in rows.items()}
    finally:
        book.close()


def _of_arrow(table: Any) -> pd.DataFrame:
    """A pyarrow Table as columns of Python's values; short floats stay short, as they are written with fewer digits."""
    columns: list[Any] = []
    for column, field in zip(table.columns, table.schema, strict=True):
        kind = str(column.type)
        if kind in ("float", "halffloat"):
            columns.append(pd.Series(column.to_numpy(), dtype=np.float32))
        elif (order := _enum(field)) or (kind.startswith("dictionary") and column.type.ordered):
            if not order and len(column):
                order = column.unify_dictionaries().combine_chunks().dictionary.to_pylist()
            columns.append(pd.Series(pd.Categorical(column.to_pylist(), order, ordered=True)))
        else:
            columns.append(pd.Series(column.to_pylist(), dtype=object))
    whole = pd.concat(columns, axis=1) if columns else pd.DataFrame(index=pd.RangeIndex(table.num_rows))
    return whole.set_axis(table.column_names, axis=1)


def _enum(field: Any) -> list[str]:
    """The values of an Enum of polars, whose versions before 2 do not mark it as ordered: b"4;well3;ill"."""
    rest = next((v for k, v in (field.metadata or {}).items() if k.startswith(b"_PL_ENUM_VALUES")), b"")
    values = list[str]()
    while rest:
        length, _, rest = rest.partition(b";")
        values, rest = [*values, rest[: int(length)].decode()], rest[int(length) :]
    return values


def _bounded(path: Path, size: int) -> None:
    if size > unpacked_at_most(path.stat().st_size):
        raise DataError(f"{path}: unpacks to {size:,} bytes; save it as CSV if that is right")


def _library(module: str, what: str) -> Any:
    """A library of the extra, or one line that says how to install it."""
    try:
        return import_module(module)
    except ImportError:
        raise ConfigError(f"{what}: its library is not installed; {EXTRA}") from None
