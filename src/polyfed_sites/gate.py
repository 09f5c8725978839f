"""The server's port: what sites may ask of it over HTTPS, and nothing else.

A site's calls carry envelopes, whose signature is checked before a body is read or anything is done. A site that asks
for a message is held until there is one. What is answered to a site is signed too, and always with status 200, which no
proxy replaces by a page of its own.
"""

import asyncio
import asyncio.constants
import ssl
import threading
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any, Protocol

from polyfed.base.errors import ConfigError, PolyfedError, RunError
from polyfed.base.system import files
from polyfed.runs.folder import version_of
from polyfed_sites.envelope import Denied, Envelope, opened, seal
from polyfed_sites.keys import MISSING, Keys, present, trust
from polyfed_sites.listening import EACH, listening

try:
    import uvicorn
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import HTMLResponse, Response
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ModuleNotFoundError:
    raise ConfigError(MISSING) from None

CALLS = "hello", "ask", "reply", "beat", "bye"
HOLD = 20.0  # seconds for which a question for a message is held
HEADERS = 20.0  # seconds that a request's head may take, from the connection or its first byte on
HANDSHAKE = 10.0  # seconds that a TLS handshake may take
IDLE = 75  # seconds for which a connection is kept that is not used
PIECE = 1 << 20  # bytes that are handed on at a time
PRIVATE = {"refresh": "5", "cache-control": "no-store", "referrer-policy": "no-referrer"}  # of the page
FILES = 1 << 16  # that the process may have open, where its user may


class Behind(Protocol):
    """What the gate asks of a hub; `admit` gives the caller's session, which the others take."""

    sign: Callable[[bytes], bytes]
    certificate: bytes

    def page(self, path: str) -> bytes | None: ...
    def admit(self, do: str, said: Envelope, address: str) -> Any: ...
    def room(self, said: Envelope, caller: Any) -> bool: ...
    def wait(self, name: str, wake: Callable[[], None]) -> bool: ...
    def answer(self, do: str, said: Envelope, caller: Any, body: bytes = b"") -> tuple[dict[str, Any], bytes]: ...
    def left(self, caller: Any) -> None: ...


class Gate:
    """An ASGI app. there: what is behind it     say: takes a line for the operator     base: path of all others"""

    def __init__(self, there: Behind, say: Callable[[str], None], base: str = ""):
        self.there, self.say, self.base = there, say, base

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        try:
            await (await self._answer(request))(scope, receive, send)
        except Denied as e:
            await Response(status_code=e.status, headers={"connection": "close"})(scope, receive, send)
        except (ConnectionError, ClientDisconnect):
            return

    async def _answer(self, request: Request) -> Response:
        path = request.scope["path"].removeprefix(self.base)
        if path == "/health":
            return Response()
        if request.method == "GET" and (page := await asyncio.to_thread(self.there.page, path)) is not None:
            return HTMLResponse(page, headers=PRIVATE)
        do = path.removeprefix("/v1/")
        if do not in CALLS or path == do or request.method != "POST":
            raise Denied(404)
        try:
            said = opened(request.headers)
        except ValueError:
            raise Denied(400) from None
        try:
            says, body = await self._called(do, said, request)
        except Denied as e:
            says = {"say": "refused", "status": e.status, "polyfed": version_of("polyfed")}
            body = self.there.certificate if do == "hello" else b""
        headers = await asyncio.to_thread(seal, "server", self.there.sign, {"to": said.mark, **says}, body)
        return Pieces(body, headers={"cache-control": "no-store", **headers}, media_type="application/octet-stream")

    async def _called(self, do: str, said: Envelope, request: Request) -> tuple[dict[str, Any], bytes]:
        client = request.client  # None: a proxy on this machine, which says for whom it asks
        address = (
            client.host if client else request.headers.get("x-forwarded-for", "a proxy").rpartition(",")[2].strip()
        )
        caller = await asyncio.to_thread(self._safely, self.there.admit, do, said, address[:64])
        try:
            body = b""
            if do == "ask":
                await self._hold(caller.site, request)
            elif do == "reply":
                if not self.there.room(said, caller):
                    return {"say": "unwanted"}, b""
                body = await _body(request, said.says["size"])
            return await asyncio.to_thread(self._safely, self.there.answer, do, said, caller, body)
        finally:
            self.there.left(caller)

    def _safely(self, call: Callable[..., Any], do: str, *args: Any) -> Any:
        try:
            return call(do, *args)
        except (Denied, ConnectionError):
            raise
        except PolyfedError as e:
            self.say(str(e))
            raise Denied(503) from None
        except Exception as e:
            self.say(f"a site's call {do} failed; this is a bug in polyfed ({type(e).__name__}: {e})")
            raise Denied(500) from None

    async def _hold(self, name: str, request: Request) -> None:
        """Wait until there is a message for a site. Raises ConnectionError where the site has hung up meanwhile."""
        loop = asyncio.get_running_loop()
        there = asyncio.Event()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(there.set)

        if not self.there.wait(name, wake):
            return
        either = [asyncio.ensure_future(there.wait()), asyncio.ensure_future(_hung_up(request))]
        done, _ = await asyncio.wait(either, timeout=HOLD, return_when=asyncio.FIRST_COMPLETED)
        for each in either:
            each.cancel()
        if either[1] in done:
            raise ConnectionError


class Pieces(Response):
    """An answer that is handed on in pieces, so that no copy of a large one waits."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        for i in range(0, len(self.body), PIECE):
            await send({"type": "http.response.body", "body": self.body[i : i + PIECE], "more_body": True})
        await send({"type": "http.response.body"})


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request, size: int) -> bytes:
    """As many bytes as were said. Raises Denied for others."""
    found = bytearray()
    async for part in request.stream():
        found += part
        if len(found) > size:
            raise Denied(400)
    return bytes(found)


class Patient(H11Protocol):
    """HTTP whose heads come in time: whoever sends one byte now and then holds no connection."""

    _due: Any = None

    def connection_made(self, transport: Any) -> None:
        """Somebody has connected."""
        super().connection_made(transport)
        self._due = self.loop.call_later(HEADERS, self.transport.close)

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        super().data_received(data)
        within = self.cycle is not None and not self.cycle.response_complete
        if within and self._due is not None:
            self._due.cancel()
            self._due = None
        elif not within and self._due is None:
            self._due = self.loop.call_later(HEADERS, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended."""
        super().connection_lost(exc)
        if self._due is not None:
            self._due.cancel()


def tls(keys: Keys, certificate: Path | None, clients: Path | None) -> ssl.SSLContext:
    """What the server shows, and whom it lets in. Raises ConfigError for files that cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    present(context, certificate or keys.certificate, keys.private if certificate is None else None)
    if clients is not None:
        trust(context, clients)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class Port:
    """Serves an app in a thread of its own, until it is closed. Raises RunError where it cannot listen."""

    def __init__(self, app: Gate, context: ssl.SSLContext, host: str, port: int):
        most = files(FILES)
        try:
            self._socket = listening(host, port, min(EACH, most // 4), most // 2)
        except OSError as e:
            raise RunError(f"cannot listen at {host}:{port} ({e.strerror}); choose another --port") from None
        self.where = host if self._socket.local else f"{host}:{port}"
        asyncio.constants.SSL_HANDSHAKE_TIMEOUT = HANDSHAKE  # uvicorn has no setting for it
        config = uvicorn.Config(
            app, http=Patient, loop="asyncio", lifespan="off", ws="none", log_config=None, access_log=False,
            log_level="critical", server_header=False, proxy_headers=False, timeout_keep_alive=IDLE,
            timeout_graceful_shutdown=1,
        )  # fmt: skip
        config.load()
        config.ssl = None if self._socket.local else context  # a proxy on this machine ends TLS
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer what is being asked, for a second at most, and end."""
        self._server.should_exit = True
        self._thread.join(5)
        self._socket.close()
