"""The folder of results: whose it is, one writer at a time, whole files, and results from before."""

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import tomllib

import pytest

from polyfed.base.cells import marked, unmarked
from polyfed.base.errors import RunError
from polyfed.runs import ownership as files
from polyfed.runs import stop


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


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
        with pytest.raises(RunError) as e:
            files.unsealed(path)
        assert "\n" not in str(e.value)
    path.write_text(SEALED.replace("[0]", "[1]"))
    with pytest.raises(RunError, match=r"edited after it was written .* polyfed run copy\.toml"):
        files.unsealed(path)


def hold(folder, ready, end):
    with files.locked(folder):
        ready.set()
        end.wait(60)


def test_a_second_process_is_told_who_is_at_work_and_a_kill_ends_the_lock(tmp_path):
    fork = multiprocessing.get_context("fork")
    ready, end = fork.Event(), fork.Event()
    other = fork.Process(target=hold, args=(tmp_path / "a", ready, end))
    other.start()
    assert ready.wait(60)
    with (
        pytest.raises(RunError, match=rf"in use by process {other.pid} on \S+ since \d{{4}}-"),
        files.locked(tmp_path / "a"),
    ):
        pass
    os.kill(other.pid, signal.SIGKILL)
    other.join()
    with files.locked(tmp_path / "a"), files.locked(tmp_path / "a"):  # again in the same thread
        assert json.loads((tmp_path / "a/.polyfed").read_text())["pid"] == os.getpid()


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


def made(folder):
    """A comparison of one run, with notes of its owner at every level."""
    for place in (folder, folder / "runs/fedavg-seed0"):
        place.mkdir(parents=True)
        (place / files.MARK).touch()
        (place / "notes.txt").write_text("mine")
    (folder / "comparison.toml").write_text(SEALED)
    (folder / "report.html").write_text("old")
    run = folder / "runs/fedavg-seed0"
    (run / "config.toml").write_text(SEALED)
    (run / "checkpoint/round-00000001").mkdir(parents=True)
    (run / "checkpoint/round-00000001/meta.json").write_text("{}")
    other = folder / "runs/20250101-120000-heart-seed3"  # of another call, with --out .
    other.mkdir()
    (other / files.MARK).touch()
    (other / "config.toml").write_text(SEALED)
    return folder


NOTES = {"notes.txt", "runs/fedavg-seed0/notes.txt", "runs/20250101-120000-heart-seed3/config.toml"}


def test_only_our_files_are_moved_aside_and_all_come_back(tmp_path):
    folder = made(tmp_path / "a")
    before = contents(folder)
    files.set_aside(folder)
    left = {p for p in contents(folder) if not p.startswith(".old/") and not p.endswith(files.MARK)}
    assert left == NOTES
    assert files.is_ours(folder / files.OLD)
    (folder / "comparison.toml").write_text("a new one")
    files.restore(folder)
    assert contents(folder) == before
    files.set_aside(folder)
    files.forget_old(folder)
    assert {p for p in contents(folder) if not p.endswith(files.MARK)} == NOTES


def there_and_back(folder):
    for _ in range(9):
        files.set_aside(folder)
        files.restore(folder)


@pytest.mark.parametrize("step", range(1, 17))
def test_a_crash_while_results_move_aside_or_back_loses_nothing(tmp_path, monkeypatch, step):
    """Whatever rename or removal is the last one: the next command finds all of it."""
    folder = made(tmp_path / "a")
    before, left = contents(folder), [step]

    class Crash(BaseException):
        pass

    def dying(function):
        def wrapped(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                raise Crash
            return function(*args, **kwargs)

        return wrapped

    with monkeypatch.context() as m:
        m.setattr(os, "replace", dying(os.replace))
        m.setattr(type(folder), "unlink", dying(type(folder).unlink))
        with pytest.raises(Crash):
            there_and_back(folder)
    files.settle(folder)
    assert contents(folder) == before


def test_a_second_signal_stops_at_once_and_the_status_says_which(tmp_path):
    since = stop.interruptions()
    with stop.interruptible(terminable=True) as event:
        signal.raise_signal(signal.SIGTERM)
        assert event.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert stop.status(since) == 143
    assert stop.status(stop.interruptions()) == 130


def planted(folder):
    """Everything that a user may have in a folder of results, under names that are ours or nearly so; the mark says
    whose a folder inside is. -> {path: whether it is ours}"""
    mark, ours = files.MARK, {}

    def put(path, mine):
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"of {path}")
        ours[path] = mine

    for name in ("comparison.toml", "results.csv", "report.html", "models/a.safetensors",
                 "checkpoint/round-1/meta.json",
                 "runs/fedavg-seed0/config.toml", "runs/fedavg-seed0/models/a.safetensors", f"runs/fedavg-seed0/{mark}",
                 "runs/ditto-lr-0.1-seed-12/summary.json", f"runs/ditto-lr-0.1-seed-12/{mark}",
                 "legs/0/config.toml", f"legs/0/{mark}"):  # fmt: skip
        put(name, True)
    for name in ("notes.txt", "models/readme.md", "models/deep/a.safetensors", "report.html.bak", "my/report.html",
                 "runs/mine-seed0/config.toml", "runs/mine-seed0/models/a.safetensors", "runs/config.toml",
                 "runs/fedavg-seed0/notes.txt", "runs/fedavg-seed0/old/config.toml", "runs/fedavg/config.toml",
                 f"runs/fedavg/{mark}", "runs/20250101-120000-x-seed3/config.toml",
                 f"runs/20250101-120000-x-seed3/{mark}",
                 "runs/a-seed0x/config.toml", f"runs/a-seed0x/{mark}", "runs/seed0/config.toml", f"runs/seed0/{mark}",
                 "legs/mine/config.toml", "parts/one/config.toml", f"parts/one/{mark}", ".old-mine/config.toml",
                 ):  # fmt: skip
        put(name, False)
    (folder.parent / "elsewhere").mkdir()
    (folder.parent / "elsewhere/config.toml").write_text("of another folder")
    (folder.parent / "elsewhere" / mark).touch()
    (folder / "runs/linked-seed0").symlink_to(folder.parent / "elsewhere")
    (folder / mark).touch()
    return ours


def test_force_takes_what_is_ours_by_name_and_by_mark_and_nothing_else(tmp_path):
    ours = planted(tmp_path / "a")
    theirs = {path: f"of {path}" for path, mine in ours.items() if not mine}
    assert {str(p.relative_to(tmp_path / "a")) for p in files.our_files(tmp_path / "a")} == {p for p in ours if ours[p]}
    for act in (files.set_aside, files.forget_old, files.set_aside, files.discard, files.settle, files.settle):
        act(tmp_path / "a")
        assert {path: (tmp_path / "a" / path).read_text() for path in theirs} == theirs, act.__name__
        assert (tmp_path / "elsewhere/config.toml").read_text() == "of another folder"
        assert (tmp_path / "a/runs/linked-seed0").is_symlink()
    assert not [path for path in ours if ours[path] and (tmp_path / "a" / path).exists()]
