"""The way in for the author of a method: three files that pass at once, and a table that names what is wrong."""

import multiprocessing
import sys

import pytest


def test_a_new_method_passes_at_once(cli, tmp_path):
    assert cli("new-method", "fed-mine").status == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fed_mine.py", "fed_mine.toml", "test_fed_mine.py"]
    said = cli("check", "fed_mine.py", "--row", "seed")
    assert (said.status, said.out) == (0, "fed-mine: same seed same bits: passed\n")
    assert cli("run", "fed_mine.toml", "--rounds", 2, "--seeds", 1, "--quiet", "--out", "x").status == 0
    test = ["-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "test_fed_mine.py"]
    process = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(pytest.main(test)))
    process.start()
    process.join()
    assert process.exitcode == 0


def test_what_is_there_is_not_overwritten(cli, tmp_path):
    (tmp_path / "fed_mine.py").write_text("mine")
    said = cli("new-method", "fed-mine")
    assert said.status == 2
    assert said.err == "polyfed: fed_mine.py: already exists; nothing was written\n"
    assert [p.name for p in tmp_path.iterdir()] == ["fed_mine.py"]


def test_names_that_are_none(cli):
    assert "lower-case letters" in cli("new-method", "Fed Mine").err
    assert "is a built-in method" in cli("new-method", "fedavg").err


def test_a_method_that_breaks_a_row_is_told_which(cli, tmp_path):
    cli("new-method", "fed-mine")
    path = tmp_path / "fed_mine.py"
    path.write_text(path.read_text().replace("round.samples)", "1.0 + round.ids.float())"))
    said = cli("check", "fed_mine.py", "--row", "relabelling")
    assert said.status == 2
    assert said.err.startswith("polyfed: fed_mine.py: fed-mine: relabelling the clients relabels the result: with the ")


def test_a_file_without_a_method_is_refused(cli, tmp_path):
    (tmp_path / "empty.py").write_text("")
    assert "found no method" in cli("check", "empty.py").err
