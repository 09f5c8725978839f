"""Numbers that explode end a run in the one line of divergence, whatever fails on them; other errors stay what they
are."""

import copy
import dataclasses
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polyfed as pf
import polyfed.algorithms
from polyfed.algorithms import shipped
from polyfed.base import checkpoint
from polyfed.base.errors import ConfigError, Diverged, ModelError
from polyfed.core.explosion import exploded
from polyfed.models.memory import Memory
from polyfed.models.mixture import Mixture

METHODS = [cls() for cls in shipped().values()]
STEPS = [(1e2, "32", 3, 0), (1e5, "64", 3, 0), (1e3, "64", 1, 0), (1e3, "32", 3, 1)]
ONE_LINE = r"^round \d+: .+ diverged \(NaN or infinity\); try a smaller lr[^\n]*$"


def federation(regression: bool = False) -> pf.Federation:
    rng = np.random.default_rng(7)
    sites = []
    for i, n in enumerate((24, 5, 26, 13, 30, 12)):
        y = rng.choice(3, n, p=np.roll([0.6, 0.3, 0.1], i))
        x = (rng.normal(size=(n, 36)) + y[:, None]).astype(np.float32)
        sites.append((x, (x.mean(1) + i).astype(np.float32) if regression else y))
    return pf.Federation.from_arrays(sites, sites, classes=None if regression else 3)


LABELS, NUMBERS = federation(), federation(True)


def fit(method, fed=LABELS, *, outputs=3, rounds=6, model: nn.Module | None = None, conv=False, **settings) -> pf.Run:
    torch.manual_seed(5)
    first = [nn.Unflatten(1, (1, 6, 6)), nn.Conv2d(1, 2, 3), nn.Flatten()] if conv else []
    norm = [nn.LayerNorm(8)] if method.name == "fedbn" else []
    model = model or nn.Sequential(*first, nn.Linear(32 if conv else 36, 8), *norm, nn.Linear(8, outputs))
    if method.adapter_train:
        settings |= {"adapter": f"lora:r=2,train={method.adapter_train}"}
    if method.name in ("fedem", "fedrc"):
        model = Mixture(model, copy.deepcopy(model), classes=outputs if method.name == "fedrc" else None)
    if method.name == "knn-per":
        model = Memory(model, rows=7, k=3)
    return pf.fit(model, fed, method, rounds=rounds, batch_size=8, workers=1, seed=3, evaluate_every=0, **settings)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_a_step_far_too_large_ends_in_one_line_or_at_finite_numbers(method):
    for lr, dtype, outputs, conv in STEPS:
        try:
            wild = dataclasses.replace(method, lr=lr) if hasattr(method, "lr") else method
        except ConfigError:  # it refuses such a step
            continue
        fed, precision = (LABELS if outputs > 1 else NUMBERS), getattr(torch, f"float{dtype}")
        said, run = None, None
        try:
            run = fit(wild, fed, outputs=outputs, dtype=precision, conv=conv)
        except Diverged as e:
            said = str(e)
        except ModelError:  # of a method for classes alone
            if outputs > 1:
                raise
        assert said is None or re.match(ONE_LINE, said), said
        reached = [] if run is None else [run.personal, *run.server.values()]
        assert all(t.isfinite().all() for t in reached if t.is_floating_point())


@dataclasses.dataclass(frozen=True)
class Failing(pf.FedAvg):
    """FedAvg with linear algebra somewhere: of numbers as large as the model to the fourth, or of a singular matrix."""

    lr: float = 1e6
    where: str = "client"
    singular: bool = False

    def _solve(self, w):
        size = w.norm() ** 2
        if self.singular:
            return torch.linalg.inv(torch.zeros(2, 2))
        return torch.linalg.eigvalsh(torch.stack([size * size - size * size, size, size, size]).view(2, 2))

    def local_update(self, task, client, down, data, round):
        private, up = super().local_update(task, client, down, data, round)
        if self.where == "client" and int(round.ids.max()) >= 2:
            self._solve(up["w"])
        return private, up

    def aggregate(self, server, up, round):
        new = super().aggregate(server, up, round)
        if self.where == "server":
            self._solve(new["w"])
        return new

    def downlink(self, server, round):
        if self.where == "downlink":
            self._solve(server["w"])
        return super().downlink(server, round)


@pytest.mark.parametrize("where", ["client", "server", "downlink"])
def test_linear_algebra_on_what_has_exploded_is_divergence(where):
    with pytest.raises(Diverged, match=ONE_LINE):
        fit(Failing(where=where), NUMBERS, outputs=1, rounds=60)


@pytest.mark.parametrize("where", ["client", "server", "downlink"])
def test_an_error_of_the_methods_own_stays_one(where):
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        fit(Failing(lr=0.01, where=where, singular=True), NUMBERS, outputs=1)


def test_a_loss_that_refuses_nan_hides_no_divergence():
    """torch's own raises a RuntimeError for probabilities that are not between 0 and 1."""
    fed = pf.Federation.from_arrays(
        [(x.numpy(), (y > 1).long().numpy()) for x, y in map(LABELS.train.client, range(6))]
    )
    model = nn.Sequential(nn.Linear(36, 8), nn.Linear(8, 8), nn.Linear(8, 1), nn.Sigmoid())
    with pytest.raises(Diverged, match="client 'client-"):
        fit(pf.FedAvg(lr=1e30), fed, model=model, loss=lambda o, y: F.binary_cross_entropy(o[:, 0], y.float()))


@dataclasses.dataclass(frozen=True)
class Late(pf.FedAvg):
    """FedAvg whose server's state overflows in the third round."""

    def aggregate(self, server, up, round):
        new = super().aggregate(server, up, round)
        return {"w": new["w"] * torch.inf} if round.t == 2 else new


def test_a_state_that_overflows_at_last_is_no_result(tmp_path):
    with pytest.raises(Diverged, match=ONE_LINE):
        fit(Late(), rounds=3, out=tmp_path, checkpoint_every=1)
    tensors, meta, _ = checkpoint.load(tmp_path / "checkpoint")
    assert meta["t"] == 2
    assert all(t.isfinite().all() for t in tensors.values() if t.is_floating_point())


def test_infinity_as_a_mark_is_no_explosion():
    assert not exploded(lambda: torch.zeros(3).masked_fill_(torch.tensor([True, False, True]), -torch.inf).softmax(0))
    assert exploded(lambda: torch.full((2,), 1e20) + 1)


@pytest.mark.parametrize("make", [torch.empty, torch.zeros(1).new_empty, lambda n: torch.empty_like(torch.zeros(n))])
def test_memory_that_is_yet_to_be_written_has_not_exploded(make):
    def call():
        room = make(4)
        room[:] = 1
        return room

    torch.use_deterministic_algorithms(True)  # fills such memory with NaN
    try:
        assert make(4).isnan().all()
        assert not exploded(call)
        assert (call() == 1).all()
    finally:
        torch.use_deterministic_algorithms(False)
