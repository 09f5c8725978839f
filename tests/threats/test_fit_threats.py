"""Attacks and robust rules in `fit`: who is measured, what is written, what is refused."""

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed import threats
from polyfed.base.errors import RunError


@pytest.fixture(scope="module")
def fed():
    """Ten clients whose labels follow one linear law."""
    rng = np.random.default_rng(0)
    teacher = rng.normal(size=(10, 4))
    x = rng.normal(size=(10, 80, 10)).astype(np.float32)
    data = [(xi[:40], (xi[:40] @ teacher).argmax(1)) for xi in x]
    test = [(xi[40:], (xi[40:] @ teacher).argmax(1)) for xi in x]
    return pf.Federation.from_arrays(data, test=test, classes=4)


def fit(fed, method=None, **settings):
    torch.manual_seed(0)
    model = torch.nn.Linear(10, 4)
    return pf.fit(model, fed, method or pf.FedAvg(0.5), **{"rounds": 3, "batch_size": None} | settings)


def test_attackers_are_left_out_of_every_metric(fed):
    run = fit(fed, attack=threats.SignFlip(ratio=0.4))
    bad = threats.SignFlip(ratio=0.4).attackers(0, run.trained.keys)
    assert (run.clients["test_accuracy"].isna() == bad).all()
    benign = run.clients["test_accuracy"][~bad]
    last = run.history[run.history["split"] == "test"].iloc[-1]
    assert last["accuracy"] == pytest.approx(benign.mean())
    assert last["worst"] == benign.min()


def test_false_labels_are_trained_on(fed):
    run = fit(fed, attack=threats.LabelFlip(ratio=0.5))
    bad = threats.LabelFlip(ratio=0.5).attackers(0, run.trained.keys)
    for i in range(fed.n):
        y, now = fed.train.client(i)[1], run.federation.train.client(i)[1]
        assert torch.equal(now, 3 - y if bad[i] else y)
    assert np.isnan(run.final["test"]["accuracy"]).sum() == bad.sum()


def test_a_run_is_resumed_under_the_same_threat_only(fed, tmp_path):
    attack = threats.GaussianNoise(ratio=0.3)
    whole = fit(fed, attack=attack, robust=threats.Median(), rounds=4)
    fit(fed, attack=attack, robust=threats.Median(), rounds=2, out=tmp_path)
    with pytest.raises(RunError, match="attack is None here"):
        fit(fed, robust=threats.Median(), rounds=4, out=tmp_path, resume=True)
    again = fit(fed, attack=attack, robust=threats.Median(), rounds=4, out=tmp_path, resume=True)
    assert torch.equal(again.personal, whole.personal)
