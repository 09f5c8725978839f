"""Reading run folders: what is tolerated, and the one line that names each fault."""

import json

import pytest
from report_folders import write_comparison, write_run

from polyfed import report
from polyfed.base.errors import RunError


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", [0.8, 0.9])


def fault(path):
    with pytest.raises(RunError) as found:
        report.read(path)
    text = str(found.value)
    assert "\n" not in text
    return text


def test_a_run_is_read_back(run):
    study = report.read(run)
    assert (study.labels, study.seeds, study.names) == (["fedavg"], [0], ["client-0", "client-1"])
    assert study.first.values() == {"client-0": 0.8, "client-1": 0.9}
    assert list(study.first.ledger.columns)[:2] == ["round", "client"]


def test_a_half_written_last_line_is_tolerated(run):
    with (run / "metrics.jsonl").open("a") as f:
        f.write('{"round": 21, "spl')
    assert report.read(run).first.records[-1].round == 20


def test_a_damaged_line_before_the_last_is_named(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(["{oops", *lines]))
    assert "metrics.jsonl: line 1 is not valid JSON" in fault(run)


@pytest.mark.parametrize("name", ["federation.json", "metrics.jsonl", "clients.csv"])
def test_a_missing_file_is_named(run, name):
    (run / name).unlink()
    assert f"{name}: this file of the run is missing" in fault(run)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("config.toml", "a = ", "config.toml: not valid TOML"),
        ("summary.json", "{", "summary.json: not valid JSON"),
        ("summary.json", "{}", "summary.json: the key 'status' is missing"),
        ("federation.json", "[1]", "federation.json: found list, expected a table"),
        ("clients.csv", "", "clients.csv: not a readable table"),
        ("clients.csv", "a,b\n1,2\n", "clients.csv: the column 'client' is missing"),
        ("clients.csv", "client\nclient-0\n", "clients.csv: its 1 rows are not the 2 clients of federation.json"),
        ("clients.csv", "client,rounds\nclient-0,1\nclient-1,1x\n", "column 'rounds': found '1x', expected numbers"),
        ("config.toml", "seed = -1", "config.toml: seed: found -1"),
        ("federation.json", '{"clients": [{"name": 3}]}', "federation.json: clients.0.name: found 3"),
        ("federation.json", "[" * 100_000, "federation.json: not valid JSON"),
    ],
)
def test_a_damaged_file_is_named(run, name, text, told):
    (run / name).write_text(text)
    assert told in fault(run)


def test_folders_that_are_none(tmp_path):
    assert "no such folder" in fault(tmp_path / "absent")
    assert "neither a run folder" in fault(tmp_path)
    (tmp_path / "comparison.toml").write_text("")
    assert "without a single run" in fault(tmp_path)
    assert "no run folder was given" in fault([])


def test_a_killed_run_is_read_from_its_last_evaluation(tmp_path):
    study = report.read(write_run(tmp_path / "run", [0.8, 0.9], summary=False))
    assert study.first.status == "unfinished"
    assert study.first.summary.rounds == 20
    assert "No run has finished" in report.answer(study)


@pytest.mark.parametrize("key", ["seed", "rounds", "down_bytes", "final"])
def test_null_where_a_number_belongs_is_named(run, key):
    told = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(told | {key: None}))
    assert f"summary.json: {key}: found None" in fault(run)


def test_the_role_is_what_the_run_knows_whatever_its_clients_are_called(tmp_path):
    """A client called "common" has its model in models/common.safetensors; a method is common by no list of names."""
    run = write_run(tmp_path / "a", [0.8, 0.9], algorithm="ditto", names=["common", "other"])
    (run / "models").mkdir()
    (run / "models" / "common.safetensors").write_bytes(b"")
    assert report.read(run).first.role == "personalised"
    own = write_run(tmp_path / "b", [0.8, 0.9], algorithm="mine", deploys="common")
    assert report.read(own).first.role == "common"


def test_a_method_that_moved_no_byte_is_never_the_best_shared_one(tmp_path):
    values = {
        "local": [[0.5, 0.6], [0.52, 0.6]],
        "fedrep": [[0.8, 0.9], [0.81, 0.9]],
        "fedavg": [[0.6, 0.6], [0.61, 0.6]],
    }
    folder = write_comparison(tmp_path, values)
    for place in folder.glob("runs/fedrep-*/summary.json"):
        place.write_text(json.dumps(json.loads(place.read_text()) | {"down_bytes": 0, "up_bytes": 0}))
    study = report.read(folder)
    assert study.role("fedrep") == "own"
    assert "fedrep, the best shared method" not in report.answer(study)
    assert "the clients' own models (fedrep)" in report.answer(study)


def test_labels_come_from_the_folder_names_of_a_comparison(tmp_path):
    study = report.read(
        write_comparison(tmp_path, {"fedprox-mu0.1": [[0.5]], "fedprox-mu1": [[0.6]], "local": [[0.4]]})
    )
    assert study.labels == ["local", "fedprox-mu0.1", "fedprox-mu1"]
    assert [study.role(x) for x in study.labels] == ["own", "common", "common"]


def test_several_runs_of_one_method_and_seed_are_told_apart(tmp_path):
    paths = [write_run(tmp_path / name, [0.5, 0.6]) for name in ("first", "second")]
    assert report.read(paths).labels == ["first", "second"]


def test_runs_on_other_data_are_refused(tmp_path):
    one = write_run(tmp_path / "one", [0.5, 0.6])
    assert "report them apart" in fault([one, write_run(tmp_path / "two", [1.5, 1.6], metric="rmse", classes=None)])
    assert "same seed" in fault([one, write_run(tmp_path / "three", [0.5, 0.6], samples=[7, 8])])
    a, b = (write_run(tmp_path / x, [0.5, 0.6], digest=x) for x in ("a", "b"))
    assert "same seed" in fault([a, b])


def test_any_metric_is_checked_where_it_is_read(run):
    """Its column of clients.csv, its line of metrics.jsonl and which way is better, whatever its name."""
    told = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(told | {"better": "sideways"}))
    assert "summary.json: better: found 'sideways'" in fault(run)
    (run / "summary.json").write_text(json.dumps(told))
    (run / "metrics.jsonl").write_text('{"round": 1, "split": "test", "mine": "high"}\n{}\n')
    assert "metrics.jsonl: line 1, mine: found 'high'" in fault(run)
    (run / "metrics.jsonl").write_text("")
    (run / "clients.csv").write_text("client,test_mine\nclient-0,1\nclient-1,1x\n")
    assert "column 'test_mine': found '1x', expected numbers" in fault(run)
