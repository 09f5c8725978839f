"""A site's end: asks the server for messages, answers them in this process, and sends replies; it only calls out."""

import hashlib
import json
import os
import secrets
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

from polyfed.base.errors import ConfigError, RunError, printable
from polyfed.runs.folder import version_of
from polyfed_sites.envelope import PROTOCOL, Denied, Envelope, opened, seal
from polyfed_sites.keys import (
    MISSING,
    SiteKey,
    full_fingerprint,
    pem,
    present,
    server_of,
    sign,
    signed,
    split,
    trust,
    write,
)

try:
    import httpx
except ModuleNotFoundError:
    raise ConfigError(MISSING) from None

STATE = "state.json"  # for `polyfed status`
PAUSE = 2.0  # seconds until a server that does not answer is tried again
AGAIN = 0.2  # seconds until a call that has failed is made again
BEAT = 10.0  # seconds between two signs of life, while a message is answered
KEPT = 60.0  # seconds for which a connection is kept that is not used
WAIT = 60.0  # seconds for the next bytes; a question is held for 20
OFF = 300.0  # seconds by which clocks differ without a word
LITTLE = 1 << 16  # bytes of a server's certificate
SHOW = "it wants a certificate that it knows; polyfed keys add --rotate, or --certificate"
PROXY = {  # what a proxy says that opens no connection
    "407": "wants a name and a password, or others ({said}); write http://NAME:WORD@HOST:PORT in --proxy",
    "": "does not let this machine reach {where} ({said}); its operator can allow it",
    "5": "does not reach {where} ({said})",
}
CERTIFICATE = {  # by OpenSSL's number
    9: ": its certificate is not valid yet ({clock}); set the clock that is wrong",
    10: ": its certificate has expired ({clock}); its operator renews it, by polyfed keys init if it is made by that",
    0: " is not the server of this key: {said}; if a proxy ends TLS there, the policy's tls-ends-at names its own",
} | dict.fromkeys((62, 64), ": its certificate is for another name ({said}); see --server")
STRANGER = {  # what something in the server's place says
    413: "{where}: something before it refuses messages of this size ({said}); raise its limit",
    0: "{where} does not answer as a server of polyfed does ({said}); is the address right, or is it a proxy's answer?",
} | dict.fromkeys((502, 503, 504), "no answer from {where} (something before it says {said})")


class Unheard(Exception):
    """No answer of the server. fatal: waiting does not help, unless it was heard before"""

    def __init__(self, why: str, fatal: bool = False):
        super().__init__(why)
        self.fatal = fatal


class Attendance:
    """One site at one server."""

    def __init__(
        self,
        key: SiteKey,
        answer: Callable[[str, bytes], bytes],  # (a run's name, a message) -> the reply
        over: Callable[[], bool],  # whether the last message has been answered
        folder: Path,  # where `polyfed status` looks
        say: Callable[[str], None],
        server: str | None = None,  # its address, where it is not the key's
        proxy: str | None = None,  # http://[NAME:WORD@]HOST:PORT; None: the environment's
        ends: str | None = None,  # authorities of a proxy that ends TLS: a file, or "system"
        certificate: Path | None = None,  # PEM with its key, in place of the one in the site's own file
    ):
        self.key, self.answer, self.over, self.folder, self.say = key, answer, over, folder, say
        self.server, self.ends, self.certificate = split(server or key.server), ends, certificate
        self.proxy, self._mark = _proxy(proxy, self.server.host), full_fingerprint(key.public)
        self._last: tuple[bytes, bytes] = b"", b""  # digest of the last message, and the reply
        self._session, self._n, self._signer = "", 0, ""  # signer: the server's public key
        self._said, self._sent, self._reached, self._failed = "", True, False, 0  # failed: calls, one after another
        self._busy, self._over, self._lock = threading.Event(), threading.Event(), threading.Lock()

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
                    with suppress(Unheard, Denied):
                        if self._session:
                            self._call(client, "bye")
        finally:
            (self.folder / STATE).unlink(missing_ok=True)

    def _connected(self) -> httpx.Client:
        limits, wait = httpx.Limits(max_connections=4, keepalive_expiry=KEPT), httpx.Timeout(WAIT, connect=10.0)
        trusted, proxy = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), None
        trusted.load_verify_locations(cadata=self.key.authority)
        self._let(trusted)
        if self.certificate is not None:
            present(trusted, self.certificate)
        elif self.key.certificate:  # ssl reads files alone
            with tempfile.TemporaryDirectory() as place:
                path, word = Path(place) / "pem", secrets.token_urlsafe(32)
                path.write_bytes(self.key.certificate.encode() + pem(self.key.private, word.encode()))
                present(trusted, path, word=word)
        if self.proxy is not None:
            self._let(machines := ssl.create_default_context())
            proxy = httpx.Proxy(self.proxy.geturl(), ssl_context=machines if self.proxy.scheme == "https" else None)
        headers = {"accept-encoding": "identity", "user-agent": f"polyfed/{version_of('polyfed')}"}
        return httpx.Client(verify=trusted, proxy=proxy, trust_env=False, timeout=wait, limits=limits, headers=headers)

    def _let(self, context: ssl.SSLContext) -> None:
        """Let proxies be at the other end of TLS, as the policy has it."""
        if self.ends == "system":
            context.load_default_certs()
        elif self.ends is not None:
            trust(context, Path(self.ends))

    # calls

    def _call(self, client: httpx.Client, do: str, body: bytes = b"", **says: Any) -> tuple[Mapping[str, Any], bytes]:
        """What the server answers. Raises Unheard or Denied."""
        with self._lock:
            self._n += 1
            about = {"do": do, "key": self._mark, "session": self._session, "n": self._n, **says}
            headers = seal("site", partial(sign, self.key.private), about, body)
            where = f"https://{self.server}/v1/{do}"
            try:
                with client.stream("POST", where, headers=headers, content=body) as answer:
                    envelope, data = self._read(answer, do == "hello", opened(headers).mark)
            except (httpx.HTTPError, httpx.InvalidURL) as e:
                raise self._why(e) from None
        if hashlib.sha256(data).hexdigest() != envelope.says.get("digest"):
            raise Unheard(f"{self.server}: an answer has changed or was cut off on its way")
        self._reached = True
        if envelope.says.get("say") == "refused":
            raise Denied(int(envelope.says.get("status", 0)))
        return envelope.says, data

    def _read(self, answer: httpx.Response, hello: bool, mark: str) -> tuple[Envelope, bytes]:
        """No more than the server has signed, but for its certificate, by which it is then known."""
        try:
            envelope = opened(answer.headers)
        except ValueError:
            raise self._stranger(answer) from None
        data = bytearray()
        if not hello:
            self._heard(envelope, mark)
        for part in answer.iter_bytes():
            data += part
            if len(data) > (LITTLE if hello else envelope.says["size"]):
                raise Unheard(f"{self.server}: an answer is longer than the server has said")
        if hello:
            self._meet(envelope, bytes(data))
            self._heard(envelope, mark)
        return envelope, bytes(data)

    def _heard(self, envelope: Envelope, mark: str) -> None:
        if not envelope.by("server", partial(signed, self._signer)) or envelope.says.get("to") != mark:
            self._session = ""  # its certificate may be a new one
            raise Unheard(f"{self.server}: an answer that this server has not given to this question")

    def _meet(self, envelope: Envelope, certificate: bytes) -> None:
        """Know the server by its certificate."""
        found, other = (printable(str(envelope.says.get(key)))[:40] for key in ("protocol", "polyfed"))
        if found != str(PROTOCOL):
            versions = f"polyfed {other}, this site {version_of('polyfed')}, with messages of protocols {found} and"
            raise RunError(f"{self.server}: has {versions} {PROTOCOL}; install the same version at both ends")
        try:
            self._signer = server_of(self.key.authority, certificate)
        except RunError as e:
            raise Unheard(f"{self.server} is not the server of this key: {e}", fatal=True) from None

    def _try(self, client: httpx.Client) -> None:
        """One message, or what keeps it from coming. Whatever is lost is asked for again by asking for a message."""
        try:
            if not self._session:
                self._enter(client)
            self._serve(client)
            self._failed = 0
        except Denied as e:
            if e.status == 403:
                why = "its key is revoked, expired or unknown there"
                raise RunError(f"the server does not accept this site: {why}; ask its operator for a new key") from None
            if e.status == 409:
                other = "another process has connected with this site's key"
                raise RunError(f"{other}, and the server talks to it alone") from None
            if e.status == 401:  # the server is another one
                self._session = ""
                return time.sleep(AGAIN)
            what = "has an error of its own" if e.status >= 500 else "was sent something else than this site sent"
            self._again(f"{self.server} {what} ({e.status}); its operator's screen says more")
        except Unheard as e:
            if e.fatal and not self._reached:
                raise RunError(str(e)) from None
            self._again(str(e))

    def _again(self, why: str) -> None:
        """Wait a little, and say why where that has not helped."""
        if not self._sent:
            self._tell(f"a reply did not reach the server ({why}); it will ask again")
        elif self._failed:
            self._tell(f"{why}; waiting for it")
        time.sleep(PAUSE if self._failed else AGAIN)
        self._failed += 1

    def _enter(self, client: httpx.Client) -> None:
        says, _ = self._call(client, "hello", nonce=secrets.token_hex(16))
        self._session, self._n = str(says["session"]), 0
        off = time.time() - float(says.get("time", 0.0))
        if abs(off) > OFF:
            which = "ahead of" if off > 0 else "behind"
            much = f"{abs(off) / 86400:.1f} days" if abs(off) > 86400 else f"{abs(off) / 60:.0f} minutes"
            self._tell(f"note: this machine's clock is {much} {which} the server's; certificates depend on it")
        self._call(client, "beat")
        self._tell(f"connected to {self.server}")

    def _beat(self, client: httpx.Client) -> None:
        while not self._over.wait(BEAT):
            if self._session and self._busy.is_set():
                with suppress(Unheard, Denied):
                    self._call(client, "beat")

    def _serve(self, client: httpx.Client) -> None:
        """Wait for a message, and answer it."""
        says, data = self._call(client, "ask")
        if says.get("say") != "message":
            self._sent = True  # nothing of it is wanted
            return
        digest = hashlib.sha256(data).digest()
        if digest != self._last[0]:
            self._busy.set()
            try:
                self._last = digest, self.answer(str(says.get("run")), data)
            finally:
                self._busy.clear()
        self._sent = False
        self._call(client, "reply", self._last[1], run=says.get("run"), asked=digest.hex())
        self._sent = True

    # words

    def _why(self, error: Exception) -> Unheard:
        """What an error of the connection means, in words that somebody can act on."""
        where, causes = str(self.server), list[BaseException]()
        to, by = where, "" if self.proxy is None else f"the proxy {_shown(self.proxy)}"
        at: BaseException | None = error
        while at is not None and at not in causes:
            causes.append(at)
            at = at.__cause__ or at.__context__
        if isinstance(error, httpx.ProxyError):
            says = PROXY.get(str(error)[:3], PROXY["5" if str(error).startswith("5") else ""])
            return Unheard(f"{by} {says.format(where=where, said=error)}", not str(error).startswith("5"))
        if by:
            to, where = by, f"{where} through {by}"
        for e in causes:
            if isinstance(e, ssl.SSLCertVerificationError):
                clock = f"this machine's clock says {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
                says = CERTIFICATE.get(e.verify_code, CERTIFICATE[0])
                return Unheard(f"{where}{says.format(clock=clock, said=e.verify_message)}", fatal=True)
            if isinstance(e, ssl.SSLError) and not isinstance(e, ssl.SSLEOFError):
                reason = str(e.reason).lower().replace("_", " ")
                if "alert" in reason or "certificate required" in reason:
                    return Unheard(f"{where} has refused the connection ({reason}): {SHOW}")
                what = "no answer that TLS takes from {}" if self._reached else "{} does not speak TLS"
                return Unheard(f"{what.format(where)} ({e.reason})", fatal=True)
            if isinstance(e, socket.gaierror):
                host, option = (self.proxy.hostname, "--proxy") if self.proxy else (self.server.host, "--server")
                unknown = f"no host is known by the name {host!r} ({e.strerror}); see {option}"
                return Unheard(unknown, fatal=e.errno != socket.EAI_AGAIN)
        if isinstance(error, httpx.TimeoutException):
            return Unheard(f"no answer from {where} (it takes too long)")
        gone = ssl.SSLEOFError, ConnectionResetError, ConnectionAbortedError, BrokenPipeError, httpx.RemoteProtocolError
        hung_up = any(isinstance(e, gone) for e in causes)
        system = next((e.strerror for e in causes if isinstance(e, OSError) and e.strerror), "")
        known = "" if self._reached else ", as to who shows no certificate that it wants"
        said = f"it hangs up{known}" if hung_up else system or " ".join(str(error).split()) or type(error).__name__
        return Unheard(
            f"no answer from {to if isinstance(error, httpx.ConnectError) and not hung_up else where} ({said})"
        )

    def _stranger(self, answer: httpx.Response) -> Unheard:
        """An answer that is not the server's."""
        status, kind = answer.status_code, printable(answer.headers.get("content-type", "")).partition(";")[0][:40]
        says, what = STRANGER.get(status, STRANGER[0]), f"{status} {answer.reason_phrase}{kind and f', {kind}'}"
        return Unheard(says.format(where=self.server, said=what), status not in STRANGER)

    def _tell(self, line: str) -> None:
        """An event, once and not as often as it is repeated."""
        if line != self._said:
            self.say(line)
        self._said = line


def _proxy(given: str | None, host: str) -> SplitResult | None:
    """The proxy that is given, or that the environment or the system's settings have for a host."""
    if given is None and not proxy_bypass(host):
        settings = getproxies()
        given = settings.get("https") or settings.get("all")
    if not given:
        return None
    with suppress(ValueError):
        url = urlsplit(given if "://" in given else f"http://{given}")
        if url.scheme in ("http", "https") and url.hostname and url.port != 0:
            return url
    found = given.rpartition("@")[2]  # without a password
    raise ConfigError(f"--proxy, or HTTPS_PROXY: found {found!r}, expected http://[NAME:WORD@]HOST:PORT")


def _shown(proxy: SplitResult) -> str:
    """A proxy without the word for it."""
    return f"{proxy.scheme}://{proxy.netloc.rpartition('@')[2]}"
