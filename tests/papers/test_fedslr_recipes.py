"""FedSLR's recipes: what decides a peak, and Per-FedAvg's step size."""

import numpy as np
import pytest

from polyfed.algorithms.perfedavg import PerFedAvg
from polyfed.papers import Bench, find
from polyfed.papers.fedslr.sweeps import peak
from polyfed.papers.fedslr.table1 import methods
from polyfed.papers.recipe import ordered

HIGH, LOW = np.array([0.8, 0.9, 0.85]), np.array([0.7, 0.82, 0.76])
OPEN = HIGH + np.array([0.1, -0.1, 0.02])


@pytest.mark.parametrize(
    ("smallest", "largest", "holds"),
    [(LOW, LOW, True), (2 * HIGH, LOW, False), (OPEN, LOW, None), (OPEN, 2 * HIGH, False), (LOW, OPEN, None)],
)
def test_a_peak_is_above_both_ends(smallest, largest, holds):
    """One end above the middle refutes it, one that is not told apart leaves it open."""
    assert peak(1e-3, ordered("", HIGH, smallest), ordered("", HIGH, largest)).holds is holds


@pytest.mark.parametrize(("scale", "beta", "source"), [("small", 0.1, "ours"), ("paper", 0.001, "paper")])
def test_per_fedavgs_beta_is_the_papers_at_paper_scale_alone(scale, beta, source, tmp_path):
    method = methods(Bench(tmp_path, scale))["Per-FedAvg"]
    assert isinstance(method, PerFedAvg)
    assert method.lr == beta
    assert [s.source for s in find("fedslr/table1").settings(scale) if s.key == "Per-FedAvg's beta"] == [source]
