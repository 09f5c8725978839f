"""The groups that a method finds, over the rounds."""

import pandas as pd
import torch
from torch import nn

import polyfed as pf


def federation():
    """Six clients in two planted groups: y = x w with w = (1, 0) or (0, 1)."""
    x = torch.randn(6, 20, 2, generator=torch.Generator().manual_seed(0))
    w = torch.tensor([[1.0, 0.0]] * 3 + [[0.0, 1.0]] * 3)
    y = (x * w[:, None]).sum(2)
    return pf.Federation.from_arrays([(a, b) for a, b in zip(x, y, strict=True)], test_fraction=0.0)


def train(rounds, **settings):
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    given = {"loss": "mse", "local_steps": 5, "batch_size": None, "evaluate_every": 2, **settings}
    return pf.fit(model, federation(), pf.FPFC(lr=0.1, lam=0.2), rounds=rounds, **given)


def test_the_last_assignment_is_the_final_one_and_all_outlive_a_resume(tmp_path):
    run = train(40)
    history = run.assignments
    assert list(history.columns) == list(run.federation.names)
    assert history.iloc[-1].tolist() == run.clusters.tolist()
    assert (history.diff().iloc[1:] != 0).any(axis=1).all()  # a row for every change, and only then
    numbers = run.history.set_index("round")["clusters"]
    assert numbers.loc[history.index].tolist() == [len(set(row)) for row in history.to_numpy().tolist()]
    assert numbers.iloc[-1] == 2
    train(20, out=tmp_path / "run")
    assert train(40, out=tmp_path / "run", resume=True).assignments.equals(history)
    assert pd.read_csv(tmp_path / "run" / "assignments.csv", index_col="round").equals(history)


def test_methods_without_groups_have_none():
    run = pf.fit(nn.Linear(2, 1), federation(), pf.FedAvg(), rounds=2, loss="mse")
    assert run.clusters is None
    assert run.assignments.empty
    assert "clusters" not in run.history
