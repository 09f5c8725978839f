"""Misuse from Python: a public call does what it is for, or refuses in one line; `fit` does so before training."""

import inspect
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from face import NONSENSE, Face, calls
from hypothesis import given
from hypothesis import strategies as st

import polyfed as pf
import polyfed.algorithms
from fuzz import HOSTILE, METHODS, bounded, net, survives, tiny
from polyfed.base.settings import settings_of
from polyfed.core.algorithm import REGISTRY

FED = tiny()
KEYS = [k for k, p in inspect.signature(pf.fit).parameters.items() if p.kind is p.KEYWORD_ONLY]
ODD = st.one_of(
    HOSTILE,
    st.sampled_from([np.int64(1), np.float32(0.5), np.bool_(True), np.nan, torch.float32, torch.int64, torch.float16]),
    st.sampled_from([object(), FED, np.zeros(3), torch.zeros(2), Path("x"), (1, 2, 3), b"bytes", {1: 2}]),
    st.sampled_from([lambda t: t + 1, lambda t: 0, lambda t: 1.5, lambda t: "a"]),
)
LENGTHS = ("rounds", "local_epochs", "local_steps", "iterations", "exchanges", "seeds", "samples", "clients", "dim")
LENGTHS += ("measurements", "outputs", "t")


def others_doing(given: dict) -> bool:
    """Whether training is asked to take long, and does, or a function of the user's raises what it likes."""
    long = any(isinstance(given.get(key), int) and 20 < given[key] <= 10**9 for key in LENGTHS)
    return long or any(callable(given.get(key)) for key in ("loss", "augment"))


KEYWORDS = st.dictionaries(st.sampled_from(KEYS), ODD, min_size=1, max_size=2).filter(lambda g: not others_doing(g))


@given(KEYWORDS)
@bounded(100)
def test_arguments(given):
    with tempfile.TemporaryDirectory() as folder, np.errstate(all="ignore"):
        if "out" in given and isinstance(given["out"], str | Path) and "\0" not in str(given["out"]):
            given = given | {"out": Path(folder) / "run"}
        survives(given, lambda: pf.fit(net(), FED, pf.FedAvg(), **({"rounds": 1} | given)))


HYPER = st.sampled_from(METHODS).flatmap(
    lambda m: st.tuples(st.just(m), st.dictionaries(st.sampled_from([s.name for s in settings_of(REGISTRY[m])]), ODD))
)


@given(HYPER)
@bounded(100)
def test_hyper_parameters(given):
    survives(given, lambda: REGISTRY.make(*given))


# The Python face: every public call, see `face`

# with arguments that happen to be right they take a second; those of `Face` have been called when there is one
LONG = {"coalitions", "compare", "tune", "window_for", "report.write_report", "Run.report", "Coalitions.save"}
LONG |= {"data.fpfc", "data.fedcet_quadratics", "data.heterogeneous_quadratics"}
# need a model of a file, a network, data that were not given in Python, an adapter
REFUSED = {"Predictor.open", "released", "Run.leave", "Run.peft", "Run.resume"}


def misuses(face: Face):
    """A call, and one or two of its arguments."""
    values = st.one_of(st.sampled_from(NONSENSE), ODD)

    def of(call: str):
        names = face.ready(call)[2]
        wrong = st.dictionaries(st.sampled_from(names), values, min_size=1, max_size=2) if names else st.just({})
        return st.tuples(st.just(call), wrong)

    mine = sorted(calls().keys() - {"local_sgd", "Delays.draw"})  # of methods and of the loop, with their own arrays
    return st.sampled_from(mine).flatmap(of).filter(lambda pair: not others_doing(pair[1]))


@pytest.fixture(scope="module")
def face(tmp_path_factory):
    return Face(tmp_path_factory.mktemp("face"))


def test_every_public_call_works_with_the_arguments_that_it_is_given_here(face, tmp_path, monkeypatch):
    """Without this, nonsense would be refused for another reason than its own."""
    monkeypatch.chdir(tmp_path)
    assert {call for call in calls().keys() - LONG if face.misuse(call, {}) == "refused"} == REFUSED


def test_every_argument_of_every_public_call_is_refused_in_one_line_or_used(face, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for call in calls():
        for name in face.ready(call)[2]:
            for value in (object(), [], "x") if call in LONG else NONSENSE:
                face.misuse(call, {name: value})


@given(data=st.data())
@bounded(20)
def test_two_arguments(face, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    face.misuse(*data.draw(misuses(face)))
