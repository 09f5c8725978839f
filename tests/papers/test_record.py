"""A record: what a recipe found, in one file. From it nothing is computed twice, and its runs can be verified."""

import gzip
import json
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from polyfed.algorithms.fedavg import FedAvg
from polyfed.algorithms.local import Local
from polyfed.cli import portable
from polyfed.data import load
from polyfed.models import build
from polyfed.studies import jobs, parallel
from polyfed_papers.recipes import RECIPES, Bench, Outcome
from polyfed_papers.recipes.drawing import curve_figure
from polyfed_papers.recipes.recipe import Recipe, curves, metric_of
from polyfed_papers.recipes.record import load as read
from polyfed_papers.recipes.record import pack, unpack
from polyfed_papers.recipes.said import Setting, beside, ordered, ours
from polyfed_tuning.ladder import Ladder

METHODS = {"Local": Local(lr=0.1), "FedAvg": FedAvg(lr=0.1)}
RUNS = [f"all/{label}-seed{seed}" for label in METHODS for seed in range(2)]


@pytest.fixture
def drawn(monkeypatch):
    """A recipe with two methods, a value that is kept and a curve. trained: the runs; stop: the one to interrupt;
    tuned: whether FedAvg's step is chosen"""
    seen = SimpleNamespace(trained=[], stop=None, rounds=4, lr=0.1, weighted=True, tuned=False)

    def run(bench):
        """Two methods."""
        data = load("heart-disease").partition(seed=0)
        model = build("linear", data.input_shape, 2)
        methods = {"Local": Local(lr=seen.lr), "FedAvg": FedAvg(lr=0.1, weighted=seen.weighted)}
        settings = {"rounds": seen.rounds, "local_steps": 1, "batch_size": None, "evaluate_every": 2}

        def score(at):
            trial = {"FedAvg": FedAvg(lr=at[0])}
            return metric_of(bench.compare(f"step/{at[0]}", model, data, trial, seeds=[7], **settings), "FedAvg").mean()

        if seen.tuned:
            methods["FedAvg"] = FedAvg(lr=bench.choose("step", score, [Ladder((0.1, 0.2))], 2)[0])
        found = bench.compare("all", model, data, methods, **settings)
        spread = bench.once("spread", lambda: float(metric_of(found, "FedAvg").std()))
        rows = {label: [(None, ours(metric_of(found, label), 100, decimals=12))] for label in METHODS}
        drawn = {
            label: (of["round"].tolist(), [of["loss"].tolist()])
            for label, of in curves(found).query("seed == 0").groupby("label")
        }
        claim = ordered(f"spread {spread!r}", metric_of(found, "FedAvg"), metric_of(found, "Local"))
        return Outcome([beside("T", ["accuracy"], rows)], {"curve": curve_figure(drawn, "round", "loss")}, [claim])

    before = jobs.fit

    def fit(model, federation, algorithm, training, **given):
        name = f"all/{'Local' if algorithm.name == 'local' else 'FedAvg'}-seed{training.seed}"
        seen.trained.append(name)

        def press(progress):
            if name == seen.stop and progress.round == 1:
                signal.raise_signal(signal.SIGINT)

        return before(model, federation, algorithm, training, **given | {"callbacks": (press,)})

    monkeypatch.setattr(jobs, "fit", fit)
    monkeypatch.setattr(parallel, "room", lambda device="cpu": 1)
    minutes = {"small": 0.1, "paper": 0.1}
    made = Recipe("fpfc/tiny", "Tiny", run, lambda scale: [Setting("lr", "0.1", "ours")], minutes, seeds=2)
    monkeypatch.setitem(RECIPES, "fpfc/tiny", made)
    return seen


@pytest.fixture
def tiny(drawn, undrawn, monkeypatch):
    monkeypatch.setattr(sys.modules[Recipe.__module__], "save", lambda figure, path: path.touch())
    return drawn


@pytest.fixture
def record(tiny, tmp_path):
    """The record of the recipe's whole run, in the folder a; its page is not written."""
    bench = Bench(tmp_path / "a", seeds=2)
    RECIPES["fpfc/tiny"].run(bench)
    tiny.trained.clear()
    return pack(bench, "fpfc/tiny")


def changed(record, change):
    lines = [json.loads(line) for line in gzip.decompress(record.read_bytes()).splitlines()]
    lines = change(lines) or lines
    out = record.with_name("changed.gz")
    out.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    return out


def line_of(lines, name):
    return next(line for line in lines if line.get("run") == name)


def files_of(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file() and not p.name.startswith(".")}


def test_the_page_comes_again_with_nothing_trained(cli, drawn, tmp_path):
    """Page, tables, figures and the record itself, byte by byte."""
    assert cli("reproduce", "fpfc/tiny", "--out", "a", "-q").status == 0
    assert drawn.trained == [f"all/{label}-seed{seed}" for seed in range(2) for label in METHODS]
    drawn.trained.clear()
    assert cli("reproduce", "fpfc/tiny", "--from", "a/record.jsonl.gz", "--out", "b", "-q").status == 0
    assert drawn.trained == []
    found = files_of(tmp_path / "a")
    assert found == files_of(tmp_path / "b")
    assert {"outcome.md", "curve.svg", "curve.pdf", "table1-t.csv", "record.jsonl.gz"} <= set(found)


def test_an_interrupted_recipe_leaves_a_record_that_goes_on(cli, tiny, tmp_path):
    """Only what was not over is trained, and the numbers are those of a run that was not interrupted."""
    tiny.stop = "all/Local-seed1"
    assert cli("reproduce", "fpfc/tiny", "--out", "half", "-q").status == 130
    assert tiny.trained == ["all/Local-seed0", "all/FedAvg-seed0", "all/Local-seed1"]
    tiny.stop, tiny.trained = None, []
    assert cli("reproduce", "fpfc/tiny", "--from", "half/record.jsonl.gz", "--out", "b", "-q").status == 0
    assert tiny.trained == ["all/Local-seed1", "all/FedAvg-seed1"]
    assert cli("reproduce", "fpfc/tiny", "--out", "a", "-q").status == 0
    assert files_of(tmp_path / "a")["outcome.md"] == files_of(tmp_path / "b")["outcome.md"]


def test_more_seeds_go_on_from_a_record(cli, tiny, record):
    assert cli("reproduce", "fpfc/tiny", "--from", record, "--seeds", 3, "--out", "b", "-q").status == 0
    assert tiny.trained == ["all/Local-seed2", "all/FedAvg-seed2"]


def test_one_recorded_run_is_trained_again(cli, tiny, record):
    """And no other is trained for it, whatever the record lacks; or all are."""
    part = changed(record, lambda lines: [line for line in lines if line.get("run") != "all/Local-seed0"])
    said = cli("verify", part, "--run", "all/FedAvg-seed1")
    assert (said.status, said.err, tiny.trained) == (0, "", ["all/FedAvg-seed1"])
    assert "all/FedAvg-seed1: comes out again, bit for bit" in said.out
    assert said.out.count("equal") == 5
    tiny.trained.clear()
    said = cli("verify", record)
    assert (said.status, said.out.count("bit for bit"), sorted(tiny.trained)) == (0, 4, sorted(RUNS))


def test_what_a_run_does_not_need_is_not_read(cli, tiny):
    """So that a record of thousands of runs is verified as fast as a small one."""
    tiny.tuned = True
    assert cli("reproduce", "fpfc/tiny", "--out", "a", "-q").status == 0

    def spoiled(lines):
        line_of(lines, "step/0.1/FedAvg-seed7")["clients"]["client"].pop()

    part = changed(Path("a/record.jsonl.gz"), spoiled)
    assert cli("verify", part, "--run", "all/FedAvg-seed1").status == 0
    cli("verify", part, "--run", "step/0.1/FedAvg-seed7").line(1, "its columns differ in length")


def test_the_trials_of_a_choice_are_trained_again(cli, tiny):
    """And one that the recipe no longer makes is said after all others."""
    tiny.tuned = True
    assert cli("reproduce", "fpfc/tiny", "--out", "a", "-q").status == 0
    said = cli("verify", "a/record.jsonl.gz")
    assert (said.status, said.err, said.out.count("bit for bit")) == (0, "", 6)

    def renamed(lines):
        line_of(lines, "step/0.1/FedAvg-seed7")["run"] = "step/0.1/FedAvg-seed8"

    said = cli("verify", changed(Path("a/record.jsonl.gz"), renamed))
    assert (said.status, said.out.count("bit for bit")) == (1, 5)
    assert said.err.endswith("step/0.1/FedAvg-seed8: fpfc/tiny trains no such run\n")


def test_a_portable_record_says_so_and_goes_on_so(cli, tiny, monkeypatch):
    """With one worker, and the instructions pinned whenever it is read; another record is not taken for one."""
    pinned = []
    monkeypatch.setattr(portable, "pin", lambda: pinned.append(True))  # torch is here already
    assert cli("reproduce", "fpfc/tiny", "--portable", "--out", "a", "-q").status == 0
    found = read(Path("a/record.jsonl.gz"))
    assert found.about.portable
    config = next(Path("a/all/runs").glob("*/config.toml"))
    assert "workers = 1" in config.read_text()
    assert cli("reproduce", "fpfc/tiny", "--from", "a/record.jsonl.gz", "--out", "b", "-q").status == 0
    assert cli("verify", "b/record.jsonl.gz", "--run", RUNS[0]).status == 0
    assert len(pinned) == 3
    said = cli("reproduce", "fpfc/tiny", "--out", "b", "-q")
    assert (said.status, "holds fpfc/tiny small portable" in said.err) == (2, True)
    assert cli("reproduce", "fpfc/tiny", "--out", "c", "-q").status == 0
    said = cli("reproduce", "fpfc/tiny", "--portable", "--from", "c/record.jsonl.gz", "--out", "d", "-q")
    assert (said.status, len(pinned)) == (2, 4)
    assert said.err.endswith("found a record of fpfc/tiny small, expected one of fpfc/tiny small portable\n")


def change_numbers(lines):
    run = line_of(lines, "all/FedAvg-seed1")
    run["clients"]["test_accuracy"][2] *= 1 - 1e-6
    run["history"][0]["loss"] *= 1 + 1e-6
    run["summary"]["final"]["test"]["worst"] /= 2
    run["summary"]["digest"]["models"] = "0" * 64
    run["config"]["versions"]["torch"] = "1.0"


def test_a_changed_number_is_seen_and_one_that_was_not_kept_is_not_missed(cli, record):
    said = cli("verify", changed(record, change_numbers), "--run", "all/FedAvg-seed1")
    assert said.status == 1
    for line in (
        "does not come out again", "server   equal", "models   differs from its digest",
        "history  differs from round 0 on (test loss by 1.0e-06, relative)",
        "summary  differs (final test worst by 5.0e-01, relative)",
        "(test_accuracy of client 'switzerland' by 1.0e-06, relative)", "torch: 1.0 in the run",
    ):  # fmt: skip
        assert line in said.out
    old = changed(record, lambda lines: of_a_run(lines)["summary"].pop("trained_bytes") and lines)
    said = cli("verify", old, "--run", "all/FedAvg-seed1")
    assert (said.status, "summary  equal" in said.out) == (0, True)


def test_another_version_of_the_recipe_is_refused(cli, tiny, record):
    tiny.rounds = 5
    for words in (("reproduce", "fpfc/tiny", "--from", record, "--out", "b", "-q"), ("verify", record)):
        cli(*words).line(2, "holds runs with another rounds than this version of the recipe")
    tiny.rounds, tiny.lr = 4, 0.2
    said = cli("reproduce", "fpfc/tiny", "--from", record, "--out", "c", "-q")
    assert (said.status, tiny.trained) == (2, [])
    assert "another algorithms" in said.err


def test_a_record_older_than_a_setting_goes_on(cli, tiny, record):
    """What it does not name was as it is by default; where it is not now, the record is refused."""

    def before_it(lines):
        for method in lines[1]["settings"]["algorithms"]:
            method.pop("weighted", None)
        return lines

    old, tiny.trained = changed(record, before_it), []
    assert cli("reproduce", "fpfc/tiny", "--from", old, "--out", "b", "-q").status == 0
    assert tiny.trained == []
    tiny.weighted = False
    said = cli("reproduce", "fpfc/tiny", "--from", old, "--out", "c", "-q")
    assert (said.status, "another algorithms" in said.err) == (2, True)


def test_the_record_of_something_else_is_refused(cli, record, tmp_path):
    said = cli("reproduce", "fpfc/tiny", "--scale", "paper", "--from", record, "--out", "b")
    assert said.err.strip().endswith("found a record of fpfc/tiny small, expected one of fpfc/tiny paper")
    assert not (tmp_path / "b").exists()
    said = cli("verify", record, "--run", "all/FedAvg-seed7")
    assert "did you mean 'all/FedAvg-seed" in said.err


def test_of_a_record_without_runs_each_value_is_made_again(cli, monkeypatch, tmp_path):
    made = list[int]()

    def run(bench):
        """Two values."""
        for k in range(2):
            bench.once(f"value{k}", lambda k=k: made.append(k) or [k / 3])
        return Outcome()

    monkeypatch.setitem(RECIPES, "fpfc/values", Recipe("fpfc/values", "V", run, lambda _: [], {"small": 0.1}))
    assert cli("reproduce", "fpfc/values", "--out", "a").status == 0
    said = cli("verify", "a/record.jsonl.gz", "--run", "value1")
    assert (said.status, made, "value    equal" in said.out) == (0, [0, 1, 1], True)

    def other(lines):
        lines[-1]["value"] = [0.5]
        return lines

    said = cli("verify", changed(Path("a/record.jsonl.gz"), other))
    assert (said.status, "[0.5] in the record, [0.333" in said.out) == (1, True)
    said = cli("verify", "a/record.jsonl.gz", "--run", "value3")
    assert (said.status, "the key of a value" in said.err) == (2, True)


def of_a_run(lines):
    return line_of(lines, "all/FedAvg-seed1")


DAMAGES = {
    "a number that is missing": lambda lines: of_a_run(lines)["summary"].pop("rounds") and lines,
    "a text for a number": lambda lines: of_a_run(lines)["clients"].update(test_accuracy=["high"] * 4),
    "a column that is short": lambda lines: of_a_run(lines)["clients"]["test_accuracy"].pop() and lines,
    "no clients": lambda lines: of_a_run(lines)["clients"].pop("client") and lines,
    "a run outside": lambda lines: of_a_run(lines).update(run="../../FedAvg-seed1"),
    "no head": lambda lines: lines[1:],
    "an odd line": lambda lines: [*lines, {"unknown": 1}],
    "a setting that is none": lambda lines: lines[1]["settings"].update(rounds=None),
}


@pytest.mark.parametrize("change", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_line_is_refused_and_named(change, cli, tiny, record):
    bad = changed(record, change)
    for words in (("reproduce", "fpfc/tiny", "--from", bad, "--out", "b", "-q"), ("verify", bad)):
        said = cli(*words)
        assert (said.status, len(said.err.splitlines()), tiny.trained) == (1, 1, [])
        assert "changed.gz: " in said.err


def test_a_damaged_file_is_refused(cli, record):
    whole = record.read_bytes()
    for damage in (whole[:-40], whole[:60] + b"x" + whole[61:], b"not gzip"):
        record.write_bytes(damage)
        cli("verify", record).line(1, "not a readable record")


def test_what_is_in_the_folder_already_stays(tiny, record, tmp_path):
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    path = tmp_path / "b/all/runs/FedAvg-seed1/summary.json"
    before = path.read_bytes()
    unpack(read(changed(record, change_numbers)), tmp_path / "b")
    assert path.read_bytes() == before


def test_a_recipe_whose_numbers_are_not_all_in_a_record_leaves_none(cli, tiny, monkeypatch, tmp_path):
    monkeypatch.setitem(RECIPES, "fpfc/tiny", replace(RECIPES["fpfc/tiny"], recorded=False))
    assert cli("reproduce", "fpfc/tiny", "--out", "a", "-q").status == 0
    assert (tmp_path / "a/outcome.md").exists()
    assert not (tmp_path / "a/record.jsonl.gz").exists()
