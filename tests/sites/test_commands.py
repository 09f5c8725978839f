"""What `polyfed server` and `polyfed client` refuse before anything starts: what would be waited for in vain."""

import io
import json
import re
import sys

import pytest

from polyfed.base.errors import ConfigError, RunError
from polyfed.core.algorithm import REGISTRY
from polyfed.runs.config import resolve
from polyfed_sites.cli import events
from polyfed_sites.cli.client import MADE
from polyfed_sites.cli.events import Events
from polyfed_sites.consent import RAW, at_terminal
from polyfed_sites.server import Server


def test_what_may_be_allowed_is_what_is_asked_for():
    import polyfed.algorithms  # noqa: F401

    assert {*MADE} == {*RAW} | {name for cls in REGISTRY.values() for name in cls().needs.discloses}


@pytest.fixture
def told(cli, tmp_path):
    """What a command with a wrong option says, in one line."""
    pytest.importorskip("uvicorn", reason="needs the extra [sites]")
    assert cli("keys", "init", "localhost:8123").status == 0
    for name in ("bern", "oslo"):
        assert cli("keys", "add", name).status == 0
    (tmp_path / "bern.csv").write_text("age,ill\n1,0\n")

    def run(*words: str) -> str:
        done = cli(*words)
        done.line(2)
        assert not (tmp_path / "runs").exists()
        assert not (tmp_path / "vault").exists()
        return done.err

    return run


SERVER, CLIENT = "server experiment.toml", "client --vault vault --key"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (f"{SERVER} --sites bren,oslo", "'bren' has no valid key in keys (did you mean 'bern'?)"),
        (f"{SERVER} --sites bern,bern,oslo", "--sites: found 'bern' twice"),
        (f"{SERVER} --sites 3", "found 3, and 2 sites have a valid key"),
        (f"{SERVER} --sites 0", "found 0, and 2 sites"),
        (f"{SERVER} --quorum 1", "--quorum: has no effect without --wait"),
        (f"{SERVER} --port -1", "--port"),
        (f"{SERVER} --host é", "is not an address"),
        (f"{CLIENT} bern.key --data bern.csv --server :", "is not an address"),
        (f"{CLIENT} bern.key --data bern.csv --allow pooled,lables", "found 'lables' (did you mean 'labels'?)"),
        (f"{CLIENT} bern.key --data brn.csv", "brn.csv is not a file"),
        (f"{CLIENT} bern.key --data keys", "keys has no images in it, expected a folder LABEL/IMAGE"),
        (f"{CLIENT} bern.key --data bern.csv --yes yes", "--yes: found 'yes', expected the digest of the terms"),
        (f"{CLIENT} bern.key --data bern.csv --yes", "--yes"),
        (f"{CLIENT} bern.key --data bern.csv --policy bern.csv", "bern.csv: not valid TOML"),
        (f"{CLIENT} bern.csv --data bern.csv --allow pooled --allow signature", "bern.csv: not a site's key"),
    ],
)
def test_a_server_does_not_wait_for_sites_that_cannot_come_and_a_site_does_not_ask_in_vain(told, words, said):
    assert said in told(*words.split())


def test_a_method_that_is_proven_for_all_clients_takes_no_quorum(tmp_path):
    (tmp_path / "experiment.toml").write_text('[data]\nname = "sites"\n[algorithm]\nname = "led"\n')
    with pytest.raises(ConfigError, match="quorum: found 2, expected none with led: its rate is proven for all"):
        Server(resolve(tmp_path / "experiment.toml"), None, None, 1.0, 2, print)


def test_a_site_without_a_terminal_is_told_of_yes(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(RunError, match=r"no terminal to ask at; .* agree with --yes and their digest"):
        at_terminal("")


def test_what_others_say_does_not_command_the_terminal(tmp_path, capsys):
    say = Events(tmp_path)
    say("bern: \x1b[2J\x1b]0;title\x07\nnext")
    say.show("What leaves:\n  \x1b[31mred")
    shown, noted = capsys.readouterr().err, (tmp_path / "events.log").read_text()
    assert not {"\x1b", "\x07"} & {*shown, *noted}
    assert noted.endswith(r"bern: \x1b[2J\x1b]0;title\x07 next" + "\n")
    assert "What leaves:\n" in shown


def test_a_process_that_has_ended_does_not_run(cli, tmp_path, monkeypatch):
    (tmp_path / "events.log").write_text("2026-01-01 00:00:00 listening\n")
    (tmp_path / "state.json").write_text(json.dumps({"pid": 4321, "sites": {"bern": "connected"}}))
    for there, said in ((True, "running, process 4321\nbern: connected"), (False, "not running")):
        monkeypatch.setattr(events, "alive", lambda pid, there=there: there)
        assert cli("status", str(tmp_path)).out.startswith(said)


def test_tls_cannot_be_turned_off():
    """No option of either end; and no package that either end needs reports home."""
    from polyfed.cli import command_line

    commands = command_line().commands
    for name in ("server", "client"):
        options = [option for p in commands[name].params for option in p.opts]
        assert options
        assert not [o for o in options if re.search("insecure|http|tls|ssl|plain|verify|telemetry|update", o)]
