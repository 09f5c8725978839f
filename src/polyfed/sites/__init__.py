"""What a real site needs, whatever carries its messages: its own state, kept safe, and its side of an exchange."""

from polyfed.sites.message import Message, pack, unpack
from polyfed.sites.site import Site
from polyfed.sites.vault import Vault

__all__ = ["Message", "Site", "Vault", "pack", "unpack"]
