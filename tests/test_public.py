"""The public face: what `polyfed` shows, to a program, a type checker and an editor."""

import functools
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import polyfed as pf
import polyfed.algorithms
from polyfed.base import plugins
from polyfed.core.algorithm import REGISTRY
from polyfed.runs.result import Result
from polyfed.runs.trainer import Trainer, prepare
from polyfed.studies.compare import Comparison
from polyfed_members.admission import Admission
from polyfed_papers.window import WindowAdvice, window_for
from polyfed_testing import table
from polyfed_tuning.tuned import Tuned


def test_the_methods_are_those_of_the_registry():
    ours = {cls.__name__: cls for cls in polyfed.algorithms.shipped().values()}
    there = {cls for cls in REGISTRY.values() if plugins.ours(cls.__module__) and issubclass(cls, pf.Algorithm)}
    assert there == {*ours.values()}
    shown = {n: getattr(polyfed.algorithms, n) for n in polyfed.algorithms.__all__}
    assert shown == ours
    assert all(getattr(pf, name) is cls for name, cls in ours.items())


def test_dir_shows_what_is_public_and_nothing_else():
    assert {"FedAvg", "fit", "Run", "Uplinks", "Round", "setting", "errors"} <= set(dir(pf))
    assert not [name for name in dir(pf) if name.startswith("_") and name != "__version__"]
    assert all(getattr(pf, name) is not None for name in dir(pf))
    assert "Any" not in dir(pf)
    assert not hasattr(pf, "FedAvgg")


def test_modules_are_found_before_anything_else_is_imported_and_torch_when_it_is_needed():
    code = "import sys, polyfed as pf; dir(pf); assert 'torch' not in sys.modules; "
    code += "assert pf.threats.Median and pf.errors.ConfigError and pf.FedAvg and pf.data.load"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


USER = """
from __future__ import annotations

from dataclasses import dataclass
from typing import reveal_type

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
    command = [Path(sys.executable).with_name("pyrefly"), "check", "--output-format", "min-text"]
    command += ["--python-interpreter-path", sys.executable, tmp_path / "mine.py"]
    said = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False).stdout
    assert "revealed type: type[FedAvg]" in said
    assert "revealed type: float" in said
    errors = [line for line in said.splitlines() if line.startswith("ERROR")]
    assert len(errors) == 1, said
    assert "fast" in errors[0]


SECTIONS = ["Parameters", "Attributes", "Returns", "Raises", "Notes"]  # of numpydoc, in its order
PROPERTY = property | functools.cached_property


def _public():
    """(name, what it is) of every class and function that is public, and of the classes' own public methods."""
    more = [*(getattr(m, name) for m in (pf.data, pf.models, pf.report, pf.threats) for name in m.__all__)]
    ours = [v for v in vars(table).values() if getattr(v, "__module__", "") == table.__name__]
    more += [Result, Trainer, prepare, Admission, Comparison, Tuned, WindowAdvice, window_for]
    for thing in [*(getattr(pf, name) for name in pf.__all__), *more, *ours]:
        name, built_in = getattr(thing, "__qualname__", "_"), thing in REGISTRY.values()  # tested in conformance/
        if name.startswith("_") or built_in or not (inspect.isclass(thing) or inspect.isfunction(thing)):
            continue
        yield name, thing
        for key in vars(thing) if inspect.isclass(thing) else ():
            if not key.startswith("_") and (inspect.isroutine(v := getattr(thing, key)) or isinstance(v, PROPERTY)):
                yield f"{name}.{key}", v


def _entries(text: str) -> dict[str, str]:
    """{name: type} of a section; `*` and `**` belong to a name, and several names may share a type."""
    heads = re.findall(r"^(\S[^:\n]*?)(?: : (.+))?\n {4}\S", text, re.M)
    return {name.strip(): kind for names, kind in heads for name in names.split(",")}


def _takes(thing: object) -> list[str]:
    """The names of what a function or class is called with."""
    if isinstance(thing, PROPERTY) or (inspect.isclass(thing) and issubclass(thing, BaseException)):
        return []
    if thing is pf.Run:  # as its base, `Result`, which says them
        return []
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    taken = inspect.signature(thing).parameters.values()
    return [stars.get(q.kind, "") + q.name for q in taken if q.name != "self" and not q.name.startswith("_")]


PUBLIC = dict(_public())


@pytest.mark.parametrize("name", PUBLIC)
def test_the_docstring_is_numpydoc_and_documents_every_parameter(name):
    thing, takes = PUBLIC[name], _takes(PUBLIC[name])
    text = inspect.getdoc(thing)
    assert text
    prose, *rest = re.split(r"^(\w+)\n-{3,}\n", text, flags=re.M)
    sections = dict(zip(rest[::2], rest[1::2], strict=True))
    fields = hasattr(thing, "_fields") and "Attributes" in sections  # as test_site.py wants them in the reference
    parameters = _entries(sections.get("Attributes" if fields else "Parameters", ""))
    assert list(sections) == [s for s in SECTIONS if s in sections]
    assert prose.split("\n\n")[0].strip().endswith((".", ":"))
    assert list(parameters) == takes
    assert not [key for key, kind in parameters.items() if not kind and "*" not in key], "no type"
    if inspect.isroutine(thing) and takes:
        assert ("Returns" in sections) == (inspect.signature(thing).return_annotation not in (None, "None"))
    assert not {line.partition(": ")[0] for line in prose.splitlines()} & {*takes}, "said outside of its section"
    assert not re.search(r"^(Returns|Raises) ", prose, re.M), "said outside of its section"
