"""Faults of a folder as a list, columns under other names, and polyfed data repair, which writes what mends them."""

import tomllib

import numpy as np
import pandas as pd
import pytest

import polyfed as pf
from polyfed.base.columns import Columns
from polyfed.base.errors import DataError
from polyfed.data.repairs import read_all
from polyfed.data.tables import surveyed
from polyfed_audit.names import renames


def patients(seed, n=60):
    rng = np.random.default_rng(seed)
    return pd.DataFrame({
        "age": rng.integers(30, 90, n), "hb": rng.normal(13, 1.5, n).round(1), "lactate": rng.gamma(3, 0.6, n).round(2),
        "sex": rng.choice(["m", "f"], n), "admitted": rng.integers(0, 40, n) + 0.5, "days": rng.integers(1, 400, n),
        "died": [*rng.integers(0, 2, n - 2), 0, 1],
    })  # fmt: skip


SITES = ("aarhus", "basel", "cork", "dijon", "faro")
OUTCOME = {"task": "survival", "time": "days", "event": "died"}


@pytest.fixture
def folder(tmp_path):
    """Five sites, each with another fault, and what they hold without."""
    rows = {site: patients(seed) for seed, site in enumerate(SITES)}
    faulty = dict(rows)
    faulty["basel"] = rows["basel"].rename(columns={"hb": "haemoglobin", "sex": "gender"})
    faulty["cork"] = rows["cork"].drop(columns="lactate").assign(died=rows["cork"]["died"] + 1)
    faulty["dijon"] = pd.concat([rows["dijon"], rows["dijon"].iloc[:2].assign(days=[-14, -3])])
    (tmp_path / "sites").mkdir()
    for site, table in faulty.items():
        raw = table.to_csv(index=False, sep=";" if site == "aarhus" else ",")
        raw = raw.replace(";f;", ";weiblich – f;") if site == "aarhus" else raw
        (tmp_path / "sites" / f"{site}.csv").write_bytes(raw.encode("cp1252"))
    rows["aarhus"]["sex"] = rows["aarhus"]["sex"].replace("f", "weiblich – f")
    rows["cork"]["lactate"] = np.nan
    return tmp_path / "sites", rows


def test_every_fault_is_listed_by_file_and_none_hides_another(cli, folder):
    said = cli("data", "inspect", folder[0], *(w for k, v in OUTCOME.items() for w in ("--set", f"columns.{k}={v}")))
    said.line(1, f"{folder[0]}: 6 faults")
    lines = [line.rpartition("/")[2].removeprefix("  - ") for line in said.err.splitlines()[1:]]
    assert [line.partition(".csv")[0] for line in lines] == ["aarhus", "basel", "basel", "cork", "cork", "dijon"]
    for part in (
        'encoding = "cp1252"', 'rename = {haemoglobin = "hb"}', 'rename = {gender = "sex"}', 'missing = ["lactate"]',
        'died = {1 = "0", 2 = "1"}', '(2 of 62 rows); [columns.site.dijon] drop-rows = "days < 0"',
    ):  # fmt: skip
        assert sum(part in line for line in lines) == 1, part
    assert "admitted" not in said.err  # which is no lactate
    with pytest.raises(DataError) as error:
        pf.Federation.from_folder(folder[0], **OUTCOME)
    assert all(line in str(error.value) for line in lines)


def test_the_proposed_file_repairs_the_folder_and_touches_nothing(cli, folder, tmp_path):
    place, rows = folder
    before = {path: path.read_bytes() for path in place.iterdir()}
    words = [w for k, v in OUTCOME.items() for w in ("--set", f"columns.{k}={v}")]
    cli("data", "repair", place, "--out", "mine.toml", *words).done()
    text = (tmp_path / "mine.toml").read_text()
    assert "# basel.csv: no column 'hb' (did you mean 'haemoglobin'?)" in text
    assert {path: path.read_bytes() for path in place.iterdir()} == before
    table = tomllib.loads(text)
    assert table["data"] == {"name": "./sites"}
    site = table["columns"].pop("site")
    found = pf.Federation.from_folder(place, site=site, **table["columns"])
    expected = pf.data.from_frames(rows, **OUTCOME)
    assert found.meta["inputs"] == expected.meta["inputs"]
    assert (found.train.x == expected.train.x).all()
    assert (found.train.y == expected.train.y).all()
    cli("data", "repair", place, "--out", "mine.toml", *words).line(2, "mine.toml exists, and is not overwritten")
    assert "faults" not in cli("data", "inspect", "mine.toml").err
    cli("regress", "mine.toml", "--drop", "lactate,sex,admitted", "--out", "t.csv").done()
    assert [*pd.read_csv("t.csv")["coefficient"]] == ["age", "hb"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({"hb": "haemoglobin"}, "haemoglobin"),  # by name and values
        ({"hb": "hgb_gdl"}, "hgb_gdl"),
        ({"hb": "z17"}, "z17"),  # by values alone
        ({"hb": "z17", "x": 10}, None),  # by neither
        ({"hb": "Hb", "x": 10}, "Hb"),  # by its name, in another unit
        ({}, None),
    ],
)
def test_another_name_is_known_by_name_and_by_values(own, expected, seed, tmp_path):
    rows = {site: patients(10 * seed + k) for k, site in enumerate(SITES)}
    own = dict(own)
    factor = own.pop("x", 1)
    rows["faro"] = rows["faro"].assign(hb=rows["faro"]["hb"] * factor).rename(columns=own)
    rows["faro"] = rows["faro"] if own else rows["faro"].drop(columns="hb")
    for site, table in rows.items():
        table.to_csv(tmp_path / f"{site}.csv", index=False)
    sheets, faults = read_all(sorted(tmp_path.iterdir()), columns := Columns(target="died"))
    table, faults = surveyed(sheets, columns, faults)
    assert {key: name for key, (name, _) in renames(table).items()} == ({("faro", "hb"): expected} if expected else {})
    repair = {} if expected else {"missing": ["hb"]}
    assert {"site": {"faro": repair or {"rename": {expected: "hb"}}}} in [fault.repair for fault in faults]
