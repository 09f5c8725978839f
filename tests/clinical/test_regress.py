"""polyfed regress: from a folder, a data set or a run to a table."""

import numpy as np
import pandas as pd
import pytest

import polyfed as pf
import polyfed_clinical as clinical


@pytest.fixture
def folder(tmp_path):
    """Three sites; the columns of the last are in another order."""
    rng = np.random.default_rng(0)
    for k, n in enumerate((60, 80, 100)):
        x = rng.normal(size=(n, 2))
        table = pd.DataFrame(x, columns=["age", "dose"])
        table["days"] = np.ceil(20 * rng.exponential(np.exp(-x[:, 0])))
        table["died"] = rng.integers(0, 2, n)
        path = tmp_path / "sites" / f"s{k}.csv"
        path.parent.mkdir(exist_ok=True)
        table[table.columns[:: -1 if k == 2 else 1]].to_csv(path, index=False)
    return tmp_path / "sites"


def test_a_folder_gives_the_table_of_the_api(cli, folder, tmp_path):
    said = cli(
        "regress", folder, "--model", "cox", "--time", "days", "--event", "died", "--out", tmp_path / "t.csv"
    ).done()
    assert "hazard ratio" in said.out.replace("\n", " ") or "hazard" in said.out
    sites = [pd.read_csv(path) for path in sorted(folder.glob("*.csv"))]
    found = clinical.fit([(s[["age", "dose"]], s["days"], s["died"]) for s in sites], "cox")
    table = pd.read_csv(tmp_path / "t.csv", index_col=0)
    assert table["estimate"].to_numpy() == pytest.approx(found.coefficients["estimate"].to_numpy(), rel=1e-12)
    assert list(table.index) == ["age", "dose"]


def test_the_hospitals_and_a_run_of_them(cli, tmp_path):
    assert "3.75" in cli("regress", "heart-disease", "--intercepts", "common").out  # the odds ratio of men
    assert "4.05" in cli("regress", "heart-disease").out  # within hospitals
    fed = pf.data.load("heart-disease").partition()
    describe = {"data": {"name": "heart-disease"}}
    pf.fit(pf.models.build("linear", (10,), 2), fed, pf.Local(), rounds=1, out=tmp_path / "r", describe=describe)
    said = cli("regress", tmp_path / "r").done()
    assert f"{int(fed.train.counts.sum())} patients" in said.out


def test_what_is_modelled_and_what_categories_are_compared_with_is_said(cli, folder):
    for path in folder.glob("*.csv"):
        table = pd.read_csv(path)
        table["vital"] = np.where(table["died"] == 1, "dead", "alive")
        table["ward"] = ["icu", "medicine"] * (len(table) // 2)
        table.to_csv(path, index=False)
    said = cli("regress", folder, "--target", "vital", "--columns", "age,ward")
    assert said.out.count("target vital: dead, against alive; categories against ward=icu") == 1
    alone = cli("regress", folder, "--target", "died", "--columns", "age,ward")
    assert alone.out.splitlines()[3:7] == said.out.splitlines()[3:7]
    refused = cli("regress", folder, "--model", "cox", "--time", "days", "--event", "vital", "--columns", "age")
    assert "column 'vital': found 'alive', expected 1 (it happened) or 0 (censored)" in refused.err.replace(
        "dead", "alive"
    )


def test_clusters_units_and_splines_of_a_folder(cli, folder, tmp_path):
    """The rows of a patient, a column of texts that is no input; a row without a patient is left out."""
    for path in folder.glob("*.csv"):
        table = pd.read_csv(path)
        table.insert(0, "patient", [f"p{k // 2}" for k in range(len(table))])
        table.loc[3, "patient"] = ""
        table.to_csv(path, index=False)
    words = ("--target", "died", "--per", "dose=10", "--spline", "age=3", "--cluster", "patient")
    said = cli("regress", folder, *words, "--missing", "complete", "--drop", "days", "--out", tmp_path / "t.csv").done()
    sites = [pd.read_csv(path).drop(index=3) for path in sorted(folder.glob("*.csv"))]
    found = clinical.fit(
        [(s[["age", "dose"]], s["died"]) for s in sites],
        per={"dose": 10}, splines={"age": 3}, clusters=[s["patient"] for s in sites],
    )  # fmt: skip
    table = pd.read_csv(tmp_path / "t.csv", index_col=0)
    assert list(table.index) == ["age", "age'", "dose per 10"]
    assert table["se"].to_numpy() == pytest.approx(found.coefficients["se"].to_numpy(), rel=1e-9)
    assert "complete cases: 237 of 240 rows; left out: s0 1, s1 1, s2 1" in said.out
    assert "robust, 120 clusters" in said.out


def test_a_data_set_is_dealt_out_as_asked(cli):
    one = cli("regress", "heart-disease", "--partition", "iid", "--clients", "3", "--seed", "1")
    assert (one.status, one.err) == (0, "")
    assert "3 sites" in one.out
    other = cli("regress", "heart-disease", "--partition", "iid", "--clients", "3", "--seed", "2")
    assert one.out != other.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "cox"], "--time: missing"),
        (["--model", "cox", "--time", "day", "--event", "died"], "no column 'day' (did you mean 'days'?)"),
        (["--time", "days"], "--time: logistic takes target"),
        (["--model", "probit"], "model: found 'probit'"),
        (["--out", "t.pdf"], "--out"),
        (["--columns", "age,weight", "--target", "died"], "no column 'weight'"),
        (["--model", "poisson", "--target", "age"], "expected counts of 0 or more"),
        (["--model", "cox", "--time", "died", "--event", "died"], "column 'died': found in two roles"),
        (["--model", "poisson", "--target", "days", "--exposure", "days"], "column 'days': found in two roles"),
        (["--target", "died", "--columns", "age,died"], "column 'died': found in two roles"),
        (["--set", "rounds=3"], "rounds: regress takes columns.drop"),
        (["--set", "columns.missing=median"], "columns.missing: regress takes columns.drop"),
        (["--target", "died", "--per", "age"], "--per: found 'age', expected COLUMN=10 or =sd"),
        (["--target", "died", "--spline", "age=x"], "--spline: found 'age=x', expected COLUMN=4"),
        (["--target", "died", "--spline", "weight=3"], "splines: no column 'weight'"),
        (["--target", "died", "--intercepts", "sites"], "--intercepts: found 'sites' (did you mean 'site'?)"),
        (["--target", "died", "--missing", "impute"], "'--missing': 'impute'"),
        (["--target", "died", "--cluster", "patient"], "no column 'patient'"),
        (["--target", "died", "--seed", "3"], "--seed: of named data sets"),
        (["--drop", "dosis"], "no column 'dosis', which columns.drop names (did you mean 'dose'?)"),
    ],
)
def test_refused_in_one_line(cli, folder, words, said):
    cli("regress", folder, *words).line((1, 2), said)


def test_what_a_refusal_recommends_is_an_option(cli, folder):
    """The messages are those of `run`: what they name, typed here, is taken."""
    for path in folder.glob("*.csv"):
        table = pd.read_csv(path)
        table["crp"], table["note"] = ["<5", *["7"] * (len(table) - 1)], [f"n{k}" for k in range(len(table))]
        table.to_csv(path, index=False)
    refused = cli("regress", folder, "--target", "died", "--columns", "age,crp,note").err
    recommended = refused.rpartition(", or ")[2].split()
    assert recommended == ["--drop", "crp,note"]
    plain = cli("regress", folder, "--target", "died", "--columns", "age")
    found = cli("regress", folder, "--target", "died", "--columns", "age,crp,note", *recommended)
    assert (found.status, found.out) == (0, plain.out)
    said = cli("regress", folder, "--target", "died", "--drop", "note", "--set", 'columns.gaps=["<5"]')
    assert "found '<5', a gap (3 of 240 cells); --missing complete leaves such rows out" in said.err
    words = ("--target", "died", "--drop", "note", "--set", 'columns.gaps=["<5"]', "--missing", "complete")
    assert "complete cases: 237 of 240 rows; left out: s0 1, s1 1, s2 1" in cli("regress", folder, *words).out


def test_the_page_holds_ratios_headline_and_sites(cli, tmp_path):
    cli("regress", "heart-disease", "--out", tmp_path / "page.html").done()
    text = (tmp_path / "page.html").read_text()
    found = clinical.fit(pf.data.load("heart-disease", standardise=None).partition(test_fraction=0.0), "logistic")
    clear = found.coefficients
    clear = clear[(clear["lower"] > 0) | (clear["upper"] < 0)]
    assert f"{len(clear)} of 10 odds ratios differ from 1 at 95\N{NO-BREAK SPACE}%" in text
    assert all(f'<th scope="row" class="left" data-v="{site}">{site}</th>' in text for site in found.sites.index)
    assert "column chol is constant there" in text
    assert f'<template class="csv">{found.table().to("csv")}</template>' in text
    assert "<svg" in text
    (tmp_path / "file").touch()
    cli("regress", "heart-disease", "--out", tmp_path / "file/page.html").line(1)
