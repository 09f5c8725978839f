"""Runs whose clients are computed together, as on an accelerator, are the runs of one client after another."""

import pytest
import torch
import torch.nn.functional as F
from instances import CLASSES, METHODS, federation
from torch import nn

import polyfed as pf
from polyfed.compute.task import Task


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        convolution = [nn.Conv2d(1, 4, 3, padding=1), nn.Dropout2d(0.2), nn.GroupNorm(2, 4), nn.MaxPool2d(2), nn.ReLU()]
        return nn.Sequential(*convolution, nn.Flatten(), nn.Dropout(0.3), nn.Linear(36, CLASSES))


def huber(output, target):
    return F.huber_loss(output, F.one_hot(target, CLASSES).to(output.dtype))


@pytest.mark.parametrize(
    ("name", "batch_size", "loss"),
    [
        ("fedavg", 8, huber), ("scaffold", None, "cross-entropy"), ("ditto", 8, "cross-entropy"),
        ("fedrep", 8, huber), ("fpfc", None, huber),
    ],
)  # fmt: skip
def test_computed_together_or_one_after_another(name, batch_size, loss, monkeypatch):
    """Convolutions, dropout and a loss of one's own, ragged clients: the same models, and the same are charged for."""
    settings = {
        "rounds": 2, "batch_size": batch_size, "loss": loss, "dtype": torch.float64, "seed": 3,
        "workers": 1, "evaluate_every": 0, "device": "cpu",
    }  # fmt: skip
    alone = pf.fit(net(), federation(), METHODS[name], **settings)
    before = Task.__init__

    def init(task, *args, **more):
        before(task, *args, **more)
        task.stacked, task.vectorised = None, True

    monkeypatch.setattr(Task, "__init__", init)
    together = pf.fit(net(), federation(), METHODS[name], chunk=6, **settings)
    assert together.trained.engine.plan.path == "vectorised"
    torch.testing.assert_close(together.personal, alone.personal, rtol=0, atol=1e-10)
    assert together.ledger.drop(columns="seconds").equals(alone.ledger.drop(columns="seconds"))
