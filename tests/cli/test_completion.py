"""What the shell is told after TAB."""

import subprocess
import sys

import pytest

import polyfed.algorithms  # noqa: F401
from polyfed.algorithms import shipped
from polyfed.cli import complete
from polyfed.data import names
from polyfed.runs.training import Settings


def test_methods_data_sets_and_settings_are_those_there_are():
    ours = {*shipped()}
    assert set(complete.methods("")) == ours
    assert set(complete.data("")) == set(names())
    assert {"rounds=", "evaluate-every=", "data.partition=", "model.name=", "attack.ratio="} <= {*complete.settings("")}
    assert all(hasattr(Settings, k[:-1].replace("-", "_")) for k in complete.settings("ro") if "." not in k)


@pytest.mark.parametrize(
    ("typed", "offered"), [("polyfed comp", ["compare"]), ("polyfed compare fedavg dit", ["ditto"])]
)
def test_the_shell_is_offered_what_may_follow(typed, offered, monkeypatch):
    code = "from polyfed.cli import main; main()"
    words = typed.split()
    asked = {"_POLYFED_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)}
    for key, value in asked.items():
        monkeypatch.setenv(key, value)
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert said.stdout.split() == offered


def test_the_script_for_the_shell_is_shown(cli, monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    code = "from polyfed.cli import main; main(['--show-completion', 'bash'])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "_POLYFED_COMPLETE=complete_bash" in said.stdout
