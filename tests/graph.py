"""Which of our own files a file imports, read from the sources. Files go by their path from `src`."""

import ast
from functools import cache
from pathlib import Path

import polyfed

SRC = Path(polyfed.__file__).parent.parent
LISTS = {"face.py", "algorithms/__init__.py", "yardsticks/__init__.py", "report/__init__.py"}  # of what is everywhere


def own(path: Path, late: bool) -> set[str]:
    """Our own files that a file imports; late: inside functions alone."""
    tree, found = ast.parse(path.read_text()), set[str]()
    functions = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.Lambda)] if late else []
    for node in [n for f in functions for n in ast.walk(f)] if late else ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            base = getattr(node, "module", None)
            names = [f"{base}.{a.name}" for a in node.names] + [base] if base else [a.name for a in node.names]
            files = [_file(n) for n in names if n.startswith("polyfed") and "." in n]
            found |= {f for k, f in enumerate(files) if f and not (k == len(files) - 1 and any(files[:-1]))}
    return found - ({path.relative_to(SRC).as_posix()} if path.is_relative_to(SRC) else set())


@cache
def _file(module: str) -> str | None:
    place = module.replace(".", "/")
    return next((f for f in (f"{place}.py", f"{place}/__init__.py") if (SRC / f).is_file()), None)


def circles(graph: dict[str, set[str]]) -> list[frozenset[str]]:
    """Sets of files that reach each other."""
    reach = {f: set(to) for f, to in graph.items()}
    for via in graph:
        for to in reach.values():
            to |= reach[via] if via in to else set()
    return [*{frozenset(g for g in reach[f] if f in reach.get(g, ())) for f in graph} - {frozenset()}]
