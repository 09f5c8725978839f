"""A tensor that is handed out is the receiver's: whatever it writes, samples and models are what they were."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polyfed as pf
from polyfed.compute.batches import Batch
from polyfed.compute.task import Task

RNG = np.random.default_rng(0)
SITES = [(x, x[:, :3].argmax(1)) for x in (RNG.normal(size=(n, 5)) for n in (20, 9, 14))]


def federation(validation=0.0):
    return pf.Federation.from_arrays(SITES, test_fraction=0.3, validation_fraction=validation)


class Writes(nn.Module):
    def __init__(self, write, inner=None):
        super().__init__()
        torch.manual_seed(0)
        self.write, self.inner = write, inner or nn.Linear(5, 3)

    def forward(self, x):
        self.write(x)
        return self.inner(x)


WRITES = {
    "clamp_": lambda x: x.clamp_(-0.3, 0.3),
    "mul_": lambda x: x.mul_(1.5),
    "an index": lambda x: x.__setitem__((slice(None), 0), 0.0),
    "a view": lambda x: x[:, 1:3].zero_(),
    "numpy": lambda x: x.detach().numpy().__imul__(0.5) if type(x) is torch.Tensor else None,
    "at random": lambda x: x.mul_(torch.where(torch.rand(()) > 0.5, 2.0, 1.0)) if torch.is_grad_enabled() else None,
    "on data": lambda x: x.clamp_(max=1) if (x > 2).any() else None,
}


def loss(output, target):
    found = F.cross_entropy(output, target.clone())
    output.data.zero_()
    target.zero_()
    return found


def score(output, target):
    found = float((output.argmax(1) == target).float().mean())
    output.zero_()
    target.fill_(1)
    return found


def written(seen):
    found = (seen.output.argmax(1) == seen.target).float()
    seen.numbers[0][:] = 0
    seen.classes[:] = 0
    return found


def told(progress):
    """A callback that writes to whatever it is given."""
    run = progress.run
    for t in (*run.server.values(), run.personal[0], *run.model(0).parameters(), *run.model(0).buffers()):
        t.data.zero_()
    if run.common is not None:
        run.common.zero_()


DOORS = {
    "a loss": {"loss": loss},
    "metrics": {"metrics": [score, pf.Metric("mine", compute=written, per="sample")]},
    "an augmentation": {"augment": lambda x, draws: x.mul_(1.01)},
    "a callback": {"callbacks": [told]},
}


@pytest.mark.parametrize("batch_size", [None, 4], ids=["full batch", "batches"])
@pytest.mark.parametrize("method", [pf.FedAvg(), pf.APFL()], ids=lambda m: m.name)
@pytest.mark.parametrize("write", WRITES)
def test_a_model_that_writes_into_its_input_changes_no_sample(write, method, batch_size):
    fed = federation()
    unchanged(fed, lambda: pf.fit(Writes(WRITES[write]), fed, method, rounds=2, batch_size=batch_size))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("batch_size", [None, 4], ids=["full batch", "batches"])
def test_whoever_else_writes_changes_neither_samples_nor_the_run(door, batch_size):
    """But for an augmentation, which is there to change what is trained."""
    fed, runs = federation(0.2), []
    model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    how = {"rounds": 3, "batch_size": batch_size, "evaluate_every": 1}
    for given in ({"loss": F.cross_entropy} if door == "a loss" else {}, DOORS[door]):
        unchanged(fed, lambda given=given: runs.append(pf.fit(model, fed, pf.FedAvg(), **how, **given)))
    if door != "an augmentation":
        assert torch.equal(runs[0].personal, runs[1].personal)
        assert runs[0].clients.filter(like="loss").equals(runs[1].clients.filter(like="loss"))
    if door == "metrics":
        assert np.allclose(runs[1].clients.test_score, runs[1].clients.test_mine)
    personal = runs[1].personal.clone()
    told(type("P", (), {"run": runs[1]}))
    assert torch.equal(runs[1].personal, personal)


def test_a_frozen_part_that_writes_and_yardsticks_beside_it_change_nothing(tmp_path):
    fed = federation()
    rows = {"algorithms": [pf.FedAvg(), pf.Local(), pf.OwnTrees(), pf.OwnLinear()], "rounds": 2, "seeds": [0]}
    backbone = Writes(WRITES["clamp_"], nn.Linear(5, 4)).requires_grad_(False).eval()
    unchanged(fed, lambda: pf.compare(nn.Sequential(backbone, nn.Linear(4, 3)), fed, **rows))
    unchanged(fed, lambda: pf.compare(Writes(WRITES["clamp_"]), fed, out=tmp_path / "kept", **rows))


def unchanged(fed, run):
    tensors = [t for s in (fed.train, fed.validation, fed.test) if s for t in (s.x, s.y, torch.as_tensor(s.offsets))]
    before = [t.clone() for t in tensors]
    run()
    assert all(map(torch.equal, tensors, before))


@pytest.mark.parametrize("write", ["clamp_", "mul_", "an index", "a view"])
def test_it_trains_with_the_numbers_of_torch_s_copies(write):
    fed = federation()
    run = pf.fit(Writes(WRITES[write]), fed, pf.Local(lr=0.2), rounds=2, batch_size=None, dtype=torch.float64)
    for i, (x, y) in enumerate(map(fed.train.client, range(3))):
        model = Writes(WRITES[write]).double()
        steps = torch.optim.SGD(model.parameters(), lr=0.2)
        for _ in range(2):
            steps.zero_grad()
            F.cross_entropy(model(x.double().clone()), y).backward()
            steps.step()
        for a, b in zip(run.model(i).parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_many_models_at_once_write_into_copies():
    task = Task(Writes(WRITES["clamp_"]), dtype=torch.float64)
    x, y = torch.randn(2, 6, 5, dtype=torch.float64), torch.randint(3, (2, 6))
    w, kept = task.w0.expand(2, -1).clone(), x.clone()
    one = task.gradient(w, Batch(x, y))[0]
    task.net.random, task.net.vectorised = False, True
    for task.net.grouped in (False, True):
        torch.testing.assert_close(task.gradient(w, Batch(x, y))[0], one, rtol=0, atol=1e-12)
        assert torch.equal(x, kept)
