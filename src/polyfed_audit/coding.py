"""Sites whose outcome, inputs or columns are coded otherwise than those of the others, and sites of few rows."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from scipy.special import expit

from polyfed.base.columns import RENAME
from polyfed.base.errors import few as listed
from polyfed.base.part import Flag, Part
from polyfed.data.csv_files import FEW, Column, Sheet
from polyfed.metrics.terms import ranking
from polyfed_audit.codes import RARE
from polyfed_audit.parts import CODED

EACH = 8  # rows of each class at a site, from which its signs are believed
ROWS = 3000  # of a site that are looked at
FEWEST = 30  # rows with which a third tested bears a verdict
BELOW, ABOVE = 3.0, 2.0  # standard errors from an AUC of a half: of the others' model here, and of the site's own
TURNED, APART = 3.0, 4.5  # standard errors of a coefficient from 0, here and elsewhere, and of both from each other
SHIFTED, NEAR, LIKE = 0.9, 0.7, 0.2  # widths of exchanged columns: off their place, off the other's; its share of that
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
    """A logistic regression: coefficients and their variances, of a site's own columns and not of its intercepts."""

    coefficients: np.ndarray
    variances: np.ndarray


def turned(sheets: Sequence[Sheet], inputs: Sequence[Column], target: Column) -> Iterator[Flag]:
    """Sites where the outcome, or one input, goes the other way than at most others.

    Numbers are scaled within each site, so that another unit is not another sign.
    """
    columns, x, y = _scaled(sheets, inputs, target)
    bears = [k for k, v in enumerate(y) if min(v.sum(), len(v) - v.sum()) >= EACH]
    if len(bears) < 2 or not columns:
        return
    fits = {k: _fitted([x[k]], [y[k]]) for k in bears}
    most = _agreed(bears, x, y, fits)
    values, swap = target.values, dict(zip(target.values, reversed(target.values), strict=True))
    for k in bears:
        rest = [j for j in most if j != k]
        if not rest:
            continue
        site, own, others = sheets[k].name, fits[k], _fitted([x[j] for j in rest], [y[j] for j in rest])
        (auc, error), mine = ranking(x[k] @ others.coefficients, y[k]), _own_auc(x[k], y[k])
        if auc + BELOW * error < 0.5 < mine - ABOVE * error:
            said = f"a model of the other sites has an AUC of {auc:.2f} there, its own {mine:.2f}"
            text = f"{target.name} goes the other way: {said}; are {' and '.join(values)} coded the other way round?"
            yield Flag(site, target.name, text, {"site": {site: {target.name: swap}}})
            continue
        for j, (name, value) in enumerate(columns):
            b, c = own.coefficients[j], others.coefficients[j]
            se, sc = np.sqrt(own.variances[j]), np.sqrt(others.variances[j])
            if b * c < 0 and min(abs(b) / se, abs(c) / sc) > TURNED and abs(b - c) > APART * np.hypot(se, sc):
                of = next(i for i in inputs if i.name == name)
                what = name if value is None else f"{name} = {value}"
                text = f"{what} has the coefficient {b:+.2f} for {target.name}, and {c:+.2f} at the other sites"
                two = dict(zip(of.values, reversed(of.values), strict=True)) if len(of.values) == 2 else {}
                repair = {"site": {site: {name: two}}} if two else {}
                yield Flag(site, name, f"{text}: coded the other way round?", repair)
                break


def _agreed(
    bears: Sequence[int], x: Sequence[np.ndarray], y: Sequence[np.ndarray], fits: Mapping[int, Fit]
) -> list[int]:
    """The sites whose models rank each other's rows the same way, the larger of two groups."""
    ranked = [[ranking(x[k] @ fits[j].coefficients, y[k]) for k in bears] for j in bears]
    z = np.array([[(auc - 0.5) / error for auc, error in row] for row in ranked])
    np.fill_diagonal(z, 0)
    side = np.linalg.eigh(z + z.T)[1][:, -1] >= 0
    groups = [[k for k, s in zip(bears, side, strict=True) if s == of] for of in (True, False)]
    return max(groups, key=lambda ks: (len(ks), sum(len(y[k]) for k in ks)))


def _scaled(
    sheets: Sequence[Sheet], inputs: Sequence[Column], target: Column
) -> tuple[list[tuple[str, str | None]], list[np.ndarray], list[np.ndarray]]:
    """(column and value of each input, inputs [n, d] and outcomes [n] of each site), gaps in the middle."""
    columns: list[tuple[str, str | None]] = []
    for c in inputs:
        if c.kind == "number":
            columns.append((c.name, None))
        elif len(c.values) <= FEW:
            columns += [(c.name, value) for value in c.values[1:]]
    x, y = list[np.ndarray](), list[np.ndarray]()
    for s in sheets:
        outcome = s.positions(target.name, target.values)
        take = np.flatnonzero(outcome >= 0)
        take = take[:: max(1, len(take) // ROWS)]
        y.append(outcome[take].astype(float))
        x.append(np.stack([_column(s, *c)[take] for c in columns], 1) if columns else np.zeros((len(take), 0)))
    return columns, x, y


def _column(s: Sheet, name: str, value: str | None) -> np.ndarray:
    if value is not None:
        return (s.positions(name, [value]) == 0).astype(float)
    v = s.numbers(name)
    there = v[np.isfinite(v)]
    if not len(there):
        return np.zeros(len(v))
    low, middle, high = np.quantile(there, (0.25, 0.5, 0.75))
    return np.clip(np.where(np.isfinite(v), v - middle, 0) / ((high - low) / 1.349 or 1.0), -4, 4)


def _fitted(x: Sequence[np.ndarray], y: Sequence[np.ndarray]) -> Fit:
    """Logistic regression with an intercept for each site and a ridge of 1, by Newton's method."""
    site, d = np.repeat(np.arange(len(x)), [len(v) for v in y]), x[0].shape[1]
    whole, out = np.hstack([np.concatenate(x), np.eye(len(x))[site]]), np.concatenate(y)
    ridge = np.diag([1.0] * d + [1e-3] * len(x))
    b = np.zeros(whole.shape[1])
    for _ in range(8):
        p = expit(whole @ b)
        hessian = (whole * (p * (1 - p))[:, None]).T @ whole + ridge
        b += np.linalg.solve(hessian, whole.T @ (out - p) - ridge @ b)
    return Fit(b[:d], np.diag(np.linalg.inv(hessian))[:d])


def _own_auc(x: np.ndarray, y: np.ndarray) -> float:
    """AUC of a site's own model on rows that it has not seen, five folds."""
    fold, score = np.arange(len(y)) % 5, np.zeros(len(y))
    for k in range(5):
        b = _fitted([x[fold != k]], [y[fold != k]]).coefficients
        score[fold == k] = x[fold == k] @ b
    return ranking(score, y)[0]
