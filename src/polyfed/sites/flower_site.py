"""A site's end of Flower: keeps a SuperNode running and answers what comes, in this process."""

import hashlib
import http.client
import json
import os
import secrets
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import closing, suppress
from email.utils import parsedate_to_datetime
from pathlib import Path

from polyfed.base.errors import RunError
from polyfed.sites import flower_api as flwr
from polyfed.sites.flower import START, STATE, Door, Faults, Say, Task, answers, enveloped, opened
from polyfed.sites.flower_process import Child
from polyfed.sites.keys import SiteKey, split, write

POLL = 0.05  # seconds between two looks at what the SuperNode writes
COMING = 60.0  # seconds for which it is asked all the time, once it writes that a message is coming
IDLE = 5.0  # seconds between two questions to it otherwise
PAUSE = 2.0  # seconds until a server that does not answer is tried again
AHEAD, BEHIND = 4.5, 304.5  # seconds by which this clock may be off; Flower refuses 5 and 305, Date is whole seconds
REFUSED = 75.0  # seconds for which Flower may take this site's last connection for alive, and refuse a new one


class Attendance:
    """One site at one server.

    answer: gives the reply to a message     over: whether the last message has been answered
    folder: for Flower's files, which can be thrown away     server: host:port, where it is not the key's
    """

    def __init__(
        self,
        key: SiteKey,
        answer: Callable[[bytes], bytes],
        over: Callable[[], bool],
        folder: Path,
        say: Say,
        server: str | None = None,
    ):
        self.key, self.answer, self.over, self.folder, self.say = key, answer, over, folder, say
        self.server = split(server or key.server)
        self._secret = secrets.token_hex(32).encode()
        self._last: tuple[bytes, bytes] = b"", b""  # digest of the last message, and the reply
        self._node: Child | None = None
        self._door: Door | None = None
        self._said, self._refused, self._known = "", 0.0, False  # known: the server has taken its key before
        self._read = 0  # bytes of its log
        self._coming, self._asked = 0.0, 0.0  # when it wrote of a message, and when it was asked for one
        self._sent = True  # whether the last reply has reached the server
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / STATE, json.dumps({"pid": os.getpid()}).encode())
        write(folder / "ca.pem", key.authority.encode())

    def run(self) -> None:
        """Until the run is over."""
        try:
            while not (self.over() and self._sent):
                if self._node is None or not self._node.alive:
                    self._start()
                self._listen()
                task = self._take()
                if task is not None:
                    self._serve(task)
                time.sleep(POLL)
        finally:
            self.close()

    def close(self) -> None:
        if self._door is not None:
            self._door.close()
        if self._node is not None:
            # Flower gives the server no reply of a site that has taken leave, even if it is there
            self._node.stop(at_once=self.over())
        for name in ("supernode.secret", STATE):
            (self.folder / name).unlink(missing_ok=True)

    # the SuperNode

    def _start(self) -> None:
        if self._node is not None:
            self._listen()
            self._ended()
        self._reach()
        self._leave()
        host, port = self.server
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            mine = probe.getsockname()[1]
        arguments = ["--superlink", f"[{host}]:{port}" if ":" in host else f"{host}:{port}"]
        arguments += ["--root-certificates", str(self.folder / "ca.pem"), "--host", "127.0.0.1", "--port", str(mine)]
        (self.folder / "supernode.log").unlink(missing_ok=True)
        self._read = 0
        self._node = Child("supernode", arguments, self.folder, self._secret, self.key.private.encode())
        end = time.monotonic() + START
        while self._node.alive and not answers(f"127.0.0.1:{mine}"):
            if time.monotonic() > end:
                raise RunError(f"Flower's SuperNode does not start; its last words are in {self._node.log}")
            time.sleep(POLL)
        if self._door is not None:
            self._door.close()
        self._door = Door(f"127.0.0.1:{mine}", None, self._secret, flwr.TaskType.CLIENT_APP)

    def _ended(self) -> None:
        """Say why a SuperNode is no more; raise where it would not help to start another."""
        assert self._node is not None
        if "[code: 2004]" not in self._node.log.read_text(errors="replace"):
            self._tell("Flower's SuperNode has ended; starting it again")
            return
        now = time.monotonic()
        self._refused = self._refused or now
        why = "its key is revoked, expired or unknown there, or another process is using it"
        if now > self._refused + REFUSED:
            raise RunError(f"the server does not accept this site: {why}; ask the server's operator for a new key")
        cut = "the server takes this site's last connection for alive"
        said = cut if self._known else f"the server does not accept this site: {why}"
        self._tell(f"{said}; trying again for {REFUSED:.0f} s")
        time.sleep(PAUSE)

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
                    off = _ahead(secure, host)
                if -BEHIND < off < AHEAD:
                    return
                which = f"{AHEAD:.0f} s or more ahead of" if off > 0 else f"{BEHIND:.0f} s or more behind"
                self._tell(
                    f"this machine's clock is {which} the server's, which refuses that; waiting for it to be set"
                )
                time.sleep(PAUSE)
            except ssl.SSLCertVerificationError as e:
                raise RunError(f"{where} is not the server of this key: {e.verify_message}") from None
            except OSError as e:
                # what forwards connections to a server that is down takes them and hangs up
                if isinstance(e, ssl.SSLError) and not isinstance(e, ssl.SSLEOFError):
                    raise RunError(f"{where} does not speak TLS ({e.reason})") from None
                hung_up = isinstance(e, ssl.SSLEOFError | ConnectionResetError)
                self._tell(f"no answer from {where} ({'it hangs up' if hung_up else e.strerror or e}); waiting for it")
                time.sleep(PAUSE)

    def _leave(self) -> None:
        """Take leave for a SuperNode that was killed and could not; a new one would be refused for a minute."""
        mark = self.folder / "node.id"
        with suppress(*Faults):
            key, node = flwr.load_ssh_private_key(self.key.private.encode(), None), int(mark.read_text())
            interceptors = [
                flwr.RuntimeVersionHttpInterceptor("SuperNode"),
                flwr.NodeAuthHttpInterceptor(key, key.public_key()),
            ]  # pyright: ignore
            host, port = self.server
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            with flwr.FleetHttpClient.from_server_address(
                address, False, self.key.authority.encode(), interceptors
            ) as client:
                client.DeactivateNode(flwr.DeactivateNodeRequest(node_id=node))
        mark.unlink(missing_ok=True)

    def _listen(self) -> None:
        """What the SuperNode writes: there is no other way to learn that it is connected, or that a reply has gone."""
        assert self._node is not None
        with self._node.log.open("rb") as f:
            f.seek(self._read)
            news = f.read()
        self._read += len(news)
        for line in news.decode(errors="replace").splitlines():
            if "SuperNode ID: " in line:
                write(self.folder / "node.id", line.rpartition(" ")[2].strip().encode())
                self._refused, self._known = 0.0, True
                self._tell("connected to {}:{}".format(*self.server))
            elif "Receiving: " in line:
                self._coming = time.monotonic()
            elif "Sent successfully" in line:
                self._sent = True
            elif "Failed to send message" in line:
                self._tell("a reply did not reach the server; it will ask again")

    # messages

    def _take(self) -> Task | None:
        now = time.monotonic()
        if self._door is None or now < self._asked + (POLL if now < self._coming + COMING else IDLE):
            return None
        self._asked = now
        with suppress(*Faults):
            return self._door.take()
        return None

    def _serve(self, task: Task) -> None:
        """Answer one message.

        A SuperNode waits for the reply for ever, and takes no message meanwhile: where the way to it fails, it is
        started again, and the server asks who is connected anew again.
        """
        assert self._node is not None
        with closing(task):
            try:
                message, context, _, _ = flwr.pull_task_input(task.client)
                data = opened(message.content)
            except (*Faults, ValueError, RuntimeError) as e:
                self._tell(f"a message did not arrive whole ({type(e).__name__}); the server will ask again")
                self._node.stop(at_once=True)
                return
            digest = hashlib.sha256(data).digest()
            if digest != self._last[0]:
                self._last = digest, self.answer(data)
            try:
                self._sent = False
                flwr.push_message(task.client, flwr.Message(enveloped(self._last[1]), reply_to=message), context)
                flwr.push_task_output(task.client, context, flwr.SubStatus.COMPLETED, "")
            except Faults as e:
                self._tell(f"a reply did not leave whole ({type(e).__name__}); the server will ask again")
                self._node.stop(at_once=True)
        self._coming = 0.0

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
