"""The adversaries read what there is to read of a site without a policy, and under a policy what its page says."""

import numpy as np
import pytest

from polyfed.cli import main
from polyfed_sites.attack import OPEN, attacked
from polyfed_sites.policy import Policy

FREE = Policy(most_joins=10**6, most_agreements=10**6)  # no limit to how often
STRICT = Policy(least_count=10, pooled="none", models=["linear"], digits=3, most_rounds=50)
PRIVATE = Policy(epsilon=1.0)
MODELS = ("a model of thresholds", "thresholds of one column", "a line that moves")

COHORTS = ("a sum of three sites, two the server's", "a sum without one site")  # which keys and terms rule out


@pytest.fixture
def file(tmp_path):
    rng, lines = np.random.default_rng(1), ["name,age,crp,bmi,outcome"]
    for i in range(180):
        age = rng.normal(60, 9)
        lines.append(
            f"P{i} Doe,{age:.1f},{rng.gamma(2, 5):.2f},{rng.normal(26, 4):.2f},{'ill' if age > 60 else 'well'}"
        )
    (tmp_path / "oslo.csv").write_text("\n".join(lines) + "\n")
    return tmp_path / "oslo.csv"


def read(file, policy, place):
    place.mkdir()
    return {r.attack: r for r in attacked(file, policy, frozenset({"pooled"}), place)}


def test_without_a_policy_every_attack_but_those_by_noise_reads(file, tmp_path):
    found = read(file, OPEN, tmp_path / "open")
    nothing = {name for name, r in found.items() if not r.read}
    assert nothing <= {"one question twice", "sums with keys of the server's", *COHORTS}


@pytest.mark.parametrize(
    "policy",
    [pytest.param(Policy(), id="default", marks=pytest.mark.daily), pytest.param(FREE, id="no limit to joins")],
)
def test_the_default_policy_leaves_nothing(policy, file, tmp_path):
    found = read(file, policy, tmp_path / "default")
    assert not any(r.read for r in found.values())
    assert found["sums with keys of the server's"].by == "peers"
    assert found["steps on one row"].by == "least-batch"
    assert [found[name].by for name in COHORTS] == ["terms", "absent"]
    assert {found[name].by for name in MODELS} == {"least-count"}


def test_a_private_policy_leaves_nothing(file, tmp_path):
    found = read(file, PRIVATE, tmp_path / "private")
    assert not any(r.read for r in found.values())
    assert {found[name].by for name in MODELS} == {"epsilon"}


def test_a_strict_policy_leaves_nothing(file, tmp_path):
    found = read(file, STRICT, tmp_path / "strict")
    assert not any(r.read for r in found.values())
    assert found["a model of thresholds"].by == "models"


def test_the_command_prints_a_table(file, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["polyfed", "attack", str(file), "--allow", "pooled"])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    assert "| sums with keys of the server's | 0 of 1 replies | peers |" in capsys.readouterr().out
