"""Repairs of a site's columns: units, codes, limits of detection, rows without a target, and patients kept together."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

import polyfed as pf
from polyfed.base.arithmetic import arithmetic
from polyfed.base.columns import Columns
from polyfed.base.errors import ConfigError, DataError
from polyfed.data.preparation import Preparation
from polyfed.data.prepare import Cut
from polyfed.runs.numbers import clustered


@pytest.mark.parametrize(
    ("text", "found"),
    [("x / 18.02", 1.0), ("(x - 32) / 1.8", (18.02 - 32) / 1.8), ("-x+2*3", 6 - 18.02), ("1e2*x", 1802.0)],
)
def test_arithmetic_of_a_unit(text, found):
    assert arithmetic(text).value(lambda _: np.array([18.02])) == pytest.approx([found])


@pytest.mark.parametrize(
    "text",
    ["", "5", "x ** 11", "x ** x", "x // 2", "abs(x)", "x.real", "x if x else 1", "__import__('os')", "x; x", "[x]",
     "x < 3", "lambda: x", "True * x", "'a' * x", "x" * 300],
)  # fmt: skip
def test_nothing_but_arithmetic_is_a_repair(text):
    with pytest.raises(ConfigError, match=r"columns.site.bern.glucose: found .*, expected arithmetic of x"):
        Columns(site={"bern": {"glucose": text}})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"site": {"bern": {"encoding": "latin-99"}}}, "columns.site.bern.encoding: found 'latin-99', expected an enc"),
        ({"site": {"bern": 3}}, "columns.site of Columns: found {'bern': 3}, expected a table for each site"),
        ({"missing_target": "drop"}, "expected refuse, or a target that is named"),
        ({"group": "y", "target": "y"}, "expected a column of its own"),
    ],
)
def test_settings_that_do_not_fit(given, said):
    with pytest.raises(ConfigError) as error:
        Columns(**given)
    assert said in str(error.value)


def hospitals(folder, n=40):
    """Two sites with the same patients, told in other words: mg/dl and German at the one, decimal commas too."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    glucose, sex = rng.normal(6, 1, n).round(2), rng.choice(["m", "f"], n)
    crp, ill = rng.gamma(2, 10, n).round(1), rng.integers(0, 2, n)
    one = pd.DataFrame({"pid": np.arange(n) // 2, "glucose": glucose, "sex": sex, "crp": crp, "ill": ill})
    one.to_csv(folder / "bern.csv", index=False)
    two = one.assign(glucose=(glucose * 18.02).round(4), sex=one["sex"].map({"m": "männlich", "f": "weiblich"}))
    two["crp"] = [f"{c:.1f}".replace(".", ",") if c >= 5 else "<5" for c in crp]
    two.to_csv(folder / "köln.csv", index=False, sep=";", decimal=",", encoding="latin-1")
    return one


REPAIRS = {"glucose": "x / 18.02", "sex": {"männlich": "m", "weiblich": "f"}, "encoding": "latin-1"}


def test_repaired_sites_are_alike(tmp_path):
    """What is written in other units, codes and bytes comes out the same, cell by cell; <5 is 5/√2."""
    one = hospitals(tmp_path / "h")
    given = {"target": "ill", "drop": ["pid"], "limits": ["crp"], "standardise": "none"}
    data = pf.data.load(tmp_path / "h", site={"köln": REPAIRS}, **given)
    first, second = data.x[data.groups == 0], data.x[data.groups == 1]
    assert data.meta["columns"] == ["glucose", "sex", "crp"]
    assert second[:, :2] == pytest.approx(first[:, :2], abs=1e-5)
    crp = one["crp"].to_numpy()
    assert second[:, 2] == pytest.approx(np.where(crp < 5, 5 / np.sqrt(2), crp))
    assert (crp < 5).any()
    assert any("repaired at köln: glucose = x / 18.02; sex = männlich -> m" in note for note in data.notes)


def test_a_prediction_takes_the_same_repair(tmp_path):
    hospitals(tmp_path / "h")
    fed = pf.Federation.from_folder(
        tmp_path / "h", target="ill", drop=["pid"], limits=["crp"], site={"köln": REPAIRS}, test_fraction=0.25
    )
    run = pf.fit(torch.nn.Linear(4, 2), fed, pf.FedAvg(lr=0.1), rounds=2, out=tmp_path / "run")
    about = run.export("köln", tmp_path / "köln.safetensors")[1]
    row = pd.DataFrame({"glucose": [108.12], "sex": ["männlich"], "crp": ["<5"]})
    plain = pd.DataFrame({"glucose": [6.0], "sex": ["m"], "crp": [5 / np.sqrt(2)]})
    here, there = run.predict("köln", row), run.predict("bern", plain)
    assert here["probability_1"].to_numpy() == pytest.approx(there["probability_1"].to_numpy(), abs=1e-6)
    other = json.loads(run.export("bern", tmp_path / "bern.safetensors")[1].read_text())
    assert "repairs" not in other["preparation"]  # no site's model says how another's cells are read
    known = json.loads(about.read_text())["preparation"]
    assert Preparation.read(known, "here").dump() == known
    with pytest.raises(DataError, match="its preparation is damaged"):
        Preparation.read(known | {"repairs": {"köln": {"glucose": "open('x')"}}}, "here")


@pytest.mark.parametrize(
    ("site", "said"),
    [
        ({"koln": {}}, r"columns.site: found repairs of 'koln', expected those of a site \(did you mean 'köln'\?\)"),
        ({"köln": REPAIRS | {"glukose": "x / 2"}}, r"no column 'glukose', which columns.site repairs \(did you mean"),
        ({"köln": REPAIRS | {"sex": {"man": "m"}}}, "column 'sex': no cell 'man', which columns.site repairs; found"),
        ({"köln": REPAIRS | {"glucose": "1 / (x - x)"}}, "1 / (x - x) of .* is no finite number"),
    ],
)
def test_a_repair_that_does_not_fit_is_named(tmp_path, site, said):
    hospitals(tmp_path / "h")
    said = said.replace("1 / (x - x)", r"1 / \(x - x\)")
    with pytest.raises((ConfigError, DataError), match=said):
        pf.data.load(tmp_path / "h", site=site, target="ill", limits=["crp"])


def test_rows_without_a_target_are_dropped_when_asked(tmp_path):
    one = hospitals(tmp_path / "h")
    one.assign(ill=[""] * 7 + ["1", "0"] * 16 + ["1"]).to_csv(tmp_path / "h" / "bern.csv", index=False)
    given = {"target": "ill", "limits": ["crp"], "site": {"köln": REPAIRS}}
    with pytest.raises(DataError, match="7 of 80 rows have none"):
        pf.data.load(tmp_path / "h", **given)
    data = pf.data.load(tmp_path / "h", missing_target="drop", **given)
    assert np.bincount(data.groups).tolist() == [33, 40]
    assert "rows without a target are left out: bern 7" in data.notes


def test_rows_of_one_patient_stay_together(tmp_path):
    """In the split of a folder, of every seed, and in that of a site over the network, which is the same."""
    one = hospitals(tmp_path / "h")
    given = {"target": "ill", "limits": ["crp"], "site": {"köln": REPAIRS}, "group": "pid"}
    data = pf.data.load(tmp_path / "h", **given)
    assert "pid" not in data.meta["columns"]
    for seed in range(3):
        fed = data.partition(seed=seed, test_fraction=0.3, validation_fraction=0.2)
        for i in range(2):
            parts = [fed.meta["split_indices"][key][i] % 40 for key in ("train", "validation", "test")]
            whose = [set(one["pid"].iloc[rows]) for rows in parts]
            assert sum(map(len, whose)) == 20
            assert len(whose[2]) == 6
        cut = Cut(seed, 0.3, 0.2).of(40, "bern", whose=one["pid"].to_numpy())
        assert {key: rows.tolist() for key, rows in cut.items()} == {
            key: rows[0].tolist() for key, rows in fed.meta["split_indices"].items()
        }
    with pytest.raises(DataError, match="would part rows of one group"):
        data.partition("iid", 3)


def test_rows_of_one_patient_count_as_one_in_the_intervals():
    """Terms of groups have the mean of the samples, and the variance of that of the distinct ones."""
    rng = np.random.default_rng(0)
    few = rng.normal(size=30)
    each, whose = np.repeat(few, 7), np.repeat(np.arange(30), 7)
    order = rng.permutation(210)
    ids = np.c_[np.arange(210), np.zeros(210, int)]
    found, terms = clustered(ids, each[order], whose[order])
    assert found[:, 0].tolist() == [*range(30)]
    assert terms == pytest.approx(few)
    uneven = rng.integers(0, 9, 50)
    values = rng.normal(size=50)
    _, terms = clustered(np.c_[np.arange(50), np.zeros(50, int)], values, uneven)
    assert terms.mean() == pytest.approx(values.mean())
    by_hand = sum((values[uneven == g] - values.mean()).sum() ** 2 for g in np.unique(uneven)) / 50**2
    assert ((terms - terms.mean()) ** 2).sum() / len(terms) ** 2 == pytest.approx(by_hand)
