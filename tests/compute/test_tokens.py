"""Targets at every token: what is ignored changes nothing, and perplexity is of the tokens that count."""

import dataclasses
import math

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polyfed as pf
from polyfed.base.errors import ConfigError, DataError, ModelError
from polyfed.compute.losses import tokens
from polyfed.data.prepare import Cut
from polyfed.data.schema import File, settle
from polyfed.runs.training import Training

RNG = np.random.default_rng(0)
X = RNG.integers(0, 10, (2, 20, 6))
Y = ((X + 1) % 10).astype(np.float32)  # the next number, but nothing is asked of the last tokens
Y[:, :, 4:] = -100


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 6), nn.Linear(6, 10)

    def forward(self, x):
        return self.head(self.embedding(x))


def fitted(y=Y, task="auto", **settings):
    torch.manual_seed(0)
    fed = pf.Federation.from_arrays(list(zip(X, y, strict=True)), test_fraction=0.25, task=task)
    return pf.fit(Net(), fed, pf.FedAvg(lr=2.0), loss="tokens", metrics="perplexity", **{"rounds": 25, **settings})


def test_ignored_targets_have_no_gradient_and_batches_may_be_cut():
    output, target = torch.randn(5, 6, 10, requires_grad=True), torch.as_tensor(Y[0, :5])
    whole = tokens(output, target)
    (g,) = torch.autograd.grad(whole, output)
    assert not g[:, 4:].any()
    assert g[:, :4].all()
    parts = [tokens(output[k : k + 1], target[k : k + 1]) for k in range(5)]
    torch.testing.assert_close(whole, torch.stack(parts).mean())
    torch.testing.assert_close(whole, F.cross_entropy(output[:, :4].flatten(0, 1), target[:, :4].long().flatten()))
    assert tokens(output, torch.full((5, 6), -100.0)) == 0


def test_a_run_reaches_the_least_perplexity_and_is_opened_again(tmp_path):
    """The next number follows from the token, so that the least is 1; at the start it is about that of chance, 10."""
    run = fitted(out=tmp_path / "run")
    found = run.history.query("split == 'test'").perplexity
    assert found.iloc[0] > 8
    assert found.iloc[-1] < 1.2
    again = pf.Run.open(tmp_path / "run", model=Net())
    assert again.history.query("split == 'test'").perplexity.iloc[-1] == found.iloc[-1]


def test_whole_numbers_train_as_floats_do_to_the_bit():
    one, two = fitted(rounds=3), fitted(Y.astype(np.int64), "tokens", rounds=3)
    assert two.federation.train.y.dtype == torch.int64
    assert torch.equal(one.server["w"], two.server["w"])
    assert one.history.drop(columns="seconds").equals(two.history.drop(columns="seconds"))
    said = {f.name: f for f in dataclasses.fields(Training)}["loss"].metadata["setting"].doc
    assert "targets [T] of integers" in said


def test_scores_are_of_the_tokens_that_count():
    def score(name, output, target):
        return pf.metrics.scores.named(name).of(pf.metrics.metric.Predictions(output, torch.as_tensor(target)))

    assert score("perplexity", torch.zeros(2, 6, 10), Y[0, :2]) == pytest.approx(10)
    output = torch.eye(3)[[2, 1, 2, 1]][None]
    assert score("token-accuracy", output, [[2, 0, -100, 1]]) == pytest.approx(2 / 3)
    for name in ("perplexity", "token-accuracy"):
        assert math.isnan(score(name, output, torch.full((1, 4), -100)))


TAGGER = """
import torch


class Tagger(torch.nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.words, self.tags = torch.nn.Embedding(10, 6), torch.nn.Linear(6, outputs)

    def forward(self, x):
        return self.tags(self.words(x))
"""


def test_tags_of_npz_files_are_learnt_by_the_command_line(tmp_path, cli):
    (tmp_path / "data").mkdir()
    (tmp_path / "net.py").write_text(TAGGER)
    for k, name in enumerate(("bern", "oslo")):
        y = np.where(RNG.random(X[k].shape) < 0.2, -100, X[k] % 3)
        np.savez(tmp_path / "data" / f"{name}.npz", x=X[k], y=y)
    (tmp_path / "study.toml").write_text(
        'rounds = 20\nseeds = 1\nmetrics = ["token-accuracy"]\n[data]\nname = "./data"\n[columns]\ntask = "tokens"\n'
        'classes = 4\n[model]\nfile = "net.py"\n[algorithm]\nname = "fedavg"\nlr = 2.0\n'
    )
    cli("run", "study.toml", "--out", "run").done()
    run = pf.Run.open(tmp_path / "run")
    assert (run.settings.loss, run.outline.tokens, run.outline.outputs) == ("tokens", 4, 4)
    assert run.history["token-accuracy"].iloc[-1] == 1
    columns = pf.base.columns.Columns(task="tokens", classes=4)
    file = File(tmp_path / "data" / "oslo.npz", "oslo", columns, Cut(0, 0.2, 0.0))
    settled = settle({"oslo": file.schema()}, columns)
    assert (settled.outputs, settled.classes, settled.tokens) == (4, None, 4)
    parts = file.prepared(settled)
    assert parts["train"].y.dtype == torch.int64
    assert len(parts["train"].y) + len(parts["test"].y) == 20


def test_what_does_not_fit_is_said():
    whole = Y.astype(np.int64)
    for y, more, says in (
        (whole, {}, r"found labels of shape \[20, 6\], .*task='tokens' takes one for every token"),
        (np.where(whole == 3, -1, whole), {"task": "tokens"}, "found label -1, expected 0 to 999999, or -100"),
        (whole, {"task": "tokens", "classes": 9}, "found label 9, expected 0 to 8, or -100"),
        (whole[:, :, 0], {"task": "tokens"}, r"found targets of shape \[20\], expected integers \[20, tokens\]"),
        (Y + 0.5, {"task": "tokens"}, "found targets that are no integers"),
    ):
        with pytest.raises(DataError, match=says):
            pf.Federation.from_arrays(list(zip(X, y, strict=True)), **more)
    fed = pf.Federation.from_arrays(list(zip(X, whole, strict=True)), task="tokens")
    for loss in ("mse", "cross-entropy"):
        with pytest.raises(ModelError, match="use loss='tokens'"):
            pf.fit(Net(), fed, pf.FedAvg(), rounds=1, loss=loss)
    for method in (pf.MOON(), pf.FedProto()):
        with pytest.raises(ModelError, match="found tokens, expected"):
            pf.fit(Net(), fed, method, rounds=1)
    with pytest.raises(ConfigError, match=r"columns.task.*npz files"):
        pf.data.from_frames({"a": pd.DataFrame({"x": [1, 2], "y": [0, 1]})}, "y", "tokens")
