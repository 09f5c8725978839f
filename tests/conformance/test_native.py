"""Every method on the compiled kernel and on torch alone: the same models."""

import pytest
import torch
from instances import BATCH, METHODS, kind_of, train

from polyfed.native import kernel

CHAINS = [m for m in METHODS if kind_of(METHODS[m]) in ("linear", "deep")]  # what the kernel trains
PLAIN = [m for m in CHAINS if "(" not in m]
FEW = ("fedavg", "fedprox", "scaffold", "ditto", "fedrep", "fpfc")
pytestmark = pytest.mark.skipif(kernel() is None, reason="the kernel is not built here")


@pytest.mark.parametrize(
    ("name", "kind", "dtype", "tolerance", "batch_size"),
    [(m, kind_of(METHODS[m]), torch.float32, 1e-6, BATCH) for m in PLAIN]
    + [(m, "mlp", torch.float64, 1e-12, BATCH) for m in CHAINS]
    + [(m, "mlp", torch.float64, 1e-12, None) for m in FEW]
    + [(m, "block", torch.float64, 1e-12, BATCH) for m in FEW]
    + [("fedbn", "norm", torch.float64, 1e-12, BATCH)],
)
def test_native_and_torch_agree(name, kind, dtype, tolerance, batch_size, monkeypatch):
    found, by_torch = {}, "client by client" if kind in ("block", "norm") else "closed form"
    for switch, path in (("1", "native"), ("0", by_torch)):
        monkeypatch.setenv("POLYFED_NATIVE", switch)
        run = train(METHODS[name], kind=kind, dtype=dtype, batch_size=batch_size, local_epochs=1, rounds=2,
                    evaluate_every=0)  # fmt: skip
        assert run.trained.engine.plan.path == path
        found[path] = run.personal
    gap = (found["native"] - found[by_torch]).abs().max()
    assert gap <= tolerance * found["native"].abs().max().clamp(min=1)
