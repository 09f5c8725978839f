"""What columns are taken for, and how cells match: the same for a folder on one machine and for sites that say no more
than their schema."""

import gzip

import numpy as np
import pandas as pd
import pytest
from doors import settled

import polyfed as pf
from polyfed.base.columns import Columns
from polyfed.base.errors import ConfigError, DataError
from polyfed.data.csv_files import canonical, sheet_of, spelt
from polyfed.data.repairs import read

N = 12


def saved(folder, sites, sep=","):
    """A folder with a file per site. sites: name -> columns; ages and a target are added"""
    folder.mkdir(exist_ok=True)
    for k, (name, columns) in enumerate(sites.items()):
        table = pd.DataFrame(columns, dtype=str)
        table.insert(0, "age", [str(30 + (7 * i + k) % 40) for i in range(len(table))])
        if "y" not in table:
            table["y"] = ["ill", "well", "well", "ill"] * (len(table) // 4) + ["ill"] * (len(table) % 4)
        table.to_csv(folder / f"{name}.csv", index=False, sep=sep)
    return folder


def both(folder, **columns):
    """The federation of a folder, which that of its sites equals to the bit."""
    if next(folder.iterdir()).suffix == ".csv":
        columns = {"target": "y", "standardise": "client"} | columns
    fed = pf.data.load(folder, **columns).partition(seed=0)
    agreed, files = settled(folder, **columns)
    if agreed.preparation is not None:
        assert agreed.preparation.names == fed.meta["inputs"]
        assert list(agreed.preparation.labels or ()) == (fed.meta["preparation"]["labels"] or [])
    assert agreed.classes == fed.classes
    rows = (" twice?", "polyfed again (pip install .)")  # of an audit, or of its package that is not there
    assert agreed.notes == tuple(n for n in fed.notes if not n.endswith(rows))  # sites compare no rows
    for i, (name, file) in enumerate(files.items()):
        for part, split in file.prepared(agreed).items():
            x, y = getattr(fed, part).client(i)
            assert split.x.equal(x), (name, part)
            assert split.y.equal(y), (name, part)
    return fed


def kinds_refused(folder, said, **columns):
    """One line that holds `said`, locally and at sites."""
    for way in (pf.data.load, settled):
        with pytest.raises(DataError, match=said):
            way(folder, **columns)


def hot(fed, i, column, split="train"):
    """[N, values] the inputs of a category at a client."""
    at = [k for k, name in enumerate(fed.meta["inputs"]) if name.startswith(f"{column}=")]
    return getattr(fed, split).client(i)[0][:, at]


def test_plain_decimals_match_by_number_and_true_by_word():
    for texts in (("1", "1.0", "01", "+1", "1.", "1.00"), ("-0.5", "-00.50"), ("0", "-0.0", "+0"), ("TRUE", "True")):
        assert len({canonical(t) for t in texts}) == 1
    apart = [
        "1",
        "-1",
        "10",
        "0.1",
        "1e0",
        "1,0",
        "a",
        "A",
        "true",
        "0",
        *(str(12345678901234567890 + k) for k in (0, 1)),
    ]
    assert len({canonical(t) for t in apart}) == len(apart)
    assert spelt(["2.0", "01", "1.0", "+2", "True", "TRUE"]) == ["01", "+2", "TRUE"]


@pytest.mark.parametrize("categories", [["sex"], {"sex": ["1", "2"]}, {"sex": ["1.0", "2"]}])
def test_codes_of_categories_match_by_number(tmp_path, categories):
    codes = {"north": ["1", "2"] * 6, "south": ["1.0", "2.0"] * 6, "west": ["02", "+1"] * 6}
    fed = both(saved(tmp_path / "d", {name: {"sex": v} for name, v in codes.items()}), categories=categories)
    one = categories["sex"][0] if isinstance(categories, dict) else "1"
    assert fed.meta["inputs"] == ["age", f"sex={one}", "sex=2"]
    for i, values in enumerate(codes.values()):
        rows = np.concatenate([fed.meta["split_indices"][k][i] for k in ("train", "test")]) - N * i
        x = np.concatenate([hot(fed, i, "sex", k) for k in ("train", "test")])
        assert x.tolist() == [[float(float(values[r]) == 1), float(float(values[r]) == 2)] for r in rows]
    assert not any("declared values" in note for note in fed.notes)


def test_codes_that_one_site_writes_in_two_ways_are_noted_and_told_apart_where_listed(tmp_path):
    folder = saved(tmp_path / "d", {"a": {"code": ["1.1", "1.10", "2.1"] * 4}, "b": {"code": ["1.1", "2.1"] * 6}})
    note = "values of code that a site writes in several ways (as 1 and 1.0) are taken for one"
    fed = both(folder, categories=["code"])
    assert fed.meta["inputs"] == ["age", "code=1.1", "code=2.1"]
    assert note in fed.notes
    fed = both(folder, categories={"code": ["1.1", "1.10", "2.1"]})
    assert fed.meta["inputs"] == ["age", "code=1.1", "code=1.10", "code=2.1"]
    assert note not in fed.notes


def test_decimal_commas_match_points(tmp_path):
    for name, sep, a, b in (("north", ",", "1.5", "2"), ("south", ";", "1,50", "2,0"), ("west", "\t", "1,5", "2")):
        saved(tmp_path / "d", {name: {"dose": [a, b] * 6, "w": ["0.5" if sep == "," else "0,5", "1"] * 6}}, sep)
    for categories in (["dose"], {"dose": ["1.5", "2"]}):
        fed = both(tmp_path / "d", categories=categories)
        assert fed.meta["inputs"] == ["age", "w", "dose=1.5", "dose=2"]
        assert all((hot(fed, i, "dose").sum(1) == 1).all() for i in range(3))
    assert fed.train.x[:, 1].isfinite().all()


def test_gaps_match_by_number(tmp_path):
    lab = {name: {"crp": ["5", "6.5", gap, "7", "8", "9"] * 2} for name, gap in (("a", "-999"), ("b", "-999.0"))}
    fed = both(saved(tmp_path / "d", lab), gaps=["-999"])
    assert fed.meta["inputs"] == ["age", "crp", "crp missing"]
    assert fed.meta["preparation"]["sites"]["b"]["fill"][1] < 10
    assert "4 of 48 cells are missing (crp)" in " ".join(fed.notes)


def test_true_and_false_are_classes_whatever_their_case_and_events_match_by_number(tmp_path):
    folder = saved(tmp_path / "d", {"a": {"y": ["TRUE", "FALSE"] * 6}, "b": {"y": ["True", "False"] * 6}})
    assert both(folder).meta["preparation"]["labels"] == ["FALSE", "TRUE"]
    folder = saved(tmp_path / "e", {"a": {"t": [*"123456" * 2], "y": ["2", "1.0"] * 6}})
    fed = pf.data.load(folder, task="survival", time="t", event="y", labels=["1", "2"]).partition("iid", 2)
    assert set(fed.train.y[:, 1].tolist()) == {0.0, 1.0}


def test_cells_that_no_declared_value_matches_are_counted(tmp_path):
    folder = saved(tmp_path / "d", {"a": {"ward": ["x", "y"] * 6}, "b": {"ward": ["X", "y", "z", ""] * 3}})
    fed = both(folder, categories={"ward": ["x", "y"]})
    assert "cells that match none of the declared values: ward 6 of 24" in fed.notes


@pytest.fixture
def run(tmp_path):
    """Of a federation whose cells pandas reads as booleans and integers."""
    columns = {"smoker": ["TRUE", "FALSE", "TRUE"] * 4, "ward": ["01", "02", "03", "02"] * 3}
    folder = saved(tmp_path / "d", dict.fromkeys("ab", columns))
    fed = pf.data.load(folder, categories=["ward"]).partition(seed=0)
    return pf.fit(pf.models.build("linear", fed.input_shape, 2), fed, pf.FedAvg(lr=0.1), rounds=2)


def test_a_frame_that_pandas_retyped_is_predicted_as_its_file(run, tmp_path, recwarn):
    raw = pd.read_csv(tmp_path / "d" / "a.csv").drop(columns="y")
    assert (raw["smoker"].dtype, raw["ward"].dtype.kind) == (bool, "i")
    found = [run.predict("a", frame) for frame in (raw, pd.read_csv(tmp_path / "d" / "a.csv", dtype=str))]
    pd.testing.assert_frame_equal(*found)
    assert not recwarn.list


def test_predictions_in_python_warn_of_gaps_and_unseen_categories_once(run):
    rows = pd.DataFrame({"age": [50, None], "smoker": [True, False], "ward": [1, 9]})
    with pytest.warns(UserWarning, match="training") as said:
        run.predict("a", rows)
    assert [str(w.message) for w in said] == [
        "age: 1 of 2 are missing, filled with the training median; training rows had none there",
        "ward: 1 of 2 rows are outside the known values: no training row had 9; taken for none of the known values",
    ]


def test_two_columns_of_one_name_are_refused_and_numbers_written_out_as_far_as_they_are_exact(run, refused):
    rows = pd.DataFrame([[50, 51, True, 1]], columns=["age", "age", "smoker", "ward"])
    with refused("rows: two columns are called 'age'"):
        run.predict("a", rows)
    found = sheet_of(pd.DataFrame({"a": [1e-5, 2.0, 1e16, 0.1]})).columns["a"]
    assert found == ["0.00001", "2", "1e+16", "0.1"]


@pytest.mark.parametrize("codes", [("2", "4"), ("10", "20"), ("-1", "1"), ("1", "2"), ("2.0", "4")])
def test_two_codes_are_two_classes_where_the_task_is_binary(tmp_path, codes):
    folder = saved(tmp_path / "d", {name: {"y": [*codes, codes[1]] * 4} for name in "ab"})
    fed = both(folder, task="binary")
    assert fed.classes == 2
    assert fed.meta["preparation"]["labels"] == [f"{float(c):g}" for c in codes]
    assert fed.train.y.float().mean() + fed.test.y.float().mean() > 1


def test_two_labels_of_arrays_are_two_classes_where_the_task_is_binary(tmp_path):
    for name in "ab":
        np.savez(tmp_path / f"{name}.npz", x=np.eye(6), y=np.array([2, 4] * 3))
    fed = both(tmp_path, task="binary")
    assert (fed.classes, fed.meta["labels"]) == (2, [2, 4])
    np.savez(tmp_path / "b.npz", x=np.eye(6), y=np.array([2, 4, 7] * 2))
    kinds_refused(tmp_path, "found 3 different labels, from 2 to 7, expected two", task="binary")


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"task": "binary", "labels": ["ill", "well", "dead"]}, r"columns\.labels.*expected two, for task = binary"),
        ({"task": "binary", "classes": 3}, r"columns\.classes.*expected 2 or none, for task = binary"),
        ({"labels": ["ill", "well"], "classes": 3}, r"columns\.classes.*expected 2, as many as labels"),
    ],
)
def test_numbers_of_classes_that_contradict_each_other_are_refused(columns, said):
    with pytest.raises(ConfigError, match=said):
        Columns(**columns)


def test_a_number_of_classes_that_texts_contradict_is_refused(tmp_path):
    folder = saved(tmp_path / "d", {name: {"w": ["a", "b", "b"] * 4} for name in "ab"})
    kinds_refused(folder, r"target 'y': found 2 classes \(ill, well\), expected 3", classes=3)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (["<5"] * 8 + ["7", "9", "12", "15"], "numbers and texts .*texts that stand for a gap in gaps, or the column"),
        (["4,25", "5,5", "6,1"] * 4, "numbers in another notation than 1.5 .*write them so, or name the column in cat"),
        (["1,200", "980 000", "none"] * 4, "numbers in another notation"),
        (["5%", "10 %", "12.5%"] * 4, "numbers in another notation"),
        (["<5", "≥ 10", "~7"] * 4, "numbers in another notation"),
        ([f"1,{100 + i}" for i in range(N)], "numbers in another notation"),
        (["20240314", "19990101", "20010228"] * 4, "dates"),
        (["2024-03", "2023-12", "2024-1"] * 4, "dates"),
        (["1 Mar 2024", "14-Mar-24", "Mar 2024"] * 4, "dates"),
        (["March 14, 2024", "14 march 2024", "2024-03-14"] * 4, "dates"),
        (["20240314", "2024-03-15", "Sept 2023"] * 4, "dates"),
    ],
)
def test_columns_that_would_be_misread_are_refused(tmp_path, values, said):
    folder = saved(tmp_path / "d", {name: {"c": values} for name in "ab"})
    kinds_refused(folder, f"column 'c' holds {said}")
    assert both(folder, categories={"c": sorted(set(values))}).n == 2


@pytest.mark.parametrize(
    "values",
    [
        ["<5", "negative"] * 6,
        ["0-5", "5-10", "10-15"] * 4,
        ["1+", "2+", "3a"] * 4,
        ["Marathon 2024", "Mayor 24", "May"] * 4,
        ["E11.9", "I10", "I10.0"] * 4,
    ],
)
def test_categories_that_look_a_little_like_numbers_or_dates_stay(tmp_path, values):
    fed = both(saved(tmp_path / "d", {name: {"c": values} for name in "ab"}))
    assert fed.meta["inputs"] == ["age", *(f"c={v}" for v in sorted(set(values)))]


@pytest.mark.parametrize(
    ("values", "columns", "inputs"),
    [
        (["20240314", "19990101", "20010228"] * 4, {"numbers": ["c"]}, ["age", "c"]),
        (["20240314", "19990101", "20240230"] * 4, {}, ["age", "c"]),
        (["20240314", "20240315", "18991231"] * 4, {}, ["age", "c"]),
        (["2024.03", "2023.12", "2024.01"] * 4, {}, ["age", "c"]),
        (["20240314"] * N, {}, ["age"]),  # a constant
    ],
)
def test_numbers_that_are_no_dates_stay(tmp_path, values, columns, inputs):
    folder = saved(tmp_path / "d", {name: {"c": values} for name in "ab"})
    assert both(folder, **columns).meta["inputs"] == inputs


def test_texts_that_are_all_different_at_every_site_identify_rows(tmp_path):
    """Also where the same ones occur at other sites, and where there are few of them."""
    patients = [f"P{i:03d}" for i in range(15)]
    folder = saved(tmp_path / "d", {name: {"patient": patients} for name in "abc"})
    fed = both(folder)
    assert fed.meta["inputs"] == ["age"]
    assert any("patient is left out" in note for note in fed.notes)
    wards = saved(tmp_path / "few", {name: {"ward": ["x", "y", "z", "w"]} for name in "abc"})
    assert pf.data.load(wards).partition(seed=0).meta["inputs"][1:] == [f"ward={v}" for v in "wxyz"]


@pytest.mark.parametrize("name", ["south.tsv", "south.TAB", "south.csv.gz", "south.ods", "south.feather", "south.sav"])
@pytest.mark.parametrize("way", [pf.data.load, pf.Federation.from_folder])
def test_files_of_data_that_would_be_passed_over_are_named(tmp_path, refused, name, way):
    folder = saved(tmp_path / "d", {"north": {"w": ["a", "b"] * 6}})
    for other in ("notes.txt", "README.md", "about.json", "study.toml", f".{name}"):
        (folder / other).write_text("x")
    assert way(folder)
    (folder / name).write_bytes(gzip.compress(b"a,y\n1,0\n"))
    with refused(f"{folder}: found {name}, expected each site's file as .csv", "tabs", ".npz", "from_frames"):
        way(folder)


def test_one_file_in_a_format_that_is_not_read_is_refused_with_the_way_in(tmp_path, refused):
    file = tmp_path / "north.feather"
    file.write_bytes(b"PAR1\x15\xffPAR1")
    ways = (pf.data.load, lambda f: pf.Federation.from_files([f]), lambda f: pf.data.load(f, target="y"), read)
    for way in ways:
        with refused(
            f"{file}: expected a file ending in .csv, .parquet, .xlsx or .npz; in Python, pf.data.from_frames takes"
        ):
            way(file)


def test_a_folder_with_both_kinds_of_files_is_refused(tmp_path, refused):
    folder = saved(tmp_path / "d", {"north": {"w": ["a", "b"] * 6}})
    np.savez(folder / "south.npz", x=np.eye(4), y=np.arange(4) % 2)
    with refused("found north.csv and south.npz, expected tables alone or npz files alone"):
        pf.data.load(folder)


def test_leaving_out_every_file_is_refused(tmp_path, refused):
    folder = saved(tmp_path / "d", {name: {"w": ["a", "b"] * 6} for name in "ab"})
    with refused(f"{folder}: every client is left out, expected at least one to stay"):
        pf.data.load(folder, without=["a", "b"])


@pytest.mark.parametrize("columns", [{"target": "nonsense"}, {"labels": ["a", "b"]}, {"weights": "w"}])
def test_files_of_arrays_have_no_columns(tmp_path, refused, columns):
    for name in "ab":
        np.savez(tmp_path / f"{name}.npz", x=np.eye(4), y=np.arange(4) % 2)
    with pytest.raises(ConfigError, match=rf"columns\.{next(iter(columns))}: .* holds arrays"):
        pf.data.load(tmp_path, **columns)
    with refused(f"columns.{next(iter(columns))}", "expected none for npz files at sites"):
        settled(tmp_path, **columns)
    with refused("target: found 'nonsense', expected none for npz files"):
        pf.Federation.from_folder(tmp_path, target="nonsense")


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1", "utf-16", "utf-16-le", "utf-8-sig"])
def test_a_file_in_another_encoding_is_the_file_in_utf_8(tmp_path, refused, encoding):
    columns = {"münze": ["groß", "klein", "höher"] * 4}
    plain = both(saved(tmp_path / "plain", dict.fromkeys("ab", columns)))
    folder = saved(tmp_path / "d", dict.fromkeys("ab", columns))
    text = (folder / "b.csv").read_text(encoding="utf-8")
    (folder / "b.csv").write_bytes(text.encode(encoding))
    if encoding != "utf-8-sig":
        for way in (pf.data.load, settled):
            with refused("b.csv: "):
                way(folder, target="y")
    fed = both(folder, encoding=encoding)
    assert fed.meta["inputs"] == plain.meta["inputs"]
    assert fed.train.x.equal(plain.train.x)


@pytest.mark.parametrize("name", ["utf-99", "zlib", "rot13", "", "cp1252\0"])
def test_names_of_no_text_encoding_are_refused(name):
    with pytest.raises(ConfigError, match=r"columns\.encoding"):
        Columns(encoding=name)
