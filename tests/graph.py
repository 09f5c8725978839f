"""Which of our own files a file imports, read from the sources."""

import ast
import hashlib
from functools import cache
from pathlib import Path

import polyfed

ROOT = Path(polyfed.__file__).parent


def own(path: Path, late: bool) -> set[str]:
    """Our own files that a file imports, by path from the root; late: inside functions alone."""
    tree, found = ast.parse(path.read_text()), set[str]()
    typed = [
        n for i in ast.walk(tree) if isinstance(i, ast.If) and "TYPE_CHECKING" in ast.unparse(i.test) for n in i.body
    ]
    inside = [n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.Lambda) for n in ast.walk(f)]
    for node in inside if late else ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and node not in typed:
            base = getattr(node, "module", None)
            names = [f"{base}.{a.name}" for a in node.names] + [base] if base else [a.name for a in node.names]
            places = [n.replace(".", "/").removeprefix("polyfed/") for n in names if n.startswith("polyfed.")]
            files = [next((f for f in (f"{p}.py", f"{p}/__init__.py") if (ROOT / f).is_file()), None) for p in places]
            found |= {f for f, p in zip(files, places, strict=True) if f and not (p == places[-1] and any(files[:-1]))}
    return found - {path.relative_to(ROOT).as_posix()} if path.is_relative_to(ROOT) else found


def circles(graph: dict[str, set[str]]) -> list[frozenset[str]]:
    """Sets of files that reach each other."""
    reach = {f: set(to) for f, to in graph.items()}
    for via in graph:
        for to in reach.values():
            to |= reach[via] if via in to else set()
    return [*{frozenset(g for g in reach[f] if f in reach.get(g, ())) for f in graph} - {frozenset()}]


@cache
def _edges(file: str) -> frozenset[str]:
    late = (ROOT / "cli").glob("*.py") if file == "cli/late.py" else ()  # the modules of commands, imported by name
    return frozenset(own(ROOT / file, late=False) | {p.relative_to(ROOT).as_posix() for p in late})


def _public(path: Path) -> set[str]:
    """Files of the public names that a file uses, as in `pf.FedAvg`."""
    tree = ast.parse(path.read_text())
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "pf"}
    modules = {polyfed._HOMES[name] for name in used if name in polyfed._HOMES}  # pyright: ignore
    places = [str(m).replace(".", "/").removeprefix("polyfed/") for m in modules if "." in str(m)]
    return {f for p in places for f in (f"{p}.py", f"{p}/__init__.py") if (ROOT / f).is_file()}


def reached(path: Path) -> set[str]:
    """Our own files that a test reaches by its imports and by public names, from the root, with the kernel's sources."""
    todo, found = own(path, late=False) | _public(path), set[str]()
    while todo:
        found |= todo
        todo = {g for f in todo for g in _edges(f)} - found
    return found | {f"native/{p.name}" for p in (ROOT / "native").iterdir() if p.suffix in (".cpp", ".inc")}


def digest(path: Path) -> str:
    """Of a file of tests and of all that it reaches."""
    found = hashlib.sha256(path.read_bytes())
    for file in sorted(reached(path)):
        found.update((ROOT / file).read_bytes())
    return found.hexdigest()[:16]
