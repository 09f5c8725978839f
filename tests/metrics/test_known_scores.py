"""The scores: equal to scikit-learn's or to the definition by hand, none where a client has none, and refusals."""

import math

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from scipy.special import expit, softmax
from sklearn.linear_model import LogisticRegression
from torch import nn

from polyfed.base.errors import ConfigError
from polyfed.compute import evaluation
from polyfed.compute.check import check
from polyfed.compute.split import Split
from polyfed.compute.task import Task
from polyfed.metrics.metric import Metric, Predictions
from polyfed.metrics.scores import KNOWN, metrics_of, named

CLASSES = [name for name, m in KNOWN.items() if m.kind == "classes" and m.per == "client"]
BINARY = [name for name, m in KNOWN.items() if m.kind == "two classes"]


def made(classes: int = 2, n: int = 200, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(logits [n, classes], labels [n]) that have to do with each other."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, n)
    return rng.normal(size=(n, classes)) + 1.2 * np.eye(classes)[y], y


def score(name: str, output, target, threshold: float | None = 0.0) -> float:
    return named(name).of(Predictions(torch.as_tensor(output), torch.as_tensor(target), threshold))


Z, Y = made()
PREDICTIONS = Predictions(torch.as_tensor(Z), torch.as_tensor(Y))
P = softmax(Z, axis=1)
GUESS = Z.argmax(1)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("auc", sk.roc_auc_score(Y, P[:, 1])),
        ("average-precision", sk.average_precision_score(Y, P[:, 1])),
        ("balanced-accuracy", sk.balanced_accuracy_score(Y, GUESS)),
        ("f1", sk.f1_score(Y, GUESS)),
        ("log-loss", sk.log_loss(Y, P)),
        ("brier", sk.brier_score_loss(Y, P[:, 1])),
        ("matthews_corrcoef", sk.matthews_corrcoef(Y, GUESS)),
        ("neg_log_loss", -sk.log_loss(Y, P)),
        ("roc_auc", sk.roc_auc_score(Y, P[:, 1])),
    ],
)
def test_two_classes_as_scikit_learn_has_them(name, expected):
    """From two outputs, from one logit, and from one probability."""
    assert score(name, Z, Y) == pytest.approx(expected, abs=1e-12)
    assert score(name, Z[:, 1:] - Z[:, :1], Y) == pytest.approx(expected, abs=1e-12)
    assert score(name, P[:, 1], Y, 0.5) == pytest.approx(expected, abs=1e-12)
    assert score(name, P, Y, 0.5) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("scorer", "name", "expected"),
    [
        (sk.make_scorer(sk.fbeta_score, beta=2), "fbeta_score:beta-2", sk.fbeta_score(Y, GUESS, beta=2)),
        (sk.make_scorer(sk.hamming_loss, greater_is_better=False), "hamming_loss", -sk.hamming_loss(Y, GUESS)),
        (sk.get_scorer("roc_auc"), "roc_auc_score", sk.roc_auc_score(Y, P[:, 1])),
        (sk.get_scorer("neg_log_loss"), "log_loss", -sk.log_loss(Y, P)),
        (sk.make_scorer(sk.matthews_corrcoef), "matthews_corrcoef", sk.matthews_corrcoef(Y, GUESS)),
    ],
)
def test_a_scorer_itself_is_a_metric(scorer, name, expected):
    (metric,) = metrics_of([scorer])
    assert metric.name == name
    assert metric.of(PREDICTIONS) == pytest.approx(expected, abs=1e-12)


def test_many_classes_as_scikit_learn_has_them():
    z, y = made(5)
    p, guess, hot = softmax(z, axis=1), z.argmax(1), np.eye(5)[y]
    assert score("auc", z, y) == pytest.approx(sk.roc_auc_score(y, p, multi_class="ovr"), abs=1e-12)
    assert score("average-precision", z, y) == pytest.approx(sk.average_precision_score(hot, p), abs=1e-12)
    assert score("balanced-accuracy", z, y) == pytest.approx(sk.balanced_accuracy_score(y, guess), abs=1e-12)
    assert score("f1", z, y) == pytest.approx(sk.f1_score(y, guess, average="macro"), abs=1e-12)
    assert score("log-loss", z, y) == pytest.approx(sk.log_loss(y, p), abs=1e-12)
    assert score("brier", z, y) == pytest.approx(((p - hot) ** 2).sum(1).mean(), abs=1e-12)


def test_a_client_with_some_of_the_classes_has_the_mean_over_those():
    z, y = made(5)
    some = np.isin(y, (1, 4))
    p = softmax(z[some], axis=1)
    by_hand = np.mean([sk.roc_auc_score(y[some] == c, p[:, c]) for c in (1, 4)])
    assert score("auc", z[some], y[some]) == pytest.approx(by_hand, abs=1e-12)


def test_ranks_are_not_lost_where_probabilities_round_to_one():
    """Logits of hundreds: every probability is 0 or 1 in double precision, the order is still there."""
    assert score("auc", np.array([[0.0, 90.0], [0.0, 100.0], [0.0, 80.0]]), [0, 1, 0]) == 1.0
    assert score("auc", np.array([[0.0, 0.0, 90.0], [0.0, 0.0, 100.0], [0.0, 0.0, 80.0]]), [0, 2, 0]) == 1.0


def test_calibration_slope_and_intercept_by_their_definitions():
    """Cox's slope is that of a logistic regression on the log-odds; the intercept makes the mean risk the frequency."""
    rng = np.random.default_rng(1)
    true = rng.normal(size=4000)
    y = (rng.random(4000) < expit(true)).astype(int)
    said = 2.0 * true + 0.7  # log-odds twice as far out, and too high: overfitted
    output = np.stack([np.zeros(4000), said], 1)
    fitted = LogisticRegression(C=np.inf, tol=1e-12, max_iter=1000).fit(said[:, None], y)
    assert score("calibration-slope", output, y) == pytest.approx(fitted.coef_[0, 0], abs=1e-5)
    assert score("calibration-slope", output, y) == pytest.approx(0.5, abs=0.05)
    shift = score("calibration-intercept", output, y)
    assert expit(said + shift).mean() == pytest.approx(y.mean(), abs=1e-10)
    assert score("calibration-intercept", np.stack([0 * true, true], 1), y) == pytest.approx(0, abs=0.1)


def test_calibration_error_by_hand():
    """Ten samples at 0.9 of which six are positive, and ten at 0.25 of which one is: (0.3 * 10 + 0.15 * 10) / 20."""
    p, y = (
        np.r_[np.full(10, 0.9), np.full(10, 0.25)],
        np.r_[np.ones(6), np.zeros(4), np.ones(1), np.zeros(9)].astype(int),
    )
    assert score("ece", p, y, 0.5) == pytest.approx(0.225, abs=1e-12)
    assert score("ece:1", p, y, 0.5) == pytest.approx(abs(p.mean() - y.mean()), abs=1e-12)


def test_numbers_as_scikit_learn_has_them():
    rng = np.random.default_rng(2)
    y, out = rng.normal(size=50), rng.normal(size=(50, 1))
    flat = out[:, 0]
    assert score("mae", out, y) == pytest.approx(sk.mean_absolute_error(y, flat), abs=1e-12)
    assert score("r2", out, y) == pytest.approx(sk.r2_score(y, flat), abs=1e-12)
    assert score("pinball", out, y) == pytest.approx(sk.mean_absolute_error(y, flat) / 2, abs=1e-12)
    assert score("pinball:0.9", out, y) == pytest.approx(sk.mean_pinball_loss(y, flat, alpha=0.9), abs=1e-12)
    assert score("explained_variance", out, y) == pytest.approx(sk.explained_variance_score(y, flat), abs=1e-12)


def test_concordance_by_hand():
    """Every pair looked at by itself: ties of time, of risk, and censored patients."""
    rng = np.random.default_rng(3)
    time, event, risk = rng.integers(1, 15, 60), rng.random(60) < 0.6, rng.integers(0, 8, 60)
    pairs = right = 0.0
    for i in range(60):
        for j in range(60):
            if event[i] and (time[i] < time[j] or (time[i] == time[j] and not event[j])):
                pairs += 1
                right += 1.0 if risk[i] > risk[j] else 0.5 if risk[i] == risk[j] else 0.0
    target = np.stack([time, event], 1).astype(float)
    assert score("concordance", risk.astype(float), target) == pytest.approx(right / pairs, abs=1e-12)
    assert score("concordance", -time.astype(float)[:, None], np.stack([time, np.ones(60)], 1).astype(float)) == 1.0


def own_bias(output, target):
    return float((output.argmax(1) - target).double().mean())


def own_squares(output, target):
    return (output[:, 1] - target).square()  # one number per sample


def test_a_function_of_outputs_and_targets():
    assert metrics_of(own_bias)[0].of(PREDICTIONS) == pytest.approx((GUESS - Y).mean())
    (metric,) = metrics_of([own_squares])
    assert metric.of(PREDICTIONS) == pytest.approx(((Z[:, 1] - Y) ** 2).mean())


@pytest.mark.parametrize("name", [*CLASSES, *BINARY, "roc_auc"])
def test_one_class_has_no_score_that_needs_two(name):
    value = score(name, Z[Y == 0], Y[Y == 0])
    defined = name in ("log-loss", "brier", "ece")
    assert math.isfinite(value) == defined
    assert defined or named(name).lacks


def test_no_slope_where_the_model_separates_the_classes_and_no_r2_where_targets_are_equal():
    assert math.isnan(score("calibration-slope", np.array([-1.0, -0.5, 1.0]), np.array([0, 0, 1])))
    assert math.isnan(score("calibration-slope", np.array([0.5, 0.5, 0.5]), np.array([0, 0, 1])))
    assert math.isnan(score("r2", np.arange(3.0), np.ones(3)))
    assert math.isnan(score("concordance", np.arange(3.0), np.array([[1.0, 0], [2, 0], [3, 0]])))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("aucc", "metrics: found 'aucc' (did you mean 'auc'?), expected one of accuracy, auc,"),
        ("roc_aucs", "did you mean 'roc_auc'?"),
        ("pinball:1.5", "expected a quantile between 0 and 1"),
        ("ece:0", "expected a number of bins"),
        ("auc:2", "pinball:0.9 and ece:15 take one number"),
        (["auc", "auc"], "each once"),
        ([], "one metric or more"),
        (3, "expected a name such as auc"),
        (lambda output, target: 0.0, "found the name '<lambda>'"),
        (Metric("auc", better="lower"), "is the name of a known metric"),
        (Metric("std"), "found the name 'std'"),
    ],
)
def test_what_is_no_metric_is_refused_in_one_line(given, told):
    with pytest.raises(ConfigError) as found:
        metrics_of(given)
    assert told in str(found.value)


def fails(output, target):
    return output @ target


@pytest.mark.parametrize(
    ("kind", "given", "told"),
    [
        ("numbers", "auc", "metrics: auc needs classes; the targets are numbers"),
        ("two", "mae", "metrics: mae needs numbers; the targets are 2 classes"),
        ("three", "calibration-slope", "metrics: calibration-slope needs two classes; the targets are 3 classes"),
        ("numbers", "concordance", "metrics: concordance needs targets (time, event) and one output; the targets are"),
        ("numbers", "roc_auc", "metrics: roc_auc on outputs [6, 1] and targets [6]"),
        ("two", fails, "metrics: fails on outputs [6, 2] and targets [6]"),
    ],
)
def test_a_metric_that_does_not_fit_is_refused_before_training(kind, given, told):
    outputs = {"numbers": 1, "two": 2, "three": 3}[kind]
    x = torch.randn(6, 4)
    y = x[:, 0] if kind == "numbers" else torch.arange(6) % outputs
    task = Task(nn.Linear(4, outputs), "mse" if kind == "numbers" else "cross-entropy", metrics=metrics_of(given))
    with pytest.raises(ConfigError) as found:
        check(task, Split.of([(x, y)]), None if kind == "numbers" else outputs)
    assert told in str(found.value)


def survival(output, target):
    """A loss on (time, event) that any model can be tried with."""
    return (output.reshape(-1) - target[:, 0]).square()


def nll(output, target):
    return nn.functional.nll_loss(output.log(), target)


def test_probabilities_are_known_as_such_by_trying():
    """A model that ends in a softmax, under a loss of its own: its outputs are not taken for logits."""
    torch.manual_seed(0)
    x, y = torch.randn(80, 4), torch.arange(80) % 3
    model = nn.Sequential(nn.Linear(4, 3), nn.Softmax(1))
    task = Task(model, nll, metrics=metrics_of("log-loss"))
    split = Split.of([(x, y)])
    check(task, split, 3)
    found, p = evaluation.metrics(task, task.w0[None], split, np.arange(1)), model(x).detach().double()
    assert found["log-loss"][0] == pytest.approx(-float(p[torch.arange(80), y].log().mean()), abs=1e-6)
    assert found["log-loss"][0] == pytest.approx(found["loss"][0], abs=1e-6)


def test_survival_targets_lead_by_their_concordance():
    x = torch.randn(30, 4)
    target = torch.stack([x[:, 0].exp(), (x[:, 1] > 0).float()], 1)
    task, split = Task(nn.Linear(4, 1), survival, metrics=metrics_of("concordance")), Split.of([(x, target)])
    check(task, split, None)
    w = torch.zeros(1, 5)
    w[0, 0] = -1.0  # the risk is the order of times, reversed
    assert evaluation.metrics(task, w, split, np.arange(1))["concordance"][0] == 1.0


def test_macro_scores_of_labels_are_scikit_learns():
    rng = np.random.default_rng(3)
    y = (rng.random((60, 4)) < 0.4).astype(float)
    out = rng.normal(size=(60, 4)).round(1) + y
    assert score("macro-auc", out, y) == pytest.approx(sk.roc_auc_score(y, out, average="macro"), abs=1e-12)
    assert score("macro-f1", out, y) == pytest.approx(sk.f1_score(y, out > 0, average="macro"), abs=1e-12)
    y[:, 2] = 1  # which every sample has: no ranking by it
    rest = [0, 1, 3]
    assert score("macro-auc", out, y) == pytest.approx(sk.roc_auc_score(y[:, rest], out[:, rest]), abs=1e-12)
    assert math.isnan(score("macro-auc", out, np.ones_like(out)))
