"""Counts of the house, held by `budget.toml`: `python tools/house.py` prints them beside their limits, `--write` lowers
the limits to them. Nothing is raised here; who raises a limit by hand says why in a line of CHANGELOG.md that names it.

lines       of src/polyfed by room, of each package beside it, of the kernel, of the tests, all with docstrings
words       of README, of every page by hand and of all of them; notes and generated tables are none
names       public names, members of Algorithm and Task, commands, options, keys of an experiment
exceptions  noqa and pyrefly comments, imports inside functions, functions over 40 and 60 lines without their docstring
loads       files of ours that `polyfed run` imports
"""

import argparse
import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

ROOT = Path(__file__).parents[1]
SRC, BUDGET = ROOT / "src", ROOT / "budget.toml"
Counts = dict[str, dict[str, int]]  # section -> what is counted -> how many


def measured() -> Counts:
    """All counts, by section."""
    return {"lines": lines(), "words": words(), "names": names(), "exceptions": exceptions(), "loads": loads()}


def limits() -> Counts:
    """Sections of budget.toml."""
    return tomllib.loads(BUDGET.read_text())


def lines() -> dict[str, int]:
    """Lines of Python by room and package, of the kernel in C++, and the sums that the design sets limits for."""
    core = SRC / "polyfed"
    rooms = sorted(p for p in core.iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file())
    packages = sorted(p for p in SRC.iterdir() if (p / "__init__.py").is_file())
    by = {f"polyfed/{p.name}": _lines(p) for p in rooms if p.suffix != ".py"}
    by |= {p.name: _lines(p) for p in packages}
    native = sum(_lines(p) for kind in ("*.cpp", "*.inc") for p in core.rglob(kind))
    return by | {"src": sum(map(_lines, packages)), "kernel": native, "tests": _lines(ROOT / "tests")}


def _lines(path: Path) -> int:
    files = path.rglob("*.py") if path.is_dir() else [path]
    return sum(len(p.read_text().splitlines()) for p in files)


TABLE = re.compile(r"^\s*\|.*$", re.M)


def words() -> dict[str, int]:
    """Words of README and of every page of the site, tables included; `pages` is their sum without README."""
    pages = sorted(p for p in (ROOT / "docs").rglob("*.md") if "notes" not in p.parts)
    by = {p.relative_to(ROOT).as_posix(): len(p.read_text().split()) for p in pages}
    return {"README.md": len((ROOT / "README.md").read_text().split()), **by, "pages": sum(by.values())}


def names() -> dict[str, int]:
    """What somebody can type: public names, members of the two widest classes, commands, options, keys."""
    sys.path.insert(0, str(SRC))
    import polyfed
    from polyfed.cli import command_line
    from polyfed.compute.task import Task
    from polyfed.core.algorithm import Algorithm
    from polyfed.runs.training import Training

    commands = [*_commands(command_line())]
    options = [o for c in commands for p in c.params for o in p.opts if o.startswith("--")]
    return {
        "public": len(polyfed.__all__),
        "Algorithm": _members(Algorithm),
        "Task": _members(Task),
        "commands": len(commands),
        "options": len(set(options)),
        "keys": len(fields(Training)),
    }


def _commands(command) -> Iterator:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield command
    for one in (inner or {}).values():
        yield from _commands(one)


def _members(cls: type) -> int:
    own = {n for c in cls.__mro__[:-1] for n in (*vars(c), *vars(c).get("__annotations__", ()))}
    return sum(not n.startswith("_") for n in own)


def exceptions() -> dict[str, int]:
    """Rules that are not kept, counted: comments that silence a tool, late imports, long functions."""
    files = {p: p.read_text() for p in sorted(SRC.rglob("*.py"))}
    long = [n for text in files.values() for n in _lengths(ast.parse(text))]
    return {
        "noqa": sum(len(re.findall(r"# noqa", text)) for text in files.values()),
        "pyrefly": sum(len(re.findall(r"# pyrefly: ", text)) for text in files.values()),
        "late imports": sum(_late(ast.parse(text)) for text in files.values()),
        "functions over 40 lines": sum(n > 40 for n in long),
        "functions over 60 lines": sum(n > 60 for n in long),
    }


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef))


def _lengths(tree: ast.AST) -> Iterator[int]:
    """Lines of each function, without its docstring."""
    for f in _functions(tree):
        body = f.body[1:] if ast.get_docstring(f) is not None else f.body
        yield (f.end_lineno or 0) - body[0].lineno + 1 if body else 0


def _late(tree: ast.AST) -> int:
    """Statements inside functions that import a package of ours."""
    found = {n for f in _functions(tree) for n in ast.walk(f) if isinstance(n, ast.Import | ast.ImportFrom)}
    modules = [n.module or "" if isinstance(n, ast.ImportFrom) else n.names[0].name for n in found]
    return sum(name.split(".")[0].startswith("polyfed") for name in modules)


LOADED = """
import sys, tempfile, os
from polyfed.cli import call
os.chdir(tempfile.mkdtemp())
call(["run", "--rounds", "1", "--seeds", "1", "--quiet", "--out", "x"])
print(sum(m.split(".")[0].startswith("polyfed") for m in sys.modules))
"""


def loads() -> dict[str, int]:
    """Modules of ours that a short `polyfed run` imports, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True, cwd=SRC)
    return {"polyfed run": int(done.stdout.split()[-1])}


def table(found: Counts, limit: Counts) -> str:
    """A line for each count, with its limit; `!` where it is above."""
    rows = [(s, k, n, limit.get(s, {}).get(k)) for s, by in found.items() for k, n in by.items()]
    return "\n".join(
        f"{'!' if most is None or n > most else ' '} {section:<11} {key:<36} {n:>7,} "
        + ("no limit" if most is None else f"of {most:,}")
        for section, key, n, most in rows
    )


def written(found: Counts, limit: Counts) -> str:
    """The text of budget.toml with every limit at most what was counted; what is new is taken as it is."""
    head = BUDGET.read_text().split("\n\n")[0] if BUDGET.exists() else "# Limits that only shrink."
    parts = [head]
    for section, by in found.items():
        kept = {k: min(n, limit.get(section, {}).get(k, n)) for k, n in by.items()}
        parts.append("\n".join([f"[{section}]", *(f'"{k}" = {n}' for k, n in kept.items())]))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="lower the limits to what is counted")
    counts, most = measured(), limits() if BUDGET.exists() else {}
    if parser.parse_args().write:
        BUDGET.write_text(written(counts, most))
    print(table(counts, most))
