"""Misuse of `fit` from Python: it trains, or refuses in one line before training."""

import inspect
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import polyfed as pf
import polyfed.algorithms
from fuzz import HOSTILE, bounded, net, survives, tiny
from polyfed.core.algorithm import REGISTRY
from polyfed.core.settings import settings_of

FED = tiny()
KEYS = [k for k, p in inspect.signature(pf.fit).parameters.items() if p.kind is p.KEYWORD_ONLY]
ODD = st.one_of(
    HOSTILE,
    st.sampled_from([np.int64(1), np.float32(0.5), np.bool_(True), np.nan, torch.float32, torch.int64, torch.float16]),
    st.sampled_from([object(), FED, np.zeros(3), torch.zeros(2), Path("x"), (1, 2, 3), b"bytes", {1: 2}]),
    st.sampled_from([lambda t: t + 1, lambda t: 0, lambda t: 1.5, lambda t: "a"]),
)
METHODS = sorted(name for name, cls in REGISTRY.items() if cls.__module__.startswith("polyfed.algorithms."))
LENGTHS = ("rounds", "local_epochs", "local_steps")


def fit(given: dict) -> None:
    if any(isinstance(given.get(key), int) and 20 < given[key] <= 10**9 for key in LENGTHS):
        return  # training is asked to take long, and does
    if any(callable(given.get(key)) for key in ("loss", "augment")):
        return  # what a function of the user's raises is the user's
    with tempfile.TemporaryDirectory() as folder, np.errstate(all="ignore"):
        if "out" in given and isinstance(given["out"], str | Path) and "\0" not in str(given["out"]):
            given = given | {"out": Path(folder) / "run"}
        survives(given, lambda: pf.fit(net(), FED, pf.FedAvg(), **({"rounds": 1} | given)))


@given(st.dictionaries(st.sampled_from(KEYS), ODD, min_size=1, max_size=2))
@bounded(150)
def test_arguments(given):
    fit(given)


@pytest.mark.long
@given(st.dictionaries(st.sampled_from(KEYS), ODD, min_size=1, max_size=3))
@bounded(10_000)
def test_many_arguments(given):
    fit(given)


@given(st.sampled_from(METHODS).flatmap(
    lambda m: st.tuples(st.just(m), st.dictionaries(st.sampled_from([s.name for s in settings_of(REGISTRY[m])]), ODD))
))  # fmt: skip
@bounded(150)
def test_hyper_parameters(given):
    name, settings = given
    survives(given, lambda: REGISTRY.make(name, settings))
