"""The README's Python examples run as printed, and the method it shows is the file in examples/."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


def test_the_examples_run_top_to_bottom(capsys):
    names: dict = {"__name__": "readme"}
    import sys
    import types

    module = types.ModuleType("readme")
    sys.modules["readme"] = module  # dataclasses look their module up
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), names)
    assert "test_accuracy" in capsys.readouterr().out
    assert names["run"].clients["client"].tolist() == ["north", "south", "west"]
    assert issubclass(names["Momentum"], names["pf"].Algorithm)
    from polyfed.core.algorithm import REGISTRY

    del REGISTRY["momentum"]


def test_the_method_shown_is_the_file():
    assert any(block.strip() == (ROOT / "examples" / "own_method.py").read_text().strip() for block in BLOCKS)
