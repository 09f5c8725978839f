"""The scores that are known by name, and the reading of lists of them. Values are scikit-learn's where it has the
score. All are taken per client, from all of its samples, in double precision; accuracy, RMSE and the loss sample by
sample."""

from __future__ import annotations

import dataclasses
import math
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from polyfed.base.errors import ConfigError, closest
from polyfed.base.registry import Registry
from polyfed.base.settings import found, shown
from polyfed.base.text import parse
from polyfed.metrics import terms
from polyfed.metrics.metric import Metric, Predictions

if TYPE_CHECKING:  # a report reads metrics without torch
    from torch import Tensor

BINS = 10
_quiet = threading.Lock()  # filters of warnings are the process's
NAME = re.compile(r"[A-Za-z][A-Za-z0-9:.+_-]*")
TAKEN = ("samples", "round", "split", "std", "worst", "pooled", "seconds", "clusters", "assigned", "virtual_time")
FILED = ("id", "counts", "class", "probability")  # beside the scores of samples


def _module(name: str = "sklearn.metrics") -> Any:
    """A module of a library without types; loaded when a score needs it."""
    return import_module(name)


# Of more than two classes: AUC and average precision are means over one class against the rest, of the classes that
# the client has; balanced accuracy and F1 are means over these classes (macro); the Brier score sums over classes;
# ECE is of the likeliest class. Of two classes, the second is the positive one.


# sample by sample


def _correct(pred: Predictions) -> Tensor:
    output, target = pred.output, pred.target
    if output.dim() == 2 and output.shape[1] > 1:
        return (output.max(1).indices == target).to(output.dtype)  # argmax takes up to six times as long
    assert pred.threshold is not None
    return ((output.reshape(target.shape) > pred.threshold) == target).to(output.dtype)


def _squared(pred: Predictions) -> Tensor:
    gap = pred.output.reshape(pred.target.shape) - pred.target
    return gap.square().flatten(1).mean(1) if gap.dim() > 1 else gap.square()


# classes


def _against_the_rest(score: Callable[[np.ndarray, np.ndarray], Any], pred: Predictions) -> Any:
    """`score` (how it ranks, is it the class?) of the positive class, or its mean over the classes that are there."""
    y, rank = pred.classes, pred.ranking
    present = np.unique(y)
    if len(present) < 2:
        return math.nan
    which = [1] if rank.shape[1] == 2 else present
    return np.mean([score(rank[:, c], y == c) for c in which], axis=0)


def _terms_against_the_rest(added: Callable[[np.ndarray, np.ndarray], np.ndarray], pred: Predictions) -> np.ndarray:
    return np.full(len(pred.classes), _against_the_rest(added, pred))


def _auc(pred: Predictions) -> float:
    """The chance that a sample of the class ranks above one that is not, a tie counted as half (Mann and Whitney)."""

    # by sorting: scikit-learn's takes 60 times as long on a small site, most of it to check its arguments
    return float(_against_the_rest(_area, pred))


def _area(rank: np.ndarray, y: np.ndarray) -> float:
    _, at, counts = np.unique(rank, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - (counts + 1) / 2  # ranks from 0, of ties their mean
    n = int(y.sum())
    return float((middle[at][y].sum() - n * (n - 1) / 2) / (n * (len(y) - n)))


def _average_precision(pred: Predictions) -> float:
    return float(_against_the_rest(lambda rank, y: _module().average_precision_score(y, rank), pred))


def _balanced(pred: Predictions) -> float:
    present = np.unique(pred.classes)
    if len(present) < 2:
        return math.nan
    return float(_module().recall_score(pred.classes, pred.guess, labels=present, average="macro"))


def _f1(pred: Predictions) -> float:
    present = np.unique(pred.classes)
    if pred.kind == "two classes":
        return float(_module().f1_score(pred.classes, pred.guess)) if 1 in present else math.nan
    return float(_module().f1_score(pred.classes, pred.guess, labels=present, average="macro"))


def _log_loss(pred: Predictions) -> float:
    p = pred.probabilities
    return float(_module().log_loss(pred.classes, p, labels=np.arange(p.shape[1])))


def _brier(pred: Predictions) -> float:
    return float(_brier_terms(pred).mean())


def _ece(pred: Predictions, bins: int = BINS) -> float:
    """Gap between probability and frequency in bins of equal width, weighted by their samples (Guo et al., 2017)."""
    p, y = pred.probabilities, pred.classes
    sure, right = (p[:, 1], y == 1) if p.shape[1] == 2 else (p.max(1), p.argmax(1) == y)
    place = np.clip(np.ceil(sure * bins).astype(int) - 1, 0, bins - 1)
    return float(np.abs(np.bincount(place, sure - right, bins)).sum() / len(y))


def _slope(pred: Predictions) -> float:
    """b of logit P(y = 1) = a + b z, z the log-odds, by maximum likelihood: below 1 is overfitted (Cox, 1958)."""
    y, z = pred.classes == 1, pred.log_odds
    ones, zeros = z[y], z[~y]
    if not len(ones) or not len(zeros) or ones.min() >= zeros.max() or zeros.min() >= ones.max():
        return math.nan
    centre, width = z.mean(), z.std()
    fitted = _module("sklearn.linear_model").LogisticRegression(
        C=np.inf, solver="newton-cholesky", tol=1e-10, max_iter=200
    )
    return float(fitted.fit(((z - centre) / width)[:, None], y).coef_[0, 0] / width)


def _intercept(pred: Predictions) -> float:
    """a of logit P(y = 1) = a + z, z the model's log-odds: calibration in the large, 0 where the mean risk is right."""
    y, z = pred.classes == 1, pred.log_odds
    if y.all() or not y.any():
        return math.nan
    expit: Any = _module("scipy.special").expit
    logit = math.log(y.mean() / (1 - y.mean()))

    def gap(a: float) -> float:
        return float((expit(a + z) - y).sum())

    return float(_module("scipy.optimize").brentq(gap, logit - z.max() - 1, logit - z.min() + 1, xtol=1e-12))


def _balanced_terms(pred: Predictions) -> np.ndarray:
    return terms.balanced_accuracy(pred.guess == pred.classes, pred.classes)


def _f1_terms(pred: Predictions) -> np.ndarray:
    present = np.unique(pred.classes)
    if pred.kind == "two classes":
        present = present[present == 1]
    return terms.f1(pred.guess, pred.classes, present) if len(present) else np.full(len(pred.classes), math.nan)


def _log_loss_terms(pred: Predictions) -> np.ndarray:
    p = pred.probabilities[np.arange(len(pred.classes)), pred.classes]
    return -np.log(p.clip(np.finfo(p.dtype).eps, 1))


def _brier_terms(pred: Predictions) -> np.ndarray:
    p = pred.probabilities
    gap = p - np.eye(p.shape[1])[pred.classes]
    return gap[:, 1] ** 2 if p.shape[1] == 2 else (gap**2).sum(1)


# labels, of which a sample may have several


def _over_labels(score: Callable[[np.ndarray, np.ndarray], Any], pred: Predictions) -> Any:
    """Mean of `score` (outputs, is it there?) over the labels that some of the samples have and others have not."""
    output, target = pred.numbers
    both = np.flatnonzero((target.min(0) == 0) & (target.max(0) == 1))
    return np.mean([score(output[:, k], target[:, k] == 1) for k in both], axis=0) if len(both) else math.nan


def _macro_f1(output: np.ndarray, there: np.ndarray) -> float:
    return float(_module().f1_score(there, output > 0))


def _macro_f1_terms(output: np.ndarray, there: np.ndarray) -> np.ndarray:
    return terms.f1(output > 0, there, np.array([True]))


def _terms_over_labels(added: Callable[[np.ndarray, np.ndarray], np.ndarray], pred: Predictions) -> np.ndarray:
    return np.full(len(pred.target), _over_labels(added, pred))


# numbers


def _mae(pred: Predictions) -> float:
    predicted, true = pred.numbers
    return float(_module().mean_absolute_error(true, predicted))


def _r2(pred: Predictions) -> float:
    predicted, true = pred.numbers
    return math.nan if (np.ptp(true, axis=0) == 0).any() else float(_module().r2_score(true, predicted))


def _pinball(pred: Predictions, quantile: float = 0.5) -> float:
    predicted, true = pred.numbers
    return float(_module().mean_pinball_loss(true, predicted, alpha=quantile))


def _pinball_terms(pred: Predictions, quantile: float = 0.5) -> np.ndarray:
    predicted, true = pred.numbers
    gap = true - predicted
    return np.maximum(quantile * gap, (quantile - 1) * gap).mean(1)


def _rmse_terms(pred: Predictions) -> np.ndarray:
    return terms.rmse(_squared(pred).double().numpy())


def _concordance_terms(pred: Predictions) -> np.ndarray:
    # the output is a risk: the higher, the sooner; equal risks count half
    time, event = pred.target.double().T.numpy()
    return terms.concordance(pred.output.double().reshape(-1).numpy(), time, event)


def _concordance(pred: Predictions) -> float:
    """Harrell's c: of pairs in which one is known to have the event first, the share with the higher risk for it."""
    risk, (time, event) = pred.output.double().reshape(-1).numpy(), pred.target.double().T.numpy()
    pairs = right = 0.0
    for i in np.flatnonzero(event > 0):
        later = (time > time[i]) | ((time == time[i]) & (event <= 0))
        pairs += later.sum()
        right += (risk[i] > risk[later]).sum() + 0.5 * (risk[i] == risk[later]).sum()
    return right / pairs if pairs else math.nan


def _over_tokens(each: Tensor, pred: Predictions) -> np.ndarray:
    """Terms of the mean over all tokens that count: each sequence's share. each: [b, T]"""
    counted = pred.target >= 0
    if not bool(counted.any()):
        return np.full(len(counted), math.nan)
    return terms.ratio((each.double() * counted).sum(1).numpy(), counted.sum(1).double().numpy())


def _perplexity_terms(pred: Predictions) -> np.ndarray:
    """exp of the mean cross-entropy over all tokens that count, with each sequence's share to first order."""
    import torch.nn.functional as F

    classes, ignored = pred.output.double().transpose(1, 2), pred.target.long().where(pred.target >= 0, -100)
    entropy = _over_tokens(F.cross_entropy(classes, ignored, reduction="none"), pred)
    mean = entropy.mean()
    return np.exp(mean) * (1 + entropy - mean)


def _tokens_right_terms(pred: Predictions) -> np.ndarray:
    """The share of right classes among the tokens that count."""
    return _over_tokens(pred.output.argmax(2) == pred.target, pred)


# by name

ONE, NO_LABEL = "one class", "no label that some samples have and others have not"
LOSS = Metric("loss", better="lower", per="sample", least=0.0)
ACCURACY = Metric("accuracy", "%", "higher", _correct, "sample", "classes", least=0.0, most=1.0)
RMSE = Metric(
    "rmse", "target", "lower", _squared, "sample", "numbers", root=True, terms=_rmse_terms, title="RMSE", least=0.0
)
AUC = Metric("auc", "", "higher", _auc, kind="classes", terms=partial(_terms_against_the_rest, terms.auc), title="AUC",
             decimals=3, lacks=ONE, least=0.0, most=1.0, classwise=1)  # fmt: skip
DEFAULT = (ACCURACY, RMSE, LOSS)  # the first that fits leads where none is asked for
_ALL = (
    ACCURACY,
    AUC,
    Metric("average-precision", "", "higher", _average_precision, kind="classes",
           terms=partial(_terms_against_the_rest, terms.average_precision), title="average precision", decimals=3,
           lacks=ONE, least=0.0, most=1.0, classwise=1),
    Metric("balanced-accuracy", "%", "higher", _balanced, kind="classes", terms=_balanced_terms,
           title="balanced accuracy", lacks=ONE, least=0.0, most=1.0, classwise=2, guesses=True),
    Metric("f1", "", "higher", _f1, kind="classes", terms=_f1_terms, title="F1", decimals=3,
           lacks="no positive sample", least=0.0, most=1.0, classwise=1, guesses=True),
    Metric("log-loss", "", "lower", _log_loss, kind="classes", terms=_log_loss_terms, title="log-loss", decimals=3,
           least=0.0),
    Metric("brier", "", "lower", _brier, kind="classes", terms=_brier_terms, title="Brier score", decimals=3,
           least=0.0),
    Metric("calibration-slope", "", "near:1", _slope, kind="two classes", title="calibration slope", decimals=2,
           lacks="one class, or classes that the model separates"),
    Metric("calibration-intercept", "", "near:0", _intercept, kind="two classes", title="calibration intercept",
           decimals=2, lacks=ONE),
    Metric("ece", "", "lower", _ece, kind="classes", title="calibration error", decimals=3, least=0.0, most=1.0),
    RMSE,
    Metric("mae", "target", "lower", _mae, kind="numbers", terms=lambda pred: 2 * _pinball_terms(pred), title="MAE",
           least=0.0),
    Metric("r2", "", "higher", _r2, kind="numbers", terms=lambda pred: terms.r2(*pred.numbers), title="R²", decimals=3,
           lacks="targets that are all equal", most=1.0),
    Metric("pinball", "target", "lower", _pinball, kind="numbers", terms=_pinball_terms, title="pinball loss",
           least=0.0),
    Metric("macro-auc", "", "higher", partial(_over_labels, _area), kind="labels",
           terms=partial(_terms_over_labels, terms.auc), title="macro AUC", decimals=3, lacks=NO_LABEL, least=0.0,
           most=1.0),
    Metric("macro-f1", "", "higher", partial(_over_labels, _macro_f1), kind="labels",
           terms=partial(_terms_over_labels, _macro_f1_terms), title="macro F1", decimals=3, lacks=NO_LABEL, least=0.0,
           most=1.0),
    Metric("concordance", "", "higher", _concordance, kind="survival", terms=_concordance_terms, title="concordance",
           decimals=3, lacks="no two patients to compare", least=0.0, most=1.0, classwise=1),
    Metric("perplexity", "", "lower", lambda pred: float(_perplexity_terms(pred).mean()), kind="tokens",
           terms=_perplexity_terms, decimals=2, lacks="no token that counts", least=1.0),
    Metric("token-accuracy", "%", "higher", lambda pred: float(_tokens_right_terms(pred).mean()), kind="tokens",
           terms=_tokens_right_terms, lacks="no token that counts", least=0.0, most=1.0),
    LOSS,
)  # fmt: skip


def _named_well(name: str) -> bool:
    """True where files and tables can hold a metric of this name."""
    return bool(NAME.fullmatch(name)) and name not in TAKEN + FILED and not name.endswith("_bytes")


def _is_metric(thing: Any) -> bool:
    return isinstance(thing, Metric) and _named_well(thing.name)


KNOWN: Registry[Metric] = Registry("metrics", group=("polyfed.metrics", "a polyfed.Metric", _is_metric))
KNOWN.update({m.name: m for m in _ALL})
UNDEFINED = "one class, or a value that scikit-learn does not define"
Metrics = str | Metric | Callable[..., Any] | Sequence[Any]


def metrics_of(given: Metrics | None) -> tuple[Metric, ...]:
    """Metrics out of names ("auc,brier", or a list), metrics, functions (output, target) -> number, and scorers,
    those of scikit-learn, also by name. Raises ConfigError, in one line."""
    if given is None:
        return ()
    if isinstance(given, str):
        given = given.split(",")
    listed = cast("Sequence[Any]", given if isinstance(given, Sequence) else [given])
    metrics = tuple(_one(item) for item in listed)
    names = [m.name for m in metrics]
    if not metrics or len(set(names)) < len(names):
        raise ConfigError(f"metrics: {found(names, 'one metric or more, each once')}")
    return metrics


def _one(item: Any) -> Metric:
    if isinstance(item, str):
        return named(item.strip())
    if isinstance(item, Metric):
        metric = item
    elif hasattr(item, "_score_func"):  # of scikit-learn's make_scorer
        metric = _scorer(item)
    elif callable(item):
        metric = Metric(getattr(item, "__name__", type(item).__name__), compute=partial(_called, item))
    else:
        raise ConfigError(f"metrics: {found(item, 'a name such as auc, a polyfed.Metric or a function')}")
    if not _named_well(metric.name):
        raise ConfigError(
            f"metrics: found the name {shown(metric.name)}, expected letters, digits and . : + _ -; "
            "polyfed.Metric(name, compute=...) gives another"
        )
    if known(metric.name) not in (None, metric):
        raise ConfigError(f"metrics: {metric.name!r} is the name of a known metric; give another")
    return metric


def _scorer(item: Any) -> Metric:
    """A scikit-learn scorer under the name of its function and its settings, such as `fbeta_score:beta-2`."""
    name = ":".join([item._score_func.__name__, *(f"{key}-{value}" for key, value in item._kwargs.items())])
    if (same := known(name)) is not None and repr(_module().get_scorer(name)) == repr(item):
        return same
    return Metric(name, compute=partial(_scored, item), decimals=3, lacks=UNDEFINED)


def _called(function: Callable[[Tensor, Tensor], Any], pred: Predictions) -> Any:
    return function(pred.output, pred.target)


def named(text: str) -> Metric:
    """The metric of a name: `auc`, `pinball:0.9`, or that of a scikit-learn scorer. Raises ConfigError."""
    name, values, settings = parse(text, "metrics")
    if KNOWN.knows(text):
        return KNOWN.find(text)
    if name in ("pinball", "ece") and len(values) == 1 and not settings:
        return _set(name, values[0], text)
    if name in KNOWN:
        raise ConfigError(f"metrics: found {shown(text)}; pinball:0.9 and ece:15 take one number, the others none")
    if text in (scorers := _module().get_scorer_names()):
        return Metric(text, compute=partial(_scored, text), decimals=3, lacks=UNDEFINED)
    names = dict.fromkeys([*KNOWN, *KNOWN.names()])
    near, choices = closest(text, [*names, *scorers]), ", ".join(names)
    raise ConfigError(f"metrics: found {shown(text)}{near}, expected one of {choices}, or a scikit-learn scorer")


def known(name: str) -> Metric | None:
    """The metric of a name, or None."""
    try:
        return named(name)
    except ConfigError:
        return None


def _set(name: str, value: str, text: str) -> Metric:
    """A metric with a setting of its own."""
    base = KNOWN[name]
    try:
        number = float(value) if name == "pinball" else int(value)
    except ValueError:
        number = 0
    if name == "pinball" and not 0 < number < 1:
        raise ConfigError(f"metrics: found {shown(text)}, expected a quantile between 0 and 1, such as pinball:0.9")
    if name == "ece" and not 1 <= number <= 1000:
        raise ConfigError(f"metrics: found {shown(text)}, expected a number of bins from 1 to 1000, such as ece:15")
    if name == "pinball":
        title, compute = f"pinball loss at {number:g}", partial(_pinball, quantile=float(number))
        added = partial(_pinball_terms, quantile=float(number))
    else:
        title, compute, added = f"{base.title} ({number} bins)", partial(_ece, bins=int(number)), None
    return dataclasses.replace(base, name=text, title=title, compute=compute, terms=added)


def _scored(scorer: Any, pred: Predictions) -> float:
    """A scikit-learn scorer's value, by the model's answers as an estimator gives them. scorer: itself, or its name"""
    with _quiet, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of scores that are not defined
        return _answered(_module().get_scorer(scorer), pred)


def _answered(scorer: Any, pred: Predictions) -> float:
    base = _module("sklearn.base")
    if pred.kind in ("numbers", "labels"):
        predicted, true = pred.numbers
        return float(scorer(_estimator(base.RegressorMixin, {"predict": predicted}), predicted, true))
    if len(np.unique(pred.classes)) < 2:
        return math.nan
    rank = pred.ranking
    decision = rank[:, 1] if rank.shape[1] == 2 else rank
    answers = {"predict": pred.guess, "predict_proba": pred.probabilities, "decision_function": decision}
    model = _estimator(base.ClassifierMixin, answers)
    model.classes_ = np.arange(rank.shape[1])
    return float(scorer(model, rank, pred.classes))


def _estimator(mixin: Any, answers: Mapping[str, np.ndarray]) -> Any:
    """A stand-in for a fitted estimator of scikit-learn, with these answers to its methods."""

    def method(name: str, answer: Any) -> Callable[..., Any]:
        def said(*_: Any) -> Any:
            return answer

        said.__name__ = name  # by which scikit-learn asks for it again
        return said

    methods = {key: method(key, answer) for key, answer in answers.items()}
    methods |= {"fit": method("fit", None), "__sklearn_is_fitted__": method("__sklearn_is_fitted__", True)}
    return type("Model", (mixin, _module("sklearn.base").BaseEstimator), methods)()


# what fits


def fitting(requested: Sequence[Metric], tried: Predictions, labels: int) -> tuple[Metric, ...]:
    """The metrics of a task, by a few of its samples: those asked for, or the default. labels: classes, or 0"""
    if not requested:
        return (next(m for m in DEFAULT if m.fits(tried)),)
    shapes = f"outputs are {list(tried.output.shape[1:])} and targets {list(tried.target.shape[1:])} per sample"
    for m in requested:
        if not m.fits(tried):
            needs = "targets (time, event) and one output" if m.kind == "survival" else m.kind
            kind = {"survival": "times and events", "numbers": "numbers", "labels": "labels"}.get(
                str(tried.kind), f"{labels} classes"
            )
            raise ConfigError(f"metrics: {m.name} needs {needs}; {f'the targets are {kind}' if tried.kind else shapes}")
        if m.kind is None and m.compute is not None:
            m.computed(tried, needed=True)
    return tuple(requested)


def leading(columns: Iterable[str]) -> Metric:
    """The metric that leads where nothing says which: the first of the default ones among the columns."""
    names = set(columns)
    return next((m for m in DEFAULT if m.name in names), LOSS)
