"""The audit between sites: units, codes, sentinels, limits of detection, repeated patients and rates of the outcome."""

import json
import math
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from polyfed.base.columns import Columns
from polyfed.base.errors import few
from polyfed.base.part import Part, Parts
from polyfed.data.csv_files import FEW, NAMED, Column, Sheet
from polyfed.data.readers import number

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
AT = np.array(QUANTILES)
# Thresholds leave clean sites alone: tests/data/test_site_audit.py simulates how often they do not.
LEAST = 8  # values of a site from which anything is said of their size
FACTOR, DEVIATIONS, WIDTHS = 1.8, 5.0, 2.0  # least ratio of medians; its logarithm in errors, in widths of the column
SHARE, RARE = 0.2, 1e-4  # rows of values that no other site has, and the chance of that among like sites
PILED = 0.05  # rows at one end that make it a limit
ODDS = 20.0  # least odds ratio of an outcome
CODED = 8  # different numbers of a column at most that may be codes
REPEATED = 0.02  # rows that repeat
COPIED, SAME_FILE = 3, 5  # rows, and how often as many as like sites share; different rows of a file that is copied
ALONE = 0.99  # AUC of a column that tells the outcome alone
EVERY = "all sites"
BELOW = (-1, -7, -8, -9, -77, -88, -99, -888, -999, -9999)
ABOVE = (9, 77, 88, 99, 777, 888, 999, 7777, 8888, 9999, 99999)
SENTINELS = np.array((*BELOW, 0, *ABOVE))
NUMBERED = re.compile(r"[A-Za-z]{0,4}[-_./]?\d+")
SAME = (  # texts that mean the same
    {"m", "male", "man", "männlich", "mann", "homme", "masculin", "maschio", "hombre"},
    {"f", "female", "woman", "w", "weiblich", "frau", "femme", "féminin", "femmina", "mujer"},
    {"yes", "y", "ja", "j", "oui", "si", "true", "1", "positive", "pos", "positiv", "+"},
    {"no", "n", "nein", "non", "false", "0", "negative", "neg", "negativ"},
)


class Flag(NamedTuple):
    """A finding to look at; `column` is None where it is about whole rows."""

    site: str
    column: str | None
    text: str

    def __str__(self) -> str:
        return f"{self.site}: {self.text}"


class Units(NamedTuple):
    """Units in which one site's numbers are `factor` times another's; `of` lists parts of the names of such columns."""

    factor: float
    words: str
    of: tuple[str, ...]


UNITS = (
    Units(18.02, "mg/dl and mmol/l of glucose", ("gluc", "gluk", "glc", "sugar", "zucker")),
    Units(88.4, "µmol/l and mg/dl of creatinine", ("crea", "krea")),
    Units(38.67, "mg/dl and mmol/l of cholesterol", ("chol", "ldl", "hdl")),
    Units(88.57, "mg/dl and mmol/l of triglycerides", ("trig",)),
    Units(17.1, "µmol/l and mg/dl of bilirubin", ("bili",)),
    Units(7.501, "mmHg and kPa", ("press", "trestbps", "bp", "pco2", "po2")),
    Units(1 / 0.4536, "lb and kg", ("weight", "gewicht", "mass")),
    Units(2.54, "cm and inches", ("height", "waist", "length", "size", "grösse", "größe")),
    Units(100.0, "cm and m, or per cent and shares", ("height", "share", "fraction", "hba1c", "sat")),
    Units(10.0, "g/l and g/dl, or mm and cm", ()),
    Units(12.0, "months and years", ("age", "alter", "month", "duration", "year")),
    Units(365.25, "days and years", ("age", "alter", "day", "duration", "time", "survival")),
    Units(1000.0, "thousands and units, or g and kg", ()),
)


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
        quantiles=q, odd=_sentinels(size, of) or None, low=low, high=high,
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
    few = {"repeats": part.repeats if part.repeats >= least else 0, "low": ends.get("low"), "high": ends.get("high")}
    return part.model_copy(update=changed | few)


def doubles(sheet: Sheet, columns: Columns) -> int:
    """Rows that repeat another one in every column, where two columns or more hold many numbers."""
    used = [n for n in sheet.columns if n not in columns.apart]
    fine = [n for n in used if len(sheet.texts(n).all) > FEW and not np.isnan(sheet.texts(n).numbers).all()]
    if len(fine) < 2 or any(len(sheet.texts(n).all) == len(sheet.lines) for n in used):
        return 0
    codes = np.stack([sheet.texts(n).at for n in used], 1)
    return len(codes) - len(np.unique(codes, axis=0))


def parts_of(sheets: Sequence[Sheet], columns: Columns) -> dict[str, dict[str, Part]]:
    """Every column at every site that has it."""
    names, of = dict.fromkeys(name for sheet in sheets for name in sheet.columns), {s.name: s for s in sheets}
    return {n: {site: described(s, n, columns) for site, s in of.items() if n in s.columns} for n in names}


def flags(parts: Parts, columns: Columns, outcome: Sequence[str]) -> list[Flag]:
    """The differences between sites to look at before anything is trained."""
    raised: list[Flag] = []
    apart = columns.apart
    for name, at in parts.items():
        raised += [] if name == columns.group else _repeated(name, at)
        if name in apart:
            continue
        raised += _odd(name, at)
        if len(at) > 1:
            strange = [*_codes(name, at)]
            piled = [] if name in columns.limits else [*_piled(name, at)]
            raised += strange or [*_units(name, at), *piled]
            raised += [] if strange or name not in outcome else _rates(name, at)
    return raised


def flagged(flags: Sequence[Flag]) -> dict[str, list[str]]:
    """Columns, and the sites where each is flagged."""
    sites: dict[str, list[str]] = {}
    for flag in flags:
        if flag.column and flag.site != EVERY and flag.site not in sites.setdefault(flag.column, []):
            sites[flag.column].append(flag.site)
    return sites


def kept(parts: Parts, flags: Sequence[Flag]) -> dict[str, Any]:
    """The flagged columns at every site, as a run folder keeps them for the report's figure."""
    return {
        name: {"flagged": sites, "sites": {site: part.model_dump() for site, part in parts[name].items()}}
        for name, sites in flagged(flags).items()
        if not any(part.repeats for part in parts[name].values())  # identifiers
    }


def doubled(sheets: Sequence[Sheet], columns: Columns) -> list[Flag]:
    """Files that hold rows twice."""
    repeats = {s.name: (doubles(s, columns), len(s.lines)) for s in sheets} if columns.group is None else {}
    return [
        Flag(
            site,
            None,
            f"{n} of {rows} rows repeat another row in every column; drop them, or name the patient as group",
        )
        for site, (n, rows) in repeats.items()
        if n >= max(3, REPEATED * rows)
    ]


def copied(sheets: Sequence[Sheet], used: Sequence[str], gaps: Sequence[str]) -> list[Flag]:
    """Pairs of sites that share more rows than like ones do, by the rows that are alike within each."""
    sizes, n_sites = np.array([len(s.lines) for s in sheets]), len(sheets)
    ids, site = np.zeros(sizes.sum(), dtype=np.int64), np.repeat(np.arange(n_sites), sizes)
    for codes in (_coded(sheets, name, gaps) for name in used):
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


def _coded(sheets: Sequence[Sheet], name: str, gaps: Sequence[str]) -> np.ndarray:
    """[N] codes of a column's cells, one after the other site, by which cells are matched; 0 for a gap."""
    code_of, parts = dict[float | str, int](), list[np.ndarray]()
    for t in (s.texts(name) for s in sheets):
        keys = [v if v == v else t.key(text) for v, text in zip(t.numbers.tolist(), t.all, strict=True)]  # NaN: a text
        codes = np.array([code_of.setdefault(key, 1 + len(code_of)) for key in keys])
        parts.append(np.where(t.missing(gaps), 0, codes)[t.at])
    return np.concatenate(parts)


def telling(sheets: Sequence[Sheet], inputs: Sequence[Column], target: Column, gaps: Sequence[str]) -> list[Flag]:
    """Inputs that tell the class alone: such are often known only after it."""
    flags, classes = list[Flag](), target.values
    y = np.concatenate([s.positions(target.name, classes) for s in sheets])
    site = np.repeat(np.arange(len(sheets)), [len(s.lines) for s in sheets])
    pairs = [*combinations(range(len(classes)), 2)]
    for c in inputs:
        codes, rule = _coded(sheets, c.name, gaps), ""
        x = np.concatenate([s.numbers(c.name) for s in sheets])
        there = [(codes > 0) & (site == s) for s in range(len(sheets))] if c.kind != "category" else []
        if there and all(_apart([(x[w & (y == k)], x[w & (y == j)]) for w in there]) for k, j in pairs):
            rule = f"an AUC above {ALONE:g} at every site that can tell"
        else:
            cells = [cell for s in sheets for cell in s.columns[c.name]]
            several = codes.max() <= FEW  # else a value, or none
            for v, k, row in _only(codes if several else codes > 0, site, y, RARE / len(inputs)):
                text = "a gap" if v == 0 else cells[row][:20] if several else "any value"
                rule += f"{', ' * bool(rule)}{text} is {classes[k]} in every row"
        if rule:
            warning = f"{c.name} alone predicts {target.name} ({rule}); if it is known only after the outcome, drop it"
            flags.append(Flag(EVERY, c.name, warning))
    return flags


def _apart(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> bool:
    """True where numbers part two classes, (those of one, of the other), at every site with rows enough to tell."""
    aucs: list[float] = []
    for low, high in pairs:
        n, m = len(low), len(high)
        if math.lgamma(n + m + 1) - math.lgamma(n + 1) - math.lgamma(m + 1) > -math.log(RARE):  # orders by chance
            auc = sum(np.sort(low).searchsorted(high, side).sum() for side in ("left", "right")) / 2 / (n * m)
            aucs.append(max(auc, 1 - auc))
    return bool(aucs) and min(aucs) > ALONE


def _only(codes: np.ndarray, site: np.ndarray, y: np.ndarray, rare: float) -> Iterator[tuple[int, int, int]]:
    """(code, class, its first row) of every code that one class alone has, where that is rare by chance."""
    table = np.zeros((site.max() + 1, int(codes.max()) + 1, y.max() + 1))
    np.add.at(table, (site, codes.astype(int), y), 1)
    share = np.log(np.maximum(table.sum(1) / table.sum((1, 2))[:, None], 1e-300))  # 0 has no log
    for v, rows in enumerate(table.sum(0)):
        k = int(rows.argmax())
        if rows.sum() == rows[k] and (table[:, v, k] * share[:, k]).sum() < math.log(rare / len(table[0])):
            yield v, k, int((codes == v).argmax())


def _repeated(name: str, at: Mapping[str, Part]) -> Iterator[Flag]:
    for site, p in at.items():
        if p.repeats >= max(2, REPEATED * p.there) and p.distinct > FEW:
            text = f"{p.distinct} different values of {name} in {p.there} rows, so rows repeat patients"
            yield Flag(site, name, f'{text}; group = "{name}" keeps them together')


def _odd(name: str, at: Mapping[str, Part]) -> Iterator[Flag]:
    for site, p in at.items():
        for text, rows in (p.odd or {}).items():
            others = [q.quantiles for q in at.values() if q.quantiles is not None and text not in (q.odd or {})]
            if len(others) and all(q[0] <= float(text) <= q[4] for q in others):
                continue  # an ordinary number elsewhere
            if not others and len(at) > 1 and p.distinct <= CODED:
                continue  # one of a few codes that all sites have
            then = f'a code for a gap? gaps = ["{text}"] makes it one'
            yield Flag(site, name, f"{name} is {text} in {rows} of {p.there} rows, far from all its others; {then}")
        if p.distinct == 1 and p.quantiles is not None and p.there >= LEAST:
            value = p.quantiles[2]
            text = f"{value:g}"
            others = [q.quantiles for s, q in at.items() if s != site and q.quantiles and text not in (q.odd or {})]
            low, high = (min(q[0] for q in others), max(q[4] for q in others)) if others else (value, value)
            if others and max(low - value, value - high) > (high - low) / 2:
                apart = f"{name} is {value:g} in every row, and {low:.4g} to {high:.4g} at other sites"
                yield Flag(site, name, apart)


def _units(name: str, at: Mapping[str, Part]) -> Iterator[Flag]:
    sites = {s: p for s, p in at.items() if p.quantiles and p.quantiles[0] > 0 and p.there >= LEAST and p.distinct > 2}
    of = {s: p.quantiles for s, p in sites.items() if p.quantiles}
    medians, errors = {s: q[2] for s, q in of.items()}, {s: _error(q, sites[s].there) for s, q in of.items()}
    for site, mine in of.items():
        others = sorted((s for s in sites if s != site), key=lambda s: medians[s])
        if not others:
            continue
        like = others[(len(others) - 1) // 2]
        theirs = of[like]
        ratio = math.log(mine[2] / theirs[2])
        error = math.hypot(errors[site], errors[like])
        if len(others) > 2:
            error = math.hypot(error, _scatter([math.log(medians[s]) for s in others]))
        apart = mine[1] > theirs[3] or mine[3] < theirs[1]
        wide = max(math.log(q[3] / q[1]) / 1.349 for q in (mine, theirs))
        if not apart or abs(ratio) < max(math.log(FACTOR), DEVIATIONS * error, WIDTHS * wide):
            continue
        if len(others) == 1 and ratio < 0:
            continue  # said of the other one
        times = f"{math.exp(abs(ratio)):.3g} times" if ratio > 0 else f"1/{math.exp(abs(ratio)):.3g} of"
        whose = "other sites" if len(others) > 1 else like
        fitting = _fitting(name, site, mine, theirs, abs(ratio), error, ratio > 0)
        text = f"the median of {name} is {mine[2]:.4g}, {times} that of {whose} ({theirs[2]:.4g}){fitting}"
        yield Flag(site, name, text)


def _error(q: Sequence[float], n: int) -> float:
    """Standard error of the logarithm of a median, from the quartiles of its logarithms."""
    return 1.2533 * math.log(q[3] / q[1]) / 1.349 / math.sqrt(n)


def _key(site: str) -> str:
    """The table of a site's repairs, as it is written in an experiment file."""
    return f"[columns.site.{site if re.fullmatch('[A-Za-z0-9_-]+', site) else json.dumps(site, ensure_ascii=False)}]"


def _scatter(logs: Sequence[float]) -> float:
    """Distance between the sites' medians, robust: half of the sites may use another unit."""
    ordered = np.sort(np.array(logs))
    half = len(ordered) // 2 + 1
    return float(min(ordered[half - 1 :] - ordered[: len(ordered) - half + 1])) / 1.349


def _fitting(
    name: str, site: str, mine: Sequence[float], theirs: Sequence[float], ratio: float, error: float, more: bool
) -> str:
    """Units that would explain a factor, and the repair."""
    warm, cold = (mine, theirs) if more else (theirs, mine)
    if all(abs(f - (1.8 * c + 32)) < 0.03 * f for f, c in zip(warm[1:4], cold[1:4], strict=True)):
        repair = "(x - 32) / 1.8" if more else "x * 1.8 + 32"
        return f', as °F and °C would; {_key(site)} {name} = "{repair}"'
    far = {u: abs(math.log(u.factor) - ratio) for u in UNITS}
    named = [u for u in UNITS if any(part in name.casefold() for part in u.of) and far[u] < max(0.35, 3 * error)]
    likely = named or [u for u in UNITS if not u.of and far[u] < 0.1]
    best = sorted(likely, key=lambda u: far[u])[:2]
    if not best:
        return ", in other units?"
    words = " or ".join(f"{u.words} ({u.factor:.5g})" for u in best)
    return f', as {words} would; {_key(site)} {name} = "x {"/" if more else "*"} {best[0].factor:.5g}"'


def _codes(name: str, at: Mapping[str, Part]) -> Iterator[Flag]:
    values_at = {s: p.values for s, p in at.items() if p.values}
    every = {t for values in values_at.values() for t in values}
    if len(every) > CODED and all(number(t) is not None for t in every):
        return
    for site, mine in values_at.items():
        others: dict[str, int] = {}
        for s in values_at:
            for text, rows in (values_at[s] if s != site else {}).items():
                others[text] = others.get(text, 0) + rows
        own, lacking = ({t: n for t, n in a.items() if t not in b} for a, b in ((mine, others), (others, mine)))
        rows, total = sum(own.values()), sum(mine.values())
        elsewhere = sum(others.values())
        if not own or not lacking:
            continue
        chance = rows * math.log(total / (total + elsewhere))  # of like sites: all those rows at this one
        much = rows >= SHARE * total and sum(lacking.values()) >= SHARE * elsewhere and chance < math.log(RARE)
        pairs = _paired(own, lacking)
        spelt = all(number(a) is None and _folded(a) == _folded(b) for a, b in pairs.items()) and len(pairs) == len(own)
        if not much and not spelt:
            continue
        if len(values_at) == 2 and (total, site) > (elsewhere, max(values_at)):
            continue  # said of the smaller one
        has, lacks = few([t[:20] for t in own]), few([t[:20] for t in lacking])
        table = ", ".join(f'"{a}" = "{b}"' for a, b in pairs.items())
        then = f"; the same? {_key(site)} {name} = {{{table}}}" if pairs else ""
        finding = f"{name} is {has} in {rows} of {total} rows, which no other site writes, and never {lacks}{then}"
        yield Flag(site, name, finding)


def _paired(own: Mapping[str, int], lacking: Mapping[str, int]) -> dict[str, str]:
    """Values that may mean the same: by their spelling, by dictionary, by their first letter, or the only ones left."""
    left, pairs = dict(lacking), dict[str, str]()

    def meaning(text: str) -> int:
        return next((k for k, words in enumerate(SAME) if text.casefold() in words), -1)

    rules = (
        lambda a, b: number(a) is None and _folded(a) == _folded(b),
        lambda a, b: meaning(a) == meaning(b) >= 0,
        lambda a, b: number(a) is None and a[:1].casefold() == b[:1].casefold(),
    )
    for alike in rules:
        for a in own:
            fits = [b for b in left if alike(a, b)]
            if a not in pairs and len(fits) == 1:
                pairs[a] = fits[0]
                del left[fits[0]]
    rest = [a for a in own if a not in pairs]
    if len(rest) == len(left) == 1 and pairs:
        pairs[rest[0]] = next(iter(left))
    return pairs


def _folded(text: str) -> str:
    plain = unicodedata.normalize("NFKD", text.casefold())
    return "".join(c for c in plain if c.isalnum())


def _piled(name: str, at: Mapping[str, Part]) -> Iterator[Flag]:
    for site, p in at.items():
        others = [q for s, q in at.items() if s != site and q.quantiles and q.there >= LEAST]
        if not others or (p.low is None and p.high is None):
            continue
        middle = np.median([q.quantiles for q in others if q.quantiles], axis=0)
        for end, word, beyond in ((p.low, "least", "below"), (p.high, "largest", "above")):
            if end is None:
                continue
            value, rows = end
            under = float(np.interp(value, middle, QUANTILES, left=0.0, right=1.0))
            share = under if word == "least" else 1 - under
            inside = middle[0] < value if word == "least" else middle[4] > value
            if inside and share >= max(PILED, rows / p.there / 2):
                text = f"{rows:g} of {p.there} rows have the {word} {name}, {value:g}, {beyond} which other sites have "
                yield Flag(site, name, f"{text}{share:.0%} of theirs: a limit of detection?")


def _rates(name: str, at: Mapping[str, Part]) -> Iterator[Flag]:
    counts = {s: p.values for s, p in at.items() if p.values}
    labels = sorted({t for values in counts.values() for t in values})
    if len(labels) != 2:
        return
    for site, mine in counts.items():
        others = [sum(v.get(label, 0) for s, v in counts.items() if s != site) for label in labels]
        table = [n + 0.5 for n in (*(mine.get(label, 0) for label in labels), *others)]
        odds = math.log(table[1] * table[2] / table[0] / table[3])
        if abs(odds) > max(math.log(ODDS), DEVIATIONS * math.sqrt(sum(1 / n for n in table))):
            here, there = mine.get(labels[1], 0) / sum(mine.values()), others[1] / sum(others)
            yield Flag(site, name, f"{name} is {labels[1]} in {here:.0%} of rows, at the other sites in {there:.0%}")
