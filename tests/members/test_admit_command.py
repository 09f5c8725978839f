"""polyfed admit: newcomers on the screen and in the folder, and what is refused."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file

FEATURES = 10  # of heart disease
TRAIN = ("run", "--rounds", 4, "--local-steps", 2, "--batch-size", 8, "--model", "linear", "--data", "heart-disease",
         "--seeds", 1, "--quiet", "--set")  # fmt: skip


def client(path, features=FEATURES, labels=2):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, features)).astype(np.float32)
    np.savez(path, x=x, y=np.arange(40) % labels, x_test=x[:20], y_test=np.arange(20) % labels)
    return path.name


def contents(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def ditto(cli, tmp_path):
    assert cli(*TRAIN, "algorithm.name=ditto", "--out", "ditto").status == 0
    return tmp_path / "ditto"


def test_a_folder_of_newcomers(cli, ditto, tmp_path):
    (tmp_path / "new").mkdir()
    for name in ("oslo", "bern"):
        client(tmp_path / "new" / f"{name}.npz")
    before = contents(ditto)
    said = cli("admit", ditto, "--data", "new", "--exchanges", 3, "--out", "a").done()
    for word in ("Newcomers to ditto", "oslo", "bern", "alone", "better off than alone after 3 exchanges", "figure: a"):
        assert word in said.out
    assert contents(ditto) == before
    rows = pd.read_csv(tmp_path / "a/admission.csv")
    assert rows[["exchange", "client"]].to_numpy().tolist() == [[k, n] for k in range(4) for n in ("bern", "oslo")]
    assert rows["down_bytes"][::2].tolist() == [k * 2 * (FEATURES + 1) * 4 for k in range(4)]
    own, old = load_file(tmp_path / "a/models/oslo.safetensors"), load_file(ditto / "models/cleveland.safetensors")
    assert {k: v.shape for k, v in own.items()} == {k: v.shape for k, v in old.items()}
    assert (tmp_path / "a/admission.svg").read_text().lstrip().startswith("<?xml")


def test_the_run_is_the_one_that_was_trained(cli, tmp_path):
    """FedAvg's newcomer takes the very model home that the run has written out."""
    cli(*TRAIN, "algorithm.name=fedavg", "--out", "run")
    assert cli("admit", "run", "--data", client(tmp_path / "oslo.npz"), "--out", "a").status == 0
    mine, theirs = (load_file(tmp_path / f"{p}.safetensors") for p in ("a/models/oslo", "run/models/common"))
    assert mine.keys() == theirs.keys()
    assert all((mine[k] == theirs[k]).all() for k in mine)


def test_a_csv_file_is_a_newcomer(cli, ditto, tmp_path):
    rows = np.c_[np.random.default_rng(0).normal(size=(20, FEATURES)), np.arange(20) % 2]
    pd.DataFrame(rows, columns=[*"abcdefghij", "disease"]).to_csv(tmp_path / "oslo.csv", index=False)
    assert cli("admit", ditto, "--data", "oslo.csv", "--exchanges", 1, "--out", "a").status == 0
    cli("admit", ditto, "--data", "oslo.csv", "--target", "ill", "--out", "b").line(1, "no column 'ill'; it has a, b")


def test_what_does_not_fit_is_said_in_one_line_and_leaves_no_folder(cli, ditto, tmp_path):
    for name, settings in (("wide", {"features": 12}), ("three", {"labels": 3}), ("cleveland", {}), ("oslo", {})):
        client(tmp_path / f"{name}.npz", **settings)
    for words, line in (
        (("wide.npz",), f"newcomers: found inputs of shape [12] for 'wide', expected [{FEATURES}] as in the run"),
        (("three.npz",), "client 'three', train: found label 2, expected 0 to 1"),
        (
            ("cleveland.npz",),
            "newcomers: found the name 'cleveland', which a client of the run has; expected a new one",
        ),
        (("missing.npz",), "--data missing.npz: no such file or folder"),
        (("oslo.npz", "--exchanges", -1), "exchanges of admit: found -1, expected an integer of at least 0"),
        (("oslo.npz", "--start", "best"), "start: found 'best', expected offered or common"),
    ):  # fmt: skip
        cli("admit", ditto, "--out", "a", "--data", *words).line((1, 2), f"polyfed: {line}")
        assert not (tmp_path / "a").exists()


def test_only_a_run_with_a_model_takes_newcomers(cli, ditto, tmp_path):
    client(tmp_path / "oslo.npz")
    assert cli("admit", "nowhere", "--data", "oslo.npz").err.startswith("polyfed: nowhere: no such folder")
    cli("compare", "local", "fedavg", "--rounds", 1, "--seeds", 1, "--quiet", "--out", "both")
    line = "polyfed: both: is a comparison; name one of its runs, such as both/runs/fedavg-seed0"
    cli("admit", "both", "--data", "oslo.npz").line(2, line)
    for part in (ditto / "checkpoint").iterdir():
        part.rename(tmp_path / part.name)
    line = f"polyfed: {ditto}: has no model yet; finish it with: polyfed resume {ditto}"
    cli("admit", ditto, "--data", "oslo.npz").line(1, line)


@pytest.mark.parametrize("scope", ["pooled", "client"])
def test_raw_rows_are_scaled_as_the_runs_were(cli, tmp_path, scope):
    """A copy of a client's own file is worth what the client has in the run."""
    rng, sites = np.random.default_rng(0), tmp_path / "sites"
    sites.mkdir()
    for name in ("bern", "oslo"):
        x = rng.normal(size=(60, 3)) * [1, 100, 1] + [5, 1000, 0]
        y = (x[:, 0] - 5 + (x[:, 1] - 1000) / 100 > 0).astype(int)
        np.savez(sites / f"{name}.npz", x=x, y=y, x_test=x[40:], y_test=y[40:])
    shutil.copy(sites / "bern.npz", tmp_path / "twin.npz")
    words = ("--standardise", scope, "--rounds", 20, "--set", "algorithm.name=fedavg", "--quiet", "--out", "r")
    assert cli("run", "--data", "./sites", *words).status == 0
    assert cli("admit", "r", "--data", "twin.npz", "--exchanges", 1, "--out", "a").status == 0
    bern, twin = pd.read_csv(tmp_path / "r/clients.csv"), pd.read_csv(tmp_path / "a/admission.csv")
    assert twin["accuracy"][0] == bern["test_accuracy"][0] > 0.9
    assert cli("export", "r", "--client", "bern").status == 0
    known = json.loads((tmp_path / "bern.json").read_text())["scaling"]
    assert known["scope"] == scope
    if scope == "pooled":
        assert known["shift"] == pytest.approx([5, 1000, 0], abs=30)
    about = tmp_path / "r/federation.json"
    about.write_text(about.read_text().replace('"constant"', '"variable"').replace('"shift"', '"lift"'))
    said = cli("admit", "r", "--data", "twin.npz", "--out", "b")
    key = "shift" if scope == "pooled" else "constant"
    assert said.err.splitlines() == [f"polyfed: r: its scaling is damaged (KeyError: '{key}')"]
