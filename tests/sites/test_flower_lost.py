"""What gets lost between server and site is asked for again: a real port and TLS, in this process."""

import http.client
import os
import socket
import ssl
import subprocess
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from email.utils import formatdate
from pathlib import Path

import pytest
import torch
from demo import free_port

pytest.importorskip("flwr", reason="needs the extra [flower]")
from direct import Raw, raw

from polyfed.base.errors import RunError
from polyfed_sites import flower_api as flwr
from polyfed_sites import flower_site, pieces
from polyfed_sites.audit import SERVER, Audit, read
from polyfed_sites.flower import REFUSED, Flower, Hub
from polyfed_sites.keys import Keys, site_key


class Site:
    """A site's end whose calls are made one by one."""

    def __init__(self, key, said):
        self.end = flower_site.Attendance(key, lambda run, data: b"", lambda: False, Path(), said)
        self.client = self.end._connected()
        self.id = ""

    def enter(self) -> "Site":
        self.end._enter(self.client)
        return self

    def pull(self) -> bytes | None:
        found = self.client.PullMessages(flwr.PullMessagesRequest(node=self.end._node))
        if not found.messages_list:
            return None
        self.id, tree = found.messages_list[0].metadata.message_id, found.message_object_trees[0]
        asks = (flwr.PullObjectRequest(node=self.end._node, object_id=name) for name in pieces.names(tree))
        return pieces.joined(self.client.PullObject(one).object_content for one in asks)

    def announce(self, tree, to: str = "", times: int = 1, more: str = "") -> list[str]:
        head = flwr.Message(metadata=flwr.Metadata(reply_to_message_id=to or self.id, message_type=more))
        asked = flwr.PushMessagesRequest(
            node=self.end._node, messages_list=[head] * times, message_object_trees=[tree] * times
        )
        return [*self.client.PushMessages(asked).objects_to_push]

    def push(self, name: str, content: bytes) -> bool:
        asked = flwr.PushObjectRequest(node=self.end._node, object_id=name, object_content=content)
        return self.client.PushObject(asked).stored

    def reply(self, message: Raw) -> list[bool]:
        tree, parts = pieces.cut(message.pack())
        return [self.push(name, parts[name]) for name in self.announce(tree)]


class There:
    """A server's port, its keys, one run's transport, and what its operator sees."""

    def __init__(self, folder: Path):
        self.folder, self.said, self.sites = folder, [], []
        self.keys = Keys(folder / "keys")
        self.keys.make(f"127.0.0.1:{free_port()}")
        self.given = {name: site_key(self.keys.add(name, folder)) for name in ("bern", "oslo")}
        self.hub = Hub(self.keys, self.said.append, "127.0.0.1")
        self.transport = self.run("run")

    def run(self, name: str) -> Flower:
        (self.folder / name).mkdir()
        found = Flower(self.hub, self.folder / name, 1 << 20)
        found.run = name
        return found

    def site(self, name: str = "bern") -> Site:
        self.sites.append(Site(self.given[name], self.said.append))
        return self.sites[-1]

    def close(self) -> None:
        for site in self.sites:
            site.client.close()
        self.hub.close()


@pytest.fixture
def there(tmp_path):
    found = There(tmp_path)
    yield found
    found.close()


def said(data: bytes | str) -> dict:
    head = raw(data).head
    del head["format"]
    return head


def test_a_message_is_given_out_until_it_is_answered_and_then_no_more(there, tmp_path):
    """Also for a key made while the server runs. A site that asks without having answered has lost it."""
    there.given["riga"] = site_key(there.keys.add("riga", tmp_path))
    there.transport.push({"riga": Raw({"n": 1})})
    assert there.transport.pull(["riga"], seconds=0) == {}
    site = there.site("riga").enter()
    assert "riga" in there.transport.sites()
    assert said(site.pull()) == {"n": 1}
    first = site.id
    assert said(site.pull()) == {"n": 1}
    tree, _ = pieces.cut(b"late")
    assert site.announce(tree, to=first) == []
    assert site.reply(Raw({"found": 1})) == [True]
    assert said(there.transport.pull(["riga"])["riga"]) == {"found": 1}
    assert site.reply(Raw({"found": 2})) == []
    there.transport.push({"riga": Raw({"n": 2})})
    assert said(site.pull()) == {"n": 2}


def test_a_reply_that_was_cut_off_is_begun_anew(there):
    site = there.site().enter()
    there.transport.push({"bern": Raw({"n": 1})})
    site.pull()
    tree, parts = pieces.cut(bytes(6 << 20))
    names = site.announce(tree)
    assert len(names) == 2
    there.transport.most = 6 << 20
    assert site.announce(tree) == names
    assert [site.push(name, parts[name]) for name in names[:1]] == [True]
    assert there.transport.pull(["bern"], seconds=0) == {}
    assert site.reply(Raw({"found": 1})) == [True]
    assert said(there.transport.pull(["bern"])["bern"]) == {"found": 1}


def test_a_question_is_held_until_there_is_a_message_and_none_is_lost_when_its_site_hangs_up(there):
    site = there.site().enter()
    context = ssl.create_default_context(cafile=str(there.keys.authority))
    asked = []
    send = site.client._client.send
    site.client._client.send = lambda request, **how: asked.append(request) or send(request, **how)
    found = []
    waits = threading.Thread(target=lambda: found.append(site.pull()))
    waits.start()
    time.sleep(0.3)
    assert not found
    there.transport.push({"bern": Raw({"n": 1})})
    waits.join(5)
    assert said(found[0]) == {"n": 1}
    assert len(asked) == 2, "one question, one piece"
    site.reply(Raw({}))
    question = asked[0]
    with socket.create_connection(("127.0.0.1", there.hub.port)) as plain:
        secure = context.wrap_socket(plain, server_hostname="127.0.0.1")
        head = "".join(f"{key}: {value}\r\n" for key, value in question.headers.items())
        secure.sendall(f"POST {question.url.path} HTTP/1.1\r\n{head}\r\n".encode() + question.content)
        time.sleep(0.3)
    secure.close()
    time.sleep(0.3)
    there.transport.push({"bern": Raw({"n": 2})})
    assert said(site.pull()) == {"n": 2}


def test_of_a_sites_processes_the_newest_is_talked_to_and_the_other_one_ends_and_says_so(there):
    site = there.site().enter()
    there.site().enter()
    with pytest.raises(flwr.HTTPStatusError, match="409"):
        site.pull()
    with pytest.raises(RunError, match="another process has connected with this site's key"):
        site.end._try(site.client)


def test_a_site_cannot_fill_the_servers_memory_nor_answer_for_another(there):
    """Whatever it announces, two of the largest replies are held of it; only its own message is answered by it."""
    bern, oslo = there.site().enter(), there.site("oslo").enter()
    there.transport.most = 100
    there.transport.push({"bern": Raw({"n": 1}), "oslo": Raw({"n": 1})})
    bern.pull(), oslo.pull()
    names = {}
    for k in range(5):
        tree, parts = pieces.cut(bytes([k]) * 60)
        names |= parts
    first, *rest = names
    tree = flwr.ObjectTree(object_id=first, children=[flwr.ObjectTree(object_id=n) for n in rest])
    assert bern.announce(tree) == [*names]
    assert [bern.push(name, names[name]) for name in names] == [True] * 2 + [False] * 3
    assert not bern.push("0" * 64, b"never announced")
    tree, parts = pieces.cut(b"little")
    assert oslo.announce(tree, to=bern.id) == []
    assert oslo.announce(tree, to="never sent") == []
    assert oslo.announce(tree, times=2) == []
    assert oslo.announce(tree, more="x" * 9000) == []
    assert not oslo.push(*parts.popitem())
    assert there.transport.pull(["bern", "oslo"], seconds=0) == {}


def test_what_is_no_reply_is_its_sites_answer_and_costs_nobody_else_theirs(there):
    """One piece that is said to come many times; and a piece that is none."""
    bern, oslo = there.site().enter(), there.site("oslo").enter()
    there.transport.most = 1000
    there.transport.push({"bern": Raw({"n": 1}), "oslo": Raw({"n": 1})})
    bern.pull(), oslo.pull()
    _, parts = pieces.cut(bytes(900))
    ((name, content),) = parts.items()
    bern.announce(flwr.ObjectTree(object_id=name, children=[flwr.ObjectTree(object_id=name)] * 50))
    assert bern.push(name, content)
    oslo.reply(Raw({"found": 1}))
    found = there.transport.pull(["bern", "oslo"])
    assert found["bern"] == "not a message (it is too long)"
    assert said(found["oslo"]) == {"found": 1}


def test_who_has_no_key_any_more_is_refused_and_its_runs_hear_it(there):
    site = there.site().enter()
    there.transport.push({"bern": Raw({"n": 1})})
    there.keys.revoke("bern")
    assert there.transport.pull(["bern"], seconds=10) == {"bern": REFUSED}
    assert "bern's key is no longer accepted" in there.said
    site.end._try(site.client)
    with pytest.raises(RunError, match="its key is revoked, expired or unknown there"):
        site.end._try(site.client)


def test_a_site_changes_its_key_in_mid_run_and_what_the_old_one_did_stays(there, tmp_path):
    """Both keys are good meanwhile; the run's log has whose key came from where, and when it was refused."""
    run = there.transport
    run.audit = Audit(there.folder, SERVER)
    old = there.site().enter()
    run.push({"bern": Raw({"n": 1})})
    assert said(old.pull()) == {"n": 1}
    there.given["bern"] = site_key(there.keys.add("bern", tmp_path / "new", rotate=True))
    new = there.site().enter()
    assert said(new.pull()) == {"n": 1}, "the question goes to the new one"
    assert new.reply(Raw({"kind": "stored"})) == [True]
    first, second = there.keys.sites()["bern"]
    there.keys.revoke("bern", first.mark)
    there.hub.look()
    assert "bern" in run.sites()
    assert not any("new address" in line for line in there.said)
    there.keys._came = {second.mark: ["10.0.0.9"]}
    there.site().enter()
    then = f"note: bern's key {second.mark} comes from a new address, 127.0.0.1; it came from 10.0.0.9 before"
    assert then in there.said
    lines = [s for s in read(there.folder).lines if s["did"] in ("connected", "refused")]
    assert [(s["did"], s["key"]) for s in lines] == [
        ("connected", first.mark), ("connected", second.mark), ("refused", first.mark), ("connected", second.mark),
    ]  # fmt: skip
    assert {s["address"] for s in lines if s["did"] == "connected"} == {"127.0.0.1"}


def test_exchanges_take_their_work_and_no_sleep(there, monkeypatch):
    """Whole sites, in threads: a site asks once for each message, listens nowhere and starts no process."""
    for where, name in ((socket.socket, "listen"), (os, "fork"), (subprocess, "Popen")):
        monkeypatch.setattr(where, name, lambda *_, name=name, **__: pytest.fail(name))
    done, pulls, ends = set(), [], []
    real = Hub._pull_messages
    monkeypatch.setattr(Hub, "_pull_messages", lambda *a: pulls.append(0) or real(*a))

    def answer(name):
        def one(run: str, data: bytes) -> bytes:
            assert run == "run"
            message = raw(data)
            if message.head.get("n") == 100:
                done.add(name)
            return Raw(message.head, message.tensors).pack()

        return one

    for name, key in there.given.items():
        (there.folder / name).mkdir()
        end = flower_site.Attendance(
            key, answer(name), lambda name=name: name in done, there.folder / name, there.said.append
        )
        ends.append(threading.Thread(target=end.run))
        ends[-1].start()
    while len(there.transport.sites()) < 2:
        time.sleep(0.01)
    monkeypatch.setattr(flower_site.time, "sleep", lambda seconds: pytest.fail("a sleep"))
    t = torch.arange(1000.0)
    for n in range(90, 101):
        there.transport.push({name: Raw({"n": n}, {"t": t * n}) for name in there.given})
        for reply in there.transport.pull([*there.given]).values():
            assert torch.equal(raw(reply).tensors["t"], t * n)
    for end in ends:
        end.join(10)
    assert not any(end.is_alive() for end in ends)
    assert len(pulls) == 2 * 11


@pytest.fixture
def attendance(tmp_path, monkeypatch):
    """A site's end; `said` is what it has said."""
    keys = Keys(tmp_path)
    keys.make("127.0.0.1:8000")
    said = []
    monkeypatch.setattr(flower_site, "PAUSE", 0.0)
    key = site_key(keys.add("bern", tmp_path))
    found = flower_site.Attendance(key, lambda run, data: data, lambda: False, tmp_path, said.append)
    found.said, found.keys = said, keys
    return found


def test_a_host_that_does_not_exist_is_said_and_not_waited_for(attendance, monkeypatch):
    unknown, later = (socket.gaierror(n, "said so") for n in (socket.EAI_NONAME, socket.EAI_AGAIN))
    errors = [later, unknown]
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: (_ for _ in ()).throw(errors.pop(0)))
    attendance.server = "fed.exmaple.org", 8000
    with pytest.raises(RunError, match=r"no host is known by the name 'fed\.exmaple\.org'"):
        attendance._reach()
    assert len(attendance.said) == 1


@contextmanager
def answering(attendance, serve, tls=False):
    """The site's server is a port at which `serve` answers, in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as plain, ExitStack() as stack:
        attendance.server = "127.0.0.1", plain.getsockname()[1]
        door = stack.enter_context(certified(attendance).wrap_socket(plain, server_side=True)) if tls else plain
        threading.Thread(target=serve, args=(door,), daemon=True).start()
        yield


def certified(attendance) -> ssl.SSLContext:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(attendance.keys.certificate, attendance.keys.private)
    return tls


def test_the_server_of_another_federation_is_not_taken_for_this_ones(attendance, tmp_path):
    attendance.keys = Keys(tmp_path / "other")
    attendance.keys.make("127.0.0.1:8000")

    def serve(door):
        with suppress(ssl.SSLError):
            door.accept()

    with answering(attendance, serve, tls=True), pytest.raises(RunError, match="is not the server of this key"):
        attendance._reach()


def test_a_site_waits_for_a_server_behind_something_that_takes_connections_for_it(attendance):
    """A forwarder hangs up while the server is down; only who answers with something else ends the wait."""

    def forward(door):
        for _ in range(2):
            taken = door.accept()[0]
            taken.recv(1 << 16)
            taken.close()
        door.accept()[0].sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with answering(attendance, forward), pytest.raises(RunError, match="does not speak TLS"):
        attendance._reach()
    assert attendance.said == ["no answer from {}:{} (it hangs up); waiting for it".format(*attendance.server)]


def test_a_server_that_spoke_tls_once_is_waited_for_when_bytes_of_a_handshake_change(attendance):
    tls = certified(attendance)

    def serve(door):
        for spoil in (False, True, False):
            plain = door.accept()[0]
            if spoil:
                plain.recv(1 << 16)
                plain.sendall(b"\x16\x03\x03\x00\x05wrong")
                plain.close()
                continue
            with tls.wrap_socket(plain, server_side=True) as secure:
                secure.recv(1 << 16)
                secure.sendall(f"HTTP/1.1 200 OK\r\nDate: {formatdate(usegmt=True)}\r\n\r\n".encode())

    with answering(attendance, serve):
        attendance._reach()
        attendance._reach()
    assert len(attendance.said) == 1
    assert "waiting for it" in attendance.said[0]


@pytest.mark.parametrize(("off", "said"), [(6, "4 s or more ahead of"), (-306, "304 s or more behind"), (None, "")])
def test_a_site_whose_clock_the_server_would_refuse_says_so_and_waits(attendance, off, said):

    def serve(door):
        for seconds in (off, 0):
            with door.accept()[0] as taken:
                taken.recv(1 << 16)
                date = "" if seconds is None else f"Date: {formatdate(time.time() - seconds, usegmt=True)}\r\n"
                taken.sendall(f"HTTP/1.1 200 OK\r\n{date}Content-Length: 0\r\n\r\n".encode())

    with answering(attendance, serve, tls=True):
        attendance._reach()
    line = f"this machine's clock is {said} the server's, which refuses that; waiting for it to be set"
    assert attendance.said == [line] * (off is not None)


def test_who_only_connects_does_not_close_the_port_to_sites(there):
    """300 silent connections, more than an address may hold: its sites, older and newer, are answered meanwhile."""
    site, idle = there.site().enter(), []
    try:
        for _ in range(300):
            idle.append(socket.create_connection(("127.0.0.1", there.hub.port)))
        for name, end in (("oslo", there.site("oslo").enter()), ("bern", site)):
            there.transport.push({name: Raw({"n": 1})})
            assert said(end.pull()) == {"n": 1}
        assert len(there.hub._gate._socket.open["127.0.0.1"]) <= 256
    finally:
        for one in idle:
            one.close()


def test_a_port_speaks_tls_alone_and_its_certificate_is_one_that_can_be_used(there, tmp_path):
    from polyfed_sites.gate import Port

    plain = http.client.HTTPConnection("127.0.0.1", there.hub.port)
    plain.request("GET", "/health")
    with pytest.raises((http.client.HTTPException, OSError)):
        plain.getresponse()
    there.keys.certificate = tmp_path / "gone.pem"
    with pytest.raises(RunError, match=r"gone\.pem: cannot be used"):
        Port(None, there.keys, "127.0.0.1", free_port())
