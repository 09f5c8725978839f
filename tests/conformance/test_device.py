"""Every method on a device of its own (`elsewhere.py`): the processor's models, and local training that waits for
nothing, but for methods that look at a number themselves. A method whose server or clients put a tensor in the wrong
place fails here, without an accelerator."""

from contextlib import contextmanager

import pytest
import torch
from elsewhere import DEVICE, Elsewhere, There, recording
from instances import METHODS, train
from small import Wrapped
from torch import nn

import polyfed as pf
from polyfed.compute import graphs
from polyfed.core.worker import Worker
from polyfed.runs import trainer

PLAIN = [name for name in METHODS if "(" not in name]
LOOK = {  # what local training of a method may read back, by what it is; of all others nothing
    "fedala": "when its weights have settled", "fedbabu": "which layers are trained", "fedcet": "its smoothness",
    "fedem": "which weights are there", "fedex-lora": "which layers are trained", "fedpac": "which layers are trained",
    "fedrc": "which weights are there", "fedrep": "which layers are trained", "fedsoft": "which weights are there",
    "fedspa": "which weights are there", "ffa-lora": "which layers are trained", "flexlora": "which layers are trained",
    "flora": "which layers are trained", "knn-per": "whether features are numbers", "lpgd": "a rank",
    "pacfl": "which classes are there", "feddpa": "which layers are trained",
    "compressedscaffnew": "how many take part", "tamuna": "how many take part",
    "recalibrated": "when Newton's steps have settled", "rolora": "which layers are trained",
}  # fmt: skip
M = 5
READ = {"fedavg": 1, "scaffold": 3, "ditto": 2, "fedacs": M * M + 3, "fpfc": 9}  # numbers that a round reads back
TERMS = {"feddbe", "fedntd", "fedpac", "fedproto", "fedtgp", "moon"}  # whose losses have more than a pass of the model
FUNCTIONS = {"fedem", "fedrc", "knn-per"}  # whose losses are functions, of clients of unlike sizes
SHORT = {"rounds": 2, "local_epochs": 1, "fraction": 0.5, "dtype": torch.float64, "evaluate_every": 0}


@contextmanager
def elsewhere(monkeypatch):
    """Inside, `device="cuda"` is the device that is none. Yields it, and the waits inside local training."""
    inside, own = [], Worker._chunk

    def chunk(self, *args, **kwargs):
        before = len(device.waits)
        made = own(self, *args, **kwargs)
        inside.extend(device.waits[before:])
        return made

    with monkeypatch.context() as patch, Elsewhere() as device:
        patch.setattr(trainer, "pick_device", lambda name: DEVICE)
        patch.setattr(Worker, "_chunk", chunk)
        yield device, inside


def held(t: torch.Tensor) -> torch.Tensor:
    return t.held if isinstance(t, There) else t


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "cnn") for name in PLAIN), *((name, None) for name in READ)], ids=lambda x: x or "chain"
)
def test_a_run_on_a_device_is_the_processors_and_training_waits_for_nothing(name, kind, monkeypatch):
    method = METHODS[name]
    expected = train(method, kind=kind, device="cpu", **SHORT)
    with elsewhere(monkeypatch) as (_, inside):
        found = train(method, kind=kind, device="cuda", **SHORT)
        assert found.trained.task.net.batched
        models = held(found.personal)
    torch.testing.assert_close(models, expected.personal, rtol=0, atol=1e-9)
    for key, values in expected.final["test"].items():
        torch.testing.assert_close(torch.as_tensor(found.final["test"][key]), torch.as_tensor(values), equal_nan=True)
    assert not inside or name in LOOK, f"{name}: local training waits, at {inside[0]}"


@pytest.mark.parametrize("name", PLAIN)
def test_a_run_whose_passes_are_recorded_is_the_processors(name, monkeypatch):
    expected = train(METHODS[name], kind="cnn", device="cpu", **SHORT)
    with elsewhere(monkeypatch) as (device, _):
        monkeypatch.setattr(graphs, "DEVICES", ("meta",))
        monkeypatch.setattr(graphs, "record", recording(device, []))
        found = train(METHODS[name], kind="cnn", device="cuda", **SHORT)
        models = held(found.personal)
    assert bool(device.found["launch"]) == (name not in TERMS | FUNCTIONS)
    torch.testing.assert_close(models, expected.personal, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", READ)
def test_a_round_moves_the_places_of_its_samples_and_nothing_of_the_model(name, monkeypatch):
    """8 k b m bytes of m clients with k steps of b samples, for every local solve, and some numbers of each client."""
    m, solves, (k, b) = M, 2 if name == "ditto" else 1, (3, 4)
    fed = pf.Federation.from_arrays([(torch.randn(k * b, 6), torch.arange(k * b) % 3)] * m, test_fraction=0.0)
    moved = []
    for width in (4, 400):
        model = Wrapped(nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3)))
        ends = []
        for rounds in (2, 3):
            with elsewhere(monkeypatch) as (device, _):
                pf.fit(model, fed, METHODS[name], rounds=rounds, batch_size=b, evaluate_every=0, device="cuda")
            ends.append((device.to, device.back, len(device.waits)))
        moved.append([b - a for a, b in zip(*ends, strict=True)])
    assert moved[0] == moved[1]
    to, back, _ = moved[0]
    assert 8 * k * b * m * solves <= to <= 8 * k * b * m * solves + 80 * m
    assert back <= 8 * (2 * m + READ[name])


@pytest.mark.parametrize("name", READ)
def test_operations_of_a_run_grow_with_its_steps_and_not_with_its_clients(name, monkeypatch):
    asked = {}
    for m, k in ((M, 3), (10 * M, 3), (M, 4), (M, 5)):
        fed = pf.Federation.from_arrays([(torch.randn(4 * k, 6), torch.arange(4 * k) % 3)] * m, test_fraction=0.0)
        model = Wrapped(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)))
        with elsewhere(monkeypatch) as (device, _):
            pf.fit(model, fed, METHODS[name], rounds=2, batch_size=4, evaluate_every=0, device="cuda")
        asked[m, k] = device.found.total()
    assert asked[M, 3] == asked[10 * M, 3]
    assert asked[M, 4] - asked[M, 3] == asked[M, 5] - asked[M, 4] > 0
