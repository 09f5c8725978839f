"""Sites' CSV files as they come: cells as text, and what each column turns out to hold over all sites.

Columns are matched by name. Nothing is decided here: `tables` makes a data set of them, or says what stands in the way.
"""

import datetime
import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from polyfed.base.columns import Columns
from polyfed.base.errors import DataError
from polyfed.base.settings import is_mapping
from polyfed.data.readers import number, read_cells

GAPS = ("", "na", "n/a", "nan", "null", "?", ".", "-")
FEW = 20  # distinct texts that a column of categories may have without being declared
MANY = 10  # rows of a site whose texts, all distinct at every site, identify them
MONTHS = "january february march april may june july august september october november december"
MONTH = f"({'|'.join(f'{m[:3]}({m[3:]})?' if m[3:] else m for m in MONTHS.split())}|sept)[.]?"
DATE = re.compile(
    r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2})|(19|20)\d\d[-/](0?[1-9]|1[0-2])"
    rf"|\d{{1,2}}[.]?[- ]{MONTH},?[- ](\d{{4}}|\d{{2}})|{MONTH}[- ](\d{{1,2}},? )?\d{{4}}|{MONTH}-\d{{2}})"
    r"([ T]\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?)?(Z|[+-]\d\d:?\d\d)?",
    re.IGNORECASE,
)
COMMA = re.compile(r"[+-]?\d+,\d*")
DECIMAL = re.compile(r"([+-]?)(\d+)(?:\.(\d*))?")
NOTATION = re.compile(r"[<>≤≥~]?\s*[+-]?\d+([.,' ]\d+)*\s*%?")
USABLE = ("number", "binary", "category")


def canonical(text: str) -> str:
    """Form in which a text is matched: a decimal by its number, true and false in any case, others as written.

    1, 1.0, 01 and +1 match, and so do TRUE and True.
    """
    if found := DECIMAL.fullmatch(text):
        whole, part = found[2].lstrip("0") or "0", (found[3] or "").rstrip("0")
        number = f"{whole}.{part}" if part else whole
        return f"-{number}" if found[1] == "-" and number != "0" else number
    return text.lower() if text.lower() in ("true", "false") else text


def spelt(texts: Iterable[str]) -> list[str]:
    """One of the texts that match, the shortest, then the first in order; by size for numbers, else by the alphabet."""
    found: dict[str, str] = {}
    for text in sorted(texts, key=lambda t: (len(t), t)):
        found.setdefault(canonical(text), text)
    return sorted(found.values(), key=_order)


def places(values: Sequence[str]) -> dict[str, int]:
    """Where a text, or else what it is matched by, stands among values."""
    return {canonical(v): k for k, v in enumerate(values)} | {v: k for k, v in enumerate(values)}


@dataclass(frozen=True, eq=False)
class Sheet:
    """One site's file: cells as text, without blanks around them, a list for each column.

    where: how errors name the file     lines: [N] the line of every row     delimiter: what parts the cells
    """

    where: str
    lines: list[int]
    columns: dict[str, list[str]]
    delimiter: str = ","

    @property
    def name(self) -> str:
        """The file's name without its ending, which is the client's."""
        return Path(self.where).stem

    def at(self, row: int, column: str) -> str:
        """A place in the file, as errors name it."""
        return f"{self.where}, line {self.lines[row]}, column {column!r}"

    @cached_property
    def comma(self) -> bool:
        """True where numbers are written 1,5: then 1.234 is no number, for it may be a thousand."""
        return self.delimiter != "," and any(
            COMMA.fullmatch(c) and c[-1] != "," for cells in self.columns.values() for c in cells
        )

    def numbers(self, column: str) -> list[float | None]:
        """The numbers of a column; None for what is no finite one."""
        found = [self._number(cell) for cell in self.columns[column]]
        return [v if v is not None and math.isfinite(v) else None for v in found]

    def _number(self, cell: str) -> float | None:
        if not self.comma:
            return number(cell)
        return None if "." in cell else number(cell.replace(",", "."))

    def plain(self, cell: str) -> str:
        """A cell, its decimal comma as a point."""
        return cell.replace(",", ".") if self.comma and COMMA.fullmatch(cell) else cell

    def keys(self, column: str) -> list[str]:
        """Forms in which the cells of a column are matched."""
        cells = self.columns[column]
        known = {c: c if self.comma and "." in c else canonical(self.plain(c)) for c in set(cells)}
        return [known[c] for c in cells]

    def positions(self, column: str, values: Sequence[str]) -> list[int | None]:
        """Where the cells of a column stand among values; None for what is none of them."""
        at = places(values)
        return [at.get(cell, at.get(k)) for cell, k in zip(self.columns[column], self.keys(column), strict=True)]

    def missing(self, column: str, gaps: Collection[str] = ()) -> list[bool]:
        """Mask of the cells of a column that say that a value is missing. gaps: further texts that say so."""
        there = {*gaps, *map(canonical, gaps)}
        keys = self.keys(column) if gaps else self.columns[column]
        return [c.lower() in GAPS or c in there or k in there for c, k in zip(self.columns[column], keys, strict=True)]


def read(path: Path) -> Sheet:
    """A file whose cells are parted by commas, semicolons or tabs, whichever its first line has most of."""
    header, rows, delimiter = read_cells(path, ",;\t")
    cells = [[cell.strip() for cell in row] for _, row in rows]
    columns = {name: [row[k] for row in cells] for k, name in enumerate(header)}
    return Sheet(str(path), [line for line, _ in rows], columns, delimiter)


def sheet_of(frame: object) -> Sheet:
    """The rows of a DataFrame, as they would be read from a file."""
    import pandas as pd  # here, because it is slow to import

    if not isinstance(frame, pd.DataFrame):
        raise DataError(f"rows: found a {type(frame).__name__}, expected a pandas DataFrame")
    names = [str(c) for c in frame.columns]
    if len(set(names)) < len(names):
        raise DataError(f"rows: two columns are called {next(n for n in names if names.count(n) > 1)!r}")
    text = {n: ["" if pd.isna(v) else _text(v) for v in frame.iloc[:, k].tolist()] for k, n in enumerate(names)}
    return Sheet("rows", list(range(2, len(frame) + 2)), text)


def _text(value: object) -> str:
    return np.format_float_positional(value, trim="-") if isinstance(value, float) else str(value).strip()


class Cells(NamedTuple):
    """Contents of a column in one site's file: enough to tell, from those of all sites, what the column is.

    numbers: how many cells hold one     texts: distinct ones (`spelt`); None where a site says only that there are many
    range: least and largest number     whole: whether all texts are integers     dates: whether all are dates
    distinct: whether no text occurs twice     notation: whether most texts look like numbers in another notation
    unmatched: how many cells match no declared value     respelt: how many of its texts match another one
    odd, gap: the first cell that is no number, or empty: where, and what
    """

    cells: int
    gaps: int
    numbers: int
    texts: frozenset[str] | None
    range: tuple[float, float]
    whole: bool
    dates: bool
    distinct: bool
    notation: bool
    unmatched: int
    respelt: int
    odd: tuple[str, str] | None = None
    gap: tuple[str, str] | None = None

    @property
    def there(self) -> int:
        """Cells with something in them."""
        return self.cells - self.gaps


@dataclass(frozen=True, eq=False)
class Column:
    """Contents of a column over all sites.

    kind: "number", "binary" (two numbers), "category", "constant", "empty", "date", "identifier", "text" (too many
    texts for a category), "notation" (texts that look like numbers) or "mixed" (numbers and texts)
    values: its distinct texts, sorted     range: least and largest number     gaps, cells: how many
    unmatched: how many cells match no declared value     respelt: how many texts match another one of their site
    whole: whether all its numbers are written as integers     lacking: sites without it
    odd, gap: the first cell that is no number, or empty: where, and what
    """

    name: str
    kind: str
    values: tuple[str, ...]
    range: tuple[float, float] | None
    gaps: int
    cells: int
    unmatched: int
    respelt: int
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


def declared(columns: Columns, name: str) -> Sequence[str] | None:
    """The values that a column of categories is declared to have; None where they are found."""
    return columns.categories.get(name) if is_mapping(columns.categories) else None


def survey(sheets: Sequence[Sheet], columns: Columns) -> dict[str, Column]:
    """Survey every column, in the order of the first file, those of other sites only last."""
    names = dict.fromkeys(name for sheet in sheets for name in sheet.columns)
    return {
        name: merged(name, [cells_of(s, name, columns) for s in sheets if name in s.columns], sheets, columns)
        for name in names
    }


def cells_of(sheet: Sheet, name: str, columns: Columns) -> Cells:
    """Survey a column of one file."""
    cells, missing, numbers = sheet.columns[name], sheet.missing(name, columns.gaps), sheet.numbers(name)
    there = [k for k, gap in enumerate(missing) if not gap]
    found = [v for k in there if (v := numbers[k]) is not None]
    written = {cells[k] for k in there}
    texts = frozenset(spelt(map(sheet.plain, written)))
    values = declared(columns, name)
    at = () if values is None else sheet.positions(name, values)
    odd = next((k for k in there if numbers[k] is None), None)
    gap = missing.index(True) if True in missing else None
    return Cells(
        len(cells),
        len(cells) - len(there),
        len(found),
        texts,
        (min(found, default=math.inf), max(found, default=-math.inf)),
        all(re.fullmatch(r"[+-]?\d+", t) for t in written),
        all(DATE.fullmatch(t) or _compact(t) for t in written),
        len(texts) == len(there),
        _notation(texts),
        sum(at[k] is None for k in there) if at else 0,
        0 if written.issubset(values or ()) else len(written) - len(texts),
        None if odd is None else (sheet.at(odd, name), cells[odd][:40]),
        None if gap is None else (sheet.at(gap, name), cells[gap]),
    )


def _compact(text: str) -> bool:
    """True for a date of 1900 to 2099 written as 20240314."""
    if not re.fullmatch(r"(19|20)[0-9]{6}", text):
        return False
    try:
        return bool(datetime.date(int(text[:4]), int(text[4:6]), int(text[6:])))
    except ValueError:
        return False


def _notation(texts: Collection[str]) -> bool:
    """True where more than half of the texts look like numbers."""
    return 2 * sum(NOTATION.fullmatch(t) is not None for t in texts) > len(texts)


def merged(name: str, parts: Sequence[Cells], sheets: Sequence[Sheet], columns: Columns) -> Column:
    """A column over all sites. parts: what each file that has it holds in it"""
    cells, gaps, numeric, unmatched, respelt = (
        sum(getattr(p, which) for p in parts) for which in ("cells", "gaps", "numbers", "unmatched", "respelt")
    )
    there, texts = cells - gaps, spelt(t for p in parts for t in p.texts or ())
    low, high = min(p.range[0] for p in parts), max(p.range[1] for p in parts)
    distinct = 2 * FEW + 1 if any(p.texts is None for p in parts) else len(texts)
    if not there:
        kind = "empty"
    elif name in columns.categories:
        kind = "category"
    elif all(p.dates for p in parts) and name not in columns.numbers and (numeric < there or low < high):
        kind = "date"
    elif numeric == there:
        few = len({number(t) for t in texts}) if distinct <= 2 * FEW else distinct
        kind = "constant" if low == high and not gaps else "binary" if few == 2 else "number"
    elif numeric or name in columns.numbers:
        kind = "mixed"
    elif distinct == 1 and not gaps:
        kind = "constant"
    elif _notation(texts) or any(p.texts is None and p.notation for p in parts):
        kind = "notation"
    elif distinct == 1:
        kind = "category"
    elif all(p.distinct for p in parts) and (distinct == there or any(p.there >= MANY for p in parts)):
        kind = "identifier"
    else:
        kind = "category" if distinct <= FEW else "text"
    values = declared(columns, name)
    odd, gap = next((p.odd for p in parts if p.odd), None), next((p.gap for p in parts if p.gap), None)
    lacking = tuple(s for s in sheets if name not in s.columns)
    whole, spread = all(p.whole for p in parts), (low, high) if numeric else None
    values = tuple(texts if values is None else values)
    return Column(name, kind, values, spread, gaps, cells, unmatched, respelt, whole, odd, gap, lacking)


def _order(text: str) -> tuple[float, str]:
    """Numbers by their size, texts by the alphabet."""
    value = number(text)
    return (value if value is not None and np.isfinite(value) else math.inf, text)
