"""Freed memory is kept for the next round, and tables grow without being copied."""

import platform
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from polyfed.base.allocator import KEPT, lengthened

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

for call in (lambda: None, keep_freed_memory):
    call()
    rounds(10)  # until the heap is as long as it needs
    before = faults()
    rounds(5)
    print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_a_rounds_memory_serves_the_next_round(monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)

    done = subprocess.run([sys.executable, "-c", BLOCKS], capture_output=True, text=True)
    before, kept = map(int, done.stdout.split())
    assert before > 5 * 10000  # 40 MB are 10,240 pages
    assert kept < 1000


@pytest.mark.skipif(sys.platform != "linux", reason="of one system's way to count memory")
def test_a_table_grows_where_it_is_and_only_rows_that_are_written_to_take_memory():
    def resident() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20

    table, before, places = torch.zeros(0, 1 << 18), resident(), set()
    for k in range(64):  # a row has 1 MB, and there may come to be 1000
        table = lengthened(table, 1, 1000)
        table[k] = k
        places.add(table.data_ptr())
    assert (table == torch.arange(64)[:, None]).all()
    assert len(places) == 1
    assert resident() - before < 80


def test_rows_behind_a_part_of_another_tensor_are_not_taken():
    """Nor those behind a part of a table that has room; new rows are zeros, whatever lay there."""
    whole = torch.ones(9, 2)
    found = lengthened(whole[:3], 2, 9)
    assert found.tolist() == 3 * [[1, 1]] + 2 * [[0, 0]]
    most = KEPT // 8  # rows of two numbers: as small as room is reserved for
    table = lengthened(whole[:3], 4, most)
    later = lengthened(table[2:3], 1, most)
    later[1] = 5
    assert later.data_ptr() not in (table.data_ptr(), table[2:].data_ptr())
    assert table.tolist() == 3 * [[1, 1]] + 4 * [[0, 0]]
    assert lengthened(table, 2, most).data_ptr() == table.data_ptr()
