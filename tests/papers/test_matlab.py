"""MATLAB files are read as SciPy wrote them, and no damaged one ends the process."""

import struct

import numpy as np
import pytest
from scipy.io import savemat

from polyfed.data import readers
from polyfed_papers.matlab import read_mat


@pytest.mark.parametrize("packed", [False, True])
def test_a_matlab_file_reads_as_scipy_wrote_it(tmp_path, packed):
    path = tmp_path / "a.mat"
    kinds = ("f8", "f4", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8")
    arrays = {f"of_{kind}": np.arange(24).reshape(2, 3, 4).astype(kind) - np.array(3, kind) for kind in kinds}
    cells = np.empty((2, 2), dtype=object)
    cells[0, 0], cells[0, 1], cells[1, 0], cells[1, 1] = (
        np.eye(3),
        np.ones((1, 2)),
        np.zeros((0, 0)),
        np.full((2, 1), 7),
    )
    savemat(path, {**arrays, "c": cells, "text": "x", "z": np.array([1j])}, do_compression=packed)
    found = read_mat(path, [*arrays, "c"])
    assert [*found] == [*arrays, "c"]
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array)
    for at in np.ndindex(2, 2):
        assert np.array_equal(found["c"][at], cells[at])


def test_matlab_stores_doubles_that_are_whole_as_bytes(tmp_path):
    """[[1, 3], [2, 4]] as MATLAB 5 writes it: column by column, and short parts within their own heads."""
    inside = struct.pack("<IIII", 6, 8, 6, 0) + struct.pack("<IIii", 5, 8, 2, 2)
    inside += struct.pack("<HHcxxx", 1, 1, b"y") + struct.pack("<HH4B", 2, 4, 1, 2, 3, 4)
    (tmp_path / "a.mat").write_bytes(bytes(124) + b"\x00\x01IM" + struct.pack("<II", 14, len(inside)) + inside)
    found = read_mat(tmp_path / "a.mat", ["y"])["y"]
    assert (found.dtype, found.tolist()) == (np.float64, [[1, 3], [2, 4]])


def test_matlab_files_that_cannot_be_read(tmp_path, refused):
    path = tmp_path / "a.mat"
    savemat(path, {"x": np.arange(50.0), "text": "abc", "z": np.array([1j])})
    for name in ("text", "z"):
        with refused(path, f"{name!r} holds no numbers"):
            read_mat(path, [name])
    with refused(path, "'y' is missing; it has x, text, z"):
        read_mat(path, ["y"])
    good = path.read_bytes()
    path.write_bytes(good[:300])
    with refused(path, "not a readable MATLAB file"):
        read_mat(path, ["x"])
    path.write_bytes(good[:124] + b"\x00\x02IM" + good[128:])
    with refused(path, "version 5"):
        read_mat(path, ["x"])
    savemat(path, {"x": np.zeros(400_000)}, do_compression=True)
    with pytest.MonkeyPatch.context() as small:
        small.setattr(readers, "UNPACKED", 1000)
        with refused(path, "unpacks to more than"):
            read_mat(path, ["x"])
