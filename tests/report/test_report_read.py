"""Reading run folders: what is tolerated, and the one line that names each fault."""

import json

import pytest
from report_folders import write_comparison, write_run

from polyfed import report
from polyfed.base.errors import RunError


def fault(path):
    with pytest.raises(RunError) as found:
        report.read(path)
    text = str(found.value)
    assert "\n" not in text
    return text


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", [0.8, 0.9])


def test_a_run_is_read_back_also_one_that_was_killed(run, tmp_path):
    """From its last evaluation; a half-written last line is tolerated."""
    study = report.read(run)
    assert (study.labels, study.seeds, study.names) == (["fedavg"], [0], ["client-0", "client-1"])
    assert study.first.values() == {"client-0": 0.8, "client-1": 0.9}
    assert list(study.first.ledger.columns)[:2] == ["round", "client"]
    killed = write_run(tmp_path / "killed", [0.8, 0.9], summary=False)
    with (killed / "metrics.jsonl").open("a") as f:
        f.write('{"round": 21, "spl')
    study = report.read(killed)
    assert (study.first.status, study.first.summary.rounds) == ("unfinished", 20)
    assert study.first.records[-1].round == 20
    assert "No run has finished" in report.answer(study)


def told(**keys):
    return lambda text: json.dumps(json.loads(text) | keys)


FILES, NUMBERS = ("federation.json", "metrics.jsonl", "clients.csv"), ("seed", "rounds", "down_bytes", "final")


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        *((n, None, f"{n}: this file of the run is missing") for n in FILES),
        ("config.toml", "a = ", "config.toml: not valid TOML"),
        ("config.toml", "seed = -1", "config.toml: seed: found -1"),
        ("summary.json", "{", "summary.json: not valid JSON"),
        ("summary.json", "{}", "summary.json: the key 'status' is missing"),
        *(("summary.json", told(**{k: None}), f"summary.json: {k}: found None") for k in NUMBERS),
        ("summary.json", told(better="sideways"), "summary.json: better: found 'sideways'"),
        ("federation.json", "[1]", "federation.json: found list, expected a table"),
        ("federation.json", '{"clients": [{"name": 3}]}', "federation.json: clients.0.name: found 3"),
        ("federation.json", "[" * 100_000, "federation.json: not valid JSON"),
        ("metrics.jsonl", lambda text: "{oops\n" + text, "metrics.jsonl: line 1 is not valid JSON"),
        ("metrics.jsonl", '{"round": 1, "split": "test", "mine": "high"}\n{}\n', "line 1, mine: found 'high'"),
        ("clients.csv", "", "clients.csv: not a readable table"),
        ("clients.csv", "a,b\n1,2\n", "clients.csv: the column 'client' is missing"),
        ("clients.csv", "client\nclient-0\n", "clients.csv: its 1 rows are not the 2 clients of federation.json"),
        ("clients.csv", "client,rounds\nclient-0,1\nclient-1,1x\n", "column 'rounds': found '1x', expected numbers"),
        ("clients.csv", "client,test_mine\nclient-0,1\nclient-1,1x\n", "column 'test_mine': found '1x', expected"),
    ],
)  # fmt: skip
def test_a_file_that_is_damaged_or_missing_is_named(run, name, text, told):
    """A metric's column, its line and which way is better are checked whatever its name."""
    if text is None:
        (run / name).unlink()
    else:
        (run / name).write_text(text((run / name).read_text()) if callable(text) else text)
    assert told in fault(run)


def test_folders_that_are_none(tmp_path):
    assert "no such folder" in fault(tmp_path / "absent")
    assert "neither a run folder" in fault(tmp_path)
    (tmp_path / "comparison.toml").write_text("")
    assert "without a single run" in fault(tmp_path)
    assert "no run folder was given" in fault([])


def test_the_role_is_what_the_run_knows_whatever_its_clients_are_called(tmp_path):
    """A client called "common" has its model in models/common.safetensors; a method is common by no list of names."""
    run = write_run(tmp_path / "a", [0.8, 0.9], algorithm="ditto", names=["common", "other"])
    (run / "models").mkdir()
    (run / "models" / "common.safetensors").write_bytes(b"")
    assert report.read(run).first.role == "personalised"
    own = write_run(tmp_path / "b", [0.8, 0.9], algorithm="mine", deploys="common")
    assert report.read(own).first.role == "common"


def test_a_method_that_moved_no_byte_is_never_the_best_shared_one(tmp_path):
    folder = write_comparison(
        tmp_path, {"local": [[0.5, 0.6]] * 2, "fedrep": [[0.8, 0.9]] * 2, "fedavg": [[0.6, 0.6]] * 2}
    )
    for place in folder.glob("runs/fedrep-*/summary.json"):
        place.write_text(told(down_bytes=0, up_bytes=0)(place.read_text()))
    study = report.read(folder)
    assert study.role("fedrep") == "own"
    assert "fedrep, the best shared method" not in report.answer(study)
    assert " of fedrep, over 2 seeds" in report.answer(study)


def test_labels_come_from_the_folder_names(tmp_path):
    values = {"fedprox-mu0.1": [[0.5]], "fedprox-mu1": [[0.6]], "local": [[0.4]]}
    study = report.read(write_comparison(tmp_path, values))
    assert study.labels == ["local", "fedprox-mu0.1", "fedprox-mu1"]
    assert [study.role(x) for x in study.labels] == ["own", "common", "common"]
    paths = [write_run(tmp_path / name, [0.5, 0.6]) for name in ("first", "second")]
    assert report.read(paths).labels == ["first", "second"], "of one method and seed"


def test_runs_on_other_data_are_refused(tmp_path):
    one = write_run(tmp_path / "one", [0.5, 0.6])
    assert "report them apart" in fault([one, write_run(tmp_path / "two", [1.5, 1.6], metric="rmse", classes=None)])
    assert "same seed" in fault([one, write_run(tmp_path / "three", [0.5, 0.6], samples=[7, 8])])
    a, b = (write_run(tmp_path / x, [0.5, 0.6], digest=x) for x in ("a", "b"))
    assert "same seed" in fault([a, b])
