"""Numbers that cannot be: an age of -5 or of 250, a weight below 0, 140 %, a year to come; and another sign."""

import datetime
import re
from collections.abc import Iterator, Mapping

import numpy as np

from polyfed.base.arithmetic import OWN, word
from polyfed.base.columns import DROP_ROWS
from polyfed.base.part import Flag, Part

FEW_ROWS, LEAST = 0.05, 16  # share of rows that may be slips, of so many that there must be
# beginnings of words in the names of columns that are no less than 0, and of those that may have either sign
POSITIVE = re.compile(
    "age$|alter$|weight|gewicht|height|length|size|gr(ö|oe)(ß|ss)e|bmi$|waist|hr$|pulse|heart|sbp$|dbp$|count|number|wbc|"
    "rbc|plt|platelet|leuko|hb$|hgb|h(a|ä)?emo|gluc|gluk|crea|krea|chol|ldl|hdl|trig|urea|bun$|bili|lact|lakt|crp|"
    "sodium|natri|potass|kali|calc|kalz|alb|ferrit|iron|eisen|tsh$|inr$|dose|stay|los$|days|visits|price|cost|income|"
    "perc|pct|spo|sao|sat$|h(a|ä)?ematocrit|hct$|lvef$"
)
SIGNED = re.compile(
    "z$|zscore|sds?$|score|delta|diff|chang|excess|be$|log|ln$|std|resid|slope|trend|pc$|rel|dev|gain|loss"
)
MOST = (("age$|alter$", 120.0), ("perc|pct|spo|sao|sat$|h(a|ä)?ematocrit|hct$|lvef$", 100.0), ("year|jahr|yob", None))


def beyond(name: str, size: np.ndarray, rows: np.ndarray, odd: Mapping[str, int]) -> dict[str, int]:
    """Rows of numbers that a column cannot have, as conditions on it; `size` [K] is ascending.

    Below 0 by the column's name, or far below all others, which lie above it.
    """
    codes = np.array([float(text) for text in odd])
    size, rows = size[(keep := ~np.isin(size, codes))], rows[keep]
    if rows.sum() < LEAST:
        return {}
    words = [w for w in re.split(r"[\W_\d]+", name.casefold()) if w]
    low, middle, high = size[np.searchsorted(rows.cumsum(), np.array([0.25, 0.5, 0.75]) * rows.sum())]
    found, slips = dict[str, int](), FEW_ROWS * rows.sum()
    if 0 < (n := int(rows[size < 0].sum())) <= slips:
        named = any(map(POSITIVE.match, words)) and not any(map(SIGNED.match, words))
        least = size[size >= 0][0]
        if named or (least > 0 and least - size[size < 0][-1] > 2 * (high - low)):
            found["< 0"] = n
    for of, bound in MOST:
        top = datetime.date.today().year if bound is None else bound
        within = 1900 < middle <= top if bound is None else 1 < middle <= top
        if within and any(re.match(of, w) for w in words) and 0 < (n := int(rows[size > top].sum())) <= slips:
            found[f"> {top:g}"] = n
    return found


def impossible(name: str, at: Mapping[str, Part]) -> Iterator[Flag]:
    """Sites with a few numbers that cannot be, where those of others are none either."""
    for site, p in at.items():
        for condition, rows in (p.beyond or {}).items():
            signed = any(q.quantiles is not None and q.quantiles[0] < 0 for s, q in at.items() if s != site)
            if condition != "< 0" or not signed:
                repair = {"site": {site: {DROP_ROWS: [f"{word(name)} {condition}"]}}}
                yield Flag(site, name, f"{name} {condition} in {rows} of {p.there} rows, which cannot be", repair)


def negated(name: str, at: Mapping[str, Part]) -> Iterator[Flag]:
    """Sites whose numbers have another sign than those of all others."""
    for site, p in at.items():
        others = [q.quantiles for s, q in at.items() if s != site and q.quantiles and q.there >= LEAST]
        if p.quantiles is None or p.there < LEAST or p.quantiles[4] >= 0 or not others:
            continue
        middle = np.median(others, axis=0)
        if min(q[0] for q in others) >= 0 and abs(p.quantiles[2] + middle[2]) < 2 * (middle[3] - middle[1]):
            text = f"{name} is below 0 in nearly all rows, and nowhere at the other sites: another sign?"
            yield Flag(site, name, text, {"site": {site: {name: f"-{OWN}"}}})
