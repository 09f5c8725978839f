"""A site's column in counts and quantiles: what the audit is told of it, and what of that leaves the site."""

import re
from collections.abc import Mapping, Sequence

import numpy as np

from polyfed.base.columns import Columns
from polyfed.base.part import Part
from polyfed.data.csv_files import FEW, NAMED, Sheet
from polyfed_audit.bounds import beyond

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
AT = np.array(QUANTILES)
LEAST = 8  # values of a site from which anything is said of their size
PILED = 0.05  # rows at one end that make it a limit
CODED = 8  # different numbers of a column at most that may be codes
BELOW = (-1, -7, -8, -9, -77, -88, -99, -888, -999, -9999)
ABOVE = (9, 77, 88, 99, 777, 888, 999, 7777, 8888, 9999, 99999)
SENTINELS = np.array((*BELOW, 0, *ABOVE))
NUMBERED = re.compile(r"[A-Za-z]{0,4}[-_./]?\d+")


def parts_of(sheets: Sequence[Sheet], columns: Columns) -> dict[str, dict[str, Part]]:
    """Every column at every site that has it."""
    names, of = dict.fromkeys(name for sheet in sheets for name in sheet.columns), {s.name: s for s in sheets}
    return {n: {site: described(s, n, columns) for site, s in of.items() if n in s.columns} for n in names}


def told(sheet: Sheet, columns: Columns, target: str = "") -> dict[str, Part]:
    """The columns of a site's file, but for those that are dropped; numbers also in each class of the target."""
    left = [name for name in sheet.columns if name not in (*columns.drop, columns.weights)]
    if columns.raw is not None:
        left = [name for name in left if name in columns.outcome]
    classes = _classes(sheet, target, columns) if target in left else {}
    return {
        name: p.model_copy(update={"by": _by_class(sheet, name, columns, classes)})
        if p.quantiles and name != target
        else p
        for name, p in ((name, described(sheet, name, columns)) for name in left)
    }


def _classes(sheet: Sheet, target: str, columns: Columns) -> dict[str, np.ndarray]:
    """The rows of each class of a target; of one that is a number those below its median, and those above it."""
    cells = sheet.texts(target)
    there = ~cells.missing(columns.gaps)
    texts = {cells.key(cells.all[k]) for k in np.flatnonzero(there)}
    if len(texts) <= FEW:
        return {text: sheet.positions(target, [text]) == 0 for text in texts}
    if cells.odd[there].any():
        return {}
    v = np.where(there[cells.at], sheet.numbers(target), np.nan)
    return {"low": v < np.nanmedian(v), "high": v > np.nanmedian(v)}


def _by_class(
    sheet: Sheet, name: str, columns: Columns, classes: Mapping[str, np.ndarray]
) -> dict[str, list[float]] | None:
    """Quartiles in each class, and its rows."""
    v = np.where(sheet.missing(name, columns.gaps), np.nan, sheet.numbers(name))
    some = {text: np.sort(v[rows & np.isfinite(v)]) for text, rows in classes.items()}
    at = {t: [float(u[int(np.ceil(q * len(u))) - 1]) for q in AT[1:4]] + [len(u)] for t, u in some.items() if len(u)}
    return at if len({*v[np.isfinite(v)].tolist()}) > 2 else None


def described(sheet: Sheet, name: str, columns: Columns) -> Part:
    """A column of a site's file in counts and quantiles."""
    cells = sheet.texts(name)
    missing = cells.missing(columns.gaps)
    left = ~missing
    there = cells.rows[left]
    numeric = len(there) > 0 and not (cells.odd & left).any()
    size, at = cells.sized
    if numeric and len(there) < len(left):
        size, at = np.unique(cells.numbers[left], return_inverse=True)
    counts: dict[str, int] = {}
    if not numeric or len(size) <= FEW:  # reading every text of a column of numbers would take most of the time
        for k in left.nonzero()[0].tolist():
            text = cells.key(cells.all[k])
            counts[text] = counts.get(text, 0) + int(cells.rows[k])
    distinct = len(size) if numeric else len(counts)
    looks = bool(NAMED.search(name)) or (not numeric and distinct > FEW and all(map(NUMBERED.fullmatch, counts)))
    gaps, values = len(sheet.lines) - int(there.sum()), counts if distinct <= FEW else None
    repeats = len(sheet.lines) - gaps - distinct if looks and name not in columns.outcome else 0
    if not numeric:
        return Part(rows=len(sheet.lines), gaps=gaps, distinct=distinct, values=values, repeats=repeats)
    of = np.bincount(at, there).astype(int)
    q = size[of.cumsum().searchsorted(AT * of.sum())].tolist()  # the least with so many up to it
    low, high = _piled_at(size, of) if distinct > FEW else (None, None)
    return Part(
        rows=len(sheet.lines), gaps=gaps, distinct=distinct, values=values, repeats=repeats,
        quantiles=q, odd=(odd := _sentinels(size, of)) or None, low=low, high=high,
        beyond=beyond(name, size, of, odd) or None,
    )  # fmt: skip


def _piled_at(size: np.ndarray, rows: np.ndarray) -> list[list[float] | None]:
    """The least and the largest number with their rows, each where no other number has nearly as many."""
    least = max(5, PILED * rows.sum())
    if max(rows[0], rows[-1]) < least:
        return [None, None]
    ends = ((size[0], rows[0], rows[1:].max()), (size[-1], rows[-1], rows[:-1].max()))
    return [[float(v), float(n)] if n >= max(least, 1.5 * other) else None for v, n, other in ends]


def _sentinels(size: np.ndarray, rows: np.ndarray) -> dict[str, int]:
    """Rows of each number that lies far from all others, as codes of gaps do; `size` [K] is ascending."""
    if rows.max() < 2:
        return {}
    at = np.minimum(size.searchsorted(SENTINELS), len(size) - 1)
    found_at = ((size[at] == SENTINELS) & (rows[at] > 1)).nonzero()[0].tolist()
    there = {int(SENTINELS[k]): int(rows[at[k]]) for k in found_at}
    if not there:
        return {}
    rest = size[~np.isin(size, BELOW)]
    codes: dict[str, int] = {}
    if len(rest) and rest[0] >= 0:
        codes |= {str(s): there[s] for s in BELOW if s in there and (s < -1 or rest[0] >= 1)}
    for s in (0, *ABOVE):
        others, often = size[size != s], rows[size != s]
        if s not in there or often.sum() < 2 * LEAST or (s and others[-1] > s):
            continue
        low, middle, high = others[np.searchsorted(often.cumsum(), np.array(QUANTILES[1:4]) * often.sum())]
        if s == 0:
            far = others[0] > max(0.3 * middle, high - low) and len(others) > CODED
            alone = far and there[s] >= PILED * rows.sum()
        elif len(others) <= CODED:
            alone = s >= 2 * others[-1] and s - others[-1] > 2
        else:
            alone = s > 1.5 * others[-1] and s > others[-1] + 3 * (high - low)
        codes |= {str(s): there[s]} if alone else {}
    return codes


def withheld(part: Part, least: int, quantiles: bool) -> Part:
    """The part of a column's description that leaves a site: nothing about fewer than `least` rows."""

    def often(rows: Mapping[str, int] | None) -> dict[str, int] | None:
        return {text: n for text, n in rows.items() if n >= least} if rows is not None else None

    values, q = often(part.values), part.quantiles
    if values is not None and 0 < part.there - sum(values.values()) < least:
        values = None  # the rest would say how few they are
    if q is not None:
        tails = part.there * QUANTILES[0] >= least
        q = [float(f"{v:.2g}") for v in (q if tails else [q[1], *q[1:4], q[3]])]
    keep = quantiles and part.there * QUANTILES[1] >= least
    changed = {"values": values, "quantiles": q if keep else None, "odd": often(part.odd) or None}
    ends = {
        key: end for key in ("low", "high") if (end := getattr(part, key)) is not None and quantiles and end[1] >= least
    }
    least_of = {
        t: [float(f"{v:.2g}") for v in of[:3]] for t, of in (part.by or {}).items() if of[3] * QUANTILES[1] >= least
    }
    changed |= {"beyond": often(part.beyond) or None, "by": (least_of or None) if keep else None}
    few = {"repeats": part.repeats if part.repeats >= least else 0, "low": ends.get("low"), "high": ends.get("high")}
    return part.model_copy(update=changed | few)
