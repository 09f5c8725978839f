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
from polyfed.data.csv_files import sheet_of
from polyfed.data.preparation import Preparation
from polyfed.data.prepare import Cut
from polyfed.data.repairs import repaired
from polyfed.data.schema import File
from polyfed.runs.numbers import clustered

pytest.importorskip("polyfed_audit")  # has the table of units


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


# a whole table of repairs: what a messy folder holds is read in as the clean one's is, to the bit


def wards(seed, n=24):
    """Patients of five sites, in one spelling."""
    rng = np.random.default_rng(seed)
    return {
        site: pd.DataFrame({
            "age": rng.integers(30, 90, n), "sex": rng.choice(["m", "f"], n), "weight": rng.normal(75, 12, n).round(1),
            "height": rng.normal(1.7, 0.1, n).round(2), "hb": rng.normal(13, 1.5, n).round(1),
            "lactate": rng.gamma(3, 0.6, n).round(2) + 0.1, "sbp": rng.normal(130, 15, n).round(),
            "dbp": rng.normal(78, 9, n).round(), "days": rng.integers(2, 20, n) * 30.4375,
            "event": [*rng.integers(0, 2, n - 2), 0, 1],
        })
        for site in ("aarhus", "cork", "dijon", "faro", "gent")
    }  # fmt: skip


def mess(rows):
    """{site: bytes of its file} with a fault or two each, and {site: the repairs}."""

    def units(t):
        return t.assign(weight=t["weight"] / 0.45359237, days=t["days"] / 30.4375, hb=t["hb"] * 10)

    impossible = [rows["faro"].iloc[:1].assign(days=-14), rows["faro"].iloc[:1].assign(age=999, days=3)]
    german = rows["aarhus"].assign(sex=rows["aarhus"]["sex"].map({"m": "männlich", "f": "weiblich"}))
    swapped = rows["faro"].rename(columns={"sbp": "dbp", "dbp": "sbp"})[rows["faro"].columns]
    impossible = [t.rename(columns={"sbp": "dbp", "dbp": "sbp"}) for t in impossible]
    written = {
        "aarhus": b"\xef\xbb\xbf" + german.to_csv(index=False, sep=";", decimal=",").encode("latin-1"),
        "cork": rows["cork"].rename(columns={"hb": "haemoglobin (g/dl)"}),
        "dijon": units(rows["dijon"]).drop(columns="lactate").assign(event=rows["dijon"]["event"] + 1),
        "faro": pd.concat([impossible[0], swapped, impossible[1]]),
        "gent": rows["gent"].assign(sex=rows["gent"]["sex"].map({"m": 1, "f": 2})),
    }
    repairs = {
        "aarhus": {"encoding": "latin-1", "sex": {"männlich": "m", "weiblich": "f"}},
        "cork": {"rename": {"haemoglobin (g/dl)": "hb"}},
        "dijon": {
            "missing": ["lactate"], "weight": "lb -> kg", "days": "months -> days", "hb": "x / 10",
            "event": {"1": "0", "2": "1"},
        },
        "faro": {"rename": {"sbp": "dbp", "dbp": "sbp"}, "drop-rows": "days < 0 or age > 120"},
        "gent": {"sex": {"1": "m", "2": "f"}},
    }  # fmt: skip
    return {k: t if isinstance(t, bytes) else t.to_csv(index=False).encode() for k, t in written.items()}, repairs


@pytest.mark.parametrize("seed", range(3))
def test_a_repaired_folder_is_read_in_as_the_clean_one(seed, tmp_path):
    rows, every = wards(seed), {"*": {"bmi": "weight / height ** 2"}}
    files, repairs = mess(rows)
    rows["dijon"]["lactate"] = np.nan
    for folder, of in (("clean", {k: t.to_csv(index=False).encode() for k, t in rows.items()}), ("messy", files)):
        (tmp_path / folder).mkdir()
        for site, raw in of.items():
            (tmp_path / folder / f"{site}.csv").write_bytes(raw)
    given = {"task": "survival", "time": "days", "event": "event"}
    clean = pf.Federation.from_folder(tmp_path / "clean", site=every, **given)
    messy = pf.Federation.from_folder(tmp_path / "messy", site=every | repairs, **given)
    assert messy.meta["inputs"] == clean.meta["inputs"]
    assert "bmi" in messy.meta["inputs"]
    for mine, theirs in ((messy.train, clean.train), (messy.test, clean.test)):
        assert torch.equal(mine.y, theirs.y)
        assert torch.allclose(mine.x, theirs.x, rtol=0, atol=1e-6)
    assert "rows left out by drop-rows: faro 2" in messy.meta["notes"]
    assert "repaired at every site: bmi = weight / height ** 2" in messy.meta["notes"]
    columns = {k: Columns(target="event", site=every | more) for k, more in (("clean", {}), ("messy", repairs))}
    for site in rows:  # and over the network it says the same of its file
        mine, theirs = (
            File(tmp_path / k, site, c, Cut(0, 0.2, 0.0), least=3).schema()
            for k, c in ((f"{kind}/{site}.csv", of) for kind, of in columns.items())
        )
        assert mine == theirs, site
    back = Preparation.read(messy.meta["preparation"], "here")
    for site in rows:
        new = pd.read_csv(tmp_path / "messy" / f"{site}.csv", encoding="latin-1") if site != "aarhus" else rows[site]
        rest = rows[site] if site != "faro" else rows[site].iloc[[0, *range(len(rows[site])), 0]]
        mine = back.codes(back.repaired(sheet_of(new), site))
        theirs = back.codes(back.repaired(sheet_of(rest), "nobody"))
        kept = ~((mine == 999) | (theirs == 999)).any(1)
        assert mine[kept] == pytest.approx(theirs[kept], nan_ok=True), site


# what laboratories say of the same amount: two of a pair are equal
SAME = {
    "glucose": ("18.0156 mg/dl", "1 mmol/l"), "crea": ("1 mg/dl", "88.4 µmol/l"), "LDL": ("38.67 mg/dL", "1 mmol/L"),
    "trig": ("88.57 mg/dl", "1 mmol/l"), "bilirubin": ("1 mg/dl", "17.1 umol/l"), "urea": ("6.006 mg/dl", "1 mmol/l"),
    "uric acid": ("1 mg/dl", "59.48 µmol/l"), "calcium": ("4.008 mg/dl", "1 mmol/l"),
    "hba1c": ("6.5 %", "47.5 mmol/mol"),
    "haemoglobin": ("16.114 g/dl", "10 mmol/l"), "hb": ("140 g/l", "14 g/dl"), "lactate": ("9.01 mg/dl", "1 mmol/l"),
    "temp": ("98.6 °F", "37 °C"), "weight": ("220.462 lb", "100 kg"), "height": ("70 in", "177.8 cm"),
    "sbp": ("120 mmHg", "15.9987 kPa"), "time": ("1 years", "365.25 days"), "platelets": ("250 10^3/µl", "250 G/l"),
    "bz": ("180.156 mg/dl", "10 mmol/l of glucose"), "stay": ("2 weeks", "336 h"),
    "vitamin d": ("20 ng/ml", "50 nmol/l"),
}  # fmt: skip


@pytest.mark.parametrize("column", SAME)
def test_units_are_those_of_laboratories_both_ways(column):
    (a, one), (b, other) = (text.split(" ", 1) for text in SAME[column])
    there = arithmetic(f"{one} -> {other}", column)
    assert there.value(lambda _: float(a)) == pytest.approx(float(b), rel=2e-3)
    other, _, of = other.partition(" of ")
    back = arithmetic(f"{other} -> {one}{' of ' * bool(of)}{of}", column)
    assert back.value(lambda _: there.value(lambda _: 7.0)) == pytest.approx(7.0)


@pytest.mark.parametrize(
    ("text", "dropped"),
    [
        ("x < 0", [3]), ("not x < 0", [0, 1]), ("x != 1", [1, 3]), ("0 < x <= 1", [0]),
        ("w > 65 or sex == 'u'", [0, 1]),
        ("w > 65 and sex == 'm'", [0]), ("sex != 'm'", [1, 2]), ("sex == ''", [3]), ("`w` / 2 < 30 - x", [3]),
        ("not (x > 0 or w > 0)", []), ("w > 0 or x > 100", [0, 2, 3]),
    ],
)  # fmt: skip
def test_a_row_is_dropped_where_its_condition_surely_holds(text, dropped):
    """What a gap would decide is not sure: the row stays."""
    rows = pd.DataFrame({"x": [1, 2, np.nan, -3], "w": [70, np.nan, 60, 50], "sex": ["m", "u", "f", ""]})
    sheet = repaired(sheet_of(rows), {"a": {"drop-rows": text}}, "a", ())
    assert [k - 2 for k in sheet.lines] == [k for k in range(4) if k not in dropped]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"weight": "lb -> cm"}, "found 'lb -> cm', expected two units of one kind; lb is mass, cm length"),
        ({"weight": "kilo -> kg"}, "found the unit 'kilo'"),
        ({"nt": "mg/dl -> mmol/l"}, "whose molar mass is not known, expected of what at its end, as in mg/dl -> mm"),
        ({"drop-rows": "weight = 3"}, "found 'weight = 3', expected a condition on columns, such as time < 0"),
        ({"drop-rows": "weight < abs(3)"}, "expected a condition"),
        ({"rename": {"a": "c", "b": "c"}}, "expected a table of other names"),
        ({"missing": "lactate"}, "columns.site.gent.missing: found 'lactate', expected a list of columns"),
    ],
)
def test_a_repair_that_is_none_is_refused_before_a_file_is_read(table, said):
    with pytest.raises(ConfigError) as error:
        Columns(site={"gent": table})
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (
            {"rename": {"bp": "sbp"}},
            "no column 'bp', which columns.site renames (did you mean 'sbp'?)",
        ),
        ({"rename": {"sbp": "dbp"}}, "two columns are called 'dbp' after columns.site renames"),
        ({"missing": ["hb"]}, "has the column 'hb', which columns.site.gent.missing says it lacks"),
        ({"bmi": "weight / size ** 2"}, "no column 'size', of which columns.site computes 'bmi'"),
        ({"bmi": "weight / (hb - hb)"}, "column 'bmi': weight / (hb - hb) of"),
        ({"drop-rows": "Age < 0"}, "no column 'Age', which drop-rows = 'Age < 0' reads (did you mean 'age'?)"),
        ({"drop-rows": ["age < 0", "age >= 0"]}, "drop-rows = 'age >= 0' leaves no row"),
    ],
)
def test_a_repair_that_the_file_does_not_bear_is_named(table, said):
    with pytest.raises(DataError) as error:
        pf.data.from_frames(wards(0), "event", site={"gent": table})
    assert said in str(error.value)
