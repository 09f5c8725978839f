"""Sites' CSV files as they come: cells as text, and what each column turns out to hold over all sites.

Columns are matched by name. Nothing is decided here: `tables` makes a data set of them, or says what stands in the way.
"""

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from polyfed.core.columns import Columns
from polyfed.core.errors import DataError
from polyfed.core.settings import is_mapping
from polyfed.data.readers import number, read_cells

GAPS = ("", "na", "n/a", "nan", "null", "?", ".", "-")
FEW = 20  # distinct texts that a column of categories may have without being declared
DATE = re.compile(
    r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2}))"
    r"([ T]\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?)?(Z|[+-]\d\d:?\d\d)?"
)
COMMA = re.compile(r"[+-]?\d+,\d+")
USABLE = ("number", "binary", "category")


@dataclass(frozen=True, eq=False)
class Sheet:
    """One site's file: cells as text, without blanks around them, a list for each column.

    where: how errors name the file     lines: [N] the line of every row     semicolons: whether these part the cells
    """

    where: str
    lines: list[int]
    columns: dict[str, list[str]]
    semicolons: bool = False

    @property
    def name(self) -> str:
        """The file's name without its ending, which is the client's."""
        return Path(self.where).stem

    def at(self, row: int, column: str) -> str:
        """A place in the file, as errors name it."""
        return f"{self.where}, line {self.lines[row]}, column {column!r}"

    @cached_property
    def comma(self) -> bool:
        """Whether numbers are written 1,5: then 1.234 is no number, for it may be a thousand."""
        return self.semicolons and any(COMMA.fullmatch(c) for cells in self.columns.values() for c in cells)

    def numbers(self, column: str) -> list[float | None]:
        """The numbers of a column; None for what is no finite one."""
        found = [self._number(cell) for cell in self.columns[column]]
        return [v if v is not None and math.isfinite(v) else None for v in found]

    def _number(self, cell: str) -> float | None:
        if not self.comma:
            return number(cell)
        return None if "." in cell else number(cell.replace(",", "."))


def read(path: Path) -> Sheet:
    """A file whose cells are parted by commas, semicolons or tabs, whichever its first line has most of."""
    header, rows, delimiter = read_cells(path, ",;\t")
    cells = [[cell.strip() for cell in row] for _, row in rows]
    columns = {name: [row[k] for row in cells] for k, name in enumerate(header)}
    return Sheet(str(path), [line for line, _ in rows], columns, delimiter == ";")


def sheet_of(frame: object, where: str = "rows") -> Sheet:
    """The rows of a DataFrame, as they would be read from a file."""
    import pandas as pd  # here, because it is slow to import

    if not isinstance(frame, pd.DataFrame):
        raise DataError(f"{where}: found a {type(frame).__name__}, expected a pandas DataFrame")
    text = {str(c): ["" if pd.isna(v) else _text(v) for v in frame[c].tolist()] for c in frame.columns}
    return Sheet(where, list(range(2, len(frame) + 2)), text)


def _text(value: object) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()


@dataclass(frozen=True, eq=False)
class Column:
    """What a column holds over all sites.

    kind: "number", "binary" (two numbers), "category", "constant", "empty", "date", "identifier", "text" (too many
    texts for a category) or "mixed" (numbers and texts)
    values: its distinct texts, sorted     range: least and largest number     gaps, cells: how many
    whole: whether all its numbers are written as integers     odd: the first cell that is no number: where, and what
    lacking: sites without it
    """

    name: str
    kind: str
    values: tuple[str, ...]
    range: tuple[float, float] | None
    gaps: int
    cells: int
    whole: bool
    odd: tuple[str, str] | None
    lacking: tuple[Sheet, ...]

    @property
    def shown(self) -> str:
        """Its values in short."""
        if self.range is not None and self.kind in ("number", "binary"):
            return f"{self.range[0]:g} to {self.range[1]:g}" if self.kind == "number" else ", ".join(self.values)
        cut = [v if len(v) <= 20 else f"{v[:20]}..." for v in self.values[:5]]
        return ", ".join(cut) + (f" and {len(self.values) - 5} more" if len(self.values) > 5 else "")


def is_gap(cell: str, gaps: Collection[str] = ()) -> bool:
    """Whether a cell says that a value is missing. gaps: further texts that say so."""
    return cell.lower() in GAPS or cell in gaps


def survey(sheets: Sequence[Sheet], columns: Columns) -> dict[str, Column]:
    """What every column holds, in the order of the first file, those of other sites only last."""
    names = dict.fromkeys(name for sheet in sheets for name in sheet.columns)
    return {name: _column(name, sheets, columns) for name in names}


def _column(name: str, sheets: Sequence[Sheet], columns: Columns) -> Column:
    having = [s for s in sheets if name in s.columns]
    cells, texts, gaps = 0, set[str](), 0
    low, high = math.inf, -math.inf
    shares: list[tuple[Sheet, int, int, int | None]] = []  # cells with something in them, numbers, the first other one
    for sheet in having:
        there = [k for k, cell in enumerate(sheet.columns[name]) if not is_gap(cell, columns.gaps)]
        numbers = sheet.numbers(name)
        found = [v for k in there if (v := numbers[k]) is not None]
        low, high = min([low, *found]), max([high, *found])
        texts.update(sheet.columns[name][k] for k in there)
        cells, gaps = cells + len(sheet.lines), gaps + len(sheet.lines) - len(there)
        shares.append((sheet, len(there), len(found), next((k for k in there if numbers[k] is None), None)))
    there, numeric = cells - gaps, sum(n for _, _, n, _ in shares)
    odd = next(((s.at(k, name), s.columns[name][k][:40]) for s, _, _, k in shares if k is not None), None)
    pure = any(0 < n == m for _, n, m, _ in shares)  # a site with numbers only
    if not there:
        kind = "empty"
    elif name in columns.categories:
        kind = "category"
    elif numeric == there:
        few = len({number(t.replace(",", ".")) for t in texts}) if len(texts) <= 2 * FEW else len(texts)
        kind = "constant" if low == high and not gaps else "binary" if few == 2 else "number"
    elif name in columns.numbers or 2 * numeric >= there or (pure and numeric < there):
        kind = "mixed"
    elif all(DATE.fullmatch(t) for t in texts):
        kind = "date"
    elif len(texts) == 1:
        kind = "category" if gaps else "constant"
    elif len(texts) == there or (len(texts) > FEW and all(_distinct(s.columns[name], columns.gaps) for s in having)):
        kind = "identifier"
    else:
        kind = "category" if len(texts) <= FEW else "text"
    if is_mapping(columns.categories) and name in columns.categories:
        values = tuple(columns.categories[name])
    else:
        values = tuple(sorted(texts, key=_order))
    lacking = tuple(s for s in sheets if name not in s.columns)
    whole = all(re.fullmatch(r"[+-]?\d+", t) for t in texts)
    return Column(name, kind, values, (low, high) if numeric else None, gaps, cells, whole, odd, lacking)


def _distinct(cells: Sequence[str], gaps: Collection[str]) -> bool:
    """Whether no text occurs twice; sites may number their rows alike."""
    there = [cell for cell in cells if not is_gap(cell, gaps)]
    return len(set(there)) == len(there)


def _order(text: str) -> tuple[float, str]:
    """Numbers by their size, texts by the alphabet."""
    value = number(text)
    return (value if value is not None and np.isfinite(value) else math.inf, text)
