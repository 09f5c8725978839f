"""The server's port: what sites may ask of it over TLS, in Flower's own words (its Fleet API), and nothing else.

Every call is checked by Flower's `authenticate_node` before anything is done for it. A site that asks for a message is
held until there is one.
"""

import asyncio
import asyncio.constants
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

from polyfed.base.errors import PolyfedError, RunError
from polyfed.base.system import files
from polyfed_sites import flower_api as flwr
from polyfed_sites.keys import Keys
from polyfed_sites.listening import EACH, Listening

SESSION = "polyfed-session"  # header: which of a site's processes is asking
HOLD = 20.0  # seconds for which a question for a message is held
PIECE = 16 << 20  # bytes of a call that brings a piece of a message, which has 5 MiB
FEW = 1 << 20  # bytes of any other call; the announcement of a message has 70 for each piece of it
HANDSHAKE = 10.0  # seconds that a TLS handshake may take
IDLE = 75  # seconds for which a connection is kept that is not used
PAGE = "text/html; charset=utf-8"
PRIVATE = [(b"refresh", b"5"), (b"cache-control", b"no-store"), (b"referrer-policy", b"no-referrer")]  # of the page
FILES = 1 << 16  # that the process may have open, where its user may
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]


class Denied(Exception):
    """A call that is not answered. status: HTTP's"""

    def __init__(self, status: int):
        self.status = status


class Caller(NamedTuple):
    """Who calls: a site by its key, its process, and its address. name: "" for a key that is not accepted"""

    name: str
    node: int
    session: str
    address: str


class Answers(Protocol):
    """What is behind the gate."""

    nodes: Any

    def name_of(self, node: int) -> str: ...
    def admit(self, caller: Caller) -> None: ...
    def answer(self, call: str, asked: Any, caller: Caller) -> Any: ...
    def wait(self, name: str, wake: Callable[[], None]) -> bool: ...
    def page(self, path: str) -> bytes | None: ...


CALLS = {
    "/v1/fleet/activate-node": ("ActivateNodeRequest", FEW),
    "/v1/fleet/deactivate-node": ("DeactivateNodeRequest", FEW),
    "/v1/fleet/send-node-heartbeat": ("SendNodeHeartbeatRequest", FEW),
    "/v1/fleet/pull-messages": ("PullMessagesRequest", FEW),
    "/v1/fleet/pull-object": ("PullObjectRequest", FEW),
    "/v1/fleet/push-messages": ("PushMessagesRequest", FEW),
    "/v1/fleet/push-object": ("PushObjectRequest", PIECE),
}


class Gate:
    """An ASGI app. there: what is behind it     say: takes a line for the operator"""

    def __init__(self, there: Answers, say: Callable[[str], None]):
        self.there, self.say = there, say
        factory = SimpleNamespace(state=lambda: there.nodes)
        self._app = SimpleNamespace(state=SimpleNamespace(linkstate_factory=factory))  # as Flower looks for it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body, kind = await self._answer(scope, receive)
            status = 200
        except Denied as e:
            status, body, kind = e.status, b"", ""
        except ConnectionError:
            return
        headers = [(b"content-length", str(len(body)).encode()), (b"content-type", kind.encode())]
        headers += [(b"connection", b"close")] if status > 200 else PRIVATE if kind == PAGE else []
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope, receive: Receive) -> tuple[bytes, str]:
        path = scope["path"]
        if path == "/health":
            return b"", "text/plain"
        if scope["method"] == "GET" and (page := await asyncio.to_thread(self.there.page, path)) is not None:
            return page, PAGE
        if path not in CALLS or scope["method"] != "POST":
            raise Denied(404)
        kind, most = CALLS[path]
        size = dict(scope["headers"]).get(b"content-length", b"")
        if not size.isdigit() or int(size) > most:
            raise Denied(413 if size.isdigit() else 411)
        try:
            asked = getattr(flwr, kind).FromString(await _body(receive))
        except flwr.DecodeError:
            raise Denied(400) from None
        caller = await asyncio.to_thread(self._caller, scope, asked)
        call = path.rpartition("/")[2].replace("-", "_")
        if call == "pull_messages":
            self.there.admit(caller)
            await self._hold(caller.name, receive)
        reply = await asyncio.to_thread(self._safely, call, asked, caller)
        return reply.SerializeToString(), "application/protobuf"

    def _caller(self, scope: Scope, asked: Any) -> Caller:
        """Who asks. Raises Denied for whom Flower does not take for the node that it says it is."""
        request = flwr.Request({**scope, "state": {"protobuf_request": asked}, "app": self._app})
        try:
            flwr.authenticate_node(request)
        except flwr.HTTPException as e:
            raise Denied(e.status_code) from None
        if isinstance(asked, flwr.ActivateNodeRequest):
            node = self.there.nodes.get_node_id_by_public_key(asked.public_key) or 0
        else:
            node = asked.node_id if isinstance(asked, flwr.DeactivateNodeRequest) else asked.node.node_id
        session, address = request.headers.get(SESSION, "")[:64], (scope["client"] or ("?",))[0]
        return Caller(self.there.name_of(node), node, session, address)

    def _safely(self, call: str, asked: Any, caller: Caller) -> Any:
        try:
            return self.there.answer(call, asked, caller)
        except (Denied, ConnectionError):
            raise
        except PolyfedError as e:
            self.say(str(e))
            raise Denied(503) from None
        except Exception as e:
            self.say(f"{caller.name}: {call} failed; this is a bug in polyfed ({type(e).__name__}: {e})")
            raise Denied(500) from None

    async def _hold(self, name: str, receive: Receive) -> None:
        """Wait until there is a message for a site. Raises ConnectionError where the site has hung up meanwhile."""
        loop = asyncio.get_running_loop()
        there = asyncio.Event()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(there.set)

        if not self.there.wait(name, wake):
            return
        either = [asyncio.ensure_future(there.wait()), asyncio.ensure_future(receive())]
        done, _ = await asyncio.wait(either, timeout=HOLD, return_when=asyncio.FIRST_COMPLETED)
        for each in either:
            each.cancel()
        if either[1] in done:
            raise ConnectionError


async def _body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        event = await receive()
        if event["type"] != "http.request":
            raise ConnectionError
        parts.append(event.get("body", b""))
        if not event.get("more_body"):
            return b"".join(parts)


class Port:
    """Serves an app over TLS in a thread of its own, until it is closed. Raises RunError where it cannot listen."""

    def __init__(self, app: Gate, keys: Keys, host: str, port: int):
        most = files(FILES)
        try:
            self._socket = Listening(host, port, min(EACH, most // 4), most // 2)
            self._socket.listen(2048)
        except OSError as e:
            raise RunError(f"cannot listen at {host}:{port} ({e.strerror}); choose another --port") from None
        asyncio.constants.SSL_HANDSHAKE_TIMEOUT = HANDSHAKE  # uvicorn has no setting for it
        config = flwr.Config(
            app, ssl_certfile=keys.certificate, ssl_keyfile=keys.private, loop="asyncio", lifespan="off", ws="none",
            log_config=None, access_log=False, server_header=False, timeout_keep_alive=IDLE,
            timeout_graceful_shutdown=1,
        )  # fmt: skip
        try:
            config.load()
        except OSError as e:
            raise RunError(f"{keys.certificate}: cannot be used with {keys.private} ({e.strerror})") from None
        self._server = flwr.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer what is being asked, for a second at most, and end."""
        self._server.should_exit = True
        self._thread.join(5)
        self._socket.close()


def as_flower(public: str) -> bytes:
    """A public key as Flower has it."""
    return flwr.public_key_to_bytes(flwr.load_ssh_public_key(public.encode()))
