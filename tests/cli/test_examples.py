"""The experiment files that ship with the project."""

from pathlib import Path

import pytest

from polyfed.runs.config import MAIN_JOB, resolve

FOLDER = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda p: p.stem)
def test_every_example_is_a_valid_experiment(path):
    assert resolve(path).methods


def test_the_built_in_experiment_is_the_one_in_the_file():
    built_in, file = resolve(None, {}, (), MAIN_JOB), resolve(FOLDER / "heart-disease.toml")
    assert (built_in.settings, built_in.data, built_in.model) == (file.settings, file.data, file.model)
    assert built_in.methods == file.methods


def test_a_method_without_momentum_is_fedavg(cli, tmp_path):
    choice = ("--set", "data.seed=3", "--rounds", 3, "--seeds", 1, "--set", "dtype=float64", "--quiet")
    own = f"momentum = 0.0\nfile = '{FOLDER / 'own_method.py'}'"
    (tmp_path / "x.toml").write_text(
        f"[data]\nname = 'digits'\nclients = 4\n[model]\nname = 'linear'\n[[algorithms]]\nname = 'fedavg'\n"
        f"[[algorithms]]\n{own}\n"
    )
    assert cli("run", "x.toml", *choice, "--out", "a").status == 0
    from safetensors.torch import load_file

    ours, fedavg = (load_file(tmp_path / f"a/runs/{m}-seed0/models/common.safetensors") for m in ("momentum", "fedavg"))
    assert all((ours[k] - fedavg[k]).abs().max() < 1e-12 for k in fedavg)


def test_a_new_project_runs_at_once_and_overwrites_nothing(cli, tmp_path, undrawn):
    assert cli("new", "mine").status == 0
    found = sorted(p.relative_to(tmp_path / "mine").as_posix() for p in (tmp_path / "mine").rglob("*.*"))
    assert found == ["experiment.toml", "model.py", "sites/north.csv", "sites/south.csv"]
    cli("run", "mine/experiment.toml", "--seeds", 1, "--rounds", 2, "-q", "--out", "answer").done()
    assert cli("export", "answer/runs/fedavg-seed0", "--client", "south").status == 0
    assert cli("predict", "south.safetensors", "mine/sites/south.csv").out.count("\n") == 41
    (tmp_path / "mine" / "experiment.toml").unlink()
    cli("new", "mine").line(2, "polyfed: mine/model.py: already exists; nothing was written")
    assert not (tmp_path / "mine" / "experiment.toml").exists()
