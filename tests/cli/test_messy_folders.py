"""Folders of CSV files as hospitals have them: from folder to report and prediction without Python, and what wrong
folders are told."""

import shutil
import tomllib

import numpy as np
import pandas as pd
import pytest
from messy import admissions, clinic, patients, write

import polyfed as pf
from polyfed.cli import call

SHORT = ("--rounds", 3, "--batch-size", "full", "--local-steps", 5, "--seeds", 1, "--quiet")


def ran(cli, folder, *words):
    return cli("run", "--data", folder, "--algorithm", "fedavg", *SHORT, *words).done()


@pytest.mark.parametrize("make", [clinic, admissions])
def test_from_folder_to_report_and_prediction(cli, tmp_path, make):
    name = make.__name__
    words = make(tmp_path / name)
    assert cli("data", "inspect", name, *words).status == 0
    said = ran(cli, name, *words, "--out", "run")
    assert "standardised" in said.out
    assert (tmp_path / "run" / "report.html").is_file()
    clients = pd.read_csv(tmp_path / "run" / "clients.csv")
    site = clients["client"][0]
    assert cli("export", "run", "--client", site).status == 0
    cli("predict", f"{site}.safetensors", f"{name}/{site}.csv", "--out", "p.csv").done()
    rows, raw = pd.read_csv(tmp_path / "p.csv"), pd.read_csv(tmp_path / name / f"{site}.csv")
    assert len(rows) == len(raw)
    # the rows that were held out get the score that the run reports for them
    fed = pf.Run.open(tmp_path / "run").federation
    target = fed.meta["preparation"]["target"]
    at = np.asarray(fed.meta["split_indices"]["test"][0])
    right = rows["prediction"].astype(str) == raw[target].astype(str)
    assert right[at].mean() == pytest.approx(clients["test_accuracy"][0], abs=1e-6)
    assert rows.filter(like="probability_").to_numpy().sum(1) == pytest.approx(1.0)
    assert [f"probability_{v}" for v in fed.meta["preparation"]["labels"]] == [*rows.columns[2:]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run on the first folder, which stays as it is."""
    place = tmp_path_factory.mktemp("finished")
    words = ["--data", place / "clinic", *clinic(place / "clinic"), "--out", place / "run", "--algorithm", "fedavg"]
    assert call([str(w) for w in (*("run", *words), *SHORT, "--set", "class-weights={ill=2,well=1}")]) == 0
    return place


def test_an_exported_model_predicts_what_the_run_does(cli, finished, tmp_path):
    raw = pd.read_csv(finished / "clinic" / "south.csv").drop(columns="outcome")
    run = pf.Run.open(finished / "run")
    path, _ = run.export("south", tmp_path / "south.safetensors")
    found = pf.Predictor.open(path).predict(raw[raw.columns[::-1]])
    pd.testing.assert_frame_equal(found, run.predict("south", raw))
    said = cli("predict", finished / "run", finished / "clinic" / "south.csv", "--client", 1)
    assert said.out.splitlines()[0] == ",".join(found.columns)
    assert "are missing, filled with the training median" in said.err


def test_the_settings_are_part_of_the_run(cli, finished, tmp_path):
    shutil.copytree(finished / "run", tmp_path / "run")
    config = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert config["columns"] == {"target": "outcome"}
    assert config["class-weights"] == {"ill": 2, "well": 1}
    before = (tmp_path / "run" / "federation.json").read_bytes()
    assert b"the loss weighs classes by" in before
    assert cli("verify", "run").status == 0
    assert cli("resume", "run", "--rounds", 4, "--quiet").status == 0
    assert (tmp_path / "run" / "federation.json").read_bytes() == before


def test_a_newcomer_brings_raw_rows(finished, tmp_path):
    pytest.importorskip("polyfed_members")
    (tmp_path / "east.csv").write_bytes((finished / "clinic" / "west.csv").read_bytes())
    run = pf.Run.open(finished / "run")
    new, old = run.newcomers(tmp_path / "east.csv"), run.federation
    both = [np.sort(np.concatenate([f.train.client(i)[0], f.test.client(i)[0]]), 0) for f, i in ((new, 0), (old, 2))]
    assert both[0] == pytest.approx(both[1])
    assert run.admit(new, exchanges=1).table["client"].tolist() == ["east", "east"]


def test_what_data_inspect_says_of_columns(cli, tmp_path):
    admissions(tmp_path / "a")
    said = cli("data", "inspect", "a")
    first = said.out.partition("\n\n")[0]  # before every site by itself
    lines = [line.split() for line in first.splitlines() if line and not line[0].isspace()]
    kinds = {
        "age": "number", "ward": "category", "sex": "category", "patient": "identifier", "admitted": "date",
        "remark": "text", "study": "constant", "died": "binary",
    }  # fmt: skip
    assert kinds.items() <= {line[0]: line[1] for line in lines if len(line) > 1}.items()
    said.line(1)
    assert "drop = [" in said.err
    assert "--drop admitted,remark" in said.err
    assert "left out" in next(line for line in first.splitlines() if line.startswith("patient"))


ROWS = [{"age": str(30 + 5 * i), "ward": WARD, "y": str(i % 2)} for i, WARD in enumerate(["a", "b"] * 6)]


def changed(**columns):
    return [row | {k: v[i] if isinstance(v, list) else v for k, v in columns.items()} for i, row in enumerate(ROWS)]


def without(name):
    return [{k: v for k, v in row.items() if k != name} for row in ROWS]


@pytest.mark.parametrize(
    ("rows", "words", "said"),
    [
        (without("age"), (), "two.csv: no column 'age', which one.csv has; add it there (empty cells are gaps), or"),
        (changed(more=list("abc" * 4)), (), "one.csv: no column 'more', which two.csv has"),
        (changed(age=["<5"] + ["7"] * 11), (), "'age' holds numbers and texts ('<5' in d/two.csv, line 2)"),
        (changed(age="old"), (), "('old' in d/two.csv, line 2), name texts that stand for a gap in gaps, or the"),
        (changed(y=[""] + ["1"] * 11), (), "d/two.csv, line 2, column 'y': found '', expected a target (1 of 24 rows"),
        (changed(y=[""] + ["1"] * 11), (), "leave them out); name another column with --target"),
        ([{"Age" if k == "age" else k: v for k, v in row.items()} for row in ROWS], (),
         "two.csv: no column 'age' (did you mean 'Age'?), which one.csv has"),
        (without("y"), (), "d/two.csv: no column 'y', the target; it has age, ward"),
        (ROWS, ("--target", "wart"), "no column 'wart', which columns.target names (did you mean 'ward'?)"),
        (ROWS, ("--drop", "war"), "no column 'war', which columns.drop names (did you mean 'ward'?)"),
        (ROWS, ("--drop", "age,ward"), "found no column to learn from"),
        (ROWS, ("--drop", "y", "--target", "y"), "columns.drop: found 'y', which columns.target names too"),
        (ROWS, ("--set", "columns.missing=medan"), "columns.missing: found 'medan' (did you mean 'median'?), expected"),
        (ROWS, ("--set", "columns.targets=y"), "columns.targets: unknown key (did you mean 'target'?)"),
        (ROWS, ("--standardise", "pool"), "columns.standardise: found 'pool' (did you mean 'pooled'?), expected"),
        (ROWS, ("--set", "columns.task=survival"), "columns.time: found None, expected a column, for task = survival"),
        (ROWS, ("--set", 'columns.labels=["0","2"]'), "d/one.csv, line 3, column 'y': found '1', expected one of 0, 2"),
        (ROWS, ("--set", 'columns.numbers=["ward"]'), "'ward' holds numbers and texts ('a' in d/one.csv, line 2)"),
        (changed(y=[str(i % 3) for i in range(12)]), ("--set", "columns.task=binary"), "'y': found 3 different values"),
        (changed(ward=["", *"ab" * 5, "a"]), ("--set", "columns.missing=refuse"),
         "d/two.csv, line 2, column 'ward': found '', a gap (1 of 24 cells); missing = \"median\" fills gaps"),
        (changed(y=[f"2021-01-{i + 1:02d}" for i in range(12)]), (), "target 'y' holds"),
        (ROWS, ("--weights", "y", "--target", "y"), "columns.weights: found 'y', expected another column than"),
        (ROWS, ("--weights", "wight"), "no column 'wight', which columns.weights names"),
        (ROWS, ("--weights", "ward"), "d/one.csv, line 2, column 'ward': found 'a', expected a weight of 0 or more"),
        (changed(w="-1"), ("--weights", "w"), "d/one.csv: no column 'w', the weights; it has age, ward, y"),
        (ROWS, ("--set", 'columns.categories={ward=["a"]}', "--set", "columns.unseen=refuse"),
         "d/one.csv, line 3, column 'ward': found 'b', expected one of a"),
    ],
)  # fmt: skip
def test_what_a_wrong_folder_is_told(cli, tmp_path, rows, words, said):
    if "add it there" in said:  # which the audit's package proposes
        pytest.importorskip("polyfed_audit")
    write(tmp_path / "d" / "one.csv", ROWS)
    write(tmp_path / "d" / "two.csv", rows)
    cli("data", "inspect", "d", *words).line((1, 2), said)


@pytest.mark.parametrize("value", ["yes", "1", "0"])
def test_a_target_with_one_value_everywhere_is_named(cli, tmp_path, value):
    for name in ("one", "two"):
        write(tmp_path / "d" / f"{name}.csv", changed(y=value))
    expected = f"d: target 'y': found {value} in every row of every file, expected two classes or more"
    assert cli("run", "--data", "d", *SHORT)[:3:2] == (1, f"polyfed: {expected}\n")


def test_a_column_of_weights_weighs_rows_and_is_no_input(cli, tmp_path):
    """Nor is it the target where it comes last; new rows need no weight."""
    for k, name in enumerate(("one", "two")):
        weights = [str((i + k) % 3) for i in range(len(ROWS))]
        write(tmp_path / "d" / f"{name}.csv", [r | {"w": w} for r, w in zip(ROWS, weights, strict=True)])
    assert "weight of the row in training" in cli("data", "inspect", "d", "--weights", "w").out
    ran(cli, "d", "--weights", "w", "--out", "run")
    assert "training samples have weights" in (tmp_path / "run" / "federation.json").read_text()
    fed = pf.Run.open(tmp_path / "run").federation
    assert fed.meta["inputs"] == ["age", "ward=a", "ward=b"]
    assert fed.train.weight.tolist() == [
        (int(i) + k) % 3 for k in range(2) for i in fed.meta["split_indices"]["train"][k] - len(ROWS) * k
    ]
    assert cli("verify", "run").status == 0
    (tmp_path / "new.csv").write_text("age,ward\n50,a\n")
    assert cli("predict", "run", "new.csv", "--client", "one").status == 0
    pytest.importorskip("polyfed_members")
    run = pf.Run.open(tmp_path / "run")
    (tmp_path / "three.csv").write_bytes((tmp_path / "d" / "two.csv").read_bytes())
    assert run.newcomers(tmp_path / "three.csv").train.weight is not None


def test_new_rows_are_read_as_training_rows_are(cli, tmp_path):
    write(tmp_path / "d" / "one.csv", ROWS)
    write(tmp_path / "d" / "two.csv", ROWS)
    ran(cli, "d", "--out", "run")
    for text, said in (
        ("age,ward\n50,a\n", None),
        ("ward,extra,age\na,9,50\n", None),
        ("age\n50\n", "new.csv: no column 'ward'; it has age"),
        ("age,ward\n50,a\nold,a\n", "new.csv, line 3, column 'age': found 'old', expected a number"),
        ("age,ward\n", "new.csv: found a header and no rows"),
    ):
        (tmp_path / "new.csv").write_text(text)
        found = cli("predict", "run", "new.csv", "--client", "one")
        assert found.err.strip() == (f"polyfed: {said}" if said else "")
        assert found.status == (1 if said else 0)


def test_predict_refuses_what_it_cannot_prepare(cli, tmp_path, small):
    assert cli("run", small, "--algorithm", "fedavg", "--out", "run", "--quiet").status == 0
    (tmp_path / "new.csv").write_text("a\n1\n")
    assert "not trained on CSV files" in cli("predict", "run", "new.csv", "--client", "va").err
    assert cli("export", "run", "--client", "va").status == 0
    assert "not trained on CSV files" in cli("predict", "va.safetensors", "new.csv").err
    assert "no exported model" in cli("predict", "vb.safetensors", "new.csv").err
    assert "--client: missing" in cli("predict", "run", "new.csv").err
    assert "know" in cli("run", small, "--target", "num").err


def test_a_semicolon_file_with_both_points_and_commas_is_refused(cli, tmp_path):
    """1.234 beside 1,5 is a thousand and more: read as 1.234 it would be wrong without a word."""
    write(tmp_path / "d" / "b.csv", [row | {"cost": "1"} for row in patients(np.random.default_rng(0), 20)[0]])
    rows = ["50;1,5;3,5;icu;m;1.234,5", "60;1.500;3,5;icu;f;900,5"]
    (tmp_path / "d" / "a.csv").write_text("\n".join(["age;chol;crp;ward;sex;cost", *rows]))
    said = cli("data", "inspect", "d", "--set", "columns.task=regression")
    assert said.status == 1
    assert "'1.234,5'" in said.err
    assert "'1.500'" in said.err
