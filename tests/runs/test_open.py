"""A run opened from its folder is the run that was trained: its models, tables and state, with the data or without."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

import polyfed as pf
from polyfed.base.errors import ConfigError, PolyfedError, RunError

NAMES = ("oslo", "=cmd|calc", "007", "bern")
METHODS = (pf.FedAvg(0.1), pf.Ditto(0.1), pf.FedACS(0.1), pf.IFCA(0.1, k=2), pf.Scaffold(0.1), pf.FPFC(0.1))


def federation(names=NAMES, seed=0):
    rng = np.random.default_rng(seed)
    draw = [(rng.normal(size=(20, 3)).astype(np.float32), rng.integers(0, 2, 20)) for _ in names]
    clusters = [0, 0, 1, 1][: len(names)]
    return pf.Federation.from_arrays(draw, names=names, classes=2, test_fraction=0.25, clusters=clusters)


def linear():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def train(folder, method=None, **settings):
    given = {"rounds": 4, "batch_size": 8, "out": folder, **settings}
    return pf.fit(linear(), federation(), method or pf.Ditto(0.1), **given)


def contents(folder):
    return {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_an_opened_run_is_the_run_that_was_trained(tmp_path, method):
    run = train(tmp_path, method)
    before = contents(tmp_path)
    found = pf.Run.open(str(tmp_path), model=linear())
    torch.testing.assert_close(
        (found.personal, found.common, found.server), (run.personal, run.common, run.server), rtol=0, atol=0
    )
    for name in NAMES:
        x = torch.randn(5, 3)
        assert torch.equal(found.model(name)(x), run.model(name)(x))
    for table in ("history", "ledger", "clients", "assignments"):
        pd.testing.assert_frame_equal(getattr(found, table), getattr(run, table), check_exact=False, rtol=1e-12)
    assert (found.parameters == run.parameters).all()
    assert (found.status, found.metric, found.findings.keys()) == ("finished", run.metric, run.findings.keys())
    assert found.settings.algorithm == {k: v for k, v in run.settings.algorithm.items() if v is not None}
    assert run.clusters is None or (found.clusters == run.clusters).all()
    assert contents(tmp_path) == before


def test_a_model_or_data_that_were_given_in_python_are_asked_for_in_one_line(tmp_path):
    run = train(tmp_path)
    found = pf.Run.open(tmp_path)
    assert len(found.clients) == 4  # what is in the files needs neither
    assert found.common is not None
    for what, word in ((lambda: found.personal, "model=..."), (lambda: found.federation, "federation=...")):
        with pytest.raises(RunError, match=word):
            what()
    with pytest.raises(RunError, match="its model was given in Python"):
        found.resume()
    with pytest.raises(RunError, match="its data are needed"):
        pf.Run.open(tmp_path, model=linear()).evaluate(run.personal)
    with pytest.raises(RunError, match="not the ones it was trained on"):
        pf.Run.open(tmp_path, federation(seed=1), linear()).evaluate(run.personal)
    own = pf.Run.open(tmp_path, federation(), linear())
    assert own.evaluate(own.personal)["accuracy"].tolist() == run.evaluate(run.personal)["accuracy"].tolist()


@pytest.mark.parametrize(
    "model", [torch.nn.Linear(3, 3), torch.nn.Linear(4, 2), torch.nn.Sequential(torch.nn.Linear(3, 2))]
)
def test_another_model_is_refused(tmp_path, model):
    """Also one with as many parameters under other names."""
    train(tmp_path)
    with pytest.raises(RunError, match="model: not the one of"):
        _ = pf.Run.open(tmp_path, model=model).personal


def test_frozen_tensors_are_those_of_the_run(tmp_path):
    """A module given with others, freshly made, gets the ones that the run was trained with."""

    def make(seed):
        torch.manual_seed(seed)
        body = torch.nn.Linear(3, 3).requires_grad_(False)
        return torch.nn.Sequential(body, torch.nn.Linear(3, 2))

    run = pf.fit(make(0), federation(), pf.FedAvg(0.1), rounds=2, out=tmp_path)
    found, x = pf.Run.open(tmp_path, model=make(1)), torch.randn(4, 3)
    assert torch.equal(found.model(0)(x), run.model(0)(x))


def test_resuming_gives_the_numbers_of_an_uninterrupted_run(tmp_path):
    whole = train(tmp_path / "a", rounds=7, fraction=0.5, local_steps=3)
    train(tmp_path / "b", rounds=3, fraction=0.5, local_steps=3)
    found = pf.Run.open(tmp_path / "b", federation(), linear()).resume(7)
    assert torch.equal(found.personal, whole.personal)
    columns = ["round", "client", "down_bytes", "up_bytes", "steps"]
    again = pf.Run.open(tmp_path / "b", federation(), linear())
    assert again.ledger[columns].equals(whole.ledger[columns])
    assert again.settings.rounds == 7


def test_an_attack_on_the_labels_strikes_once(tmp_path):
    attack = pf.threats.ATTACKS.make("label-flip", {"ratio": 0.5})
    whole = train(tmp_path / "a", rounds=5, attack=attack)
    train(tmp_path / "b", rounds=2, attack=attack)
    found = pf.Run.open(tmp_path / "b", federation(), linear())
    assert torch.equal(found.federation.train.y, whole.federation.train.y)
    assert torch.equal(found.resume(5).personal, whole.personal)


def test_settings_that_were_objects_are_named_and_reading_goes_on(tmp_path):
    run = train(tmp_path, local_steps=lambda t: 2, schedule=pf.Bernoulli(0.9))
    found = pf.Run.open(tmp_path, federation(), linear())
    assert torch.equal(found.personal, run.personal)
    with pytest.raises(ConfigError, match=r"its local-steps was a Python object, .* resume=True"):
        found.resume()
    pytest.importorskip("polyfed_members")
    with pytest.raises(ConfigError, match="its local-steps was a Python object"):
        found.admit(federation(["new"], 3), 2)


def test_newcomers_need_none_of_the_old_data(tmp_path):
    pytest.importorskip("polyfed_members")
    run = train(tmp_path)
    new = federation(["new", "newer"], 3)
    expected, found = pf.admit(run, new, 3), pf.Run.open(tmp_path, model=linear()).admit(new, 3)
    assert torch.equal(found.personal, expected.personal)
    pd.testing.assert_frame_equal(found.table, expected.table)
    with pytest.raises(ConfigError, match="found the name 'oslo', which a client of the run has"):
        pf.Run.open(tmp_path, model=linear()).admit(federation(["oslo"], 3))


def test_a_run_on_named_data_is_whole_again(cli, tmp_path):
    words = ["--data", "heart-disease", "--rounds", 3, "--seeds", 1, "--algorithm", "ditto", "--local-steps", 2]
    assert cli("run", *words, "--out", "a", "-q").status == 0
    found = pf.Run.open(tmp_path / "a")
    assert np.allclose(found.evaluate(found.personal)["accuracy"], found.clients["test_accuracy"], rtol=1e-12)
    path, about = found.export("va", tmp_path / "va.safetensors")
    torch.testing.assert_close(load_file(path), load_file(tmp_path / "a/models/va.safetensors"), rtol=0, atol=0)
    assert json.loads(about.read_text())["client"] == "va"
    assert found.report(tmp_path / "page.html").read_text().startswith("<!")
    on = found.resume(5)
    assert on.trained.t == 5
    assert cli("run", *words, "--rounds", 5, "--out", "b", "-q").status == 0
    assert torch.equal(on.personal, pf.Run.open(tmp_path / "b").personal)
    assert cli("resume", "a", "--rounds", 6, "-q").status == 0  # the command line goes on from there


def test_a_folder_whose_data_are_gone_is_read_all_the_same(cli, tmp_path):
    sites = tmp_path / "sites"
    sites.mkdir()
    rng = np.random.default_rng(0)
    for name in ("north", "south"):
        np.savez(sites / f"{name}.npz", x=rng.normal(size=(30, 4)).astype(np.float32), y=np.arange(30) % 2)
    words = ("--data", "sites", "--rounds", 2, "--seeds", 1, "--algorithm", "ditto", "--out", "a", "-q")
    assert cli("run", *words).status == 0
    before = pf.Run.open(tmp_path / "a")
    assert before.federation.names == ("north", "south")
    shutil.rmtree(sites)
    found = pf.Run.open(tmp_path / "a")
    assert torch.equal(found.personal, before.personal)
    assert found.model("south")(torch.zeros(1, 4)).shape == (1, 2)
    assert found.outline.names == ("north", "south")
    for what in (lambda: found.federation, lambda: found.evaluate(found.personal), lambda: found.resume(3)):
        with pytest.raises(RunError) as said:
            what()
        assert str(sites) in str(said.value)


def test_a_run_that_was_killed_is_unfinished(tmp_path):
    """Before it could write its results: what the checkpoint and the history know is there."""
    run = train(tmp_path)
    for name in ("summary.json", "clients.csv", "ledger.csv", "report.json"):
        (tmp_path / name).unlink(missing_ok=True)
    assert pf.Run.open(tmp_path).clients["rounds"].tolist() == run.clients["rounds"].tolist()
    found = pf.Run.open(tmp_path, federation(), linear())
    assert found.status == "unfinished"
    assert len(found.history) == len(run.history)
    assert found.ledger.equals(run.ledger)
    assert found.clients["train_samples"].tolist() == run.clients["train_samples"].tolist()
    assert torch.equal(found.resume().personal, run.personal)


def test_what_is_no_run_is_one_line(tmp_path):
    train(tmp_path / "a")
    for damage in (
        lambda p: (p / "config.toml").write_text((p / "config.toml").read_text().replace("seed = 0", "seed = 1")),
        lambda p: (p / "config.toml").unlink(),
        lambda p: (p / "federation.json").write_text("{"),
        lambda p: (p / "clients.csv").write_text("client\noslo\n"),
        lambda p: (p / "summary.json").write_text("{}"),
        lambda p: (p / "metrics.jsonl").unlink(),
        shutil.rmtree,
    ):
        shutil.rmtree(tmp_path / "b", ignore_errors=True)
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        damage(tmp_path / "b")
        with pytest.raises(PolyfedError) as said:
            pf.Run.open(tmp_path / "b")
        assert str(tmp_path / "b") in str(said.value)
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    for path in (tmp_path / "c/checkpoint").rglob("tensors.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RunError, match="no usable checkpoint"):
        _ = pf.Run.open(tmp_path / "c", model=linear()).personal


def test_a_damaged_last_checkpoint_is_not_taken_for_the_run(tmp_path):
    """The one before holds other models than the results tell of."""
    train(tmp_path, checkpoint_every=1)
    last = sorted((tmp_path / "checkpoint").glob("round-*"))[-1] / "tensors.safetensors"
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(RunError, match="the last checkpoint is damaged; found one of round 3, expected 4"):
        _ = pf.Run.open(tmp_path, model=linear()).personal
    again = pf.Run.open(tmp_path, model=linear())
    assert load_file(again.export("bern", tmp_path / "x.safetensors")[0]).keys() == {"weight", "bias"}


def test_an_opened_run_can_be_set_out_from(tmp_path):
    run = train(tmp_path)
    opened = pf.Run.open(tmp_path, model=linear())
    a, b = (train(None, rounds=2, start=start).personal for start in (run, opened))
    assert torch.equal(a, b)
