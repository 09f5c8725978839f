"""Shared by all tests: one seed and one intra-op thread, so that they say the same everywhere; where data files lie;
the command line, called in this process: `cli(...)` gives the exit status and what was printed.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from polyfed.cli import call

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_methods_of_other_tests():
    """A user's file registers its methods under names that a file of another test may take again."""
    yield
    from polyfed.core.algorithm import REGISTRY

    for name in [name for name, cls in REGISTRY.items() if cls.__module__.startswith("polyfed_user_")]:
        del REGISTRY[name]
    if build := sys.modules.get("polyfed.experiment.build"):
        build._execute.cache_clear()


@pytest.fixture(scope="session")
def data_dir():
    """A function: the folder of data files, or skip when `wanted` is not in it."""
    root = Path(os.environ.get("POLYFED_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")

    def find(wanted):
        if not (root / wanted).exists():
            pytest.skip(f"{wanted} is not in {root}; set POLYFED_DATA")
        return root

    return find


class Said(NamedTuple):
    """What one command did."""

    status: int
    out: str
    err: str


@pytest.fixture
def cli(capsys, tmp_path, monkeypatch) -> Callable[..., Said]:
    """Run a command in an empty working directory."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> Said:
        capsys.readouterr()
        status = call([str(w) for w in words])
        return Said(status, *capsys.readouterr())

    return run
