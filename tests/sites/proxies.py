"""Proxies as hospitals have them: one that opens connections for who has a password, one that reads what is in them."""

import base64
import select
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


class Proxy:
    """asked: what it was asked to open

    word: NAME:WORD that it wants    keys: a PEM file of the certificate and key with which it ends TLS itself
    to: where it brings everybody without a word, as a proxy before a server does    change: what it does to bytes
    """

    def __init__(self, word: str = "", keys: Path | None = None, to: Callable[[], socket.socket] | None = None):
        self.word, self.to, self.asked, self.change = word, to, list[str](), lambda data: data
        self.tls = None if keys is None else ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if self.tls is not None:
            self.tls.load_cert_chain(keys)
        self.door = socket.create_server(("127.0.0.1", 0))
        self.port = self.door.getsockname()[1]
        threading.Thread(target=self._open, daemon=True).start()

    def _open(self) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=self._serve, args=(self.door.accept()[0],), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError, ssl.SSLError):
            server = self.to() if self.to else self._connected(client)
            if server is None:
                client.close()
                return
            if self.tls is not None:
                client = self.tls.wrap_socket(client, server_side=True)
                server = server if self.to else _blind(server)
            self._carry(client, server)

    def _connected(self, client: socket.socket) -> socket.socket | None:
        head = b""
        while b"\r\n\r\n" not in head:
            head += client.recv(1 << 16)
        words = base64.b64encode(self.word.encode())
        if self.word and b"Proxy-Authorization: Basic " + words not in head:
            client.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
            return None
        where = head.split()[1].decode()
        self.asked.append(where)
        if "forbidden" in where:
            client.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Type: text/html\r\nContent-Length: 5\r\n\r\n<html")
            return None
        try:
            server = socket.create_connection((where.rpartition(":")[0], int(where.rpartition(":")[2])))
        except OSError:
            client.sendall(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
            return None
        client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        return server

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        """In one thread: TLS of one socket in two at once ends the process."""
        with suppress(OSError):
            while True:
                held = [s for s in (client, server) if isinstance(s, ssl.SSLSocket) and s.pending()]
                for source in held or select.select([client, server], [], [])[0]:
                    source.setblocking(False)
                    try:
                        data = source.recv(1 << 16)
                    except (ssl.SSLWantReadError, BlockingIOError):  # what came was for TLS itself
                        continue
                    finally:
                        source.setblocking(True)
                    if not data:
                        raise OSError
                    (server if source is client else client).sendall(self.change(data))
        for end in (client, server):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self.door.close()


def _blind(server: socket.socket) -> ssl.SSLSocket:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(server)
