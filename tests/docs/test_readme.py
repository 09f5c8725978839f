"""The README's Python examples run as printed, and the method it shows is the file in examples/."""

import html
import re
import sys
import types
from pathlib import Path

import pytest

from polyfed.core.algorithm import REGISTRY

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_the_examples_run_top_to_bottom(capsys):
    module = sys.modules["readme"] = types.ModuleType("readme")  # dataclasses look their module up
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), names := module.__dict__)
    assert "test_accuracy" in capsys.readouterr().out
    assert names["run"].clients["client"].tolist() == ["north", "south", "west"]
    assert issubclass(names["Momentum"], names["pf"].Algorithm)
    del REGISTRY["momentum"]
    assert any(block.strip() == (ROOT / "examples" / "own_method.py").read_text().strip() for block in BLOCKS)


@pytest.mark.daily
def test_the_first_result_is_as_printed(cli, undrawn):
    """The answer, and the accuracy and bytes of every method, of the first command."""
    assert cli("run", "--out", "demo", "-q").status == 0
    answer = re.sub(r"^> ?", "", README.split("Half a minute later:\n\n")[1].split("\n\n")[0], flags=re.M)
    assert " ".join(answer.split()) in html.unescape(" ".join(Path("demo/report.html").read_text().split()))
    table = cli("report", "demo", "--table", "markdown").out.replace("*", "")
    found = {
        row[0]: row[1:] for row in (re.split(r" *\| *", line.strip("| ")) for line in table.splitlines() if "±" in line)
    }
    printed = re.findall(r"^\| ([\w-]+)[^|]*\| ([^|]*±[^|]*) \| ([^|]*±[^|]*) \| (.*) \|$", README, flags=re.M)
    assert [name for name, *_ in printed] == [
        name for name in found if name in dict.fromkeys(row[0] for row in printed)
    ]
    for name, accuracy, worst, sent in printed:
        assert found[name][:2] == [accuracy, worst]
        assert found[name][4].removesuffix(" B") == sent
