"""A model that has blown up never leaves a mean: "no samples", "undefined" and "not finite" are three things.

One site has inputs of 1e12: after one step its model's weights are finite, and the squares of its outputs are not."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.base.errors import Diverged
from polyfed.compute import evaluation
from polyfed.compute.check import check
from polyfed.compute.task import Task
from polyfed.metrics.metric import mean_of
from polyfed.metrics.scores import KNOWN, metrics_of
from polyfed.report import read
from polyfed.runs.schema import Spread

NUMBERS = [m.name for m in KNOWN.values() if m.kind == "numbers"]
CLASSES = [m.name for m in KNOWN.values() if m.kind in ("classes", "two classes")]


def sites(scale: float = 1e12, classes: bool = False, empty: bool = False) -> pf.Federation:
    """Four sites, the last with inputs of this size; the second has no test samples, if asked for."""
    rng, pairs = np.random.default_rng(0), []
    for i in range(4):
        x = rng.normal(size=(40, 3)).astype(np.float32)
        y = x @ [1.0, -1, 0.5] + 0.3 * rng.normal(size=40)
        pairs.append((x * (scale if i == 3 else 1), (y > 0).astype(np.int64) if classes else y.astype(np.float32)))
    test = [None if empty and i == 1 else (x[:10], y[:10]) for i, (x, y) in enumerate(pairs)]
    return pf.Federation.from_arrays([(x[10:], y[10:]) for x, y in pairs], test, names=list("abcd"))


def fit(method, fed, rounds=1, **how):
    torch.manual_seed(0)
    return pf.fit(nn.Linear(3, fed.outputs), fed, method, rounds=rounds, batch_size=None, local_steps=1, seed=0, **how)


@pytest.mark.parametrize("evaluate_every", [0, 1])
def test_a_run_whose_model_blows_up_at_one_site_has_diverged_there(evaluate_every, tmp_path):
    with pytest.raises(Diverged, match=r"round 1: client 'd', whose \w+ \w+ is not finite, diverged"):
        fit(pf.Local(lr=1e-3), sites(), evaluate_every=evaluate_every, out=tmp_path / "a")
    run = read(tmp_path / "a").runs[0]
    assert run.status == "diverged"
    end = run.summary.final[run.split]
    assert math.isnan(end.mean)
    assert math.isnan(end.worst), "the worst client is the one without a finite score"
    assert not any(r.round == 1 and math.isfinite(r["rmse"]) for r in run.records), "a mean over the other three"
    clients = pd.read_csv(tmp_path / "a/clients.csv").set_index("client")
    assert np.isinf(clients.loc["d", "test_rmse"])
    assert np.isfinite(clients.loc[["a", "b", "c"], "test_rmse"]).all()


def test_a_site_without_samples_or_without_a_defined_score_is_no_divergence():
    """AUC of one class: a site's samples, and not its model, are why there is none."""
    one_class = sites(1.0, classes=True)
    one_class.test.y[one_class.test.offsets[3] :] = 1
    for fed, metric, none in ((sites(1.0, empty=True), "rmse", 1), (one_class, "auc", 3)):
        run = fit(pf.Local(lr=1e-3), fed, metrics=f"{metric},{'mae' if metric == 'rmse' else 'accuracy'}")
        assert run.status == "finished"
        found = run.final["test"][metric]
        assert np.flatnonzero(np.isnan(found)).tolist() == [none]
        assert math.isclose(run.records[-1][metric], np.nanmean(found))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize(("name", "outputs"), [*((n, 1) for n in NUMBERS), *((n, 2) for n in CLASSES)])
def test_no_metric_has_a_better_mean_where_a_model_blows_up(name, outputs, bad):
    """Whatever a diverged model puts out, the mean over sites is infinitely bad, and the worst is that site."""
    fed, (metric,) = sites(1.0, classes=outputs == 2), metrics_of(name)
    task = Task(nn.Linear(3, outputs), "mse" if outputs == 1 else "cross-entropy", device="cpu", metrics=(metric,))
    check(task, fed.train, fed.classes)
    w = task.w0.expand(4, -1).clone()
    w[2] = bad
    if math.isfinite(bad) and outputs == 2:
        w[2, ::2] = -bad
    split = fed.test.to("cpu", task.dtype)
    found = evaluation.metrics(task, w, split, np.arange(4))
    fine = evaluation.metrics(task, task.w0.expand(4, -1).clone(), split, np.arange(4))
    if outputs == 2 and math.isfinite(bad):  # sure of itself, and finite: as bad as it is
        assert np.isfinite(found["loss"]).all()
        return
    merit = metric.merit(found[name])
    assert np.isneginf(merit).tolist() == [False, False, True, False]
    assert np.isinf(found["loss"]).tolist() == [False, False, True, False]
    assert metric.merit(mean_of(found[name])) == -math.inf < metric.merit(mean_of(fine[name]))
    spread = Spread.of(metric, found[name])
    assert (spread.clients, math.isnan(spread.mean), math.isnan(spread.worst)) == (4, True, True)


def test_a_method_that_blows_up_never_ranks_better(tmp_path):
    """Not for one seed either: it would leave out the split on which it failed."""
    fed = [sites(1.0), sites(1e12)]
    torch.manual_seed(0)
    methods = {"wild": pf.Local(lr=1e-3), "calm": pf.Local(lr=0.0)}
    how = {"rounds": 1, "batch_size": None, "local_steps": 1, "seeds": 2, "out": tmp_path / "c"}
    found = pf.compare(nn.Linear(3, 1), lambda seed: fed[seed], methods, **how)
    assert [(r.label, r.seed) for r in found.failures] == [("wild", 1)]
    table = found.table.set_index("label")
    assert table.loc["wild", "diverged"] == 1
    assert table.loc["wild", ["rmse", "worst_client"]].isna().all()
    verdicts = read(tmp_path / "c").verdicts
    assert verdicts.ranked == ["calm", "wild"]
    assert "wild" not in verdicts.means
    assert verdicts.mean.best == "calm"
