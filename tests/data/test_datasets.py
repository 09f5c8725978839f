"""Named data sets: published counts and checksums, and that nothing held out leaks into training."""

import json
from dataclasses import replace
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
    readers,
)
from polyfed.data.dataset import Dataset
from polyfed.data.datasets import IDX_FILES, IDX_MD5, about, options
from polyfed.data.fetch import HOMES

SHIPPED = Path(polyfed.data.__file__).parent / "files" / "heart_disease"


# largest remainder


@settings(max_examples=200, deadline=None)
@given(
    counts=st.lists(st.integers(0, 1000), min_size=1, max_size=20).filter(any),
    total=st.integers(0, 300),
)
def test_largest_remainder(counts, total):
    """Sums to the total; every class within one of its exact share; a class without samples gets none."""
    quota = prepare.largest_remainder(np.array(counts), total)
    share = np.array(counts) * total / sum(counts)
    assert quota.sum() == total
    assert (np.abs(quota - share) < 1).all()
    assert (quota[np.array(counts) == 0] == 0).all()


def test_largest_remainder_where_floats_lose_one():
    """floor(ratio * 100) gives 28, 56 and 57 for ratios 0.29, 0.57 and 0.58."""
    for k in (29, 57, 58):
        assert prepare.largest_remainder(np.array([k, 100 - k]), 100).tolist() == [k, 100 - k]


@settings(max_examples=100, deadline=None)
@given(
    counts=st.lists(st.integers(0, 50), min_size=2, max_size=6).filter(any),
    available=st.integers(0, 30),
    total=st.integers(1, 100),
)
def test_ratio_quota_never_takes_more_than_there_is(counts, available, total):
    counts = np.array(counts)
    quota = prepare.ratio_quota(counts, np.full(len(counts), available), total)
    assert quota.max() <= available
    assert np.array_equal(quota, prepare.largest_remainder(counts, int(quota.sum())))
    if available >= total:
        assert quota.sum() == total


# heart disease


def test_shipped_files_are_the_published_ones():
    expected = {
        "cleveland": "2d91a8ff69cfd9616aa47b59d6f843db",
        "hungarian": "22e96bee155b5973568101c93b3705f6",
        "switzerland": "9a87f7577310b3917730d06ba9349e20",
        "va": "4249d03ca7711e84f4444768c9426170",
    }
    for hospital, md5 in expected.items():
        assert readers.md5(SHIPPED / f"processed.{hospital}.data") == md5
    text = (SHIPPED / "ATTRIBUTION.md").read_text()
    assert "CC BY 4.0" in text
    for investigator in ("Janosi", "Steinbrunn", "Pfisterer", "Detrano"):
        assert investigator in text


def test_heart_disease_counts():
    data = load("heart-disease")
    assert data.groups is not None
    assert np.bincount(data.groups).tolist() == [303, 261, 46, 130]
    assert data.x.shape == (740, 10)
    assert [int(data.y[data.groups == h].sum()) for h in (0,)] == [139]  # Cleveland has no gap, so all its 139
    prevalence = [data.y[data.groups == h].mean() for h in range(4)]
    assert 0.35 < prevalence[1] < 0.40
    assert prevalence[2] > 0.9
    assert 0.7 < prevalence[3] < 0.8
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


# toy image data: tests in the client's class ratio, transforms


def toy(size=400, test=2000, classes=10, seed=0):
    rng = np.random.default_rng(seed)
    y, y_test = np.arange(size) % classes, np.arange(test) % classes
    x, x_test = (rng.integers(0, 256, (n, 1, 4, 4)).astype(np.uint8) for n in (size, test))
    return Dataset("toy", x, y, x_test, y_test, classes)


def test_ratio_test_sets_are_exactly_100_in_the_clients_ratio():
    data = toy()
    fed = data.partition("dirichlet:0.3", clients=8, seed=2)
    assert fed.meta["test"] == "ratio:100"
    assert fed.test.counts.tolist() == [100] * 8
    for i in range(8):
        ratio = np.bincount(fed.train.client(i)[1], minlength=10) / fed.train.counts[i]
        held = np.bincount(fed.test.client(i)[1], minlength=10)
        assert (np.abs(held - 100 * ratio) < 1).all()
        index = fed.meta["split_indices"]["test"][i]
        assert len(np.unique(index)) == 100
    again = data.partition("dirichlet:0.3", clients=8, seed=2)
    assert torch.equal(fed.test.x, again.test.x)
    other = data.partition("dirichlet:0.3", clients=8, seed=3)
    assert not torch.equal(fed.test.x, other.test.x)


def test_ratio_test_set_where_a_class_runs_out_is_smaller_and_says_so():
    fed = toy(test=200).partition("pathological:2", clients=5)
    assert fed.test.counts.tolist() == [40] * 5
    assert any("fewer than 100" in note and "client-0 40" in note for note in fed.notes)


def released(counts: np.ndarray, total: int = 100) -> int:
    return int(prepare.floor_quota(counts, total).sum())


def test_rounding_down_loses_samples():
    """floor(share * 100) loses the remainders, and one more where the share is no binary fraction: 0.29 makes 28."""
    assert [prepare.floor_quota(np.array([k, 100 - k]), 100).tolist() for k in (29, 57, 58)] == [
        [28, 71], [56, 43], [57, 42],
    ]  # fmt: skip
    assert released(np.full(100, 5)) == 100
    assert released(np.array([1, 1, 1])) == 99


@pytest.mark.parametrize(
    ("classes", "size", "how", "mean"),
    [
        (10, 50_000, IID(), 96),
        (10, 50_000, DirichletPrior(0.1, restart=True), 98),
        (100, 50_000, IID(), 59),
        (100, 50_000, DirichletPrior(0.1, restart=True), 88),
        (200, 100_000, DirichletPrior(0.1, restart=True), 77),
    ],
)
def test_the_released_test_sizes_of_fedslr(classes, size, how, mean):
    """100 clients: how many of 100 test images floor(ratio * 100) leaves, as found in the released code, to 1."""
    labels = np.arange(size) % classes
    dealt = how.assign(Source(size, labels, classes), 100, 0).indices
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


def test_pixels_become_floats_and_indices_point_at_them():
    data = toy()
    fed = data.partition("iid", clients=3, validation_fraction=0.2)
    assert fed.train.x.dtype == torch.float32
    assert 0.9 < fed.train.x.max() <= 1
    rows = fed.meta["split_indices"]["train"][1]
    np.testing.assert_allclose(fed.train.client(1)[0].numpy(), data.x[rows] / 255, rtol=1e-6)
    assert set(rows) <= set(fed.meta["indices"][1])


def test_normalised_pixels():
    """(x / 255 - mean) / deviation per channel, training and test alike."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (40, 2, 4, 4)).astype(np.uint8)
    data = Dataset("toy", x, np.arange(40) % 4, x, np.arange(40) % 4, 4)
    plain = data.partition("iid", clients=3, test_samples=8)
    by_channel = replace(data, normalise=((0.1, 0.4), (0.5, 0.2))).partition("iid", clients=3, test_samples=8)
    mean, deviation = torch.tensor([0.1, 0.4])[:, None, None], torch.tensor([0.5, 0.2])[:, None, None]
    for part in ("train", "test"):
        a, b = getattr(plain, part).x, getattr(by_channel, part).x
        torch.testing.assert_close(b, (a - mean) / deviation)
    half = replace(data, x=x.reshape(40, -1), x_test=None, normalise=((0.5,), (0.5,)))
    flat = half.partition("iid", clients=3, test="own").train.x
    assert -1 <= flat.min() < -0.9
    assert 0.9 < flat.max() <= 1


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "cifar100"])
def test_the_usual_constants_are_the_training_pixels_mean_and_deviation(name, data_dir):
    data = load(name, data_dir(name.replace("-", "_")), normalise=True)
    assert data.normalise is not None
    x = data.x.astype(np.float32) / 255
    subset = 0.005 if name.startswith("cifar") else 0.0  # the files may hold a part only
    np.testing.assert_allclose(x.mean((0, 2, 3), dtype=np.float64), data.normalise[0], atol=6e-4 + subset)
    np.testing.assert_allclose(x.std((0, 2, 3), dtype=np.float64), data.normalise[1], atol=6e-4 + subset)


def test_label_swap_acts_on_train_and_test_alike():
    data = toy()
    plain = data.partition(Dirichlet(1.0), clients=8)
    swapped = data.partition(LabelSwap(Dirichlet(1.0)), clients=8)
    assert swapped.clusters is not None
    for i in range(8):
        p = int(swapped.clusters[i])
        for a, b in ((plain.train, swapped.train), (plain.test, swapped.test)):
            (xa, ya), (xb, yb) = a.client(i), b.client(i)
            assert torch.equal(xa, xb)
            exchanged = torch.where(ya == p, 8 - p, torch.where(ya == 8 - p, p, ya))
            assert torch.equal(yb, exchanged)


def test_rotation_acts_on_train_and_test_alike():
    data = toy()
    plain = data.partition("iid", clients=4)
    turned = data.partition(Rotation(), clients=4)
    assert turned.clusters is not None
    assert turned.clusters.tolist() == [0, 1, 2, 3]
    for i in range(4):
        for a, b in ((plain.train, turned.train), (plain.test, turned.test)):
            expected = np.rot90(a.client(i)[0].numpy(), i, axes=(-2, -1))
            np.testing.assert_array_equal(b.client(i)[0].numpy(), expected)


def test_the_other_test_sets():
    data = toy()
    own = data.partition("iid", clients=4, test="own", test_fraction=0.25)
    assert own.train.counts.tolist() == [75] * 4
    assert own.test.counts.tolist() == [25] * 4
    merged = data.partition("iid", clients=4, test="merged", test_fraction=0.25)
    assert (merged.train.counts + merged.test.counts).tolist() == [600] * 4
    assert merged.train.counts.tolist() == [450] * 4
    independent = data.partition("dirichlet:1.0", clients=4, test="independent")
    used = np.concatenate(independent.meta["split_indices"]["test"])
    assert np.array_equal(np.sort(used), np.arange(2000))


def test_partition_refuses(refused):
    data, regression = toy(), Dataset("numbers", np.zeros((10, 2), np.float32), np.zeros(10, np.float32))
    with refused("toy", "no natural clients"):
        data.partition()
    with refused("number of clients"):
        data.partition("iid")
    with refused("test: unknown 'ration'", "did you mean 'ratio'"):
        data.partition("iid", clients=2, test="ration")
    with refused("official test set", "numbers"):
        regression.partition("iid", clients=2, test="ratio")
    with refused("natural clients"):
        data.partition("iid", clients=2, test="given")
    with refused("validation fraction"):
        data.partition("iid", clients=2, validation_fraction=-0.1)
    with refused("data.name: unknown 'fashion-minst'", "did you mean 'fashion-mnist'"):
        load("fashion-minst")
    with refused("data.options.feature: fpfc-s1 has no such option", "did you mean 'features'"):
        load("fpfc-s1", feature="normal")
    with refused("standardise", "'all'", "pooled, client or none"):
        load("heart-disease", standardise="all")
    with refused("data.options.normalise of mnist: found 'full', expected true or false or half"):
        load("mnist", normalise="full")
    with refused("no such folder"):
        load("some/where")


def test_registry():
    assert set(names()) >= {"heart-disease", "digits", "mnist", "cifar10", "school", "fpfc-s1", "fpfc-s5"}
    pytest.importorskip("polyfed_papers", reason="five of the names are its own")
    for name in names():
        assert about(name)
    assert options("fpfc-s1") == {"features": "uniform", "scale": "full", "seed": 0}


def test_digits_need_no_file():
    fed = load("digits").partition(parse("dirichlet:0.5"), clients=10)
    assert len(load("digits")) == 1797
    assert fed.input_shape == (1, 8, 8)
    assert 0 <= fed.train.x.min() < fed.train.x.max() <= 1
    assert load("digits", flat=True).partition("iid", clients=2).input_shape == (64,)


def test_folders_load_as_natural_clients(tmp_path):
    rng = np.random.default_rng(0)
    for k, name in enumerate("ab"):
        n = 10 + k
        x, y = rng.standard_normal((n, 3)), np.arange(n) % 2
        np.savez(tmp_path / f"{name}.npz", x=x, y=y, x_test=x[:4], y_test=y[:4])
    fed = load(tmp_path).partition()
    assert fed.names == ("a", "b")
    assert fed.train.counts.tolist() == [10, 11]
    assert fed.test.counts.tolist() == [4, 4]
    assert fed.meta["test"] == "given"
    pooled = load(str(tmp_path)).partition("iid", clients=3, test="own")
    assert (pooled.train.counts + pooled.test.counts).sum() == 21
    single = load(tmp_path / "a.npz").partition("iid", clients=2, test_samples=2)
    assert single.n == 2
    assert single.meta["test"] == "ratio:2"


def test_missing_files_say_where_to_put_them(tmp_path, refused):
    for name, file in (
        ("mnist", "train-images-idx3-ubyte.gz"),
        ("cifar10", "test_batch.bin"),
        ("tiny-imagenet", "tiny-imagenet-200.zip"),
        ("school", "school.npz"),
        ("parkinsons", "parkinsons_updrs.data"),
        ("housing-bodyfat", "boston_housing.csv"),
    ):
        with refused(name, file, tmp_path) as caught:
            load(name, tmp_path)
        assert ("data fetch" in str(caught.value)) == (name in HOMES)  # which are all that can be fetched
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"")
    with refused("cifar10", "pickles", "binary version"):
        load("cifar10", tmp_path)


# the real files, where they are


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_data_sets(name, data_dir):
    folder = name.replace("-", "_")
    root = data_dir(folder)
    data = load(name, root)
    assert data.x.shape == (60_000, 1, 28, 28)
    assert data.x_test is not None
    assert data.x_test.shape == (10_000, 1, 28, 28)
    for file, md5 in zip(IDX_FILES, IDX_MD5[name], strict=True):
        assert readers.md5(root / folder / file) == md5
    assert not any("not the published" in note for note in data.notes)
    if name == "fashion-mnist":
        assert np.bincount(data.y).tolist() == [6000] * 10
        fed = data.partition("dirichlet-prior:0.1", clients=100)
        assert fed.train.counts.tolist() == [600] * 100
        assert fed.test.counts.tolist() == [100] * 100
    else:
        assert data.y[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]


@pytest.mark.parametrize(
    ("name", "rows", "classes"), [("cifar10", (20_000, 5_000), 10), ("cifar100", (10_000, 2_500), 100)]
)
def test_cifar_subsets(name, rows, classes, data_dir):
    data = load(name, data_dir(name))
    assert data.y_test is not None
    assert (len(data.y), len(data.y_test)) == rows
    assert data.x.shape[1:] == (3, 32, 32)
    assert len(set(np.bincount(data.y, minlength=classes))) == 1
    assert any("subset" in note for note in data.notes)
    if name == "cifar10":
        means = data.x.mean((0, 2, 3)) / 255
        np.testing.assert_allclose(means, [0.4914, 0.4822, 0.4465], atol=0.005)  # published, full set
    else:
        coarse = load(name, data_dir(name), labels="coarse")
        assert coarse.classes == 20
        assert np.bincount(coarse.y).tolist() == [500] * 20


def test_parkinsons_is_split_by_time(data_dir):
    data = load("parkinsons", data_dir("parkinsons"))
    assert data.x.shape == (5875, 19)
    fed = data.partition()
    assert fed.n == 42
    total = fed.train.counts + fed.test.counts
    assert total.min() == 101
    assert total.max() == 168
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
    assert fed.n == 139
    assert (fed.train.counts + fed.test.counts).min() == 22
    assert (fed.train.counts + fed.test.counts).max() == 251
    assert (fed.train.x[:, -1] == 1).all()  # the constant column stays


def test_housing_bodyfat(data_dir):
    data = load("housing-bodyfat", data_dir("housing_bodyfat"))
    fed = data.partition()
    assert fed.n == 8
    assert fed.input_shape == (14,)
    assert fed.clusters is not None
    assert fed.clusters.tolist() == [0] * 6 + [1] * 2
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


def test_a_client_without_samples_is_refused_unless_it_is_left_out(refused):
    data = Dataset("toy", np.zeros((20, 2), np.float32), np.arange(20) % 2, classes=2)
    natural = replace(data, groups=np.array([0] * 10 + [2] * 10), group_names=("north", "south", "west"))
    with refused("toy, partition natural: client 'south' has no samples, expected at least one"):
        natural.partition()
    assert natural.partition(without=["south"]).names == ("north", "west")
    with refused("toy, partition dirichlet:0.05: client 'client-", "has no samples"):
        data.partition("dirichlet:0.05", clients=8, min_samples=0)
