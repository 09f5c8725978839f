"""Hospitals whose sums are secure, in this process: their keys, and a transport that can lose answers."""

from dataclasses import replace
from pathlib import Path

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from direct import Direct, raw
from hospitals import ALL, NAMES, OPEN, SIZES, Between, Sites, rows

from polyfed_sites.consent import Consent
from polyfed_sites.keys import fingerprint
from polyfed_sites.policy import Policy
from polyfed_sites.site import Site

FOUR = (*NAMES, "wien")
KEYS = {name: ec.generate_private_key(ec.SECP256R1()) for name in FOUR}
SECURE = '[privacy]\nsums = "secure"\n'
COLUMNS, DP = '[columns]\nmissing = "mean"\n', "epsilon = 2.0\ndelta = 1e-3\nclip = 1.0\n"
SIZES["wien"] = 26


def register() -> dict[str, str]:
    form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    return {name: key.public_key().public_bytes(*form).decode() for name, key in KEYS.items()}


def folder(path: Path) -> Path:
    path.mkdir()
    for name in FOUR:
        (path / f"{name}.csv").write_text("\n".join(rows(name)) + "\n")
    return path


class Secured(Sites):
    """Four hospitals that have keys. `lost`: (site, what, round) whose answers are lost; `seen`: all that has left."""

    def __init__(self, place: Path, data: Path, consent: Consent = ALL, policy: Policy = OPEN):
        pins = [fingerprint(key) for key in register().values()]
        policy = replace(policy, peers=pins if policy.peers is None else policy.peers, absent=policy.absent or 9)
        super().__init__(place, data, consent, FOUR, policy)
        self.lost = lambda name, head: False
        self.seen: list[tuple[str, dict, bytes]] = []

    def member(self, name: str) -> Site:
        found = super().member(name)
        found.hidden.sign = lambda text: KEYS[name].sign(text, ec.ECDSA(hashes.SHA256()))
        return found

    def answer(self, name: str, data: bytes) -> bytes:
        found = super().answer(name, data)
        self.seen.append((name, raw(data).head, found))
        return found

    def direct(self, kind=None) -> "Losing":
        return Losing(self)


class Keyed(Between):
    """Somebody in between, who passes keys on."""

    def register(self):
        return register()


class Losing(Direct):
    def __init__(self, sites: Secured):
        super().__init__(sites.names, sites.answer)
        self.of = sites

    def register(self):
        return register()

    def pull(self, names, enough=None, seconds=None):
        found = {}
        for name in [name for name in names if name in self._asked][:enough]:
            data = self._asked.pop(name)
            lost = self.of.lost(name, raw(data).head)
            found[name] = f"{name} does not answer" if lost else self.answer(name, data)
        return found
