"""Messages over Flower: the server speaks its Fleet API, and sites ask for their messages.

    polyfed server ==== TLS, Flower's Fleet API ==== polyfed client

Flower gives the words on the wire, the nodes' keys and signatures, and the SuperLink's list of nodes. A message is made
when its site asks for it, and made again whenever the site asks without having answered: what is lost needs no other
cure, as a site answers the same again. Nothing of it is kept on the disk.
"""

import hashlib
import hmac
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from polyfed.base.errors import PolyfedError
from polyfed.runs import stop
from polyfed_sites import flower_api as flwr
from polyfed_sites import pieces
from polyfed_sites.audit import Audit, heading, mark
from polyfed_sites.gate import Caller, Denied, Gate, Port, as_flower
from polyfed_sites.keys import Keys, split, write

if TYPE_CHECKING:
    from polyfed_sites.wire import Message, Request

ENDS = 60.0  # seconds between two looks at whether a key has ended
LOOK = 1.0  # seconds between two looks at who is connected
STOPPED = 0.2  # seconds between two looks at whether to go on waiting
LITTLE = 8 << 10  # bytes of what is said of a reply before its pieces
MOST = 1 << 34  # bytes of tensors in a message
STATE = "state.json"  # for `polyfed status`
REFUSED = "its key is not accepted (revoked, expired or unknown)"
Say = Callable[[str], None]


class Asked(NamedTuple):
    """What a site was asked and has not answered. message: not its bytes, as sites share its tensors     since: when"""

    by: "Flower"
    message: "Message[Request]"
    since: float


class Left(NamedTuple):
    """What has left a site in a run. kind: of the last answer"""

    answers: int
    bytes: int
    kind: str


class Delivery:
    """A message on its way to a site, and what has come of the reply: no more than two of the largest are held."""

    def __init__(self, asked: Asked):
        data = asked.message.pack()
        self.asked, self.id, self.digest, self.what = asked, uuid.uuid4().hex, mark(data), heading(data)
        self.tree, self.down = pieces.cut(data)
        self._names, self._up, self._room = list[str](), dict[str, bytes](), 0

    def announced(self, tree: Any) -> list[str]:
        """The names of a reply's pieces, all of which are wanted. What came before was cut off."""
        self._names, self._up, self._room = pieces.names(tree), {}, 2 * self.asked.by.most
        return self._names

    def pushed(self, name: str, content: bytes) -> bool:
        """Whether a piece is taken."""
        self._room -= len(content)
        if self._room < 0 or name not in self._names or hashlib.sha256(content).hexdigest() != name:
            return False
        self._up[name] = content
        return True

    @property
    def whole(self) -> bool:
        return bool(self._names) and self._up.keys() == {*self._names}

    def reply(self) -> bytes | str:
        """The whole of it, or why it is none."""
        if sum(len(self._up[name]) for name in self._names) > 2 * self.asked.by.most:  # one piece many times
            return "not a message (it is too long)"
        try:
            return pieces.joined(self._up[name] for name in self._names)
        except ValueError as e:
            return f"not a message (ValueError: {' '.join(str(e).split())})"


class Hub:
    """Who is connected at the server's port, and what is asked of whom, for any number of runs."""

    def __init__(
        self,
        keys: Keys,
        say: Say,
        host: str = "0.0.0.0",
        port: int | None = None,  # of the keys' address
        shown: "Callable[[Hub], str] | None" = None,  # makes the page at `path`, which shows all of it
    ):
        self.keys, self.say, self.port, self.shown = keys, say, port or split(keys.address)[1], shown
        self.path = f"/status/{keys.word()}"
        self.nodes = flwr.LinkStateFactory(
            ":flwr-in-memory:", flwr.NoOpFederationManager(), flwr.ObjectStoreFactory()
        ).state()
        self.changed = threading.Condition()  # guards what follows
        self.asked: dict[tuple[str, str], Asked] = {}  # by run and site, the oldest first
        self.found: dict[tuple[str, str], bytes | str] = {}
        self.runs: list[Flower] = []
        self.queued: list[str] = []  # runs that wait for their turn
        self.online: dict[str, str] = {}  # by name: the address
        self._open: dict[str, Delivery] = {}
        self._sessions: dict[str, str] = {}
        self._wake: dict[str, Callable[[], None]] = {}
        self._names: dict[int, str] = {}
        self._marks: dict[int, str] = {}  # of the nodes' keys
        self._registered, self._over = (0, 0.0), threading.Event()
        self.register()
        self._gate = Port(Gate(self, say), keys, host, self.port)
        threading.Thread(target=self._watch, daemon=True).start()

    # who is there

    def register(self) -> None:
        """Flower's nodes become those of the federation's keys: also while it runs, so a key can be revoked."""
        changed, now = self.keys.changed(), time.monotonic()
        if self._registered[0] == changed and now < self._registered[1] + ENDS:
            return
        wanted = {as_flower(public): site for public, site in self.keys.accepted().items()}
        there = {n.public_key: n.node_id for n in self.nodes.get_node_info() if n.node_id in self._names}
        for key in there.keys() - wanted.keys():
            node = there.pop(key)
            self._note("refused", site=self._names[node], key=self._marks[node])
            self.nodes.delete_node("", node)
            self.nodes.node_public_key_to_node_id.pop(key)
        there |= {key: self.nodes.create_node("", "", key, 0.0) for key in wanted.keys() - there.keys()}
        self._names, self._marks = ({i: wanted[key][k] for key, i in there.items()} for k in (0, 1))
        self._registered = changed, now

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
        """Say who has come and who has gone, and note it for `polyfed status`."""
        with self.changed:
            self.register()
            there = {self._names.get(n.node_id): n for n in self.nodes.get_node_info(statuses=["online"])}
            names = {*self._names.values()}
            for name in sorted(self.online.keys() - there.keys()):
                del self.online[name]
                self.say(
                    f"{name} is not connected any more" if name in names else f"{name}'s key is no longer accepted"
                )
            for key in [key for key in self.asked if key[1] not in names]:
                self._answer(key, REFUSED)
            for run in self.runs:
                if not run.over:
                    run.note(names)

    def public(self) -> dict[str, str]:
        """By site, the key of the process that is connected, as OpenSSH writes it."""
        nodes = {n.public_key for n in self.nodes.get_node_info(statuses=["online"])}
        return {name: key for key, (name, _) in self.keys.accepted().items() if as_flower(key) in nodes}

    def name_of(self, node: int) -> str:
        return self._names.get(node, "")

    def _enter(self, asked: Any, caller: Caller) -> Any:
        """A site's process connects; it takes the place of another one with its key."""
        with self.changed:
            if not caller.name:
                self._registered = 0, 0.0  # it may just have been made
                self.register()
                node = self.nodes.get_node_id_by_public_key(asked.public_key) or 0
                caller = caller._replace(name=self.name_of(node), node=node)
            if not caller.name:
                raise Denied(403)
            for node, name in self._names.items():
                if name == caller.name:
                    self.nodes.deactivate_node(node)
            self._came(caller)
            reply = flwr.activate_node(asked, self.nodes)
            self._sessions[caller.name], self.online[caller.name] = caller.session, caller.address
            self.say(f"{caller.name} is connected")
            self._rouse(caller.name)
        return reply

    def _came(self, caller: Caller) -> None:
        """Note where a key comes from, and say it where it came from elsewhere before."""
        mark = self._marks[caller.node]
        self._note("connected", site=caller.name, key=mark, address=caller.address)
        if before := self.keys.came(mark, caller.address):
            then = f"came from {', '.join(before)} before"
            self.say(f"note: {caller.name}'s key {mark} comes from a new address, {caller.address}; it {then}")

    def _deactivate_node(self, asked: Any, caller: Caller) -> Any:
        with self.changed:
            self._sessions.pop(caller.name, None)
        reply = flwr.deactivate_node(asked, self.nodes)
        self.look()
        return reply

    # messages

    def ask(self, by: "Flower", name: str, message: "Message[Request]") -> None:
        """Have a message ready for when its site asks; an earlier one of the run is then of no use."""
        with self.changed:
            self.found.pop((by.run, name), None)
            self.asked.pop((by.run, name), None)
            self.asked[by.run, name] = Asked(by, message, time.time())
            self._rouse(name)

    def drop(self, by: "Flower") -> None:
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

    def admit(self, caller: Caller) -> None:
        """Raise Denied for a process that has not connected, or in whose place another one has."""
        if not caller.name or self._sessions.get(caller.name) != caller.session:
            raise Denied(409 if caller.name in self._sessions else 401)

    def answer(self, call: str, asked: Any, caller: Caller) -> Any:
        """The answer to a call of a site whose key has been checked. Raises Denied."""
        if call == "activate_node":
            return self._enter(asked, caller)
        self.admit(caller)
        if call == "send_node_heartbeat":
            return flwr.send_node_heartbeat(asked, self.nodes)
        return getattr(self, f"_{call}")(asked, caller)

    def _pull_messages(self, asked: Any, caller: Caller) -> Any:
        with self.changed:
            question = self._next(caller.name)
        if question is None:
            return flwr.PullMessagesResponse()
        delivery = Delivery(question)
        question.by.note_asked(caller.name, delivery)
        with self.changed:
            self._open[caller.name] = delivery
        about = flwr.Metadata(message_id=delivery.id, group_id=question.by.run, dst_node_id=caller.node)
        message = flwr.Message(metadata=about)
        return flwr.PullMessagesResponse(messages_list=[message], message_object_trees=[delivery.tree])

    def _pull_object(self, asked: Any, caller: Caller) -> Any:
        there = self._open.get(caller.name)
        content = there and there.down.get(asked.object_id)
        return flwr.PullObjectResponse(
            object_found=bool(content), object_available=bool(content), object_content=content or b""
        )

    def _push_messages(self, asked: Any, caller: Caller) -> Any:
        """A reply to the message that its site was given last; whatever else a site announces is not wanted."""
        there = self._open.get(caller.name)
        if there is None or len(asked.messages_list) != 1 or len(asked.message_object_trees) != 1:
            return flwr.PushMessagesResponse()
        (message,), (tree,) = asked.messages_list, asked.message_object_trees
        if message.metadata.reply_to_message_id != there.id or message.ByteSize() > LITTLE:
            return flwr.PushMessagesResponse()
        with self.changed:
            return flwr.PushMessagesResponse(objects_to_push=there.announced(tree))

    def _push_object(self, asked: Any, caller: Caller) -> Any:
        with self.changed:
            there = self._open.get(caller.name)
            stored = there is not None and there.pushed(asked.object_id, asked.object_content)
            if stored and there is not None and there.whole:
                del self._open[caller.name]
                key = there.asked.by.run, caller.name
                if self.asked.get(key) is there.asked:
                    reply = there.reply()
                    there.asked.by.note_answered(caller.name, there, reply)
                    self._answer(key, reply)
        return flwr.PushObjectResponse(stored=stored)

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
        self._gate.close()
        for run in self.runs:
            (run.folder / STATE).unlink(missing_ok=True)


class Flower:
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
        before = self.left.get(name, Left(0, 0, ""))
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

    def note_asked(self, name: str, given: Delivery) -> None:
        """Write a question down, once however often it is given out."""
        if self.audit is not None and self._asked.get(name) != given.digest:
            self.audit.add("asked", site=name, run=self.run, asked=given.digest, what=given.what)
            self._asked[name] = given.digest

    def note_answered(self, name: str, given: Delivery, reply: bytes | str) -> None:
        """Write an answer down."""
        if isinstance(reply, bytes):
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
