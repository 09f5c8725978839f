"""Memory that a round has freed is kept for the next one.

glibc hands blocks of megabytes back to the system and asks for them again, page by page, each filled with zeros: a
third of a round of FedCET on a perceptron of 159,010 numbers.
"""

import ctypes
import os
import platform
from functools import cache

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
