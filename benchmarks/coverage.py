"""How often polyfed's intervals hold the true gain, how long they are, and how often a verdict is wrong.

Populations are drawn again and again, two methods are trained in closed form or by Newton, and the interval is held
against the gain that these methods have on average over training sets, on new patients of the site (`truth`). Prints
tables for docs/verdicts-statistics.md (--docs writes them there, tools/tables.py moves them to files); finished
parts are kept in --out, so that it can be resumed.

    python benchmarks/coverage.py --out coverage.jsonl --docs docs/verdicts-statistics.md

The world: six standard normal inputs and an intercept; a site's coefficients are common ones plus h times a direction
of its own. `logistic`: labels, ridge logistic regression, by accuracy and AUC; `linear`: unit noise, ridge, by RMSE.
`gain`, `even`, `harm`: the common model against the own ones, with h small, in between and large.
`zero SCORE`: the same, with an h for every site at which its gain is zero.
`single SCORE`: the world of `zero`, of one split alone, which takes a twentieth of the time: so it is drawn more often.
`equal`: three common models, each without one of three inputs that are worth the same: every gain is zero.
`halves`: two common models, each of one half of the patients: every gain is zero.
`heavy`, `gross`, `rare`, `seldom`, `five`: noise of t with 2.5 degrees of freedom; with 2 % of 20 times the size;
3 to 5 % and some 15 % are ill; five classes, of which the smallest has 6 %. Ten sites, two to five seeds.
`other SCORES`: federations of OTHERS, one to ten seeds; of one seed the gain is that of the trained models.
`fixed SCORES`: one test set of nine tenths under every seed, which leaves out another tenth of the training samples.
`nearL SCORES`: personal models, drawn to the common one by a ridge L, against it.
`planK`: from three seeds it is said which gain ten seeds would show, or K times as many patients; did they?
"""

import argparse
import json
import math
import multiprocessing
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import expit, softmax
from scipy.stats import binom, norm, qmc
from scipy.stats import t as student

from polyfed.metrics import terms as added
from polyfed.metrics.scores import KNOWN
from polyfed.report import intervals
from polyfed.report.verdicts import bearing

INPUTS = 6
SIZES = {
    4: [303, 261, 46, 130],
    10: np.geomspace(100, 2000, 10).astype(int).tolist(),
    20: np.geomspace(30, 3000, 20).astype(int).tolist(),
    100: np.geomspace(30, 1000, 100).astype(int).tolist(),
}
NEAR = (3, 300, 10000)  # ridges of personal models
OTHERS = {  # federation: (rows of its sites, what is drawn of them)
    "a site of 9 rows": ([303, 261, 123, 130, 9], ("logistic other accuracy brier auc", "linear other rmse")),
    "9, 40, 4000 rows": ([9, 40, 4000], ("logistic other accuracy brier auc", "linear other rmse")),
    "two sites": ([150, 250], ("logistic other accuracy brier auc", "linear other rmse")),
    "thirty sites": (np.linspace(60, 400, 30).astype(int).tolist(), ("logistic other accuracy brier auc",)),
    "ten of 20 rows": (
        [20] * 10,
        (
            *("logistic other accuracy brier auc", "linear other rmse"),
            *(f"{t} plan{k}" for t in ("logistic", "linear") for k in (4, 16)),
        ),
    ),
    "eight of 12 to 30": (np.linspace(12, 30, 8).astype(int).tolist(), ("linear other rmse",)),
    "8 % ill, 25 to 300 rows": (np.geomspace(25, 300, 8).astype(int).tolist(), ("eighth other accuracy brier auc",)),
    "2 % ill, 150 to 3000 rows": (np.geomspace(150, 3000, 6).astype(int).tolist(), ("fiftieth other brier auc f1",)),
    "150 to 800 rows": ([150, 250, 400, 800], ("gross other rmse mae", "heavy other rmse mae")),
    "four hospitals": (
        SIZES[4],
        ("logistic fixed accuracy brier auc", *(f"linear near{x} rmse" for x in NEAR)),
    ),
}
SIZES |= {name: rows for name, (rows, _) in OTHERS.items()}
HETEROGENEITY = {"linear": {"gain": 0.1, "even": 0.3, "harm": 0.8}, "logistic": {"gain": 0.1, "even": 0.6, "harm": 1.2}}
SCORES = {
    "linear": ("rmse",),
    "logistic": ("accuracy", "auc"),
    "heavy": ("rmse", "mae", "r2"),
    "gross": ("rmse", "mae"),
    "rare": ("f1", "auc", "average-precision"),
    "seldom": ("f1", "balanced-accuracy"),
    "five": ("accuracy", "balanced-accuracy", "auc"),
}
HARD = ("heavy", "gross", "rare", "seldom", "five")
LENGTH = {"rare": 3.0, "seldom": 2.0, "five": 2.0, "fiftieth": 2.0}  # of the common coefficients; else 1
RIDGE = {"rare": 0.1}  # else 1
BASE = {"rare": -6.1, "seldom": -2.7, "eighth": -2.9, "fiftieth": -5.7}  # intercepts
BASE["five"] = np.log([0.4, 0.25, 0.17, 0.12, 0.06])
TAILS = 2.5  # degrees of freedom of the noise of `heavy`
NOISE = {"linear": 1.0, "heavy": TAILS / (TAILS - 2), "gross": 0.98 + 0.02 * 20**2}  # its variance, of numbers
NAMES = {
    "heavy": "heavy tails",
    "gross": "2 % gross errors",
    "rare": "3 to 5 % ill",
    "seldom": "15 % ill",
    "five": "five classes",
}
TESTED = 0.34
REPEATS = {4: 300, 10: 200, 20: 80, 100: 30}
SINGLE = {4: 1000, 20: 300, 100: 60}  # populations of one split
FIXED, LUCK = 0.9, 40  # of a fixed test set: its share, and of the rest that a seed trains on; seeds that are the truth
SPLITS = {"single": (1,), "other": (1, 3, 10), "near": (3, 10), "fixed": (3, 10)}  # of worlds; else below
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
        classes = (len(BASE["five"]),) if task == "five" else ()
        common = rng.normal(size=(INPUTS + 1, *classes))
        own = rng.normal(size=(len(sizes), INPUTS + 1, *classes))
        h = HETEROGENEITY["linear" if task in NOISE else "logistic"]
        if task in BASE:
            common[-1] = 0.0
        common *= LENGTH.get(task, 1.0) / np.linalg.norm(common, axis=0)
        if task in BASE:
            common[-1], own[:, -1] = BASE[task], 0.0
        beta = common + h.get(scenario, 0.5) * own / np.linalg.norm(own, axis=1, keepdims=True)
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
    def noise(self) -> float:
        """Its variance, of numbers."""
        return NOISE[self.task]

    @property
    def parts(self) -> list[slice]:
        """Where each site's patients are."""
        ends = np.cumsum(self.sizes).tolist()
        return [slice(e - n, e) for e, n in zip(ends, self.sizes, strict=True)]

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(x [N, inputs + 1], y [N]) of all sites, one after another."""
        x = np.c_[rng.normal(size=(sum(self.sizes), INPUTS)), np.ones(sum(self.sizes))]
        eta = np.einsum("np,np...->n...", x, np.repeat(self.beta, self.sizes, axis=0))
        if self.task == "five":
            return x, (eta + rng.gumbel(size=eta.shape)).argmax(1) * 1.0
        return x, eta + noise(self.task, rng, len(x)) if self.task in NOISE else (rng.random(len(x)) < expit(eta)) * 1.0

    def resplit(self, rng: np.random.Generator, splits: int, share: float = TESTED) -> np.ndarray:
        """[splits, N] bool: who is tested, drawn anew for every split and site."""
        test = np.zeros((splits, sum(self.sizes)), dtype=bool)
        for part, n in zip(self.parts, self.sizes, strict=True):
            for s in range(splits):
                test[s, part.start + rng.permutation(n)[: round(share * n)]] = True
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
        everyone = partial(np.broadcast_to, shape=(len(train), *self.beta.shape))
        if self.scenario == "equal":
            kept = [np.delete(np.arange(INPUTS + 1), k) for k in range(3)]
            found = np.zeros((3, len(train), 1, INPUTS + 1))
            for k, columns in enumerate(kept):
                found[k, :, 0, columns] = _fitted(self.task, x[:, columns], y, train).T
            return np.stack([everyone(f) for f in found])
        if self.scenario == "halves":
            half = np.concatenate([rng.permutation(np.arange(n) % 2) for n in self.sizes]).astype(bool)
            return np.stack([everyone(_fitted(self.task, x, y, train & h)[:, None]) for h in (half, ~half)])
        common, near = _fitted(self.task, x, y, train), self.scenario.split()[0].partition("near")[2]
        pull = [(float(near), common)] if near else []
        own = np.stack([_fitted(self.task, x[p], y[p], train[:, p], *pull) for p in self.parts], axis=1)
        return np.stack([everyone(common[:, None]), own][:: -1 if near else 1])


def noise(task: str, rng: np.random.Generator, n: int) -> np.ndarray:
    """[n] of numbers."""
    if task == "heavy":
        return rng.standard_t(TAILS, size=n)
    return rng.normal(size=n) * np.where(rng.random(n) < 0.02, 20, 1) if task == "gross" else rng.normal(size=n)


def tails(world: World, x: np.ndarray, y: np.ndarray, w: np.ndarray, test: np.ndarray) -> float:
    """The kurtosis of errors as verdicts take it: of the method whose tails are lighter, each site by its own mean."""
    found = []
    for m in w if world.task in NOISE else ():
        each = [(y[p] - np.einsum("np,sp->sn", x[p], m[:, k]))[test[:, p]] ** 2 for k, p in enumerate(world.parts)]
        found.append(float(np.concatenate([(e / e.mean()) ** 2 for e in each]).mean()))
    return min(found, default=0.0)


def _fitted(task: str, x: np.ndarray, y: np.ndarray, train: np.ndarray, near: Any = None) -> np.ndarray:
    """[splits, p] ridge (linear) or ridge logistic regression of every split's training samples `train` [splits, N];
    near: (ridge, [splits, p] where to), else to zero."""
    p, weight = x.shape[1], train.astype(float)
    ridge, to = near or (RIDGE.get(task, 1.0), np.zeros((len(train), p)))
    i, j = np.triu_indices(p)
    products = x[:, i] * x[:, j]

    def solved(curvature: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        h = np.zeros((len(weight), p, p))
        h[:, i, j] = h[:, j, i] = curvature @ products
        return np.linalg.solve(h + ridge * np.eye(p), gradient[..., None])[..., 0]

    if task == "five":  # ridge regression on every class
        return np.stack([_fitted("linear", x, (y == k) * 1.0, train) for k in range(len(BASE["five"]))], axis=-1)
    if task in NOISE:
        return solved(weight, weight @ (x * y[:, None]) + ridge * to)
    w = to
    for _ in range(6):
        q = expit(w @ x.T)
        w = w + solved(weight * q * (1 - q), (weight * (y - q)) @ x - ridge * (w - to))
    return w


def gains(world: World, x: np.ndarray, y: np.ndarray, w: np.ndarray, test: np.ndarray, score: str) -> list[Any]:
    """Per site, [methods - 1, splits, n]: what each sample adds to the gain over the last method; NaN: not tested."""
    found = []
    for k, part in enumerate(world.parts):
        output, here = np.einsum("np,msp...->msn...", x[part], w[:, :, k]), test[:, part]
        terms = np.full(output.shape[:3], math.nan)
        if score == "accuracy":
            terms[:, here] = (guessed(output) == y[part])[:, here]
        elif score in ("auc", "rmse") and world.task != "five":
            counts = here.sum(1)  # folds may differ by one
            for count in np.unique(counts):
                rows, at = np.nonzero(counts == count)[0][:, None], np.nonzero(here[counts == count])[1]
                at = at.reshape(len(rows), count)
                o, t = output[:, rows, at], y[part][at]
                value = added.auc(o, t > 0.5) if score == "auc" else -added.rmse((o - t) ** 2)
                terms[:, rows, at] = value
        else:
            for s, at in enumerate(here):
                for m in range(len(output)):
                    terms[m, s, at] = adds(score, output[m, s, at], y[part][at])
        found.append(terms[:-1] - terms[-1])
    return found


def guessed(output: np.ndarray) -> np.ndarray:
    return output.argmax(-1) if output.ndim == 4 else output > 0


def adds(score: str, output: np.ndarray, y: np.ndarray) -> np.ndarray:
    """[n] what each sample adds to a score, better when higher. output: [n], or [n, classes]"""
    if score in ("mae", "brier"):
        return -np.abs(output - y) if score == "mae" else -((expit(output) - y) ** 2)
    if score == "r2":
        return added.r2(output[:, None], y[:, None])
    present, several = np.unique(y), output.ndim == 2
    guess = output.argmax(1) if several else (output > 0) * 1.0
    if score == "balanced-accuracy":
        return added.balanced_accuracy(guess == y, y) if len(present) > 1 else np.full(len(y), math.nan)
    if score == "f1":
        return added.f1(guess, y, np.ones(1)) if 1 in present else np.full(len(y), math.nan)
    of = {"auc": added.auc, "average-precision": added.average_precision}[score]
    if len(present) < 2:
        return np.full(len(y), math.nan)
    return np.mean([of(output[:, int(k)], y == k) for k in present], axis=0) if several else of(output, y == 1)


def truth(world: World, w: np.ndarray, score: str, new: np.ndarray) -> np.ndarray:
    """[methods - 1, sites] the gain of models w [methods, sites, p] on new patients."""
    output, eta = (
        (np.einsum("...sp,np->...sn", v, new) for v in (w, world.beta))
        if w.ndim == 3
        else (np.einsum("...spk,np->...snk", v, new) for v in (w, world.beta))
    )
    gap = output - eta
    if score == "rmse":
        value = -np.sqrt((gap**2).mean(-1) + world.noise)
    elif score == "r2":
        value = -((gap**2).mean(-1) + world.noise) / (eta.var(-1) + world.noise)
    elif score == "mae":
        value = -np.interp(np.abs(gap), *off_by(world.task)).mean(-1)
    else:
        ill = softmax(eta, -1) if w.ndim == 4 else np.stack([expit(-eta), expit(eta)], -1)
        value = expected(score, output, np.broadcast_to(ill, (len(w), *ill.shape)))
    return value[:-1] - value[-1]


def expected(score: str, output: np.ndarray, chance: np.ndarray) -> np.ndarray:
    """[...] the score over samples, each of class k with chance [..., n, k]. output: [..., n], or [..., n, k]"""
    several = output.ndim == chance.ndim
    guess = output.argmax(-1) if several else (output > 0) * 1
    mine = chance * (guess[..., None] == np.arange(chance.shape[-1]))
    if score == "accuracy":
        return mine.sum(-1).mean(-1)
    if score == "brier":
        return -(chance[..., 1] * expit(-output) ** 2 + chance[..., 0] * expit(output) ** 2).mean(-1)
    if score == "balanced-accuracy":
        return (mine.sum(-2) / chance.sum(-2)).mean(-1)
    if score == "f1":
        return 2 * mine[..., 1].sum(-1) / (chance[..., 1].sum(-1) + guess.sum(-1))
    found = []
    for k in range(chance.shape[-1]) if several else (1,):
        order = (output[..., k] if several else output).argsort(-1)
        ill = np.take_along_axis(chance[..., k], order, -1)
        well = 1 - ill
        if score == "auc":
            found.append((ill * (well.cumsum(-1) - well / 2)).sum(-1) / (ill.sum(-1) * well.sum(-1)))
        else:
            down = ill[..., ::-1]
            found.append((down * down.cumsum(-1) / np.arange(1, down.shape[-1] + 1)).sum(-1) / down.sum(-1))
    return np.mean(found, axis=0)


@cache
def off_by(task: str) -> tuple[np.ndarray, np.ndarray]:
    """(d, the mean of |T - d|) of the noise T of `heavy` or `gross`."""
    at, level = np.linspace(0, 12, 400), (np.arange(100_000) + 0.5) / 100_000
    parts = (
        [(1.0, student.ppf(level, TAILS))]
        if task == "heavy"
        else [(0.98, norm.ppf(level)), (0.02, 20 * norm.ppf(level))]
    )
    return at, np.array([sum(k * np.abs(v - d).mean() for k, v in parts) for d in at])


def widths(found: intervals.Spread, share: float | None) -> list[tuple[float, float]]:
    """(variance, degrees of freedom) by every rule, in the order of RULES."""
    s = len(found.means)
    square = float(found.means.var(ddof=1)) if s > 1 else math.nan
    overlap = share / (1 - share) if share else 0.0
    plain = [(square / s, s - 1.0), (square * (1 / s + overlap), s - 1.0)] if s else [(math.nan,) * 2] * 2
    return [*plain, intervals.variance(found, share) if s else (math.nan,) * 2]


def spreads(
    world: World, score: str, terms: list[np.ndarray], y: np.ndarray, counted: list[int], heavy: bool = False
) -> list[intervals.Spread]:
    """Of every site, and of the mean over those that count and have the score. terms: per site, [splits, n]"""
    m, found = KNOWN[score], []
    for each, part in zip(terms, world.parts, strict=True):
        span = m.span if math.isfinite(m.span) else 0.0
        classes = y[part].astype(int) if m.classwise or score == "brier" else None
        one = intervals.spread(each, span, classes=classes, of_two=m.classwise, guesses=m.guesses)
        found.append(replace(one, whole=heavy))
    gains = np.nanmean([np.nanmean(terms[k], axis=1) for k in counted], axis=0)
    mean = intervals.mean_spread([found[k] for k in counted if len(found[k].means)], gains[np.isfinite(gains)])
    shared = world.scenario.startswith("near")  # at one site both have the same luck in training
    return [*(replace(f, whole=shared or heavy) for f in found), mean]


def counting(world: World, test: np.ndarray) -> list[int]:
    """The sites that the mean is over."""
    return list(bearing({k: float(test[:, p].sum(1).mean()) for k, p in enumerate(world.parts)}))


def population(world: World, rng: np.random.Generator, new: np.ndarray) -> Iterator[tuple[Any, ...]]:
    """One population by every score and design: (score, design), true gains of the first split's models (of a fixed
    test set of all splits') [m, sites + 1], estimates [m, sites + 1] and (variance, freedom) [rules, m, sites + 1, 2];
    the last column is the mean of sites."""
    x, y = world.draw(rng)
    kind = world.scenario.split()[0].rstrip("0123456789")
    sizes = SPLITS.get(kind) or ((2, 3, 5) if world.task in HARD else (1, 2, 3, 5, 10))
    if kind == "fixed":
        test = np.tile(world.resplit(rng, 1, FIXED), (LUCK, 1))
        train = ~test & (rng.random(test.shape) < FIXED)
        designs = [("", test, train, None, sizes)]
    else:
        test = world.resplit(rng, max(sizes))
        designs = [("", test, ~test, TESTED, sizes)]
    if kind not in SPLITS and 10 in sizes and len(world.sizes) < 100:  # to save time
        test = world.folds(rng)
        designs.append(("5 folds, ", test, ~test, 0.2, (10,)))
    for name, test, train, share, sizes in designs:
        w, counted = world.models(x, y, train, rng), counting(world, test)
        heavy = tails(world, x, y, w, test) > intervals.HEAVY
        for score in world.scores:
            terms = gains(world, x, y, w[:, : max(sizes)], test[: max(sizes)], score)
            of = range(len(test) if share is None else 1)
            true = np.mean([truth(world, w[:, s], score, new) for s in of], axis=0)
            true = np.concatenate([true, true[:, counted].mean(-1, keepdims=True)], -1)
            for splits in sizes:
                rows = [
                    spreads(world, score, [t[m, :splits] for t in terms], y, counted, heavy) for m in range(len(true))
                ]
                estimate = [[s.gain for s in row] for row in rows]
                found = np.array([[widths(s, share) for s in row] for row in rows])
                yield (score, f"{name}S={splits}"), true, np.array(estimate), np.moveaxis(found, 2, 0)


def part(job: tuple[str, str, int, int]) -> list[dict[str, Any]]:
    """All that is counted of one world: a row per score, design and rule."""
    task, scenario, sites, repeats = job
    if scenario.startswith("plan"):
        return plan(job)
    warnings.simplefilter("ignore")
    world, new, kept = World.make(task, scenario, sites), new_patients(1024 if sites in (10, 100) else 2048), {}
    for r in range(repeats):
        for key, *found in population(world, np.random.default_rng([r, len(world.sizes)]), new):
            kept.setdefault(key, []).append(found)
    rows = []
    for (score, design), found in kept.items():
        own, estimate, laws = (np.array(f) for f in zip(*found, strict=True))
        true = own.mean(0) if scenario not in ("equal", "halves") else np.zeros(own.shape[1:])
        base = {"task": task, "scenario": scenario, "sites": sites, "score": score, "design": design, "of": repeats}
        for rule, name in enumerate(RULES):
            var, freedom = laws[:, rule, ..., 0], laws[:, rule, ..., 1]
            if not np.isfinite(var).any():
                continue
            for target, gain in (("procedure", true), ("models", own))[
                : 2 if design == "S=1" or scenario[:5] == "fixed" else 1
            ]:
                found = counted(estimate, gain, var, freedom)
                rows.append(base | {"rule": name, "target": target} | found)
    return rows


def plan(job: tuple[str, str, int, int]) -> list[dict[str, Any]]:
    """How often a gain is seen that three seeds say would be seen four times in five, by ten of them or with K times
    as many patients, and how many times too many these are in the mean over sites."""
    task, scenario, sites, repeats = job
    warnings.simplefilter("ignore")
    few, new = World.make(task, "even", sites), new_patients()
    times = int(scenario.removeprefix("plan"))
    many = replace(few, sizes=[times * n for n in few.sizes])
    told, kept, averaged = {}, {}, counting(few, few.resplit(np.random.default_rng(0), 1))
    for r in range(repeats):
        rng = np.random.default_rng([r, len(few.sizes), 1])
        for world, splits in ((few, (3, 10)), (many, (3,))):
            x, y = world.draw(rng)
            test = world.resplit(rng, max(splits))
            w = world.models(x, y, ~test, rng)
            for score in world.scores:
                terms, true = gains(world, x, y, w, test, score), truth(world, w[:, 0], score, new)[0]
                for s in splits:
                    row = spreads(world, score, [t[0, :s] for t in terms], y, averaged)
                    lengths = [intervals.half_width(*intervals.variance(e, TESTED)) for e in row]
                    key = score, "3 seeds" if world is few and s == 3 else "10 seeds" if s == 10 else "K times"
                    kept.setdefault(key, []).append(([e.gain for e in row], lengths, [*true, true[averaged].mean()]))
                    if key[1] == "3 seeds":
                        said = [[intervals.seen(e, TESTED, 10) for e in row]]
                        said.append([intervals.seen(e, TESTED, 3, times=times) for e in row])
                        told.setdefault(score, []).append(said)
    rows = []
    for score, said in told.items():
        for k, what in enumerate(("10 seeds", "K times")):
            gain, half, true = (np.array(v) for v in zip(*kept[score, what], strict=True))
            expected = np.array(said)[:, k]
            seen = np.abs(gain - true.mean(0) + expected) > half
            known = np.isfinite(gain) & np.isfinite(expected)
            parts = [float(seen[at][known[at]].mean()) for at in (np.s_[:, :-1], np.s_[:, -1:])]
            # of the gain that is said, and the one that four in five of these would see: samples go with its square
            enough = np.nanquantile(half[:, -1] - (gain - true.mean(0))[:, -1], intervals.POWER)
            over = float(np.nanmedian(expected[:, -1]) / enough) ** 2
            base = {"task": task, "scenario": scenario, "sites": sites, "score": score, "design": what, "of": repeats}
            rows.append(base | {"rule": "polyfed", "target": "procedure", "seen": parts, "over": over})
    return rows


def counted(estimate: np.ndarray, gain: np.ndarray, var: np.ndarray, freedom: np.ndarray) -> dict[str, Any]:
    """Coverage, half lengths, verdicts and power from arrays [repeats, methods, sites + 1]."""
    methods, known = estimate.shape[1], np.isfinite(estimate) & np.isfinite(var)
    half = np.vectorize(intervals.half_width)(var, freedom)
    off = estimate - gain  # as if the gain were zero: what is left of it where sites were levelled must not count
    p = np.vectorize(partial(intervals.p_value, comparisons=methods))(off, var, freedom)
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
    plans = [r for r in rows if r["world"].startswith("plan")]
    others, rows = ([r for r in rows if (r["sites"] in OTHERS) == k and r not in plans] for k in (True, False))
    often = {(r["score"], r["sites"]): r["of"] for r in rows if r["world"] == "single"}
    rows = [r for r in rows if (r["world"], r["design"]) != ("zero", "S=1") or (r["score"], r["sites"]) not in often]
    many = [r for r in rows if r["world"] != "single"]
    drawn = ", ".join(
        f"{max(r['of'] for r in many if r['sites'] == k)} ({k} sites)" for k in sorted({r["sites"] for r in many})
    )
    often_said = ", ".join(f"{n} ({k} sites)" for k, n in sorted({k: n for (_, k), n in often.items()}.items()))
    drawn += f"; of one split where nobody gains {often_said}" if often else ""
    rows = [r | {"world": "zero"} if r["world"] == "single" else r for r in rows]
    kinds = sorted({(r["score"], r["sites"]) for r in rows}, key=lambda k: (k[1], k[0]))
    hard = [k for k in kinds if k[1] == 10]
    parts = [_coverage, _one_split, _power, _limits]
    made = [p(rows, [k for k in kinds if k not in hard]) for p in parts] if kinds != hard else [[]] * 4
    made = ["\n".join(m) for m in (made[0], _hard(rows), _others(others), *made[1:3], _planned(plans), made[3]) if m]
    return "\n\n".join([f"Populations drawn per world: {drawn}.", *made]) + "\n"


DESIGNS = ("S=2", "S=3", "S=5", "S=10", "5 folds, S=10")
AGAINST_OWN = ("gain", "even", "harm", "zero")


def own_models(rows: list[dict[str, Any]], **keys: Any) -> list[dict[str, Any]]:
    return [r for r in chosen(rows, **keys) if r["world"] in AGAINST_OWN]


def sites_of(row: dict[str, Any]) -> float:
    """Coverage pooled over sites."""
    return float(np.mean(row["covered"][:-1]))


def _head(names: str, left: int = 2) -> list[str]:
    return [f"| {names} |", "|" + ":--|" * left + "--:|" * (names.count("|") + 1 - left)]


def _coverage(rows: list[dict[str, Any]], kinds: list[tuple[str, int]]) -> list[str]:
    out = ["## Coverage and wrong verdicts: splits drawn anew, common against own models", ""]
    out += _head(
        "score, sites | design | sites: t | Nadeau-Bengio | **polyfed** | least site | means: t | Nadeau-Bengio "
        "| **polyfed** | length, sites | length, means | wrong: any site | wrong: mean"
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
            cells += [*(f"{v:.2f}" for v in length), *_wrong(by[2], score)]
            out.append(f"| {score}, {sites} | {design} | " + " | ".join(cells) + " |")
    return out


def _wrong(rows: list[dict[str, Any]], score: str) -> list[str]:
    """Wrong verdicts in the world where no site gains or loses by the score."""
    found = [r for r in rows if r["scenario"].split()[1:] in ([], [score]) and r["world"] == "zero"]
    return [f"{100 * r[key]:.1f}" for key in ("any", "whole") for r in found]


def _hard(rows: list[dict[str, Any]]) -> list[str]:
    out = [
        "## Rare outcomes, five classes, heavy tails: ten sites of 100 to 2000 patients, every interval printed",
        "",
    ]
    out += _head(
        "world, score | seeds | sites | least site | means | wrong: any site | wrong: mean "
        "| a mean gain of 3 points is seen"
    )
    for r in chosen(rows, sites=10, rule="polyfed"):
        power = "–" if r["task"] in NOISE else f"{100 * r['power'][2][1]:.0f}"
        cells = [f"**{100 * sites_of(r):.1f}**", least([r]), f"**{100 * r['covered'][-1]:.1f}**"]
        cells += [*(f"{100 * r[key]:.1f}" for key in ("any", "whole")), power]
        out.append(f"| {NAMES[r['task']]}, {r['score']} | {r['design'][2:]} | " + " | ".join(cells) + " |")
    return out


def _others(rows: list[dict[str, Any]]) -> list[str]:
    out = ["## Federations of other kinds, every interval printed", ""]
    out += _head(
        "federation, score | of | sites: one seed | three | ten | least site | means: one seed | three | ten "
        "| wrong: any site | wrong: mean"
    )
    order = list(dict.fromkeys((r["sites"], r["task"], r["world"], r["score"], r["target"]) for r in rows))
    for sites, task, world, score, target in order:
        of = {"sites": sites, "task": task, "world": world, "score": score, "rule": "polyfed"}
        one = chosen(rows, **of, target="models", design="S=1")
        by = [chosen(rows, **of, target=target, design=f"S={k}") for k in (3, 10)]
        if not all(by):
            continue
        known = [r for found in (one, *by) for r in found]
        cells = [
            f"{sites}{OF.get(world, '')}{', ' + NAMES[task] if task in NAMES else ''}, {score}",
            AIMS.get((world, target), "the procedure"),
        ]
        for f in (sites_of, lambda r: r["covered"][-1]):
            cells += [span([f(r) for r in found]) if found else "–" for found in (one, *by)]
        cells.insert(5, least(by[0]))
        cells += [span([r[key] for r in known]) for key in ("any", "whole")]
        out.append(f"| {' | '.join(cells)} |")
    return out


def _one_split(rows: list[dict[str, Any]], kinds: list[tuple[str, int]]) -> list[str]:
    out = ["## Coverage and wrong verdicts of one split, or a fixed test set", ""]
    targets = [f"{what}: sites | least site | means" for what in ("these models", "the procedure")]
    out += _head(f"score, sites | {' | '.join(targets)} | wrong: any site | wrong: mean", 1)
    for score, sites in kinds:
        cells, of = [], {"score": score, "sites": sites, "design": "S=1", "rule": "polyfed"}
        for target in ("models", "procedure"):
            own = own_models(rows, **of, target=target)
            cells += [span([sites_of(r) for r in own]), least(own), span([r["covered"][-1] for r in own])]
        cells += _wrong(own_models(rows, **of, target="models"), score)
        out.append(f"| {score}, {sites} | " + " | ".join(cells) + " |")
    return out


def _power(rows: list[dict[str, Any]], kinds: list[tuple[str, int]]) -> list[str]:
    out = ["## Power: how often a gain in accuracy is seen, per cent", ""]
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


def _planned(rows: list[dict[str, Any]]) -> list[str]:
    out = ["## What three seeds say would be seen four times in five, and how often it was, per cent", ""]
    out += _head(
        "score, sites | times | ten seeds: a site | the mean | so many times the patients: a site | the mean "
        "| too many by"
    )
    for ten, more in zip(rows[::2], rows[1::2], strict=True):
        each = " | ".join(f"{100 * v:.0f}" for r in (ten, more) for v in r["seen"])
        out.append(f"| {ten['score']}, {ten['sites']} | {ten['world'][4:]} | {each} | {more['over']:.1f} |")
    return out


def _limits(rows: list[dict[str, Any]], kinds: list[tuple[str, int]]) -> list[str]:
    out = ["## One common model against another, every gain zero, all designs: why a site gets no interval there", ""]
    names = [f"{what}: t | Nadeau-Bengio | **polyfed**" for what in ("sites", "means")]
    out += _head(f"world | score, sites | {' | '.join(names)}")
    for world in ("equal", "halves"):
        for score, sites in kinds:
            by = [chosen(rows, world=world, score=score, sites=sites, rule=n, target="procedure") for n in RULES]
            by = [[r for r in found if r["design"] in DESIGNS] for found in by]
            cells = [span([f(r) for r in found]) for f in (sites_of, lambda r: r["covered"][-1]) for found in by]
            cells[2], cells[5] = f"**{cells[2]}**", f"**{cells[5]}**"
            out.append(f"| {world} | {score}, {sites} | " + " | ".join(cells) + " |")
    return out


OF = {"fixed": ", one test set"} | {f"near{x}": f", personal ({x})" for x in NEAR}
AIMS = {("fixed", "models"): "these training sets"}  # what gains are of; else of the procedure, of one seed its models
MARKS = ("<!-- made by benchmarks/coverage.py -->", "<!-- end -->")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, nargs="+", choices=[4, 10, 20, 100], default=[4, 10, 20, 100])
    parser.add_argument("--repeats", type=int, help="populations of every world (default: fewer where sites are many)")
    parser.add_argument("--out", type=Path, default=Path("coverage.jsonl"), help="finished worlds, kept and not redone")
    parser.add_argument("--docs", type=Path, help="a Markdown file whose marked part the tables replace")
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    jobs = [(t, "even", 10, given.repeats or REPEATS[10]) for t in HARD] if 10 in given.sites else []
    for k, (_, worlds) in OTHERS.items() if 10 in given.sites else ():
        jobs += [(*w.split(" ", 1), k, given.repeats or REPEATS[10]) for w in worlds]
    for k in (k for k in given.sites if k != 10):
        for t in HETEROGENEITY:
            zero = [f"zero {score}" for score in SCORES[t]]
            worlds = [*HETEROGENEITY[t], *zero, "equal", "halves", *["plan4"] * (k < 100)]
            jobs += [(t, s, k, given.repeats or REPEATS[k]) for s in worlds]
            jobs += [(t, f"single {s}", k, given.repeats or SINGLE[k]) for s in SCORES[t]]
    kept = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    done = {tuple(k["job"]) for k in kept}
    todo = [job for job in jobs if job not in done]
    with multiprocessing.Pool(given.workers) as pool, given.out.open("a") as out:
        start = time.perf_counter()
        for job, rows in zip(todo, pool.imap(part, todo), strict=True):
            kept.append({"job": job, "rows": rows})
            print(json.dumps(kept[-1]), file=out, flush=True)
            print(f"{time.perf_counter() - start:6.0f} s: {' '.join(map(str, job))}", flush=True)
    drawn = {tuple(k["job"]): k["rows"] for k in kept}
    text = tables([r for job in jobs for r in drawn.get(job, ())])
    print(text)
    if given.docs:
        before, rest = given.docs.read_text().split(MARKS[0])
        given.docs.write_text(f"{before}{MARKS[0]}\n{text}{MARKS[1]}{rest.split(MARKS[1])[1]}")


if __name__ == "__main__":
    main()
