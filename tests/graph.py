"""Which of our own files a file imports, read from the sources. Files go by their path from `src`."""

import ast
import hashlib
import re
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


IMPORT = re.compile(r"^[ \t]*(?:from (polyfed[\w.]*) import (\([^)]*\)|[^\n]*)|import (polyfed[\w.]+))", re.M)


def _imports(path: Path) -> set[str]:
    """As `own`, and what is imported for types alone: in a fraction of the time, for hundreds of files."""
    found = set[str]()
    for base, names, module in IMPORT.findall(path.read_text()):
        inside = {_file(f"{base}.{n}") for n in re.findall(r"\w+", names)} - {None}
        found |= {f for f in inside or {_file(base or module)} if f}
    return found


@cache
def _edges(file: str) -> frozenset[str]:
    late = (SRC / "polyfed/cli").glob("*.py") if file == "polyfed/cli/late.py" else ()  # which imports them by name
    return frozenset(_imports(SRC / file) | {p.relative_to(SRC).as_posix() for p in late})


def _public(path: Path) -> set[str]:
    """Files of the public names that a file uses, as in `pf.FedAvg`."""
    used = set(re.findall(r"\bpf\.(\w+)", path.read_text()))
    files = (_file(str(getattr(getattr(polyfed, name, None), "__module__", ""))) for name in used)
    return {f for f in files if f}


@cache
def reached(path: Path) -> set[str]:
    """Our own files that a test reaches by imports and public names, and the kernel's sources.

    Not through lists of what is everywhere; `fit` of the face is that of runs.
    """
    todo, found = _imports(path) | _public(path), set[str]()
    while todo:
        found |= todo
        lists = {f for f in todo if f.partition("/")[2] in LISTS}
        todo = {g for f in todo - lists for g in _edges(f)} | ({"polyfed/runs/trainer.py"} if lists else set())
        todo -= found
    if "polyfed/recipes/recipe.py" in found:  # they are found by their entry points
        found |= {p.relative_to(SRC).as_posix() for p in (SRC / "polyfed_papers").rglob("*.py")}
    return found | {p.relative_to(SRC).as_posix() for p in (SRC / "polyfed/native").glob("*.[ci][pn][pc]")}


@cache
def _helpers() -> dict[str, Path]:
    return {p.stem: p for p in (SRC.parent / "tests").rglob("*.py") if not p.name.startswith(("test_", "conftest"))}


def _with_helpers(path: Path) -> list[Path]:
    """A file of tests and the files beside the package that it takes something from."""
    todo, found = {path, *path.parent.glob("conftest.py")}, set[Path]()
    while todo:
        found |= todo
        texts = [p.read_text() for p in todo]
        names = {n for t in texts for n in re.findall(r"^\s*(?:from|import) (\w+)|\b(\w+)\.py\b", t, re.M)}
        todo = {_helpers()[n] for pair in names for n in pair if n in _helpers()}
        todo |= {SRC.parent / p for t in texts for p in re.findall(r"benchmarks/\w+\.py", t)}
        todo = {p for p in todo if p.is_file()} - found
    return sorted(found)


def digest(path: Path, rooms: set[str], whole: bool) -> str:
    """Digest of a file of tests, of its helpers, and of all that they reach in `rooms`; prose does not count.

    whole: of all in `rooms`, for tests that find methods by their names, and of all that they reach; of the whole
    package for a test that calls the command line.
    """
    files = _with_helpers(path)
    found = set[str]().union(*(reached(p) for p in files))
    if whole:
        by_command = re.search(r"\bcli\b", path.read_text())
        every = {p.relative_to(SRC).as_posix() for p in SRC.rglob("*.py")}
        found |= {f for f in every if by_command or rooms.intersection(f.split("/")[:2])}
    return _digest([*files, *(SRC / f for f in sorted(found) if whole or rooms.intersection(f.split("/")[:2]))])


def digest_of_all(path: Path) -> str:
    """Digest of a file of tests, of its helpers, of the whole package and the examples; for the docs' of the pages."""
    root = SRC.parent
    folders = [SRC, root / "examples"] + ([root / "docs"] if path.parent.name == "docs" else [])
    kinds = {".py", ".cpp", ".inc", ".css", ".js", ".bib", ".data", ".toml", ".md"}
    every = sorted(p for folder in folders for p in folder.rglob("*") if p.suffix in kinds)
    return _digest([*_with_helpers(path), *every, root / "README.md"])


def _digest(files: list[Path]) -> str:
    pins = re.findall(
        r"^(?:torch|numpy|scipy|pandas|ray|flwr)==.*$", (SRC.parent / "constraints.txt").read_text(), re.M
    )
    return hashlib.sha256("".join([*map(_meaning, files), *pins]).encode()).hexdigest()[:16]


@cache
def _meaning(path: Path) -> str:
    """Digest of what comments, docstrings and line breaks do not change of a Python file; of another one, its bytes."""
    held = path.read_bytes()
    if path.suffix == ".py":
        tree = ast.parse(held)
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
                del node.body[0]
        held = ast.dump(tree).encode()
    return hashlib.sha256(held).hexdigest()
