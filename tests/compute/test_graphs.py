"""Recorded passes, on a device that is none: the same numbers by one launch, few recordings, what cannot be one."""

from contextlib import contextmanager

import pytest
import torch
from elsewhere import DEVICE, Elsewhere, There, recording
from small import batches, split_of
from test_elsewhere import MODELS, model, on_the_device, tokens_or_images
from torch import nn

from polyfed.compute import graphs
from polyfed.compute.check import check
from polyfed.compute.solvers import local_sgd
from polyfed.compute.split import Split
from polyfed.compute.task import Task

RECORDED = [name for name in MODELS if name != "closed form"]
WORK = {"batch_size": 4, "epochs": 2}


@contextmanager
def recorded(monkeypatch):
    """Inside, the device is there and records; yields it, and the tapes."""
    tapes = []
    with monkeypatch.context() as patch, Elsewhere() as device:
        patch.setattr(graphs, "DEVICES", ("meta",))
        patch.setattr(graphs, "record", recording(device, tapes))
        yield device, tapes


def solved(task: Task, split: Split, order=(0, 2, 3, 1), round=0, **work) -> torch.Tensor:
    w = task.w0.expand(len(order), -1)
    return local_sgd(task, w, batches(split, order, round=round, **work), 0.1, pull=(0.5, w + 1), shift=0.1 * w)


@pytest.mark.parametrize("net", RECORDED)
def test_recorded_passes_give_the_processors_models_by_few_launches(net, monkeypatch):
    split = tokens_or_images(net, 10, 3, 8, 7)
    here = Task(model(net))
    check(here, split, 3)
    with recorded(monkeypatch) as (device, tapes):
        task, samples = on_the_device(net, split)
        asked = []
        for t in range(6):
            device.found.clear()
            found = solved(task, samples, round=t, **WORK)
            torch.testing.assert_close(found.held, solved(here, split, round=t, **WORK), rtol=0, atol=1e-12)
            asked.append(device.found.copy())
    assert asked[-1]["launch"] == 6, "steps of the client with most"
    assert asked[-1].total() <= 25 * 6 < 2 * asked[0].total(), "samples, inputs and models go in, a step follows"
    module = task.net.workspace(training=True)[0]
    fixed = {*map(memory, (*module.parameters(), *module.buffers()))}
    assert all({*map(memory, tape.read.values())} <= fixed for tape in tapes)


def memory(t: torch.Tensor) -> int:
    return t.held.untyped_storage().data_ptr() if isinstance(t, There) else t.untyped_storage().data_ptr()


def test_clients_that_finish_one_after_another_make_few_recordings(monkeypatch):
    """Each serves up to a fifth fewer clients."""
    split, asked = split_of(*range(3, 63, 3), d=36), []
    with recorded(monkeypatch) as (device, tapes):
        task, samples = on_the_device("plain", split)
        for t in range(4):
            device.found.clear()
            solved(task, samples, range(19, -1, -1), t, batch_size=3)
            asked.append((len(tapes), device.found["launch"]))
    rows = [20, 15, 11, 8, 6, 4, 3, 2, 1]
    assert asked == [(0, 0), *[(len(rows), 20)] * 3], "that of a new one is its trial"


def again(run, given):
    """`graphs.record` by calling the function anew."""
    made = run(*given)
    return lambda: [old.copy_(new) for old, new in zip(made, run(*given), strict=True)], made


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setattr(graphs, "DEVICES", ("cpu",))
    monkeypatch.setattr(graphs, "record", again)
    return graphs.Recorder()


def test_what_was_answered_is_not_written_to_later(recorder):
    x = torch.arange(6.0).view(3, 2)
    answers = [recorder(lambda x: (x * 2,), (x + t,), "")[0] for t in range(5)]
    assert [*map(len, recorder.made.values())] == [1]
    for t, answer in enumerate(answers):
        torch.testing.assert_close(answer, (x + t) * 2)


def test_functions_of_another_kind_are_recorded_apart(recorder):
    x, kinds = torch.arange(6.0).view(3, 2), {"twice": 2, "thrice": 3}
    for _ in range(4):
        for kind, by in kinds.items():
            torch.testing.assert_close(recorder(lambda x, by=by: (x * by,), (x,), kind)[0], x * by)
    assert [*map(len, recorder.made.values())] == [1, 1]


def test_recordings_of_all_shapes_hold_no_more_models_than_they_may(recorder, monkeypatch):
    monkeypatch.setattr(graphs, "MOST", 100)
    for m in (10, 5, 3, 2):
        for _ in range(3):
            recorder(lambda x: (x,), (torch.ones(m, 6),), "")
    assert sorted(one.rows for made in recorder.made.values() for one in made) == [5, 10]


class Scaled(nn.Module):
    """By a number that comes from the host in every pass."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(36, 3).double()

    def forward(self, x):
        return self.inner(x) * torch.tensor(2.0).to(x.device)


def astray(run, given):
    """A recording that does not do again what it is of."""
    return lambda: None, tuple(torch.zeros_like(t) for t in run(*given))


@pytest.mark.parametrize(
    ("build", "record", "why"),
    [
        (Scaled, None, "_to_copy: not permitted while operations are recorded"),
        (lambda: model("conv"), astray, "its recording gives other numbers"),
    ],
    ids=["from the host", "astray"],
)
def test_what_cannot_be_recorded_goes_on_operation_by_operation_and_says_so_once(
    build, record, why, monkeypatch, caplog
):
    split, net = split_of(8, 8, d=36), build()
    here = Task(net)
    check(here, split, 3)
    with recorded(monkeypatch) as (device, _):
        if record is not None:
            monkeypatch.setattr(graphs, "record", record)
        task = Task(net, device=DEVICE)
        samples = task.place(split)
        check(task, samples, 3)
        for t in range(3):
            found = solved(task, samples, (0, 1), t, **WORK)
            torch.testing.assert_close(found.held, solved(here, split, (0, 1), t, **WORK), rtol=0, atol=1e-12)
    said = [r.getMessage() for r in caplog.records if "launched" in r.getMessage()]
    assert said == [f"a pass is launched operation by operation: {why}"]
    assert "launch" not in device.found
