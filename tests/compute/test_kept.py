"""Where a model is cut above its frozen modules, and that the two parts are the whole."""

import numpy as np
import pytest
import torch
from torch import nn

from polyfed.compute.check import check
from polyfed.compute.kept import kept
from polyfed.compute.split import Split
from polyfed.compute.task import Task

X = torch.randn(150, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
SPLIT = Split(X, torch.arange(150) % 3, np.array([0, 150]))


def frozen(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers).requires_grad_(False)


class Own(nn.Module):
    """A forward of its own, with operations that are no modules."""

    def __init__(self, drop: float = 0.0, between: bool = False):
        super().__init__()
        self.body = frozen(nn.Linear(4, 6), nn.Dropout(0.5), nn.ReLU(inplace=True))
        self.drop, self.head, self.between = nn.Dropout(drop), nn.Linear(6, 3), between

    def forward(self, x):
        h = self.drop(self.body(x).tanh())
        return self.head(h).exp() if self.between else self.head(h)


class Twice(nn.Module):
    """The head is called again, or its weights are used below it too."""

    def __init__(self, below):
        super().__init__()
        self.body, self.head, self.below = frozen(nn.Linear(4, 4)), nn.Linear(4, 4), below

    def forward(self, x):
        return self.head(self.below(self.head, self.body(x)))


CUT = {
    "sequence": (lambda: nn.Sequential(frozen(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 3)), "2"),
    "inside": (lambda: nn.Sequential(nn.Sequential(frozen(nn.Linear(4, 6)), nn.Linear(6, 5)), nn.Linear(5, 3)), "0.1"),
    "own forward": (Own, "head"),
    "dropout below the head": (lambda: Own(0.3), "drop"),
    "dropout between": (lambda: nn.Sequential(frozen(nn.Linear(4, 4)), nn.Dropout(0.5), nn.Linear(4, 3)), "1"),
}
WHOLE = {
    "nothing frozen": lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)),
    "frozen above": lambda: nn.Sequential(nn.Linear(4, 6), frozen(nn.Linear(6, 3))),
    "a function at the end": lambda: Own(between=True),
    "a head that is called twice": lambda: Twice(lambda head, h: head(h)),
    "tied weights": lambda: Twice(lambda head, h: h @ head.weight),
}


def tried(model: nn.Module) -> Task:
    task = Task(model.double())
    check(task, SPLIT, 3)
    return task


@pytest.mark.parametrize(("build", "first"), CUT.values(), ids=CUT)
def test_the_parts_are_the_whole(build, first):
    task = tried(build())
    found = kept(task, X)
    assert found.first == first
    assert [e.name for e in found.top.layout.entries] == [e.name for e in task.layout.entries]
    out, same = torch.empty(2, 150, *found.shape, dtype=torch.float64)
    found.features_(out, X, threads=3)
    found.features_(same, X, threads=1)
    assert torch.equal(out, same)
    w = torch.randn(task.p, dtype=torch.float64)
    assert torch.allclose(found.top.outputs(w, out), task.outputs(w, X), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("build", WHOLE.values(), ids=WHOLE)
def test_what_is_no_chain_above_frozen_modules_is_not_cut(build):
    assert kept(tried(build()), X) is None


def test_a_changed_byte_is_another_key():
    torch.manual_seed(0)
    model = Own().double()
    found = kept(tried(model), X)
    before = found.key(SPLIT)
    assert kept(tried(model), X).key(SPLIT) == before
    other = X.clone()
    other[3, 2] += 1e-12
    assert found.key(Split(other, SPLIT.y, SPLIT.offsets)) != before
    with torch.no_grad():
        model.body[0].bias[0] += 1e-12
    assert kept(tried(model), X).key(SPLIT) != before


def test_frozen_parameters_are_shared_and_the_model_stays_as_it_is():
    model = Own().float()
    task = Task(model)
    given, mine = model.body[0].weight, task.model.body[0].weight
    assert given.data_ptr() == mine.data_ptr() == task.net.workspace(True)[0].body[0].weight.data_ptr()
    assert model.head.weight.data_ptr() != task.model.head.weight.data_ptr()
    Task(model, dtype=torch.float64)
    assert model.body[0].weight.dtype == torch.float32
    assert task.module(task.w0).body[0].weight.data_ptr() != given.data_ptr(), "a copy of its own"
