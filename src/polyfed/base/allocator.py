"""Memory that is asked for once: what a round has freed is kept for the next one, and tables grow where they are.

glibc would hand megabytes back and get them again filled with zeros: a third of a round of FedCET on 159,010 numbers.
"""

import ctypes
import mmap
import os
import platform
import sys
from functools import cache
from weakref import WeakValueDictionary

import torch
from torch import Tensor

TRIM, MMAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of mallopt
KEPT = 1 << 28  # bytes that stay with the process once they are free
LARGE = 1 << 26  # bytes of a block that goes back to the system at once


@cache
def keep_freed_memory() -> None:
    """For this process, once; nothing where the C library is not glibc, or the environment sets its own thresholds."""
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    if platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        library.mallopt(TRIM, KEPT)
        library.mallopt(MMAP, LARGE)


_reserved: "WeakValueDictionary[int, mmap.mmap]" = WeakValueDictionary()  # by address, as long as a tensor lies there


def lengthened(table: Tensor, count: int, most: int) -> Tensor:
    """[k + count, q]: a table [k, q] without gaps, with rows of zeros behind its own, which stay if there is room.

    The first call reserves room for `most` rows on the CPU. Of `table` only its own rows may be used from now on.
    """
    k, q = table.shape
    room = _reserved.get(table.data_ptr())
    if room is not None and (k + count) * q * table.element_size() <= len(room):
        return table.as_strided((k + count, q), (q, 1), 0)
    # becomes memory only as it is written to
    fresh = _reserve(table, most) if table.device.type == "cpu" else None
    fresh = table.new_zeros(k + count, q) if fresh is None else fresh[: k + count]
    fresh[:k] = table
    return fresh


def _reserve(table: Tensor, most: int) -> Tensor | None:
    """[most, q] zeros that are no memory yet; None where the system does not give them."""
    size = most * table.shape[1] * table.element_size()
    if sys.platform == "win32" or size < KEPT:
        return None
    try:
        room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE)
    except OSError:
        return None
    zeros = torch.frombuffer(room, dtype=table.dtype).view(most, -1)
    _reserved[zeros.data_ptr()] = room
    return zeros
