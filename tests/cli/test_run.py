"""What run, compare, resume, report and export leave on disk and on the screen."""

import json
import socket
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from safetensors.torch import load_file

from polyfed.cli import run as commands
from polyfed.studies import parallel

undrawn = pytest.mark.usefixtures("undrawn")
HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")


def models(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted((folder / "models").iterdir())}


@pytest.mark.daily
def test_the_main_job_answers_the_consortium_offline(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "socket", lambda *a, **k: pytest.fail("a network connection was opened"))
    said = cli("run", "--seeds", 3, "--rounds", 20).done()
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / "report.html").stat().st_size > 10_000
    rows = ("local", "fedavg", "recalibrated", "ditto", "own-trees", "commonest", "pooled-oracle")
    for word in (*HOSPITALS, *rows, "AUC", "not available in practice", "Heart Disease", "report:"):
        assert word in said.out
    runs = sorted((folder / "runs").iterdir())
    assert len(runs) == 3 * len(rows)
    configs = [tomllib.loads((r / "config.toml").read_text()) for r in runs]
    for seed in range(3):  # paired: one split per seed, for all methods
        assert len({c["data"]["digest"] for c in configs if c["seed"] == seed}) == 1
    assert len({c["data"]["digest"] for c in configs}) == 3
    clients = pd.read_csv(runs[0] / "clients.csv")
    assert (clients["train_samples"] + clients["test_samples"]).tolist() == [303, 261, 46, 130]


@undrawn
@pytest.mark.parametrize(("minute", "seeds"), [(1e9, 4), (0.0, 2)])
def test_own_data_get_ten_seeds_or_as_many_as_a_minute_holds(cli, tmp_path, monkeypatch, minute, seeds):
    assert (commands.OWN, commands.LEAST, commands.MINUTE) == (10, 3, 60)
    for name, value in ("OWN", 4), ("LEAST", 2), ("MINUTE", minute):
        monkeypatch.setattr(commands, name, value)
    for k, site in enumerate(("north", "south")):
        rows = "".join(f"{i * 7 % 11 + k},{'ill' if i % 3 else 'well'}\n" for i in range(12))
        (tmp_path / f"{site}.csv").write_text(f"age,outcome\n{rows}")
    said = cli("run", "--data", tmp_path, "--rounds", 1, "--out", tmp_path / "out" / "a").done()
    head = tomllib.loads((tmp_path / "out" / "a" / "comparison.toml").read_text())
    assert head["seeds"] == [*range(seeds)]
    assert len([*(tmp_path / "out" / "a" / "runs").iterdir()]) == 3 * seeds
    assert said.err.count("local seed 0:") == 1
    assert ("more by --seeds" in said.err) == (seeds < 4)
    cli("run", "--data", tmp_path, "--rounds", 1, "--seed", 0, "--out", tmp_path / "out" / "b").done()
    assert len([*(tmp_path / "out" / "b" / "runs").iterdir()]) == 3


@undrawn
def test_a_comparison_file_repeats_the_comparison(cli, tmp_path, small):
    methods = ("--algorithm", "fedavg", "--algorithm", "ditto")
    assert cli("run", small, "--seeds", "3,5", *methods, "--out", "a").status == 0
    assert cli("run", "a/comparison.toml", "--out", "b").status == 0
    for run in ("fedavg-seed3", "ditto-seed5"):
        assert models(tmp_path / "a/runs" / run) == models(tmp_path / "b/runs" / run)


@undrawn
def test_an_interrupted_run_resumes_to_the_same_bits(cli, tmp_path, small, stopper):
    (tmp_path / "method").mkdir()
    choice = ("--set", f"algorithm.file={stopper}", "--set", f"algorithm.marker={tmp_path / 'stopped'}")
    said = cli("run", small, *choice, "--out", "a")
    assert said.status == 130
    assert said.err.splitlines()[-1] == "polyfed: interrupted; resume with: polyfed resume a"
    assert json.loads((tmp_path / "a/summary.json").read_text())["rounds"] == 2
    assert cli("resume", "a").status == 0
    assert cli("run", small, *choice, "--out", "b").status == 0
    assert models(tmp_path / "a") == models(tmp_path / "b")
    assert "nothing to resume" in cli("resume", "a").err
    assert cli("resume", "a", "--rounds", 6).status == 0
    assert cli("run", small, *choice, "--rounds", 6, "--out", "c").status == 0
    assert models(tmp_path / "a") == models(tmp_path / "c")


@undrawn
def test_an_interrupted_comparison_resumes_and_keeps_what_is_done(cli, tmp_path, small, stopper, monkeypatch):
    monkeypatch.setattr(parallel, "room", lambda device="cpu": 1)
    methods = f'[[algorithms]]\nname = "fedavg"\n[[algorithms]]\nfile = "stopper.py"\nmarker = "{tmp_path}/m"\n'
    (tmp_path / "two.toml").write_text(small.read_text() + methods)
    assert cli("run", "two.toml", "--seeds", 2, "--out", "a").status == 130
    done = tmp_path / "a/runs/fedavg-seed0/summary.json"
    before = done.stat().st_mtime_ns
    assert sorted(p.name for p in (tmp_path / "a/runs").iterdir()) == ["fedavg-seed0", "stopper-seed0"]
    assert cli("resume", "a").status == 0
    assert done.stat().st_mtime_ns == before
    assert cli("run", "two.toml", "--seeds", 2, "--out", "b").status == 0
    for run in ("fedavg-seed0", "stopper-seed0", "fedavg-seed1", "stopper-seed1"):
        assert models(tmp_path / "a/runs" / run) == models(tmp_path / "b/runs" / run)


def test_a_diverging_method_does_not_stop_the_others(cli, tmp_path, small):
    said = cli("run", small, "--algorithm", "fedavg:lr=1e38", "--algorithm", "fedavg", "--seeds", 2, "--out", "a")
    assert said.status == 1
    last = said.err.strip().splitlines()[-1]
    assert last.startswith("polyfed: 2 of 4 runs diverged (fedavg-lr=1e+38 seed 0, ")
    assert "round 0: client" in last
    assert "fedavg-lr=0.1" in said.out
    assert (tmp_path / "a/report.html").exists()
    cli("run", small, "--algorithm", "fedavg:lr=1e38", "--out", "b", "-q").line(1, "round 0: client")


@undrawn
def test_export_hands_over_the_client_model(cli, tmp_path, small):
    assert cli("run", small, "--algorithm", "ditto", "--out", "a").status == 0
    assert cli("export", "a", "--client", "va").status == 0
    assert cli("export", "a", "--client", 3, "--out", "out/by-number.safetensors").status == 0
    named, numbered = load_file(tmp_path / "va.safetensors"), load_file(tmp_path / "out/by-number.safetensors")
    source = load_file(tmp_path / "a/models/va.safetensors")
    assert all((named[k] == source[k]).all() and (numbered[k] == source[k]).all() for k in source)
    about = json.loads((tmp_path / "va.json").read_text())
    assert about["client"] == "va"
    assert about["tensors"] == {k: list(t.shape) for k, t in source.items()}
    assert about["model"]["name"] == "linear"


@undrawn
def test_export_measures_the_factorised_model(cli, tmp_path):
    pytest.importorskip("polyfed_export")
    (tmp_path / "slr.toml").write_text(
        'rounds = 15\nbatch-size = 20\n[data]\nname = "digits"\nclients = 4\n'
        '[model]\nname = "mlp"\nhidden = [100, 50]\n'
        '[algorithm]\nname = "fedslr"\nlr = 0.1\nlam = 0.02\nmu = 0.02\neta-g = 5\n'
    )
    assert cli("run", "slr.toml", "--out", "a", "-q").status == 0
    said = cli("export", "a", "--client", 1, "--form", "factorised", "--out", "one.safetensors")
    about = json.loads((tmp_path / "one.json").read_text())
    forms = about["measured"]["forms"]
    source = load_file(next((tmp_path / "a/models").glob("*.safetensors")))
    assert forms["dense"]["bytes"] == sum(t.nbytes for t in source.values()) > forms["beside"]["bytes"]
    assert list(forms) == ["dense", "merged", "beside"]
    assert about["measured"]["fastest"] in forms
    for form, row in forms.items():
        assert row["ms"] > 0
        assert row["difference"] < 1e-5
        assert f"{form:<7} {row['bytes']:>12,} bytes" in said.out


@undrawn
def test_own_model_and_own_data_from_files(cli, tmp_path):
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "def my_net(input_shape, outputs, width=4):\n"
        "    return nn.Sequential(nn.Linear(input_shape[0], width), nn.Tanh(), nn.Linear(width, outputs))\n"
    )
    sites = tmp_path / "sites"
    sites.mkdir()
    for i in range(3):
        rows = "".join(f"{a},{b},{int(a > i - 1)}\n" for a, b in np.random.default_rng(i).normal(size=(30, 2)))
        (sites / f"site{i}.csv").write_text(f"a,b,label\n{rows}")
    (tmp_path / "mine.toml").write_text(
        'rounds = 2\n[data]\nname = "sites"\n[model]\nfile = "net.py"\nname = "my_net"\nwidth = 5\n'
        '[algorithm]\nname = "fedavg"\n'
    )
    assert cli("run", "mine.toml", "--data", sites, "--out", "a").status == 0
    config = tomllib.loads((tmp_path / "a/config.toml").read_text())
    assert config["model"]["parameters"] == 2 * 5 + 5 + 5 * 2 + 2
    assert cli("run", "a/config.toml", "--out", "b").status == 0
    assert models(tmp_path / "a") == models(tmp_path / "b")


@undrawn
def test_artificial_clients_where_the_data_has_none(cli, tmp_path):
    cli("run", "--data", "digits", "--model", "linear", "--rounds", 1, "--algorithm", "fedavg", "--out", "a").done()
    config = tomllib.loads((tmp_path / "a/config.toml").read_text())
    assert (config["data"]["partition"], config["data"]["clients"]) == ("dirichlet:0.5", 20)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--set", "model.file=net.py", "--set", "model.name=net"), "shape [10]"),
        (("--metrics", "aucc"), "metrics: found 'aucc' (did you mean 'auc'?)"),
        (("--metrics", "mae"), "metrics: mae needs numbers; the targets are 2 classes"),
        (("--metrics", "auc,auc"), "each once"),
    ],
)
def test_a_failed_start_is_one_line_and_leaves_nothing_behind(cli, tmp_path, small, words, told):
    (tmp_path / "net.py").write_text("from torch import nn\ndef net(outputs):\n    return nn.Linear(3, outputs)\n")
    cli("run", small, *words, "--out", "a").line((1, 2), told)
    assert not (tmp_path / "a").exists()
