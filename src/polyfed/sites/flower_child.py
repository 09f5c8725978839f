"""Flower's SuperLink or SuperNode as a child of `polyfed server` or `polyfed client`: it ends when its parent does.

Flower serves all its interfaces at one port, and by itself asks only the sites for a key: whoever reaches the port may
also start runs and register keys. `Gate` leaves to the outside what sites need, and reads no body that is too large.
`Bound` keeps a site from filling the SuperLink's memory with what nobody takes, and from writing to other sites.
"""

import gc
import hashlib
import hmac
import os
import resource
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

HEADER = b"polyfed-secret"
SIZE = b"polyfed-most"  # bytes of the largest reply, which the server learns while it runs
MOST = 16 << 20  # bytes of one piece; Flower cuts messages into pieces of 5 MiB
LITTLE = 8 << 10  # bytes of what is said of a reply before its pieces
EACH = 256  # connections of one address; a site has up to three
HANDSHAKE = 10.0  # seconds that a TLS handshake may take
FILES = 1 << 16  # that the process may have open, where its user may
FEW = 1 << 20  # bytes of any other request; the announcement of a message has 70 for each piece of it
COLLECT = 64 << 20  # bytes of requests after which their remains are freed: they are in cycles, few and large
Scope = MutableMapping[str, Any]
Send = Callable[[Scope], Awaitable[None]]
App = Callable[[Scope, Callable[[], Awaitable[Scope]], Send], Awaitable[None]]


class Listening(socket.socket):
    """A server's socket, of which one address has at most `each` connections: a further one takes the place of that
    which has been silent for longest. Whoever only connects so closes its own connections and nobody else's.
    """

    def __init__(self, host: str, port: int, each: int = EACH):
        super().__init__(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.bind((host, port))
        self.each, self.open = each, dict[str, dict[Connection, None]]()

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection."""
        handle, address = self._accept()  # pyright: ignore
        mine = self.open.setdefault(address[0], {})
        found = Connection(self.family, self.type, self.proto, fileno=handle)
        found.among = mine
        if len(mine) >= self.each:
            oldest = next((c for c in mine if c.silent), next(iter(mine)))
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
            mine.pop(oldest, None)
        mine[found] = None
        if len(self.open) > EACH:
            self.open = {key: those for key, those in self.open.items() if those}
        return found, address


class Connection(socket.socket):
    """One of `Listening`. among: those of its address, the one that was heard of last at the end"""

    silent = True
    among: dict["Connection", None]

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        """What has come."""
        return self._heard(super().recv(bufsize, flags))

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """How much has come."""
        return self._heard(super().recv_into(buffer, nbytes, flags))

    def _heard(self, found: Any) -> Any:
        if self in self.among:
            self.silent = False
            self.among[self] = self.among.pop(self)
        return found

    def close(self) -> None:
        """Close it, and make room."""
        self.among.pop(self, None)
        super().close()


class Bound:
    """How much of a site's replies a SuperLink holds until the server takes them: two of the largest, each time that it
    was asked. Flower takes one reply to a message, but of any size; it also takes what is no reply, to whomever.

    handlers: Flower's, of what sites send     refused: makes its answer to a piece that it does not take
    ignored: makes its answer to the announcement of what it does not take
    """

    def __init__(self, handlers: Any, refused: Callable[[], Any], ignored: Callable[[], Any]):
        self.most = MOST
        self._held, self._lock = Counter[int](), threading.Lock()
        self._answered: dict[str, bytes] = {}  # messages, and which pieces their replies are made of
        self._announce, self._push, self._refused, self._ignored = (
            handlers.push_messages, handlers.push_object, refused, ignored
        )  # fmt: skip
        handlers.push_messages, handlers.push_object = self.announce, self.push

    def announce(self, request: Any, state: Any) -> Any:
        """A reply, of which the pieces will follow; announced again, it gets no more room."""
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            return self._ignored()
        message, pieces = request.messages_list[0], request.message_object_trees[0].SerializeToString()
        to, made = str(message.metadata.reply_to_message_id), hashlib.sha256(pieces).digest()
        own = message.metadata.src_node_id == request.node.node_id
        if not to or not own or message.ByteSize() > LITTLE or self._answered.get(to, made) != made:
            return self._ignored()
        found = self._announce(request=request, state=state)
        with self._lock:
            if found.objects_to_push and to not in self._answered:
                self._answered[to] = made
                self._held[request.node.node_id] = 0
        return found

    def push(self, request: Any, state: Any) -> Any:
        """A piece."""
        with self._lock:
            self._held[request.node.node_id] += len(request.object_content)
            full = self._held[request.node.node_id] > 2 * self.most
        return self._refused() if full else self._push(request=request, state=state)


class Gate:
    """Lets through what sites ask for, and everything for who knows the secret."""

    def __init__(self, app: App, secret: bytes, bound: Bound | None = None):
        self.app, self.secret, self.bound = app, secret, bound
        self._read = 0

    async def __call__(self, scope: Scope, receive: Callable[[], Awaitable[Scope]], send: Send) -> None:
        status = self._refused(scope) if scope["type"] == "http" else None
        if status is None:
            await self.app(scope, receive, send)
        else:
            await send({"type": "http.response.start", "status": status, "headers": [(b"connection", b"close")]})
            await send({"type": "http.response.body", "body": b""})

    def _refused(self, scope: Scope) -> int | None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        ours = hmac.compare_digest(headers.get(HEADER, b""), self.secret)
        if not ours and not scope["path"].startswith("/v1/fleet/") and scope["path"] != "/health":
            return 404
        if ours and self.bound is not None and headers.get(SIZE, b"").isdigit():
            self.bound.most = int(headers[SIZE])
        if scope["method"] == "POST":
            size = headers.get(b"content-length", b"")
            most = MOST if ours or scope["path"] == "/v1/fleet/push-object" else FEW
            if not size.isdigit() or int(size) > most:
                return 413 if size.isdigit() else 411
            self._read += int(size)
            if self._read > COLLECT:
                self._read = 0
                gc.collect()
        return None


def main(arguments: Sequence[str]) -> None:
    """Run it. arguments: superlink or supernode, the parent's number, the file with the secret, its own arguments"""
    kind, parent, secret = arguments[0], int(arguments[1]), Path(arguments[2])
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    sys.argv = [f"flower-{kind}", "--superexec-auth-secret-file", str(secret), "--isolation", "process", *arguments[3:]]
    if kind == "superlink":
        refused = partial(_module("flwr.proto.message_pb2").PushObjectResponse, stored=False)
        ignored = _module("flwr.proto.fleet_pb2").PushMessagesResponse
        bound = Bound(_module("flwr.superlink.servicer.fleet.fleet_handlers"), refused, ignored)
        gate = _module("starlette.middleware").Middleware(Gate, secret=secret.read_bytes(), bound=bound)
        _module("flwr.superlink.extensions").get_middleware = partial(tuple[Any], [gate])
        _module("flwr.superlink.cli.flower_superlink").uvicorn = Uvicorn
    try:
        _module(f"flwr.{kind}.cli.flower_{kind}").__dict__[f"flower_{kind}"]()
    except Exception:
        traceback.print_exc()
    finally:  # a SuperNode that has given its server up does nothing any more, but a thread would keep it alive
        sys.stdout.flush()
        os._exit(1)


class Uvicorn:
    """Takes the place of uvicorn in Flower's SuperLink, which knows no limits for those who only connect."""

    @staticmethod
    def run(app: Any, host: str, port: int, **how: Any) -> None:
        """Serve until the process ends."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        files = FILES if most == resource.RLIM_INFINITY else min(FILES, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
        _module("asyncio.constants").SSL_HANDSHAKE_TIMEOUT = HANDSHAKE
        uvicorn = _module("uvicorn")
        server = uvicorn.Server(uvicorn.Config(app, host=host, port=port, loop="asyncio", **how))
        server.run(sockets=[Listening(host, port, min(EACH, files // 4))])


def _module(name: str) -> Any:
    return import_module(name)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.3)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
