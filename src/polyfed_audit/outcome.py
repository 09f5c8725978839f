"""The outcome: columns that tell it alone, and rates that differ."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import numpy as np

from polyfed.base.part import EVERY, Flag, Part
from polyfed.data.csv_files import FEW, Column, Sheet
from polyfed_audit.codes import RARE
from polyfed_audit.rows import coded
from polyfed_audit.units import DEVIATIONS

ALONE = 0.97  # AUC of a column that tells the outcome alone
ODDS = 20.0  # least odds ratio of an outcome


def telling(sheets: Sequence[Sheet], inputs: Sequence[Column], target: Column, gaps: Sequence[str]) -> list[Flag]:
    """Inputs that tell the class alone: such are often known only after it."""
    flags, classes = list[Flag](), target.values
    y = np.concatenate([s.positions(target.name, classes) for s in sheets])
    site = np.repeat(np.arange(len(sheets)), [len(s.lines) for s in sheets])
    pairs = [*combinations(range(len(classes)), 2)]
    for c in inputs:
        codes, rule = coded(sheets, c.name, gaps), ""
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
            flags.append(Flag(EVERY, c.name, warning, {"drop": [c.name]}))
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


def rates(name: str, at: Mapping[str, Part]) -> Iterator[Flag]:
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
