"""Rows: those that repeat a patient or a whole row, and those that two sites share."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import numpy as np

from polyfed.base.columns import Columns
from polyfed.base.part import Flag, Part
from polyfed.data.csv_files import FEW, Sheet

REPEATED = 0.02  # rows that repeat
COPIED, SAME_FILE = 3, 5  # rows, and how often as many as like sites share; different rows of a file that is copied


def repeated(name: str, at: Mapping[str, Part]) -> Iterator[Flag]:
    for site, p in at.items():
        if p.repeats >= max(2, REPEATED * p.there) and p.distinct > FEW:
            text = f"{p.distinct} different values of {name} in {p.there} rows, so rows repeat patients"
            yield Flag(site, name, text, {"group": name})


def doubled(sheets: Sequence[Sheet], columns: Columns) -> list[Flag]:
    """Files that hold rows twice."""
    repeats = {s.name: (_doubles(s, columns), len(s.lines)) for s in sheets} if columns.group is None else {}
    return [
        Flag(
            site,
            None,
            f"{n} of {rows} rows repeat another row in every column; drop them, or name the patient as group",
        )
        for site, (n, rows) in repeats.items()
        if n >= max(3, REPEATED * rows)
    ]


def _doubles(sheet: Sheet, columns: Columns) -> int:
    """Rows that repeat another one in every column, where two columns or more hold many numbers."""
    used = [n for n in sheet.columns if n not in columns.apart]
    fine = [n for n in used if len(sheet.texts(n).all) > FEW and not np.isnan(sheet.texts(n).numbers).all()]
    if len(fine) < 2 or any(len(sheet.texts(n).all) == len(sheet.lines) for n in used):
        return 0
    codes = np.stack([sheet.texts(n).at for n in used], 1)
    return len(codes) - len(np.unique(codes, axis=0))


def copied(sheets: Sequence[Sheet], used: Sequence[str], gaps: Sequence[str]) -> list[Flag]:
    """Pairs of sites that share more rows than like ones do, by the rows that are alike within each."""
    sizes, n_sites = np.array([len(s.lines) for s in sheets]), len(sheets)
    ids, site = np.zeros(sizes.sum(), dtype=np.int64), np.repeat(np.arange(n_sites), sizes)
    for codes in (coded(sheets, name, gaps) for name in used):
        ids = np.unique(ids * (codes.max() + 1) + codes, return_inverse=True)[1]
    at, rows = np.unique(ids * n_sites + site, return_counts=True)
    ids, site = np.divmod(at, n_sites)
    twins, kinds = np.bincount(site, rows * (rows - 1) / 2, n_sites), np.bincount(site, minlength=n_sites)
    shared = np.bincount(ids)[ids] > 1
    each = np.zeros((len(np.unique(ids[shared])), n_sites), dtype=np.int64)
    each[np.unique(ids[shared], return_inverse=True)[1], site[shared]] = rows[shared]
    flags: list[Flag] = []
    for a, b in combinations(range(n_sites), 2):
        k, n, m = int(np.minimum(each[:, a], each[:, b]).sum()), int(sizes[a]), int(sizes[b])
        like = n * m * (twins[a] + twins[b] + COPIED) / max(n * (n - 1) / 2 + m * (m - 1) / 2, 1)
        whole = k == n == m and kinds[b] >= SAME_FILE
        if whole or k >= max(COPIED, REPEATED * min(n, m), COPIED * like):
            then = f"the same {'file' if whole else 'patients'} twice"
            flags.append(Flag(sheets[b].name, None, f"{k} of {m} rows are at {sheets[a].name} too: {then}?"))
    return flags


def coded(sheets: Sequence[Sheet], name: str, gaps: Sequence[str]) -> np.ndarray:
    """[N] codes of a column's cells, one after the other site, by which cells are matched; 0 for a gap."""
    code_of, parts = dict[float | str, int](), list[np.ndarray]()
    for t in (s.texts(name) for s in sheets):
        keys = [v if v == v else t.key(text) for v, text in zip(t.numbers.tolist(), t.all, strict=True)]  # NaN: a text
        codes = np.array([code_of.setdefault(key, 1 + len(code_of)) for key in keys])
        parts.append(np.where(t.missing(gaps), 0, codes)[t.at])
    return np.concatenate(parts)
