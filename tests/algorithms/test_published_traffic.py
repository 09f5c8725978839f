"""The gigabytes of FedSLR's Table 2, from the ledger's own weights of one real round: 10 clients of 100 in 1000 rounds,
1 GB = 1e9 bytes, float32. The table prints CIFAR-10's 893.92 for all three data sets; the models give what is here.
"""

import numpy as np
import pytest

import polyfed as pf
from polyfed import models
from polyfed.core.ledger import Ledger

ROUNDS, COHORT = 1000, 10
CIFAR10, CIFAR100, TINY = (10, "cifar"), (100, "cifar"), (200, "imagenet")


def gigabytes(method: pf.Algorithm, data: tuple[int, str]) -> float:
    """One round of clients with one small image each, weighed by the ledger, and entered for every participation."""
    classes, stem = data
    x = np.zeros((1, 3, 32, 32) if stem == "imagenet" else (1, 3, 8, 8), np.float32)
    federation = pf.Federation.from_arrays([(x, np.array([k])) for k in (0, 1)], classes=classes)
    model = models.build("resnet18", x.shape[1:], classes, stem=stem)
    run = pf.fit(model, federation, method, rounds=1, fraction=0.5, local_steps=1, evaluate_every=0)
    row = next(run.ledger.itertuples())
    ledger, ids = Ledger(), np.arange(COHORT)
    for t in range(ROUNDS):
        ledger.record(t, ids, row.exchanges, row.down_bytes, row.up_bytes, 0, 0)
    return sum(ledger.totals()) / 1e9


@pytest.mark.parametrize(
    ("method", "data", "expected"),
    [
        (pf.FedAvg(), CIFAR10, 893.92),
        (pf.FedAvg(), TINY, 902.33),
        (pf.LGFedAvg(), TINY, 8.21),
        (pf.FedRep(head_epochs=0), CIFAR100, 893.51),
    ],
    ids=lambda v: v.name if isinstance(v, pf.Algorithm) else str(v),
)
def test_gigabytes(method, data, expected):
    assert round(gigabytes(method, data), 2) == expected
