"""What a real site needs, whatever carries its messages: its own state, kept safe, and its side of an exchange."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # keys are made without torch
    from polyfed.sites.message import Message, pack, unpack
    from polyfed.sites.site import Site
    from polyfed.sites.vault import Vault

__all__ = ["Message", "Site", "Vault", "pack", "unpack"]
HOMES = {"Message": "message", "pack": "message", "unpack": "message", "Site": "site", "Vault": "vault"}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
