"""What a command says before most of its time is spent: the seeds, what was left untuned, and how long it will take."""

import logging
import time
from types import SimpleNamespace

import pytest

from polyfed.cli.console import Show
from polyfed.studies.jobs import Done

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(time=0.0)
    monkeypatch.setattr(time, "monotonic", lambda: now.time)
    return now


def test_one_seed_is_named_and_not_counted(cli):
    assert cli("compare", "local", "--rounds", 1, "--seeds", 1).err.splitlines()[0] == "seed 0"
    said = cli("compare", "local", "--rounds", 1, "--seeds", "3,7")
    assert said.err.splitlines()[0] == "seeds 3, 7"


def test_a_level_of_the_log_is_said_before_the_command(cli, small, undrawn, monkeypatch):
    """By Python's own logging, whose handlers a program has its own of."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.getLogger("polyfed"), "level", logging.NOTSET)
    words = ("run", small, "--algorithm", "local", "-q")
    logged = cli("--log-level", "debug", *words, "--out", "a").err
    assert "DEBUG a: {'round': 4, 'split': 'test', " in logged
    assert "INFO a: finished after round 4" in logged
    assert "INFO b: finished" in (logged := cli("--log-level", "info", *words, "--out", "b").err)
    assert "DEBUG" not in logged
    assert cli("--log-level", "loud", *words).status == 2


def test_a_comparison_says_which_key_setting_was_left_at_its_default(cli):
    words = ("--rounds", 1, "--seeds", 1)
    line = "note: fpfc has its default lam = 0.6, on which its result hinges; polyfed tune fpfc chooses it"
    assert line in cli("compare", "local", "fpfc", *words).err.splitlines()
    assert "note:" not in cli("compare", "local", "fpfc:lam=0.5", *words).err


@pytest.mark.parametrize(
    ("seconds", "line"), [(50, ["about 2 min 30 s to go, if all take as long and run one after another"]), (1, [])]
)
def test_the_first_run_tells_how_long_the_others_take_unless_that_is_short(clock, capsys, seconds, line):
    show = Show(False)
    show.start(4)
    for seed in range(4):
        show.begin("ditto", seed)
        clock.time += seconds
        show.end(Done("ditto", seed, "finished"), False)
    assert [said for said in capsys.readouterr().err.splitlines() if "to go" in said] == line


def test_the_first_rounds_tell_how_long_a_run_takes(clock, capsys):
    show = Show(True)
    show.begin("ditto", 0)
    run = SimpleNamespace(algorithm=SimpleNamespace(name="ditto"), outline=SimpleNamespace(n=3), plan="")
    for k in range(1, 5):
        clock.time += 100 if k == 1 else 4  # the first has what is done once
        show._step(SimpleNamespace(run=run, records=(), round=k, rounds=100))
    said = [line for line in capsys.readouterr().err.splitlines() if "to go" in line]
    assert said == ["about 6 min 28 s to go, at this pace"]
