"""Scores that are no means over samples, written as means of terms [n], one for each sample; NaN where the samples
have no such score. The variance of the terms' mean estimates the score's."""

import math

import numpy as np

# By the score's derivatives by the samples' weights (the infinitesimal jackknife; Efron, 1982), or from the scores
# without one sample each (the jackknife, never too small on average; Efron and Stein, Annals of Statistics 9, 1981).
# Where a sample is the only one of its kind, there is no score without it, and its own chance is left out:
# `report.intervals.spread` puts a bound in its place.


def _jackknifed(whole: np.ndarray | float, without: np.ndarray) -> np.ndarray:
    """Terms from a score and the scores without each sample [..., n]."""
    mean = without.mean(-1, keepdims=True)
    return whole + (without.shape[-1] - 1) * (mean - without)  # NaN all where one is


def ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Terms of sum(above) / sum(below)."""
    value = above.sum() / below.sum()
    return value + (above - value * below) / below.mean()


def rmse(squared: np.ndarray) -> np.ndarray:
    """Terms of the root of the mean of `squared` errors [..., n]: the jackknife."""
    n = squared.shape[-1]
    if n < 2:
        return np.sqrt(squared)
    total = squared.sum(-1, keepdims=True)
    with np.errstate(invalid="ignore"):  # infinite errors of a model that has diverged
        return _jackknifed(np.sqrt(total / n), np.sqrt((total - squared).clip(0) / (n - 1)))


def r2(predicted: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Terms of the mean over targets of 1 - squared errors / squared deviations. predicted, true: [n, k]"""
    missed, spread = (true - predicted) ** 2, (true - true.mean(0)) ** 2
    if not (spread.sum(0) > 0).all():
        return np.full(len(true), math.nan)
    return 1 - np.mean([ratio(a, b) for a, b in zip(missed.T, spread.T, strict=True)], axis=0)


def ranking(score: np.ndarray, positive: np.ndarray) -> tuple[float, float]:
    """(AUC of scores [N], its standard error near a half), of rows of both classes; `positive` [N] is 1 or True."""
    n, m = int(positive.sum()), len(positive) - int(positive.sum())
    total = ranks(score)[np.asarray(positive, dtype=bool)].sum()
    return float((total - n * (n + 1) / 2) / (n * m)), math.sqrt((n + m + 1) / (12 * n * m))


def ranks(score: np.ndarray) -> np.ndarray:
    """Places from 1 along the last axis; equal scores share their mean place, and beside a NaN there are none."""
    if score.ndim > 1:
        return np.apply_along_axis(ranks, -1, score)
    ordered = np.sort(score)
    place = (ordered.searchsorted(score) + ordered.searchsorted(score, "right") + 1) / 2
    return np.where(np.isnan(score).any(), math.nan, place)


def auc(score: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """Terms of the area under the curve, by each sample's place among the other class. score: [..., n]"""
    positive = np.broadcast_to(positive, score.shape)
    n: int = score.shape[-1]
    ones: np.ndarray = positive.sum(-1, keepdims=True)
    size: np.ndarray = np.where(positive, ones, n - ones)  # of the sample's own class
    rank: np.ndarray = ranks(score)  # equal ones share theirs
    within: np.ndarray = ranks(rank + 2 * n * positive) - positive * (n - ones)  # its own class
    with np.errstate(divide="ignore", invalid="ignore"):
        place: np.ndarray = np.where(positive, rank - within, ones - rank + within) / (n - size)
        area: np.ndarray = (place * positive).sum(-1, keepdims=True) / ones
        # their variance is that of DeLong, DeLong and Clarke-Pearson (Biometrics 44, 1988)
        return area + (place - area) * np.sqrt(n * (n - 1) / (size * np.maximum(size - 1, 1)))


def average_precision(score: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """Terms of the mean over positives of the precision among the samples that score as high: the jackknife."""
    n, ones = len(score), int(positive.sum())
    if not 0 < ones < n:
        return np.full(n, math.nan)
    at = np.sort(score[positive])
    hits = ones - at.searchsorted(at)  # positives that score as high
    total = n - np.sort(score).searchsorted(at)
    plain, fewer_negatives, fewer_positives = hits / total, hits / (total - 1).clip(1), (hits - 1) / (total - 1).clip(1)

    def removed(value: np.ndarray, changed: np.ndarray) -> np.ndarray:
        """The sum over positives without a sample at `value`: `changed` where the sample scored as high."""
        up_to = at.searchsorted(value, "right")
        return np.r_[0, changed.cumsum()][up_to] + plain.sum() - np.r_[0, plain.cumsum()][up_to]

    without = removed(score, fewer_negatives) / ones
    mine = score[positive]  # whose own entry goes too
    rest = removed(mine, fewer_positives) - fewer_positives[at.searchsorted(mine)]
    without[positive] = rest / (ones - 1) if ones > 1 else plain.mean()
    return _jackknifed(plain.mean(), without)


def balanced_accuracy(right: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Terms of the mean over classes of the share of their samples that are right."""
    out, present = np.empty(len(right)), np.unique(classes)
    recalls = [right[classes == k].mean() for k in present]
    for k, recall in zip(present, recalls, strict=True):
        m = int((classes == k).sum())
        scale = math.sqrt(len(right) * (len(right) - 1) / (m * max(m - 1, 1))) / len(present)
        out[classes == k] = (right[classes == k] - recall) * scale
    return out + np.mean(recalls)


def f1(guess: np.ndarray, classes: np.ndarray, of: np.ndarray) -> np.ndarray:
    """Terms of the mean over the classes `of` of 2 hits / (samples of the class + guesses of it)."""
    parts = [ratio(2.0 * ((guess == k) & (classes == k)), (guess == k) + 1.0 * (classes == k)) for k in of]
    return np.mean(parts, axis=0)


def concordance(risk: np.ndarray, time: np.ndarray, event: np.ndarray) -> np.ndarray:
    """Terms of the share of ordered pairs, see `scores`: the jackknife over samples."""
    n = len(risk)
    pairs, right = np.zeros(n), np.zeros(n)  # that a sample is in
    for i in np.flatnonzero(event > 0):
        later = (time > time[i]) | ((time == time[i]) & (event <= 0))
        agree = later * ((risk[i] > risk) + 0.5 * (risk[i] == risk))
        pairs += later
        right += agree
        pairs[i] += later.sum()
        right[i] += agree.sum()
    total = pairs.sum() / 2
    if not total:
        return np.full(n, math.nan)
    value = float(right.sum() / 2 / total)
    with np.errstate(divide="ignore", invalid="ignore"):
        without = (total * value - right) / (total - pairs)
    return _jackknifed(value, np.where(pairs < total, without, value))
