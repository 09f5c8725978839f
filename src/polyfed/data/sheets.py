"""Sites' CSV files as they come: cells as text, and what each column turns out to hold over all sites.

Columns are matched by name. Nothing is decided here: `tables` makes a data set of them, or says what stands in the way.
"""

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

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


class Cells(NamedTuple):
    """What one site's file holds in a column: enough to tell, from those of all sites, what the column is.

    numbers: how many cells hold one     texts: the distinct ones; None where a site says only that there are many
    range: least and largest number     whole: whether all texts are integers     dates: whether all are dates
    distinct: whether no text occurs twice     odd, gap: the first cell that is no number, or empty: where, and what
    """

    cells: int
    gaps: int
    numbers: int
    texts: frozenset[str] | None
    range: tuple[float, float]
    whole: bool
    dates: bool
    distinct: bool
    odd: tuple[str, str] | None = None
    gap: tuple[str, str] | None = None

    @property
    def there(self) -> int:
        """Cells with something in them."""
        return self.cells - self.gaps


@dataclass(frozen=True, eq=False)
class Column:
    """What a column holds over all sites.

    kind: "number", "binary" (two numbers), "category", "constant", "empty", "date", "identifier", "text" (too many
    texts for a category) or "mixed" (numbers and texts)
    values: its distinct texts, sorted     range: least and largest number     gaps, cells: how many
    whole: whether all its numbers are written as integers     odd, gap: the first cell that is no number, or empty:
    where, and what     lacking: sites without it
    """

    name: str
    kind: str
    values: tuple[str, ...]
    range: tuple[float, float] | None
    gaps: int
    cells: int
    whole: bool
    odd: tuple[str, str] | None
    gap: tuple[str, str] | None
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
    return {
        name: merged(name, [cells_of(s, name, columns) for s in sheets if name in s.columns], sheets, columns)
        for name in names
    }


def cells_of(sheet: Sheet, name: str, columns: Columns) -> Cells:
    """What a file holds in a column."""
    cells = sheet.columns[name]
    there = [k for k, cell in enumerate(cells) if not is_gap(cell, columns.gaps)]
    numbers = sheet.numbers(name)
    found = [v for k in there if (v := numbers[k]) is not None]
    texts = frozenset(cells[k] for k in there)
    odd = next((k for k in there if numbers[k] is None), None)
    gap = next((k for k, cell in enumerate(cells) if is_gap(cell, columns.gaps)), None)
    return Cells(
        len(cells),
        len(cells) - len(there),
        len(found),
        texts,
        (min(found, default=math.inf), max(found, default=-math.inf)),
        all(re.fullmatch(r"[+-]?\d+", t) for t in texts),
        all(DATE.fullmatch(t) for t in texts),
        len(texts) == len(there),
        None if odd is None else (sheet.at(odd, name), cells[odd][:40]),
        None if gap is None else (sheet.at(gap, name), cells[gap]),
    )


def merged(name: str, parts: Sequence[Cells], sheets: Sequence[Sheet], columns: Columns) -> Column:
    """A column over all sites. parts: what each file that has it holds in it"""
    cells, gaps, numeric = (sum(getattr(p, key) for p in parts) for key in ("cells", "gaps", "numbers"))
    there, texts, many = cells - gaps, set[str]().union(*(p.texts or () for p in parts)), 2 * FEW + 1
    low, high = min(p.range[0] for p in parts), max(p.range[1] for p in parts)
    distinct = many if any(p.texts is None for p in parts) else len(texts)
    pure = any(0 < p.there == p.numbers for p in parts)  # a site with numbers only
    if not there:
        kind = "empty"
    elif name in columns.categories:
        kind = "category"
    elif numeric == there:
        few = len({number(t.replace(",", ".")) for t in texts}) if distinct <= 2 * FEW else distinct
        kind = "constant" if low == high and not gaps else "binary" if few == 2 else "number"
    elif name in columns.numbers or 2 * numeric >= there or (pure and numeric < there):
        kind = "mixed"
    elif all(p.dates for p in parts):
        kind = "date"
    elif distinct == 1:
        kind = "category" if gaps else "constant"
    elif distinct == there or (distinct > FEW and all(p.distinct for p in parts)):
        kind = "identifier"
    else:
        kind = "category" if distinct <= FEW else "text"
    if is_mapping(columns.categories) and name in columns.categories:
        values = tuple(columns.categories[name])
    else:
        values = tuple(sorted(texts, key=_order))
    odd, gap = next((p.odd for p in parts if p.odd), None), next((p.gap for p in parts if p.gap), None)
    lacking = tuple(s for s in sheets if name not in s.columns)
    whole, spread = all(p.whole for p in parts), (low, high) if numeric else None
    return Column(name, kind, values, spread, gaps, cells, whole, odd, gap, lacking)


def _order(text: str) -> tuple[float, str]:
    """Numbers by their size, texts by the alphabet."""
    value = number(text)
    return (value if value is not None and np.isfinite(value) else math.inf, text)
