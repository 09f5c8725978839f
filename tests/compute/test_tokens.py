"""Targets at every token: what is ignored changes nothing, and perplexity is of the tokens that count."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polyfed as pf
from polyfed.compute.losses import tokens

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


def fitted(y=Y, **settings):
    torch.manual_seed(0)
    fed = pf.Federation.from_arrays(list(zip(X, y, strict=True)), test_fraction=0.25)
    return pf.fit(Net(), fed, pf.FedAvg(lr=2.0), loss="tokens", metrics="perplexity", **{"rounds": 25, **settings})


def test_ignored_targets_have_no_gradient_and_batches_may_be_cut():
    output, target = torch.randn(5, 6, 10, requires_grad=True), torch.as_tensor(Y[0, :5])
    whole = tokens(output, target)
    (g,) = torch.autograd.grad(whole, output)
    assert not g[:, 4:].any()
    assert g[:, :4].all()
    torch.testing.assert_close(
        whole, torch.stack([tokens(output[k : k + 1], target[k : k + 1]) for k in range(5)]).mean()
    )
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


def test_perplexity_is_of_the_tokens_that_count():
    output, target = torch.zeros(2, 6, 10), torch.as_tensor(Y[0, :2])
    seen = pf.metrics.metric.Seen(output, target)
    assert pf.metrics.scores.named("perplexity").of(seen) == pytest.approx(10)
    gone = pf.metrics.metric.Seen(output, torch.full((2, 6), -100.0))
    assert math.isnan(pf.metrics.scores.named("perplexity").of(gone))
