"""Metrics: what a per-client one sees on every path to the outputs, which way is better, and that no name decides."""

import ast
from pathlib import Path

import numpy as np
import pytest
import torch
from small import Wrapped, mlp, split_of
from torch import nn

import polyfed as pf
from polyfed.compute import evaluation
from polyfed.compute.check import check
from polyfed.compute.task import Task
from polyfed.metrics.metric import Metric
from polyfed.metrics.scores import ACCURACY, KNOWN, LOSS, RMSE, leading
from polyfed.runs.schema import Judge

ROOT = Path(pf.__file__).parent


def median_gap(seen):
    """A number that is no mean over samples, and depends on the pairing of outputs and targets."""
    return float(np.median([float(o[int(t)]) for o, t in zip(seen.output, seen.target, strict=True)]))


MEDIAN = Metric("median", compute=median_gap, kind="classes")


def own_loss(output, target):
    return nn.functional.cross_entropy(output, target)


@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize(
    ("module", "loss"), [(mlp(), "cross-entropy"), (Wrapped(mlp()), "cross-entropy"), (mlp(), own_loss)]
)
def test_a_metric_per_client_sees_each_clients_own_samples(module, loss, common, monkeypatch):
    """By the closed form, the module, a callable loss; one model for all or one each; in blocks of a few samples."""
    for where in ("net", "evaluation"):
        monkeypatch.setattr(f"polyfed.compute.{where}.BLOCK", 7)
    task, split = Task(module, loss, metrics=[MEDIAN, ACCURACY]), split_of(9, 0, 20, 3)
    w = task.w0.expand(4, -1) if common else torch.stack([task.w0 * k for k in (1.0, 0.5, -1.0, 2.0)])
    found, plain = (evaluation.metrics(t, w, split, np.arange(4)) for t in (task, Task(module, loss)))
    for i in (0, 2, 3):
        x, y = split.client(i)
        picked = task.module(w[i])(x)[torch.arange(len(y)), y]
        assert found["median"][i] == pytest.approx(np.median(picked.detach()), abs=1e-12)
    assert np.isnan(found["median"][1])
    for name in ("loss", "accuracy"):  # another metric beside them changes no bit
        assert np.array_equal(found[name], plain[name], equal_nan=True)


def test_a_model_whose_outputs_are_not_finite_is_infinitely_bad():
    """And not without a value, which a mean would leave out."""
    task, split = Task(mlp(), metrics=[MEDIAN]), split_of(5)
    found = evaluation.metrics(task, torch.full_like(task.w0, torch.inf)[None], split, np.arange(1))["median"][0]
    assert found == MEDIAN.lost == -np.inf


def test_which_way_is_better():
    slope = Metric("slope", better="near:1")
    values = np.array([0.2, 0.9, 1.3, 3.0])
    assert [values[m.merit(values).argmax()] for m in (ACCURACY, RMSE, slope)] == [3.0, 0.2, 0.9]
    assert [values[m.merit(values).argmin()] for m in (ACCURACY, RMSE, slope)] == [0.2, 3.0, 3.0]


def test_a_summary_gives_the_metric_back():
    odd = Metric("slope", "%", "near:1")
    assert Judge.of(odd).read == odd
    assert all(Judge.of(metric).read is metric for metric in KNOWN.values())
    assert [leading(c) for c in (("loss", "accuracy"), ("rmse", "loss"), ("loss",))] == [ACCURACY, RMSE, LOSS]


@pytest.mark.parametrize(("regression", "loss", "lead"), [(False, "cross-entropy", ACCURACY), (True, "mse", RMSE)])
def test_the_metric_that_leads_follows_from_the_targets(regression, loss, lead):
    task, split = Task(mlp(), loss), split_of(4, regression=regression)
    check(task, split, None if regression else 3)
    assert task.scores == (lead,)


def test_no_code_decides_by_a_metrics_name():
    """A metric's name is a string of metrics/scores.py alone; the papers' recipes say what their papers measured."""
    places = []
    for path in sorted(ROOT.rglob("*.py")):
        if path == ROOT / "metrics" / "scores.py" or "papers" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and node.value in ("accuracy", "rmse", "auc"):
                places.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not places


def test_own_models_are_known_as_such_before_a_byte_could_be_sent(tmp_path):
    """By what the method sends, not by what it is called: also after no round."""
    federation = pf.data.load("heart-disease").partition(seed=0)
    for method, role in ((pf.Local(), "own"), (pf.FedAvg(), "common"), (pf.Ditto(), "personalised")):
        place = tmp_path / method.name
        pf.fit(pf.models.build("linear", federation.input_shape, 2), federation, method, rounds=0, out=place)
        assert pf.report.read(place).first.role == role


@pytest.mark.parametrize("made", [lambda v: v.numpy(), lambda v: v, lambda v: v.tolist(), lambda v: v.double()])
def test_a_metric_per_sample_may_give_an_array_a_tensor_or_a_list(made):
    """The share of right answers, by a function of the user's, is the accuracy that polyfed knows."""
    mine = Metric("mine", per="sample", compute=lambda seen: made((seen.output.argmax(1) == seen.target).float()))
    x = np.random.default_rng(0).normal(size=(9, 3)).astype(np.float32)
    fed = pf.Federation.from_arrays(
        [(x, np.arange(9) % 2), (x[:5], np.arange(5) % 2)], test=[(x, np.arange(9) % 2)] * 2
    )
    found = pf.fit(nn.Linear(3, 2), fed, pf.FedAvg(0.1), rounds=1, metrics=[mine, "accuracy"]).final["test"]
    assert found["mine"] == pytest.approx(found["accuracy"], abs=1e-7)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"per": "round"}, "per of Metric: found 'round', expected sample or client"),
        ({"better": "near:x"}, "better of Metric: found 'near:x', expected higher, lower, or such as near:1"),
        ({"better": "higher\n"}, "better of Metric"),
        ({"decimals": -1}, "decimals of Metric: found -1, expected an integer from 0 to 100"),
        ({"least": 1.0, "most": 0.0}, "most of Metric: found 0.0, expected a number above the lowest"),
    ],
)
def test_a_wrong_metric_is_refused_where_it_is_made(settings, said):
    with pytest.raises(pf.errors.ConfigError, match=said):
        Metric("x", **settings)


def test_one_value_for_all_samples_is_no_value_per_sample():
    fed = pf.Federation.from_arrays([(np.ones((4, 3), np.float32), np.arange(4) % 2)] * 2)
    with pytest.raises(pf.errors.ConfigError, match=r"found \[\], expected \[\d+\], one for each sample"):
        pf.fit(nn.Linear(3, 2), fed, pf.FedAvg(0.1), metrics=[Metric("x", per="sample", compute=lambda seen: 0.5)])
