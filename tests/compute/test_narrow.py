"""Frozen numbers in half precision are wide for the time of their layer's call, in either direction."""

import copy

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from polyfed import models
from polyfed.compute import narrow
from polyfed.compute.batches import Batch
from polyfed.compute.recompute import saved_bytes
from polyfed.compute.task import Task


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x):
        return x + nn.functional.gelu(self.norm(self.inner(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.picture, self.head = nn.Conv2d(1, 2, 2), nn.Linear(10, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.picture(x[:, None, None].expand(-1, -1, 2, -1)).flatten(1))


def half(dtype) -> nn.Module:
    torch.manual_seed(0)
    return models.adapted(Net().to(dtype), "lora:r=2,targets=inner")


def batch() -> Batch:
    torch.manual_seed(1)
    return Batch(torch.randn(3, 4, 6), torch.randint(0, 3, (3, 4)))


@pytest.mark.parametrize("dtype", narrow.HALF, ids=str)
@pytest.mark.parametrize("way", ["one by one", "computed again", "vmapped", "grouped"])
def test_gradients_are_those_of_the_model_widened_as_a_whole(way, dtype):
    model, found = half(dtype), []
    for one in (model, copy.deepcopy(model).float()):
        task = Task(one, recompute=way == "computed again")
        task.net.vectorised, task.net.grouped = way in ("vmapped", "grouped"), way == "grouped"
        torch.manual_seed(2)
        w = task.w0 + 0.1 * torch.randn(3, task.p)
        found.append(task.gradient(w, batch())[0])
    assert torch.equal(*found)
    assert found[0].abs().max() > 0


@pytest.fixture
def made(monkeypatch):
    """What has been widened."""
    made, own = [], narrow._wider

    def noted(q, dtype):
        wide = own(q, dtype)
        made.append(StorageWeakRef(wide.untyped_storage()))
        return wide

    monkeypatch.setattr(narrow, "_wider", noted)
    return made


def test_nothing_wide_is_kept_for_the_backward_pass(made):
    """Nor are there copies once it is over: a step has the frozen part once, in half precision."""
    task = Task(half(torch.bfloat16))
    module, parameters = task.net.workspace(training=True)
    task.net.point(parameters, task.w0.clone())
    output = module(batch().x[0])
    forward = len(made)
    assert forward >= 3 * 4 + 2
    assert all(ref.expired() for ref in made)
    output.sum().backward()
    assert len(made) > forward
    assert all(ref.expired() for ref in made)


def test_counting_what_a_sample_keeps_keeps_nothing_wide(made):
    """And counts what it counts of the model widened as a whole, but for its weights."""
    found, x = [], batch().x[0]
    for model in (half(torch.bfloat16), half(torch.float32)):
        module = Task(model).net.workspace(training=True)[0]

        def output(module=module):
            output = module(x)
            assert [ref for ref in made if not ref.expired()] == []
            return output

        found.append(saved_bytes(output, [*module.parameters()]))
    assert made
    assert found[0] == found[1]
