"""polyfed report: the page, one table at a time, and one table over several data sets."""

import io
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
