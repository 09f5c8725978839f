"""A server's socket that nobody can close for others: whoever only connects closes its own connections."""

import os
import socket
import stat
from contextlib import suppress
from typing import Any

from polyfed.base.system import unix_socket

EACH = 256  # connections of one address; a site has up to three


class Listening(socket.socket):
    """A listening socket with at most `each` connections per address; one more closes that address's longest-idle one.
    So whoever only connects closes nobody else's. Beyond `every` in all, the address with the most loses one.
    """

    def __init__(self, at: socket.socket, each: int = EACH, every: int = 1 << 15):
        super().__init__(at.family, at.type, at.proto, at.detach())
        self.local = self.family not in (socket.AF_INET, socket.AF_INET6)  # all is from one proxy
        self.each, self.every, self.open = every if self.local else each, every, dict[str, dict[Connection, None]]()
        self.listen(2048)

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection."""
        handle, address = self._accept()  # pyrefly: ignore[missing-attribute]
        mine = self.open.setdefault(address[0] if address else "", {})
        connection = Connection(self.family, self.type, self.proto, fileno=handle)
        connection.among = mine
        most = mine if len(mine) >= self.each else max(self.open.values(), key=len)
        if len(mine) >= self.each or sum(map(len, self.open.values())) >= self.every:
            oldest = next((c for c in most if c.silent), next(iter(most)))
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
            most.pop(oldest, None)
        mine[connection] = None
        if len(self.open) > EACH:
            self.open = {key: those for key, those in self.open.items() if those}
        return connection, address


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


def listening(host: str, port: int, each: int = EACH, every: int = 1 << 15) -> Listening:
    """At a port, at unix:PATH, or at what systemd has opened for this process. Raises OSError."""
    if os.environ.get("LISTEN_PID") == str(os.getpid()):
        at = socket.socket(fileno=3)
    elif host.startswith("unix:"):
        at, path = unix_socket(), host.removeprefix("unix:")
        with suppress(OSError), unix_socket() as other:
            if stat.S_ISSOCK(os.stat(path).st_mode) and other.connect_ex(path):  # nobody listens there any more
                os.unlink(path)
        at.bind(path)
        os.chmod(path, 0o660)
    else:
        at = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        if os.name == "posix":
            at.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        at.bind((host, port))
    return Listening(at, each, every)
