"""Keys and certificates of a federation: a folder at the server, and one file for each site.

The folder holds a certificate authority, the server's certificate, and the register of the sites' public keys. A site's
file holds all that it needs to join: the server's address, the authority's certificate and the site's private key,
which the server does not keep.

The server signs what it sends with the key of its certificate, and a site has a certificate too, for servers that ask
for one: both ends know each other also where something between them ends TLS.

A site has two valid keys while it changes from one to the other. What was revoked stays in the register, with when and
why, beside the addresses that each key came from.
"""

import base64
import hashlib
import ipaddress
import json
import os
import re
import secrets
import ssl
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from polyfed.base.errors import ConfigError, RunError, closest
from polyfed.base.settings import is_list, is_table, table_in
from polyfed.base.system import DEVICE, flush, move

MISSING = "real sites need packages that are missing; pip install 'polyfed[sites]'"

try:
    x509, errors = (import_module(f"cryptography.{name}") for name in ("x509", "exceptions"))
    names = "hashes", "serialization", "asymmetric.ec"
    hashes, s, ec = (import_module(f"cryptography.hazmat.primitives.{name}") for name in names)
except ModuleNotFoundError:
    raise ConfigError(MISSING) from None

SHA, CLIENT = hashes.SHA256(), x509.ExtendedKeyUsageOID.CLIENT_AUTH
UNREADABLE = OSError, ValueError, TypeError, KeyError, errors.UnsupportedAlgorithm
PORT, HTTPS = 8000, 443  # of an address without one; after https://
AUTHORITY, SERVER, SITE = 3650, 730, 730  # days that certificates and keys are good for
SOON = 30  # days before the end in which to warn, and for which a key is accepted beside the one that replaces it
KNOWN = 20  # addresses that are remembered of a key
NAME = re.compile(r"[\w][\w.-]{0,63}")
LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", re.I)  # of a host's name: RFC 1123, and underscores


class Entry(NamedTuple):
    """A key in the register. public: as OpenSSH writes it     until: it is accepted     why: it was revoked"""

    public: str
    until: datetime
    revoked: datetime | None
    why: str

    @property
    def mark(self) -> str:
        """Twelve hexadecimal digits that stand for the key."""
        return fingerprint(self.public)

    def state(self, now: datetime) -> str:
        """valid, expired or revoked."""
        return "revoked" if self.revoked else "expired" if self.until <= now else "valid"


def fingerprint(public: str) -> str:
    """Twelve hexadecimal digits that stand for a key. public: as OpenSSH writes it"""
    return full_fingerprint(public)[:DIGITS]


def full_fingerprint(public: str) -> str:
    """All of its 64 digits."""
    return hashlib.sha256(base64.b64decode(public.split()[1])).hexdigest()


DIGITS = 12  # of a fingerprint as it is shown


class Address(NamedTuple):
    """Where a server is. path: "" or /some/path, in front of all that it answers"""

    host: str
    port: int
    path: str = ""

    def __str__(self) -> str:
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}{self.path}"


class SiteKey(NamedTuple):
    """What a site's file says. server: its address     authority: a certificate, PEM     private: the key itself
    certificate: the site's own, PEM; "": none
    """

    site: str
    server: str
    authority: str
    private: Any
    until: datetime
    certificate: str = ""

    @property
    def public(self) -> str:
        """The public half, as OpenSSH writes it."""
        return openssh(self.private)


def sign(private: Any, text: bytes) -> bytes:
    """A signature by a private key."""
    return private.sign(text, ec.ECDSA(SHA))


def signed(public: str, text: bytes, signature: bytes) -> bool:
    """True for what `sign` gives by the key of this public one, as OpenSSH writes it."""
    try:
        _public(public).verify(signature, text, ec.ECDSA(SHA))
    except (errors.InvalidSignature, ValueError, TypeError, AttributeError):
        return False
    return True


@lru_cache(1 << 14)
def _public(text: str) -> Any:
    return s.load_ssh_public_key(text.encode())


def server_of(authority: str, certificate: bytes) -> str:
    """The public key, as OpenSSH writes it, of a server's certificate. Raises RunError for one that the authority has
    not made for a server, or that is not good now.
    """
    try:
        found, by = x509.load_pem_x509_certificate(certificate), x509.load_pem_x509_certificate(authority.encode())
        found.verify_directly_issued_by(by)
        uses = [e.value for e in found.extensions if isinstance(e.value, x509.ExtendedKeyUsage)]
    except (*UNREADABLE, errors.InvalidSignature):
        raise RunError("it signs with a key that the federation's authority has not certified") from None
    if uses and CLIENT in uses[0]:
        raise RunError("it signs with the key of a site")
    if (now := _now()) > found.not_valid_after_utc or now < found.not_valid_before_utc:
        until = f"good from {found.not_valid_before_utc:%Y-%m-%d} until {found.not_valid_after_utc:%Y-%m-%d}"
        raise RunError(f"its certificate is {until}, and this machine's clock says {now:%Y-%m-%d %H:%M} UTC")
    return openssh(found)


class Keys:
    """The folder at the server."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.authority, self.certificate, self.private = (
            folder / name for name in ("ca.pem", "server.pem", "server.key")
        )
        self._came: dict[str, list[str]] = {}  # what this process has seen
        self._signing, self._register, self._seen = (folder / name for name in ("ca.key", "sites.json", "seen.json"))

    def make(self, address: str, also: Sequence[str] = (), days: int = SERVER) -> None:
        """A server certificate for the host in `address` and its other names; the authority too, unless it is there."""
        host = split(address).host
        names = dict.fromkeys([host, *map(host_of, also), "localhost", "127.0.0.1"])
        register = self._load() if self._register.exists() else {"sites": {}}
        if not self._signing.exists():
            if self.authority.exists() or register["sites"]:
                raise RunError(f"{self._signing}: missing, and the sites trust no other; restore it from a copy")
            self._authorise(host)
        key, authority = ec.generate_private_key(ec.SECP256R1()), self._read(_loaded, self.authority)
        made = _certificate(host, authority, key.public_key(), days, x509.ExtendedKeyUsageOID.SERVER_AUTH)
        made = made.add_extension(x509.SubjectAlternativeName([_named(n) for n in names]), critical=False)
        certificate = made.sign(self._read(lambda data: s.load_pem_private_key(data, None), self._signing), SHA)
        write(self.private, pem(key))
        write(self.certificate, certificate.public_bytes(s.Encoding.PEM))
        self._save(register | {"address": address})

    def _authorise(self, host: str) -> None:
        key, name = ec.generate_private_key(ec.SECP256R1()), f"polyfed {secrets.token_hex(4)} at {host}"
        certificate = _certificate(name, None, key.public_key(), AUTHORITY).sign(key, SHA)
        write(self._signing, pem(key))
        write(self.authority, certificate.public_bytes(s.Encoding.PEM))

    def add(self, site: str, to: Path, days: int = SITE, rotate: bool = False, passphrase: bytes | None = None) -> Path:
        """Make a site's key, its file in the folder `to`; if `rotate`, a second one, beside which the older one is
        accepted for `SOON` days. Only the public half stays here.
        """
        if not NAME.fullmatch(site) or DEVICE.fullmatch(site):
            expected = "letters, digits, '.', '-' and '_', 64 at most, and no device of Windows"
            raise ConfigError(f"{site!r} cannot be the name of a site; {expected}")
        register, now = self._load(), _now()
        if alike := [name for name in register["sites"] if name != site and name.casefold() == site.casefold()]:
            raise ConfigError(f"{site!r} cannot be the name of a site beside {alike[0]}: their files may be the same")
        valid = [e for e in self.sites().get(site, ()) if e.state(now) == "valid"]
        if valid and not rotate:
            then = "--rotate makes a second one, and polyfed keys revoke ends it"
            raise ConfigError(f"{site} has a key, good until {valid[0].until:%Y-%m-%d}; {then}")
        if len(valid) > 1:
            both = " and ".join(e.mark for e in valid)
            raise ConfigError(f"{site} has two valid keys, {both}; polyfed keys revoke {site} --key {valid[0].mark}")
        authority = self._read(_loaded, self.authority)
        key, until = ec.generate_private_key(ec.SECP256R1()), now + timedelta(days=days)
        certificate = b""
        if self._signing.exists():  # it may be kept elsewhere
            made = _certificate(site, authority, key.public_key(), days, CLIENT)
            signing = self._read(lambda data: s.load_pem_private_key(data, None), self._signing)
            certificate = made.sign(signing, SHA).public_bytes(s.Encoding.PEM)
        says = {
            "site": site,
            "server": register["address"],
            "until": until.isoformat(),
            "authority": self.authority.read_text("utf-8"),
            "certificate": certificate.decode(),
            "key": pem(key, passphrase).decode(),
        }
        path = to / f"{site}.key"
        if path.exists():
            raise ConfigError(f"{path} is there already; move it away first")
        write(path, json.dumps(says, indent=1).encode())
        mine = register["sites"].setdefault(site, [])
        for older in mine:
            older["until"] = min(_when(older["until"]), now + timedelta(days=SOON)).isoformat()
        mine.append({"public": openssh(key), "until": until.isoformat()})
        self._save(register)
        return path

    def revoke(self, site: str, key: str | None = None, why: str = "") -> list[str]:
        """A running server drops the site within seconds; its keys, or the one of this mark, are never accepted again,
        and stay in the register. Returns the marks of what was revoked.
        """
        register, marks = self._load(), [e.mark for e in self.sites().get(site, ())]
        if not marks:
            raise ConfigError(f"no site {site!r} in {self.folder}{closest(site, register['sites'])}")
        if key is not None and key not in marks:
            raise ConfigError(f"--key: {site} has no key {key!r}{closest(key, marks)}, expected {' or '.join(marks)}")
        revoked: list[str] = []
        for mark, says in zip(marks, register["sites"][site], strict=True):
            if key in (None, mark) and "revoked" not in says:
                says |= {"revoked": _now().isoformat(), "why": why}
                revoked.append(mark)
        self._save(register)
        return revoked

    def sites(self) -> dict[str, list[Entry]]:
        """The register: every site's keys, the oldest first."""
        return {name: [_entry(name, key) for key in keys] for name, keys in self._load()["sites"].items()}

    def accepted(self) -> dict[str, tuple[str, str]]:
        """By their public key, the sites whose keys are good now, and the key's mark."""
        now = _now()
        return {
            e.public: (name, e.mark) for name, keys in self.sites().items() for e in keys if e.state(now) == "valid"
        }

    def came(self, mark: str, address: str) -> list[str]:
        """Note where a key comes from, if it can be written; where it came from before, if from elsewhere alone."""
        self._came = self.seen() | self._came
        before = self._came.get(mark, [])
        if address in before:
            return []
        self._came[mark] = [*before, address][-KNOWN:]
        with suppress(RunError):
            write(self._seen, json.dumps(self._came, indent=1).encode())
        return before

    def seen(self) -> dict[str, list[str]]:
        """Addresses that keys came from, by the key's mark."""
        try:
            return {mark: [*map(str, addresses)] for mark, addresses in table_in(self._seen.read_bytes()).items()}
        except (OSError, ValueError, TypeError):
            return {}

    def word(self) -> str:
        """A word that nobody guesses, by which the status page is found: a new one where its file is not there."""
        path, word = self.folder / "status.word", secrets.token_urlsafe(24)
        with suppress(RunError):
            if not path.is_file():
                write(path, word.encode())
            return path.read_text("utf-8").strip()
        return word

    def changed(self) -> int:
        """A number that is another one once the register was written."""
        return self._register.stat().st_mtime_ns

    @property
    def address(self) -> str:
        """At which the sites reach the server."""
        return self._load()["address"]

    def signer(self) -> tuple[Callable[[bytes], bytes], bytes]:
        """What signs for the server, and its certificate, PEM."""
        key = self._read(lambda data: s.load_pem_private_key(data, None), self.private)
        self._read(_loaded, self.certificate)
        return (lambda text: key.sign(text, ec.ECDSA(SHA))), self.certificate.read_bytes()

    def until(self) -> datetime:
        """When the server's certificate, or that of its authority, ends."""
        both = (self._read(_loaded, path) for path in (self.certificate, self.authority))
        return min(c.not_valid_after_utc for c in both)

    def warnings(self, shown: Path | None = None) -> list[str]:
        """What ends soon, a line each. shown: a certificate of another authority"""
        ends = {"the server's certificate": (self.until(), "polyfed keys init")}
        if shown is not None:
            ends[f"the certificate {shown}"] = self._read(_loaded, shown).not_valid_after_utc, "renew it"
        ends |= {
            f"{name}'s key": (keys[-1].until, f"polyfed keys add {name} --rotate")
            for name, keys in self.sites().items()
            if keys[-1].revoked is None
        }
        return [line for what, (end, cure) in ends.items() if (line := warning(what, end, cure))]

    def _load(self) -> dict[str, Any]:
        try:
            register = table_in(self._register.read_bytes())
            if not (isinstance(register.get("address"), str) and is_table(register.get("sites"))):
                raise ValueError("expected the server's address and a table of sites")
            for name, keys in register["sites"].items():
                if not (is_list(keys) and keys):
                    raise ValueError(f"site {name!r}: expected a list of its keys")
                for says in keys:
                    _entry(name, says)
            return register
        except FileNotFoundError:
            raise ConfigError(f"{self.folder}: no keys of a federation; make them with polyfed keys init") from None
        except (OSError, ValueError) as e:
            raise RunError(f"{self._register} is damaged ({_reason(e)}); restore it from a copy") from None

    def _save(self, register: Mapping[str, Any]) -> None:
        write(self._register, json.dumps(register, indent=1).encode())

    def _read(self, load: Any, path: Path) -> Any:
        try:
            return load(path.read_bytes())
        except UNREADABLE as e:
            raise RunError(f"{path}: cannot be read as a key or certificate ({_reason(e)})") from None


def site_key(path: Path, passphrase: Callable[[], bytes] | None = None) -> SiteKey:
    """A site's file. passphrase: called where its key is encrypted"""
    try:
        says = table_in(path.read_bytes())
        for key in ("site", "server", "authority", "key", "until"):
            if not isinstance(says.get(key), str):
                raise ValueError(f"its {key!r} is missing or no text")
        private = _unlocked(path, says["key"].encode(), passphrase)
        _loaded(says["authority"].encode())
        own = says.get("certificate", "")
        if own and _loaded(own.encode()).public_key() != private.public_key():
            raise ValueError("its certificate is of another key")
        return SiteKey(says["site"], says["server"], says["authority"], private, _when(says["until"]), own)
    except UNREADABLE as e:
        raise ConfigError(f"{path}: not a site's key, as polyfed keys add makes it ({_reason(e)})") from None


def _unlocked(path: Path, key: bytes, passphrase: Callable[[], bytes] | None) -> Any:
    try:
        return s.load_pem_private_key(key, None)
    except TypeError:  # it is encrypted
        if passphrase is None:
            raise ConfigError(f"{path}: has a passphrase, and none was given") from None
    try:
        return s.load_pem_private_key(key, passphrase())
    except ValueError:
        raise ConfigError(f"{path}: its passphrase is another one") from None


def warning(what: str, end: datetime, cure: str) -> str:
    """What to say of something that ends at `end`; empty while there is time."""
    left = end - _now()
    if left > timedelta(days=SOON):
        return ""
    word = "has ended" if left < timedelta(0) else "ends"
    return f"{what} {word} on {end:%Y-%m-%d}: {cure}"


def split(address: str) -> Address:
    """The parts of [https://]host[:port][/path], the host of IPv6 in brackets. Raises ConfigError for no address."""
    form = r"(https://)?(?:\[([^][]+)\]|([^:/]+))(?::(\d{1,5}))?((?:/[\w.~-]+)*)/?"
    parts = re.fullmatch(form, address, re.ASCII)  # else of IPv6, without a port
    if parts is None:
        return Address(host_of(address), PORT)
    port = int(parts[4] or (HTTPS if parts[1] else PORT))
    if not 0 < port < 65536:
        raise ConfigError(f"{address!r} is not an address: found port {port}, expected 1 to 65535")
    return Address(host_of(parts[2] or parts[3]), port, parts[5])


def host_of(text: str) -> str:
    """The text, if it is a host's name or IP address, else ConfigError."""
    labels = text.split(".")
    named = len(text) <= 253 and all(map(LABEL.fullmatch, labels)) and not labels[-1].isdigit()
    if named or (_ip(text) is not None and "%" not in text):
        return text
    hint = ""
    if not text.isascii():
        with suppress(UnicodeError):
            hint = f"; names outside ASCII are written as {text.encode('idna').decode()}"
    raise ConfigError(
        f"{text!r} is not an address of a host, expected a name such as fed.example.org, or an IP address{hint}"
    )


def present(context: ssl.SSLContext, certificate: Path, key: Path | None = None, word: str = "") -> None:
    """Show a certificate in TLS. key: where its key is, if not in the same file     word: by which that is encrypted"""
    try:
        context.load_cert_chain(certificate, key, word)
    except (OSError, ValueError) as e:
        where = "its key" if key is None else f"its key in {key}"
        raise ConfigError(
            f"{certificate}: cannot be used ({_reason(e)}), expected PEM with {where}, without a passphrase"
        ) from None


def trust(context: ssl.SSLContext, authorities: Path) -> None:
    """Let whom these have certified be at the other end of TLS."""
    try:
        context.load_verify_locations(authorities)
    except OSError as e:
        raise ConfigError(f"{authorities}: found no certificates of authorities ({_reason(e)}), expected PEM") from None


@contextmanager
def private() -> Generator[None]:
    """Inside, whatever this process and its children write is for this user only."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def put(path: Path, data: bytes) -> None:
    """A file that is there whole or not at all, for this user only, and on the disk. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(".draft", f".{path.name}.", path.parent)
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        move(Path(draft), path)
    finally:
        Path(draft).unlink(missing_ok=True)
    flush(path.parent)


def write(path: Path, data: bytes) -> None:
    """As `put`; an error is a RunError."""
    try:
        put(path, data)
    except OSError as e:
        raise RunError(f"cannot write {path}: {_reason(e)}") from None


def _certificate(name: str, by: Any, public: Any, days: int, use: Any = None) -> Any:
    """A certificate that is to be signed. by: the authority's; None: it is the authority itself"""
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name[:64])])
    issuer, key = (subject, public) if by is None else (by.subject, by.public_key())
    now = _now()
    start = min(now, now + timedelta(days=days)) - timedelta(days=1)  # clocks differ
    made = x509.CertificateBuilder(
        issuer, subject, public, x509.random_serial_number(), start, now + timedelta(days=days)
    )
    sure = [x509.BasicConstraints(ca=by is None, path_length=None if by else 0)]
    sure.append(x509.KeyUsage(by is not None, False, False, False, False, by is None, by is None, False, False))
    told = [x509.SubjectKeyIdentifier.from_public_key(public)]
    told.append(x509.AuthorityKeyIdentifier.from_issuer_public_key(key))
    told += [] if use is None else [x509.ExtendedKeyUsage([use])]
    for extension in (*sure, *told):
        made = made.add_extension(extension, critical=extension in sure)
    return made


def _loaded(data: bytes) -> Any:
    return x509.load_pem_x509_certificate(data)


def openssh(of: Any) -> str:
    """The public key of a key or certificate."""
    return of.public_key().public_bytes(s.Encoding.OpenSSH, s.PublicFormat.OpenSSH).decode()


def _named(host: str) -> Any:
    ip = _ip(host)
    return x509.DNSName(host) if ip is None else x509.IPAddress(ip)


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _entry(name: str, says: Any) -> Entry:
    try:
        revoked = _when(says["revoked"]) if "revoked" in says else None
        entry = Entry(says["public"], _when(says["until"]), revoked, str(says.get("why", "")))
        if entry.mark:
            return entry
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        pass
    raise ValueError(f"site {name!r}: expected a public key, and the time until which it is good")


def pem(key: Any, passphrase: bytes | None = None) -> bytes:
    """A private key, encrypted by the passphrase if there is one."""
    secret = s.NoEncryption() if passphrase is None else s.BestAvailableEncryption(passphrase)
    return key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, secret)


def _now() -> datetime:
    return datetime.now(UTC)


def _when(text: str) -> datetime:
    when = datetime.fromisoformat(text)
    return when if when.tzinfo else when.replace(tzinfo=UTC)


def _reason(error: Exception) -> str:
    from polyfed.base.checkpoint import reason  # with torch

    tls = error.reason if isinstance(error, ssl.SSLError) else ""
    return tls.lower().replace("_", " ") if tls else reason(error)
