"""Named data sets: published counts and checksums, and that nothing held out leaks into training."""

import json
from dataclasses import replace
from hashlib import md5
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import polyfed.data
from polyfed.data import (
    IID,
    Dirichlet,
    DirichletPrior,
    LabelSwap,
    Rotation,
    Source,
    load,
    names,
    parse,
    prepare,
)
from polyfed.data.dataset import Dataset
from polyfed.data.datasets import about, options

SHIPPED = Path(polyfed.data.__file__).parent / "files" / "heart_disease"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=20).filter(any), st.integers(0, 300))
def test_largest_remainder(counts, total):
    """Sums to the total; every class within one of its exact share; a class without samples gets none."""
    quota = prepare.largest_remainder(np.array(counts), total)
    share = np.array(counts) * total / sum(counts)
    assert quota.sum() == total
    assert (np.abs(quota - share) < 1).all()
    assert (quota[np.array(counts) == 0] == 0).all()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=2, max_size=6).filter(any), st.integers(0, 30), st.integers(1, 100))
def test_ratio_quota_never_takes_more_than_there_is(counts, available, total):
    counts = np.array(counts)
    quota = prepare.ratio_quota(counts, np.full(len(counts), available), total)
    assert quota.max() <= available
    assert np.array_equal(quota, prepare.largest_remainder(counts, int(quota.sum())))
    if available >= total:
        assert quota.sum() == total


def test_shipped_files_are_the_published_ones():
    published = {
        "cleveland": "2d91a8ff69cfd9616aa47b59d6f843db",
        "hungarian": "22e96bee155b5973568101c93b3705f6",
        "switzerland": "9a87f7577310b3917730d06ba9349e20",
        "va": "4249d03ca7711e84f4444768c9426170",
    }
    assert {name: md5((SHIPPED / f"processed.{name}.data").read_bytes()).hexdigest() for name in published} == published
    text = (SHIPPED / "ATTRIBUTION.md").read_text()
    assert all(word in text for word in ("CC BY 4.0", "Janosi", "Steinbrunn", "Pfisterer", "Detrano"))


def test_heart_disease_counts():
    data = load("heart-disease")
    assert np.bincount(data.groups).tolist() == [303, 261, 46, 130]
    assert data.x.shape == (740, 10)
    assert data.y[data.groups == 0].sum() == 139  # Cleveland has no gap, so all its 139
    prevalence = [data.y[data.groups == h].mean() for h in range(1, 4)]
    assert (np.array([0.35, 0.9, 0.7]) < prevalence).all()
    assert (prevalence < np.array([0.4, 1.0, 0.8])).all()
    fed = data.partition()
    assert fed.names == ("cleveland", "hungarian", "switzerland", "va")
    assert (fed.train.counts + fed.test.counts).tolist() == [303, 261, 46, 130]
    assert fed.meta["test"] == "own:0.2"
    assert any("Detrano" in note for note in fed.notes)
    json.dumps(fed.describe())


def test_a_pixel_that_is_the_same_in_all_images_stays_and_others_are_standardised(tmp_path):
    rng = np.random.default_rng(0)
    for name in "ab":
        x = rng.normal(5, 3, (20, 1, 4, 4)).astype(np.float32)
        x[:, 0, 1, 2] = 7
        np.savez(tmp_path / f"{name}.npz", x=x, y=np.arange(20) % 2)
    train = load(tmp_path, standardise="client").partition(seed=0).train
    for i in range(2):
        own = train.x[int(train.offsets[i]) : int(train.offsets[i + 1]), 0].double()
        moving = torch.ones(4, 4, dtype=torch.bool)
        moving[1, 2] = False
        assert (own[:, 1, 2] == 7).all()
        assert own.mean(0)[moving].abs().max() < 1e-6
        assert (own.var(0, unbiased=False)[moving] - 1).abs().max() < 1e-5


def test_pooled_standardisation_of_training_rows():
    fed = load("heart-disease").partition(seed=4)
    assert fed.train.x.double().mean(0).abs().max() < 1e-5
    assert (fed.train.x.double().var(0, unbiased=False) - 1).abs().max() < 1e-5
    assert any("training rows" in note for note in fed.notes)
    by_client = load("heart-disease", standardise="client").partition(seed=4)
    assert by_client.train.client(2)[0].mean(0).abs().max() < 1e-4
    raw = load("heart-disease", standardise="none").partition(seed=4)
    assert raw.train.x[:, 0].min() >= 28  # years


@pytest.mark.parametrize("scope", ["pooled", "client", "cluster"])
@pytest.mark.parametrize("method", ["z-score", "minmax", "unit"])
def test_standardisation_never_sees_a_held_out_row(scope, method):
    """Change a test and a validation row beyond recognition: no training number changes."""
    rng = np.random.default_rng(0)
    data = Dataset(
        "toy",
        rng.standard_normal((40, 3)).astype(np.float32),
        rng.standard_normal(40).astype(np.float32),
        groups=np.repeat(np.arange(4), 10),
        group_clusters=np.array([0, 0, 1, 1]),
        standardise=scope,
        scaling=method,
    )
    before = data.partition(validation_fraction=0.25)
    x = data.x.copy()
    for part in ("test", "validation"):
        x[np.concatenate(before.meta["split_indices"][part])] = 1e6
    after = replace(data, x=x).partition(validation_fraction=0.25)
    assert torch.equal(before.train.x, after.train.x)
    assert not torch.equal(before.test.x, after.test.x)
    if method == "minmax":
        assert before.train.x.abs().max() == pytest.approx(1)
    # and training rows do set the scale
    x[before.meta["split_indices"]["train"][0][0]] = 1e6
    assert not torch.equal(replace(data, x=x).partition(validation_fraction=0.25).train.x, before.train.x)


def toy(size=400, test=2000, classes=10, seed=0):
    rng = np.random.default_rng(seed)
    y, y_test = np.arange(size) % classes, np.arange(test) % classes
    x, x_test = (rng.integers(0, 256, (n, 1, 4, 4)).astype(np.uint8) for n in (size, test))
    return Dataset("toy", x, y, x_test, y_test, classes)


def test_ratio_test_sets_are_exactly_100_in_the_clients_ratio():
    """And smaller, which is said, where a class runs out."""
    fed, again, other = (toy().partition("dirichlet:0.3", clients=8, seed=seed) for seed in (2, 2, 3))
    assert (fed.meta["test"], fed.test.counts.tolist()) == ("ratio:100", [100] * 8)
    for i in range(8):
        ratio = np.bincount(fed.train.client(i)[1], minlength=10) / fed.train.counts[i]
        assert (np.abs(np.bincount(fed.test.client(i)[1], minlength=10) - 100 * ratio) < 1).all()
        assert len(np.unique(fed.meta["split_indices"]["test"][i])) == 100
    assert torch.equal(fed.test.x, again.test.x)
    assert not torch.equal(fed.test.x, other.test.x)
    few = toy(test=200).partition("pathological:2", clients=5)
    assert few.test.counts.tolist() == [40] * 5
    assert any("fewer than 100" in note and "client-0 40" in note for note in few.notes)


def released(counts: np.ndarray, total: int = 100) -> int:
    return int(prepare.floor_quota(counts, total).sum())


def test_rounding_down_loses_samples():
    """floor(share * 100) loses the remainders, and one more where the share is no binary fraction: 0.29 makes 28."""
    for k in (29, 57, 58):
        counts = np.array([k, 100 - k])
        assert prepare.floor_quota(counts, 100).tolist() == [k - 1, 100 - k]
        assert prepare.largest_remainder(counts, 100).tolist() == [k, 100 - k]
    assert released(np.full(100, 5)) == 100
    assert released(np.array([1, 1, 1])) == 99


PRIOR = DirichletPrior(0.1, restart=True)


@pytest.mark.parametrize(
    ("classes", "how", "mean"), [(10, IID(), 96), (10, PRIOR, 98), (100, IID(), 59), (100, PRIOR, 88), (200, PRIOR, 77)]
)
def test_the_released_test_sizes_of_fedslr(classes, how, mean):
    """100 clients: how many of 100 test images floor(ratio * 100) leaves, as found in the released code, to 1."""
    labels = np.arange(100_000 if classes == 200 else 50_000) % classes
    dealt = how.assign(Source(len(labels), labels, classes), 100, 0).indices
    found = [released(np.bincount(labels[index], minlength=classes)) for index in dealt]
    assert np.mean(found) == pytest.approx(mean, abs=1)


def test_rounded_down_test_sets():
    data = toy(400, 4000)
    fed = data.partition("dirichlet:0.3", clients=8, seed=2, test="ratio-floor")
    assert fed.meta["test"] == "ratio-floor:100"
    for i in range(8):
        counts = np.bincount(fed.train.client(i)[1], minlength=10)
        assert np.bincount(fed.test.client(i)[1], minlength=10).tolist() == prepare.floor_quota(counts, 100).tolist()
    assert any("rounded down" in note and "not 100" in note for note in fed.notes)
    assert data.partition("iid", clients=4, test="ratio-floor", test_samples=50).test.counts.max() <= 50


def test_pixels_become_floats_and_are_normalised_where_that_is_asked():
    """(x / 255 - mean) / deviation per channel, training and test alike; indices point at the data set's."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (40, 2, 4, 4)).astype(np.uint8)
    data = Dataset("toy", x, np.arange(40) % 4, x, np.arange(40) % 4, 4)
    how = {"clients": 3, "test_samples": 8, "validation_fraction": 0.2}
    plain = data.partition("iid", **how)
    assert plain.train.x.dtype == torch.float32
    rows = plain.meta["split_indices"]["train"][1]
    np.testing.assert_allclose(plain.train.client(1)[0].numpy(), x[rows] / 255, rtol=1e-6)
    assert set(rows) <= set(plain.meta["indices"][1])
    by_channel = replace(data, normalise=((0.1, 0.4), (0.5, 0.2))).partition("iid", **how)
    mean, deviation = torch.tensor([0.1, 0.4])[:, None, None], torch.tensor([0.5, 0.2])[:, None, None]
    for part in ("train", "test"):
        a, b = getattr(plain, part).x, getattr(by_channel, part).x
        torch.testing.assert_close(b, (a - mean) / deviation)
    half = replace(data, x=x.reshape(40, -1), x_test=None, normalise=((0.5,), (0.5,)))
    flat = half.partition("iid", clients=3, test="own").train.x
    assert -1 <= flat.min() < -0.9
    assert 0.9 < flat.max() <= 1


def test_label_swap_and_rotation_act_on_train_and_test_alike():
    data = toy()
    plain = data.partition(Dirichlet(1.0), clients=8)
    swapped = data.partition(LabelSwap(Dirichlet(1.0)), clients=8)
    turned = data.partition(Rotation(Dirichlet(1.0)), clients=8)
    assert turned.clusters.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    for i in range(8):
        p = int(swapped.clusters[i])
        for part in ("train", "test"):
            (x, y), (xs, ys), (xt, yt) = (getattr(fed, part).client(i) for fed in (plain, swapped, turned))
            assert torch.equal(x, xs)
            assert torch.equal(ys, torch.where(y == p, 8 - p, torch.where(y == 8 - p, p, y)))
            assert torch.equal(y, yt)
            np.testing.assert_array_equal(xt, np.rot90(x.numpy(), i // 2, axes=(-2, -1)))


def test_the_other_test_sets():
    data = toy()
    own = data.partition("iid", clients=4, test="own", test_fraction=0.25)
    assert (own.train.counts.tolist(), own.test.counts.tolist()) == ([75] * 4, [25] * 4)
    merged = data.partition("iid", clients=4, test="merged", test_fraction=0.25)
    assert (merged.train.counts + merged.test.counts).tolist() == [600] * 4
    assert merged.train.counts.tolist() == [450] * 4
    independent = data.partition("dirichlet:1.0", clients=4, test="independent")
    used = np.concatenate(independent.meta["split_indices"]["test"])
    assert np.array_equal(np.sort(used), np.arange(2000))


@pytest.mark.parametrize(
    ("words", "do"),
    [
        (("toy", "no natural clients"), lambda: toy().partition()),
        (("number of clients",), lambda: toy().partition("iid")),
        (("test: unknown 'ration'", "did you mean 'ratio'"), lambda: toy().partition("iid", clients=2, test="ration")),
        (("natural clients",), lambda: toy().partition("iid", clients=2, test="given")),
        (("official test set",), lambda: Dataset("n", np.zeros((9, 2)), np.zeros(9)).partition("iid", 2, test="ratio")),
        (("validation fraction",), lambda: toy().partition("iid", clients=2, validation_fraction=-0.1)),
        (("data.name: unknown 'fashion-minst'", "did you mean 'fashion-mnist'"), lambda: load("fashion-minst")),
        (("data.options.flats: digits has no such option", "mean 'flat'"), lambda: load("digits", flats=True)),
        (("standardise", "'all'", "pooled, client or none"), lambda: load("heart-disease", standardise="all")),
        (("no such folder",), lambda: load("some/where")),
    ],
)
def test_partition_refuses(refused, words, do):
    with refused(*words):
        do()


def test_registry_and_what_needs_no_file():
    assert set(names()) >= {"heart-disease", "digits", "mnist", "cifar10", "school", "fpfc-s1", "fpfc-s5"}
    assert options("synthetic") == {"alpha": 1.0, "beta": 1.0, "clients": 30, "seed": 0}
    fed = load("digits").partition(parse("dirichlet:0.5"), clients=10)
    assert len(load("digits")) == 1797
    assert fed.input_shape == (1, 8, 8)
    assert 0 <= fed.train.x.min() < fed.train.x.max() <= 1
    assert load("digits", flat=True).partition("iid", clients=2).input_shape == (64,)
    pytest.importorskip("polyfed_papers", reason="most of the names are its own")
    assert all(map(about, names()))


def test_folders_load_as_natural_clients(tmp_path):
    for n, name in ((10, "a"), (11, "b")):
        x, y = np.random.default_rng(n).standard_normal((n, 3)), np.arange(n) % 2
        np.savez(tmp_path / f"{name}.npz", x=x, y=y, x_test=x[:4], y_test=y[:4])
    fed = load(tmp_path).partition()
    assert (fed.names, fed.train.counts.tolist()) == (("a", "b"), [10, 11])
    assert (fed.test.counts.tolist(), fed.meta["test"]) == ([4, 4], "given")
    pooled = load(str(tmp_path)).partition("iid", clients=3, test="own")
    assert (pooled.train.counts + pooled.test.counts).sum() == 21
    single = load(tmp_path / "a.npz").partition("iid", clients=2, test_samples=2)
    assert (single.n, single.meta["test"]) == (2, "ratio:2")


def test_a_client_without_samples_is_refused_unless_it_is_left_out(refused):
    data = Dataset("toy", np.zeros((20, 2), np.float32), np.arange(20) % 2, classes=2)
    natural = replace(data, groups=np.array([0] * 10 + [2] * 10), group_names=("north", "south", "west"))
    with refused("toy, partition natural: client 'south' has no samples, expected at least one"):
        natural.partition()
    assert natural.partition(without=["south"]).names == ("north", "west")
    with refused("toy, partition dirichlet:0.05: client 'client-", "has no samples"):
        data.partition("dirichlet:0.05", clients=8, min_samples=0)
