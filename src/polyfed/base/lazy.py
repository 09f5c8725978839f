"""Names of a package that are imported when first used: its `__init__` imports them for type checkers alone."""

import ast
from pathlib import Path


def homes(file: str | Path) -> dict[str, str]:
    """The names that a file imports under their own names (`import x as x`), and the module that has each."""
    return {
        alias.name: node.module
        for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("polyfed")
        for alias in node.names
        if alias.asname == alias.name
    }
