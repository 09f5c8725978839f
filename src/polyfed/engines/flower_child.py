"""Flower's SuperLink or SuperNode as a child of `polyfed server` or `polyfed client`: it ends when its parent does.

Flower serves all its interfaces at one port, and by itself asks only the sites for a key: whoever reaches the port may
also start runs and register keys. `Gate` leaves to the outside what sites need, and reads no body that is too large.
"""

import hmac
import os
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

HEADER = b"polyfed-secret"
MOST = 16 << 20  # bytes of one request; Flower cuts messages into pieces of 5 MiB
Scope = MutableMapping[str, Any]
Send = Callable[[Scope], Awaitable[None]]
App = Callable[[Scope, Callable[[], Awaitable[Scope]], Send], Awaitable[None]]


class Gate:
    """Lets through what sites ask for, and everything for who knows the secret."""

    def __init__(self, app: App, secret: bytes):
        self.app, self.secret = app, secret

    async def __call__(self, scope: Scope, receive: Callable[[], Awaitable[Scope]], send: Send) -> None:
        status = self._refused(scope) if scope["type"] == "http" else None
        if status is None:
            await self.app(scope, receive, send)
        else:
            await send({"type": "http.response.start", "status": status, "headers": [(b"connection", b"close")]})
            await send({"type": "http.response.body", "body": b""})

    def _refused(self, scope: Scope) -> int | None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        outside = scope["path"].startswith("/v1/fleet/") or scope["path"] == "/health"
        if not outside and not hmac.compare_digest(headers.get(HEADER, b""), self.secret):
            return 404
        if scope["method"] == "POST":
            size = headers.get(b"content-length", b"")
            return 411 if not size.isdigit() else 413 if int(size) > MOST else None
        return None


def main(arguments: Sequence[str]) -> None:
    """Run it. arguments: superlink or supernode, the parent's number, the file with the secret, its own arguments"""
    kind, parent, secret = arguments[0], int(arguments[1]), Path(arguments[2])
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    sys.argv = [f"flower-{kind}", "--superexec-auth-secret-file", str(secret), "--isolation", "process", *arguments[3:]]
    if kind == "superlink":
        gate = _module("starlette.middleware").Middleware(Gate, secret=secret.read_bytes())
        _module("flwr.superlink.extensions").get_middleware = partial(tuple[Any], [gate])
    try:
        _module(f"flwr.{kind}.cli.flower_{kind}").__dict__[f"flower_{kind}"]()
    except Exception:
        traceback.print_exc()
    finally:  # a SuperNode that has given its server up does nothing any more, but a thread would keep it alive
        os._exit(1)


def _module(name: str) -> Any:
    return import_module(name)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.3)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
