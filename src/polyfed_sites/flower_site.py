"""A site's end of Flower: asks the server for messages, answers them in this process, and sends the replies."""

import hashlib
import http.client
import json
import os
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from polyfed.base.errors import RunError
from polyfed_sites import flower_api as flwr
from polyfed_sites import pieces
from polyfed_sites.flower import STATE, Say
from polyfed_sites.gate import SESSION
from polyfed_sites.keys import SiteKey, split, write

PAUSE = 2.0  # seconds until a server that does not answer is tried again
AGAIN = 0.2  # seconds until a call that has failed is made again
BEAT = 10.0  # seconds between two signs of life
ALIVE = 30.0  # seconds for which one holds, twice over
AHEAD, BEHIND = 4.5, 304.5  # seconds by which this clock may be off; Flower refuses 5 and 305, Date is whole seconds


class Shown:
    """Shows which process of a site is asking: the server answers the newest one alone."""

    def __init__(self, session: str):
        self.session = session

    def intercept(self, context: Any, call_next: Callable[[Any], Any]) -> Any:
        context.request.headers[SESSION] = self.session
        return call_next(context)


class Attendance:
    """One site at one server."""

    def __init__(
        self,
        key: SiteKey,
        answer: Callable[[str, bytes], bytes],  # (a run's name, a message) -> the reply
        over: Callable[[], bool],  # whether the last message has been answered
        folder: Path,  # where `polyfed status` looks
        say: Say,
        server: str | None = None,  # host:port, where it is not the key's
    ):
        self.key, self.answer, self.over, self.folder, self.say = key, answer, over, folder, say
        self.server = split(server or key.server)
        self._last: tuple[bytes, bytes] = b"", b""  # digest of the last message, and the reply
        self._node: Any = None
        self._said, self._sent = "", True
        self._reached = False  # the host's name was known once, and it spoke TLS
        self._over = threading.Event()

    def run(self) -> None:
        """Until the run is over."""
        write(self.folder / STATE, json.dumps({"pid": os.getpid()}).encode())
        try:
            with self._connected() as client:
                beat = threading.Thread(target=self._beat, args=(client,), daemon=True)
                beat.start()
                try:
                    while not (self.over() and self._sent):
                        self._try(client)
                finally:
                    self._over.set()
                    beat.join(5)  # a thread that is amid a call as the process ends can abort it
                    with suppress(flwr.HTTPError, ValueError):
                        if self._node is not None:
                            client.DeactivateNode(flwr.DeactivateNodeRequest(node_id=self._node.node_id))
        finally:
            (self.folder / STATE).unlink(missing_ok=True)

    def _connected(self) -> Any:
        host, port = self.server
        shown = [
            flwr.RuntimeVersionHttpInterceptor("polyfed"),
            flwr.NodeAuthHttpInterceptor(self.key.private, self.key.private.public_key()),
            Shown(secrets.token_hex(16)),
        ]
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return flwr.FleetHttpClient.from_server_address(where, False, self.key.authority.encode(), shown)

    def _try(self, client: Any) -> None:
        """One message, or what keeps it from coming. Whatever is lost is asked for again by asking for a message."""
        try:
            if self._node is None:
                self._reach()
                self._enter(client)
            self._serve(client)
        except flwr.HTTPStatusError as e:
            status = e.response.status_code
            if status == 403:
                why = "its key is revoked, expired or unknown there"
                raise RunError(f"the server does not accept this site: {why}; ask its operator for a new key") from None
            if status == 409:
                raise RunError(
                    "another process has connected with this site's key, and the server talks to it alone"
                ) from None
            self._node = None  # the server is another one, or does not accept the key
            time.sleep(AGAIN)
        except (flwr.HTTPError, ValueError) as e:  # a connection that was cut, bytes that have changed
            if not self._sent:
                self._tell(f"a reply did not reach the server ({type(e).__name__}); it will ask again")
            time.sleep(AGAIN)
            self._reach()

    def _enter(self, client: Any) -> None:
        public = flwr.public_key_to_bytes(self.key.private.public_key())
        reply = client.ActivateNode(flwr.ActivateNodeRequest(public_key=public, heartbeat_interval=ALIVE))
        self._node = flwr.Node(node_id=reply.node_id)
        self._tell("connected to {}:{}".format(*self.server))

    def _beat(self, client: Any) -> None:
        while not self._over.wait(BEAT):
            if (node := self._node) is not None:
                with suppress(flwr.HTTPError, ValueError):
                    client.SendNodeHeartbeat(flwr.SendNodeHeartbeatRequest(node=node, heartbeat_interval=ALIVE))

    def _serve(self, client: Any) -> None:
        """Wait for a message, and answer it."""
        pulled = client.PullMessages(flwr.PullMessagesRequest(node=self._node))
        if not pulled.messages_list:
            self._sent = True  # nothing of it is wanted
            return
        about, tree = pulled.messages_list[0].metadata, pulled.message_object_trees[0]
        asks = (flwr.PullObjectRequest(node=self._node, object_id=name) for name in pieces.names(tree))
        data = pieces.joined(client.PullObject(one).object_content for one in asks)
        digest = hashlib.sha256(data).digest()
        if digest != self._last[0]:
            self._last = digest, self.answer(about.group_id, data)
        self._sent = False
        tree, parts = pieces.cut(self._last[1])
        head = flwr.Metadata(reply_to_message_id=about.message_id, src_node_id=self._node.node_id)
        announced = flwr.PushMessagesRequest(
            node=self._node, messages_list=[flwr.Message(metadata=head)], message_object_trees=[tree]
        )
        for name in client.PushMessages(announced).objects_to_push:
            client.PushObject(flwr.PushObjectRequest(node=self._node, object_id=name, object_content=parts[name]))
        self._sent = True

    def _reach(self) -> None:
        """Wait until the server answers, is the one that the key is for, and has nearly the same time."""
        host, port = self.server
        where = f"{host}:{port}"
        while True:
            try:
                with (
                    socket.create_connection((host, port), timeout=10) as plain,
                    ssl.create_default_context(cadata=self.key.authority).wrap_socket(
                        plain, server_hostname=host
                    ) as secure,
                ):
                    self._reached = True
                    off = _ahead(secure, host)
                if -BEHIND < off < AHEAD:
                    return
                which = f"{AHEAD:.0f} s or more ahead of" if off > 0 else f"{BEHIND:.0f} s or more behind"
                self._tell(
                    f"this machine's clock is {which} the server's, which refuses that; waiting for it to be set"
                )
            except ssl.SSLCertVerificationError as e:
                raise RunError(f"{where} is not the server of this key: {e.verify_message}") from None
            except OSError as e:
                # what forwards connections to a server that is down takes them and hangs up
                if isinstance(e, ssl.SSLError) and not isinstance(e, ssl.SSLEOFError) and not self._reached:
                    raise RunError(f"{where} does not speak TLS ({e.reason})") from None
                if isinstance(e, socket.gaierror) and e.errno != socket.EAI_AGAIN and not self._reached:
                    raise RunError(f"no host is known by the name {host!r} ({e.strerror}); see --server") from None
                hung_up = isinstance(e, ssl.SSLEOFError | ConnectionResetError)
                self._tell(f"no answer from {where} ({'it hangs up' if hung_up else e.strerror or e}); waiting for it")
            time.sleep(PAUSE)

    def _tell(self, line: str) -> None:
        """An event, once and not as often as it is repeated."""
        if line != self._said:
            self.say(line)
        self._said = line


def _ahead(connection: ssl.SSLSocket, host: str) -> float:
    """Seconds by which this machine's clock is ahead of the server's; 0 where the server does not say its time."""
    began = time.time()
    connection.sendall(f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    with http.client.HTTPResponse(connection) as answer, suppress(http.client.HTTPException, ValueError, TypeError):
        answer.begin()
        there = parsedate_to_datetime(answer.getheader("Date", "")).timestamp() + 0.5
        return (began + time.time()) / 2 - there
    return 0.0
