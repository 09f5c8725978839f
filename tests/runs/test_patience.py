"""Early stopping keeps the best round by validation, whole, whenever it is killed; no test sample has a part in it."""

import json
from contextlib import suppress
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed.base.errors import ConfigError, RunError
from polyfed.core.rows import MappedRows
from polyfed.metrics.scores import metrics_of
from polyfed.report.caveats import caveats
from polyfed.runs.training import stop_of
from polyfed.studies.jobs import read_result

HOW = {"rounds": 40, "batch_size": None, "metrics": "log-loss", "stop": "patience:6"}
DITTO, FEDAVG, LATE = pf.Ditto(lr=1.5), pf.FedAvg(lr=1.5), {"name": "asynchronous", "concurrency": 3}
CASES = {
    "fedavg": (FEDAVG, {}), "ditto": (DITTO, {"fraction": 0.6}), "late": (DITTO, {"schedule": LATE}),
    "seldom": (DITTO, {"evaluate_every": 4}),
}  # fmt: skip


@cache
def federation() -> pf.Federation:
    """Fewer samples than numbers of the model, and noise: validation gets worse after some rounds."""
    rng = np.random.default_rng(3)
    w, x = rng.normal(size=20), rng.normal(size=(5, 40, 20))
    y = (x @ w + 2 * rng.normal(size=(5, 40)) > 0).astype(int)
    return pf.Federation.from_arrays([*zip(x, y, strict=True)], classes=2, test_fraction=0.25).with_validation(0.5, 0)


def start(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Linear(20, 2)


def train(case="ditto", data=None, **how):
    method, more = CASES[case]
    return pf.fit(start(), data or federation(), method, **HOW | more | how)


@cache
def whole(case):
    return train(case)


def same(a, b):
    assert (a.trained.t, a.server.keys()) == (b.trained.t, b.server.keys())
    private = [run.trained.engine.private(torch.arange(5)) for run in (a, b)]
    for here, there in ((a.server, b.server), private, (a.final["test"], b.final["test"])):
        assert all(np.array_equal(t, there[k], equal_nan=True) for k, t in here.items())
    assert torch.equal(a.personal, b.personal)


@pytest.mark.parametrize("case", CASES)
def test_what_is_kept_is_a_run_of_as_many_rounds_as_the_best_and_what_was_trained_is_told_and_billed(case):
    run, every = whole(case), CASES[case][1].get("evaluate_every", 1)
    values = {r.round: r["log-loss"] for r in run.records if r.split == "validation"}
    best = min(values, key=values.get)
    assert 0 < best < run.rounds == next(t for t in range(0, 40, every) if t >= best + 6)
    assert {*run.ledger["round"]} == {*range(run.rounds)}
    same(run, train(case, rounds=best, stop=None))
    straight = train(case, rounds=run.rounds, stop=None)
    assert run.history.drop(columns="seconds").equals(straight.history.drop(columns="seconds"))


def test_no_test_sample_is_asked():
    other = replace(federation(), test=replace(federation().test, y=1 - federation().test.y))
    run, before = train("late", data=other), whole("late")
    assert (run.rounds, torch.equal(run.personal, before.personal)) == (before.rounds, True)


class Killed(BaseException):
    pass


@pytest.mark.parametrize(("case", "files"), [("late", False), ("ditto", True)])
def test_killed_again_and_again_and_resumed_it_is_the_same_run(case, files, tmp_path, monkeypatch):
    if files:
        monkeypatch.setattr("polyfed.runs.trainer.make_rows", lambda method, task, n, _, folder, *__: MappedRows(
            n, method.init_client(task, task.w0), folder / "rows"))  # fmt: skip

    run, at = None, 3
    while run is None:  # also at the best round, after it, and where it stops

        def kill(progress, at=at):
            if progress.round == at:
                raise Killed

        with suppress(Killed):
            run = train(case, out=tmp_path / "a", resume=True, callbacks=[kill], checkpoint_every=2)
        at += 3
    for again in (
        run,
        train(case, out=tmp_path / "a", resume=True),
        pf.Run.open(tmp_path / "a", federation(), start()),
    ):
        assert (again.rounds, again.status) == (whole(case).rounds, "finished")
        same(whole(case), again)


def test_a_run_that_was_not_stopped_goes_on_from_its_last_round(tmp_path):
    best = whole("late").trained.t
    first = train("late", out=tmp_path / "a", rounds=best + 2)
    assert (first.rounds, first.trained.t) == (best + 2, best)
    first.save(tmp_path / "b")
    with pytest.raises(RunError, match="evaluate-every is 2 here and was 1 in the checkpoint"):
        train("late", out=tmp_path / "a", resume=True, evaluate_every=2)
    for name in "ab":
        same(whole("late"), train("late", out=tmp_path / name, resume=True))


@pytest.mark.parametrize(
    ("name", "values", "rule", "best"),
    [
        ("accuracy", [0.5, 0.7, 0.7, 0.6], "patience:1", 1),
        ("log-loss", [0.5, 0.46, 0.44, 0.41], "patience:1,delta=0.05", 2),
        ("calibration-slope", [2.0, 0.9, 1.2, 0.8], "patience:1", 1),
        ("auc", [np.nan, 0.5, np.nan, 0.6, 0.6], "patience:1", 3),
    ],
)
def test_the_best_is_the_first_of_equals_by_the_metrics_own_direction_and_never_nan(name, values, rule, best):
    (metric,) = metrics_of(name)
    assert stop_of(rule).best((t, metric.merit(v)) for t, v in enumerate(values)) == best


def test_what_cannot_stop_is_refused_in_one_line():
    held = federation().validation
    one_class = replace(federation(), validation=replace(held, y=torch.zeros_like(held.y)))
    none = "stop: found 'patience:6' and no validation samples, expected validation-fraction above 0 in "
    for said, how in {
        "stop.rounds: is missing; patience needs ": {"stop": "patience"},
        "stop.rounds of Patience: found '0', expected an integer of at least 1": {"stop": "patience:0"},
        "evaluate_every: found 0, expected at least 1 with stop": {"evaluate_every": 0},
        none: {"data": replace(federation(), validation=None)},
        "metrics: no client has auc on its validation samples (one class)": {"data": one_class, "metrics": "auc"},
    }.items():
        with pytest.raises(ConfigError) as e:
            train(**how)
        assert str(e.value).startswith(said)


def test_each_method_of_a_comparison_stops_for_itself_and_says_at_what_bytes(tmp_path):
    methods = {"ditto": DITTO, "fedavg": FEDAVG, "pooled": pf.PooledOracle(lr=1.5)}
    pf.compare(start, federation(), methods, seeds=1, out=tmp_path, report=False, **HOW)
    text = "\n".join(caveats(pf.report.read(tmp_path)))
    told = {name: json.loads((tmp_path / f"runs/{name}-seed0/summary.json").read_text()) for name in methods}
    assert "best_round" not in told.pop("pooled")
    assert told["ditto"]["rounds"] != told["fedavg"]["rounds"]
    for name, of in told.items():
        full = pf.fit(start(), federation(), methods[name], **HOW | {"stop": None, "evaluate_every": 0})
        assert of["down_bytes"] + of["up_bytes"] + of["unsent_bytes"] == sum(full.trained.ledger.totals())
        assert f"{name} stopped after round {of['rounds']} of 40 with models of round {of['best_round']}, the" in text
        assert read_result(tmp_path / f"runs/{name}-seed0", name, 0, 40), "it is over, though it has fewer rounds"


def test_a_value_of_a_search_counts_with_its_best_round():
    tune, run = pytest.importorskip("polyfed_tuning.tune").tune, whole("fedavg")
    how = {"setting": "lr", "grid": [1.5], "check_every": 1, "extend": 0, "train_on": 5}
    tuned = tune(start(), federation(), FEDAVG, **HOW | how)
    (row,) = tuned.rows
    assert (row["rounds"], row["ended"]) == (run.rounds, "stop")
    assert row["validation"] == run.final["validation"]["log-loss"].mean()
    assert tuned.run.trained.t == run.trained.t, "none of five more rounds is better"
