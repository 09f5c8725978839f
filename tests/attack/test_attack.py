"""The adversaries read what there is to read of a site without a policy, and under a policy what its page says."""

import numpy as np
import pytest

from polyfed.cli import call
from polyfed_attack.adversaries import OPEN, attacked
from polyfed_sites.policy import Policy


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


MODELS = ("a model of thresholds", "thresholds of one column", "a line that moves")
COHORTS = ("a sum of three sites, two the server's", "a sum without one site")  # which keys and terms rule out
DEFAULT = {
    "sums with keys of the server's": "peers", "steps on one row": "least-batch", COHORTS[0]: "terms",
    COHORTS[1]: "absent", **dict.fromkeys(MODELS, "least-count"),
}  # fmt: skip
STRICT = Policy(least_count=10, pooled="none", models=["linear"], digits=3, most_rounds=50)
POLICIES = {  # and by which of its keys attacks are refused
    "no limit to how often": (Policy(most_joins=10**6, most_agreements=10**6), DEFAULT),
    "private": (Policy(epsilon=1.0), dict.fromkeys(MODELS, "epsilon")),
    "strict": (STRICT, {"a model of thresholds": "models"}),
}


@pytest.mark.parametrize(("policy", "by"), POLICIES.values(), ids=POLICIES)
def test_a_policy_leaves_nothing(policy, by, file, tmp_path):
    found = read(file, policy, tmp_path / "here")
    assert not any(r.read for r in found.values())
    assert {name: found[name].by for name in by} == by


@pytest.mark.daily
def test_the_default_policy_leaves_nothing_which_the_command_prints_as_a_table(file, capsys):
    assert call(["attack", str(file), "--allow", "pooled"]) == 0  # `main` would take this process for the program's own
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if " of " in line]
    found = {name: (read, by) for name, read, by in (row for row in rows if len(row) == 3) if read[0].isdigit()}
    assert len(found) > len(DEFAULT)
    assert all(read.startswith("0 of ") for read, _ in found.values())
    assert {name: found[name][1] for name in DEFAULT} == DEFAULT
