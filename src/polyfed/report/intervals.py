"""Statistics of a gain, method A's score minus method B's on the same splits: variances, intervals and power.

The target is the gain of the two *procedures* on new samples of the site; see docs/verdicts-statistics.md.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import ndtri, stdtr, stdtrit

LEVEL = 0.95
POWER = 0.8
MOST = 100  # splits, or times as many samples, that are asked for at most
HEAVY = 12.0  # kurtosis of errors (3 if they are normal) from which on their tails are heavy: see `variance`
EPSILON = 1e-12  # gains of several seeds that differ by a smaller share are the same but for rounding


@dataclass(frozen=True, eq=False)
class Spread:
    """Mean and variance of one gain."""

    means: np.ndarray  # [S] the gain in every split
    sampling: float | None = None  # its variance clustered by sample, where known
    freedom: float = math.inf  # degrees of freedom of `sampling`
    floor: float = 0.0  # without samples, the least standard deviation over splits to believe
    ids: np.ndarray | None = None  # the samples
    parts: np.ndarray | None = None  # each sample's part of the gain
    bound: float = 0.0  # the part of `sampling` that k times as many samples would make k^2 times smaller
    rare: bool = False  # most of the variance is from samples that are alone in their class
    whole: bool = False  # luck that all training sets share decides: Nadeau and Bengio's term is taken whole

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
    """The spread of a site's gain from `values` [S, N], whose mean over a split is its gain; NaN: untested.

    `span` is the width of a bounded score, `ids` [N] numbers samples, and `classes` [N] (-1: none) is given for a score
    taken class by class, or without bounds over two classes. `of_two` is the number K of classes that a score averages
    if there are two: 1 for AUC, 2 for balanced accuracy, 0 for a mean over samples. With `guesses`, methods may agree
    on a whole class that neither finds.
    """
    tested = np.isfinite(values)
    values, tested = values[tested.any(1)], tested[tested.any(1)]
    if not len(values):
        return Spread(np.empty(0))
    counts, times = tested.sum(1), tested.sum(0)
    means = np.where(tested, values, 0.0).sum(1) / counts
    # AUC, RMSE and other scores that are no means come written as means, from `metrics.terms`
    # clustered by sample: a = sum_j (sum_s u_sj)^2 n/(n - 1), u_sj = (values_sj - gain) / (S m_s), exact to first order
    # where models are stable; blind to what all training sets have in common
    gap = (np.where(tested, values - means.mean(), 0.0) / (len(values) * counts[:, None])).sum(0)[times > 0]
    ids, n = None if ids is None else ids[times > 0], len(gap)
    if n < 2 and not span:  # nothing says how far one sample may be off
        return Spread(means, ids=ids, parts=gap)
    sampling, freedom, alone, half = gap @ gap * n / (n - 1) if n > 1 else span**2, _freedom(gap), np.zeros(0), 0.0
    if classes is not None and of_two:
        most, alone, half = _by_class(tested, classes, of_two)
        freedom = min(freedom, most)
    elif classes is not None:  # few of a class show little of its errors, however even the rest are
        freedom = min(freedom, max(float(np.bincount(classes[times > 0], minlength=2).min()), 1.0))
    # half a sample gained and half a sample lost (Agresti and Min, Biometrics 61, 2005): methods that never disagree
    # are no certainty; with guesses, half a sample in every class
    few = span**2 * (half if guesses else _half_a_sample(times))
    sampling += few
    # a sample alone in its class shows nothing of its own chance: it may be off by half its class's part of the range
    bound = float(alone @ alone) * (span / (2 * len(values))) ** 2
    freedom *= (1 + bound / sampling) ** 2 if bound else 1.0
    rare = bool(bound > sampling)
    return Spread(means, float(sampling + bound), freedom, ids=ids, parts=gap, bound=few + bound, rare=rare)


def _half_a_sample(times: np.ndarray) -> float:
    """Variance that half a sample gained and half lost add to a share; `times` counts each sample's tests."""
    return float(1 / (times.sum() ** 2 / (times @ times) + 2) ** 2)


def _freedom(gap: np.ndarray) -> float:
    """Degrees of freedom of the sum of squares of what samples add."""
    square, n = gap @ gap, len(gap)
    heavy = (gap**4).sum() - square**2 / n  # n^2 times the variance of the variance: few disagreements, few freedoms
    most = max((n - 1) / 3, 1.0)  # few samples do not show how heavy their tails are: at best as if of kurtosis 7
    return float(np.clip(2 * square**2 / heavy, 1, most)) if heavy > 0 else most


def _by_class(tested: np.ndarray, classes: np.ndarray, of_two: int) -> tuple[float, np.ndarray, float]:
    """(degrees of freedom left by the smallest class, [N] splits with a sample alone in its class, half samples).

    The latter two are weighted by the class's part of the score.
    """
    by_class = [tested & (classes == k) for k in np.unique(classes[classes >= 0])]
    there = np.sum([mine.any(1) for mine in by_class], axis=0) + np.zeros(len(tested))  # classes in every split
    part = 1 / np.where(there > 2, there, of_two)[:, None]
    most, alone, half = math.inf, np.zeros(tested.shape[1]), 0.0
    for mine in by_class:
        alone += (part * (mine & (mine.sum(1, keepdims=True) == 1))).sum(0)
        half += float(part.mean()) ** 2 * _half_a_sample(mine.sum(0))
        size = int(mine.any(0).sum())
        most = min(most, size - 1) if size > 1 else most
    return most, alone, half


def mean_spread(sites: Sequence[Spread], means: np.ndarray | None = None, weights: np.ndarray | None = None) -> Spread:
    """The spread of the mean over sites, unweighted or by `weights` [sites]; `means` [S] is needed if a site was not
    tested in every split."""
    n, w = len(sites), np.ones(len(sites)) if weights is None else weights
    w = w / w.sum()
    if means is None:
        means = np.asarray(np.tensordot(w, [s.means for s in sites], 1))
    floor, whole = math.hypot(*(w * [s.floor for s in sites])), any(s.whole for s in sites)
    if any(s.sampling is None for s in sites):
        return Spread(means, floor=floor, whole=whole)
    each = w**2 * [s.sampling for s in sites]
    freedom = each.sum() ** 2 / (each**2 / [s.freedom for s in sites]).sum() if each.sum() > 0 else math.inf
    sampling = float(each.sum())
    ids = [s.ids for s in sites if s.ids is not None]
    # a sample that several sites test is one: its parts are summed before they are squared
    if len(ids) == n and len(distinct := np.unique(every := np.concatenate(ids))) < len(every):
        parts = np.concatenate([k * s.parts for k, s in zip(w, sites, strict=True) if s.parts is not None])
        shared = np.bincount(distinct.searchsorted(every), parts)
        sampling += max(0.0, float(shared @ shared - parts @ parts))
        freedom = min(freedom, _freedom(shared))
    bound, rare = float(w**2 @ [s.bound for s in sites]), any(s.rare for s in sites)
    return Spread(means, sampling, float(freedom), floor=floor, bound=bound, rare=rare, whole=whole)


def variance(spread: Spread, share: float | None) -> tuple[float, float]:
    """(variance of the mean gain, degrees of freedom by Satterthwaite); NaN if nothing varies that could show chance.

    `share` is f, the tested share where splits are drawn anew. None: every split tests the same samples, and the gain
    is that of the training set used.
    """
    # a + s^2 max(1/S, f/(1 - f)/3), s^2 the variance of the S gains: the second term is that of S independent gains and
    # stops falling where more splits only repeat the same training samples; benchmarks/coverage.py chose this. With
    # heavy tails or at one site of two methods that train on everybody's samples, luck in training is most of it.
    splits, a = len(spread.means), spread.sampling
    if splits < 2:
        return (math.nan, math.nan) if a is None or (not a and spread.gain) else (a, spread.freedom)
    between = float(spread.means.var(ddof=1))
    if a is None:
        between = max(between if np.ptp(spread.means) > EPSILON * abs(spread.gain) else 0.0, spread.floor**2)
    shared = 0.0 if share is None else share / (1 - share)
    if a is None:  # Nadeau and Bengio, Machine Learning 52 (2003)
        return between * (1 / splits + shared) or math.nan, splits - 1.0
    b = between * (1 / splits + shared if spread.whole else max(1 / splits, shared / 3))
    if not a + b and spread.gain:
        return math.nan, math.nan
    scale = a**2 / spread.freedom + b**2 / (splits - 1)
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
    """[k] bool: significant at 5 % over all k together (Holm, Scandinavian Journal of Statistics 6, 1979); not NaN."""
    p = np.asarray(p, dtype=float)
    order = np.argsort(p)  # NaN goes last
    finite = int(np.isfinite(p).sum())
    passed = p[order[:finite]] * np.arange(finite, 0, -1) <= 1 - LEVEL
    clear = np.zeros(len(p), dtype=bool)
    clear[order[:finite]] = np.logical_and.accumulate(passed)
    return clear


# power


def seen(spread: Spread, share: float | None, splits: int, comparisons: int = 1, times: float = 1.0) -> float:
    """The gain that `splits` splits of `times` as many samples would show as clear four times in five."""
    now, a = len(spread.means), spread.sampling
    if a is not None:
        a = (a - spread.bound + spread.bound / times) / times
    if now < 2 and (share is not None or a is None):
        return math.nan
    if a is not None and share is not None:  # stable models: in proportion to 1 + (1 - f)/(S f)
        a *= (1 + (1 - share) / (splits * share)) / (1 + (1 - share) / (now * share))
    std = float(spread.means.std(ddof=1)) if now > 1 else 0.0
    planned = np.array([1.0, -1.0] * (splits // 2) + [0.0] * (splits % 2))  # of the spread that was seen
    planned *= std / (planned.std(ddof=1) if splits > 1 else 1.0) / math.sqrt(times)
    then = replace(spread, means=planned, sampling=a, freedom=times * spread.freedom, floor=spread.floor / times)
    var, freedom = variance(then, share)
    if not math.isfinite(var):
        return math.nan
    return half_width(var, freedom, comparisons) + float(ndtri(POWER)) * math.sqrt(var)


@dataclass(frozen=True)
class Needed:
    """Effort to see a gain."""

    splits: int | None  # of the same samples; None: no number is enough
    times: float  # as many samples, with the splits there are; infinite beyond a hundred


def needed(spread: Spread, share: float | None, gain: float, comparisons: int = 1) -> Needed | None:
    """Effort to see `gain` as clear four times in five; None where nothing is known of the spread."""
    now = len(spread.means)
    here = seen(spread, share, now, comparisons)
    if not math.isfinite(here):
        return None
    # splits of a fixed test set are training seeds
    splits = 2 + bisect_left(range(2, MOST + 1), -gain, key=lambda k: -seen(spread, share, k, comparisons))
    grid = np.geomspace(1, MOST, 500).tolist()  # times, to one in a hundred
    at = bisect_left(grid, -gain, key=lambda k: -seen(spread, share, now, comparisons, k))
    return Needed(splits if 1 < now and splits <= MOST else None, grid[at] if at < len(grid) else math.inf)
