"""polyfed report: the page, one table at a time, and one table over several data sets."""

import io
import re
import sys
from pathlib import Path

import pandas as pd
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "report"))
from report_folders import noisy, write_comparison


@pytest.fixture
def runs(tmp_path):
    for name in ("a", "b"):
        values = {"local": noisy([0.6, 0.7], 2, 0.01, 0), "fedavg": noisy([0.9, 0.9], 2, 0.01, 1)}
        write_comparison(tmp_path / name, values, metric="accuracy" if name == "a" else "rmse")
    return tmp_path


@pytest.mark.parametrize(
    ("of", "count"), [("methods", 2), ("clients", 2), ("gains", 1), ("costs", 2), ("results", 2 * 2 * 2)]
)
def test_one_table_is_written_as_csv(cli, runs, of, count):
    said = cli("report", "a", "--table", "csv", "--of", of).done()
    assert len(pd.read_csv(io.StringIO(said.out))) == count
    assert not (runs / "a/report.html").exists()


def test_a_paper_table_has_a_group_of_columns_per_data_set(cli, runs):
    said = cli("report", "a", "b", "--paper").done()
    assert said.out.count(r"\multicolumn{3}") == 2
    assert r"\begin{tabular}" in cli("report", "a", "--out", "page.html", "--table", "latex").out
    assert (runs / "page.html").exists()
    assert cli("report", "a", "--paper", "--table", "markdown").out.count("fedavg") == 1


def test_the_page_and_what_lies_beside_it(cli, runs):
    said = cli("report", "a").done()
    assert not (runs / "a/report-figures").exists()
    (runs / "a/report-figures").mkdir()
    (runs / "a/report-figures/rounds.pdf").touch()
    assert (runs / "a/results.csv").exists()
    assert "undecided" in said.out or "gains" in said.out


@pytest.mark.parametrize("form", ["text", "latex"])
def test_results_are_csv_only(cli, runs, form):
    said = cli("report", "a", "--of", "results", "--table", form)
    assert said.status == 2
    assert "expected --table csv" in said.err


def test_comparisons_stand_side_by_side_with_one_axis_and_the_same_sites_and_methods(cli, runs):
    more = {"local": noisy([0.6, 0.7, 0.5], 3, 0.01, 2), "ditto": noisy([0.9, 0.5, 0.8], 3, 0.01, 3)}
    write_comparison(runs / "c", more, names=["client-1", "client-0", "other"])
    said = cli("report", "a", "c").done()
    assert [line.split(":")[0] for line in said.out.splitlines() if line[:3] in ("a: ", "c: ")] == ["a", "c"]
    text = (runs / "a/beside-c.html").read_text()
    one, two = re.findall(r'<ul class="forest">.*?</ul>', text)
    ticks = [re.findall(r'<text x="([^"]*)".*?>(.*?)</text>', chart) for chart in (one, two)]
    assert ticks[0] == ticks[1]
    names = [re.findall("<b>(.*?)</b>", chart) for chart in (one, two)]
    assert [n for n in names[1] if n in names[0]] == names[0], "in one order"
    assert set(re.findall('<th scope="row" class="left"[^>]*>(.*?)</th>', text)) >= {
        "client-0", "client-1", "other", "local", "fedavg", "ditto"
    }  # fmt: skip
    assert "not tested" in text
    assert not (runs / "a/report.html").exists()
    cli("report", "a", "b").line(1, "a is judged by test accuracy and b by test RMSE: they cannot stand side by side")
    write_comparison(runs / "d", {"ditto": noisy([0.6], 2, 0.01, 0)}, names=["x"])
    cli("report", "a", "d", "--out", "page.html").line(1, "a and d have neither a site nor a method in common")
    assert not list(runs.glob("*.html"))
