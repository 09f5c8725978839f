"""Class weights: factors on the loss of each class's samples, on every path to a gradient."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn

import polyfed as pf
from polyfed.base.errors import ConfigError
from polyfed.compute import evaluation
from polyfed.compute.batches import Batch, padded
from polyfed.compute.task import Task
from polyfed.runs.weights import weights_of

WEIGHTS = [1.0, 3.0, 2.0]


class Odd(nn.Module):
    """A network that is no chain of layers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x) * 2


@pytest.mark.parametrize("path", ["closed form", "module", "vectorised"])
def test_a_weight_is_that_many_copies_of_the_sample(path):
    """The gradient of two ragged clients equals that of repeated samples, but for the number that it is divided by."""
    rng = np.random.default_rng(0)
    sites = [(rng.normal(size=(n, 4)), rng.integers(0, 3, n)) for n in (9, 7)]
    many = [np.repeat(np.arange(len(y)), np.array(WEIGHTS, int)[y]) for _, y in sites]
    copies = [(x[k], y[k]) for (x, y), k in zip(sites, many, strict=True)]
    model = nn.Linear(4, 3) if path == "closed form" else Odd()
    found = []
    for data, weights in ((sites, WEIGHTS), (copies, None)):
        split = pf.Federation.from_arrays(data, test_fraction=0.0, classes=3).train
        task = Task(model, dtype=torch.float64, class_weights=weights)
        task.vectorised = path == "vectorised"
        w, batch = task.w0.expand(2, -1).clone(), padded(split, np.arange(2))
        g, loss = task.gradient(w, batch)
        stepped = w.clone()
        task.descend_(stepped, batch, 1.0)
        second = task.hvp(w, torch.ones_like(w), batch)
        found.append([torch.as_tensor(v) for v in (g, loss, task.loss_of(w, batch), w - stepped, second)])
        assert evaluation.metrics(task, w, split, np.arange(2))["loss"] == pytest.approx(loss.numpy())
    for weighted, repeated in zip(*found, strict=True):
        factor = torch.tensor([len(k) / len(y) for k, (_, y) in zip(many, sites, strict=True)])
        wanted = repeated * factor.view(2, *[1] * (repeated.dim() - 1))
        assert weighted.numpy() == pytest.approx(wanted.numpy(), rel=1e-6, abs=1e-9)


def test_balanced_is_the_optimum_that_scikit_learn_finds():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(80, 3))
    y = (x @ [1.0, -1.0, 0.5] + rng.normal(size=80) > 1.2).astype(int)
    fed = pf.Federation.from_arrays([(x, y)], test_fraction=0.0)
    run = pf.fit(
        nn.Linear(3, 2, bias=False), fed, pf.FedAvg(lr=0.5), rounds=1, local_steps=800, batch_size=None,
        weight_decay=0.1, class_weights="balanced", dtype="float64",
    )  # fmt: skip
    w = run.personal[0].view(2, 3)
    # with two outputs w1 = -w0 = v/2 at the optimum, so 0.1/2 ||w||^2 = 0.1/4 ||v||^2
    wanted = LogisticRegression(C=1 / (80 * 0.05), fit_intercept=False, class_weight="balanced", tol=1e-10).fit(x, y)
    assert (w[1] - w[0]).numpy() == pytest.approx(wanted.coef_[0], rel=1e-5)
    assert "the loss weighs classes inversely" in " ".join(run.federation.notes)


def test_balanced_weights_are_one_on_average_over_all_clients_rows():
    rng = np.random.default_rng(0)
    fed = pf.Federation.from_arrays([(rng.normal(size=(n, 2)), np.arange(n) % k) for n, k in ((30, 3), (20, 2))])
    weights = weights_of("balanced", "cross-entropy", fed.describe())
    counts = fed.train.y.bincount().numpy()
    assert (np.array(weights) * counts) == pytest.approx(np.full(3, counts.sum() / 3))


def test_a_batch_of_padding_keeps_its_weights():
    task = Task(nn.Linear(2, 2), dtype=torch.float64, class_weights=[1.0, 5.0])
    x, y = torch.randn(1, 4, 2).double(), torch.tensor([[0, 1, 1, 0]])
    real = torch.tensor([[0.5, 0.5, 0.0, 0.0]]).double()
    padded_too = task.gradient(task.w0[None], Batch(x, y, real, [2]))
    torch.testing.assert_close(padded_too, task.gradient(task.w0[None], Batch(x[:, :2], y[:, :2])))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"class_weights": [1.0]}, "class-weights: found 1 numbers, expected one for each of 2 classes"),
        ({"class_weights": {"0": 1.0}}, "class-weights: found none for the class '1'"),
        ({"class_weights": {0: 1.0}}, "class-weights: found none for the class '1'"),
        ({"class_weights": {"a": 1.0}}, "class-weights: unknown class 'a'"),
        ({"class_weights": [1.0, -1.0]}, "class_weights: found"),
        ({"class_weights": "even"}, "class_weights: found 'even'"),
        ({"class_weights": "balanced", "loss": nn.functional.cross_entropy}, "for the loss cross-entropy alone"),
    ],
)
def test_weights_that_do_not_fit_are_refused(settings, said):
    x = np.random.default_rng(0).normal(size=(20, 2))
    with pytest.raises(ConfigError, match=said):
        pf.fit(nn.Linear(2, 2), pf.Federation.from_arrays([(x, np.arange(20) % 2)]), pf.FedAvg(), rounds=1, **settings)
    numbers = pf.Federation.from_arrays([(x, x[:, 0])])
    with pytest.raises(ConfigError, match="the targets are numbers"):
        pf.fit(nn.Linear(2, 1), numbers, pf.FedAvg(), rounds=1, class_weights="balanced")
