"""Names of a package that are imported when first used: its `__init__` imports them for type checkers alone."""

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyfed.base.plugins import sibling


def homes(file: str | Path) -> dict[str, str]:
    """The names that a file imports under their own names (`import x as x`), and the module that has each."""
    return {
        alias.name: node.module
        for node in ast.walk(ast.parse(Path(file).read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("polyfed")
        for alias in node.names
        if alias.asname == alias.name
    }


def attribute(package: str, homes: Mapping[str, str], name: str) -> Any:
    """What a package has by this name, which `homes` knows. Raises AttributeError for another."""
    if name not in homes:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return getattr(sibling(homes[name], f"{package}.{name}"), name)
