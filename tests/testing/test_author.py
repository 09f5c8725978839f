"""The way in for the author of a method: three files that pass at once, and a table that names what is wrong."""

import multiprocessing
import sys
from pathlib import Path

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
    line = "polyfed: fed_mine.py: already exists; nothing was written\n"
    assert cli("new-method", "fed-mine")[:3:2] == (2, line)
    assert [p.name for p in tmp_path.iterdir()] == ["fed_mine.py"]
    assert "lower-case letters" in cli("new-method", "Fed Mine").err
    assert "is a built-in method" in cli("new-method", "fedavg").err


def spoilt(cli, tmp_path, was: str, put: str) -> str:
    cli("new-method", "fed-mine")
    path = tmp_path / "fed_mine.py"
    text = path.read_text()
    assert was in text
    path.write_text(text.replace(was, put))
    return str(path)


DICT = "self.lr)}\n\n    def downlink(self, server, round):\n        return {'w': server['w']}"


@pytest.mark.parametrize(
    ("was", "put", "said"),
    [
        ("round.samples)", "1.0 + round.ids.float())", "fed-mine: relabelling the clients relabels the result: with "),
        ("setting(0.1, ", "setting(", "algorithm.lr: is missing; fed-mine needs a number of at least 0"),
        (None, "", "found no method"),
    ],
)
def test_a_method_that_breaks_a_row_or_is_none_is_told_which(cli, tmp_path, was, put, said):
    if was is None:
        (tmp_path / "fed_mine.py").write_text(put)
    else:
        spoilt(cli, tmp_path, was, put)
    found = cli("check", "fed_mine.py", "--row", "relabelling")
    assert (found.status, said in found.err) == (2, True), found.err


@pytest.mark.parametrize(
    ("was", "put", "line", "mistake"),
    [
        ("data, self.lr)", "data.lenght, self.lr)", "data.lenght", "FedMine.local_update failed with AttributeError"),
        ("    def aggregate", "    def gather", "@dataclass", "FedMine has no aggregate(self, server, up, round)"),
        ("self.lr)}", DICT, "def downlink", "downlink of FedMine returned {'w': a tensor of shape"),
    ],
    ids=["typo", "not written", "dict as downlink"],
)
def test_a_mistake_in_an_authors_file_is_one_line_with_its_place(cli, tmp_path, was, put, line, mistake):
    """In a check, and in a run of several processes."""
    path = spoilt(cli, tmp_path, was, put)
    lines = Path(path).read_text().splitlines()
    number = next(k for k, text in enumerate(lines, 1) if line in text)
    for words in (("check", path, "--row", "byte"), ("run", "fed_mine.toml", "--rounds", 2, "--quiet", "--out", "x")):
        cli(*words).line(1, f"polyfed: {path}, line {number}: {mistake}")
