"""The history's accuracy over all samples, beside the mean over clients."""

import numpy as np
import pytest

import polyfed as pf
from polyfed.data import load
from polyfed.models import build


def test_pooled_accuracy_is_that_of_all_samples():
    """Hospitals of unlike sizes: the share of all patients that are classified rightly."""
    federation = load("heart-disease").partition(seed=0)
    run = pf.fit(build("linear", federation.input_shape, 2), federation, pf.Local(0.1), rounds=2, batch_size=None)
    right, patients = 0, 0
    for i in range(federation.n):
        x, y = federation.test.client(i)
        right += int((run.model(i)(x).argmax(1) == y).sum())
        patients += len(y)
    last = run.history.iloc[-1]
    assert last["pooled"] == pytest.approx(right / patients, abs=1e-12)
    assert last["accuracy"] == pytest.approx(np.mean(run.clients["test_accuracy"]), abs=1e-12)
    assert abs(last["pooled"] - last["accuracy"]) > 1e-6
