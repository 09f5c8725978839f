"""Readers of IDX, CIFAR binary and npz files: the published formats, and one line for every kind of damage."""

import gzip
import os
import struct
import zipfile

import numpy as np
import pytest

from polyfed import Federation
from polyfed.base.errors import DataError
from polyfed.data import load, readers
from polyfed.data.datasets import IDX_FILES


def idx(array, code=0x08):
    head = bytes([0, 0, code, array.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in array.shape)
    return head + array.tobytes()


@pytest.mark.parametrize("zipped", [True, False])
def test_idx_round_trip(tmp_path, zipped):
    path = tmp_path / "x"
    for x, code in ((np.arange(24, dtype=np.uint8).reshape(2, 3, 4), 0x08), (np.array([1, 256], dtype=">i4"), 0x0C)):
        path.write_bytes(gzip.compress(idx(x, code)) if zipped else idx(x, code))
        assert np.array_equal(readers.read_idx(path), x)


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
            readers.read_idx(path)
    with refused(tmp_path / "none", "cannot be read"):
        readers.read_idx(tmp_path / "none")


def test_cifar_binary(tmp_path, refused):
    rows = np.zeros((3, 3073), np.uint8)
    rows[:, 0] = [1, 0, 9]
    rows[1, 1:1025] = 200  # the red plane comes first
    path = tmp_path / "batch.bin"
    path.write_bytes(rows.tobytes())
    x, y = readers.read_cifar(path)
    assert x.shape == (3, 3, 32, 32)
    assert y[:, 0].tolist() == [1, 0, 9]
    assert (x[1, 0] == 200).all()
    assert (x[1, 1:] == 0).all()
    rows[2, 0] = 10
    path.write_bytes(rows.tobytes())
    with refused(path, "label 10", "0 to 9"):
        readers.read_cifar(path)
    path.write_bytes(rows.tobytes()[:-1])
    with refused(path, "9218", "3073"):
        readers.read_cifar(path)


def test_npz_is_never_unpickled(tmp_path, refused):
    path = tmp_path / "a.npz"
    np.savez(path, x=np.array([{"a": 1}], dtype=object), y=[0])
    with refused(path, "'x'", "never unpickled"):
        readers.read_npz(path)
    np.savez(path, x=[0])
    with refused(path, "'y'", "missing", "it has x"):
        readers.read_npz(path, ["x", "y"])
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with refused(path, "npz"):
        readers.read_npz(path)
    np.savez(path, x=np.arange(1000))
    whole = path.read_bytes()
    path.write_bytes(whole[:500] + bytes(20) + whole[520:])
    with refused(path):
        readers.read_npz(path)
    np.save(path.open("wb"), np.zeros(3))
    with refused(path, "npz"):
        readers.read_npz(path)
    with refused("none.npz", "no such file"):
        readers.read_npz(tmp_path / "none.npz")


def npz_with(path, **members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
        for name, content in members.items():
            z.writestr(name, content)


def npy(header, data=b""):
    text = header.encode() + b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def doubles(shape, data=b""):
    return npy(f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}}}", data)


@pytest.mark.parametrize(
    ("member", "words"),
    [
        (npy("(((("), ["not a readable npz file"]),
        (npy("[" * 5000), ["not a readable npz file"]),
        (doubles("(99999999999, 9999)"), ["'x'", "found 0 bytes", "in its header"]),
        (doubles("(-1,)"), ["'x'", "in its header"]),
        (doubles("(2,)", bytes(24)), ["'x'", "found 24 bytes, expected 16"]),
        (doubles("(2,)", bytes(15)), ["'x'", "found 15 bytes, expected 16"]),
        (b"PK", ["not a readable npz file"]),
    ],
    ids=["tokens", "nesting", "enormous", "negative", "too much", "too little", "no header"],
)
def test_a_damaged_array_in_an_npz_is_one_line(tmp_path, refused, member, words):
    npz_with(tmp_path / "a.npz", **{"x.npy": member})
    with refused(tmp_path / "a.npz", *words):
        readers.read_npz(tmp_path / "a.npz")


def test_npz_members_that_are_no_arrays_and_unknown_zip_methods(tmp_path, refused):
    path = tmp_path / "a.npz"
    npz_with(path, **{"notes.txt": "hello"})
    with refused(path, "notes.txt", "not an array"):
        readers.read_npz(path)
    np.savez(path, x=np.arange(9))
    raw = path.read_bytes()
    for start, at in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        k = raw.index(start) + at
        raw = raw[:k] + b"\x63\x00" + raw[k + 2 :]
    path.write_bytes(raw)
    with refused(path, "not a readable npz file"):
        readers.read_npz(path)


def test_bombs_are_refused_before_they_unpack(tmp_path, refused, monkeypatch):
    monkeypatch.setattr(readers, "UNPACKED", 1 << 20)
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros(1 << 20))
    with refused(tmp_path / "a.npz", "unpacks to 8,388,736 bytes"):
        readers.read_npz(tmp_path / "a.npz")
    (tmp_path / "a.csv").write_bytes(gzip.compress(b"a,b\n" + bytes(1 << 23)))
    with refused(tmp_path / "a.csv", "unpacks to more than"):
        readers.read_csv(tmp_path / "a.csv")


def test_what_is_no_plain_file_is_not_waited_for(tmp_path, refused):
    os.mkfifo(tmp_path / "pipe.csv")
    with refused(tmp_path / "pipe.csv", "expected a file"):
        readers.read_csv(tmp_path / "pipe.csv")


def test_csv_cells_that_only_python_takes_for_numbers(tmp_path, refused):
    path = tmp_path / "a.csv"
    path.write_text("a,b\n1,2\n1_000,3\n")
    with refused(path, "line 3", "'a'", "'1_000'"):
        readers.read_csv(path)
    path.write_text("a,b\n1,2\n" + "9" * 100_000 + "x,3\n")  # in numpy's text arrays every cell is as long as this
    with refused(path, "line 3", "expected a number"):
        readers.read_csv(path)


@pytest.mark.parametrize("label", [2**63, 1e300, float("inf")])
def test_labels_that_no_integer_holds(tmp_path, label):
    y = np.array([0, 1, label], dtype=np.uint64 if isinstance(label, int) else float)
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)), y=y)
    with pytest.raises(
        DataError,
        match=r"client 'a', train: .*(label .* is out of range|expected integers below 2\^63|are NaN or infinite)",
    ) as found:
        Federation.from_files([tmp_path / "a.npz"], task="classification")
    assert "-9" not in str(found.value)


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


# MATLAB
