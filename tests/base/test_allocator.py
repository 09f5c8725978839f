"""Freed memory is kept for the next round: it does not come back from the system page by page."""

import platform
import subprocess
import sys

import pytest

BLOCKS = """
import resource
import torch
from polyfed.base.allocator import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def rounds(count):
    for _ in range(count):
        temporaries = [torch.zeros(n << 18) for n in (6, 12, 40)]  # 6, 12 and 40 MB
        del temporaries

{call}
rounds(10)  # until the heap is as long as it needs
before = faults()
rounds(5)
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_a_rounds_memory_serves_the_next_round(monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)

    def faults(call: str) -> int:
        done = subprocess.run([sys.executable, "-c", BLOCKS.format(call=call)], capture_output=True, text=True)
        return int(done.stdout)

    assert faults("") > 5 * 10000  # 40 MB are 10,240 pages
    assert faults("keep_freed_memory()") < 1000
