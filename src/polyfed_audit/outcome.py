"""The outcome: columns that tell it alone, and rates that differ."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import numpy as np
from scipy.special import expit

from polyfed.base.part import EVERY, Flag, Part, Parts
from polyfed.data.csv_files import FEW, Column, Sheet
from polyfed_audit.codes import RARE
from polyfed_audit.coding import fitted, scaled
from polyfed_audit.rows import coded
from polyfed_audit.units import DEVIATIONS, scatter

ALONE = 0.97  # AUC of a column that tells the outcome alone
ODDS, BEYOND = 20.0, 6.0  # least odds ratio of an outcome, and of one whose case mix is known
AGAINST, OFF = 1.0, 3.0  # such errors on the other side, and from where like sites are
AWAY = 2.66  # deviations between classes, at which normal columns have that AUC


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
            if not rule and all(_apart(_shared(codes if several else codes > 0, site, y, k, j)) for k, j in pairs):
                what = "values, gaps among them," if several and not codes.all() else "values" if several else "gaps"
                rule = f"its {what} have an AUC above {ALONE:g} at every site that can tell"
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


def _shared(codes: np.ndarray, site: np.ndarray, y: np.ndarray, k: int, j: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """At every site, how often rows of codes are of class j and not of k: (that of rows of k, of j)."""
    rows = np.zeros((int(codes.max()) + 1, 2))
    np.add.at(rows, (codes[(y == k) | (y == j)].astype(int), (y[(y == k) | (y == j)] == j).astype(int)), 1)
    share = (rows[:, 1] / np.maximum(rows.sum(1), 1))[codes.astype(int)]
    return [(share[(site == s) & (y == k)], share[(site == s) & (y == j)]) for s in range(site.max() + 1)]


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


def expected(sheets: Sequence[Sheet], inputs: Sequence[Column], target: Column) -> Iterator[Flag]:
    """Sites whose rate of the outcome neither chance nor case mix explains, by a model that all sites share."""
    rows = scaled(sheets, inputs, target, pooled=True)
    some = [k for k, v in enumerate(rows.y) if 0 < v.sum() < len(v)]
    if len(some) < 2:
        return
    fit = fitted([rows.x[k] for k in some], [rows.y[k] for k in some])
    for i, k in enumerate(some):
        rest = [j for j in range(len(some)) if j != i]
        order = np.sort(fit.levels[rest])  # of the two in the middle the nearer one: one of few sites may be wrong
        level = min(order[(len(rest) - 1) // 2], order[len(rest) // 2], key=lambda v: abs(v - fit.levels[i]))
        spread = scatter([float(fit.levels[j]) for j in rest]) if len(rest) > 2 else 0.0
        error = math.hypot(math.sqrt(fit.errors[i]), spread, math.sqrt(float(np.median(fit.errors[rest])) / len(rest)))
        others = sum(len(rows.y[some[j]]) for j in rest)
        if len(rest) == 1 and (len(rows.y[k]), i) > (others, rest[0]):
            continue  # said of the smaller one
        if abs(fit.levels[i] - level) > max(math.log(BEYOND), DEVIATIONS * error):
            name, share = target.name, expit(rows.x[k] @ fit.coefficients + level).mean()
            text = f"{name} is {target.values[1]} in {rows.y[k].mean():.0%} of rows"
            yield Flag(sheets[k].name, name, f"{text}; of such patients at the other sites it would be {share:.0%}")


def there(parts: Parts, target: str) -> Iterator[Flag]:
    """What columns in each class tell, where rows are elsewhere: an outcome turned round at a site, one told alone."""
    rows = parts.get(target, {})
    classes = sorted({text for at in parts.values() for p in at.values() for text in p.by or ()})
    if len(classes) != 2:
        return
    number = classes == ["high", "low"]
    n = {s: [p.there / 2] * 2 if number else [(p.values or {}).get(c, 0) for c in classes] for s, p in rows.items()}
    error = {s: math.sqrt(sum(1 / k for k in each)) for s, each in n.items() if min(each) > 0}
    gaps: dict[str, dict[str, float]] = {}
    for name, at in parts.items():
        told = {s: _gap(p.by, classes) for s, p in at.items() if s in error and p.by is not None and len(p.by) == 2}
        gaps |= {name: told} if len(told) > 1 else {}
        if told and not number and min(map(abs, told.values())) > AWAY:
            warning = (
                f"{name} alone predicts {target} (its quartiles in both classes are apart at every site that can tell)"
            )
            yield Flag(EVERY, name, f"{warning}; if it is known only after the outcome, drop it", {"drop": [name]})
    left = [s for s in error if any(s in told for told in gaps.values())]
    while len(left) > 1:
        found = [(*_agreement(gaps, s, [o for o in left if o != s], error), -sum(n[s]), s) for s in left]
        least, like, _, site = min(found)
        if least > -AGAINST or like - least < OFF:
            return
        text = f"{target} goes the other way: columns lie in its classes as at the other sites in the other one"
        repair = {} if number else {"site": {site: {target: dict(zip(classes, reversed(classes), strict=True))}}}
        yield Flag(site, target, f"{text}; coded the other way round?", repair)
        left.remove(site)


def _gap(by: Mapping[str, Sequence[float]], classes: Sequence[str]) -> float:
    """The distance of medians of two classes in deviations."""
    low, high = (by[c] for c in classes)
    wide = math.hypot(low[2] - low[0], high[2] - high[0]) / 1.349 / math.sqrt(2)
    return (high[1] - low[1]) / wide if wide else 0.0


def _agreement(
    gaps: Mapping[str, Mapping[str, float]], site: str, rest: Sequence[str], error: Mapping[str, float]
) -> tuple[float, float]:
    """How far a site's columns go the way of the others, and would if like, in standard errors as if all were one."""
    pairs = [(told[site], np.median([told[s] for s in rest if s in told])) for told in gaps.values()
             if site in told and any(s in told for s in rest)]  # fmt: skip
    total = sum(abs(other) for _, other in pairs)
    if not total:
        return 0.0, 0.0
    each = total * 1.2533 * error[site]
    return float(sum(a * b for a, b in pairs) / each), float(sum(b * b for _, b in pairs) / each)
