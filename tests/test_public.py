"""The public face: what `polyfed` shows, to a program, a type checker and an editor."""

import importlib
import subprocess
import sys
from pathlib import Path

import polyfed as pf
import polyfed.algorithms
from polyfed.core.algorithm import REGISTRY

ROOT = Path(pf.__file__).parent


def test_the_methods_are_those_of_the_registry():
    ours = {cls.__name__: cls for cls in REGISTRY.values() if cls.__module__.startswith("polyfed.algorithms")}
    shown = {n: v for n, v in vars(polyfed.algorithms).items() if isinstance(v, type) and issubclass(v, pf.Algorithm)}
    assert shown == ours
    assert all(getattr(pf, name) is cls for name, cls in ours.items())


def test_every_file_of_a_method_is_imported():
    files = {p.stem for p in (ROOT / "algorithms").iterdir() if not p.name.startswith("_") and p.suffix in (".py", "")}
    defined = {cls.__module__.split(".")[2] for cls in REGISTRY.values() if cls.__module__.startswith("polyfed.alg")}
    helpers = {name for name in files if not any(_methods(name))}
    assert files - helpers == defined


def _methods(name: str):
    module = importlib.import_module(f"polyfed.algorithms.{name}")
    return (v for v in vars(module).values() if v in REGISTRY.values() and v.__module__.startswith(module.__name__))


def test_dir_shows_what_is_public_and_nothing_else():
    assert {"FedAvg", "fit", "Run", "Uplinks", "Round", "setting", "errors"} <= set(dir(pf))
    assert not [name for name in dir(pf) if name.startswith("_") and name != "__version__"]
    assert all(getattr(pf, name) is not None for name in dir(pf))
    assert "Any" not in dir(pf)


def test_modules_are_found_before_anything_else_is_imported():
    code = "import polyfed as pf; assert pf.threats.Median and pf.errors.ConfigError and pf.FedAvg and pf.data.load"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_name_that_is_not_there_is_an_attribute_error():
    assert not hasattr(pf, "FedAvgg")


def test_the_package_is_imported_without_torch():
    code = "import sys, polyfed; dir(polyfed); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


USER = """
from __future__ import annotations

from dataclasses import dataclass

import polyfed as pf
from polyfed.algorithms import FedAvg

reveal_type(pf.FedAvg)
reveal_type(pf.fit)
reveal_type(FedAvg(lr=0.1).lr)
method: pf.Algorithm = pf.Scaffold(lr=0.1)


@dataclass(frozen=True)
class Mine(pf.Algorithm):
    lr: float = pf.setting(0.1, ge=0, source="ours")

    def local_update(self, task, client, down, data, round):
        return {}, {"w": pf.local_sgd(task, down["w"], data, self.lr)}

    def aggregate(self, server, up: pf.Uplinks, round: pf.Round):
        return {"w": up.mean("w", round.samples)}


pf.FedAvg(lr="fast")
"""


def test_a_users_file_is_typed(tmp_path):
    """A method of the user's own has no error; a text where a number belongs has one; classes are classes."""
    (tmp_path / "mine.py").write_text(USER)
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(tmp_path / "mine.py")]
    said = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False).stdout
    assert 'Type of "pf.FedAvg" is "type[FedAvg]"' in said
    assert 'Type of "FedAvg(lr=0.1).lr" is "float"' in said
    errors = [line for line in said.splitlines() if " error: " in line]
    assert len(errors) == 1, said
    assert "fast" in errors[0]
