"""Nothing leaves a site unasked: all messages of whole runs, searched for samples, private tensors, cells and files."""

import json
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from direct import raw
from hospitals import ALL, OPEN, Between, Sites, at_sites, experiment, folder
from safetensors.torch import load_file

from polyfed.algorithms import shipped
from polyfed.base import errors
from polyfed.core.algorithm import REGISTRY
from polyfed_sites.site import Site
from polyfed_sites.wire import Request

OURS = [*shipped()]
METHODS = [name for name in OURS if name not in ("fedbn", "fedem", "fedrc", "knn-per")]  # which refuse a plain network
NAMES = ("bern", "riga")
# whose private tensors are what they send, or have sent, as their papers have it: a model, a gradient, a correction;
# pFedMe's two models are the same wherever the gradient is zero
KEPT = {
    "fedacs", "fedala", "fedamp", "fedas", "fedcet", "fedfomo", "fedlin", "fedsoft", "fedtrack", "fpfc", "gradskip",
    "heurfedamp", "moon", "pfedgraph", "pfedme", "scaffold", "scaffnew", "led", "compressedscaffnew", "tamuna",
    "locodl", "scafflix",
}  # fmt: skip
HEADS = {
    "format", "kind", "site", "versions", "cpu", "file", "counts", "w0", "t", "phase", "steps", "seconds",
    "metrics", "parameters", "frozen", "aggregate", "peer", "audit", "pooled", "removed",
}  # fmt: skip


def windows(values: np.ndarray, size: int = 4) -> set[bytes]:
    """The bytes of every `size` neighbours, those that say something."""
    flat = np.ascontiguousarray(values).ravel()
    some = [flat[k : k + size] for k in range(len(flat) - size + 1)]
    return {w.tobytes() for w in some if np.unique(w).size == size}


@pytest.mark.parametrize("method", METHODS)
def test_messages_hold_what_was_consented_to_and_nothing_else(method, tmp_path):
    data = folder(tmp_path / "data")
    sites = Sites(tmp_path, data, names=NAMES)
    wire = Between(sites)
    tables = '[columns]\nstandardise = "client"\n[model]\nname = "mlp"\nhidden = [5]'
    if words := REGISTRY[method].adapter_train:
        tables += f'\nadapter = "lora:r=2,train={words}"'
    file = experiment(tmp_path / "study.toml", f'name = "{method}"', tables, rounds=2)
    at_sites(file, sites, wire)
    for name in NAMES:
        messages = wire.said(name)
        whole, received = (b"".join(m.pack() for m in of) for of in (messages, wire.asked(name)))
        assert all(m.head.keys() <= HEADS for m in messages), "a head says more"
        assert not any(m.head.get("peer") for m in messages), "a key is for secure sums"
        consented = next(text for text in sites.lines if text.startswith(f"What leaves the site {name!r}"))
        assert all(f"    {tensor}: " in consented for m in messages for tensor in m.tensors), "not consented to"
        for word in (str(tmp_path), ".csv", "vault"):
            assert word.encode() not in whole, word
        rows = [line.split(",") for line in (data / f"{name}.csv").read_text().splitlines()[1:]]
        heads = json.dumps([m.head for m in messages])
        assert not any(f'"{cell}"' in heads or f" {cell}," in heads for row in rows for cell in row[:2] if cell)
        begun = sites.members[name].state.client
        for split in begun.data.values():
            assert not any(w in whole for w in windows(split.x.numpy())), "samples"
            assert not any(w in whole for w in windows(split.x.double().numpy())), "samples"
        if method not in KEPT:
            states = [load_file(path) for path in begun.vault.folder.glob("0*.safetensors")]
            private = [w for state in states for t in state.values() for w in windows(t.numpy(), 6)]
            assert not any(w in whole and w not in received for w in private), "private tensors"


PLANTED = {  # by kind of request: what a site does to answer it
    "join": "polyfed.data.schema.File.schema",
    "pooled": "polyfed.data.schema.File.sums",
    "audit": "polyfed_sites.joining.told",
    "labels": "polyfed.data.schema.File.labels",
    "begin": "polyfed.data.schema.File.fitted",
    "train": "polyfed.core.worker.Worker.run",
    "evaluate": "polyfed.compute.evaluation.metrics",
    "end": "polyfed_export.export._shapes",
}
ERRORS = [errors.ConfigError, errors.DataError, errors.ModelError, errors.MethodError, errors.Diverged, errors.RunError]


def test_an_error_leaves_the_site_by_its_kind_alone_unless_it_says_what_may_leave(tmp_path, monkeypatch):
    """Whatever fails, in whichever answer, and however its words name a cell and a path: the screen alone has them."""
    data, policy = folder(tmp_path / "data"), replace(OPEN, audit="quantiles")
    file = experiment(tmp_path / "study.toml", 'name = "fedavg"', rounds=1, **{"class-weights": "balanced"})
    sites = Sites(tmp_path, data, names=NAMES, policy=policy)
    wire = Between(sites)
    at_sites(file, sites, wire)
    sent = {question.head["kind"]: question.pack() for _, question, _ in wire.heard}
    assert sent.keys() == PLANTED.keys()
    assert len(PLANTED) == len(get_args(Request)) - 2, "every kind of request, but open and over, which read no sample"
    path, cell = data / "riga.csv", "severe-4711"
    for kind, place in PLANTED.items():
        for error in (*ERRORS, ValueError, KeyError, OSError):

            def fail(*_, error=error, **__):
                raise error(f"riga: the server: {path}, line 3, column 'age': found {cell!r}")

            shown, logged = [], []
            site = Site("riga", path, tmp_path / "vaults" / "riga", ALL, logged.append, shown.append, policy)
            with monkeypatch.context() as planted:
                planted.setattr(place, fail)
                reply = site.answer(sent[kind])
            head = raw(reply).head
            assert (head["kind"], head["error"][:6]) == ("failed", "riga: "), kind
            for outside in (reply.decode(errors="replace"), *logged):
                assert cell not in outside, (kind, error)
                assert str(tmp_path) not in outside, (kind, error)
                assert "line 3" not in outside, (kind, error)
            assert any(cell in line for line in shown), (kind, error)
