"""The traps of docs/traps.md: each has a test; those that belong to no method are here."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from problems import LeastSquares

import polyfed as pf

ROOT = Path(__file__).parents[2]


def named():
    return re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "traps.md").read_text())


@pytest.mark.parametrize(("path", "name"), named())
def test_the_tests_that_the_table_names_exist(path, name):
    assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.M)


def test_scaffolds_variates_use_the_decayed_step():
    """Option II in round two: c_i = c_i - c + (x - y) / (k lr_2), the mean of the gradients along the local path."""
    problem = LeastSquares(seed=1, clients=4, dim=3)
    lr, decay, steps = 0.05, 0.5, 3
    run = problem.fit(pf.Scaffold(lr), rounds=2, steps=steps, lr_decay=decay)
    x, c, ci = np.zeros(problem.dim), np.zeros(problem.dim), np.zeros((problem.clients, problem.dim))
    for t in range(2):
        step, moves, used = lr * decay**t, [], []
        for i in range(problem.clients):
            y, seen = x.copy(), []
            for _ in range(steps):
                seen.append(problem.gradient(i, y))
                y = y - step * (seen[-1] - ci[i] + c)
            moves.append(y - x)
            used.append(np.mean(seen, axis=0))
        x, ci = x + np.mean(moves, axis=0), np.array(used)
        c = ci.mean(0)
    found = run.loop.rows.gather(torch.arange(problem.clients))["c"]
    assert np.allclose(found, ci, atol=1e-12)


def federation():
    """Two clients with 1 and 9 test samples, x = 1; labels 0 for the first, 1 for the second."""
    train = [
        (torch.ones(4, 1), torch.zeros(4, dtype=torch.int64)),
        (torch.ones(4, 1), torch.ones(4, dtype=torch.int64)),
    ]
    test = [(torch.ones(1, 1), torch.zeros(1, dtype=torch.int64)), (torch.ones(9, 1), torch.ones(9, dtype=torch.int64))]
    return pf.Federation.from_arrays(train, test, test_fraction=0.0)


def test_the_last_round_is_reported_not_the_best(tmp_path):
    """A step so large that the loss is worse at the end than before training."""
    fed = federation()
    run = pf.fit(torch.nn.Linear(1, 2), fed, pf.FedAvg(lr=40.0), rounds=6, batch_size=1, out=tmp_path / "run")
    history = run.history.query("split == 'test'").set_index("round")["loss"]
    assert history.iloc[-1] > history.min()
    assert float(run.clients["test_loss"].mean()) == pytest.approx(history.iloc[-1])


def test_the_mean_is_over_clients():
    """All is called class 1: right for the client with 9 of the 10 test samples, 1/2 over clients, 0.9 pooled."""
    model = torch.nn.Linear(1, 2)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor([0.0, 1.0]))
    run = pf.fit(model, federation(), pf.FedAvg(lr=0.0), rounds=1)
    assert run.history.query("split == 'test'")["accuracy"].iloc[-1] == 0.5
