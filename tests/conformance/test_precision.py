"""Single precision has no place in a float64 run: no method makes a float32 number on its way, whatever its settings.

A float that meets a tensor of booleans or integers becomes float32 in torch, and so does `torch.tensor(0.1)`; the
rounding, 1e-9 of a setting, does not show in settings such as 0.5, and hardly in results."""

import dataclasses
import traceback
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from instances import METHODS, kind_of, model, steps
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import polyfed as pf
from polyfed.base.errors import ConfigError
from polyfed_threats import ATTACKS, RULES

LOW = (torch.float32, torch.bfloat16, torch.float16)
STARTS = {  # draw a start, in float32 for both precisions: that it is one start is a row of the conformance table
    ("clusters.py", "start"), ("fedtgp.py", "init_server"), ("pfedhn.py", "init_server"), ("fedspa.py", "_drawn"),
}  # fmt: skip
RNG = np.random.default_rng(0)
SITES = [(RNG.normal(size=(n, 1, 6, 6)), RNG.integers(0, 3, n)) for n in (9, 5, 12, 7, 6, 8, 10)]
FED = pf.Federation.from_arrays(SITES, SITES, classes=3)


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
                self.found |= {f"{f.filename.rpartition('polyfed/')[2]}:{f.lineno} {f.line}" for f in ours[-1:]} or {""}
        return out


def uneven(thing, turned: bool):
    """With settings that float32 does not hold, as far as it takes them, and `turned` with every switch the other way.

    A zero may leave something out, so it is none. What an adapter misses is asked of an adapter alone."""
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


def narrow(method, **settings) -> set[str]:
    """Lines that make a number of less than double precision in a short float64 run."""
    net, how = model(kind_of(method)).double(), {"local_steps": steps(method), "batch_size": 4, "rounds": 3} | settings
    with pytest.MonkeyPatch.context() as patch, Narrow() as seen:
        patch.setenv("POLYFED_NATIVE", "0")  # torch's operators are watched
        run = pf.fit(net, FED, method, dtype=torch.float64, workers=1, **how)
        run.findings  # noqa: B018
    assert run.personal.dtype == torch.float64
    return seen.found


@pytest.mark.parametrize("name", METHODS)
def test_no_number_of_a_float64_run_goes_through_float32(name):
    late = pf.Asynchronous(pf.Delays("uniform", 0, 20)) if name in ("fedasync", "fedbuff") else pf.Uniform()
    late = pf.Uniform(0.7) if isinstance(late, pf.Uniform) and not METHODS[name].needs.everyone else late
    turns = (False, True) if "(" not in name else (False,)
    assert [narrow(uneven(METHODS[name], turned), schedule=late) for turned in turns] == [set()] * len(turns)


def test_nor_under_attack_and_a_robust_rule():
    for attack in ATTACKS.values():
        assert narrow(pf.FedAvg(), attack=uneven(attack(ratio=0.5), False)) == set(), attack
    for rule in RULES.values():
        assert narrow(pf.FedAvg(), robust=uneven(rule(), False)) == set(), rule


def test_a_detour_through_float32_is_found():
    with Narrow() as seen:
        x = torch.rand(3, dtype=torch.float64) / (torch.arange(1, 4).double() * 0.1)
        assert not seen.found
        x / (torch.arange(1, 4) * 0.1)
    assert seen.found
