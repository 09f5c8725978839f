"""The outcome, an input or two columns coded otherwise at one site, and sites that can bear no verdict."""

import numpy as np
import pandas as pd
import pytest

import polyfed as pf
from polyfed.base.columns import Columns
from polyfed.data.csv_files import sheet_of
from polyfed.data.tables import surveyed
from polyfed_audit.findings import audit

SIZES = {"kiel": 160, "lyon": 90, "porto": 200, "turin": 60}


def hospitals(seed, sicker=(0.0, 0.0, 0.0, 0.0)):
    """Tables of sites of like or unlike patients; the outcome follows age, blood pressure and haemoglobin."""
    rng, tables = np.random.default_rng(seed), {}
    for (site, n), shift in zip(SIZES.items(), sicker, strict=True):
        z = rng.normal(shift, 1, (n, 4))
        age, sbp, hb = (62 + 12 * z[:, 0]).round(), (134 + 17 * z[:, 1]).round(), (13.4 - 1.5 * z[:, 2]).round(1)
        dbp, sex = (0.55 * sbp + 5 + 7 * z[:, 3]).round(), rng.choice(["f", "m"], n)
        risk = 0.9 * z[:, 0] + 0.6 * z[:, 1] + 0.7 * z[:, 2] + 1.6 * (sex == "m") - 1.5
        died = (risk + rng.logistic(size=n) > 0).astype(int)
        tables[site] = pd.DataFrame({"age": age, "sbp": sbp, "dbp": dbp, "hb": hb, "sex": sex, "died": died})
    return tables


def audited(tables):
    sheets = [sheet_of(table, site, site, [], None) for site, table in tables.items()]
    return audit(surveyed(sheets, Columns(target="died"), [])[0])


def flags(tables):
    return audited(tables).flags


@pytest.mark.parametrize("sicker", [(0, 0, 0, 0), (-0.6, 0, 0.3, 0.8)], ids=["like", "unlike"])
def test_clean_hospitals_are_left_alone(sicker):
    assert [str(f) for seed in range(12) for f in flags(hospitals(seed, sicker))] == []


@pytest.mark.parametrize("site", SIZES)
def test_an_outcome_that_is_turned_round_is_asked_about_by_name_with_its_repair(site):
    for seed in range(3):
        tables = hospitals(seed)
        tables[site]["died"] = 1 - tables[site]["died"]
        (flag,) = flags(tables)
        assert (flag.site, flag.column) == (site, "died")
        assert flag.repair == {"site": {site: {"died": {"0": "1", "1": "0"}}}}


def test_an_input_that_goes_the_other_way_at_one_site_is_named():
    tables = hospitals(0)
    tables["porto"]["sex"] = tables["porto"]["sex"].map({"f": "m", "m": "f"})
    tables["kiel"]["hb"] = (26.8 - tables["kiel"]["hb"]).round(1)
    found = {(f.site, f.column): f.repair for f in flags(tables)}
    assert found == {("porto", "sex"): {"site": {"porto": {"sex": {"f": "m", "m": "f"}}}}, ("kiel", "hb"): {}}


@pytest.mark.parametrize(("a", "b"), [("sbp", "dbp"), ("age", "sbp"), ("hb", "age")])
def test_exchanged_columns_are_named_with_their_repair_and_nothing_else_is(a, b):
    tables = hospitals(1)
    tables["lyon"] = tables["lyon"].rename(columns={a: b, b: a})
    (flag,) = flags(tables)
    assert flag.repair["site"]["lyon"]["rename"] == {flag.column: ({a, b} - {flag.column}).pop()} | {
        ({a, b} - {flag.column}).pop(): flag.column
    }


def test_a_site_of_one_class_is_flagged_and_what_chance_may_do_and_few_rows_are_said():
    tables = hospitals(2)
    tables["lyon"] = tables["lyon"].query("died == 0")
    tables["turin"] = tables["turin"].query("died == 1").head(6)
    found = audited(tables)
    (flag,) = found.flags
    assert str(flag).startswith("lyon: died is 0 in all")
    one, rows = map(str, found.facts)
    assert one.startswith("turin: died is 1 in all 6 rows")
    assert rows.startswith("turin: 6 rows")
    assert found.lines == [f"check before use: {flag}", one, rows]


def test_the_answer_asks_where_the_common_model_ranks_a_clients_rows_the_other_way_round(tmp_path):
    for seed, site in ((0, "kiel"), (1, None)):
        tables = hospitals(seed)
        if site:
            tables[site]["died"] = 1 - tables[site]["died"]
        fed = pf.data.from_frames(tables, "died", test_fraction=0.3)
        model = pf.models.build("linear", fed.input_shape, fed.outputs)
        methods = [pf.Local(lr=0.1), pf.FedAvg(lr=0.1)]
        pf.compare(model, fed, methods, seeds=1, rounds=30, out=tmp_path / f"{seed}", report=False)
        said = pf.report.answer(pf.report.read(tmp_path / f"{seed}"))
        assert said.count("Check the outcome of") == (site is not None)
        if site:
            assert '[columns.site.kiel] died = {0 = "1", 1 = "0"}' in said
