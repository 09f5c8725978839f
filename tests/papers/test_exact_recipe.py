"""exact/which: its problems are as conditioned as they say, and every cell is decided by an interval."""

import numpy as np
import pytest

from polyfed_papers.exact import KINDS, problem
from polyfed_papers.exact.which import PAIRS, cases
from polyfed_papers.recipes import Bench, find


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", ["quadratic", "logistic"])
def test_problems_have_the_curvature_and_the_optimum_that_they_state(loss, kind):
    own, slope, bends = problem(loss, kind, 100, 3), 0.0, []
    w = own.optimum.reshape(-1, 8)
    for x, y in map(own.federation.train.client, range(8)):
        x, y = x.numpy(), y.numpy()
        if loss == "logistic":
            odds = np.exp(x @ w.T)
            slope = slope + (odds / odds.sum(1, keepdims=True) - np.eye(2)[y]).T @ x / len(x) + w / 100
        else:
            slope = slope + 2 * (x @ w.T - y.reshape(-1, 1)).T @ x / len(x)
        bends.append(x.T @ x / len(x) * (0.5 if loss == "logistic" else 2))
        assert np.linalg.eigvalsh(bends[-1])[[0, -1]] == pytest.approx([0.01, 1])
    assert np.abs(slope).max() < 1e-12
    assert all(np.allclose(b @ bends[0], bends[0] @ b, atol=1e-9) for b in bends) == (kind == "shared")


def test_every_cell_of_the_question_is_decided(tmp_path):
    found = find("exact/which").run(Bench(tmp_path, seeds=1, rehearse=True))
    for key in cases():
        assert any(c.text.startswith(f"{key}: ") for c in found.claims)
    assert {a for pairs in PAIRS.values() for pair in pairs for a in pair} <= {
        head for table in found.tables for head in table.columns
    }
