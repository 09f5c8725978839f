"""Messages over HTTPS: the server answers its sites, which ask for their messages and bring their replies.

    polyfed server ==== TLS, what `gate` lets through ==== polyfed client

A message is made when its site asks for it, and made again whenever the site asks without having answered: what is lost
needs no other cure, as a site answers the same again. Nothing of it is kept on the disk.
"""

import hmac
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from polyfed.base.errors import PolyfedError
from polyfed.runs import stop
from polyfed.runs.folder import version_of
from polyfed_sites.audit import Audit, heading, mark
from polyfed_sites.envelope import PROTOCOL, Denied, Envelope
from polyfed_sites.gate import Gate, Port, tls
from polyfed_sites.keys import Keys, full_fingerprint, signed, split, write

if TYPE_CHECKING:
    from polyfed_sites.wire import Message, Request

ENDS = 60.0  # seconds between two looks at whether a key has ended
LOOK = 1.0  # seconds between two looks at who is connected
ALIVE = 30.0  # seconds after its last sign of life for which a site counts as connected
STOPPED = 0.2  # seconds between two looks at whether to go on waiting
MOST = 1 << 34  # bytes of tensors in a message
STATE = "state.json"  # for `polyfed status`
REFUSED = "its key is not accepted (revoked, expired or unknown)"
LONG = "not a message (it is too long)"
Say = Callable[[str], None]


class Asked(NamedTuple):
    """What a site was asked and has not answered. message: not its bytes, as sites share its tensors     since: when"""

    by: "Channel"
    message: "Message[Request]"
    since: float


class Given(NamedTuple):
    """A question as it was given to its site. what: it is, in words"""

    asked: Asked
    digest: str
    what: str


class Left(NamedTuple):
    """What has left a site in a run. kind: of the last answer"""

    answers: int = 0
    bytes: int = 0
    kind: str = ""


class Known(NamedTuple):
    """A key that is accepted. public: as OpenSSH writes it     mark: its twelve digits"""

    site: str
    public: str
    mark: str


class Session:
    """A site's process. n: number of the last that it said     busy: calls of it under way     heard: when last"""

    def __init__(self, id: str, by: Known, address: str):
        self.id, self.by, self.site, self.address = id, by, by.site, address
        self.n, self.busy, self.heard = 0, 0, time.monotonic()

    @property
    def alive(self) -> bool:
        return self.busy > 0 or time.monotonic() < self.heard + ALIVE


class Hub:
    """Who is connected at the server's port, and what is asked of whom, for any number of runs."""

    def __init__(
        self,
        keys: Keys,
        say: Say,
        host: str = "0.0.0.0",  # or unix:PATH, behind a proxy of the same machine
        port: int | None = None,  # of the keys' address
        shown: "Callable[[Hub], str] | None" = None,  # makes the page at `path`, which shows all of it
        certificate: Path | None = None,  # PEM with its key, in place of the federation's own
        clients: Path | None = None,  # authorities: who connects shows a certificate of one of them
    ):
        address = split(keys.address)
        self.keys, self.say, self.port, self.shown = keys, say, port or address.port, shown
        self.path = f"/status/{keys.word()}"
        self.sign, self.certificate = keys.signer()
        self.changed = threading.Condition()  # guards what follows
        self.asked: dict[tuple[str, str], Asked] = {}  # by run and site, the oldest first
        self.found: dict[tuple[str, str], bytes | str] = {}
        self.runs: list[Channel] = []
        self.queued: list[str] = []  # runs that wait for their turn
        self.online: dict[str, str] = {}  # by name: the address
        self._open: dict[str, Given] = {}
        self._known: dict[str, Known] = {}  # by the key's fingerprint, as is the next
        self._named: dict[str, str] = {}  # sessions that nobody has used yet
        self._sessions: dict[str, Session] = {}
        self._wake: dict[str, Callable[[], None]] = {}
        self._registered, self._over = (0, 0.0), threading.Event()
        self.register()
        self.gate = Port(Gate(self, say, address.path), tls(keys, certificate, clients), host, self.port)
        threading.Thread(target=self._watch, daemon=True).start()

    # who is there

    def register(self) -> None:
        """The keys that are accepted become those of the register: also while it runs, so a key can be revoked."""
        changed, now = self.keys.changed(), time.monotonic()
        if self._registered[0] == changed and now < self._registered[1] + ENDS:
            return
        wanted = {full_fingerprint(key): Known(site, key, m) for key, (site, m) in self.keys.accepted().items()}
        for key in self._known.keys() - wanted.keys():
            gone = self._known[key]
            self._note("refused", site=gone.site, key=gone.mark)
            self._named.pop(key, None)
            if (there := self._sessions.get(gone.site)) is not None and there.by == gone:
                del self._sessions[gone.site]
        self._known, self._registered = wanted, (changed, now)

    def _note(self, did: str, **what: str) -> None:
        """Write down in the log of every run what a key did, or that it is not accepted any more."""
        for run in self.runs:
            if run.audit is not None and not run.over:
                run.audit.add(did, **what)

    def _watch(self) -> None:
        said = ""
        while not self._over.wait(LOOK):
            try:
                self.look()
            except PolyfedError as e:
                if said != (said := str(e)):
                    self.say(said)

    def look(self) -> None:
        """Say who has gone, and note who is there for `polyfed status`."""
        with self.changed:
            self.register()
            names = {known.site for known in self._known.values()}
            for name in sorted(self.online):
                if name not in self._sessions or not self._sessions[name].alive:
                    del self.online[name]
                    gone = "is not connected any more" if name in names else "'s key is no longer accepted"
                    self.say(f"{name} {gone}".replace(" '", "'"))
            for key in [key for key in self.asked if key[1] not in names]:
                self._answer(key, REFUSED)
            for run in self.runs:
                if not run.over:
                    run.note(names)

    def public(self) -> dict[str, str]:
        """By site, the key of the process that is connected, as OpenSSH writes it."""
        return {name: self._sessions[name].by.public for name in self.online if name in self._sessions}

    def admit(self, do: str, said: Envelope, address: str) -> Session:
        """Who calls. Raises Denied for whom no key vouches, and for what was said before."""
        says = said.says
        if says.get("protocol") != PROTOCOL:
            raise Denied(426)
        with self.changed:
            self.register()
            key = str(says.get("key"))
            if key not in self._known:  # it may just have been made
                self._registered = 0, 0.0
                self.register()
            known = self._known.get(key)
        if known is None:
            raise Denied(403)
        if says.get("do") != do or not said.by("site", partial(signed, known.public)):
            raise Denied(400)
        with self.changed:
            if do == "hello":
                self._named[key] = secrets.token_hex(16)
                return Session(self._named[key], known, address)
            there = self._enter(key, known, address, str(says.get("session")))
            if not isinstance(n := says.get("n"), int) or n <= there.n:
                raise Denied(400)
            there.n, there.heard, there.busy = n, time.monotonic(), there.busy + 1
            if known.site not in self.online:
                self.online[known.site] = address
                self.say(f"{known.site} is connected")
            return there

    def _enter(self, key: str, known: Known, address: str, session: str) -> Session:
        """The session; a new one takes the place of another of its site."""
        there = self._sessions.get(known.site)
        if self._named.get(key) == session:
            del self._named[key]
            self._came(known, address)
            self.online.pop(known.site, None)
            there = self._sessions[known.site] = Session(session, known, address)
            self._rouse(known.site)
        if there is None or there.id != session or there.by != known:
            raise Denied(401 if there is None else 409)
        return there

    def _came(self, known: Known, address: str) -> None:
        """Note where a key comes from, and say it where it came from elsewhere before."""
        self._note("connected", site=known.site, key=known.mark, address=address)
        if before := self.keys.came(known.mark, address):
            then = f"came from {', '.join(before)} before"
            self.say(f"note: {known.site}'s key {known.mark} comes from a new address, {address}; it {then}")

    def left(self, caller: Session) -> None:
        """A call has ended."""
        with self.changed:
            caller.busy, caller.heard = caller.busy - 1, time.monotonic()

    # messages

    def ask(self, by: "Channel", name: str, message: "Message[Request]") -> None:
        """Have a message ready for when its site asks; an earlier one of the run is then of no use."""
        with self.changed:
            self.found.pop((by.run, name), None)
            self.asked.pop((by.run, name), None)
            self.asked[by.run, name] = Asked(by, message, time.time())
            self._rouse(name)

    def drop(self, by: "Channel") -> None:
        """Forget what a run has asked."""
        with self.changed:
            for mine in (self.asked, self.found):
                for key in [key for key in mine if key[0] == by.run]:
                    del mine[key]

    def wait(self, name: str, wake: Callable[[], None]) -> bool:
        """Call `wake` once there is a message for a site; False: there is one."""
        with self.changed:
            self._rouse(name)  # a question that its site does not wait for any more
            if self._next(name) is not None or self._over.is_set():
                return False
            self._wake[name] = wake
            return True

    def _rouse(self, name: str) -> None:
        self._wake.pop(name, lambda: None)()

    def _next(self, name: str) -> Asked | None:
        return next((asked for (_, site), asked in self.asked.items() if site == name), None)

    def answer(self, do: str, said: Envelope, caller: Session, body: bytes = b"") -> tuple[dict[str, Any], bytes]:
        """What is said to a call, and the bytes that go with it. Raises Denied."""
        match do:
            case "hello":
                about = {"session": caller.id, "polyfed": version_of("polyfed"), "time": time.time()}
                return {"say": "hello", **about}, self.certificate
            case "ask":
                return self._give(said, caller)
            case "reply":
                return {"say": self._take(said, caller, body)}, b""
            case "bye":
                with self.changed:
                    self._sessions.pop(caller.site, None)
                self.look()
        return {"say": "well"}, b""

    def _give(self, said: Envelope, caller: Session) -> tuple[dict[str, Any], bytes]:
        with self.changed:
            if self._sessions.get(caller.site) is not caller:
                raise Denied(409 if caller.site in self._sessions else 401)
            question = self._next(caller.site) if said.says["n"] == caller.n else None
        if question is None:
            return {"say": "nothing"}, b""
        data = question.message.pack()
        given = Given(question, mark(data), heading(data))
        question.by.note_asked(caller.site, given)
        with self.changed:
            self._open[caller.site] = given
        return {"say": "message", "run": question.by.run}, data

    def room(self, said: Envelope, caller: Session) -> bool:
        """Whether a reply is to be read: one to what its site was given last, of twice the largest at most."""
        with self.changed:
            there = self._wanted(said, caller)
            if there is not None and said.says["size"] > 2 * there.asked.by.most:
                self._answer((there.asked.by.run, caller.site), LONG)
                return False
            return there is not None

    def _wanted(self, said: Envelope, caller: Session) -> Given | None:
        there = self._open.get(caller.site)
        if there is None or (said.says.get("run"), said.says.get("asked")) != (there.asked.by.run, there.digest):
            return None
        return there if self.asked.get((there.asked.by.run, caller.site)) is there.asked else None

    def _take(self, said: Envelope, caller: Session, body: bytes) -> str:
        if mark(body) != said.says.get("digest"):
            raise Denied(400)
        with self.changed:
            there = self._wanted(said, caller)
            if there is None:
                return "unwanted"
            del self._open[caller.site]
            there.asked.by.note_answered(caller.site, there, body)
            self._answer((there.asked.by.run, caller.site), body)
        return "taken"

    def _answer(self, key: tuple[str, str], reply: bytes | str) -> None:
        del self.asked[key]
        self.found[key] = reply
        self.changed.notify_all()

    def page(self, path: str) -> bytes | None:
        """The page of who asks for it by its path, which nobody can guess; None: there is none."""
        if self.shown is None or not hmac.compare_digest(path.encode(), self.path.encode()):
            return None
        with self.changed:
            return self.shown(self).encode()

    def close(self) -> None:
        """End, in order."""
        self._over.set()
        with self.changed:
            for name in [*self._wake]:
                self._rouse(name)
        self.gate.close()
        for run in self.runs:
            (run.folder / STATE).unlink(missing_ok=True)


class Channel:
    """One run's part of a hub, as a `Transport`; `run` is given before anything is sent."""

    def __init__(self, hub: Hub, folder: Path, most: int = MOST, audit: Audit | None = None):
        self.hub, self.folder, self.run, self.most, self.audit = hub, folder, "", most, audit
        self._noted, self._asked = dict[str, str](), dict[str, str]()
        self.head: Any = None  # of the last message, for the page; rounds: of the run, once it is known
        self.rounds, self.said, self.over = 0, "", ""  # said: its last event     over: how it ended
        self.left = dict[str, Left]()  # by site
        for line in audit.earlier("answered") if audit is not None else ():
            if isinstance(size := line.get("bytes"), int):
                self._count(str(line.get("site")), size, str(line.get("kind")))
        hub.runs.append(self)

    def _count(self, name: str, size: int, kind: str) -> None:
        before = self.left.get(name, Left())
        self.left[name] = Left(before.answers + 1, before.bytes + size, kind)

    def sites(self) -> Sequence[str]:
        """Who is connected now."""
        return sorted(self.hub.online)

    def register(self) -> Mapping[str, str]:
        """The public keys that the sites which are connected sign with."""
        return self.hub.public()

    def push(self, messages: "Mapping[str, Message[Request]]") -> None:
        for name, message in messages.items():
            self.head = message.head
            self.rounds = getattr(message.head, "rounds", self.rounds)
            self.hub.ask(self, name, message)

    def pull(
        self, names: Sequence[str], enough: int | None = None, seconds: float | None = None
    ) -> dict[str, bytes | str]:
        end = time.monotonic() + (float("inf") if seconds is None else seconds)
        replies: dict[str, bytes | str] = {}
        with self.hub.changed:
            while True:
                stop.waiting()
                there = [name for name in names if (self.run, name) in self.hub.found]
                replies |= {name: self.hub.found.pop((self.run, name)) for name in there}
                left = end - time.monotonic()
                if len(replies) >= (len(names) if enough is None else enough) or left < 0:
                    return replies
                self.hub.changed.wait(min(STOPPED, left))

    def note_asked(self, name: str, given: Given) -> None:
        """Write a question down, once however often it is given out."""
        if self.audit is not None and self._asked.get(name) != given.digest:
            self.audit.add("asked", site=name, run=self.run, asked=given.digest, what=given.what)
            self._asked[name] = given.digest

    def note_answered(self, name: str, given: Given, reply: bytes) -> None:
        """Write an answer down."""
        kind = heading(reply)
        self._count(name, len(reply), kind)
        if self.audit is not None:
            facts = {"answer": mark(reply), "kind": kind, "bytes": len(reply)}
            self.audit.add("answered", site=name, run=self.run, asked=given.digest, **facts)

    def note(self, known: set[str]) -> None:
        """Write down who is there and who is to answer, for `polyfed status`."""
        waited = [name for run, name in self.hub.asked if run == self.run]
        doing = {name: "connected" if name in self.hub.online else "not connected" for name in known}
        doing |= {name: f"{doing.get(name, 'refused')}, to answer" for name in waited}
        if doing != self._noted:
            self._noted = doing
            write(self.folder / STATE, json.dumps({"pid": os.getpid(), "sites": doing}).encode())

    def close(self) -> None:
        """The run is over; the page goes on to show how it ended."""
        self.over = self.over or "over"
        self.hub.drop(self)
        (self.folder / STATE).unlink(missing_ok=True)
