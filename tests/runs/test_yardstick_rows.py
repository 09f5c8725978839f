"""Yardsticks as rows of a comparison: no bytes, the same scores and terms per sample, resumed, verified, reported."""

import csv
import json
import shutil
import signal

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.numpy import load_file

import polyfed as pf
from polyfed.core.rounds import Loop
from polyfed.report import answer, client_table, compare_table, read
from polyfed.report.tables import cost_table
from polyfed.runs.trainer import Trainer

YARDS = (pf.Commonest, pf.OwnLinear, pf.OwnTrees, pf.PooledOracle)
HOW = {"seeds": 2, "rounds": 3, "local_steps": 2, "batch_size": None, "metrics": "accuracy,auc,brier", "keep": False}


def federation(seed: int) -> pf.Federation:
    rng = np.random.default_rng(seed)
    sites = [(rng.normal(size=(n, 3)) + (y := rng.permutation(n) % 2)[:, None], y) for n in (60, 40, 30)]
    return pf.Federation.from_arrays(sites, names=["north", "south", "west"], test_fraction=0.4, seed=seed)


def compare(out, **more):
    methods = [pf.Local(0.1), pf.FedAvg(0.1), pf.Recalibrated(0.1), pf.Ditto(0.1), *(y() for y in YARDS)]
    model = torch.nn.Linear(3, 2)
    torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
    return pf.compare(model, federation, methods, out=out, **(HOW | more))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("yards") / "a"
    assert compare(out).status == "finished"
    return out


def test_no_byte_moves_and_every_score_is_there(folder):
    for cls in YARDS:
        run = folder / "runs" / f"{cls().name}-seed1"
        about = json.loads((run / "summary.json").read_text())
        assert (about["down_bytes"], about["up_bytes"]) == (0, 0)
        assert about["deploys"] == ("oracle" if cls is pf.PooledOracle else "yardstick")
        assert about["scores"]["test"].keys() == {"accuracy", "auc", "brier"}
        assert not len(pd.read_csv(run / "ledger.csv"))


def test_the_terms_of_samples_are_those_of_the_scores(folder):
    for cls in YARDS:
        run = folder / "runs" / f"{cls().name}-seed0"
        terms, table = load_file(run / "scores.safetensors"), pd.read_csv(run / "clients.csv")
        local = load_file(folder / "runs/local-seed0/scores.safetensors")
        assert np.array_equal(terms["id"], local["id"])  # paired with every method, sample by sample
        cuts = np.cumsum(terms["counts"])[:-1]
        for name in ("accuracy", "loss"):
            means = [part.mean() for part in np.split(terms[name].astype(float), cuts)]
            assert np.allclose(means, table[f"test_{name}"], atol=1e-6)


def test_a_resumed_comparison_gives_the_same_rows(folder, tmp_path, monkeypatch):
    shutil.copytree(folder, tmp_path / "a")
    for name in ("own-trees-seed0", "commonest-seed1"):
        shutil.rmtree(tmp_path / "a/runs" / name)
    for name in ("own-linear-seed1", "pooled-oracle-seed0"):  # killed before they could write their results
        (tmp_path / "a/runs" / name / "summary.json").unlink()
    fitted = []
    measure = Trainer._measure
    monkeypatch.setattr(Trainer, "_measure", lambda t, *on: (fitted.append(t.algorithm.name), measure(t, *on))[1])
    compare(tmp_path / "a", resume=True, callbacks=[lambda _: None])  # with a callback, all in this process
    assert sorted(fitted) == ["commonest", "own-linear", "own-trees", "pooled-oracle"]
    for run in sorted((folder / "runs").iterdir()):
        again = tmp_path / "a/runs" / run.name
        assert (run / "clients.csv").read_bytes() == (again / "clients.csv").read_bytes()
        assert (run / "scores.safetensors").read_bytes() == (again / "scores.safetensors").read_bytes()
        told = [
            [json.loads(line) | {"seconds": 0} for line in (f / "metrics.jsonl").read_text().splitlines()]
            for f in (run, again)
        ]
        assert told[0] == told[1]


def test_an_interrupted_pooled_training_goes_on(tmp_path, monkeypatch):
    """Its training is a run in a folder of its own, which continues where it stopped, to the same outputs."""
    how = {"rounds": 6, "local_steps": 2, "batch_size": 8, "seed": 1}
    model = torch.nn.Linear(3, 2)
    torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
    whole = pf.fit(model, federation(0), pf.PooledOracle(), out=tmp_path / "whole", **how)
    step = Loop.step

    def stopping(loop):
        step(loop)
        if loop.t == 3 and loop.n == 1:  # and not in a rehearsal
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Loop, "step", stopping)
    stopped = pf.fit(model, federation(0), pf.PooledOracle(), out=tmp_path / "a", **how)
    assert (stopped.status, stopped.rounds) == ("interrupted", 3)
    monkeypatch.setattr(Loop, "step", step)
    run = pf.fit(model, federation(0), pf.PooledOracle(), out=tmp_path / "a", resume=True, **how)
    assert (run.status, run.rounds) == ("finished", 6)
    assert all(
        torch.equal(a, b)
        for a, b in zip(run.kept.judged.outputs["test"], whole.kept.judged.outputs["test"], strict=True)
    )
    assert run.records[0].table() | {"seconds": 0} == whole.records[0].table() | {"seconds": 0}


def test_an_oracle_is_marked_in_every_table_and_never_chosen(folder):
    study = read(folder)
    for table in (compare_table(study), cost_table(study)):  # everybody's data do not move for nothing
        line = next(line for line in csv.DictReader(table.to("csv").splitlines()) if line["method"] == "pooled-oracle")
        assert line["bytes_per_client"] == ""
    for table in (compare_table(study), client_table(study), cost_table(study)):
        text = table.to("markdown")
        assert "pooled-oracle" in text
        assert "not available in practice" in text
    assert "which is not available in practice, one model (pooled-oracle) reaches" in answer(study)
    for verdict in (study.verdicts.mean, *study.verdicts.clients.values()):
        assert verdict.reference == "local"
        assert verdict.gains.keys() == {"fedavg", "recalibrated", "ditto"}
        assert "pooled-oracle" not in (verdict.choice, verdict.best)


def test_own_models_without_torch_are_the_reference_where_there_is_no_other(folder):
    study = read([folder / f"runs/{name}-seed{k}" for name in ("fedavg", "own-linear") for k in (0, 1)])
    assert study.verdicts.mean.reference == "own-linear"
    assert "Whether federating pays cannot be said" not in answer(study)


def test_a_yardstick_is_read_back_and_has_no_model(folder):
    run = pf.Run.open(folder / "runs/own-trees-seed0")
    assert (run.rounds, run.status) == (0, "finished")
    assert run.clients["test_accuracy"].notna().all()
    with pytest.raises(pf.errors.ConfigError, match="own-trees is a yardstick"):
        pf.Run.open(folder / "runs/own-trees-seed0", model=torch.nn.Linear(3, 2)).model("north")


def test_the_answer_says_what_is_not_beaten(folder):
    """Jointly: every claim of a win is an interval above zero, and every other is called so, with its numbers."""
    study, text = read(folder), answer(read(folder))
    (said,) = [s for s in text.split(". ") if s.startswith("Against what costs no message of its own")]
    pairings = [("ditto", "recalibrated")]
    pairings += [(m, y) for y in ("commonest", "own-linear", "own-trees") for m in ("ditto", "recalibrated")]
    for method, yard in pairings:
        gain = study.verdicts.mean_gain(method, yard, len(pairings))
        clauses = [c for c in said.split("; ") if f"beat {yard}" in c or f"beats {yard}" in c]
        if gain.sign is None:  # too few seeds or samples to say
            assert not any(method in c.split(" beat")[0] for c in clauses)
        else:
            assert [" not " not in c for c in clauses if method in c] == [gain.sign == 1]


def test_commands_know_a_run_that_is_a_yardstick(cli, tmp_path):
    words = ("--algorithm", "own-trees", "--seeds", 1, "-q", "--out", "a")
    assert cli("run", *words).status == 0
    assert cli("resume", "a").err.startswith("finished already")
    assert cli("run", "a/config.toml", "-q", "--out", "b").status == 0
    assert (tmp_path / "a/clients.csv").read_bytes() == (tmp_path / "b/clients.csv").read_bytes()
    assert "comes out again, bit for bit" in cli("verify", "a").out
    line = "polyfed: a: own-trees is a yardstick: it has results, and no model to export"
    cli("export", "a", "--client", "va").line(2, line)
