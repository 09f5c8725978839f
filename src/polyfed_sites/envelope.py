"""What stands beside every message on the network: who says what of which bytes, signed by the key of who says it.

So nothing between both ends, also not a proxy that ends TLS, changes or invents anything, or says it again: a site's
envelopes are numbered within a session that the server has named, and each of the server's is about one of them.
"""

import base64
import binascii
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from polyfed.base.settings import table_in

PROTOCOL = 1  # of what is said here; messages have a format of their own
SAYS, SIGNATURE = "polyfed-says", "polyfed-signature"  # headers
LONGEST = 4096  # characters of either
End = Literal["site", "server"]


class Denied(Exception):
    """A call that the server does not answer. status: why, in HTTP's words"""

    def __init__(self, status: int):
        self.status = status


class Envelope(NamedTuple):
    """One that has come. text: what was signed"""

    says: Mapping[str, Any]
    text: bytes
    signature: bytes

    @property
    def mark(self) -> str:
        """By which an answer says what it answers."""
        return hashlib.sha256(self.text).hexdigest()

    def by(self, end: End, check: Callable[[bytes, bytes], bool]) -> bool:
        """Whether that end has signed it. check: (text, signature) -> whether its key has"""
        return check(_signed(end, self.text), self.signature)


def seal(end: End, sign: Callable[[bytes], bytes], says: Mapping[str, Any], body: bytes = b"") -> dict[str, str]:
    """The headers that go with a body."""
    about = {"protocol": PROTOCOL, **says, "size": len(body), "digest": hashlib.sha256(body).hexdigest()}
    text = json.dumps(about).encode()
    both = {SAYS: text, SIGNATURE: sign(_signed(end, text))}
    return {name: base64.urlsafe_b64encode(data).decode() for name, data in both.items()}


def opened(headers: Mapping[str, str]) -> Envelope:
    """What headers have. Raises ValueError where they have none."""
    text, signature = (headers.get(name, "") for name in (SAYS, SIGNATURE))
    if not text or max(len(text), len(signature)) > LONGEST:
        raise ValueError("no envelope")
    try:
        text, signature = base64.urlsafe_b64decode(text), base64.urlsafe_b64decode(signature)
        says = table_in(text)
    except (binascii.Error, ValueError, RecursionError):
        raise ValueError("no envelope") from None
    if not isinstance(says.get("size"), int) or says["size"] < 0:
        raise ValueError("an envelope without a size")
    return Envelope(says, text, signature)


def _signed(end: End, text: bytes) -> bytes:
    return f"polyfed {end} {PROTOCOL}\n".encode() + text
