"""Sites over Flower: real processes, TLS and keys; the same bits as on one machine."""

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra [flower]")
from network import SITES, Federation, loops, private

from polyfed.core.schedule import Asynchronous, Delays, Uniform


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    found = Federation(tmp_path_factory.mktemp("federation"))
    yield found
    found.close()


@pytest.mark.parametrize(
    "label", ["fedavg", "scaffold", "fpfc", "fedacs", "fedslr", "fedcet", "pacfl", "fedspa", "fedbuff"]
)
def test_real_sites_compute_the_same_bits_as_one_machine(there, label):
    """Server state and private tensors; and the ledger has the bytes that one machine bills."""
    schedule = Asynchronous(Delays("uniform", 1, 9)) if label == "fedbuff" else Uniform()
    here, far = loops(there, label, schedule)
    for _ in range(5 if label == "fedbuff" else 2):
        assert np.array_equal(here.step(), far.step())
    assert here.ledger.totals() == far.ledger.totals()
    for name in here.server:
        assert torch.equal(here.server[name], far.server[name]), f"server {name}"
    for i, mine in enumerate(private(there, label, far)):
        for name, t in here.engine.rows.tensors.items():
            assert torch.equal(t[i], mine[name]), f"{SITES[i]} {name}"
