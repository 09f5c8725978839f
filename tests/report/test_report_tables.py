"""Tables and the answer against numbers that were written into run folders."""

import csv
import io

import numpy as np
import pytest
from report_folders import noisy, write_comparison, write_run
from rich.table import Table as RichTable

from polyfed import report
from polyfed.report import pairs, words
from polyfed.report.table import Cell, Table

GAIN = {
    "local": [[0.70, 0.80, 0.90], [0.71, 0.79, 0.90], [0.70, 0.80, 0.89]],
    "fedavg": [[0.80, 0.80, 0.70], [0.82, 0.78, 0.71], [0.81, 0.81, 0.70]],
    "ditto": [[0.90, 0.81, 0.89], [0.92, 0.79, 0.91], [0.91, 0.79, 0.90]],
}


def rows(text):
    return list(csv.DictReader(io.StringIO(text)))


@pytest.fixture
def study(tmp_path):
    return report.read(write_comparison(tmp_path, GAIN, names=["A", "B", "C"], samples=[2000] * 3, test=[500] * 3))


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (1e9, "1.00 GB"), (999_999, "1.00 MB"), (44.7e9, "44.7 GB")],
)  # fmt: skip
def test_bytes_are_decimal(number, text):
    assert words.size(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(12.34, "12.3 s"), (245, "4 min 05 s"), (7980, "2 h 13 min"), (3599.9, "1 h 00 min")]
)
def test_durations(seconds, text):
    assert words.duration(seconds) == text


def test_compare_table_holds_mean_and_sample_std_over_seeds(study):
    found = {r["method"]: r for r in rows(report.compare_table(study, to="csv"))}
    assert float(found["local"]["accuracy_mean"]) == pytest.approx((0.8 + 0.8 + 2.39 / 3) / 3)
    assert float(found["local"]["accuracy_std"]) == pytest.approx((0.01 / 3) / 3**0.5)
    assert float(found["fedavg"]["worst_mean"]) == pytest.approx((0.70 + 0.71 + 0.70) / 3)
    assert float(found["fedavg"]["bytes_per_client"]) == 1e6
    assert float(found["local"]["bytes_per_client"]) == 0
    assert (found["fedavg"]["gain"], found["fedavg"]["lose"]) == ("1", "1")


def test_client_table_gives_each_client_its_verdict(study):
    found = {r["client"]: r for r in rows(report.client_table(study, to="csv"))}
    assert found["A"]["verdict"] == "personalised (ditto)"
    assert found["B"]["verdict"] == "no clear difference"
    assert found["C"]["verdict"] == "no clear difference"
    assert float(found["A"]["gain"]) == pytest.approx((0.2 + 0.21 + 0.21) / 3)
    assert float(found["A"]["samples"]) == 500


def test_answer_names_method_gain_and_bytes(study):
    text = report.answer(study)
    assert "ditto" in text
    assert "1.00 MB per client" in text
    assert "3 seeds" in text


def test_answer_when_federating_hurts(tmp_path):
    worse = {"local": noisy([0.9] * 4, 3, 0.001, 1), "fedavg": noisy([0.5] * 4, 3, 0.001, 2)}
    assert report.answer(report.read(write_comparison(tmp_path, worse))).startswith("Federating does not pay here")


def test_answer_when_nothing_is_clear(tmp_path):
    same = {"local": [[0.7, 0.8], [0.8, 0.7], [0.7, 0.7]], "fedavg": [[0.8, 0.7], [0.6, 0.9], [0.8, 0.65]]}
    assert report.answer(report.read(write_comparison(tmp_path, same))).startswith("No clear difference on average")


def test_answer_with_one_seed_claims_nothing(tmp_path):
    text = report.answer(report.read(write_comparison(tmp_path, {k: v[:1] for k, v in GAIN.items()})))
    assert "no spread can be given" in text
    assert "hint" in text


def test_answer_without_own_models_says_what_is_missing(tmp_path):
    text = report.answer(report.read(write_comparison(tmp_path, {k: GAIN[k] for k in ("fedavg", "ditto")})))
    assert text.startswith("Whether federating pays cannot be said")
    assert "'local'" in text


def test_diverged_runs_are_told_and_left_out(tmp_path):
    write_comparison(tmp_path, {k: GAIN[k] for k in ("local", "fedavg")})
    write_run(tmp_path / "runs" / "fedavg-seed2", [0.1] * 3, seed=2, status="diverged")
    study = report.read(tmp_path)
    assert "fedavg diverged" in report.answer(study)
    assert "diverged 1 of 3" in report.compare_table(study, to="markdown")
    found = {r["method"]: r for r in rows(report.compare_table(study, to="csv"))}
    assert found["fedavg"]["seeds"] == "2"


def test_clusters_are_scored_only_where_the_truth_is_known(tmp_path):
    values, found = {"fpfc": noisy([0.8] * 4, 2, 0.01, 0)}, {"fpfc": {"clusters": [1, 1, 0, 0]}}
    known = report.read(write_comparison(tmp_path / "a", values, clusters=[0, 0, 1, 1], report=found))
    assert rows(report.compare_table(known, to="csv"))[0]["ari"] == "1.0"
    unknown = report.read(write_comparison(tmp_path / "b", values, report=found))
    (row,) = rows(report.compare_table(unknown, to="csv"))
    assert row["clusters"] == "2.0"
    assert "ari" not in row


def test_a_hundred_clients_are_summarised(tmp_path):
    values = {"local": noisy([0.6] * 100, 10, 0.01, 0), "fedavg": noisy([0.7] * 99 + [0.3], 10, 0.01, 1)}
    study = report.read(write_comparison(tmp_path, values, samples=[4000] * 100, test=[1000] * 100))
    ends = rows(report.client_table(study, to="csv"))
    assert len(ends) == 10
    assert ends[0]["client"] == "client-99"
    assert len(rows(report.client_table(study, to="csv", every=True))) == 100
    summary = report.gain_table(study)
    assert summary is not None
    (row,) = rows(summary.to("csv"))
    assert int(row["gain"]) + int(row["lose"]) + int(row["neither"]) == 100
    assert (row["lose"], int(row["gain"]) > 80) == ("1", True)
    assert float(row["least"]) == pytest.approx(-0.3, abs=0.05)


def test_partitions_redrawn_per_seed_are_told(tmp_path):
    values = {k: v[:2] for k, v in GAIN.items()}
    study = report.read(write_comparison(tmp_path, values, samples=lambda seed: [100 + seed, 110, 120]))
    assert study.redrawn
    assert "drawn anew" in report.client_table(study, to="markdown")


@pytest.mark.parametrize("form", ["html", "markdown", "latex", "csv"])
def test_every_rendering_holds_every_row(study, form):
    text = report.compare_table(study, to=form)
    assert all(label in text for label in GAIN)


def test_terminal_tables_are_rich_tables(study):
    assert isinstance(report.client_table(study, to="rich"), RichTable)


def test_hostile_text_is_escaped_in_every_rendering():
    table = Table("t", ("client<",), ((Cell("<script>|$x_1%&"),),))
    assert "<script>" not in table.to("html")
    assert "<script>" not in table.to("markdown")
    assert r"\|" in table.to("markdown")
    assert r"$<$script$>$|\$x\_1\%\&" in table.to("latex")


def test_unknown_rendering_is_refused():
    with pytest.raises(ValueError, match="expected one of"):
        Table("t", (), ()).to("docx")


def test_no_cell_of_a_csv_is_a_formula(tmp_path):
    """Spreadsheets run text that begins with = + - @; numbers stay numbers."""
    names = ["=cmd|' /C calc'!A0", "+1", "-1", "@SUM(A1)"]
    study = report.read(
        write_comparison(tmp_path, {"local": [[0.5, 0.6, 0.7, 0.8]], "fedavg": [[0.6] * 4]}, names=names)
    )
    found = rows(report.client_table(study, "csv", every=True))
    assert [r["client"] for r in found] == [f"'{n}" for n in names]
    assert [float(r["gain"]) for r in found] == pytest.approx([0.1, 0, -0.1, -0.2])


def test_steps_per_round_are_shown(tmp_path):
    study = report.read(
        write_comparison(tmp_path, {"local": [[0.5]], "fedrep": [[0.6]]}, steps={"local": 3, "fedrep": 33})
    )
    found = rows(report.compare_table(study, "csv"))
    assert [float(r["steps_per_round"]) for r in found] == [3, 33]
    assert "steps/round" in report.compare_table(study).headers


def test_six_hundred_clients_are_listed_beside_the_page(tmp_path):
    write_comparison(tmp_path, {"local": [[0.5] * 600], "fedavg": [[0.6] * 600]}, rounds=1)
    page = report.write_report(tmp_path).read_text()
    assert 'href="report-clients.csv"' in page
    assert "client-300" not in page
    assert len((tmp_path / "report-clients.csv").read_text().splitlines()) == 601


def test_nearer_to_one_is_better(tmp_path):
    """A calibration slope: neither the highest nor the lowest wins, and a mean of 0.4 and 1.58 is no 1."""
    values = {
        "local": [[0.5, 0.4], [0.52, 0.41], [0.5, 0.42]],
        "fedavg": [[0.95, 1.04], [0.96, 1.03], [0.95, 1.05]],
        "fedprox": [[0.4, 1.58], [0.41, 1.58], [0.4, 1.57]],
    }
    study = report.read(write_comparison(tmp_path, values, metric="calibration-slope"))
    assert study.metric.better == "near:1"
    assert {v.choice for v in pairs.client_verdicts(study).values()} == {"fedavg"}
    assert pairs.mean_verdict(study).best == "fedavg"
    found = pairs.mean_gain(study, "fedavg", "local")
    assert found.mean == pytest.approx(np.mean([0.5 - 0.05, 0.6 - 0.04]), abs=0.02)
    table = report.compare_table(study)
    assert table.headers[1] == "calibration slope (1 is best)"
    assert [r[0].text for r in table.rows if r[1].mark == "best"] == ["fedavg"]
    worst = next(r for r in table.rows if r[0].text == "fedprox")[2].values["worst_mean"]
    assert worst == pytest.approx(np.mean([0.4, 0.41, 0.4]))
