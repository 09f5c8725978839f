"""polyfed privacy, and what other commands say of a private experiment."""

import tomllib

import pytest

from polyfed.cli import call
from polyfed.report import read

FILE = """
rounds = 6
local-steps = 1
batch-size = "full"
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
    path.write_text(FILE)
    return path


def test_the_plan_is_printed_without_training(experiment, tmp_path, cli):
    said = cli("privacy", experiment, "--seeds", 3)
    assert "epsilon 2 at delta 1e-05 for each site, shared by 3 runs" in said.out
    assert "6 releases of each row in 6 rounds" in said.out
    assert said.status == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["experiment.toml"]


def test_a_method_that_cannot_is_refused_by_name_with_the_reason(experiment, cli):
    status, said, _ = cli("privacy", experiment, "--algorithm", "scaffold", "--algorithm", "fpfc")
    assert "scaffold:\n  Refused: privacy.unit: what scaffold sends depends on the clients' private 'c'" in said
    assert "fpfc:\n  Refused: privacy: the server of fpfc needs every client's own w" in said
    assert status == 2


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


HEART = ["--data", "heart-disease"]
SECURE = [*HEART, "--set", "privacy.sums=secure", "--out", "out"]


@pytest.mark.parametrize(("words", "said"), [
    (["coalitions", "--against", "none", *SECURE], "privacy: not with coalitions"),
    (["tune", "fedavg", "--setting", "lr", *SECURE], "privacy: not with tune"),
    (["privacy", *HEART], "found no table [privacy]"),
    *((["privacy", "experiment.toml", f"--cost={eps}", "--out", "out", "-q"], "found") for eps in ("8,x", "0", "-1")),
])  # fmt: skip
def test_what_no_budget_is_kept_for_and_what_is_no_epsilon_is_one_line(words, said, experiment, cli):
    cli(*words).line(2, said)


def test_what_epsilon_costs_is_a_figure_and_a_line_for_each_site(experiment, tmp_path, capsys):
    out = tmp_path / "out"
    assert call(["privacy", str(experiment), "--seeds", "2", "--cost", "1000", "--out", str(out), "-q"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "What privacy costs, by accuracy, against none (simulation):"
    names = ["mean over sites", "cleveland", "hungarian", "switzerland", "va"]
    assert [line.split(":")[0].strip() for line in lines[1:6]] == names
    assert all(": epsilon 1000 " in line for line in lines[1:6])
    assert sorted(read(out).labels) == ["epsilon-1000", "open"]
    for label, epsilon in (("open", None), ("epsilon-1000", 1000.0)):
        table = tomllib.loads((out / "runs" / f"{label}-seed1" / "config.toml").read_text()).get("privacy", {})
        assert (table.get("epsilon"), table.get("per")) == (epsilon, epsilon and "run")
    assert "What does privacy cost?" in (out / "report.html").read_text()
