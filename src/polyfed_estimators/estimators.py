"""Estimators of scikit-learn over sites: `fit(X, y, sites=...)` trains a federation in which each site is a client."""

from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d, validate_data  # pyrefly: ignore[missing-module-attribute]
from torch import nn

from polyfed.algorithms import FedAvg
from polyfed.core.algorithm import Contender
from polyfed.data.federation import Federation
from polyfed.face import fit
from polyfed.models.start import drawn

Made = Callable[[int, int], nn.Module]  # a model of so many inputs and outputs


class _Federated(BaseEstimator):
    """Shared parts of both estimators: parameters, fitting, and the choice of a model for each row."""

    def __init__(
        self,
        method: Contender | None = None,
        model: Made | None = None,
        rounds: int = 50,
        standardise: bool = True,
        settings: Mapping[str, Any] | None = None,
        random_state: int | np.random.RandomState | None = 0,
    ):
        self.method = method
        self.model = model
        self.rounds = rounds
        self.standardise = standardise
        self.settings = settings
        self.random_state = random_state

    def _fit(self, x: Any, y: np.ndarray, sites: Any, classes: int | None) -> Self:
        """Train on x: [N, d] and on labels from 0 or numbers y: [N]."""
        who = np.zeros(len(x), dtype=int) if sites is None else column_or_1d(sites)
        check_consistent_length(x, who)
        self.sites_, at = np.unique(who, return_inverse=True)
        self._shift, self._scale = _moments(x) if self.standardise else (np.zeros(x.shape[1]), np.ones(x.shape[1]))
        x = (x - self._shift) / self._scale
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        rows = [at == k for k in range(len(self.sites_))]
        federation = Federation.from_arrays(
            [(x[r], y[r]) for r in rows],
            names=[str(s) for s in self.sites_],
            classes=classes,
            test_fraction=0.0,
            task="regression" if classes is None else "classification",
        )
        net = drawn(lambda: (self.model or nn.Linear)(x.shape[1], classes or 1).double(), seed)
        how: dict[str, Any] = {"evaluate_every": 0} | dict(self.settings or {})
        run = fit(net, federation, self.method or FedAvg(), rounds=self.rounds, seed=seed, callbacks=[_quiet], **how)
        self.n_iter_ = run.rounds
        self.models_ = [run.model(k).eval() for k in range(federation.n)]
        common = run.common
        if len(self.models_) == 1:
            self.common_ = self.models_[0]
        else:
            self.common_ = None if common is None else run.trained.task.module(common).eval()
        return self

    def _outputs(self, X: Any, sites: Any) -> np.ndarray:
        """[N, outputs] of each row's own model, or without sites of the common one."""
        check_is_fitted(self)
        x: Any = validate_data(self, X, dtype=np.float64, reset=False)
        x = torch.from_numpy((x - self._shift) / self._scale)
        if sites is None:
            if self.common_ is None:
                raise ValueError(
                    f"{type(self).__name__}: its method has no common model; give the site of every row, sites=[...]"
                )
            with torch.no_grad():
                return self.common_(x).numpy()
        who = column_or_1d(sites)
        check_consistent_length(x, who)
        at = {site: k for k, site in enumerate(self.sites_.tolist())}
        if unknown := [site for site in who.tolist() if site not in at]:
            raise ValueError(f"sites: found {unknown[0]!r}, expected one of {', '.join(map(str, at))}")
        which = np.array([at[site] for site in who.tolist()], dtype=int)
        outputs = np.zeros((len(x), self.models_[0](x[:1]).shape[1]))
        with torch.no_grad():
            for k in np.unique(which):
                outputs[which == k] = self.models_[k](x[which == k]).numpy()
        return outputs

    def predict(self, X: Any, sites: Any = None) -> np.ndarray:
        """The answers of each row's model."""
        raise NotImplementedError

    def score(self, X: Any, y: Any, sample_weight: Any = None, sites: Any = None) -> float:
        """Accuracy of classes, or R², the explained share of the variance of numbers.

        Parameters
        ----------
        X, y : array
            [N, d] numbers, and [N] labels or numbers.
        sample_weight : array or None
            [N] weights of the rows; None: all alike.
        sites : array or None
            [N] site of each row, whose model answers; None: the common model.

        Returns
        -------
        float
            At most 1.
        """
        metric = accuracy_score if isinstance(self, ClassifierMixin) else r2_score
        return float(metric(y, self.predict(X, sites), sample_weight=sample_weight))


class FederatedClassifier(ClassifierMixin, _Federated):
    """Classifier trained over sites, with one model for all or one for each, as its method has it.

    Parameters
    ----------
    method : Algorithm or None
        The method; None: FedAvg.
    model : callable or None
        (inputs, outputs) -> nn.Module; None: a linear model.
    rounds : int
        Communication rounds.
    standardise : bool
        Scale columns with mean and deviation over all sites, which then say their sums.
    settings : dict or None
        Further settings of a run, as `polyfed.fit` takes them: {"local_epochs": 2}.
    random_state : int, RandomState or None
        Seed of the start and of every draw.

    Attributes
    ----------
    classes_ : array
        [C] labels.
    sites_ : array
        [n] sites, in the order of `models_`.
    models_ : list of nn.Module
        The sites' models, for scaled columns.
    common_ : nn.Module or None
        The model for rows without a site: the only site's, or the method's common one.
    n_iter_ : int
        Rounds done.
    """

    def fit(self, X: Any, y: Any, sites: Any = None) -> Self:
        """Train over the sites.

        Parameters
        ----------
        X, y : array
            [N, d] numbers and [N] labels.
        sites : array or None
            [N] site of each row; None: one site.

        Returns
        -------
        FederatedClassifier
            The classifier itself.
        """
        x, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, at = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y: found one class, {self.classes_[0]!r}, expected at least two classes")
        return self._fit(x, at, sites, len(self.classes_))

    def predict_proba(self, X: Any, sites: Any = None) -> np.ndarray:
        """Probabilities of the classes.

        Parameters
        ----------
        X : array
            [N, d] numbers.
        sites : array or None
            [N] site of each row, whose model answers; None: the common model.

        Returns
        -------
        array
            [N, C] in the order of `classes_`.
        """
        return torch.from_numpy(self._outputs(X, sites)).softmax(1).numpy()

    def predict(self, X: Any, sites: Any = None) -> np.ndarray:
        """Predicted labels.

        Parameters
        ----------
        X : array
            [N, d] numbers.
        sites : array or None
            [N] site of each row, whose model answers; None: the common model.

        Returns
        -------
        array
            [N] labels.
        """
        outputs = self._outputs(X, sites)
        return self.classes_[outputs.argmax(1)]

    score = _Federated.score


class FederatedRegressor(RegressorMixin, _Federated):
    """Regressor trained over sites, with one model for all or one for each, as its method has it.

    Parameters
    ----------
    method : Algorithm or None
        The method; None: FedAvg.
    model : callable or None
        (inputs, outputs) -> nn.Module; None: a linear model.
    rounds : int
        Communication rounds.
    standardise : bool
        Scale columns and the target with mean and deviation over all sites, which then say their sums.
    settings : dict or None
        Further settings of a run, as `polyfed.fit` takes them: {"local_epochs": 2}.
    random_state : int, RandomState or None
        Seed of the start and of every draw.

    Attributes
    ----------
    sites_ : array
        [n] sites, in the order of `models_`.
    models_ : list of nn.Module
        The sites' models, for scaled columns and targets.
    common_ : nn.Module or None
        The model for rows without a site: the only site's, or the method's common one.
    n_iter_ : int
        Rounds done.
    """

    def fit(self, X: Any, y: Any, sites: Any = None) -> Self:
        """Train over the sites.

        Parameters
        ----------
        X, y : array
            [N, d] and [N] numbers.
        sites : array or None
            [N] site of each row; None: one site.

        Returns
        -------
        FederatedRegressor
            The regressor itself.
        """
        x, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        y = y.astype(np.float64)
        self._middle, self._width = _moments(y) if self.standardise else (0.0, 1.0)
        return self._fit(x, (y - self._middle) / self._width, sites, None)

    def predict(self, X: Any, sites: Any = None) -> np.ndarray:
        """Predicted numbers.

        Parameters
        ----------
        X : array
            [N, d] numbers.
        sites : array or None
            [N] site of each row, whose model answers; None: the common model.

        Returns
        -------
        array
            [N] in the target's unit.
        """
        return self._outputs(X, sites)[:, 0] * self._width + self._middle

    score = _Federated.score


def _moments(x: np.ndarray) -> tuple[Any, Any]:
    """Mean and deviation over the first axis; that of what does not vary is 1."""
    deviation = x.std(0)
    return x.mean(0), np.where(deviation > 0, deviation, 1.0)


def _quiet(step: Any) -> None:
    """A callback in place of a notebook's line."""
