"""Readers of npz and CSV files: one line for every kind of damage."""

import gzip
import os
import struct
import zipfile

import numpy as np
import pytest

from polyfed.data import readers


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
