"""How often models are evaluated where nothing is said: counted from sizes, a tenth of the training at most."""

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.base.randomness import client_keys
from polyfed.compute.batches import Work
from polyfed.runs.steps import FREE, between_evaluations, local_steps_of
from polyfed.runs.trained import Trained

NAMES = [f"c{i}" for i in range(100)]
FULL = Work(2, None, 20)


def rounds(samples, p, work=FULL, share=0.1, each=600):
    return between_evaluations(samples, np.full(100, each), client_keys(NAMES), work, share, p)


@pytest.mark.parametrize("samples", [10_000, 30_000, 1_000_000])
@pytest.mark.parametrize("work", [FULL, Work(1, 7, 20), Work(1, local_steps_of([1, 9] * 50, NAMES), None)])
def test_it_is_the_least_of_1_2_5_10_that_costs_a_tenth(samples, work):
    k = rounds(samples, 159_010, work)
    each = work.taken(np.full(100, 600), 0, client_keys(NAMES)) * min(work.batch_size or 600, 600)
    trained = 3 * 0.1 * each.sum()  # forward, and two products backward; evaluation takes the forward one
    assert samples <= 0.1 * k * trained
    below = k * 2 // 5 if str(k)[0] == "5" else k // 2
    assert k == 1 or samples > 0.1 * below * trained


def test_little_is_evaluated_after_every_round_whatever_the_training():
    assert rounds(FREE // 100, 100, share=1e-6) == 1
    assert rounds(FREE // 100 + 1, 100, share=1e-6) > 1


def test_steps_that_grow_count_as_in_the_first_round():
    one = Work(1, lambda t: t // 20 + 1, 20)
    assert rounds(10_000, 159_010, one) == rounds(10_000, 159_010, Work(1, 1, 20))


def federation():
    x = np.random.default_rng(0).normal(size=(4, 30, 1000)).astype(np.float32)
    return pf.Federation.from_arrays([(a, np.arange(30) % 3) for a in x], test_fraction=0.5)


def run(**settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1000, 400), nn.ReLU(), nn.Linear(400, 3))
    return pf.fit(model, federation(), pf.FedAvg(), fraction=0.25, batch_size=None, device="cpu", **settings)


def test_a_run_evaluates_so_often_writes_it_down_and_keeps_the_last_round(tmp_path):
    """60 samples are evaluated and 15 trained on: 60 <= 0.1 * k * 3 * 15 from k = 14 on."""
    found = run(rounds=23, out=tmp_path)
    assert [r.round for r in found.records] == [0, 20, 23]
    assert "evaluate-every = 20" in (tmp_path / "config.toml").read_text()
    assert [r.round for r in run(rounds=3, evaluate_every=1).records] == [0, 1, 2, 3]


def test_a_run_that_goes_on_keeps_to_the_same_rounds(tmp_path):
    run(rounds=7, out=tmp_path)
    whole = run(rounds=23, out=tmp_path, resume=True)
    assert [r.round for r in whole.records] == [0, 7, 20, 23]


def test_no_split_is_evaluated_twice_after_one_round(monkeypatch):
    seen, scored = [], Trained.scored
    monkeypatch.setattr(Trained, "scored", lambda run, name: seen.append((run.t, name)) or scored(run, name))
    found = run(rounds=3, evaluate_every=2)
    assert seen == [(0, "test"), (2, "test"), (3, "test"), (3, "train")]
    assert list(found.final) == ["test", "train"]
    seen.clear()
    stopped = run(rounds=3, evaluate_every=2, callbacks=[lambda now: now.round == 1])  # not due
    assert seen == [(0, "test"), (1, "test"), (1, "train")]
    assert stopped.trained.t == 1


def test_what_is_reported_is_the_last_round_and_not_the_best(tmp_path):
    """Steps so long that every evaluation is another one, and the best of them an earlier one."""
    rng = np.random.default_rng(0)
    fed = pf.Federation.from_arrays([(rng.normal(size=(40, 3)), rng.integers(0, 2, 40)) for _ in range(3)])
    torch.manual_seed(0)
    how = {"rounds": 12, "evaluate_every": 1, "batch_size": None, "out": tmp_path / "run"}
    found = pf.fit(nn.Linear(3, 2), fed, pf.FedAvg(30.0), **how)
    means = [float(record["accuracy"]) for record in pf.Run.open(tmp_path / "run").records if record.split == "test"]
    assert max(means[:-1]) > means[-1]
    assert float(found.clients["test_accuracy"].mean()) == pytest.approx(means[-1])
    head, row = pf.report.compare_table(pf.report.read(tmp_path / "run")).to("csv").splitlines()
    assert float(dict(zip(head.split(","), row.split(","), strict=True))["accuracy_mean"]) == pytest.approx(means[-1])
