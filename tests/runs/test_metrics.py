"""A run judged by scores that were asked for: in its history, files, tables, figures, tuning and newcomers."""

import dataclasses
import json
import math
import tomllib

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.special import softmax
from sklearn.metrics import brier_score_loss, roc_auc_score

import polyfed as pf
from polyfed import report
from polyfed.base.errors import ConfigError, RunError

ONE_CLASS = "bern"
NAMES = ("oslo", ONE_CLASS, "riga", "cork")


def federation(names=NAMES, seed=0, test_fraction=0.4):
    """Binary, with a client whose patients are all ill."""
    rng = np.random.default_rng(seed)
    draw = []
    for name in names:
        x = rng.normal(size=(30, 3)).astype(np.float32)
        y = np.ones(30, dtype=int) if name == ONE_CLASS else (x[:, 0] + rng.normal(size=30) > 0).astype(int)
        draw.append((x, y))
    return pf.Federation.from_arrays(draw, names=names, classes=2, test_fraction=test_fraction)


def linear():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def train(folder=None, method=None, metrics=("auc", "brier"), **settings):
    given = {"rounds": 4, "batch_size": 8, "out": folder, "metrics": metrics, **settings}
    return pf.fit(linear(), federation(), method or pf.Ditto(0.1), **given)


def by_hand(run, i, score):
    x, y = run.federation.test.client(i)
    p = softmax(run.model(i)(x).detach().double().numpy(), axis=1)
    return score(y.numpy(), p[:, 1])


def test_every_client_has_its_own_score_and_the_history_their_mean(tmp_path):
    run = train(tmp_path)
    assert [m.name for m in run.metrics] == ["auc", "brier"]
    aucs = [by_hand(run, i, roc_auc_score) for i in (0, 2, 3)]
    assert run.final["test"]["auc"][[0, 2, 3]] == pytest.approx(aucs, abs=1e-6)
    assert np.isnan(run.final["test"]["auc"][1])
    briers = [by_hand(run, i, brier_score_loss) for i in range(4)]
    assert run.final["test"]["brier"] == pytest.approx(briers, abs=1e-6)
    last = run.history.iloc[-1]
    assert last["auc"] == pytest.approx(np.mean(aucs), abs=1e-6)
    assert (last["worst"], last["std"]) == pytest.approx((min(aucs), np.std(aucs)), abs=1e-6)
    assert {"loss", "brier"} <= set(run.history)
    assert "accuracy" not in run.history
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["metric"], summary["better"], summary["higher_is_better"]) == ("auc", "higher", True)
    assert summary["final"]["test"]["mean"] == pytest.approx(np.mean(aucs), abs=1e-6)
    assert summary["scores"]["test"]["auc"]["clients"] == 3
    assert summary["scores"]["test"]["brier"]["worst"] == pytest.approx(max(briers), abs=1e-6)
    table = pd.read_csv(tmp_path / "clients.csv")
    assert table["test_auc"].isna().tolist() == [False, True, False, False]
    assert tomllib.loads((tmp_path / "config.toml").read_text())["metrics"] == ["auc", "brier"]


def test_other_metrics_change_nothing_that_is_trained():
    one, other = train(), train(metrics=None)
    assert torch.equal(one.personal, other.personal)
    assert np.array_equal(one.final["test"]["loss"], other.final["test"]["loss"])


def test_a_run_opened_from_its_folder_is_judged_as_it_was(tmp_path):
    run = train(tmp_path)
    found = pf.Run.open(tmp_path, federation(), linear())
    assert found.metrics == run.metrics
    assert "AUC" in repr(found)
    again = found.evaluate(run.personal)
    assert np.array_equal(again["auc"], run.final["test"]["auc"], equal_nan=True)
    with pytest.raises(RunError, match=r"metrics is \['brier'\] here and was \['auc', 'brier'\]"):
        train(tmp_path, metrics="brier", rounds=6, resume=True)
    assert found.resume(rounds=6).metrics == run.metrics


def risk_gap(output, target):
    return float((output.softmax(1)[:, 1].mean() - target.double().mean()).abs())


def test_a_function_of_python_leads_and_its_folder_says_that_no_file_holds_it(tmp_path):
    gap = pf.Metric("risk-gap", better="lower", compute=lambda seen: risk_gap(seen.output, seen.target))
    run = train(tmp_path, metrics=[gap])
    by = [by_hand(run, i, lambda y, p: abs(p.mean() - y.mean())) for i in range(4)]
    assert run.final["test"]["risk-gap"] == pytest.approx(by, abs=1e-6)
    assert run.records[-1].worst == pytest.approx(max(by), abs=1e-6)
    found = pf.Run.open(tmp_path, federation(), linear())
    assert (found.metric.name, found.metric.better) == ("risk-gap", "lower")
    with pytest.raises(ConfigError, match=r"^[^ ]*: its metrics was a Python object, which no file holds"):
        found.evaluate(run.personal)
    assert "risk-gap" in report.answer(report.read(tmp_path))


def test_the_report_says_who_has_no_score_and_over_how_many_the_mean_is(tmp_path):
    methods = [pf.Local(0.1), pf.FedAvg(0.1)]
    how = {"seeds": 3, "rounds": 4, "metrics": ["auc", "brier"], "out": tmp_path}
    found = pf.compare(linear(), lambda seed: federation(seed=seed), methods, **how)
    assert (found.metric.name, list(found.table)[3]) == ("auc", "auc")
    study = report.read(tmp_path)
    table = report.client_table(study)
    row = next(r for r in table.rows if r[0].text == ONE_CLASS)
    assert row[1].text == "n/a: one class"
    assert not any(any(c.isdigit() for c in cell.text) for cell in row[5:])
    methods = report.compare_table(study)
    assert methods.headers[1:5] == ["AUC", "clients", "worst client", "Brier score"]
    assert [r[2].text for r in methods.rows] == ["3 of 4"] * 2
    values = found.clients[found.clients["label"] == "fedavg"].groupby("seed")
    assert float(methods.rows[1][1].values["auc_mean"]) == pytest.approx(values["test_auc"].mean().mean())
    assert float(methods.rows[1][4].values["brier_mean"]) == pytest.approx(values["test_brier"].mean().mean())
    assert any("AUC: over 3 of 4 clients; the others have none (one class)." in n for n in methods.notes)
    answer = report.answer(study)
    assert "Means leave out bern: no AUC (one class)." in answer
    assert "test AUC" in answer
    page = report.write_report(tmp_path).read_text()
    assert "n/a: one class" in page
    assert ">nan" not in page.lower()
    assert report.metric_figure(study).axes[0].get_ylabel() == "test AUC"


@pytest.mark.parametrize(("metric", "pick"), [("auc", max), ("log-loss", min), ("calibration-slope", None)])
def test_tuning_chooses_by_the_metric_that_leads(metric, pick):
    pytest.importorskip("polyfed_tuning")
    how = {"setting": "lr", "grid": [0.001, 0.1, 3.0], "rounds": 4, "train_on": 0, "metrics": metric}
    tuned = pf.tune(linear(), federation().with_validation(0.4, 0), pf.FedAvg(), **how)
    found = {row["lr"]: row["validation"] for row in tuned.rows}
    gaps = {lr: abs(value - 1) if value == value else math.inf for lr, value in found.items()}
    assert tuned.best["lr"] == (pick(found, key=found.get) if pick else min(gaps, key=gaps.get))
    assert tuned.metric.name == metric


def test_tuning_by_a_score_that_no_client_has_is_refused():
    pytest.importorskip("polyfed_tuning")
    x = np.random.default_rng(0).normal(size=(2, 20, 3)).astype(np.float32)
    fed = pf.Federation.from_arrays([(x[i], np.full(20, i)) for i in range(2)], classes=2, test_fraction=0.2)
    with pytest.raises(ConfigError, match=r"no client has auc on its validation samples \(one class\)"):
        pf.tune(linear(), fed, pf.FedAvg(), setting="lr", grid=[0.1], rounds=2, train_on=0, metrics="auc")


def test_newcomers_are_judged_by_the_runs_metric():
    pytest.importorskip("polyfed_members")
    run, new = train(), federation(names=("wien", "rome", ONE_CLASS), seed=5)
    new = dataclasses.replace(new, names=("wien", "rome", "bern2"))
    found = pf.admit(run, new, 2)
    last = found.table[found.table["exchange"] == 2].set_index("client")["auc"]
    x, y = new.test.client(0)
    z = found.model("wien")(x).detach().double().numpy()
    assert last["wien"] == pytest.approx(roc_auc_score(y, z[:, 1] - z[:, 0]), abs=1e-6)
    assert np.isnan(last["bern2"])
    notes = found.summary().notes
    assert any("of 2" in n for n in notes)
    assert any("no AUC: bern2 (one class)" in n for n in notes)
