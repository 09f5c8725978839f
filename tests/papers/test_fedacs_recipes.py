"""FedACS's recipes: what is decided without training."""

import numpy as np

from polyfed.data.dataset import Dataset
from polyfed.papers import Bench, fedacs
from polyfed.papers.fedacs import tables


def test_on_all_classes_every_client_sees_the_same_images_evenly(tmp_path, monkeypatch):
    """However skewed what it trains on; and nothing else of the federation changes."""
    rng = np.random.default_rng(0)
    y, y_test = np.repeat(np.arange(10), 60), np.repeat(np.arange(10), 60)
    x, x_test = (rng.integers(0, 256, (600, 1, 2, 2)).astype(np.uint8) for _ in range(2))
    toy = Dataset("toy", x, y, x_test, y_test, classes=10)
    for module in (fedacs, tables):
        monkeypatch.setattr(module, "images", lambda *_: toy)
    bench = Bench(tmp_path)
    skewed = fedacs.clients(bench, "toy", "dirichlet-prior:0.1,samples=10", n=6)
    before, even = skewed(0), tables.evenly_tested(bench, "toy", skewed)(0)
    assert (even.train.y == before.train.y).all()
    first = even.test.client(0)
    for i in range(6):
        x, y = even.test.client(i)
        assert np.bincount(y).tolist() == [tables.EVEN // 10] * 10
        assert (x == first[0]).all()
        assert (y == first[1]).all()
