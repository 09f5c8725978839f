"""The gallery's notebooks: Python files whose cells begin with `# %%`, as pages with their outputs and as .ipynb files.

`python docs/notebooks.py` runs all of them and prints the outputs of their cells as JSON.
"""

import ast
import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
import types
from functools import cache
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).with_name("gallery")
WIDE = "---\nhide: [toc]\n---"  # code in the place of the table of contents
SLOW = "# slow"  # how one begins that only `make test-long` runs; it needs [sites]


class Cell(NamedTuple):
    """code: whether it is run     body: its lines, those of text without the comment signs"""

    code: bool
    body: str


def files() -> list[Path]:
    """The notebooks, in the order of the gallery."""
    return sorted(FOLDER.glob("*.py"))


def page(file: Path) -> str:
    """Name of a notebook's page: without the number that orders it."""
    return f"{re.sub(r'^[0-9]+_', '', file.stem).replace('_', '-')}.md"


def cells(text: str) -> list[Cell]:
    found = []
    for head, body in re.findall(r"^# %%(.*)\n((?:(?!# %%).*\n?)*)", text, re.M):
        code = "[markdown]" not in head
        found.append(Cell(code, (body if code else re.sub(r"^# ?", "", body, flags=re.M)).strip("\n")))
    return found


def title(file: Path) -> str:
    return cells(file.read_text())[0].body.splitlines()[0].lstrip("# ")


def markdown(file: Path, outputs: list[str] | None = None) -> str:
    """A notebook as a page, without outputs where none are given."""
    left = iter(outputs or ())
    parts = []
    for cell in cells(file.read_text()):
        parts.append(f"```python\n{cell.body}\n```" if cell.code else cell.body)
        parts += [next(left, "")] if cell.code else []
    link = f"[Download as a notebook]({page(file).removesuffix('.md')}.ipynb)"
    return "\n\n".join([WIDE, *filter(None, parts), link, ""])


def ipynb(file: Path) -> str:
    """A notebook as Jupyter has it, without outputs."""
    found = []
    for k, cell in enumerate(cells(file.read_text())):
        more = {"execution_count": None, "outputs": []} if cell.code else {}
        kind = "code" if cell.code else "markdown"
        lines = cell.body.splitlines(keepends=True)
        found.append({"cell_type": kind, "id": f"cell-{k}", "metadata": {}, "source": lines} | more)
    about = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return json.dumps({"cells": found, "metadata": about, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def index() -> str:
    """The gallery's first page."""
    lines = [f"- [{title(file)}]({page(file)}): {about(file)}" for file in files()]
    head = "# Gallery\n\nShort notebooks that run as they are. Each page has the outputs, and a link to the notebook."
    return "\n".join([head, "", *lines, ""])


def about(file: Path) -> str:
    """The first paragraph below the title, on one line."""
    return " ".join(cells(file.read_text())[0].body.split("\n\n")[1].split())


def execute(file: Path) -> list[str]:
    """Run a notebook in the working folder. Returns the output of every code cell, as Markdown."""
    module = types.ModuleType("notebook")
    sys.modules["notebook"] = module  # dataclasses look their module up
    try:
        return [_shown(cell.body, file.name, module.__dict__) for cell in cells(file.read_text()) if cell.code]
    finally:
        del sys.modules["notebook"]


def _shown(code: str, name: str, names: dict[str, Any]) -> str:
    """Run a cell: what it prints, and its last line's value as a notebook shows it."""
    tree, printed, last = ast.parse(code), io.StringIO(), None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, name, "exec"), names)
        value = None if last is None else eval(compile(last, name, "eval"), names)
    parts = [f"```text\n{printed.getvalue().rstrip()}\n```"] if printed.getvalue().strip() else []
    if hasattr(value, "_repr_html_"):
        html = re.sub(r"<style.*?</style>", "", value._repr_html_(), flags=re.S)
        html = re.sub(r"<table [^>]*>", "<table>", html)  # which the site's own style knows
        html = re.sub(r"\n\s*\n", "\n", html)  # in Markdown an empty line would end it
        parts.append(f'<div class="output">{html}</div>')
    elif value is not None:
        parts.append(f"<pre>{escape(repr(value))}</pre>")
    return "\n\n".join(parts)


def slow(file: Path) -> bool:
    return file.read_text().startswith(SLOW)


@cache
def outputs() -> dict[str, list[str]]:
    """{name of a notebook: outputs of its cells}, all run in another process; without those whose needs are not met."""
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"docs/gallery: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def main() -> None:
    """Run every notebook in an empty folder, and print the outputs as JSON."""
    found = {}
    for file in files():
        if not slow(file) or find_spec("uvicorn") is not None:
            with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
                found[file.name] = execute(file)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
