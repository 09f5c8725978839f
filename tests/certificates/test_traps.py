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


@pytest.mark.parametrize("name", ["FedProx", "Ditto", "APFL", "PFedMe", "PerFedAvg", "FedAMP", "HeurFedAMP", "FedACS"])
def test_no_default_makes_a_method_another_one(name):
    """With its defaults alone, a method's deployed models are neither FedAvg's nor Local's after three rounds."""
    problem = LeastSquares(seed=1, clients=8, dim=3)
    found, fedavg, local = (
        problem.fit(method, rounds=3, steps=5, batch_size=8).personal
        for method in (getattr(pf, name)(), pf.FedAvg(weighted=False), pf.Local())
    )
    assert (found - fedavg).abs().max() > 1e-4
    assert (found - local).abs().max() > 1e-4


def test_an_epoch_is_all_batches_and_a_round_is_a_round():
    """SCAFFOLD takes epochs x ceil(n / b) steps, FedAvg as many rounds as were asked for, and not one more."""
    problem, taken = LeastSquares(seed=1, clients=3, dim=3), []

    class Counted(pf.Scaffold):
        name = "counted-scaffold"

        def local_update(self, task, client, down, data, round):
            taken.extend(zip(data.steps.tolist(), data.samples.tolist(), strict=True))
            return super().local_update(task, client, down, data, round)

    run = problem.fit(Counted(0.01), rounds=3, local_epochs=5, steps=None, batch_size=4)
    assert all(steps == 5 * -(-n // 4) for steps, n in taken)
    assert len(taken) == 3 * 3
    assert sorted(run.ledger["round"].unique()) == [0, 1, 2]


def test_an_absent_client_keeps_its_model():
    """A server that writes its own copies over everybody's would change those of clients that did not take part."""
    problem = LeastSquares(seed=1, clients=6, dim=3)
    for method in (pf.Local(0.02), pf.Ditto(0.02), pf.FedACS(0.02), pf.FedAMP(0.02), pf.FPFC(0.02, merge=False)):
        a, b = (problem.fit(method, rounds=t, steps=2, fraction=0.5) for t in (3, 4))
        there = set(b.ledger.query("round == 3")["client"])
        absent = [i for i in range(6) if i not in there]
        assert len(absent) == 3
        assert torch.equal(a.personal[absent], b.personal[absent]), method.name
        assert not torch.equal(a.personal[sorted(there)], b.personal[sorted(there)])
