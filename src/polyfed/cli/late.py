"""The one place where the command line imports late: a command's module when it is called, so that help is instant."""

from importlib import import_module
from typing import Any


def late(module: str, name: str) -> Any:
    """What a module of polyfed calls so."""
    return getattr(import_module(f"polyfed.{module}"), name)
