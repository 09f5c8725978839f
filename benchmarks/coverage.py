"""How often polyfed's intervals hold the true gain, how long they are, and how often a verdict is wrong.

Populations are drawn again and again, two methods are trained in closed form or by Newton, and the interval is held
against the gain that these methods have on average over training sets, on new patients of the site (`truth`). Prints
tables for docs/verdicts.md (--docs writes them there); finished parts are kept in --out, so that it can be resumed.

    python benchmarks/coverage.py --out coverage.jsonl --docs docs/verdicts.md

The world: six standard normal inputs and an intercept; a site's coefficients are common ones plus h times a direction
of its own. `logistic`: labels, ridge logistic regression, by accuracy and AUC; `linear`: unit noise, ridge, by RMSE.
`gain`, `even`, `harm`: the common model against the own ones, with h small, in between and large.
`zero SCORE`: the same, with an h for every site at which its gain is zero.
`single SCORE`: the world of `zero`, of one split alone, which takes a twentieth of the time: so it is drawn more often.
`equal`: three common models, each without one of three inputs that are worth the same: every gain is zero.
`halves`: two common models, each of one half of the patients: every gain is zero.
`plan`: from three seeds it is said which gain ten seeds would show, or four times as many patients; did they?
"""

import argparse
import json
import math
import multiprocessing
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import expit
from scipy.stats import binom, norm, qmc

from polyfed.metrics import terms as added
from polyfed.report import intervals

INPUTS = 6
SIZES = {
    4: [303, 261, 46, 130],
    20: np.geomspace(30, 3000, 20).astype(int).tolist(),
    100: np.geomspace(30, 1000, 100).astype(int).tolist(),
}
HETEROGENEITY = {"linear": {"gain": 0.1, "even": 0.3, "harm": 0.8}, "logistic": {"gain": 0.1, "even": 0.6, "harm": 1.2}}
SCORES = {"linear": ("rmse",), "logistic": ("accuracy", "auc")}
TESTED = 0.34
REPEATS = {4: 500, 20: 200, 100: 400}
SINGLE = 2000  # populations of one split
RULES = ("t", "Nadeau-Bengio", "polyfed")
GAINS = (0.01, 0.02, 0.03, 0.05, 0.1, 0.2)  # of the power curve


def new_patients(count: int = 2048) -> np.ndarray:
    """[count, inputs + 1] a quasi-random sample of the population's inputs, and a one."""
    unit = qmc.Sobol(INPUTS, seed=1).random(count).clip(1e-6, 1 - 1e-6)
    return np.c_[norm.ppf(unit), np.ones(count)]


@dataclass(frozen=True, eq=False)
class World:
    """Sites of one kind; `beta` [sites, inputs + 1] are their true coefficients."""

    task: str
    scenario: str
    sizes: list[int]
    beta: np.ndarray

    @classmethod
    def make(cls, task: str, scenario: str, sites: int, seed: int = 0) -> "World":
        rng, sizes = np.random.default_rng(seed), SIZES[sites]
        common = rng.normal(size=INPUTS + 1)
        own = rng.normal(size=(len(sizes), INPUTS + 1))
        h = HETEROGENEITY[task].get(scenario, 0.5)
        beta = common / np.linalg.norm(common) + h * own / np.linalg.norm(own, axis=1, keepdims=True)
        if scenario == "equal":
            beta[:, 1:3] = beta[:, :1]
        world = cls(task, scenario, sizes, beta)
        return world._levelled(beta.mean(0), rng) if scenario.startswith(("zero", "single")) else world

    def _levelled(self, common: np.ndarray, rng: np.random.Generator, steps: int = 120) -> "World":
        """The world in which no site gains or loses: h^2 of every site moves with its gain, in ever smaller steps
        (Robbins and Monro)."""
        own, new = self.beta - common, new_patients(512)
        square, (score,) = np.full(len(own), 1.0), self.scores
        for k in range(steps):
            world = replace(self, beta=common + np.sqrt(square)[:, None] * own)
            x, y = world.draw(rng)
            gain = truth(world, world.models(x, y, ~world.resplit(rng, 2), rng)[:, 0], score, new)[0]
            square = np.clip(square + 8 * gain / (1 + k / 6), 0.01, 30)
        return world

    @property
    def scores(self) -> tuple[str, ...]:
        return tuple(self.scenario.split()[1:]) or SCORES[self.task]

    @property
    def parts(self) -> list[slice]:
        """Where each site's patients are."""
        ends = np.cumsum(self.sizes).tolist()
        return [slice(e - n, e) for e, n in zip(ends, self.sizes, strict=True)]

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(x [N, inputs + 1], y [N]) of all sites, one after another."""
        x = np.c_[rng.normal(size=(sum(self.sizes), INPUTS)), np.ones(sum(self.sizes))]
        eta = (x * np.repeat(self.beta, self.sizes, axis=0)).sum(1)
        return x, eta + rng.normal(size=len(x)) if self.task == "linear" else (rng.random(len(x)) < expit(eta)) * 1.0

    def resplit(self, rng: np.random.Generator, splits: int) -> np.ndarray:
        """[splits, N] bool: who is tested, drawn anew for every split and site."""
        test = np.zeros((splits, sum(self.sizes)), dtype=bool)
        for part, n in zip(self.parts, self.sizes, strict=True):
            for s in range(splits):
                test[s, part.start + rng.permutation(n)[: round(TESTED * n)]] = True
        return test

    def folds(self, rng: np.random.Generator, k: int = 5, times: int = 2) -> np.ndarray:
        """[k times, N] bool: k folds, repeated."""
        test = np.zeros((k * times, sum(self.sizes)), dtype=bool)
        for part, n in zip(self.parts, self.sizes, strict=True):
            for t in range(times):
                fold = rng.permutation(np.arange(n) % k)
                test[t * k : t * k + k, part] = fold == np.arange(k)[:, None]
        return test

    def models(self, x: np.ndarray, y: np.ndarray, train: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """[methods, splits, sites, inputs + 1]; the last method is what the others are held against."""
        everyone = partial(np.broadcast_to, shape=(len(train), len(self.sizes), INPUTS + 1))
        if self.scenario == "equal":
            kept = [np.delete(np.arange(INPUTS + 1), k) for k in range(3)]
            found = np.zeros((3, len(train), 1, INPUTS + 1))
            for k, columns in enumerate(kept):
                found[k, :, 0, columns] = _fitted(self.task, x[:, columns], y, train).T
            return np.stack([everyone(f) for f in found])
        if self.scenario == "halves":
            half = np.concatenate([rng.permutation(np.arange(n) % 2) for n in self.sizes]).astype(bool)
            return np.stack([everyone(_fitted(self.task, x, y, train & h)[:, None]) for h in (half, ~half)])
        own = np.stack([_fitted(self.task, x[p], y[p], train[:, p]) for p in self.parts], axis=1)
        return np.stack([everyone(_fitted(self.task, x, y, train)[:, None]), own])


def _fitted(task: str, x: np.ndarray, y: np.ndarray, train: np.ndarray, ridge: float = 1.0) -> np.ndarray:
    """[splits, p] ridge (linear) or ridge logistic regression of every split's training samples `train` [splits, N]."""
    p, weight = x.shape[1], train.astype(float)
    i, j = np.triu_indices(p)
    products = x[:, i] * x[:, j]

    def solved(curvature: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        h = np.zeros((len(weight), p, p))
        h[:, i, j] = h[:, j, i] = curvature @ products
        return np.linalg.solve(h + ridge * np.eye(p), gradient[..., None])[..., 0]

    if task == "linear":
        return solved(weight, weight @ (x * y[:, None]))
    w = np.zeros((len(weight), p))
    for _ in range(6):
        q = expit(w @ x.T)
        w = w + solved(weight * q * (1 - q), (weight * (y - q)) @ x - ridge * w)
    return w


def gains(world: World, x: np.ndarray, y: np.ndarray, w: np.ndarray, test: np.ndarray, score: str) -> list[Any]:
    """Per site, [methods - 1, splits, n]: what each sample adds to the gain over the last method; NaN: not tested."""
    found = []
    for k, part in enumerate(world.parts):
        output, here = np.einsum("np,msp->msn", x[part], w[:, :, k]), test[:, part]
        terms = np.full(output.shape, math.nan)
        if score == "accuracy":
            terms[:, here] = ((output > 0) == (y[part] > 0.5))[:, here]
        else:
            counts = here.sum(1)  # folds may differ by one
            for count in np.unique(counts):
                rows, at = np.nonzero(counts == count)[0][:, None], np.nonzero(here[counts == count])[1]
                at = at.reshape(len(rows), count)
                o, t = output[:, rows, at], y[part][at]
                value = added.auc(o, t > 0.5) if score == "auc" else -added.rmse((o - t) ** 2)
                terms[:, rows, at] = value
        found.append(terms[:-1] - terms[-1])
    return found


def truth(world: World, w: np.ndarray, score: str, new: np.ndarray) -> np.ndarray:
    """[methods - 1, sites] the gain of models w [methods, sites, p] on new patients."""
    output, eta = w @ new.T, world.beta @ new.T
    if score == "rmse":
        value = -np.sqrt(((output - eta) ** 2).mean(-1) + 1)
    else:
        ill = np.broadcast_to(expit(eta), output.shape)
        if score == "accuracy":
            value = np.where(output > 0, ill, 1 - ill).mean(-1)
        else:
            ill = np.take_along_axis(ill, output.argsort(-1), -1)
            well = 1 - ill
            value = (ill * (well.cumsum(-1) - well / 2)).sum(-1) / (ill.sum(-1) * well.sum(-1))
    return value[:-1] - value[-1]


def widths(found: intervals.Spread, share: float) -> list[tuple[float, float]]:
    """(variance, degrees of freedom) by every rule, in the order of RULES, and as sites are judged jointly."""
    s = len(found.means)
    square = float(found.means.var(ddof=1)) if s > 1 else math.nan
    plain = [(square / s, s - 1.0), (square * (1 / s + share / (1 - share)), s - 1.0)]
    return [*plain, intervals.variance(found, share), intervals.variance(replace(found, whole=True), share)]


def population(world: World, rng: np.random.Generator, new: np.ndarray) -> Iterator[tuple[Any, ...]]:
    """One population by every score and design: (score, design), true gains of the first split's models [m, sites],
    estimates [m, sites + 1] and (variance, freedom) [rules, m, sites + 1, 2]; the last column is the mean of sites."""
    x, y = world.draw(rng)
    single = world.scenario.startswith("single")
    designs = [("", world.resplit(rng, 1 if single else 10), TESTED, (1,) if single else (1, 3, 5, 10))]
    if len(world.sizes) < 100 and not single:  # to save time
        designs.append(("5 folds, ", world.folds(rng), 0.2, (10,)))
    for name, test, share, sizes in designs:
        w = world.models(x, y, ~test, rng)
        for score in world.scores:
            terms, true = gains(world, x, y, w, test, score), truth(world, w[:, 0], score, new)
            span = 0.0 if score == "rmse" else 1.0
            classes = [(y[part] > 0.5).astype(int) if score == "auc" else None for part in world.parts]
            for splits in sizes:
                estimate, spreads = [], []
                for m in range(len(true)):
                    each = zip(terms, classes, strict=True)
                    sites = [intervals.spread(t[m, :splits], span, classes=k) for t, k in each]
                    whole = intervals.mean_spread([s for s in sites if len(s.means) == splits])
                    row = [*sites, whole]
                    estimate.append([s.gain for s in row])
                    spreads.append([widths(s, share) if len(s.means) else [(math.nan,) * 2] * 4 for s in row])
                yield (score, f"{name}S={splits}"), true, np.array(estimate), np.moveaxis(np.array(spreads), 2, 0)


def part(job: tuple[str, str, int, int]) -> list[dict[str, Any]]:
    """All that is counted of one world: a row per score, design and rule."""
    task, scenario, sites, repeats = job
    if scenario == "plan":
        return plan(job)
    warnings.simplefilter("ignore")
    world, new, kept = World.make(task, scenario, sites), new_patients(1024 if sites == 100 else 2048), {}
    for r in range(repeats):
        for key, *found in population(world, np.random.default_rng([r, sites]), new):
            kept.setdefault(key, []).append(found)
    rows = []
    for (score, design), found in kept.items():
        own, estimate, spreads = (np.array(f) for f in zip(*found, strict=True))
        true = own.mean(0) if scenario not in ("equal", "halves") else np.zeros(own.shape[1:])
        true, own = (np.concatenate([t, t.mean(-1, keepdims=True)], -1) for t in (true, own))
        base = {"task": task, "scenario": scenario, "sites": sites, "score": score, "design": design, "of": repeats}
        for rule, name in enumerate(RULES):
            var, freedom = spreads[:, rule, ..., 0], spreads[:, rule, ..., 1]
            if not np.isfinite(var).any():
                continue
            jointly = spreads[:, -1] if name == "polyfed" else spreads[:, rule]
            for target, gain in (("procedure", true), ("models", own))[: 2 if design == "S=1" else 1]:
                found = counted(estimate, gain, var, freedom, jointly)
                rows.append(base | {"rule": name, "target": target} | found)
    return rows


def plan(job: tuple[str, str, int, int]) -> list[dict[str, Any]]:
    """How often a gain is seen that three seeds say would be seen four times in five, by ten of them or with four times
    as many patients."""
    task, _, sites, repeats = job
    warnings.simplefilter("ignore")
    few, new = World.make(task, "even", sites), new_patients()
    many = replace(few, sizes=[4 * n for n in few.sizes])
    told, kept = {}, {}
    for r in range(repeats):
        rng = np.random.default_rng([r, sites, 1])
        for world, splits in ((few, (3, 10)), (many, (3,))):
            x, y = world.draw(rng)
            test = world.resplit(rng, max(splits))
            w = world.models(x, y, ~test, rng)
            for score in world.scores:
                terms, true = gains(world, x, y, w, test, score), truth(world, w[:, 0], score, new)[0]
                for s in splits:
                    each = [intervals.spread(t[0, :s], 0.0 if score == "rmse" else 1.0) for t in terms]
                    row = [*each, intervals.mean_spread([e for e in each if len(e.means) == s])]
                    lengths = [intervals.half_width(*intervals.variance(e, TESTED)) for e in row]
                    key = score, "3 seeds" if world is few and s == 3 else "10 seeds" if s == 10 else "4 times"
                    kept.setdefault(key, []).append(([e.gain for e in row], lengths, [*true, true.mean()]))
                    if key[1] == "3 seeds":
                        said = [[intervals.seen(e, TESTED, 10) for e in row]]
                        said.append([intervals.seen(e, TESTED, 3) / 2 for e in row])
                        told.setdefault(score, []).append(said)
    rows = []
    for score, said in told.items():
        for k, what in enumerate(("10 seeds", "4 times")):
            gain, half, true = (np.array(v) for v in zip(*kept[score, what], strict=True))
            expected = np.array(said)[:, k]
            seen = np.abs(gain - true.mean(0) + expected) > half
            known = np.isfinite(gain) & np.isfinite(expected)
            parts = [float(seen[at][known[at]].mean()) for at in (np.s_[:, :-1], np.s_[:, -1:])]
            base = {"task": task, "scenario": "plan", "sites": sites, "score": score, "design": what, "of": repeats}
            rows.append(base | {"rule": "polyfed", "target": "procedure", "seen": parts})
    return rows


def counted(
    estimate: np.ndarray, gain: np.ndarray, var: np.ndarray, freedom: np.ndarray, jointly: np.ndarray
) -> dict[str, Any]:
    """Coverage, half lengths, verdicts and power from arrays [repeats, methods, sites + 1]; jointly: [..., 2] variance
    and degrees of freedom by which sites are judged jointly."""
    methods, known = estimate.shape[1], np.isfinite(estimate) & np.isfinite(var)
    half = np.vectorize(intervals.half_width)(var, freedom)
    off = estimate - gain  # as if the gain were zero: what is left of it where sites were levelled must not count
    p = np.vectorize(partial(intervals.p_value, comparisons=methods))(off, jointly[..., 0], jointly[..., 1])
    p[~known] = math.nan

    def clear(shift: Any, which: Any) -> float:
        """How often a gain of so much (all else the same) would be seen."""
        return float((np.abs(off + shift) > half)[which][known[which]].mean())

    def shares(found: np.ndarray) -> list[float]:
        return np.nanmean(np.where(known, found, math.nan), axis=(0, 1)).tolist()

    seen = half + float(norm.ppf(intervals.POWER)) * np.sqrt(var)
    return {
        "covered": shares(np.abs(off) <= half + 1e-12),  # of every site, and of the mean
        "half": shares(half),
        "gain": float(gain[..., -1].mean()),
        "any": float(np.mean([any(intervals.holm(q[:-1]).any() for q in one) for one in p])),  # some site and method
        "whole": float((p[..., -1] <= 0.05).any(1).mean()),  # some method, in the mean over sites
        "power": [[clear(g, np.s_[..., :-1]), clear(g, np.s_[..., -1:])] for g in GAINS],
        "seen": [
            [float(np.nanmedian(seen[which])), clear(seen, which)] for which in (np.s_[..., :-1], np.s_[..., -1:])
        ],
    }


# what is printed


def least(rows: list[dict[str, Any]]) -> str:
    """Coverage of the site that fares worst, each over the scenarios of `rows` together, and what chance alone makes of
    the worst of so many sites that all have the pooled coverage. Marked where a site is below 90 %, tested at 5 % over
    all sites together (Bonferroni)."""
    each = np.average([r["covered"][:-1] for r in rows], axis=0, weights=[r["of"] for r in rows])
    drawn = sum(r["of"] for r in rows)
    chance = ((1 - binom.cdf(np.arange(drawn), drawn, each.mean())) ** len(each)).sum() / drawn
    low = binom.cdf(np.round(each.min() * drawn), drawn, 0.9) < 0.05 / len(each)
    return f"{100 * each.min():.1f} ({100 * chance:.1f}){' below 90' if low else ''}"


def span(values: list[float], digits: int = 1) -> str:
    low, high = (f"{100 * v:.{digits}f}" for v in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def chosen(rows: list[dict[str, Any]], **keys: Any) -> list[dict[str, Any]]:
    return [r for r in rows if all(r[k] == v for k, v in keys.items())]


def tables(rows: list[dict[str, Any]]) -> str:
    """The Markdown of all tables, from the rows that there are."""
    rows = [r | {"world": r["scenario"].split()[0]} for r in rows]
    often = {(r["score"], r["sites"]): r["of"] for r in rows if r["world"] == "single"}
    rows = [r for r in rows if (r["world"], r["design"]) != ("zero", "S=1") or (r["score"], r["sites"]) not in often]
    many = [r for r in rows if r["world"] != "single"]
    drawn = ", ".join(
        f"{max(r['of'] for r in many if r['sites'] == k)} ({k} sites)" for k in sorted({r["sites"] for r in many})
    )
    drawn += "".join(f"; of one split where nobody gains {n}" for n in sorted(set(often.values())))
    rows = [r | {"world": "zero"} if r["world"] == "single" else r for r in rows]
    kinds = sorted({(r["score"], r["sites"]) for r in rows if r["world"] != "plan"}, key=lambda k: (k[1], k[0]))
    parts = (_coverage, _one_split, _wrong, _power, _planned, _limits)
    return "\n\n".join([f"Populations drawn per world: {drawn}.", *("\n".join(p(rows, kinds)) for p in parts)]) + "\n"


DESIGNS = ("S=3", "S=5", "S=10", "5 folds, S=10")
AGAINST_OWN = ("gain", "even", "harm", "zero")


def own_models(rows: list[dict[str, Any]], **keys: Any) -> list[dict[str, Any]]:
    return [r for r in chosen(rows, **keys) if r["world"] in AGAINST_OWN]


def sites_of(row: dict[str, Any]) -> float:
    """Coverage pooled over sites."""
    return float(np.mean(row["covered"][:-1]))


def _head(names: str, left: int = 2) -> list[str]:
    return [f"| {names} |", "|" + ":--|" * left + "--:|" * (names.count("|") + 1 - left)]


def _coverage(rows: list[dict[str, Any]], kinds: list[tuple[str, int]]) -> list[str]:
    out = ["### Coverage and length: splits drawn anew, common against own models", ""]
    out += _head(
        "score, sites | design | sites: t | Nadeau-Bengio | **polyfed** | least site | means: t | Nadeau-Bengio "
        "| **polyfed** | length, sites | length, means"
    )
    for score, sites in kinds:
        for design in DESIGNS:
            by = [own_models(rows, score=score, sites=sites, design=design, rule=n) for n in RULES]
            if not by[2]:
                continue
            pooled, means = (
                [span([f(r) for r in found]) for found in by] for f in (sites_of, lambda r: r["covered"][-1])
            )
            half = [np.mean([r["half"] for r in found], axis=0) for found in by[1:]]
            length = [half[1][:-1].mean() / half[0][:-1].mean(), half[1][-1] / half[0][-1]]
            cells = [*pooled[:2], f"**{pooled[2]}**", least(by[2]), *means[:2], f"**{means[2]}**"]
            out.append(f"| {score}, {sites} | {design} | " + " | ".join([*cells, *(f"{v:.2f}" for v in length)]) + " |")
    return out


def _one_split(rows: list[dict[str, Any]], kinds: list[tuple[str, int]]) -> list[str]:
    out = ["### Coverage of one split, or a fixed test set", ""]
    out += _head(
        "score, sites | these models: sites | least site | means | the procedure: sites | least site | means", 1
    )
    for score, sites in kinds:
        cells = []
        for target in ("models", "procedure"):
            own = own_models(rows, score=score, sites=sites, design="S=1", rule="polyfed", target=target)
            cells += [
                span([sites_of(r) for r in own]),
                least(own),
                span([r["covered"][-1] for r in own]),
            ]
        out.append(f"| {score}, {sites} | " + " | ".join(cells) + " |")
    return out


def _wrong(rows: list[dict[str, Any]], kinds: list[tuple[str, int]]) -> list[str]:
    out = ["### Wrong verdicts where no site gains or loses, per cent", ""]
    names = [f"{what}: t | Nadeau-Bengio | **polyfed**" for what in ("any site of the federation", "the mean")]
    out += _head(f"score, sites | design | {' | '.join(names)}")
    for score, sites in kinds:
        for design in ("S=1", *DESIGNS):
            same = {"score": score, "sites": sites, "design": design}
            same["target"] = "models" if design == "S=1" else "procedure"
            by = [chosen(rows, world="zero", rule=n, **same) for n in RULES]
            if by[2]:
                cells = [f"{100 * r[0][key]:.1f}" if r else "–" for key in ("any", "whole") for r in by]
                cells[2], cells[5] = f"**{cells[2]}**", f"**{cells[5]}**"
                out.append(f"| {score}, {sites} | {design} | " + " | ".join(cells) + " |")
    return out


def _power(rows: list[dict[str, Any]], kinds: list[tuple[str, int]]) -> list[str]:
    out = ["### Power: how often a gain in accuracy is seen, per cent", ""]
    points = " | ".join(f"{100 * g:g} points" for g in GAINS)
    out += _head(f"of | design | {points} | said to be seen 4 times in 5 | was seen")
    same = {"scenario": "even", "score": "accuracy", "target": "procedure", "rule": "polyfed"}
    for k, what in enumerate(("a site", "the mean")):
        for sites in sorted({k for _, k in kinds}):
            for design in ("S=1", *DESIGNS):
                for r in chosen(rows, sites=sites, design=design, **same):
                    cells = [f"{100 * p[k]:.0f}" for p in r["power"]]
                    cells += [f"{100 * r['seen'][k][0]:.1f} points", f"{100 * r['seen'][k][1]:.0f}"]
                    out.append(f"| {what} of {sites} | {design} | " + " | ".join(cells) + " |")
    return out


def _planned(rows: list[dict[str, Any]], kinds: list[tuple[str, int]]) -> list[str]:
    out = ["### What three seeds say would be seen four times in five, and how often it was, per cent", ""]
    out += _head("score, sites | ten seeds: a site | the mean | four times the patients: a site | the mean", 1)
    for score, sites in kinds:
        by = [chosen(rows, world="plan", score=score, sites=sites, design=d) for d in ("10 seeds", "4 times")]
        if all(by):
            out.append(f"| {score}, {sites} | " + " | ".join(f"{100 * v:.0f}" for r in by for v in r[0]["seen"]) + " |")
    return out


def _limits(rows: list[dict[str, Any]], kinds: list[tuple[str, int]]) -> list[str]:
    out = ["### One common model against another, every gain zero: why a site gets no interval there", ""]
    names = [f"{what}: t | Nadeau-Bengio | **polyfed**" for what in ("sites", "means", "any site wrong")]
    out += _head(f"world, score, sites | design | {' | '.join(names)}")
    for world in ("equal", "halves"):
        for score, sites in kinds:
            for design in DESIGNS:
                by = [chosen(rows, world=world, score=score, sites=sites, design=design, rule=n) for n in RULES]
                if by[2]:
                    values = [f(r[0]) for f in (sites_of, lambda r: r["covered"][-1], lambda r: r["any"]) for r in by]
                    cells = [f"**{100 * v:.1f}**" if k % 3 == 2 else f"{100 * v:.1f}" for k, v in enumerate(values)]
                    out.append(f"| {world}, {score}, {sites} | {design} | " + " | ".join(cells) + " |")
    return out


MARKS = ("<!-- made by benchmarks/coverage.py -->", "<!-- end -->")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, nargs="+", choices=sorted(SIZES), default=sorted(SIZES))
    parser.add_argument("--repeats", type=int, help="populations of every world (default: fewer where sites are many)")
    parser.add_argument("--out", type=Path, default=Path("coverage.jsonl"), help="finished worlds, kept and not redone")
    parser.add_argument("--docs", type=Path, help="a Markdown file whose marked part the tables replace")
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    kinds = [(t, s) for t in SCORES for s in (*HETEROGENEITY[t], *(f"zero {score}" for score in SCORES[t]), "equal")]
    jobs = [(t, s, k, given.repeats or REPEATS[k]) for k in given.sites for t, s in kinds]
    jobs += [(t, "halves", k, given.repeats or REPEATS[k]) for k in given.sites for t in SCORES]
    jobs += [(t, f"single {s}", k, given.repeats or SINGLE) for k in given.sites for t in SCORES for s in SCORES[t]]
    jobs += [(t, "plan", k, given.repeats or REPEATS[k]) for k in given.sites if k < 100 for t in SCORES]
    kept = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    done = {tuple(k["job"]) for k in kept}
    todo = [job for job in jobs if job not in done]
    with multiprocessing.Pool(given.workers) as pool, given.out.open("a") as out:
        start = time.perf_counter()
        for job, rows in zip(todo, pool.imap(part, todo), strict=True):
            kept.append({"job": job, "rows": rows})
            print(json.dumps(kept[-1]), file=out, flush=True)
            print(f"{time.perf_counter() - start:6.0f} s: {' '.join(map(str, job))}", flush=True)
    text = tables([r for k in kept if tuple(k["job"]) in set(jobs) for r in k["rows"]])
    print(text)
    if given.docs:
        before, rest = given.docs.read_text().split(MARKS[0])
        given.docs.write_text(f"{before}{MARKS[0]}\n{text}{MARKS[1]}{rest.split(MARKS[1])[1]}")


if __name__ == "__main__":
    main()
