"""Yardsticks that a site fits alone with scikit-learn: the commonest class or mean, a linear model, boosted trees."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from polyfed.base.errors import ConfigError
from polyfed.base.settings import setting
from polyfed.compute.split import Split
from polyfed.compute.task import Task
from polyfed.yardsticks.yardstick import Outputs, Yardstick

Predict = Callable[[np.ndarray], np.ndarray]
PENALTIES = tuple(10.0**k for k in range(-2, 4))  # tried by cross-validation
CHEAP = 2_000_000  # numbers in a site's inputs, times classes, up to which penalties are tried
FOLDS = 5


class Own(Yardstick, abstract=True):
    """Base: a model that every site fits to its own training samples, and that never leaves it.

    A class that a site has no sample of counts as half a sample, so that no probability is zero.
    """

    uses: ClassVar[tuple[str, ...]] = ()  # modules of scikit-learn

    def check(self, task: Task) -> None:
        for name in self.uses:  # slow to load: once, and not in every process of runs side by side
            _sklearn(name)
        if callable(task.loss):
            name = getattr(task.loss, "__name__", "a function")
            raise ConfigError(f"{self.name}: knows the losses cross-entropy and mse, found {name}; leave the row out")
        if task.net.integers:
            raise ConfigError(f"{self.name}: takes features, and the inputs are tokens; leave the row out")

    def fit(self, train: Split, classes: int | None, pooled: Callable[[float], Outputs]) -> Sequence[Outputs]:
        weights = (None if train.shares is None else train.shares[train.rows(i)] for i in range(train.n))
        return [self.fitted(*train.client(i), classes, weight) for i, weight in enumerate(weights)]

    def fitted(self, x: Tensor, y: Tensor, classes: int | None, weight: Tensor | None = None) -> Outputs:
        """Fit one site's samples [n, ...], weighted by `Split.shares`, with classes None for numbers.

        Returns inputs [b, ...] -> logits [b, classes], or numbers [b, ...]; NaN where there is no training sample.
        """
        if not len(x):
            shape = (classes,) if classes is not None else tuple(y.shape[1:])
            return lambda new: torch.full((len(new), *shape), torch.nan, dtype=torch.float64)
        rows, targets, u = _flat(x), y.cpu().numpy(), None if weight is None else weight.cpu().numpy()
        if u is not None:
            rows, targets, u = rows[u > 0], targets[u > 0], u[u > 0]
        if classes is None:
            predict = self.numbers(rows, targets.reshape(len(targets), -1).astype(np.float64), u)
            return lambda new: torch.as_tensor(predict(_flat(new))).reshape(len(new), *y.shape[1:])
        there, counts = np.unique(targets, return_counts=True)
        predict = self.probabilities(rows, targets, u) if len(there) > 1 else lambda new: np.ones((len(new), 1))
        missing = classes - len(there)

        def logits(new: Tensor) -> Tensor:
            p = np.full((len(new), classes), 0.5)
            p[:, there] = counts.sum() * np.maximum(predict(_flat(new)), 1e-12)  # of which the log is taken
            return torch.as_tensor(np.log(p / (counts.sum() + 0.5 * missing)))

        return logits

    def probabilities(self, x: np.ndarray, y: np.ndarray, u: np.ndarray | None = None) -> Predict:
        """Fit inputs [n, d], labels [n] of two classes at least: [b, d] -> [b, k], probabilities of y's classes."""
        raise NotImplementedError

    def numbers(self, x: np.ndarray, y: np.ndarray, u: np.ndarray | None = None) -> Predict:
        """Fit inputs [n, d], targets [n, k]: [b, d] -> [b, k]. u: [n] weights above 0, 1 on average; None: all 1"""
        raise NotImplementedError


@dataclass(frozen=True)
class Commonest(Own):
    """The site's commonest class, with the shares of all classes as probabilities; its mean, for numbers.

    Notes
    -----
    The best guess for a patient of the site unseen. Its ranking is chance: AUC 1/2.
    """

    def probabilities(self, x: np.ndarray, y: np.ndarray, u: np.ndarray | None = None) -> Predict:
        share = np.bincount(np.unique(y, return_inverse=True)[1], u)
        share = share / share.sum()
        return lambda new: np.tile(share, (len(new), 1))

    def numbers(self, x: np.ndarray, y: np.ndarray, u: np.ndarray | None = None) -> Predict:
        mean = np.average(y, 0, u)
        return lambda new: np.tile(mean, (len(new), 1))


@dataclass(frozen=True)
class OwnLinear(Own):
    """Logistic regression, or ridge regression for numbers, on the site's own standardised inputs, by scikit-learn.

    min_w  sum_j loss(w . x_j + b, y_j) + penalty/2 ||w||^2        (ridge: penalty ||w||^2)
    """

    penalty: float | None = setting(
        None,
        gt=0,
        source="ours",
        doc="Strength of the penalty. None: the best of 0.01, 0.1, ..., 1000 by cross-validation within the site's "
        "training samples (five folds, or as many as the rarest class has samples; leave-one-out for ridge). "
        "With one sample of a class, and from two million numbers on, none is tried and it is 1.",
    )

    name = "own-linear"
    uses = ("preprocessing", "linear_model", "model_selection")

    def probabilities(self, x: np.ndarray, y: np.ndarray, u: np.ndarray | None = None) -> Predict:
        z = _sklearn("preprocessing").StandardScaler().fit(x, sample_weight=u)
        chosen = self.penalty or _cross_validated(z.transform(x), y, u)
        model = _logistic(chosen).fit(z.transform(x), y, u)
        return lambda new: model.predict_proba(z.transform(new))

    def numbers(self, x: np.ndarray, y: np.ndarray, u: np.ndarray | None = None) -> Predict:
        z, linear = _sklearn("preprocessing").StandardScaler().fit(x, sample_weight=u), _sklearn("linear_model")
        trying = self.penalty is None and len(x) > 2 and x.size <= CHEAP
        model = linear.RidgeCV(PENALTIES) if trying else linear.Ridge(self.penalty or 1.0)
        model.fit(z.transform(x), y, u)
        return lambda new: model.predict(z.transform(new)).reshape(len(new), -1)


@dataclass(frozen=True)
class OwnTrees(Own):
    """Gradient-boosted trees on the site's own samples: scikit-learn's histogram version with its defaults.

    Notes
    -----
    A leaf of 20 leaves a site with fewer than 40 samples without a single split.
    """

    min_samples_leaf: int | None = setting(
        None,
        ge=1,
        source="ours",
        doc="Samples that a leaf must have. None: scikit-learn's 20, at small sites a tenth of the samples, never "
        "below 2.",
    )

    name = "own-trees"
    uses = ("ensemble",)

    def probabilities(self, x: np.ndarray, y: np.ndarray, u: np.ndarray | None = None) -> Predict:
        return self._boosted("Classifier", x, y, u).predict_proba

    def numbers(self, x: np.ndarray, y: np.ndarray, u: np.ndarray | None = None) -> Predict:
        columns = [self._boosted("Regressor", x, column, u) for column in y.T]
        return lambda new: np.stack([model.predict(new) for model in columns], 1)

    def _boosted(self, kind: str, x: np.ndarray, y: np.ndarray, u: np.ndarray | None) -> Any:
        leaf = self.min_samples_leaf or max(2, min(20, len(x) // 10))
        trees = getattr(_sklearn("ensemble"), f"HistGradientBoosting{kind}")
        return trees(min_samples_leaf=leaf, random_state=0).fit(x, y, u)


def _logistic(penalty: float) -> Any:
    return _sklearn("linear_model").LogisticRegression(C=1 / penalty, max_iter=1000)


def _cross_validated(x: np.ndarray, y: np.ndarray, u: np.ndarray | None) -> float:
    """The penalty with the least log-loss on samples left out; the stronger one of two that are equal."""
    folds, there = min(FOLDS, int(np.unique(y, return_counts=True)[1].min())), np.unique(y)
    if folds < 2 or x.size * len(there) > CHEAP:
        return 1.0
    cuts = list(_sklearn("model_selection").StratifiedKFold(folds).split(x, y))
    at, u = np.searchsorted(there, y), np.ones(len(y)) if u is None else u

    def loss(penalty: float) -> float:
        log_p = [_logistic(penalty).fit(x[kept], y[kept], u[kept]).predict_log_proba(x[out]) for kept, out in cuts]
        return -sum(float(p[np.arange(len(p)), at[out]] @ u[out]) for p, (_, out) in zip(log_p, cuts, strict=True))

    return min(reversed(PENALTIES), key=loss)


def _flat(x: Tensor) -> np.ndarray:
    return x.detach().cpu().double().reshape(len(x), -1).numpy()


def _sklearn(name: str) -> Any:
    """A module of scikit-learn, which has no types; loaded when a run with a yardstick is checked."""
    return import_module(f"sklearn.{name}")
