"""What `make torture` found: states that a killed command leaves, from which the same command must go on."""

import errno
import os
import signal

import pytest
from forked import Process
from safetensors import SafetensorError

from polyfed.base.checkpoint import reason
from polyfed.base.errors import ConfigError
from polyfed.report.style import write_atomically
from polyfed.runs import ownership as files
from polyfed.runs.folder import RunFolder

pytestmark = pytest.mark.usefixtures("undrawn")

RUN = ("--algorithm", "ditto", "--out", "a", "-q")


def marked(folder):
    """A folder that a command had locked when it was killed."""
    with files.locked(folder):
        (folder / "half").touch()
    (folder / "half").unlink()
    return folder


@pytest.mark.parametrize(
    "left", ["rows/w.rows", "models/.va.safetensors.draft", "metrics.jsonl", "runs/", "checkpoint/"]
)
def test_a_run_killed_before_its_config_is_started_by_the_same_command(cli, tmp_path, small, left):
    path = marked(tmp_path / "a") / left
    path.parent.mkdir(exist_ok=True)
    path.mkdir() if left.endswith("/") else path.write_bytes(b"half")
    cli("run", small, *RUN).done()
    assert not (path.is_file() and path.read_bytes() == b"half")


def test_a_recipe_killed_at_once_goes_on_and_other_results_are_refused(tmp_path):
    _claimed = pytest.importorskip("polyfed_papers.command")._claimed
    with _claimed(marked(tmp_path / "a"), "fpfc/window small", False):
        assert (tmp_path / "a/recipe.txt").is_file()
    (marked(tmp_path / "b") / "summary.json").touch()
    with pytest.raises(ConfigError, match="holds results already"), _claimed(tmp_path / "b", "x", False):
        pass


def test_an_admission_killed_before_its_table_is_made_again_and_a_whole_one_is_refused(cli, tmp_path, small):
    pytest.importorskip("polyfed_members")
    lines = ["a,b,c,d,e,f,g,h,i,j,y", *(",".join(["0.5", *["1"] * 9, str(i % 2)]) for i in range(20))]
    (tmp_path / "oslo.csv").write_text("\n".join(lines) + "\n")
    assert cli("run", small, *RUN).status == 0
    words = ("admit", "a", "--data", "oslo.csv", "--exchanges", 1, "--out", "b")
    assert cli(*words).status == 0
    (tmp_path / "b/admission.csv").unlink()  # the last file that is written
    assert cli(*words).status == 0
    said = cli(*words)
    assert (said.status, said.err) == (2, "polyfed: --out b: holds results already; choose another folder\n")


def test_results_without_their_head_stay_whatever_is_asked_of_the_folder(cli, tmp_path, small):
    """Files of our names, in a folder with our mark, may be another's: here an admission's, whose table is gone."""
    folder = marked(tmp_path / "adm")
    (folder / "models").mkdir()
    for name in ("models/oslo.safetensors", "models/mine.safetensors", "admission.svg"):
        (folder / name).write_text("hours of work")
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != files.MARK}
    wrong = ("--set", "model.name=mlp", "--set", "model.hidden=[0]")
    for words in (("resume", "adm"), ("report", "adm"), ("verify", "adm"), ("run", small, *wrong, "--out", "adm")):
        cli(*words).line((1, 2))
        assert {p: p.read_bytes() for p in before} == before, words


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_an_interruption_while_a_command_sets_out_is_said(cli, small, monkeypatch, number, status):
    monkeypatch.setattr("polyfed.cli.run.resolve", lambda *_: os.kill(os.getpid(), number))
    process = Process("run", small, *RUN)  # of its own: what nobody answers would end that of the tests
    process.join()
    assert (process.exitcode, process.err.read_text()) == (status, "polyfed: interrupted\n")


def test_a_draft_of_a_killed_process_is_replaced_and_a_full_disk_is_called_so(tmp_path):
    (tmp_path / ".page.html.draft").write_text("half")
    write_atomically(tmp_path / "page.html", b"whole")
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
    text = "Error while serializing: I/O error: No space left on device (os error 28)"
    for error in (OSError(errno.ENOSPC, "No space left on device"), SafetensorError(text)):
        assert reason(error) == "the disk is full"


def test_a_finished_run_has_its_log(cli, tmp_path, small, monkeypatch):
    """Whatever comes after the summary is lost when the process is killed there: nothing may."""
    write = RunFolder.write

    def seen(self, name, text):
        if name == "summary.json":
            assert "finished after round 4" in (self.path / "log.txt").read_text()
        write(self, name, text)

    monkeypatch.setattr(RunFolder, "write", seen)
    assert cli("run", small, *RUN).status == 0


def test_a_disk_that_is_full_is_one_line_wherever_a_command_meets_it(cli, small, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "a/tune.svg")

    monkeypatch.setattr("polyfed.cli.run.resolve", full)
    line = "polyfed: cannot write a/tune.svg: the disk is full; what was written before is kept\n"
    assert cli("run", small, *RUN)[:3:2] == (1, line)
