"""How often a round of a method that looks at numbers itself makes an accelerator wait: counted on the CPU, by the
operations that read values back. Of all others local training reads none (test_device.py).

A number taken out of a tensor, a mask as an index, the places of what is not zero: the processor has to know what the
accelerator found before it can go on, and the accelerator runs dry meanwhile. Copies to the CPU are not seen here."""

from collections import Counter

import pytest
import torch
from instances import METHODS, kind_of, train
from test_device import LOOK
from torch.utils._python_dispatch import TorchDispatchMode

READ = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "unique_dim")


class Waits(TorchDispatchMode):
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


# lpgd reads whether a step's eigenvectors were good enough, flora and fedex-lora the rank of what they have merged,
# until factors of it are no smaller
@pytest.mark.parametrize("name", [m for m in LOOK if m not in ("lpgd", "flora", "fedex-lora")])
def test_waiting_does_not_grow_with_the_local_steps(name):
    few, many = (waits(METHODS[name], steps, kind_of(METHODS[name])) for steps in (2, 5))
    assert many == few
