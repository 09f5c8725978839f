"""The one place where the command line imports late: a command's module when it is called, so that help is instant."""

from importlib import import_module
from typing import Any


def late(module: str, name: str) -> Any:
    """Return the thing of this name in a module, imported now."""
    return getattr(import_module(module), name)
