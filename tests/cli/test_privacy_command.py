"""polyfed privacy, and what other commands say of a private experiment."""

import pytest

from polyfed.cli import call

FILE = """
rounds = 6
local-steps = 1
batch-size = "full"
{more}
[data]
name = "heart-disease"
[privacy]
sums = "secure"
epsilon = 2.0
clip = 1.0
[[algorithms]]
name = "fedavg"
"""


@pytest.fixture
def experiment(tmp_path):
    path = tmp_path / "experiment.toml"
    path.write_text(FILE.format(more=""))
    return path


def test_the_plan_is_printed_without_training(experiment, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call(["privacy", str(experiment), "--seeds", "3"]) == 0
    said = capsys.readouterr().out
    assert "epsilon 2 at delta 1e-05 for each site, shared by 3 runs" in said
    assert "6 releases of each row in 6 rounds" in said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["experiment.toml"]


def test_a_method_that_cannot_is_refused_by_name_with_the_reason(experiment, capsys):
    assert call(["privacy", str(experiment), "--algorithm", "scaffold", "--algorithm", "fpfc"]) == 2
    said = capsys.readouterr().out
    assert "scaffold:\n  Refused: privacy.unit: what scaffold sends depends on the clients' private 'c'" in said
    assert "fpfc:\n  Refused: privacy: the server of fpfc needs every client's own w" in said


def test_without_the_table_there_is_nothing_to_plan(tmp_path, capsys):
    (tmp_path / "open.toml").write_text('[data]\nname = "heart-disease"\n[[algorithms]]\nname = "fedavg"\n')
    assert call(["privacy", str(tmp_path / "open.toml")]) == 2
    assert "found no table [privacy]" in capsys.readouterr().err


def test_a_private_run_says_so_comes_out_again_and_needs_its_own_noise(experiment, tmp_path, capsys):
    run = tmp_path / "run"
    assert call(["run", str(experiment), "--out", str(run), "--quiet"]) == 0
    page = (run / "report.html").read_text()
    assert "A simulation on one machine." in page
    assert "Not covered: how columns were prepared" in page
    assert call(["verify", str(run)]) == 0
    (run / "noise.key").unlink()
    assert call(["verify", str(run)]) == 1
    assert "its noise.key is not here" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["coalitions", "--against", "none"], ["tune", "fedavg", "--setting", "lr"]])
def test_analyses_that_no_budget_is_kept_for_are_refused(command, tmp_path, capsys):
    given = ["--data", "heart-disease", "--set", "privacy.sums=secure", "--out", str(tmp_path / "out")]
    assert call([*command, *given]) == 2
    assert f"privacy: not with {command[0]}" in capsys.readouterr().err
