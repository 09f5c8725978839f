"""MATLAB files of version 5, read into numpy arrays."""

import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from polyfed.base.errors import DataError, few
from polyfed.data.readers import line_of, read_bytes, unpacked_at_most

MAT_STORED = {1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8"}
MAT_CLASSES = dict(zip(range(6, 16), ("f8", "f4", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"), strict=True))
MAT_CELL, MAT_MATRIX, MAT_PACKED, MAT_COMPLEX = 1, 14, 15, 8


def read_mat(path: str | Path, required: Sequence[str]) -> dict[str, np.ndarray]:
    """Arrays of numbers of a MATLAB file (version 5, little-endian, packed or not); of cells an array of objects."""
    raw = read_bytes(path)  # SciPy's reader ends the process on some damaged files
    if raw[124:128] != b"\x00\x01IM":
        raise DataError(f"{path}: not a MATLAB file of version 5; save('-v7', ...) writes one")
    found: dict[str, np.ndarray | None] = {}
    try:
        for kind, data in _mat_elements(memoryview(raw)[128:]):
            if kind == MAT_PACKED:
                unpacker, most = zlib.decompressobj(), unpacked_at_most(len(data))
                unpacked = unpacker.decompress(data, most)
                if not unpacker.eof:
                    raise ValueError(f"cut short, or unpacks to more than {most:,} bytes")
                kind, data = next(_mat_elements(memoryview(unpacked)))
            if kind == MAT_MATRIX:
                name, array = _mat_matrix(data, required)
                found[name] = array
    except Exception as e:  # zlib, struct and numpy raise a dozen kinds for damaged bytes
        raise DataError(f"{path}: not a readable MATLAB file ({line_of(e)})") from None
    for name in required:
        if found.get(name) is None:
            what = "holds no numbers" if name in found else f"is missing; it has {few(found) or 'none'}"
            raise DataError(f"{path}: array {name!r} {what}")
    return {name: array for name in required if (array := found[name]) is not None}


def _mat_elements(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """The elements of a MATLAB file, or those inside one: (type, bytes)."""
    at = 0
    while at < len(data):
        kind, size = struct.unpack_from("<II", data, at)
        small = kind >> 16  # four bytes at most, which share the eight of the head
        begin, size, kind = (at + 4, small, kind & 0xFFFF) if small else (at + 8, size, kind)
        if begin + size > len(data) or small > 4:
            raise ValueError(f"found {len(data) - begin} bytes, expected {size}")
        yield kind, data[begin : begin + size]
        at = at + 8 if small else begin + size + (0 if kind == MAT_PACKED else -size % 8)


def _mat_matrix(data: memoryview, wanted: Sequence[str] | None) -> tuple[str, np.ndarray | None]:
    """(name, array) of a matrix; None for one that is not `wanted` (None: all) or no array of real numbers."""
    (_, flags), (_, dims), (_, name), *rest = _mat_elements(data)
    kind, shape, text = flags[0], np.frombuffer(dims, "<i4"), bytes(name).decode("latin-1")
    if min(shape) < 0:
        raise ValueError(f"a shape of {shape.tolist()}")
    if (wanted is not None and text not in wanted) or flags[1] & MAT_COMPLEX:
        return text, None
    if kind == MAT_CELL:
        cells = np.empty(len(rest), dtype=object)
        cells[:] = [_mat_matrix(inside, None)[1] for _, inside in rest]
        return text, cells.reshape(shape, order="F")
    if kind not in MAT_CLASSES:
        return text, None
    ((stored, values),) = rest
    return text, np.frombuffer(values, MAT_STORED[stored]).reshape(shape, order="F").astype(MAT_CLASSES[kind])
