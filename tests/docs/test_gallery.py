"""The gallery's notebooks run as they are, and are what Jupyter opens."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from polyfed.core.algorithm import REGISTRY

DOCS = Path(__file__).resolve().parents[2] / "docs"
spec = importlib.util.spec_from_file_location("notebooks", DOCS / "notebooks.py")
notebooks = importlib.util.module_from_spec(spec)
sys.modules["notebooks"] = notebooks  # a named tuple looks its module up
spec.loader.exec_module(notebooks)
FILES = [pytest.param(f, marks=[pytest.mark.long] * notebooks.slow(f), id=f.stem) for f in notebooks.files()]


@pytest.fixture(autouse=True)
def methods_of_its_own():
    known = set(REGISTRY)
    yield
    for name in set(REGISTRY) - known:
        del REGISTRY[name]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("file", FILES)
def test_a_notebook_runs_and_its_page_has_the_outputs(file, tmp_path, monkeypatch, undrawn):
    monkeypatch.chdir(tmp_path)
    found = notebooks.execute(file)
    assert sum(map(bool, found)) >= 2
    text = notebooks.markdown(file, found)
    assert all(output in text for output in found)
    assert all("\n\n" not in part for output in found for part in output.split("\n\n<div")[1:])  # else it ends there


def test_there_are_ten_and_each_says_what_it_shows_and_is_what_jupyter_opens():
    assert len(notebooks.files()) == 10
    for file in notebooks.files():
        assert len(notebooks.about(file)) > 60
        assert len(file.read_text().splitlines()) <= 100, "a notebook of the gallery is short"
        found = json.loads(notebooks.ipynb(file))
        assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
        assert found["cells"][0]["cell_type"] == "markdown"
        for cell in found["cells"]:
            code = cell["cell_type"] == "code"
            more = {"execution_count", "outputs"} if code else set()
            assert cell.keys() == {"cell_type", "id", "metadata", "source"} | more
            assert not code or compile("".join(cell["source"]), file.name, "exec")
