"""FedACS's recipes: what is decided without training."""

from types import SimpleNamespace

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

from polyfed.base.errors import Diverged
from polyfed.data.dataset import Dataset
from polyfed_papers import fedacs
from polyfed_papers.fedacs import gap, tables
from polyfed_papers.recipes import Bench


def test_settings_are_chosen_on_training_images_alone(tmp_path, monkeypatch):
    """Trials test on training images that they do not train on, clients that count on official ones."""
    y = np.repeat(np.arange(10), 60)
    order = np.random.default_rng(0).permutation(600)
    number = np.arange(600)
    x, x_test = (np.stack([(n % 256), n // 256], 1).astype(np.uint8).reshape(-1, 1, 1, 2) for n in
                 (number, number + 600))  # fmt: skip
    toy = Dataset("toy", x[order], y[order], x_test, y, classes=10)
    monkeypatch.setattr(fedacs, "images", lambda *_: toy)
    make = fedacs.clients(Bench(tmp_path), "toy", "dirichlet-prior:0.5,samples=10", n=6)

    def numbers(split):
        pixels = (255 * split.x).round().long().flatten(1)
        return set((pixels[:, 0] + 256 * pixels[:, 1]).tolist())

    trial, counts = make(fedacs.TRIAL, trial=True), make(0)
    assert not numbers(trial.train) & numbers(trial.test)
    assert max(numbers(trial.train) | numbers(trial.test)) < 600 <= min(numbers(counts.test))


@pytest.mark.parametrize("best", [(0.003, 0.9), (0.1, 0.5), (10.0, 0.0)])
def test_step_and_own_setting_are_chosen_by_the_mean_over_the_draws(tmp_path, monkeypatch, best):
    """Draws differ in their best step; their mean is best in one place, maybe beyond the steps that are given."""
    bench, seen = Bench(tmp_path), set()

    def fit(model, federation, method, *, seed, **_):
        seen.add(seed)
        away = (np.log10(method.lr / best[0]), 2 * (method.quantile - best[1]))
        if away[0] > 1:
            raise Diverged("too large")
        skew = 5 * (federation - fedacs.TRIAL - 1) * away[0]  # adds up to nothing
        return SimpleNamespace(final={"test": {"accuracy": np.array([skew - away[0] ** 2 - away[1] ** 2])}})

    monkeypatch.setattr(bench, "fit", fit)
    found = fedacs.tuned(bench, "key", ["FedACS"], lambda seed: None, lambda seed, trial=False: seed, trials=3)
    assert found["FedACS"].lr == pytest.approx(best[0], rel=0.2)
    assert found["FedACS"].quantile == pytest.approx(best[1], abs=0.1)
    assert bench.tuning() == [f"tuned by validation: 1 choices of {fedacs.TRIALS} trials; edges left: 0"]
    assert min(seen) >= fedacs.TRIAL


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


@pytest.mark.parametrize("sizes", [(5, 5, 5, 5), (2, 8, 2, 8), (12,)])
def test_the_widest_gap_parts_planted_groups(sizes):
    """Cosines of .8 within and .3 across, each within .2: the gap is clear; of one group it is as chance makes it."""
    rng, group = np.random.default_rng(0), np.repeat(np.arange(len(sizes)), sizes)
    same = group[:, None] == group
    noise = np.triu(rng.uniform(-0.2, 0.2, same.shape), 1)
    S = np.where(same, 0.8, 0.3) + noise + noise.T
    np.fill_diagonal(S, 1.0)
    quantile, ratio = gap.widest(S)
    assert (ratio > 2) == (len(sizes) > 1)
    if len(sizes) > 1:
        assert adjusted_rand_score(group, gap.grouped(S, quantile)) == 1
        assert same[S > np.quantile(S, quantile)].all()
