"""Codes: values of a site that no other one writes, numbers that stand for a gap, limits of detection."""

import math
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from polyfed.base.errors import few
from polyfed.base.part import Flag, Part
from polyfed.data.readers import number
from polyfed_audit.parts import CODED, LEAST, PILED, QUANTILES

SHARE, RARE = 0.2, 1e-4  # rows of values that no other site has, and the chance of that among like sites
SAME = (  # texts that mean the same
    {"m", "male", "man", "männlich", "mann", "homme", "masculin", "maschio", "hombre"},
    {"f", "female", "woman", "w", "weiblich", "frau", "femme", "féminin", "femmina", "mujer"},
    {"yes", "y", "ja", "j", "oui", "si", "true", "1", "positive", "pos", "positiv", "+"},
    {"no", "n", "nein", "non", "false", "0", "negative", "neg", "negativ"},
)


def codes(name: str, at: Mapping[str, Part]) -> Iterator[Flag]:
    values_at = {s: p.values for s, p in at.items() if p.values}
    every = {t for values in values_at.values() for t in values}
    most = max((p.distinct for p in at.values()), default=0)
    if max(len(every), most) > CODED and all(number(t) is not None for t in every):
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
        finding = f"{name} is {has} in {rows} of {total} rows, which no other site writes, and never {lacks}"
        repair = at_site(site, name, pairs) if pairs else {}
        yield Flag(site, name, finding + ("; the same?" if pairs else ""), repair)


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


def odd(name: str, at: Mapping[str, Part]) -> Iterator[Flag]:
    for site, p in at.items():
        for text, rows in (p.odd or {}).items():
            others = [q.quantiles for q in at.values() if q.quantiles is not None and text not in (q.odd or {})]
            if len(others) and all(q[0] <= float(text) <= q[4] for q in others):
                continue  # an ordinary number elsewhere
            if not others and len(at) > 1 and p.distinct <= CODED:
                continue  # one of a few codes that all sites have
            then = "far from all its others; a code for a gap?"
            yield Flag(site, name, f"{name} is {text} in {rows} of {p.there} rows, {then}", {"gaps": [text]})
        if p.distinct == 1 and p.quantiles is not None and p.there >= LEAST:
            value = p.quantiles[2]
            text = f"{value:g}"
            others = [q.quantiles for s, q in at.items() if s != site and q.quantiles and text not in (q.odd or {})]
            low, high = (min(q[0] for q in others), max(q[4] for q in others)) if others else (value, value)
            if others and max(low - value, value - high) > (high - low) / 2:
                apart = f"{name} is {value:g} in every row, and {low:.4g} to {high:.4g} at other sites"
                yield Flag(site, name, apart)


def piled(name: str, at: Mapping[str, Part]) -> Iterator[Flag]:
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
            inside = middle[0] < value < middle[4]
            if inside and max(PILED, rows / p.there / 2) <= share <= 4 * rows / p.there:
                text = f"{rows:g} of {p.there} rows have the {word} {name}, {value:g}, {beyond} which other sites have "
                yield Flag(site, name, f"{text}{share:.0%} of theirs: a limit of detection?")


def at_site(site: str, key: str, value: Any) -> dict[str, Any]:
    """A repair of one site."""
    return {"site": {site: {key: value}}}
