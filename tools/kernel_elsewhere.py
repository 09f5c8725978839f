"""The kernel's tests with a kernel that another compiler made, also for another processor, which an emulator runs:

    python tools/kernel_elsewhere.py "aarch64-linux-gnu-g++ -static" --by qemu-aarch64 tests/native --fast
    python tools/kernel_elsewhere.py "g++ -mno-avx" --set baseline tests/native
    python tools/kernel_elsewhere.py "clang++ --target=aarch64-linux-gnu -static" --by qemu-aarch64 tests/native
    python tools/kernel_elsewhere.py "g++ -O1 -fsanitize=address,undefined -fno-sanitize-recover=all" tests/native

The tests and torch stay in this process; every call goes to kernel_server.cpp with what its addresses point to, and
what comes back is written there. Under the sanitizers every array of the kernel has bytes behind it that nobody may
touch; test_bits.py is of the usual flags. With `-m long` a thousand random networks each of linear layers, of images,
recurrent and with attention: on 2026-11-29 (x86-64, GCC 12) all passed under the sanitizers by three instruction sets,
and without AVX.
"""

import argparse
import ctypes
import shlex
import struct
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyfed import native

ROOT = Path(__file__).parents[1]


class Elsewhere(native.Kernel):
    """Its calls, answered by a process."""

    def __init__(self, command: list[str], set: str | None):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.calls = 0
        self.set = set or native.SETS[self.ask(0, [], [], [])]

    def ask(
        self, which: int, memory: list[tuple[int, int]], inside: list[tuple[int, int, int]], words: list[Any]
    ) -> int:
        """memory: address and bytes of each buffer; inside: (buffer, place, of); words: numbers, or ["*", buffer]"""
        to, back = self.process.stdin, self.process.stdout
        assert to is not None
        assert back is not None
        to.write(struct.pack("<q", len(memory)))
        for address, size in memory:
            to.write(struct.pack("<q", size) + ctypes.string_at(address, size))
        flat = [len(inside), *(n for some in inside for n in some), which, len(words)]
        flat += [n for w in words for n in ((w[1], 0) if isinstance(w, list) else (-1, w))]
        to.write(struct.pack(f"<{len(flat)}q", *flat))
        to.flush()
        (said,) = struct.unpack("<q", back.read(8))
        for address, size in memory:
            ctypes.memmove(address, back.read(size), size)
        self.calls += 1
        return said

    @property
    def _library(self) -> "Elsewhere":
        return self

    def polyfed_train(self, job: Any, size: int, set: int) -> int:
        j = job._obj
        layers = np.ctypeslib.as_array(ctypes.cast(j.shape, ctypes.POINTER(ctypes.c_int64)), (j.layers, 25))
        last, C = layers[-1], j.clients
        first, count, steps = (self._whole(a, C) for a in (j.first, j.count, j.steps))
        samples, classes = int((first + count).max(initial=0)), int(last[1])

        def rows(n: int, each: int) -> int:
            return size * (each * (C - 1) + n)

        inputs = int(
            layers[0][17] if layers[0][12] in (3, 4, 5) else layers[0][0] * max(1, layers[0][8] * layers[0][9])
        )
        sizes = {
            "shape": 8 * layers.size, "real": 16 * j.layers, "w": size * C * j.p, "start": rows(j.p, j.start_each),
            "x": samples * inputs * (8 if j.integers else size), "y": samples * (8 if j.loss == 0 else size * classes),
            "first": 8 * C, "count": 8 * C, "steps": 8 * C, "keys": 16 * C, "lr": 8 * C, "keep": 8 * C,
            "seeds": 8 * (j.seeds_each * (C - 1) + int(steps.max(initial=0))), "kept": rows(j.p, j.kept_each),
            "term": 8 * j.terms, "term_each": 8 * j.terms, "by": 8 * j.terms * C, "only": rows(j.p, j.only_each),
            "curvature": 8 * C, "pull": rows(classes, j.pull_each), "teacher": rows(j.p, j.teacher_each),
            "toward": rows(classes * int(last[0]), j.toward_each),
        }  # fmt: skip
        memory, inside = [(ctypes.addressof(j), ctypes.sizeof(j))], []
        for name, size_of in sizes.items():
            if address := getattr(j, name):
                inside.append((0, getattr(native.Job, name).offset, len(memory)))
                memory.append((address, size_of))
        if j.terms:
            table = next(of for _, place, of in inside if place == native.Job.term.offset)
            for k, (at, each) in enumerate(
                zip(self._whole(j.term, j.terms), self._whole(j.term_each, j.terms), strict=True)
            ):
                inside.append((table, 8 * k, len(memory)))
                memory.append((int(at), rows(j.p, int(each))))
        # the addresses in the job and in its table are this process's: kept as they are
        kept = [bytes(ctypes.string_at(*memory[k])) for k in (0, *([table] if j.terms else []))]
        said = self.ask(1, memory, inside, [["*", 0], size, set])
        for k, data in zip((0, *([table] if j.terms else [])), kept, strict=True):
            ctypes.memmove(memory[k][0], data, len(data))
        return said

    def _whole(self, address: int, n: int) -> np.ndarray:
        return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_int64)), (int(n),))

    def _rows(self, name: str, size: int, *numbers: tuple[int, ...]) -> None:
        a = [int(n) for some in numbers for n in some]
        at = {
            "polyfed_renew": lambda: {
                2: size * a[1] * (int(max(self._whole(a[3], a[0]).max(), self._whole(a[4], a[0]).max())) + 1),
                3: 8 * a[0], 4: 8 * a[0], 5: size * a[1] * (int(self._whole(a[6], a[0]).max()) + 1), 6: 8 * a[0],
                7: size * a[0], 8: 8 * a[0],
            },
            "polyfed_products": lambda: {2: size * a[0] * a[1], 4: 8 * a[3], 5: 8 * a[0] * a[3], 6: 8 * a[0]},
            "polyfed_mix": lambda: {
                4: size * a[1] * a[2], 5: size * a[0] * (int(self._whole(a[6], a[1] // a[3] * a[2]).max()) + 1),
                6: 8 * (a[1] // a[3] * a[2]), 7: size * a[0] * a[1],
            },
        }[name]()  # fmt: skip
        at = {k: n for k, n in at.items() if a[k] and n}
        words = [["*", [*at].index(k)] if k in at else n for k, n in enumerate(a)]
        which = ["polyfed_renew", "polyfed_products", "polyfed_mix"].index(name) + 2
        self.ask(which, [(a[k], n) for k, n in at.items()], [], [size, native.SETS.index(self.set), *words])

    def polyfed_permutation(self, key: Any, times: Any, n: Any, into: Any) -> None:
        sizes = [16, 8 * times.value * n.value]
        self.ask(5, [(key.value, 16), (into.value, sizes[1])], [], [["*", 0], times.value, n.value, ["*", 1]])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("compiler", help="and its options, in one word; those of pyproject.toml come first")
    parser.add_argument("--by", default="", help="command that runs what it makes")
    parser.add_argument("--set", choices=native.SETS, help="of instructions; the widest by default")
    parser.add_argument("--program", type=Path, help="what it makes, which is kept for the next time")
    given, tests = parser.parse_known_args()
    with (ROOT / "pyproject.toml").open("rb") as f:
        (module,) = tomllib.load(f)["tool"]["setuptools"]["ext-modules"]
    with tempfile.TemporaryDirectory() as folder:
        program = (given.program or Path(folder) / "kernel").resolve()
        compiler, *options = shlex.split(given.compiler)
        made = [compiler, *module["extra-compile-args"], *options, ROOT / "tools/kernel_server.cpp", "-o", program]
        if not program.exists():
            subprocess.run(list(map(str, made)), check=True)
        kernel = Elsewhere([*shlex.split(given.by), str(program)], given.set)
        native.built = lambda: kernel
        status = pytest.main(["-p", "no:cacheprovider", *tests])
        print(f"{kernel.calls} calls, answered by {given.compiler} {given.by}, {kernel.set}")
        kernel.process.kill()
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
