"""FedCET's recipes: the claims that are decided."""

from itertools import product

import pytest

from polyfed.recipes import Bench, find

OTHERS = ("FedTrack", "SCAFFOLD", "FedLin")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedcet/equal-bytes", [f"{p}, tau {t}:" for p in ("least-squares", "logistic") for t in (2, 5, 10)]),
        ("fedcet/stochastic", ["least squares:", "relu net:", "tanh net:"]),
    ],
)
def test_fedcet_is_held_against_every_exact_method(name, settings, tmp_path):
    found = find(name).run(Bench(tmp_path, seeds=1, rehearse=True)).claims
    for where, other in product(settings, OTHERS):
        assert any(c.text.startswith(f"{where} FedCET") and f"than {other}" in c.text for c in found)
