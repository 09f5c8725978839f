"""Damaged run folders, thousands of kinds: report, export, resolve and read_result work on, or say one line."""

import json
import random
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuzz import MORE, bounded, survives
from polyfed import Federation, fit
from polyfed.algorithms.fedacs import FedACS
from polyfed.algorithms.fedslr import FedSLR
from polyfed.face import Run
from polyfed.report import answer, client_table, compare_table, cost_table, gain_table, read, write_report
from polyfed.runs.config import resolve
from polyfed.runs.ownership import config_of
from polyfed.studies.jobs import read_result

NAMES = ("basel", "bern", "zug")
VALUES = [None, -1, 0, 2**70, 1e400, "", "x", "=1+1", [], [1, "a"], [[1], [2, 3]], {}, {"a": None}, True, "\0"]
WORDS = [*b'null -1 1e999 { " , = nan [a]'.split(), b"\n", b"\xff", b"\0", b"[" * 3000, b"9" * 5000]
FILES = ["config.toml", "federation.json", "metrics.jsonl", "clients.csv", "ledger.csv", "report.json", "summary.json"]
MODELS = ["models/basel.safetensors", "models/bern.safetensors", "models/zug.safetensors", "scores.safetensors"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Two run folders as `fit` writes them: with clusters and mixing, and with low-rank models."""
    folder, rng = tmp_path_factory.mktemp("runs"), np.random.default_rng(0)
    pairs = [(rng.normal(size=(12, 3)), np.arange(12) % 2) for _ in NAMES]
    fed = Federation.from_arrays(pairs, [(x[:4], y[:4]) for x, y in pairs], names=NAMES)
    places = []
    for method in (FedACS(lr=0.1), FedSLR(lr=0.1)):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        places.append(folder / method.name)
        describe = {"data": {"name": "digits"}, "model": {"name": "mlp"}}
        fit(model, fed, method, rounds=2, out=places[-1], describe=describe)
    return places


def damaged(rng, raw):
    """Bytes changed anywhere."""
    raw = bytearray(raw)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(max(len(raw), 1))
        kind = rng.choice(["flip", "cut", "drop", "word", "empty"])
        if kind == "flip" and raw:
            raw[at] ^= rng.randint(1, 255)
        elif kind == "cut":
            del raw[at:]
        elif kind == "drop":
            del raw[at : at + rng.randint(1, 30)]
        elif kind == "empty":
            raw.clear()
        else:
            raw[at:at] = rng.choice(WORDS)
    return bytes(raw)


def replaced(rng, value):
    """A JSON value with one value somewhere in it replaced, or one key removed."""
    at, inside, key = value, None, None
    while isinstance(at, dict | list) and at and (inside is None or rng.random() < 0.75):
        inside, key = at, rng.choice(list(at) if isinstance(at, dict) else range(len(at)))
        at = at[key]
    if isinstance(inside, dict) and rng.random() < 0.5:
        del inside[key]
    elif inside is not None:
        inside[key] = rng.choice(VALUES)
    return value


@st.composite
def damages(draw):
    """(which run, file, kind of damage, a number that decides the rest, which depends on what the file holds)."""
    which, name = draw(st.integers(0, 1)), draw(st.sampled_from([*FILES, *MODELS]))
    return which, name, draw(st.sampled_from(["bytes", "value", "gone"])), draw(st.integers(0, 2**32))


def check(folder, whole, which, name, kind, seed) -> None:
    place = folder / "run"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(whole[which], place)
    target, rng = place / name, random.Random(seed)
    if kind == "gone":
        target.unlink()
    elif kind == "value" and name.endswith((".json", ".jsonl")):
        *before, last = target.read_text().splitlines() if name.endswith("l") else [target.read_text()]
        target.write_text("\n".join([*before, json.dumps(replaced(rng, json.loads(last)))]))
    else:
        target.write_bytes(damaged(rng, target.read_bytes()))
    for read_it in (
        lambda: write_report(place) if MORE and seed % 50 == 0 else tables(place),  # figures take their time
        lambda: Run.open(place).export("bern", folder / "out.safetensors", ("dense", "factorised")[which == 1]),
        lambda: resolve(config_of(place)),
        lambda: read_result(place, "a", 0),
    ):
        survives((which, name, kind, seed), read_it)


def tables(place):
    """All that a report says, without its figures; then the values that it rests on."""
    study = read(place)
    for table in (compare_table(study), client_table(study, every=True), cost_table(study), gain_table(study)):
        if table is not None:
            for form in ("html", "csv", "latex"):
                table.to(form)
    assert answer(study)
    if study.first.clients is not None:
        assert tuple(study.first.values()) == NAMES  # nobody is left out without a word


@given(damage=damages())
@bounded(200)
def test_damaged_folders(tmp_path_factory, whole, damage):
    check(tmp_path_factory.getbasetemp(), whole, *damage)
