"""Columns that a site calls something else, matched by name and by content."""

import difflib
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np

from polyfed.base.columns import MISSING, RENAME
from polyfed.base.errors import Fault
from polyfed.base.part import Part, pasted
from polyfed.data.csv_files import LIMIT, LISTED, Column
from polyfed.data.readers import number
from polyfed.data.tables import Table
from polyfed_audit.parts import CODED, LEAST

KNOWN: WeakKeyDictionary[Table, dict[tuple[str, str], tuple[str, str]]] = WeakKeyDictionary()  # `renames` of tables
SPELT, FAR, SHARED = 0.6, 0.5, 0.7  # likeness of names; quartiles apart, in their range; least share of like values


def renames(table: Table) -> dict[tuple[str, str], tuple[str, str]]:
    """(other name, why) of a column that a site lacks, by site and column; no site that has the column has the other.

    Of two names the one that more sites have is kept, then the first file's.
    """
    having = {name: [s for s in table.sheets if name in s.columns] for name in table.survey}
    order = sorted(having, key=lambda name: -len(having[name]))  # stable: the first file's come first
    found: dict[tuple[str, str], tuple[str, str]] = {}
    for sheet in table.sheets:
        lacks = [n for n in order if n not in sheet.columns and n not in table.columns.apart]
        others = [n for n in sheet.columns if n not in table.columns.drop]
        pairs = [
            (score, lost, other, why)
            for lost, other in product(lacks, others)
            if order.index(lost) < order.index(other) and not any(other in s.columns for s in having[lost])
            for score, why in _alike(table, sheet.name, lost, other)
        ]
        for _, lost, other, why in sorted(pairs, key=lambda pair: -pair[0]):
            if (sheet.name, lost) not in found and other not in {
                o for (s, _), (o, _) in found.items() if s == sheet.name
            }:
                found[sheet.name, lost] = (other, why)
    return found


def lacking(table: Table, c: Column, role: str = "") -> Iterator[Fault]:
    """A column that sites lack: those that have it under another name, then the others."""
    if table not in KNOWN:
        KNOWN[table] = renames(table)
    names = KNOWN[table]
    has, keeps = Path(next(s for s in table.sheets if c.name in s.columns).where).name, table.sheets
    for s in c.lacking:
        if other := names.get((s.name, c.name)):
            near = f" (did you mean {other[0]!r}?), which {has} has{other[1]}"
            repair = {"site": {s.name: {RENAME: {other[0]: c.name}}}}
            yield Fault(pasted(f"{Path(s.where).name}: no column {c.name!r}{role}{near}", repair), repair)
    rest = [s for s in c.lacking if (s.name, c.name) not in names]
    sources = {(site, other) for (site, _), (other, _) in names.items()}
    if role:
        yield from (Fault(s.lacks(c.name, role)) for s in rest)
    elif rest and not all((s.name, c.name) in sources for s in keeps if c.name in s.columns):
        missing = {"site": {s.name: {MISSING: [c.name]} for s in rest}}
        repair = missing if 2 * len(rest) <= len(keeps) else {"drop": [c.name]}
        files, then = ", ".join(Path(s.where).name for s in rest), "add it there (empty cells are gaps), or drop it"
        yield Fault(pasted(f"{files}: no column {c.name!r}, which {has} has; {then}", repair), repair)


def usable(c: Column) -> dict[str, list[str]]:
    """What makes a column usable: its few texts among numbers as gaps or as limits of detection, or without it."""
    odd = [t for t in c.texts if number(t) is None] if c.kind == "mixed" else []
    if odd and all(map(LIMIT.fullmatch, odd)):
        return {"limits": [c.name]}
    return {"gaps": odd} if odd and len(odd) <= LISTED and 4 * len(odd) < len(c.texts) else {"drop": [c.name]}


def _alike(table: Table, site: str, lost: str, other: str) -> Iterator[tuple[float, str]]:
    """(how much speaks for it, in words) where a site's column may be the one that it lacks."""
    named = _named(lost, other)
    mine, theirs = table.audit.parts.get(other, {}).get(site), [*table.audit.parts.get(lost, {}).values()]
    if mine is None or not theirs:  # at real sites, before they say what is in their columns
        yield from [(named, "")] if named >= SPELT else []
        return
    if (mine.quantiles is None) != (theirs[0].quantiles is None):
        return
    held, telling = _held(mine, theirs)
    if held and (telling or named >= SPELT):
        yield 1 + named, f": {mine.shown} there, {theirs[-1].shown} elsewhere"
    elif named >= SPELT:
        yield named, ""


def _named(a: str, b: str) -> float:
    """Likeness of two names: of letters in order, or one short for the other, as hb is for haemoglobin."""
    a, b = sorted((name.casefold().replace("_", " ") for name in (a, b)), key=len)
    rest = iter(b)
    short = len(a) > 1 and a[0] == b[0] and all(c in rest for c in a)
    return max(difflib.SequenceMatcher(None, a, b).ratio(), 0.9 * short)


def _held(mine: Part, theirs: list[Part]) -> tuple[bool, bool]:
    """Whether a column holds what others hold, and whether that tells: many numbers, or the same words."""
    q = [p.quantiles for p in theirs if p.quantiles is not None and p.there >= LEAST]
    if mine.quantiles is not None and mine.distinct > CODED and q and mine.there >= LEAST:
        middle = np.median(q, axis=0)
        apart = np.abs(np.array(mine.quantiles) - middle)[1:4]
        return bool(middle[3] > middle[1] and (apart < FAR * (middle[3] - middle[1])).all()), True
    if not mine.values or mine.there < LEAST:
        return False, False
    share = {t: n / mine.there for t, n in mine.values.items()}
    each = [sum(min(share.get(t, 0.0), n / max(p.there, 1)) for t, n in (p.values or {}).items()) for p in theirs]
    return max(each) >= SHARED, all(number(t) is None for t in share)
