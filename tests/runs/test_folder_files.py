"""The folder of results: whose it is, one writer at a time, and whole files."""

import errno
import fcntl
import os
import signal
import tomllib

import pytest

from polyfed.base.errors import RunError
from polyfed.base.text import marked, unmarked
from polyfed.runs import ownership as files
from polyfed.runs import stop


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
