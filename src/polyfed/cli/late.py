"""The one place where the command line imports late: a command's module when it is called, so that help is instant."""

from typing import Any

from polyfed.base.plugins import sibling


def late(module: str, name: str) -> Any:
    """The thing of this name in a module, imported now; ConfigError where that misses a package beside the core."""
    return getattr(sibling(module, f"polyfed {name.replace('_', '-')}"), name)
