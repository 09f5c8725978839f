"""polyfed coalitions: what is said and written, how it goes on, and what is refused."""

import json
import shutil

import numpy as np
import pandas as pd

from polyfed_games.result import Coalitions

SMALL = ("--rounds", 2, "--seeds", 1, "--against", "none", "--quiet")


def test_the_hospitals_end_in_tables_and_a_folder_that_can_be_resumed(cli, tmp_path):
    said = cli("coalitions", "--set", 'data.without=["va"]', *SMALL, "--out", "c").done()
    for word in ("Who helps whom", "What each client should do", "Which coalitions hold", "c/report.html"):
        assert word in said.out
    runs = sorted(p.name for p in (tmp_path / "c/runs").iterdir())
    names = ["cleveland", "hungarian", "switzerland"]
    pairs = ["cleveland+hungarian", "cleveland+switzerland", "hungarian+switzerland"]
    assert runs == sorted(f"{label}-seed0" for label in [*(f"own-{n}" for n in names), *pairs, "all"])
    for run in runs:  # each is standardised by its own members, which config.toml says
        table = pd.read_csv(tmp_path / f"c/runs/{run}/clients.csv")
        assert "validation_accuracy" in table
    before = (tmp_path / "c/coalitions-help.csv").read_text()
    page, saved = ((tmp_path / "c" / name).read_text() for name in ("report.html", "coalitions.json"))
    headline = page.split('<p class="headline">')[1].split("</p>")[0]
    assert headline.startswith("With all 3 together under fedavg, ")
    assert "test accuracy over the own model. The groups that hold best are " in headline
    assert not any(term in headline for term in ("Nash", "core", "individually", "|"))
    assert page.index('class="forest"') < page.index("<svg viewBox") < page.index("<table")
    clear = pd.read_csv(tmp_path / "c/coalitions-help.csv").clear
    (cells, *bar) = Coalitions.open(tmp_path / "c").figure().axes
    shown = cells.images[0].to_rgba(cells.images[0].get_array())
    coloured = np.ptp(shown[..., :3].astype(float), axis=2) > 0.03
    assert (coloured.sum(), bool(bar)) == (clear.sum(), clear.any()), "a matrix with no clear cell is grey"
    assert all(word in page for word in ("Who helps whom", "What each client should do", "<svg", names[0]))
    assert len(json.loads(saved)["help"]) == before.count("\n") - 1 == 6
    assert (tmp_path / "c/coalitions.pdf").read_bytes().startswith(b"%PDF")
    assert (tmp_path / "c/coalitions.png").is_file()
    shutil.rmtree(tmp_path / "c/runs/all-seed0")
    assert cli("verify", "c/runs/cleveland+hungarian-seed0").status == 0
    assert cli("resume", "c", "--quiet").status == 0
    assert (tmp_path / "c/coalitions-help.csv").read_text() == before
    (page := tmp_path / "c/report.html").unlink()
    (tmp_path / "c/coalitions.svg").unlink()
    said = cli("report", "c").done()
    assert "Who helps whom" in said.out
    assert page.is_file()
    assert (tmp_path / "c/coalitions.svg").is_file()
    for words in (("c", "c"), ("c", "--table", "csv"), ("c", "--out", "d.html")):
        assert "c: is no run; report takes such a folder alone" in cli("report", *words).err
    said = cli("coalitions", *SMALL, "--out", "c")
    assert "holds results already" in said.err
    said = cli("resume", "c", "--rounds", 5)
    assert said.err == "polyfed: --rounds: c holds coalitions, which keep their number of rounds\n"


def test_wrong_words_are_refused_in_one_line_and_leave_no_folder(cli, tmp_path):
    for words, line in (
        (("fedavgg",), "did you mean 'fedavg'"),
        (("--against", "fpfcc"), "did you mean 'fpfc'"),
        (("--samples", 0), "samples: found 0, expected an integer of at least 1"),
        (("--set", 'data.without=["Va"]'), "did you mean 'va'"),
    ):
        cli("coalitions", *words, "--out", "x").line(2, line)
        assert not (tmp_path / "x").exists()
