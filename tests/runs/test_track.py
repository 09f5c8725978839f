"""What trackers write, read back by the tools themselves: the numbers of the history, round by round."""

import json
import sys
import time
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
    assert done.info.run_name == "fedavg-seed0"
    assert done.data.params["algorithm.lr"] == "0.125"
    history = client.get_metric_history(done.info.run_id, "test/accuracy")
    assert {m.step: m.value for m in history} == expected(run, "accuracy")


def records(data: bytes) -> list[bytes]:
    """Records of a log as LevelDB writes it, behind W&B's 7 bytes: in blocks of 32 KiB, a header of 7 bytes each."""
    found, at = [], 7
    while at < len(data):
        if (left := -at % 32768) < 7 and left:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part = data[at + 7 : at + 7 + size]
        found, at = [*found, part] if kind in (1, 2) else [*found[:-1], found[-1] + part], at + 7 + size
    return found


def test_wandb_keeps_the_history_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed; pip install '.[wandb]'")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    run = train("wandb", tmp_path / "run")
    (file,) = tmp_path.rglob("*.wandb")
    found, before, until = {}, b"", time.monotonic() + 60
    while (len(data := file.read_bytes()) < 8 or data != before) and time.monotonic() < until:
        before = data  # its own process writes it, later
        time.sleep(0.3)
    for record in map(Record.FromString, records(data)):
        items = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
        if items:
            found[items["_step"]] = items["test/accuracy"]
    assert found == expected(run, "accuracy")


def test_a_comparison_has_a_run_of_its_own_for_each_of_its_runs(tmp_path, cli, undrawn):
    pytest.importorskip("tensorboard")
    said = cli("compare", "local", "fedavg", "--rounds", 2, "--seeds", 2, "--track", "tensorboard", "--out", "a", "-q")
    assert said.status == 0, said.err
    found = {p.parts[-3] for p in (tmp_path / "a").rglob("events.out.*")}
    assert found == {"local-seed0", "local-seed1", "fedavg-seed0", "fedavg-seed1"}


def test_a_tool_that_is_missing_is_said_before_anything_is_trained(monkeypatch, tmp_path):
    monkeypatch.setattr(track, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^track: wandb is not installed; pip install 'polyfed\[wandb\]'$"):
        train("wandb", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_a_tool_refuses_is_said_in_a_line(monkeypatch):
    """Such as a server that is not there."""

    def refuse(*given, **more):
        raise OSError("no route\nto host")

    monkeypatch.setattr(track, "find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=refuse))
    with pytest.raises(RunError, match=r"^track: mlflow refuses what is written to it \(OSError: no route to host\)$"):
        train("mlflow")
