"""The folder of results: whose it is, one writer at a time, and whole files."""

import errno
import fcntl
import os
import signal
import tomllib
from pathlib import Path

import pytest

import polyfed as pf
from polyfed.base.errors import RunError
from polyfed.base.text import marked, unmarked
from polyfed.runs import ownership as files
from polyfed.runs import stop
from polyfed_testing.stage import train


@pytest.mark.parametrize("name", ["=cmd|calc", "+1", "-x", "@a", "\tt", "'=x", "'", "''+", "oslo", ""])
def test_a_marked_name_is_no_formula_and_is_read_back(name):
    assert unmarked(marked(name)) == name
    assert not marked(name).startswith(("=", "+", "-", "@", "\t", "\r"))


SEALED = files.sealed('seeds = [0]\n[data]\ndigest = "x"\n[algorithm]\nname = "a"\n[versions]\npolyfed = "1"\n')


def test_a_sealed_file_is_read_and_any_cut_or_edit_is_seen(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(SEALED)
    assert files.unsealed(path) == tomllib.loads(SEALED)
    for end in range(len(SEALED) - 1):  # all but the last line's end
        path.write_text(SEALED[:end])
        with pytest.raises(RunError):
            files.unsealed(path)
    path.write_text(SEALED.replace("[0]", "[1]"))
    with pytest.raises(RunError, match=r"edited after it was written .* polyfed run copy\.toml"):
        files.unsealed(path)


def test_what_a_run_leaves_is_on_the_disk_before_it_has_its_name_and_all_of_it_before_the_summary(
    tmp_path, monkeypatch
):
    """A power cut leaves no name over zeros, and no summary of a run of which something is missing."""
    flushed, named, replace = set[str](), list[str](), os.replace

    def fsync(handle):
        flushed.add(os.readlink(f"/proc/self/fd/{handle}"))

    def rename(source, target):
        assert str(source) in flushed
        if target.name == "summary.json":
            assert {str(tmp_path / "run" / name) for name in ("", "models", "checkpoint")} <= flushed
            assert {"config.toml", "clients.csv", "ledger.csv", "scores.safetensors", "bern.safetensors"} <= set(named)
        flushed.discard(str(Path(target).parent))  # which has a name more
        named.append(target.name)
        replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    train(pf.Local(), rounds=1, out=tmp_path / "run")
    assert named[-1] == "summary.json"
    assert str(tmp_path / "run") in flushed


def test_without_flock_a_living_writer_is_still_seen(tmp_path, monkeypatch, capsys):
    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with files.locked(tmp_path):
        assert "cannot be locked here" in capsys.readouterr().err
        monkeypatch.setitem(files._held, os.path.realpath(tmp_path), -1)  # seen from another thread
        with pytest.raises(RunError, match="in use by process"), files.locked(tmp_path):
            pass
        files._held[os.path.realpath(tmp_path)] = 0


def test_an_error_leaves_no_new_folder_and_no_mark(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.toml").write_text("title = 'a site'\n")
    for folder in (tmp_path / "mine", tmp_path / "x/y"):
        with pytest.raises(ValueError, match="no"), files.locked(folder):
            raise ValueError("no")
    assert [p.name for p in tmp_path.rglob("*")] == ["mine", "config.toml"]
    assert not files.is_ours(tmp_path / "mine")


def test_a_second_signal_stops_at_once_and_the_status_says_which(tmp_path):
    since = stop.interruptions()
    with stop.interruptible(terminable=True) as event:
        signal.raise_signal(signal.SIGTERM)
        assert event.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert stop.status(since) == 143
    assert stop.status(stop.interruptions()) == 130
