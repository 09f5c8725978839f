"""Images as their authors left the files: the published formats, what files hold, and one line for what is wrong."""

import gzip

import numpy as np
import pytest

from polyfed.base.errors import DataError
from polyfed.data import load
from polyfed_papers.fetch import HOMES
from polyfed_papers.images import IDX_FILES, IDX_MD5, md5, read_cifar, read_idx


def idx(array, code=0x08):
    head = bytes([0, 0, code, array.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in array.shape)
    return head + array.tobytes()


@pytest.mark.parametrize("zipped", [True, False])
def test_idx_round_trip(tmp_path, zipped):
    path = tmp_path / "x"
    for x, code in ((np.arange(24, dtype=np.uint8).reshape(2, 3, 4), 0x08), (np.array([1, 256], dtype=">i4"), 0x0C)):
        path.write_bytes(gzip.compress(idx(x, code)) if zipped else idx(x, code))
        assert np.array_equal(read_idx(path), x)


def test_damaged_idx_is_one_line(tmp_path, refused):
    good = idx(np.arange(2000, dtype=np.uint8).reshape(2, 1000) % 251)
    path = tmp_path / "labels"
    cases = {
        "cut short": gzip.compress(good)[:-9],
        "damaged": gzip.compress(good)[:30] + b"????????" + gzip.compress(good)[38:],
        "not an IDX file": b"PK\x03\x04" + good,
        "found 2011 bytes, expected 2012": good[:-1],
        "found 2013 bytes, expected 2012": good + b"!",
        "first bytes missing": b"",
        "found 6 bytes": good[:6],
        "shape [0, 4294967295]": bytes([0, 0, 8, 2]) + bytes(4) + b"\xff\xff\xff\xff",
    }
    for word, content in cases.items():
        path.write_bytes(content)
        with refused(path, word):
            read_idx(path)
    with refused(tmp_path / "none", "cannot be read"):
        read_idx(tmp_path / "none")


def test_cifar_binary(tmp_path, refused):
    rows = np.zeros((3, 3073), np.uint8)
    rows[:, 0] = [1, 0, 9]
    rows[1, 1:1025] = 200  # the red plane comes first
    path = tmp_path / "batch.bin"
    path.write_bytes(rows.tobytes())
    x, y = read_cifar(path)
    assert x.shape == (3, 3, 32, 32)
    assert y[:, 0].tolist() == [1, 0, 9]
    assert (x[1, 0] == 200).all()
    assert (x[1, 1:] == 0).all()
    rows[2, 0] = 10
    path.write_bytes(rows.tobytes())
    with refused(path, "label 10", "0 to 9"):
        read_cifar(path)
    path.write_bytes(rows.tobytes()[:-1])
    with refused(path, "9218", "3073"):
        read_cifar(path)


def test_a_hybrid_client_has_images_of_one_source_and_no_image_twice(tmp_path):
    """Every image's pixels say where it is from and which it is."""
    for k, folder in enumerate(("mnist", "fashion_mnist")):
        (tmp_path / folder).mkdir()
        images = np.zeros((12, 28, 28), dtype=np.uint8)
        images[:, 0, 0], images[:, 0, 1] = k, np.arange(12)
        labels = (np.arange(12) % 10).astype(np.uint8)
        for name, array in zip(IDX_FILES, (images, labels) * 2, strict=True):
            (tmp_path / folder / name.removesuffix(".gz")).write_bytes(idx(array))
    data = load("hybrid", tmp_path, clients=5, samples=4, flat=True, seed=1)
    assert data.group_clusters.tolist() == [0, 0, 0, 1, 1]
    assert data.x[:, 0].tolist() == np.repeat(data.group_clusters, 4).tolist()
    assert data.y.tolist() == (data.x[:, 1] % 10).tolist()
    assert len({tuple(row) for row in data.x[:, :2].tolist()}) == 20
    with pytest.raises(DataError, match="samples: found 5, expected at most 4 for 3 clients of one source"):
        load("hybrid", tmp_path, clients=5, samples=5)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "cifar100"])
def test_files_of_images_hold_what_was_published(name, data_dir):
    """Their sums, sizes and classes, and the usual constants: the training pixels' mean and deviation."""
    folder, subset = name.replace("-", "_"), name.startswith("cifar")  # of which the files hold a part
    data = load(name, data_dir(folder), normalise=True)
    x = data.x.astype(np.float32) / 255
    atol = 6e-4 + 0.005 * subset
    np.testing.assert_allclose(x.mean((0, 2, 3), dtype=np.float64), data.normalise[0], atol=atol)
    np.testing.assert_allclose(x.std((0, 2, 3), dtype=np.float64), data.normalise[1], atol=atol)
    assert data.x.shape[1:] == ((3, 32, 32) if subset else (1, 28, 28))
    rows = {"cifar10": (20_000, 5_000), "cifar100": (10_000, 2_500)}.get(name, (60_000, 10_000))
    assert (len(data.y), len(data.y_test)) == rows
    assert any("subset" in note for note in data.notes) == subset
    assert (len(set(np.bincount(data.y))) == 1) == (name != "mnist")
    if name == "cifar100":
        coarse = load(name, data_dir(name), labels="coarse")
        assert coarse.classes == 20
        assert np.bincount(coarse.y).tolist() == [500] * 20
    if not subset:
        assert [md5(data_dir(folder) / folder / file) for file in IDX_FILES] == [*IDX_MD5[name]]
        assert not any("not the published" in note for note in data.notes)
    if name == "mnist":
        assert data.y[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    if name == "fashion-mnist":
        fed = data.partition("dirichlet-prior:0.1", clients=100)
        assert fed.train.counts.tolist() == [600] * 100
        assert fed.test.counts.tolist() == [100] * 100


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
    with refused("data.options.normalise of mnist: found 'f', expected true", " half"):
        load("mnist", normalise="f")
