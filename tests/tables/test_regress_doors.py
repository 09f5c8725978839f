"""polyfed regress: one table by every door, which is the fit of the same rows by statsmodels and lifelines."""

import sqlite3

import numpy as np
import pandas as pd
import pytest

from polyfed.base.columns import Columns
from polyfed.data.datasets import tables_at
from polyfed_clinical import command


def patients(n=240):
    rng = np.random.default_rng(5)
    age, dose = rng.integers(30, 90, n), rng.normal(size=n).round(3)
    days = (100 * rng.exponential(np.exp(-dose / 2)) + 1).round(6)  # fewer digits than the 16 of a workbook
    died = rng.random(n) < 1 / (1 + np.exp(-(age - 60) / 15 + dose))
    made = {"site": rng.choice(["east", "west", "north"], n), "age": age, "dose": dose, "days": days}
    table = pd.DataFrame(made).assign(died=died.astype(int))
    table.loc[rng.random(n) < 0.1, "dose"] = None
    return table


def doors(table, folder):
    """(place, settings of its columns) of each door."""
    (folder / "sites").mkdir()
    for name, rows in table.groupby("site"):
        rows.drop(columns="site").to_csv(folder / "sites" / f"{name}.csv", index=False)
    table.to_csv(folder / "t.csv", index=False)
    table.to_parquet(folder / "t.parquet")
    table.to_excel(folder / "t.xlsx", index=False)
    with sqlite3.connect(folder / "t.db") as database:
        table.to_sql("t", database, index=False)
    query = "select * from t where age > 0 and 'a:b' like '%:%'"
    one = [(f"t.{end}", {"by": "site"}) for end in ("csv", "parquet", "xlsx")]
    return [("sites", {}), *one, ("sqlite:///t.db", {"by": "site", "query": query})]


ROLES = {
    "logistic": ["--target", "died", "--drop", "days"],
    "cox": ["--model", "cox", "--time", "days", "--event", "died"],
}


@pytest.mark.parametrize("model", ROLES)
def test_every_door_gives_the_same_rows(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    given = dict.fromkeys(("target", "exposure", "time", "event"))
    given |= {"target": "died"} if model == "logistic" else {"time": "days", "event": "died"}
    read = []
    for place, columns in doors(patients(), tmp_path):
        paths, _ = tables_at(place, Columns())
        sites = command.tables(paths, model, given, None, {"columns": columns}, True, None)
        read.append(dict(zip(sites.names, sites.sites, strict=True)))
    for sites in read:
        assert sorted(sites) == ["east", "north", "west"]
        for name, (x, *targets) in sites.items():
            pd.testing.assert_frame_equal(x, read[0][name][0])
            assert all(map(np.array_equal, targets, read[0][name][1:]))


def test_a_door_is_statsmodels_and_lifelines(cli, tmp_path):
    whole = (table := patients()).dropna()
    table.to_parquet(tmp_path / "t.parquet")
    sm = pytest.importorskip("statsmodels.api", reason="statsmodels is not installed")
    design = pd.get_dummies(whole.site).astype(float).join(whole[["age", "dose"]])
    logit = sm.Logit(whole.died, design).fit(disp=0, method="newton", tol=1e-14)
    lifelines = pytest.importorskip("lifelines", reason="lifelines is not installed")
    how = {"strata": ["site"], "fit_options": {"precision": 1e-13}}
    cox = lifelines.CoxPHFitter().fit(whole, "days", "died", **how)
    expected = {"logistic": (logit.params, logit.bse), "cox": (cox.params_, cox.standard_errors_)}
    for model, (estimate, se) in expected.items():
        words = ("--site", "site", *ROLES[model], "--missing", "complete", "--out", "t.csv")
        cli("regress", "t.parquet", *words).done()
        found = pd.read_csv("t.csv", index_col=0)
        assert found.estimate.to_numpy() == pytest.approx(estimate[found.index].to_numpy(), rel=1e-8)
        assert found.se.to_numpy() == pytest.approx(se[found.index].to_numpy(), rel=1e-8)


def test_what_regress_cannot_read_is_one_line(cli, tmp_path):
    doors(patients(), tmp_path)
    for words, said in (
        (["t.parquet", "--site", "ward"], "no column 'ward', the sites"),
        (["t.parquet", "--query", "select 1"], "columns.query: has no effect on t.parquet"),
        (["sites", "--site", "age"], "columns.by: found 3 files, expected one table"),
        (["sqlite:///t.db", "--site", "site"], "columns.query: found none"),
        (["sqlite:///none.db", "--query", "select 1"], "sqlite:///none.db: no such file"),
        (["none.parquet"], "none.parquet"),
    ):
        refused = cli("regress", *words, "--target", "died")
        assert refused.status in (1, 2)
        assert said in refused.err, refused.err
        assert refused.err.strip().count("\n") == 0
    (tmp_path / "f.toml").write_text('data.name = "t.csv"\ncolumns = {by = "site", target = "died"}\n')
    for words in (["t.csv", "--site", "site"], ["f.toml"]):
        assert "out: t.csv is t.csv, which is read" in cli("regress", *words, "--out", "t.csv").err
