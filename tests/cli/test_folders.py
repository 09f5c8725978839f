"""Folders of results on the command line: what is refused, replaced, kept and continued, in one line each."""

import json
import multiprocessing
import os
import time
from contextlib import suppress

import pytest
from forked import Process

from polyfed.base.errors import PolyfedError
from polyfed.cli.folders import claimed
from polyfed.runs import ownership as files

pytestmark = pytest.mark.usefixtures("undrawn")


def contents(folder):
    """Every file but the mark, whose holder changes."""
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != files.MARK
    }


@pytest.fixture
def done(cli, tmp_path, small):
    assert cli("run", small, "--algorithm", "fedavg", "--out", "a", "-q").status == 0
    (tmp_path / "a/notes.txt").write_text("mine")
    return tmp_path / "a"


@pytest.mark.parametrize("name", ["config.toml", "comparison.toml", "tune.csv"])
def test_a_folder_of_somebody_else_is_refused_and_force_is_not_proposed(cli, tmp_path, small, name):
    site = tmp_path / "site"
    (site / ".git").mkdir(parents=True)
    (site / ".git/HEAD").write_text("main")
    (site / name).write_text("baseURL = 'https://example.org'\n")
    before = contents(tmp_path)
    for words in (
        ("run", small),
        ("run", small, "--force"),
        ("tune", "--force"),
        ("reproduce", "fpfc/window", "--force"),
    ):
        said = cli(*words, "--out", "site")
        assert said.status != 0
        assert "--force" not in said.err.replace("polyfed: --out", "")
    assert cli("resume", "site").status == 1
    assert contents(tmp_path) == before
    assert not (site / files.MARK).exists()


def test_force_renames_all_that_is_there(cli, tmp_path, small, done):
    before = contents(done)
    assert "polyfed resume a" in cli("run", small, "--algorithm", "ditto", "--out", "a").err
    done.chmod(0o700)
    for k, old in enumerate(("a.old", "a.old-2")):
        said = cli("run", small, "--algorithm", "ditto", "--out", "a", "--force", "-q")
        assert (said.status, said.err) == (0, f"polyfed: what was in a is in {old}\n")
        assert contents(tmp_path / "a.old") == before
        assert json.loads((done / "summary.json").read_text())["algorithm"] == "ditto"
        assert not (done / "notes.txt").exists()
        assert ((tmp_path / "a.old-2").exists(), done.stat().st_mode & 0o777) == (k == 1, 0o700)


@pytest.mark.parametrize(
    "wrong",
    [
        ("--algorithm", "fedavg:lr=nan"),
        ("--algorithm", "fedavg:lr=1e38"),
        ("--set", "algorithm.name=nonsense"),
        ("--set", "model.name=mlp", "--set", "model.hidden=[0]"),
        ("--set", "checkpoint-every=1", "--algorithm", "fpfc:rho=nan"),
    ],
)
def test_a_forced_run_that_fails_leaves_the_old_results(cli, tmp_path, small, done, wrong):
    """Where they were, unless there is a new result: a run that diverged."""
    before = contents(done)
    assert cli("run", small, *wrong, "--out", "a", "--force", "-q").status
    old = tmp_path / "a.old"
    assert contents(old if old.exists() else done) == before
    assert old.exists() == wrong[-1].endswith("lr=1e38")


def test_after_a_crash_of_a_forced_run_both_are_there(cli, tmp_path, small, done, stopper):
    before = contents(done)
    method = ("--set", f"algorithm.file={stopper}", "--set", f"algorithm.marker={tmp_path / 'stopped'}")
    said = cli("run", small, *method, "--out", "a", "--force", "-q")
    assert said.status == 130
    assert "what was in a is in a.old" in said.err
    assert contents(tmp_path / "a.old") == before
    assert cli("resume", "a", "-q").status == 0
    assert contents(tmp_path / "a.old") == before


def test_the_working_folder_and_links_are_places_like_any(cli, tmp_path, small, done, monkeypatch):
    (tmp_path / "link").symlink_to(done)
    assert cli("run", small, "--algorithm", "ditto", "--out", "link", "--force", "-q").status == 0
    assert (tmp_path / "link").is_symlink()
    assert json.loads((done / "summary.json").read_text())["algorithm"] == "ditto"
    assert (tmp_path / "a.old/notes.txt").read_text() == "mine"
    with monkeypatch.context() as m:  # a shell would stay in the renamed one
        m.chdir(done / "models")
        for out in ("..", done):
            cli("run", small, "--out", out, "--force", "-q").line(1, "the working folder is in it")
    (tmp_path / "nowhere").symlink_to(tmp_path / "not there")
    cli("run", small, "--out", tmp_path / "nowhere", "-q").line(1, "cannot make the folder")


def test_a_folder_that_cannot_be_written_is_one_line(cli, small, done, monkeypatch):
    before = contents(done)

    def refuse(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "replace", refuse)
    cli("run", small, "--out", "a", "--force", "-q").line(1, "read-only file system; it is as it was")
    monkeypatch.setattr(os, "open", refuse)
    cli("run", small, "--out", "a", "--force", "-q").line(1, "cannot write in the folder a: read-only file system")
    monkeypatch.undo()
    assert contents(done) == before


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: text.index("[algorithm]")],
        lambda text: text[: len(text) // 3],
        lambda text: text.replace("rounds = 4", "rounds = 5"),
        lambda text: text + "\n[[[",
    ],
)
def test_a_config_that_is_not_as_it_was_written_is_refused(cli, done, damage):
    path = done / "config.toml"
    path.write_text(damage(path.read_text()))
    before = contents(done)
    cli("resume", "a", "--rounds", 9).line(1, "a/config.toml: ", "nothing was touched")
    assert contents(done) == before


def test_a_folder_in_use_is_refused_by_every_command(cli, tmp_path, small, done):
    def hold():
        with files.locked(done):
            held.set()
            time.sleep(60)

    fork = multiprocessing.get_context("fork")
    held, holder = fork.Event(), fork.Process(target=hold)
    holder.start()
    assert held.wait(60)
    before = contents(done)
    who = f"a: in use by process {holder.pid} on "
    for words in (("run", small, "--force"), ("compare", "fedavg", "local", "--force"), ("tune", "--force")):
        cli(*words, "--out", "a", "-q").line(1, who)
    cli("resume", "a", "--rounds", 9).line(1, who)
    assert contents(done) == before
    holder.kill()
    holder.join()
    assert cli("resume", "a", "--rounds", 6, "-q").status == 0


def test_sigterm_saves_and_ends_with_143(cli, tmp_path):
    how = ("--data", "heart-disease", "--local-steps", 2, "--batch-size", 8, "--rounds", 3000)
    process = Process("compare", "fedavg", "scaffold", "--seeds", 2, *how, "--out", "a")
    deadline = time.monotonic() + 90
    while not any((tmp_path / "a").rglob("metrics.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    process.terminate()
    process.join()
    assert process.exitcode == 143
    assert process.err.read_text().strip().splitlines()[-1] == "polyfed: interrupted; resume with: polyfed resume a"
    assert [*(tmp_path / "a").rglob("round-*")], "nothing was saved"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("compare", "local", "fedrep"), "fedrep would share nothing of this model"),
        (("tune", "fedrep", "--setting", "lr", "--grid", 0.1), "fedrep would share nothing of this model"),
        (("coalitions", "fedrep"), "fedrep would share nothing of this model"),
        (("run", "--set", "class-weights=[1.0]"), "class-weights: found 1 numbers"),
        (("compare", "local", "pacfl", "--set", 'schedule={name="asynchronous"}'), "cannot run asynchronously"),
    ],
)
def test_what_any_of_the_methods_refuses_is_said_before_the_first_run(cli, tmp_path, words, said):
    before = set(tmp_path.iterdir())
    for where in ((), ("--out", "x")):
        cli(*words, "--data", "heart-disease", "--model", "linear", *where).line(2, said)
        assert set(tmp_path.iterdir()) == before


def everything(folder):
    """Every file and link, wherever it has gone, by its place in a folder of results or in a renamed one."""
    return {
        str(p.relative_to(top)): os.readlink(p) if p.is_symlink() else p.read_bytes()
        for top in sorted(folder.glob("a*"))
        for p in top.rglob("*")
        if (p.is_file() or p.is_symlink()) and p.name != files.MARK
    }


@pytest.fixture
def planted(tmp_path):
    """A comparison, and all that a user may keep in its folder, also under names that polyfed uses."""
    folder = tmp_path / "a"
    for path in (files.MARK, "comparison.toml", "runs/fedavg-seed0/summary.json", f"runs/fedavg-seed0/{files.MARK}",
                 "notes.txt", "models/m.safetensors", "runs/mine-seed0/config.toml", "my/report.html", ".hidden/x",
                 ".old/summary.json", "events.log", "audit.jsonl"):  # fmt: skip
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(f"of {path}")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/config.toml").write_text("of another folder")
    (folder / "runs/linked-seed0").symlink_to(tmp_path / "elsewhere")
    return folder


class Crash(BaseException):
    pass


def failing(folder, *names):
    """A forced command that fails before anything is computed, and what others write there meanwhile."""
    with suppress(Crash, ZeroDivisionError), claimed(folder, "", force=True):
        for name in names:
            with (folder / name).open("a") as file:
                file.write("begun\n")
        for name in ("config.toml", "runs/fedavg-seed0/config.toml"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            files.put(folder / name, b"half")
        raise ZeroDivisionError


@pytest.mark.parametrize("step", range(1, 12))
def test_whatever_the_last_step_of_a_forced_command_is_no_file_is_lost(tmp_path, planted, monkeypatch, step):
    """Killed at any step, failed, or with new results: and the next command finds all of it."""
    before, left = everything(tmp_path), [step]

    def dying(function):
        def wrapped(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                raise Crash
            return function(*args, **kwargs)

        return wrapped

    with monkeypatch.context() as m:
        for name in ("replace", "mkdir", "rmdir", "unlink", "chmod"):
            m.setattr(os, name, dying(getattr(os, name)))
        failing(planted)
    found = everything(tmp_path)
    assert found | before == found
    with claimed(planted, "", force=True):
        files.put(planted / "summary.json", b"new")
    found = everything(tmp_path)
    assert found.pop("summary.json") == b"new"
    assert found | before == found
    assert (tmp_path / "elsewhere/config.toml").read_text() == "of another folder"


def test_what_failed_gives_the_folder_its_name_back_and_results_stay_unasked(tmp_path, planted):
    before = everything(tmp_path)
    failing(planted)
    assert (everything(tmp_path), [p.name for p in tmp_path.glob("a*")]) == (before, ["a"])
    with pytest.raises(PolyfedError, match="holds results already"), claimed(planted, ""):
        pass
    with suppress(ZeroDivisionError), claimed(planted, "", resume=True):
        for path in planted.rglob("summary.json"):
            before.pop(str(path.relative_to(planted)))
            path.unlink()
        files.put(planted / "log.txt", b"resumed")
        raise ZeroDivisionError
    before["log.txt"] = b"resumed"
    assert everything(tmp_path) == before
    failing(planted, "mine.txt")
    assert everything(tmp_path) == before | {"mine.txt": b"begun\n"}


def test_a_servers_logs_stay_where_a_start_has_failed(tmp_path):
    for _ in range(2):
        failing(tmp_path / "a", "audit.jsonl")
    assert everything(tmp_path) == {"audit.jsonl": b"begun\nbegun\n"}
