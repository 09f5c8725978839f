"""Sites' CSV files as they come: cells as text, and the contents of each column over all sites, matched by name."""

import datetime
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, compress
from pathlib import Path
from typing import Any

import numpy as np

from polyfed.base.columns import Columns
from polyfed.base.errors import DataError, closest
from polyfed.base.plugins import sibling
from polyfed.base.settings import is_mapping
from polyfed.base.text import nfc
from polyfed.data.readers import GAPS, LARGEST, floats, headless, number
from polyfed.data.said import Cells

FEW = 20  # distinct texts that a column of categories may have without being declared
HEAD = 1000  # rows of which some repeat a text, where a long column holds one twice
MIDNIGHT = " 00:00:00"  # of times that are dates
IMAGE, LABEL = "image", "label"  # columns that folders of images make
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
NOTATION = re.compile(r"[<>≤≥~]?\s*[€$£]?\s*[+−–-]?\s*\d+([.,'’\s]\d+)*\s*([%‰€$£]|[eE][+−-]?\d+)?")
UNIT = re.compile(r"(?<=\d)\s+\S{1,8}$")
LIMIT = re.compile(r"([<>≤≥])\s*=?\s*(\d+([.,]\d*)?)")
WHOLE = re.compile(r"[+-]?\d+")
NAMED = re.compile(r"(^|[_ ])(id|pid|mrn|nr|no|patient|subject|person|case|fall)([_ ]|nr|id|no|$)", re.IGNORECASE)
UNTIED, WIDE, CODES = 1e-3, 1000, 100_000  # chance that measurements have no ties; ranges beyond those of measurements
USABLE = ("number", "binary", "category")
HINTS = {
    "date": "dates; give days since an event, or years, as numbers",
    "identifier": "texts that are all distinct, so they identify rows",  # of a target
    "text": "too many texts; name it in categories if it is one",
    "mixed": "numbers and texts; name texts that stand for a gap in gaps, or the column in categories, or "
    "in limits for such as <5",
    "notation": "numbers in another notation than 1.5 (1,5 where the file has decimal commas); write them so, or "
    "name the column in categories",
}
LISTED, SHORT = 6, 20  # texts that may stand for a gap, and characters of one


def canonical(text: str) -> str:
    """Canonical form for matching: 1, 1.0, 01 and +1 are equal, and TRUE and True; other texts stay as written."""
    if match := DECIMAL.fullmatch(text):
        whole, part = match[2].lstrip("0") or "0", (match[3] or "").rstrip("0")
        number = f"{whole}.{part}" if part else whole
        return f"-{number}" if match[1] == "-" and number != "0" else number
    return text.lower() if text.lower() in ("true", "false") else text


def spelt(texts: Sequence[str]) -> list[str]:
    """One of the texts that match, the shortest, then the first in order; by size for numbers, else by the alphabet."""
    return sorted(matched(texts), key=_order)


def matched(texts: Sequence[str], numbers: np.ndarray | None = None) -> list[str]:
    """`spelt` in no order; `numbers` are those of the texts, if known."""
    numbers = numbers_of(texts) if numbers is None else numbers
    # a decimal with a number of its own matches no other text
    if len(set(numbers.tolist())) == len(texts) and not np.isnan(numbers).any():
        return [*texts]
    _, at, count = np.unique(numbers, return_inverse=True, return_counts=True)
    spelling: dict[str, str] = {}
    alone = (count[at] == 1).tolist()
    for text in sorted((t for t, one in zip(texts, alone, strict=True) if not one), key=lambda t: (len(t), t)):
        spelling.setdefault(canonical(text), text)
    return [*(t for t, one in zip(texts, alone, strict=True) if one), *spelling.values()]


def numbers_of(texts: Sequence[str]) -> np.ndarray:
    """[N] the finite numbers of texts, NaN for what is none, and for codes: whole numbers too long for a float."""
    values = floats(texts)
    if values is None:
        values = np.array([math.nan if (v := number(t)) is None else v for t in texts])
    for k in np.flatnonzero(np.abs(values) >= LARGEST).tolist():
        values[k] = math.nan if WHOLE.fullmatch(texts[k]) else values[k]
    return np.where(np.isfinite(values), values, np.nan)


def places(values: Sequence[str]) -> dict[str, int]:
    """Position among `values` of each text and of each canonical form."""
    return {canonical(v): k for k, v in enumerate(values)} | {v: k for k, v in enumerate(values)}


def in_order(texts: Iterable[str], orders: Iterable[Sequence[str]]) -> tuple[list[str], bool]:
    """(texts in the order that some data sets give them, whether these agree); else by size, or by the alphabet."""
    ranks = [{canonical(v): k for k, v in enumerate(order)} for order in orders]
    longest = max(ranks, key=len, default={})
    keys = [*map(canonical, texts := [*texts])]
    others = [[longest.get(t, -1) for t in rank] for rank in ranks]
    if ranks and {*keys} <= {*longest} and all(at == sorted(at) for at in others):
        return sorted(texts, key=lambda t: longest[canonical(t)]), True
    return sorted(texts, key=_order), not ranks


class Texts:
    """The distinct cells of a column: `all` [K], in order of first rows, and `at` [N], each row's index in it."""

    def __init__(self, cells: Sequence[str], comma: bool):
        self.comma, head = comma, cells[:HEAD]
        if len(set(head)) == len(head) and (len(head) == len(cells) or len(set(cells)) == len(cells)):
            self.all, self.at = [*cells], np.arange(len(cells))
        else:
            place = defaultdict[str, int]()
            place.default_factory = place.__len__
            self.at = np.fromiter(map(place.__getitem__, cells), np.int64, len(cells))
            self.all = list(place)

    @cached_property
    def numbers(self) -> np.ndarray:
        """[K] the finite number of each, NaN for what is none."""
        return numbers_of(["" if "." in t else t.replace(",", ".") for t in self.all] if self.comma else self.all)

    @cached_property
    def rows(self) -> np.ndarray:
        """[K] how many rows hold each."""
        return np.bincount(self.at, minlength=len(self.all))

    @cached_property
    def odd(self) -> np.ndarray:
        """[K] mask of the texts that are no finite number."""
        return np.isnan(self.numbers)

    @cached_property
    def sized(self) -> tuple[np.ndarray, np.ndarray]:
        """([S] its distinct finite numbers, ascending, [K] which of them each text is; S for one that is none)."""
        order = np.argsort(self.numbers)
        ordered = self.numbers[order]
        new = np.ones(len(order), dtype=bool)
        new[1:] = ordered[1:] > ordered[:-1]
        at = np.empty(len(order), dtype=np.int64)
        at[order] = np.cumsum(new) - 1
        return ordered[new & ~self.odd[order]], at

    def plain(self, text: str) -> str:
        """A text, its decimal comma as a point."""
        return text.replace(",", ".") if self.comma and COMMA.fullmatch(text) else text

    def key(self, text: str) -> str:
        """Form in which a text is matched."""
        return text if self.comma and "." in text else canonical(self.plain(text))

    def written(self, value: float) -> str:
        """A number as a cell of this file."""
        return cell(value, self.comma)

    def missing(self, gaps: Collection[str], least: int = 1) -> np.ndarray:
        """[K] mask of the texts that stand for a missing value; `gaps` adds texts that at least `least` rows hold."""
        if not gaps and not self.odd.any():
            return self.odd
        there = {*gaps, *map(canonical, gaps)}
        gone = self.odd.copy()
        if gaps:  # which a number can only match that is the same
            gone |= np.isin(self.numbers, [*numbers_of([*gaps]), *Texts([*gaps], self.comma).numbers])
        for k in gone.nonzero()[0].tolist():
            text = self.all[k]
            listed = self.rows[k] >= least and (text in there or (len(there) and self.key(text) in there))
            gone[k] = listed or text.lower() in GAPS
        return gone


@dataclass(frozen=True, eq=False)
class Sheet:
    """One site's file: columns of text cells, without blanks around them."""

    where: str  # the file's name in errors
    lines: list[int]  # [N] the line of each row
    columns: dict[str, list[str]]
    delimiter: str = ","
    dropped: int = 0  # rows without a target, left out
    removed: int = 0  # rows that drop-rows left out
    client: str = ""  # the client's name, where it is not the file's
    least: int = 1  # errors name no text of a gap or repair that fewer rows hold
    # orders of values that columns bring along, as an ordered Categorical does
    orders: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    cache: dict[str, Texts] = field(default_factory=dict[str, Texts], init=False, repr=False)

    @property
    def name(self) -> str:
        """The client's name, or else the file's without its ending."""
        return self.client or nfc(Path(self.where).stem)

    @property
    def folder(self) -> Path:
        """The folder that files in its cells are named from."""
        place = Path(self.where)
        return place if place.is_dir() else place.parent

    def at(self, row: int, column: str) -> str:
        """A place in the file, as errors name it."""
        return f"{self.where}, line {self.lines[row]}, column {column!r}"

    def having(self, columns: Mapping[str, list[str]]) -> "Sheet":
        """The same with some columns changed, or further ones before the last; cells are read as before."""
        names, new = [*self.columns], [name for name in columns if name not in self.columns]
        names = [*names[:-1], *new, *names[-1:]]
        orders = {name: order for name, order in self.orders.items() if name not in columns}
        sheet = replace(
            self, columns={n: columns[n] if n in columns else self.columns[n] for n in names}, orders=orders
        )
        sheet.__dict__["comma"] = self.comma
        sheet.cache.update({name: texts for name, texts in self.cache.items() if name not in columns})
        return sheet

    def lacks(self, column: str, role: str = "") -> str:
        """The line that names a column which is not there."""
        hint = f"{closest(column, self.columns)}; it has {', '.join(self.columns)}"
        return f"{self.where}: no column {column!r}{role}{hint}"

    def need(self, column: str, role: str = "") -> None:
        """Raise DataError unless the column is there."""
        if column not in self.columns:
            raise DataError(self.lacks(column, role), column)

    @cached_property
    def comma(self) -> bool:
        """True for a file of decimal commas, 1,5: then 1.234 is no number in it, for it may be a thousand."""
        return self.delimiter != "," and any(
            COMMA.fullmatch(c) and c[-1] != "," for cells in self.columns.values() for c in set(cells) if "," in c
        )

    def texts(self, column: str) -> Texts:
        """The distinct cells of a column."""
        if column not in self.cache:
            self.cache[column] = Texts(self.columns[column], self.comma)
        return self.cache[column]

    def numbers(self, column: str) -> np.ndarray:
        """[N] the numbers of a column; NaN for what is no finite one."""
        texts = self.texts(column)
        return texts.numbers[texts.at]

    def positions(self, column: str, values: Sequence[str]) -> np.ndarray:
        """[N] where the cells of a column stand among values; -1 for what is none of them."""
        texts, at = self.texts(column), places(values)
        return np.array([at.get(t, at.get(texts.key(t), -1)) for t in texts.all], dtype=np.int64)[texts.at]

    def missing(self, column: str, gaps: Collection[str] = ()) -> np.ndarray:
        """[N] mask of the cells of a column that stand for a missing value; `gaps` are further texts that do."""
        texts = self.texts(column)
        return texts.missing(gaps, self.least)[texts.at]

    def only(self, rows: np.ndarray) -> "Sheet":
        """Some of its rows, their cells read as in the whole."""
        at = rows.tolist()
        sheet = replace(
            self,
            lines=[self.lines[k] for k in at],
            columns={n: [cells[k] for k in at] for n, cells in self.columns.items()},
        )
        sheet.__dict__["comma"] = self.comma
        return sheet


def sheet_of(
    frame: Any, where: str = "rows", client: str = "", unread: Collection[str] = (), files: str | None = None
) -> Sheet:
    """The rows of a DataFrame, or of a Hugging Face data set, as they would be read from a file.

    Columns in `unread` may hold lists; they are not used.
    """
    import pandas as pd  # here, because it is slow to import

    frame = _in_pandas(frame)
    if not isinstance(frame, pd.DataFrame):
        frame = sibling("polyfed_tables.readers", f"{where}: a {type(frame).__name__}").frame(frame, where)
    names = [nfc(str(c).strip()) for c in frame.columns]
    if len(set(names)) < len(names) or "" in names:
        found = "" if "" in names else next(n for n in names if names.count(n) > 1)
        raise DataError(f"{where}: two columns are called {found!r}" if found else f"{where}: a column has no name")
    text: dict[str, list[str]] = {}
    orders: dict[str, tuple[str, ...]] = {}
    for k, name in enumerate(names):
        column = frame.iloc[:, k]
        short = next((t for t in ("float16", "float32") if str(column.dtype).lower().startswith(t)), None)
        cells = [*column.to_numpy(short, na_value=np.nan)] if short else column.tolist()  # these have fewer digits
        if (row := next((i for i, v in enumerate(cells) if hasattr(v, "__len__") and not isinstance(v, str)), -1)) >= 0:
            if name not in unread:
                problem = f"found a {type(cells[row]).__name__}, expected a number, a text or a gap"
                raise DataError(
                    f"{where}, line {row + 2}, column {name!r}: {problem}; drop the column, or spread it", name
                )
            cells = [""] * len(cells)
        text[name] = ["" if pd.isna(v) else _text(v) for v in cells]
        if all(t == "" or t.endswith(MIDNIGHT) for t in text[name]) and any(
            isinstance(v, datetime.date) for v in cells
        ):
            text[name] = [t.removesuffix(MIDNIGHT) for t in text[name]]
        if name != files:
            text[name] = [*map(nfc, text[name])]
        if isinstance(column.dtype, pd.CategoricalDtype) and column.dtype.ordered:
            orders[name] = tuple(nfc(_text(v)) for v in column.dtype.categories)
    if all(isinstance(c, str) for c in frame.columns) and headless(names, [*text.values()]):
        raise DataError(f"{where}: found a row of data in the names of its columns, expected names")
    return Sheet(where, list(range(2, len(frame) + 2)), text, client=client, orders=orders)


def _in_pandas(data: Any) -> Any:
    """A data set that has `to_pandas` and `features` as a DataFrame, its classes by name in their order."""
    features = getattr(data, "features", None)
    if not (is_mapping(features) and callable(getattr(data, "to_pandas", None))):
        return data
    import pandas as pd  # here, because it is slow to import

    frame = data.to_pandas()
    for name, feature in features.items():
        labels = getattr(feature, "names", None)
        if labels is not None:  # positions among them; a row without a label has -1
            frame = frame.assign(**{name: pd.Categorical.from_codes([*frame[name]], labels, ordered=True)})
    return frame


def _text(value: object) -> str:
    """A cell as it is written; of a float beyond whole numbers no more digits than it has."""
    if not isinstance(value, float):
        return str(value).strip()
    return np.format_float_positional(value, trim="-") if abs(value) < LARGEST else float.__repr__(value)


def cell(value: float, comma: bool) -> str:
    """A number as a cell of a file, perhaps of decimal commas."""
    return _text(value).replace(".", ",") if comma else _text(value)


class Seen(Cells):
    """Cells that were read here."""

    range: tuple[float, float]
    odd: tuple[str, str] | None = None  # (where, cell) of the first that is no number
    empty: tuple[str, str] | None = None  # the same of the first gap


@dataclass(frozen=True, eq=False)
class Column:
    """Contents of a column over all sites."""

    name: str
    # number, binary (two numbers), category, constant, empty, date, identifier, text (too many for a category),
    # notation (texts that look like numbers) or mixed (numbers and texts)
    kind: str
    texts: Collection[str]  # one of each group that matches
    declared: Sequence[str] | None  # the values that it may have, where settings list them
    range: tuple[float, float] | None
    gaps: int
    cells: int
    unmatched: int  # cells that match no declared value
    respelt: int  # texts that match another one of their site
    whole: bool  # all cells are whole numbers; 1.0 is one
    odd: tuple[str, str] | None  # (where, cell) of the first that is no number
    gap: tuple[str, str] | None  # the same of the first gap
    lacking: tuple[Sheet, ...]  # sites without the column
    numbers_rows: bool  # it numbers or names the rows of every site
    order: tuple[str, ...] | None  # of its values, from the data; empty where sites disagree

    @cached_property
    def values(self) -> tuple[str, ...]:
        """Its values in their order: as declared, as data sets have it, by size for numbers, else by the alphabet."""
        if self.declared is not None:
            return tuple(self.declared)
        return self.order or tuple(sorted(self.texts, key=_order))

    @property
    def hint(self) -> str:
        """The contents of an unusable column and the remedy."""
        odd = [*compress(self.texts, np.isnan(numbers_of([*self.texts])))] if self.kind == "mixed" else []
        if odd and {t.lower() for t in odd} <= {"true", "false"}:
            return "numbers and true or false; write 1 and 0 everywhere, or repair one site's in columns.site"
        if not 0 < len(odd) <= LISTED or any(LIMIT.fullmatch(t) or len(t) > SHORT for t in odd):
            return HINTS[self.kind]
        listed = ", ".join(f'"{t}"' for t in odd)
        return f"{HINTS[self.kind]} (here gaps = [{listed}])"

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


def cells_of(sheet: Sheet, name: str, columns: Columns) -> Seen:
    """Survey a column of one file."""
    column, cells, least = sheet.texts(name), sheet.columns[name], sheet.least
    missing, odd = column.missing(columns.gaps, least), column.odd
    whole, declared_values = not missing.any(), declared(columns, name)
    written = column.all if whole else [*compress(column.all, ~missing)]
    numbers, strange = column.numbers[~missing & ~odd], ~missing & odd
    texts = _texts_of(column, written, missing)

    def first(which: np.ndarray, cut: int | None) -> tuple[str, str] | None:
        row = cells.index(column.all[int(which.argmax())]) if which.any() else None
        return None if row is None else (sheet.at(row, name), cells[row][:cut])

    def held(fits: Callable[[str], object]) -> bool:
        """True if all texts fit, except those of too few rows for settings to ask for."""
        if least == 1:
            return all(map(fits, written))
        rows = column.rows[~missing].tolist()
        return sum(n for t, n in zip(written, rows, strict=True) if not fits(t)) < least

    frequent = (~missing & (column.rows >= least))[column.at]
    unmatched = frequent & (sheet.positions(name, declared_values) < 0) if declared_values else ()
    return Seen(
        cells=len(cells),
        gaps=(gaps := 0 if whole else int(column.rows[missing].sum())),
        numbers=len(cells) if whole and not odd.any() else int(column.rows[~missing & ~odd].sum()),
        texts=texts,
        range=(float(numbers.min()), float(numbers.max())) if len(numbers) else (math.inf, -math.inf),
        whole=int(column.rows[~missing & ~((np.mod(column.numbers, 1) == 0) & (abs(column.numbers) < LARGEST))].sum())
        < least,
        dates=held(lambda t: DATE.fullmatch(t) or _compact(t)),
        distinct=(distinct := len(cells) - gaps - len(texts) < least),
        numbered=distinct and _numbered(name, numbers, texts, least),
        notation=int(column.rows[strange].sum()) >= least
        and _notation([*compress(column.all, strange)], len(numbers) > 0),
        unmatched=int(np.sum(unmatched)),
        respelt=0 if all(t in (declared_values or ()) for t in written) else len(written) - len(texts),
        odd=first(strange, 40),
        empty=first(missing, None),
    )


def _texts_of(cells: Texts, written: list[str], missing: np.ndarray) -> list[str]:
    """Texts that differ in more than how a number is written, of those that are no gaps."""
    if cells.comma:
        return matched([*dict.fromkeys(map(cells.plain, written))])
    if not missing.any() and len(cells.sized[0]) == len(written):
        return written
    return matched(written, cells.numbers[~missing])


def _numbered(name: str, numbers: np.ndarray, texts: Sequence[str], least: int) -> bool:
    """True for distinct whole numbers that number rows; a measurement would hardly be without ties."""
    ends = np.sort(numbers)[least - 1 : len(numbers) - least + 1]
    if len(ends) < 2 or (numbers != np.round(numbers)).sum() >= least:
        return False
    n, wide = len(ends), float(ends[-1] - ends[0]) + 1
    # n values drawn from R = `wide` numbers have no ties with a chance of (1 - 1/R) ... (1 - (n-1)/R) at most
    if np.log1p(-np.arange(n) / max(wide, n)).sum() < math.log(UNTIED):
        return True
    # the range is too wide for ties: codes have many rows, and equal lengths, a huge range or a name that says so
    alike = wide > WIDE and len(texts) - max(Counter(map(len, texts)).values()) < least
    return len(texts) >= MANY and (alike or wide > CODES or bool(NAMED.search(name)))


def _compact(text: str) -> bool:
    """True for a date of 1900 to 2099 written as 20240314."""
    if not re.fullmatch(r"(19|20)[0-9]{6}", text):
        return False
    try:
        return bool(datetime.date(int(text[:4]), int(text[4:6]), int(text[6:])))
    except ValueError:
        return False


def _notation(texts: Collection[str], mixed: bool = False) -> bool:
    """True where more than half of the texts look like numbers; among numbers (`mixed`), <5 is a limit."""
    like = 0
    for text in texts:
        bare = UNIT.sub("", text).strip("()+-−– ") if mixed else text
        like += bool(NOTATION.fullmatch(bare)) and not ((mixed and LIMIT.fullmatch(text)) or WHOLE.fullmatch(text))
    return 2 * like > len(texts)


def merged(name: str, parts: Sequence[Seen], sheets: Sequence[Sheet], columns: Columns) -> Column:
    """A column over all sites, from its contents in each file that has it."""
    cells, gaps, numeric, unmatched, respelt = (
        sum(getattr(p, which) for p in parts) for which in ("cells", "gaps", "numbers", "unmatched", "respelt")
    )
    there, texts = cells - gaps, _together([p.texts or () for p in parts])
    low, high = min(p.range[0] for p in parts), max(p.range[1] for p in parts)
    many = 2 * FEW + 1 if any(p.texts is None for p in parts) else len(texts)
    if not there:
        kind = "empty"
    elif name in columns.categories:
        kind = "category"
    elif all(p.dates for p in parts) and name not in columns.numbers and (numeric < there or low < high):
        kind = "date"
    elif numeric == there:
        few = len({number(t) for t in texts}) if many <= 2 * FEW else many
        kind = "constant" if low == high and not gaps else "binary" if few == 2 else "number"
    elif numeric or name in columns.numbers:
        odds = [*compress(texts, np.isnan(numbers_of(texts)))]
        silent = any(p.texts is None and p.notation for p in parts)
        kind = "notation" if silent or _notation(odds, mixed=True) else "mixed"
    elif many == 1 and not gaps:
        kind = "constant"
    elif _notation(texts) or any(p.texts is None and p.notation for p in parts):
        kind = "notation"
    elif many == 1:
        kind = "category"
    elif all(p.distinct for p in parts) and (many == there or any(p.there >= MANY for p in parts)):
        kind = "identifier"
    else:
        kind = "category" if many <= FEW else "text"
    telling = [p for p in parts if p.notation] if kind == "notation" else []
    odd, gap = next((p.odd for p in (*telling, *parts) if p.odd), None), next((p.empty for p in parts if p.empty), None)
    lacking = tuple(s for s in sheets if name not in s.columns)
    whole, spread = all(p.whole for p in parts), (low, high) if numeric else None
    values, orders = declared(columns, name), [s.orders[name] for s in sheets if name in s.orders]
    ordered, agreed = in_order(matched([*dict.fromkeys((*texts, *chain.from_iterable(orders)))]), orders)
    order, counts = (tuple(ordered) if agreed else ()) if orders else None, (gaps, cells, unmatched, respelt)
    codes = kind == "number" and name not in columns.numbers and any(p.numbered for p in parts)
    rows = kind == "identifier" or (codes and all(p.distinct for p in parts))
    return Column(name, kind, texts, values, spread, *counts, whole, odd, gap, lacking, rows, order)


def _together(texts: Sequence[Sequence[str]]) -> Sequence[str]:
    return texts[0] if len(texts) == 1 else matched([*dict.fromkeys(chain.from_iterable(texts))])


def _order(text: str) -> tuple[float, str]:
    """Numbers by their size, texts by the alphabet."""
    value = number(text)
    return (value if value is not None and np.isfinite(value) else math.inf, text)
