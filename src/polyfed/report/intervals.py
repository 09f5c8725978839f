"""Statistics of a gain: variances, intervals and power from what every test sample adds. Pure functions of arrays.

A gain is method A's score minus method B's, on the same splits. `values` [splits, samples] is what each sample adds:
its mean over a split's test samples is that split's gain, NaN where a sample was not tested. A score that is no mean,
such as AUC or RMSE, is written as one (`metrics.terms`).

What is estimated is the gain of the two *procedures* on new samples of the site, expected over training sets of the
size that was used. Two estimates of the variance of the mean gain over S splits go into it:

    sampling    clustered by sample: a = sum_j (sum_s u_sj)^2 n/(n - 1), u_sj = (values_sj - gain) / (S m_s). Exact to
                first order where the models are stable, with the freedom of as many samples as disagree; blind to what
                all training sets have in common.
    splitting   s^2, the sample variance of the S gains, with S - 1 degrees of freedom. Sees the training. Alone it
                stands for s^2 (1/S + f/(1 - f)), f the tested share (Nadeau and Bengio, Machine Learning 52, 2003).

The variance is a + s^2 max(1/S, f/(1 - f)/3), of a site as of a mean over sites; the second term is that of S
independent gains, and stops falling where more splits only repeat the same training samples. benchmarks/coverage.py
chose this; docs/verdicts-statistics.md has the figures.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import ndtri, stdtr, stdtrit

LEVEL = 0.95
POWER = 0.8
MOST = 100  # splits that are asked for at most
EPSILON = 1e-12  # gains of several seeds that differ by a smaller share are the same but for rounding


@dataclass(frozen=True, eq=False)
class Spread:
    """Mean and variance of one gain.

    means: [S] the gain in every split     sampling: its variance clustered by sample, freedom: degrees of freedom of
    that; None: not known     floor: without samples, the least standard deviation over splits to believe
    ids, parts: the samples, and what each moves the gain by
    rare: whether those that are alone in their class are most of the variance
    """

    means: np.ndarray
    sampling: float | None = None
    freedom: float = math.inf
    floor: float = 0.0
    ids: np.ndarray | None = None
    parts: np.ndarray | None = None
    rare: bool = False

    @property
    def gain(self) -> float:
        """The mean over splits; NaN where there is none."""
        return float(self.means.mean()) if len(self.means) else math.nan


def spread(
    values: np.ndarray,
    span: float = 0.0,
    ids: np.ndarray | None = None,
    classes: np.ndarray | None = None,
    of_two: int = 1,
    guesses: bool = False,
) -> Spread:
    """The spread of a site's gain from `values` [S, N]; splits without a tested sample are left out.

    span: of a bounded score, how far apart two values can be. Half a sample gained and half a sample lost are then
    added to the variance (Agresti and Min, Biometrics 61, 2005), so that a site where two methods never disagree is
    not taken for certainty.
    ids: [N] the samples' numbers     classes: [N] of a score that is taken class by class, each sample's, -1: none.
    A sample that is alone in its class shows nothing of its own chance, and stands for all that it could do: the span,
    or a K-th of it in a mean over K classes. A class of m samples leaves at most m - 1 degrees of freedom.
    of_two: K where there are two classes: 1 of one class's score (AUC), 2 of a mean over both (balanced accuracy)
    guesses: whether methods may agree on a whole class, none of which they find: then half a sample is gained and lost
    in every class, not among all samples.
    """
    tested = np.isfinite(values)
    values, tested = values[tested.any(1)], tested[tested.any(1)]
    if not len(values):
        return Spread(np.empty(0))
    counts, times = tested.sum(1), tested.sum(0)
    means = np.where(tested, values, 0.0).sum(1) / counts
    gap = (np.where(tested, values - means.mean(), 0.0) / (len(values) * counts[:, None])).sum(0)[times > 0]
    ids, n = None if ids is None else ids[times > 0], len(gap)
    if n < 2 and not span:  # nothing says how far one sample may be off
        return Spread(means, ids=ids, parts=gap)
    sampling, freedom, alone, half = gap @ gap * n / (n - 1) if n > 1 else span**2, _freedom(gap), np.zeros(0), 0.0
    if classes is not None:
        most, alone, half = _by_class(tested, classes, of_two)
        freedom = min(freedom, most)
    sampling += span**2 * (half if guesses else _half_a_sample(times))
    bound = float((span * alone / len(values)) @ (span * alone / len(values)))
    freedom *= (1 + bound / sampling) ** 2 if bound else 1.0
    return Spread(means, float(sampling + bound), freedom, ids=ids, parts=gap, rare=bool(bound > sampling))


def _half_a_sample(times: np.ndarray) -> float:
    """Variance of a share that half a sample gained and half lost add. times: how often each is tested"""
    return float(1 / (times.sum() ** 2 / (times @ times) + 2) ** 2)


def _freedom(gap: np.ndarray) -> float:
    """Degrees of freedom of the sum of squares of what samples add."""
    square, n = gap @ gap, len(gap)
    heavy = (gap**4).sum() - square**2 / n  # n^2 times the variance of the variance: few disagreements, few freedoms
    most = max((n - 1) / 3, 1.0)  # few samples do not show how heavy their tails are: at best as if of kurtosis 7
    return float(np.clip(2 * square**2 / heavy, 1, most)) if heavy > 0 else most


def _by_class(tested: np.ndarray, classes: np.ndarray, of_two: int) -> tuple[float, np.ndarray, float]:
    """(degrees of freedom that the smallest class leaves, [N] in how many splits a sample is alone in its class, and
    `_half_a_sample` over classes), the latter two by the class's part of the score."""
    known = [tested & (classes == k) for k in np.unique(classes[classes >= 0])]
    there = np.sum([mine.any(1) for mine in known], axis=0) + np.zeros(len(tested))  # classes in every split
    part = 1 / np.where(there > 2, there, of_two)[:, None]
    most, alone, half = math.inf, np.zeros(tested.shape[1]), 0.0
    for mine in known:
        alone += (part * (mine & (mine.sum(1, keepdims=True) == 1))).sum(0)
        half += float(part.mean()) ** 2 * _half_a_sample(mine.sum(0))
        size = int(mine.any(0).sum())
        most = min(most, size - 1) if size > 1 else most
    return most, alone, half


def mean_spread(sites: Sequence[Spread], means: np.ndarray | None = None) -> Spread:
    """The spread of the unweighted mean over sites. means: [S], needed where not every site was tested in every split.

    A sample that several sites test is one: what it adds to their mean is summed before it is squared.
    """
    if means is None:
        means = np.asarray(np.mean([s.means for s in sites], axis=0))
    n, floor = len(sites), math.hypot(*(s.floor for s in sites)) / len(sites)
    if any(s.sampling is None for s in sites):
        return Spread(means, floor=floor)
    each = np.array([s.sampling for s in sites], dtype=float)
    freedom = each.sum() ** 2 / (each**2 / [s.freedom for s in sites]).sum() if each.sum() > 0 else math.inf
    sampling = float(each.sum()) / n**2
    ids = [s.ids for s in sites if s.ids is not None]
    if len(ids) == n and len(known := np.unique(every := np.concatenate(ids))) < len(every):
        parts = np.concatenate([s.parts for s in sites if s.parts is not None]) / n
        shared = np.bincount(known.searchsorted(every), parts)
        sampling += max(0.0, float(shared @ shared - parts @ parts))
        freedom = min(freedom, _freedom(shared))
    return Spread(means, sampling, float(freedom), floor=floor, rare=any(s.rare for s in sites))


def variance(found: Spread, share: float | None) -> tuple[float, float]:
    """(variance of the mean gain, its degrees of freedom by Satterthwaite); NaN where one split is all there is, or
    nothing varies that could show the chance.

    share: f, the tested share of a site's samples where splits are drawn anew. None: the same samples are tested in
    every split; the gain is then that of the training set used, over the training's own chance.
    """
    splits, a = len(found.means), found.sampling
    if splits < 2:
        return (math.nan, math.nan) if a is None or (not a and found.gain) else (a, found.freedom)
    between = float(found.means.var(ddof=1))
    if a is None:
        between = max(between if np.ptp(found.means) > EPSILON * abs(found.gain) else 0.0, found.floor**2)
    shared = 0.0 if share is None else share / (1 - share)
    if a is None:
        return between * (1 / splits + shared) or math.nan, splits - 1.0
    b = between * max(1 / splits, shared / 3)
    if not a + b and found.gain:
        return math.nan, math.nan
    scale = a**2 / found.freedom + b**2 / (splits - 1)
    return a + b, (a + b) ** 2 / scale if scale > 0 else math.inf


def half_width(var: float, freedom: float, comparisons: int = 1) -> float:
    """Half the length of the interval, 95 % over all `comparisons` together (Bonferroni)."""
    return float(stdtrit(max(freedom, 1.0), 1 - (1 - LEVEL) / (2 * comparisons))) * math.sqrt(var)


def p_value(gain: float, var: float, freedom: float, comparisons: int = 1) -> float:
    """Two-sided p value of no gain, for all `comparisons` together (Bonferroni)."""
    if not var > 0:
        return 1.0 if gain == 0 else 0.0
    return min(1.0, 2 * comparisons * float(stdtr(max(freedom, 1.0), -abs(gain) / math.sqrt(var))))


def holm(p: np.ndarray) -> np.ndarray:
    """[k] bool: which are significant at 5 % over all k together, by Holm (Scandinavian Journal of Statistics 6, 1979).

    NaN: not tested, and not counted.
    """
    p = np.asarray(p, dtype=float)
    order = np.argsort(p)  # NaN goes last
    known = int(np.isfinite(p).sum())
    passed = p[order[:known]] * np.arange(known, 0, -1) <= 1 - LEVEL
    clear = np.zeros(len(p), dtype=bool)
    clear[order[:known]] = np.logical_and.accumulate(passed)
    return clear


# power


def seen(found: Spread, share: float | None, splits: int, comparisons: int = 1) -> float:
    """The gain that `splits` splits of these samples would show as clear four times in five.

    The sampling part shrinks with S as it does for stable models: in proportion to 1 + (1 - f)/(S f).
    """
    now, a = len(found.means), found.sampling
    if now < 2 and (share is not None or a is None):
        return math.nan
    if a is not None and share is not None:
        a *= (1 + (1 - share) / (splits * share)) / (1 + (1 - share) / (now * share))
    std = float(found.means.std(ddof=1)) if now > 1 else 0.0
    planned = np.array([1.0, -1.0] * (splits // 2) + [0.0] * (splits % 2))  # of the spread that was seen
    size = planned.std(ddof=1) if splits > 1 else 1.0
    var, freedom = variance(replace(found, means=planned * std / size, sampling=a), share)
    if not math.isfinite(var):
        return math.nan
    return half_width(var, freedom, comparisons) + float(ndtri(POWER)) * math.sqrt(var)


@dataclass(frozen=True)
class Needed:
    """Effort that it takes to see a gain: the number of splits of the same samples, None where none is enough; and,
    with the splits there are, how many times as many samples.
    """

    splits: int | None
    times: float


def needed(found: Spread, share: float | None, gain: float, comparisons: int = 1) -> Needed | None:
    """Effort that it takes to see `gain` as clear four times in five; None where nothing is known of the spread.

    More samples are taken to shrink the variance in proportion; splits of a fixed test set are training seeds.
    """
    now = len(found.means)
    here = seen(found, share, now, comparisons)
    if not math.isfinite(here):
        return None
    splits = 2 + bisect_left(range(2, MOST + 1), -gain, key=lambda k: -seen(found, share, k, comparisons))
    return Needed(splits if 1 < now and splits <= MOST else None, max(1.0, (here / gain) ** 2))
