"""Sites whose outcome, inputs or columns are coded otherwise than those of the others, and sites of few rows."""

import math
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from itertools import combinations
from typing import NamedTuple

import numpy as np
from scipy.special import expit

from polyfed.base.arithmetic import OWN
from polyfed.base.columns import RENAME
from polyfed.base.errors import few as listed
from polyfed.base.part import Flag, Part
from polyfed.data.csv_files import FEW, Column, Sheet
from polyfed.metrics.terms import ranking, ranks
from polyfed_audit.codes import RARE
from polyfed_audit.parts import CODED

EACH = 8  # rows of each class at a site, from which its signs are believed
ROWS = 3000  # of a site that are looked at
FEWEST = 30  # rows with which a third tested bears a verdict
BELOW, ABOVE = 3.0, 2.0  # standard errors from an AUC of a half: of the others' model here, and of the site's own
TURNED, APART = 3.0, 4.5  # standard errors of a coefficient from 0, here and elsewhere, and of both from each other
SHIFTED, NEAR, LIKE = 0.9, 0.7, 0.2  # widths of exchanged columns: off their place, off the other's; its share of that
MIDDLE, PLAIN = (0.25, 0.5, 0.75), 0.05  # quartiles; of a range, that it may be short of its scale
LEFT = 0.3  # of the distances of classes' means that a permutation may leave
UNLIKE = 3.0  # odds ratio that case mix explains where a site has one class


def facts(name: str, at: Mapping[str, Part]) -> Iterator[Flag]:
    """Sites that can bear no verdict on an outcome: of one class, as chance has it, or of few rows."""
    yield from (flag for flag, beyond in _one_class(name, at) if not beyond)
    small = {site: p.rows for site, p in at.items() if p.rows < FEWEST}
    if small and len(at) - len(small) > 1:  # else all count in the mean
        then = f"a verdict takes ten tested rows, some {FEWEST} in all; the mean over clients leaves fewer out"
        yield Flag(listed(small), None, f"{listed([*small.values()])} rows; {then}")


def one_class(name: str, at: Mapping[str, Part]) -> Iterator[Flag]:
    """Sites that have one class of an outcome, beyond chance."""
    yield from (flag for flag, beyond in _one_class(name, at) if beyond)


def _one_class(name: str, at: Mapping[str, Part]) -> Iterator[tuple[Flag, bool]]:
    classes = all(p.values is not None or p.distinct <= FEW for p in at.values())
    for site, p in at.items():
        if classes and p.distinct == 1 and any(other.distinct > 1 for other in at.values()):
            value = next(iter(p.values or {}), "the same")
            others = [q for s, q in at.items() if s != site]
            share = sum((q.values or {}).get(value, 0) for q in others) / max(1, sum(q.there for q in others))
            share = UNLIKE * share / (UNLIKE * share + 1 - share)
            flag = Flag(site, name, f"{name} is {value} in all {p.there} rows: no AUC and no verdict there")
            yield flag, p.there * math.log(max(share, 1e-9)) < math.log(RARE)


def exchanged(parts: Mapping[str, Mapping[str, Part]]) -> Iterator[Flag]:
    """Pairs of columns of numbers that lie at a site where the other one lies elsewhere."""
    at = {
        n: {s: np.array(p.quantiles) for s, p in of.items() if p.quantiles and p.there >= EACH and p.distinct > CODED}
        for n, of in parts.items()
    }
    for a, b in combinations([n for n, of in at.items() if len(of) > 1], 2):
        both = [s for s in at[a] if s in at[b]]
        rows = {s: (parts[a][s].there, s) for s in both}
        for site in both:
            if len(both) == 2 and rows[site] == max(rows.values()):
                continue  # said of the smaller one
            here = at[a][site], at[b][site]
            theirs = [np.median([q for s, q in at[n].items() if s != site], axis=0) for n in (a, b)]
            if any(q[3] <= q[1] for q in theirs):
                continue
            own = [_far(q, r) for q, r in zip(here, theirs, strict=True)]
            other = [_far(q, r) for q, r in zip(here, reversed(theirs), strict=True)]
            if min(own) > SHIFTED and max(other) < NEAR and sum(other) < LIKE * sum(own):
                text = f"{a} lies where {b} lies at the other sites, and {b} where {a} does: exchanged?"
                yield Flag(site, a, text, {"site": {site: {RENAME: {a: b, b: a}}}})


def _far(q: np.ndarray, r: np.ndarray) -> float:
    """Mean distance of quantiles, in widths of the second ones' middle half."""
    return float(np.abs(q - r).mean() / (r[3] - r[1]))


class Fit(NamedTuple):
    """A regression: coefficients of columns and intercepts of sites, each with their variances."""

    coefficients: np.ndarray
    variances: np.ndarray
    levels: np.ndarray
    errors: np.ndarray


class Rows(NamedTuple):
    """Rows of all sites, scaled within each, so that another unit is not another sign; gaps are in the middle."""

    columns: list[tuple[str, str | None]]  # and value of each input
    x: list[np.ndarray]  # [n, d]
    y: list[np.ndarray]  # [n] positions of classes, or numbers
    number: bool  # which the outcome is


def turned(sheets: Sequence[Sheet], inputs: Sequence[Column], target: Column, number: bool = False) -> Iterator[Flag]:
    """Sites where the outcome, of two classes or a `number`, or one input goes the other way than at most others."""
    rows = scaled(sheets, inputs, target, number)
    columns, x, y, _ = rows
    bears = [k for k, v in enumerate(y) if _bears(v, number)]
    if len(bears) < 2 or not columns:
        return
    fits = {k: fitted([x[k]], [y[k]], number) for k in bears}
    most = _agreed(bears, rows, fits)
    what = "a correlation" if number else "an AUC"
    for k in bears:
        rest = [j for j in most if j != k]
        if not rest:
            continue
        site, own, others = sheets[k].name, fits[k], fitted([x[j] for j in rest], [y[j] for j in rest], number)
        rank, error = _ranked(x[k] @ others.coefficients, y[k], number)
        if rank + BELOW * error < 0.5 < (mine := _own_rank(x[k], y[k], number)) - ABOVE * error:
            here, there = (2 * rank - 1, 2 * mine - 1) if number else (rank, mine)
            said = f"a model of the other sites has {what} of {here:.2f} there, its own {there:.2f}"
            then = "counted" if number else f"are {' and '.join(target.values)} coded"
            text = f"{target.name} goes the other way: {said}; {then} the other way round?"
            values = [sheets[j].numbers(target.name) for j in (k, *rest)] if number else []
            back = mirrored(values[0], values[1:]) if number else _swap(target)
            yield Flag(site, target.name, text, {"site": {site: {target.name: back}}} if back else {})
            continue
        for j, (name, value) in enumerate(columns):
            b, c = own.coefficients[j], others.coefficients[j]
            se, sc = np.sqrt(own.variances[j]), np.sqrt(others.variances[j])
            if b * c < 0 and min(abs(b) / se, abs(c) / sc) > TURNED and abs(b - c) > APART * np.hypot(se, sc):
                of = next(i for i in inputs if i.name == name)
                which = name if value is None else f"{name} = {value}"
                text = f"{which} has the coefficient {b:+.2f} for {target.name}, and {c:+.2f} at the other sites"
                repair = {"site": {site: {name: _swap(of)}}} if len(of.values) == 2 else {}
                yield Flag(site, name, f"{text}: coded the other way round?", repair)
                break


def _swap(c: Column) -> dict[str, str]:
    return dict(zip(c.values, reversed(c.values), strict=True))


def mirrored(mine: np.ndarray, others: Sequence[np.ndarray]) -> str | None:
    """Arithmetic that turns numbers round to where those of other sites lie: -x of signs, 100 - x of a scale."""
    mine, theirs = mine[np.isfinite(mine)], np.concatenate([v[np.isfinite(v)] for v in others])
    low, high, q = theirs.min(), theirs.max(), np.quantile(theirs, (0.02, 0.98))
    if np.quantile(-mine, 0.02) >= low - (high - low) / 20 and q[0] <= np.median(-mine) <= q[1]:
        return f"-{OWN}"
    ends = min(low, mine.min()) + max(high, mine.max())
    ends = plain if abs((plain := float(f"{ends:.1g}")) - ends) < PLAIN * (high - low) else float(f"{ends:.4g}")
    inside = min(low, mine.min()) >= 0 and q[0] <= ends - np.median(mine) <= q[1]
    return f"{ends:g} - {OWN}" if inside else None


def permuted(sheets: Sequence[Sheet], inputs: Sequence[Column], target: Column) -> Iterator[Flag]:
    """Sites that give more than two classes each other's names: their means lie where other classes' do elsewhere."""
    columns, x, y, _ = scaled(sheets, inputs, target)
    if not columns:
        return
    classes = range(len(target.values))
    n = np.array([[(v == c).sum() for c in classes] for v in y])
    means = [np.stack([z[v == c].mean(0) if (v == c).any() else np.zeros(z.shape[1]) for c in classes])
             for z, v in zip(x, y, strict=True)]  # fmt: skip
    left = np.concatenate([z - m[v.astype(int)] for z, m, v in zip(x, means, y, strict=True)])
    within = left.T @ left / max(1, len(left) - np.count_nonzero(n)) + 1e-3 * np.eye(left.shape[1])
    white = np.linalg.inv(np.linalg.cholesky(within)).T
    at = [m @ white for m in means]
    left = [k for k in range(len(sheets)) if (n[k] >= EACH).sum() > 1]
    most = np.median([len(y[k]) for k in left]) if left else 0
    share = [min(1.0, most / max(1, len(v))) for v in y]  # no site outweighs the others
    bears, out = [*left], list[int]()
    while len(left) > 1:
        found = [(*_permutation(at[k], n[k], *_pooled(at, n, share, [j for j in left if j != k])), k) for k in left]
        _, pairs, k = max(found, key=lambda f: (f[0], -len(y[f[2]])))
        if not pairs:
            break
        left.remove(k)
        out.append(k)
    for k in (k for k in bears if k in out):  # held against those that are left alone: the first are not the last
        if pairs := _permutation(at[k], n[k], *_pooled(at, n, share, left))[1]:
            names = {target.values[a]: target.values[b] for a, b in pairs.items()}
            said = listed([f"{a} for {b}" for a, b in names.items()])
            text = f"the classes of {target.name} lie where others do at the other sites: {said}?"
            yield Flag(sheets[k].name, target.name, text, {"site": {sheets[k].name: {target.name: names}}})


def _pooled(
    at: Sequence[np.ndarray], n: np.ndarray, share: Sequence[float], sites: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """(means [K, d] of classes over sites, their rows [K])."""
    rows = sum(n[j] * share[j] for j in sites)
    return sum(at[j] * (n[j] * share[j])[:, None] for j in sites) / np.maximum(rows, 1)[:, None], np.asarray(rows)


def _permutation(mine: np.ndarray, n: np.ndarray, others: np.ndarray, m: np.ndarray) -> tuple[float, dict[int, int]]:
    """(how much it explains, which classes [K] lie where others do) if that explains means [K, d] far better."""
    there = np.flatnonzero((n >= EACH) & (m >= EACH))
    if len(there) < 2:
        return 0.0, {}
    a, b = (v[there] - v[there].mean(0) for v in (mine, others))
    axes = np.linalg.svd(b, full_matrices=False)[2]
    spread = (m[there][:, None] * (b @ axes.T) ** 2).sum(0)
    axes = axes[spread > 2 * b.shape[1]]  # as chance would not
    a, b = a @ axes.T, b @ axes.T
    v, prior = 1 / n[there] + 1 / m[there], math.lgamma(len(there) + 1)
    cost = ((a[:, None] - b[None]) ** 2).sum(-1) / v[:, None]
    best = import_module("scipy.optimize").linear_sum_assignment(cost)[1]  # slow to import
    back, rows = np.arange(len(there))[::-1], np.arange(len(there))
    best = back if cost[rows, back].sum() - cost[rows, best].sum() < 2 * prior else best
    moved = np.flatnonzero(best != rows)
    same, least = cost[moved, moved].sum(), cost[moved, best[moved]].sum()
    gain, chance = same - least, len(moved) * len(axes)  # of what is left
    if gain < 2 * (prior - math.log(RARE)) or least - chance > LEFT * same:
        return 0.0, {}
    a, b = (u[moved] - np.average(u[moved], axis=0, weights=1 / v[moved]) for u in (a, b))
    along, error = ((a * b).sum(1) / v[moved]).sum(), math.sqrt(float(((b * b).sum(1) / v[moved]).sum()))
    if along > -error:  # they do not lie the other way
        return 0.0, {}
    return gain, {int(there[k]): int(there[best[k]]) for k in moved}


def _bears(y: np.ndarray, number: bool) -> bool:
    """Whether signs of a site are believed."""
    return len(y) >= 2 * EACH and len({*y.tolist()}) > 2 if number else min(y.sum(), len(y) - y.sum()) >= EACH


def _agreed(bears: Sequence[int], rows: Rows, fits: Mapping[int, Fit]) -> list[int]:
    """The sites whose models rank each other's rows the same way, the larger of two groups."""
    ranked = [[_ranked(rows.x[k] @ fits[j].coefficients, rows.y[k], rows.number) for k in bears] for j in bears]
    z = np.array([[(rank - 0.5) / error for rank, error in row] for row in ranked])
    np.fill_diagonal(z, 0)
    side = np.linalg.eigh(z + z.T)[1][:, -1] >= 0
    groups = [[k for k, s in zip(bears, side, strict=True) if s == of] for of in (True, False)]
    return max(groups, key=lambda ks: (len(ks), sum(len(rows.y[k]) for k in ks)))


def scaled(
    sheets: Sequence[Sheet], inputs: Sequence[Column], target: Column, number: bool = False, pooled: bool = False
) -> Rows:
    """The rows with an outcome, of the largest sites some; `pooled`: scaled over all sites."""
    columns: list[tuple[str, str | None]] = []
    for c in inputs:
        if c.kind == "number":
            columns.append((c.name, None))
        elif len(c.values) <= FEW:
            columns += [(c.name, value) for value in c.values[1:]]
    x, y = list[np.ndarray](), list[np.ndarray]()
    for s in sheets:
        outcome = s.numbers(target.name) if number else s.positions(target.name, target.values).astype(float)
        take = np.flatnonzero(np.isfinite(outcome) if number else outcome >= 0)
        take = take[:: max(1, len(take) // ROWS)]
        y.append((_middled(outcome, outcome) if number else outcome)[take])
        x.append(
            np.stack([_column(s, *c, sheets if pooled else [s])[take] for c in columns], 1)
            if columns
            else np.zeros((len(take), 0))
        )
    return Rows(columns, x, y, number)


def _column(s: Sheet, name: str, value: str | None, over: Sequence[Sheet]) -> np.ndarray:
    if value is not None:
        return (s.positions(name, [value]) == 0).astype(float)
    return _middled(s.numbers(name), np.concatenate([o.numbers(name) for o in over]))


def _middled(v: np.ndarray, over: np.ndarray) -> np.ndarray:
    """Numbers in deviations from the median of some."""
    there = over[np.isfinite(over)]
    if not len(there):
        return np.zeros(len(v))
    low, middle, high = np.quantile(there, MIDDLE)
    return np.clip(np.where(np.isfinite(v), v - middle, 0) / ((high - low) / 1.349 or 1.0), -4, 4)


def fitted(x: Sequence[np.ndarray], y: Sequence[np.ndarray], number: bool = False) -> Fit:
    """Logistic or linear regression with an intercept for each site and a ridge of 1, by Newton's method."""
    site, d = np.repeat(np.arange(len(x)), [len(v) for v in y]), x[0].shape[1]
    whole, out = np.hstack([np.concatenate(x), np.eye(len(x))[site]]), np.concatenate(y)
    ridge = np.diag([1.0] * d + [1e-3] * len(x))
    b, hessian = np.zeros(whole.shape[1]), ridge
    for _ in range(1 if number else 8):
        p = whole @ b if number else expit(whole @ b)
        weight = np.ones(len(p)) if number else p * (1 - p)
        hessian = (whole * weight[:, None]).T @ whole + ridge
        b += np.linalg.solve(hessian, whole.T @ (out - p) - ridge @ b)
    spread = float(np.square(out - whole @ b).sum()) / max(1, len(out) - len(b)) if number else 1.0
    variances = np.diag(np.linalg.inv(hessian)) * spread
    return Fit(b[:d], variances[:d], b[d:], variances[d:])


def _ranked(score: np.ndarray, y: np.ndarray, number: bool) -> tuple[float, float]:
    """(how well a score ranks rows, from 0 to 1, its standard error near a half): AUC, or Spearman's rho scaled so."""
    if not number:
        return ranking(score, y)
    rho = np.corrcoef(ranks(score), ranks(y))[0, 1] if np.ptp(score) else 0.0
    return (1 + float(rho)) / 2, 0.5 / math.sqrt(len(y) - 1)


def _own_rank(x: np.ndarray, y: np.ndarray, number: bool) -> float:
    """How well a site's own model ranks rows that it has not seen, five folds."""
    fold, score = np.arange(len(y)) % 5, np.zeros(len(y))
    for k in range(5):
        b = fitted([x[fold != k]], [y[fold != k]], number).coefficients
        score[fold == k] = x[fold == k] @ b
    return _ranked(score, y, number)[0]
