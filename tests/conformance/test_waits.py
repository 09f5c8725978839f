"""How often a round makes an accelerator wait: counted on the CPU, by the operations that read values back.

A number taken out of a tensor, a mask as an index, the places of what is not zero: the processor has to know what the
accelerator found before it can go on, and the accelerator runs dry meanwhile. Copies to the CPU are not seen here.
And what an accelerator computes together is what is computed one client after another.
"""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from instances import BATCH, CLASSES, METHODS, federation, kind_of, train
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import polyfed as pf
from polyfed.compute.task import Task

READ = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "unique_dim")


class Waits(TorchDispatchMode):
    """Counts them by operation."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, places = func.overloadpacket.__name__, args[1] if len(args) > 1 else ()
        masks = name.startswith("index") and isinstance(places, list | tuple)
        if name in READ or (masks and any(p is not None and p.dtype == torch.bool for p in places)):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def waits(method, steps: int, kind: str, rounds: int = 2) -> Counter:
    with Waits() as seen:
        train(method, kind=kind, rounds=rounds, local_steps=steps, evaluate_every=0)
    return seen.found


@pytest.fixture(autouse=True)
def in_torch(monkeypatch):
    monkeypatch.setenv("POLYFED_NATIVE", "0")
    waits(METHODS["fedavg"], 1, "linear")  # what torch does the first time only


# cfl reads for every cluster that it finds, lpgd whether a step's eigenvectors were good enough, flora and fedex-lora
# the rank of what they have merged, until factors of it are no smaller
@pytest.mark.parametrize("name", [m for m in METHODS if not m.startswith(("cfl", "lpgd", "flora", "fedex-lora"))])
def test_waiting_does_not_grow_with_the_local_steps(name):
    few, many = (waits(METHODS[name], steps, kind_of(METHODS[name])) for steps in (2, 5))
    assert many == few


@pytest.fixture
def vectorised(monkeypatch):
    """Every task computes many models at once, as on an accelerator."""
    before = Task.__init__

    def init(self, *args, **settings):
        before(self, *args, **settings)
        self.stacked, self.vectorised = None, True

    monkeypatch.setattr(Task, "__init__", init)


@pytest.mark.parametrize("path", ["layers", "vectorised"])
def test_fedavg_waits_once_a_round(path, request):
    """To hear whether the replies are finite; on both paths of an accelerator."""
    if path == "vectorised":
        request.getfixturevalue("vectorised")
    few, many = (waits(METHODS["fedavg"], 3, "mlp", rounds) for rounds in (2, 4))
    assert (many - few).total() == 2


def huber(output, target):
    return F.huber_loss(output, F.one_hot(target, CLASSES).to(output.dtype))


CASES = {
    "convolutions": ("fedavg", (), "cross-entropy"),
    "dropout": ("fedavg", (nn.Dropout2d(0.2), nn.Dropout(0.5)), "cross-entropy"),
    "own loss": ("fedavg", (), huber),
    "personal models": ("ditto", (nn.Dropout(0.5),), "cross-entropy"),
    "personal heads": ("fedper", (), huber),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("vectorised")
def test_a_round_of_many_models_at_once_waits_as_often_for_more_steps(case):
    """Once an exchange and private tensor, with steps and clients of unequal number; nothing is read in a step."""
    method, layers, loss = CASES[case]
    found = []
    for epochs, rounds in ((1, 2), (3, 2), (1, 3)):
        net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), *layers, nn.Flatten(), nn.Linear(64, CLASSES))
        settings = {"local_epochs": epochs, "batch_size": BATCH, "evaluate_every": 0, "workers": 1, "chunk": 6}
        with Waits() as seen:
            run = pf.fit(net, federation(), METHODS[method], rounds=rounds, loss=loss, **settings)
        assert run.trained.task.vectorised
        found.append(seen.found)
    assert found[0] == found[1]
    assert (found[2] - found[0]).total() == (1 if method == "fedavg" else 2)
