"""Which of our own files a file imports, read from the sources. Files go by their path from `src`."""

import ast
import hashlib
from collections.abc import Set
from functools import cache
from pathlib import Path

import polyfed

SRC = Path(polyfed.__file__).parent.parent
LISTS = {"face.py", "algorithms/__init__.py", "yardsticks/__init__.py", "report/__init__.py"}  # of what is everywhere


def own(path: Path, late: bool) -> set[str]:
    """Our own files that a file imports; late: inside functions alone."""
    tree, found = ast.parse(path.read_text()), set[str]()
    typed = {n for i in ast.walk(tree) if isinstance(i, ast.If) and _for_types(i.test) for n in i.body}
    functions = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.Lambda)] if late else []
    for node in [n for f in functions for n in ast.walk(f)] if late else ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and node not in typed:
            base = getattr(node, "module", None)
            names = [f"{base}.{a.name}" for a in node.names] + [base] if base else [a.name for a in node.names]
            files = [_file(n) for n in names if n.startswith("polyfed") and "." in n]
            found |= {f for k, f in enumerate(files) if f and not (k == len(files) - 1 and any(files[:-1]))}
    return found - ({path.relative_to(SRC).as_posix()} if path.is_relative_to(SRC) else set())


def _for_types(test: ast.expr) -> bool:
    return str(getattr(test, "id", getattr(test, "attr", ""))).endswith("TYPE_CHECKING")


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


@cache
def _edges(file: str) -> frozenset[str]:
    late = (SRC / "polyfed/cli").glob("*.py") if file == "polyfed/cli/late.py" else ()  # which imports them by name
    return frozenset(own(SRC / file, late=False) | {p.relative_to(SRC).as_posix() for p in late})


def _public(path: Path) -> set[str]:
    """Files of the public names that a file uses, as in `pf.FedAvg`."""
    tree = ast.parse(path.read_text())
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "pf"}
    files = (_file(str(getattr(getattr(polyfed, name, None), "__module__", ""))) for name in used)
    return {f for f in files if f}


@cache
def reached(path: Path) -> set[str]:
    """Our own files that a test reaches by imports and public names, and the kernel's sources.

    Not through lists of what is everywhere; `fit` of the face is that of runs.
    """
    todo, found = own(path, late=False) | _public(path), set[str]()
    while todo:
        found |= todo
        lists = {f for f in todo if f.partition("/")[2] in LISTS}
        todo = {g for f in todo - lists for g in _edges(f)} | ({"polyfed/runs/trainer.py"} if lists else set())
        todo -= found
    if "polyfed/recipes/recipe.py" in found:  # they are found by their entry points
        found |= {p.relative_to(SRC).as_posix() for p in (SRC / "polyfed_papers").rglob("*.py")}
    return found | {p.relative_to(SRC).as_posix() for p in (SRC / "polyfed/native").glob("*.[ci][pn][pc]")}


def digest(path: Path, rooms: Set[str]) -> str:
    """Digest of a file of tests, its folder's helpers and all that they reach in `rooms`; prose does not count."""
    files = [path, *sorted(p for p in path.parent.glob("*.py") if not p.name.startswith("test_"))]
    found = sorted(set[str]().union(*(reached(p) for p in files)))
    files += [SRC / file for file in found if rooms.intersection(file.split("/")[:2])]
    return hashlib.sha256(b"".join(map(_meaning, files))).hexdigest()[:16]


@cache
def _meaning(path: Path) -> bytes:
    """What comments, docstrings and line breaks do not change of a Python file; the bytes of another one."""
    if path.suffix != ".py":
        return path.read_bytes()
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.dump(tree).encode()
