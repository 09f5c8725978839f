"""polyfed tune: the path on the screen, the folder, and what is refused."""

import csv
import json
import tomllib

import pytest

import polyfed as pf
from polyfed.base.values import Limits
from polyfed.data.validation import LEAKED, validated
from polyfed_tuning.command import tune_table
from polyfed_tuning.ladder import Ladder
from polyfed_tuning.tuned import Tuned

SMALL = (
    "--data", "fpfc-s3", "--scale", "small", "--set", "data.options.seed=1", "--batch-size", "full", "--local-steps", 2,
    "--fraction", 0.5, "--rounds", 10, "--check-every", 5, "--train-on", 5,
)  # fmt: skip


def rows(path):
    with path.open() as f:
        return list(csv.DictReader(f))


def test_a_folder_holds_the_path_and_the_final_run(cli, tmp_path):
    said = cli("tune", "fpfc:nu=0.5", *SMALL, "--grid", "0,2", "--cold-grid", "0,0.5,0.9", "--out", "a").done()
    found = rows(tmp_path / "a/tune.csv")
    assert [(r["regime"], float(r["lam"])) for r in found][-3:] == [("cold", 0.0), ("cold", 0.5), ("cold", 0.9)]
    (best,) = (r for r in found if r["best"] == "True")
    config = tomllib.loads((tmp_path / "a/config.toml").read_text())
    assert (config["algorithm"]["lam"], config["algorithm"]["nu"]) == (float(best["lam"]), 0.5)
    assert config["data"]["options"] == {"scale": "small", "seed": 1}
    assert (tmp_path / "a/tune.svg").read_text().lstrip().startswith("<?xml")
    for word in ("Validation, lam by lam", "warm", "cold", "ARI", "report: a/report.html"):
        assert word in said.out
    assert len(said.err.splitlines()) == 1 + len(found)  # the plan, and every leg


@pytest.mark.usefixtures("undrawn")
def test_one_regime_without_a_final_run(cli, tmp_path):
    said = cli("tune", *SMALL, "--regime", "cold", "--grid", 0.5, "--train-on", 0, "--quiet", "--out", "a").done()
    assert said.err == ""
    assert [r["lam"] for r in rows(tmp_path / "a/tune.csv")] == ["0.5"]
    assert not (tmp_path / "a/config.toml").exists()


@pytest.mark.usefixtures("undrawn")
def test_the_window_is_said_first(cli):
    curved = ("--set", "weight-decay=0.1")  # so that the minimisers are soon found
    said = cli(
        "tune", *SMALL, *curved, "--regime", "cold", "--grid", 0.5, "--train-on", 0, "--window", "--out", "a"
    ).done()
    assert said.out.startswith("For the clusters that the data name")
    assert "is sufficient" in said.out


@pytest.mark.parametrize(("best", "least", "noted"), [(0.6, None, 0), (0.7, None, 1), (0.5, None, 1), (0.5, 0.5, 0)])
def test_an_edge_is_pointed_out_only_there(best, least, noted):
    """Whatever comes after the grid's own legs, such as a best leg that was trained on to be compared."""
    row = {"regime": "cold", "clusters": 2, "rounds": 1, "bytes": 1, "seconds": 1.0, "ended": "rounds", "best": False}
    rows = [row | {"lam": lam, "validation": 0.5 + (lam == best) / 10} for lam in (0.5, 0.6, 0.7)]
    rows.append(row | {"lam": best, "validation": 0.7, "best": True, "ended": "levelled"})
    tuned = Tuned(rows=rows, ladders={"cold": Ladder((0.5, 0.6, 0.7), Limits(ge=least))})
    assert sum("at an end of the values" in note for note in tune_table(tuned).notes) == noted


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("fedavg",), "polyfed: algorithm: fedavg has no setting lam to tune"),
        (("fedacs", "--setting", "quantile", "--window"), "polyfed: --window: found method fedacs, expected fpfc"),
        (("--grid", "a,b"), "polyfed: grid: found ['a', 'b'] for warm, expected one number or more"),
        (("--set", "seeds=3"), "polyfed: seeds: found 3, expected one: tune works under one seed"),
        (("--scale", "tiny"), "polyfed: data.options.scale of fpfc-s3: found 'tiny', expected small or full"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_and_leaves_no_folder(cli, tmp_path, words, line):
    cli("tune", *words[: words[0] == "fedavg"], *SMALL, *words[words[0] == "fedavg" :], "--out", "a").line(2, line)
    assert not (tmp_path / "a").exists()


def test_an_interrupted_search_goes_on(cli, tmp_path, stopper):
    """Ctrl-C in the second round of the first value; what remains is trained, and the table is whole."""
    method = ("--set", f"algorithm.file={stopper}", "--set", f"algorithm.marker={tmp_path / 'stopped'}")
    words = ("tune", "stopper", *method, *SMALL, "--setting", "lr", "--grid", "0.1,0.2", "--extend", 0, "--out", "a")
    said = cli(*words)
    assert said.status == 130
    assert said.err.splitlines()[-1] == "polyfed: interrupted; continue with the same command and --out a"
    assert [r["ended"] for r in rows(tmp_path / "a/tune.csv")] == ["interrupted"]
    said = cli(*words, "--tolerance", 0.5)
    assert said.status == 1
    assert said.err.startswith("polyfed: cannot continue the search in a: tolerance is 0.5 and was 0.0001")
    cli("resume", "a").line(2, "polyfed: a: holds a search; the same polyfed tune command with --out a continues it")
    cli(*words).done()  # with --resume or without
    assert [(r["lr"], r["rounds"]) for r in rows(tmp_path / "a/tune.csv")] == [("0.1", "10"), ("0.2", "10")]
    done = (tmp_path / "a/summary.json").stat().st_mtime_ns
    for name in ("report.html", "tune.svg"):
        (tmp_path / "a" / name).unlink()
    cli(*words, "--resume").done()  # completes what is missing, and trains nothing
    assert (tmp_path / "a/summary.json").stat().st_mtime_ns == done
    assert (tmp_path / "a/report.html").exists()
    assert (tmp_path / "a/tune.svg").exists()


def test_resume_without_a_folder_is_refused(cli):
    cli("tune", *SMALL, "--resume").line(2, "polyfed: --resume: has no effect without --out")


def test_data_without_clusters_have_no_window(cli):
    cli("tune", "--rounds", 2, "--window", "--out", "a").line(2, "polyfed: --window: these data name no clusters")


@pytest.mark.usefixtures("undrawn")
def test_inputs_are_prepared_without_the_validation_rows(cli, tmp_path):
    """One of them is extreme and of a category of its own: its site's deviation and categories do not know it."""
    (tmp_path / "d").mkdir()
    for name in ("one", "two"):
        rows = [f"{i % 2},{30 + i},{'ab'[i // 2 % 2]}" for i in range(40)]
        (tmp_path / f"d/{name}.csv").write_text("\n".join(["y,age,ward", *rows]))
    row = int(pf.data.load(tmp_path / "d").partition(validation_fraction=0.2).meta["split_indices"]["validation"][0][0])
    text = (tmp_path / "d/one.csv").read_text().splitlines()
    text[row + 1] = f"{text[row + 1][0]},1000000,z"
    (tmp_path / "d/one.csv").write_text("\n".join(text))
    words = ("--data", "d", "--target", "y", "--setting", "lr", "--grid", "0.1", "--rounds", 1, "--train-on", 1)
    cli("tune", "fedavg", *words, "--quiet", "--out", "tu").done()
    found = json.loads((tmp_path / "tu/federation.json").read_text())
    data = pf.data.load(tmp_path / "d", target="y")
    fed = data.partition(validation_fraction=0.2)
    assert found["preparation"] == json.loads(json.dumps(fed.meta["preparation"]))
    assert "'z'" not in str(found["preparation"])
    assert tomllib.loads((tmp_path / "tu/config.toml").read_text())["data"]["validation-fraction"] == 0.2
    assert LEAKED not in found["notes"]
    late = validated(data.partition(), 0)  # where a Python program leaves it to tune, a note says what happened
    assert "'z'" in str(late.meta["preparation"])
    assert LEAKED in late.notes


def test_data_that_are_not_prepared_are_cut_alike_before_and_after():
    how = {"how": "iid", "clients": 4, "test": "own"}
    data = pf.data.load("digits", flat=True)
    before, after = data.partition(**how, validation_fraction=0.2), validated(data.partition(**how), 0)
    for split in ("train", "validation", "test"):
        assert getattr(before, split).x.equal(getattr(after, split).x)
    assert LEAKED not in after.notes
