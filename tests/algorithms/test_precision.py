"""Single precision has no place in a float64 run: no method makes a float32 number on its way, whatever its settings.

A float that meets a tensor of booleans or integers becomes float32 in torch, and so does `torch.tensor(0.1)`; the
rounding, 1e-9 of a setting, does not show in settings such as 0.5, and hardly in results.
"""

import copy
import dataclasses
import traceback
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import polyfed as pf
import polyfed.algorithms
from polyfed.base.errors import ConfigError
from polyfed.core.algorithm import REGISTRY
from polyfed.models.memory import Memory
from polyfed.models.mixture import Mixture
from polyfed.threats import ATTACKS, RULES

METHODS = [cls for _, cls in sorted(REGISTRY.items()) if cls.__module__.startswith(f"{polyfed.algorithms.__name__}.")]
LOW = (torch.float32, torch.bfloat16, torch.float16)
STARTS = {  # draw a start, in float32 for both precisions: that it is one start is a row of the conformance table
    ("clusters.py", "starts"), ("fedtgp.py", "init_server"), ("pfedhn.py", "init_server"), ("fedspa.py", "_drawn"),
}  # fmt: skip


class Narrow(TorchFunctionMode):
    """Notes where a number of less than double precision is made."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if any(isinstance(t, torch.Tensor) and t.dtype in LOW for t in tree_leaves(out)):
            ours = [f for f in traceback.extract_stack() if "polyfed" in f.filename]
            if STARTS.isdisjoint((Path(f.filename).name, f.name) for f in ours):
                self.found.add(f"{ours[-1].filename.rpartition('polyfed/')[2]}:{ours[-1].lineno} {ours[-1].line}")
        return out


def uneven(thing, turned: bool):
    """With settings that float32 does not hold, as far as it takes them, and `turned` with every switch the other way.

    A zero may leave something out, so it is none. What an adapter misses is asked of an adapter alone.
    """
    for f in dataclasses.fields(thing):
        value = getattr(thing, f.name)
        others = [not value] if turned and value in (True, False) and f.name != "aggregation_error" else []
        if isinstance(value, float):
            others = [value * 1.1 or 0.1, value * 0.7]
        for other in others:
            with suppress(ConfigError):
                thing = dataclasses.replace(thing, **{f.name: other})
                break
    return thing


@pytest.fixture(scope="module")
def federation() -> pf.Federation:
    rng = np.random.default_rng(0)
    sites = [(rng.normal(size=(n, 4)), rng.integers(0, 3, n)) for n in (9, 5, 12, 7, 6, 8, 10)]
    return pf.Federation.from_arrays(sites, sites, classes=3)


def narrow(federation, method, **settings) -> set[str]:
    """Lines that make a number of less than double precision in a short float64 run."""
    torch.manual_seed(0)
    norm = [nn.LayerNorm(5)] if method.name == "fedbn" else []
    model = nn.Sequential(nn.Linear(4, 5), *norm, nn.ReLU(), nn.Linear(5, 3)).double()
    if method.adapter:
        model = pf.models.adapted(model, f"lora:r=2,train={method.adapter}")
    if method.name in ("fedem", "fedrc"):
        model = Mixture(model, copy.deepcopy(model), classes=3 if method.name == "fedrc" else None).double()
    if method.name == "knn-per":
        model = Memory(model, rows=7, k=3).double()
    with pytest.MonkeyPatch.context() as patch, Narrow() as seen:
        patch.setenv("POLYFED_NATIVE", "0")  # torch's operators are watched
        run = pf.fit(model, federation, method, dtype=torch.float64, batch_size=4, rounds=3, workers=1, **settings)
        run.findings  # noqa: B018
    assert run.personal.dtype == torch.float64
    return seen.found


@pytest.mark.parametrize("cls", METHODS, ids=lambda cls: cls.name)
def test_no_number_of_a_float64_run_goes_through_float32(cls, federation):
    assert [narrow(federation, uneven(cls(), turned), fraction=0.7) for turned in (False, True)] == [set(), set()]


def test_nor_under_attack_and_a_robust_rule(federation):
    for attack in ATTACKS.values():
        assert narrow(federation, pf.FedAvg(), attack=uneven(attack(ratio=0.5), False)) == set(), attack
    for rule in RULES.values():
        assert narrow(federation, pf.FedAvg(), robust=uneven(rule(), False)) == set(), rule
