"""Tables and the answer against numbers that were written into run folders."""

import csv
import io

import numpy as np
import pytest
from report_folders import noisy, write_comparison, write_run
from rich.table import Table as RichTable

from polyfed import report
from polyfed.base.errors import ConfigError, RunError
from polyfed.report import summary, words
from polyfed.report.table import Cell, Table

GAIN = {
    "local": [[0.70, 0.80, 0.90], [0.71, 0.79, 0.90], [0.70, 0.80, 0.89]],
    "fedavg": [[0.80, 0.80, 0.70], [0.82, 0.78, 0.71], [0.81, 0.81, 0.70]],
    "ditto": [[0.90, 0.81, 0.89], [0.92, 0.79, 0.91], [0.91, 0.79, 0.90]],
}


def rows(text):
    return list(csv.DictReader(io.StringIO(text)))


def comparison(folder, values, **how):
    return report.read(write_comparison(folder, values, **how))


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    how = {"names": ["A", "B", "C"], "samples": [2000] * 3, "test": [500] * 3}
    return comparison(tmp_path_factory.mktemp("study"), GAIN, **how)


def test_bytes_are_decimal_and_durations_short():
    sizes = {0: "0 B", 999: "999 B", 1000: "1.00 kB", 1e9: "1.00 GB", 999_999: "1.00 MB", 44.7e9: "44.7 GB"}
    assert {n: words.size(n) for n in sizes} == sizes
    times = {12.34: "12.3 s", 245: "4 min 05 s", 7980: "2 h 13 min", 3599.9: "1 h 00 min"}
    assert {s: words.duration(s) for s in times} == times


def test_compare_table_holds_mean_and_sample_std_over_seeds(study):
    found = {r["method"]: r for r in rows(report.compare_table(study).to("csv"))}
    assert float(found["local"]["accuracy_mean"]) == pytest.approx((0.8 + 0.8 + 2.39 / 3) / 3)
    assert float(found["local"]["accuracy_std"]) == pytest.approx((0.01 / 3) / 3**0.5)
    assert float(found["fedavg"]["worst_mean"]) == pytest.approx((0.70 + 0.71 + 0.70) / 3)
    assert float(found["fedavg"]["bytes_per_client"]) == 1e6
    assert float(found["local"]["bytes_per_client"]) == 0
    assert (found["fedavg"]["gain"], found["fedavg"]["lose"]) == ("1", "1")


def test_client_table_gives_each_client_its_verdict(study):
    found = {r["client"]: r for r in rows(report.client_table(study).to("csv"))}
    assert found["A"]["advice"] == "personalised (ditto)"
    assert found["B"]["advice"] == "no clear difference"
    assert found["C"]["advice"] == "own or ditto (fedavg loses)"
    of_the_answer = {x.name: x.verdict for x in summary.lines(study)[1]}
    assert {name: r["verdict"] for name, r in found.items()} == of_the_answer
    assert {r["gain_of"] for r in found.values()} == {study.verdicts.lead[0]}
    assert float(found["A"]["gain"]) == pytest.approx((0.2 + 0.21 + 0.21) / 3)
    assert float(found["A"]["samples"]) == 500


ANSWERS = {
    "federating hurts": (
        {"local": noisy([0.9] * 4, 3, 0.001, 1), "fedavg": noisy([0.5] * 4, 3, 0.001, 2)},
        ["Federating does not pay here"],
    ),
    "nothing is clear": (
        {"local": [[0.7, 0.8], [0.8, 0.7], [0.7, 0.7]], "fedavg": [[0.8, 0.7], [0.6, 0.9], [0.8, 0.65]]},
        ["No clear difference on average"],
    ),
    "one seed claims nothing": ({k: v[:1] for k, v in GAIN.items()}, ["", "no spread can be given", "hint"]),
    "no own models": (
        {k: GAIN[k] for k in ("fedavg", "ditto")}, ["Whether federating pays cannot be said", "'local'"]
    ),
    "a gain": (GAIN, ["", "ditto", "1.00 MB per client", "3 seeds"]),
}  # fmt: skip


@pytest.mark.parametrize(("values", "said"), ANSWERS.values(), ids=ANSWERS)
def test_the_answer(values, said, tmp_path):
    text = report.answer(comparison(tmp_path, values))
    assert text.startswith(said[0])
    assert all(word in text for word in said)


def test_diverged_runs_redrawn_partitions_and_steps_per_round_are_told(tmp_path):
    write_comparison(tmp_path / "a", {k: GAIN[k] for k in ("local", "fedavg")}, steps={"local": 3, "fedavg": 33})
    write_run(tmp_path / "a" / "runs" / "fedavg-seed2", [0.1] * 3, seed=2, status="diverged")
    study = report.read(tmp_path / "a")
    table = report.compare_table(study)
    assert "fedavg diverged" in report.answer(study)
    assert "diverged 1 of 3" in table.to("markdown")
    found = {r["method"]: r for r in rows(table.to("csv"))}
    assert found["fedavg"]["seeds"] == "2"
    assert {name: float(r["steps_per_round"]) for name, r in found.items()} == {"local": 3, "fedavg": 33}
    assert "steps/round" in table.headers
    values = {k: v[:2] for k, v in GAIN.items()}
    study = comparison(tmp_path / "b", values, samples=lambda seed: [100 + seed, 110, 120])
    assert study.redrawn
    assert "drawn anew" in report.client_table(study).to("markdown")


def test_clusters_are_scored_only_where_the_truth_is_known(tmp_path):
    values, found = {"fpfc": noisy([0.8] * 4, 2, 0.01, 0)}, {"fpfc": {"clusters": [1, 1, 0, 0]}}
    known = comparison(tmp_path / "a", values, clusters=[0, 0, 1, 1], report=found)
    assert rows(report.compare_table(known).to("csv"))[0]["ari"] == "1.0"
    unknown = comparison(tmp_path / "b", values, report=found)
    (row,) = rows(report.compare_table(unknown).to("csv"))
    assert row["clusters"] == "2.0"
    assert "ari" not in row


def test_a_hundred_clients_are_summarised(tmp_path):
    values = {"local": noisy([0.6] * 100, 10, 0.01, 0), "fedavg": noisy([0.7] * 99 + [0.3], 10, 0.01, 1)}
    study = comparison(tmp_path, values, samples=[4000] * 100, test=[1000] * 100)
    ends = rows(report.client_table(study).to("csv"))
    assert len(ends) == 10
    assert ends[-1]["client"] == "client-99"  # the largest gain comes first
    assert len(rows(report.client_table(study, every=True).to("csv"))) == 100
    summary = report.gain_table(study)
    (row,) = rows(summary.to("csv"))
    assert int(row["gain"]) + int(row["lose"]) + int(row["undecided"]) == 100
    assert (row["lose"], int(row["gain"]) > 80) == ("1", True)
    assert float(row["least"]) == pytest.approx(-0.3, abs=0.05)


def test_every_rendering_holds_every_row_in_order_of_the_result_and_escapes_hostile_text(study):
    for form in ("html", "markdown", "latex", "csv"):
        assert all(label in report.compare_table(study).to(form) for label in GAIN)
    assert isinstance(report.client_table(study).to("rich"), RichTable)
    for table in (report.compare_table(study), report.cost_table(study)):
        assert [r[0].text for r in table.rows] == ["ditto", "local", "fedavg"]
    gain = [r[2].key for r in report.client_table(study).rows]
    assert gain == sorted(gain, reverse=True)
    table = Table("t", ("client<",), ((Cell("<script>|$x_1%&"),),))
    assert "<script>" not in table.to("html") + table.to("markdown")
    assert r"\|" in table.to("markdown")
    assert r"$<$script$>$|\$x\_1\%\&" in table.to("latex")
    with pytest.raises(ConfigError, match="expected one of"):
        table.to("docx")


def test_no_cell_of_a_csv_is_a_formula(tmp_path):
    """Spreadsheets run text that begins with = + - @; numbers stay numbers."""
    names = ["=cmd|' /C calc'!A0", "+1", "-1", "@SUM(A1)"]
    study = comparison(tmp_path, {"local": [[0.5, 0.6, 0.7, 0.8]], "fedavg": [[0.6] * 4]}, names=names)
    found = rows(report.client_table(study, every=True).to("csv"))
    assert [r["client"] for r in found] == [f"'{n}" for n in names]
    assert [float(r["gain"]) for r in found] == pytest.approx([0.1, 0, -0.1, -0.2])


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
    study = comparison(tmp_path, values, metric="calibration-slope")
    assert study.metric.better == "near:1"
    assert {v.choice for v in study.verdicts.clients.values()} == {"fedavg"}
    assert study.verdicts.mean.best == "fedavg"
    found = study.verdicts.mean_gain("fedavg", "local")
    assert found.mean == pytest.approx(np.mean([0.5 - 0.05, 0.6 - 0.04]), abs=0.02)
    table = report.compare_table(study)
    assert table.headers[1] == "calibration slope: distance from 1"
    assert [r[0].text for r in table.rows if r[1].mark == "best"] == ["fedavg"]
    worst = next(r for r in table.rows if r[0].text == "fedprox")[2].values["worst_mean"]
    assert worst == pytest.approx(np.mean([0.6, 0.59, 0.6]))
    text = report.answer(study)
    assert "reaches a distance from 1 of 0.04 in test calibration slope against 0.54 of local" in text


def harmed(folder, sites=4):
    """ditto changes nothing; the common model gains 5 points everywhere but at the last client, where it loses 30."""
    own = np.full(sites, 0.7)
    common = own + np.where(np.arange(sites) < sites - 1, 0.05, -0.3)
    values = {
        "local": noisy(own, 10, 0.002, 0),
        "fedavg": noisy(common, 10, 0.002, 1),
        "ditto": noisy(own, 10, 0.002, 2),
    }
    return comparison(folder, values, samples=[4000] * sites, test=[1000] * sites)


def test_the_headline_is_short_the_details_say_whom_the_common_model_harms_and_lines_the_method_to_deploy(tmp_path):
    """ditto leads and changes nothing; where another method is clearly better, the line names it."""
    study = harmed(tmp_path)
    assert report.gain_table(study).rows[-1][0].text == "fedavg"
    head, rest = summary.headline(study), " ".join(summary.details(study))
    assert "One common model (fedavg) clearly harms 1 of 4 clients (client-3, \N{MINUS SIGN}30" in rest
    assert "helps 3" in rest
    assert (head.count(". "), "95 % interval" in head, len(head.split()) < 45) == (1, True, True), "can be read aloud"
    against, each = summary.lines(study)
    assert study.verdicts.lead == ("ditto", "local")
    assert "with ditto against each client's own model (local)" in against
    assert {line.name: line.verdict for line in each} == dict.fromkeys([f"client-{k}" for k in range(4)], "undecided")
    gains = study.verdicts.gains("ditto", "local")
    assert [line.name for line in each] == sorted(gains, key=lambda n: -gains[n].mean)
    texts = {line.name: line.text for line in each}
    assert all("; fedavg clearly gains +5." in texts[f"client-{k}"] for k in range(3))
    assert "; fedavg costs it 30" in texts["client-3"]


def test_equal_scores_are_called_so_where_more_may_be_worse(tmp_path):
    same = [[2.0, 3.0], [2.1, 3.2]]
    study = comparison(tmp_path, {"local": same, "fedavg": same}, metric="rmse", classes=None)
    _, each = summary.lines(study)
    assert all(line.text.startswith("no difference") for line in each)
    assert "0.000 better" not in report.answer(study)


def test_many_clients_are_those_that_gain_and_lose_and_a_count(tmp_path):
    study = harmed(tmp_path, 60)
    against, each = summary.lines(study)
    assert "with fedavg" in against
    assert len(each) <= 2 * summary.EACH + 1
    assert {line.name: line.verdict for line in each[:-1]}["client-59"] == "loses"
    assert {line.verdict for line in each[:-2]} == {"gains"}
    assert each[-1].name == f"{60 - len(each) + 1} more clients"


def test_signs_of_means_are_not_counted_as_verdicts(tmp_path):
    """One seed and no scores per sample: no interval, so nobody gains or loses."""
    study = comparison(tmp_path, {k: v[:1] for k, v in GAIN.items()})
    found = {r["method"]: r for r in rows(report.compare_table(study).to("csv"))}
    assert {(r["gain"], r["lose"]) for r in found.values()} == {("", "")}
    gains = rows(report.gain_table(study).to("csv"))
    assert {(r["gain"], r["lose"], r["undecided"]) for r in gains} == {("", "", "")}
    assert "better than alone" not in report.answer(study)


def test_quantiles_are_shown_where_there_are_clients_enough(tmp_path):
    for n in (19, 20):
        values = {"local": noisy([0.6] * n, 2, 0.01, 0), "fedavg": noisy([0.7] * n, 2, 0.01, 1)}
        headers = report.gain_table(comparison(tmp_path / str(n), values)).headers
        assert ("median, points" in headers) == (n == 20)
        assert {"least, points", "most, points"} <= set(headers)


def test_several_data_sets_make_one_table_for_a_paper(tmp_path):
    paper_table = pytest.importorskip("polyfed_papers.several").paper_table
    studies = []
    for k, metric in enumerate(("accuracy", "rmse")):
        values = {"local": noisy([0.6, 0.7], 3, 0.01, 0), "fedavg": noisy([0.9, 0.9], 3, 0.01, 1)}
        write_comparison(
            tmp_path / metric, values | ({"ditto": noisy([0.8] * 2, 3, 0.01, 2)} if k else {}), metric=metric
        )
        studies.append(report.read(tmp_path / metric))
    table = paper_table(studies)
    found = {r["method"]: r for r in rows(table.to("csv"))}
    for study, name in zip(studies, ("accuracy", "rmse"), strict=True):
        alone = {r["method"]: r for r in rows(report.compare_table(study).to("csv"))}
        for label, row in alone.items():
            for mine, theirs in ((f"{name}_mean", f"{name}_mean"), ("worst_mean", "worst_mean"), ("gain", "gain")):
                assert found[label][f"made, dirichlet:0.5, {name}: {mine}"] == row[theirs]
    assert found["ditto"]["made, dirichlet:0.5, accuracy: accuracy_mean"] == ""
    text = table.to("latex")
    assert r"\multicolumn{3}{c}{made, dirichlet:0.5, accuracy}" in text
    assert r"\cmidrule(lr){2-4} \cmidrule(lr){5-7}" in text
    assert text.count(r"\textbf") == 2  # the best of each data set
    widths = {line.count("&") for line in text.splitlines() if "&" in line and "multicolumn" not in line}
    assert widths == {6}
    with pytest.raises(RunError, match="different data sets"):
        paper_table(studies[:1] * 2)
