"""Tables with natural clients, as published."""

import pytest
import torch

from polyfed.data import load


def test_parkinsons_is_split_by_time(data_dir):
    data = load("parkinsons", data_dir("parkinsons"))
    assert data.x.shape == (5875, 19)
    fed = data.partition()
    total = fed.train.counts + fed.test.counts
    assert (fed.n, total.min(), total.max()) == (42, 101, 168)
    assert abs(fed.test.counts / total - 0.2).max() < 0.05
    for i in range(42):
        train, test = (data.x[fed.meta["split_indices"][part][i], 2] for part in ("train", "test"))
        assert test.min() - train.max() > 0.5  # days: no session on both sides
        assert len(set(data.x[fed.meta["indices"][i], 0])) == 1  # a patient's age


def test_school(data_dir):
    data = load("school", data_dir("school"))
    assert data.x.shape == (15362, 28)
    assert data.y.mean() == pytest.approx(20.60, abs=0.005)
    fed = data.partition()
    total = fed.train.counts + fed.test.counts
    assert (fed.n, total.min(), total.max()) == (139, 22, 251)
    assert (fed.train.x[:, -1] == 1).all()  # the constant column stays


def test_housing_bodyfat(data_dir):
    fed = load("housing-bodyfat", data_dir("housing_bodyfat")).partition()
    assert (fed.input_shape, fed.clusters.tolist()) == ((14,), [0] * 6 + [1] * 2)
    total = fed.train.counts + fed.test.counts
    assert (total[:6].sum(), total[6:].sum()) == (506, 252)
    for group in (slice(0, 6), slice(6, 8)):
        rows = torch.cat([fed.train.client(i)[0] for i in range(8)[group]])
        torch.testing.assert_close(rows.amin(0), torch.full((14,), -1.0))
        torch.testing.assert_close(rows.amax(0), torch.full((14,), 1.0))
    assert any("ethical" in note for note in fed.notes)
    raw = load("housing-bodyfat", data_dir("housing_bodyfat"), scale="none")
    assert raw.y[:506].mean() == pytest.approx(22.5328, abs=1e-3)
    assert raw.y[506:].mean() == pytest.approx(19.1508, abs=1e-3)
