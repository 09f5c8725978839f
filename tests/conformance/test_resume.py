"""Folders that hold more than one story: memory-mapped rows, damaged checkpoints, a full disk, a used folder."""

import errno
import json

import numpy as np
import pytest
import torch
from halfway import ROUNDS, STATEFUL, Crash, crash_after, half, same
from instances import METHODS, federation, train

import polyfed as pf
from polyfed.base import checkpoint
from polyfed.base.errors import RunError
from polyfed.testing.stage import NAMES

each_stateful = pytest.mark.parametrize("name", STATEFUL)


@each_stateful
def test_memory_mapped_rows_give_the_same_bits(name, files, monkeypatch, tmp_path):
    on_disk = half(name, out=tmp_path, checkpoint_every=2)
    monkeypatch.undo()
    assert same(on_disk, half(name))


@each_stateful
def test_memory_mapped_rows_survive_a_crash(name, files, monkeypatch, tmp_path):
    """Two rounds after the last checkpoint; test_files.py kills at every moment."""
    with pytest.raises(Crash):
        half(name, out=tmp_path, checkpoint_every=2, callbacks=[crash_after(3)])
    run = half(name, out=tmp_path, checkpoint_every=2, resume=True)
    monkeypatch.undo()
    assert same(run, half(name))


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path):
    with pytest.raises(Crash):
        half("ditto", out=tmp_path, checkpoint_every=1, callbacks=[crash_after(3)])
    path = tmp_path / "checkpoint" / "round-00000002" / "tensors.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    run = half("ditto", out=tmp_path, checkpoint_every=1, resume=True)
    assert same(run, half("ditto"))
    log = (tmp_path / "log.txt").read_text()
    assert "round-00000002 is damaged" in log
    assert "resumed at round 1" in log


def test_a_full_disk_loses_nothing(monkeypatch, tmp_path):
    written = []

    def full(tensors, path):
        written.append(path)
        if len(written) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(tensors, path)

    save_file = checkpoint.save_file
    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(RunError, match=r"checkpoint of round 3 .*the disk is full; earlier ones are kept") as error:
        half("ditto", out=tmp_path, checkpoint_every=1)
    assert "\n" not in str(error.value)
    monkeypatch.undo()
    assert checkpoint.load(tmp_path / "checkpoint")[1]["t"] == 2
    assert same(half("ditto", out=tmp_path, resume=True), half("ditto"))


def test_a_used_folder_is_refused_and_left_as_it_was(tmp_path):
    half("ditto", out=tmp_path, checkpoint_every=1)
    before = {p: p.read_bytes() for p in sorted(tmp_path.rglob("*")) if p.is_file()}
    with pytest.raises(RunError, match="already holds a run"):
        half("ditto", out=tmp_path, seed=8)
    with pytest.raises(RunError, match="already holds a run"):
        half("ditto").save(tmp_path)
    assert {p: p.read_bytes() for p in sorted(tmp_path.rglob("*")) if p.is_file()} == before


@each_stateful
def test_rows_of_a_run_killed_before_its_first_checkpoint_are_forgotten(name, files, monkeypatch, tmp_path):
    with pytest.raises(Crash):
        half(name, out=tmp_path, callbacks=[crash_after(2)])
    run = half(name, out=tmp_path, resume=True)
    monkeypatch.undo()
    assert same(run, half(name))


def test_a_finished_run_is_continued_for_more_rounds(tmp_path):
    train(METHODS["ditto"], out=tmp_path, rounds=2)
    longer = train(METHODS["ditto"], out=tmp_path, rounds=5, resume=True)
    assert same(longer, train(METHODS["ditto"], rounds=5))
    rounds = [json.loads(line)["round"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rounds == list(range(6))


def renamed():
    fed = federation()
    return type(fed)(fed.train, fed.test, tuple(reversed(NAMES)), classes=fed.classes)


def test_other_delays_of_one_of_many_clients_are_not_continued(tmp_path):
    """Arrays of more than a thousand numbers differ in the middle."""
    fed = pf.Federation.from_arrays([(np.ones((2, 3)), np.array([0, 1]))] * 2000)
    delays = np.ones(2000)

    def go(**more):
        schedule = pf.Timed(pf.Uniform(0.01), pf.Delays(compute=delays))
        return pf.fit(torch.nn.Linear(3, 2), fed, pf.FedAvg(), rounds=1, schedule=schedule, out=tmp_path, **more)

    go()
    assert go(resume=True).trained.t == 1
    delays[1000] = 2.0
    with pytest.raises(RunError, match=r"cannot resume .*schedule"):
        go(resume=True)


@pytest.mark.parametrize(
    ("word", "change"),
    [
        ("seed", {"seed": 4}),
        ("batch-size", {"batch_size": 4}),
        ("algorithm", {"method": METHODS["scaffold(option=1)"]}),
        ("dtype", {"dtype": torch.float64}),
        ("fraction", {"fraction": 0.25}),
        ("weight-decay", {"weight_decay": 0.1}),
        ("data", {"fed": federation().reorder([1, 0, 2, 3, 4, 5])}),
        ("", {"fed": renamed()}),
        ("", {"kind": "mlp"}),
    ],
    ids=["seed", "batch size", "algorithm", "dtype", "fraction", "weight decay", "data", "names", "model"],
)
def test_another_experiment_is_not_continued(word, change, tmp_path):
    train(METHODS["scaffold"], out=tmp_path, rounds=1)
    with pytest.raises(RunError, match=f"cannot resume .*{word}") as error:
        train(**({"method": METHODS["scaffold"]} | change), out=tmp_path, rounds=2, resume=True)
    assert "\n" not in str(error.value)
    assert checkpoint.load(tmp_path / "checkpoint")[1]["t"] == 1


def test_metrics_of_a_resumed_run_have_no_gap_and_no_double(tmp_path):
    with pytest.raises(Crash):
        half("fedavg", out=tmp_path, checkpoint_every=2, callbacks=[crash_after(3)])
    half("fedavg", out=tmp_path, resume=True)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(ROUNDS + 1))
    assert (np.diff([line["seconds"] for line in lines]) >= 0).all()
