"""`make bench-gpu` before a GPU is there: it says so in one line, and its small form gives every figure."""

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


def called(monkeypatch, *args: str) -> int:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(sys, "argv", ["gpu.py", *args])
    spec = spec_from_file_location("gpu", FOLDER / "gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_is_one_line(monkeypatch, capsys, tmp_path):
    assert called(monkeypatch, "--out", str(tmp_path / "gpu.md")) == 2
    assert re.fullmatch(r"bench-gpu: .*no CUDA device.*\n", capsys.readouterr().err)
    assert not [*tmp_path.iterdir()]


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of attention, vmapped
def test_the_small_form_writes_its_sections_as_they_are_made(monkeypatch, tmp_path):
    out = tmp_path / "gpu.md"
    assert called(monkeypatch, "--dry", "--out", str(out), "--only", "adapters", "billion", "cifar") == 0
    text = out.read_text()
    assert "failed" not in text
    line = r"vmapped [\d.]+ ms, grouped [\d.]+ ms, serial [\d.]+ ms; .* apart by (\S+)"
    single, half = (float(gap) for gap in re.findall(line, text))
    assert single < 1e-6
    assert half < 1e-3
    assert len(re.findall(r"grouped step: planned \d\.\d+ GiB, taken unknown", text)) == 2
    assert re.search(r"polyfed: \d+ s for 1,500 rounds", text)
