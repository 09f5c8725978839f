"""FedCET's recipes: the claims that are decided."""

import math
from itertools import product

import numpy as np
import pytest

from polyfed.algorithms.fedcet import FedCET
from polyfed_papers.fedcet import distances, linear_regression
from polyfed_papers.fedcet.equal_bytes import Compressed
from polyfed_papers.recipes import Bench, find

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


@pytest.mark.parametrize("keep", [1.0, 0.5])
def test_compressed_uploads_end_where_fedcet_does_and_cost_what_is_sent(keep):
    """All entries sent, it is FedCET to the last digits; half of them, the error falls at a linear rate."""
    problem = linear_regression(3)
    lr, weight = 1 / problem.smoothness, 0.05 if keep < 1 else 0.5
    given = {"tau": 5, "rounds": 5 if keep == 1 else 120}
    found = distances(problem, Compressed(lr=lr, weight=weight, keep=keep), **given)
    if keep == 1:
        assert found["error"] == pytest.approx(distances(problem, FedCET(lr=lr, weight=weight), **given)["error"])
    else:
        late = np.log10(found["error"][40::40])
        assert late[-1] < late[0] - 2
        assert np.ptp(np.diff(late)) < 0.2  # a straight line of the logarithm
    assert found["bytes"][3] - found["bytes"][2] == 8 * 20 + 12 * math.ceil(keep * 20)
