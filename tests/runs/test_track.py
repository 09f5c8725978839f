"""What trackers write, read back by the tools themselves: the numbers of the history, round by round."""

import sys
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed.base.errors import ConfigError, RunError
from polyfed.runs import track


def train(tool, out=None, **settings):
    rng = np.random.default_rng(0)
    sites = [(rng.normal(size=(20, 3)), rng.integers(0, 2, 20)) for _ in range(3)]
    fed = pf.Federation.from_arrays(sites, classes=2, test_fraction=0.25)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    return pf.fit(model, fed, pf.FedAvg(0.125), rounds=4, evaluate_every=2, out=out, track=tool, **settings)


def expected(run, column):
    """{round: number} of the history."""
    rows = run.history[run.history["split"] == "test"]
    return dict(zip(rows["round"].tolist(), rows[column].tolist(), strict=True))


def test_tensorboard_reads_the_history_and_the_settings(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = train("tensorboard", tmp_path / "run")
    events = reader.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    for tag, column in (("test/accuracy", "accuracy"), ("test/worst", "worst"), ("up_bytes", "up_bytes")):
        found = {e.step: e.value for e in events.Scalars(tag)}
        assert found == pytest.approx(expected(run, column), rel=1e-6)
    text = events.Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| algorithm.lr | 0.125 |" in text
    assert not [tag for tag in events.Tags()["scalars"] if "assigned" in tag or tag.endswith("/round")]


def test_mlflow_reads_the_history_and_whether_the_run_ended(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed; pip install '.[mlflow]'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    run = train("mlflow")
    with pytest.raises(ZeroDivisionError):
        train("mlflow", callbacks=[lambda step: 1 / (2 - step.round)])
    client = mlflow.MlflowClient()
    where = client.get_experiment_by_name(track.PROJECT).experiment_id
    found = {r.info.status: r for r in client.search_runs([where])}
    assert found.keys() == {"FINISHED", "FAILED"}
    done = found["FINISHED"]
    assert (done.info.run_name, done.data.params["algorithm.lr"]) == ("fedavg-seed0", "0.125")
    history = client.get_metric_history(done.info.run_id, "test/accuracy")
    assert {m.step: m.value for m in history} == expected(run, "accuracy")


def test_wandb_is_given_the_settings_and_the_history(tmp_path, monkeypatch):
    """The package stands here for one of its name, which hears what is logged."""
    heard, begun = {}, []
    logging = SimpleNamespace(log=lambda values, step: heard.update({step: values["test/accuracy"]}))
    fake = SimpleNamespace(init=lambda **given: begun.append(given) or nullcontext(logging))
    monkeypatch.setattr(track, "find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run = train("wandb", tmp_path / "run")
    assert heard == expected(run, "accuracy")
    assert (begun[0]["name"], begun[0]["dir"], begun[0]["config"]["algorithm.lr"]) == ("run", tmp_path / "run", "0.125")


def test_a_comparison_has_a_run_of_its_own_for_each_of_its_runs(tmp_path, cli, undrawn):
    pytest.importorskip("tensorboard")
    cli("compare", "local", "fedavg", "--rounds", 2, "--seeds", 2, "--track", "tensorboard", "--out", "a", "-q").done()
    found = {p.parts[-3] for p in (tmp_path / "a").rglob("events.out.*")}
    assert found == {"local-seed0", "local-seed1", "fedavg-seed0", "fedavg-seed1"}


def test_a_tool_that_is_missing_is_said_before_anything_is_trained(monkeypatch, tmp_path):
    monkeypatch.setattr(track, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^track: wandb is not installed; pip install 'polyfed\[wandb\]'$"):
        train("wandb", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_a_tool_refuses_is_said_in_a_line(monkeypatch):
    def refuse(*given, **more):
        raise OSError("no route\nto host")

    monkeypatch.setattr(track, "find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=refuse))
    with pytest.raises(RunError, match=r"^track: mlflow refuses what is written to it \(OSError: no route to host\)$"):
        train("mlflow")
