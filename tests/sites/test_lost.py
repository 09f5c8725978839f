"""What gets lost between server and site is asked for again: a real port and TLS, in this process."""

import http.client
import os
import re
import socket
import ssl
import subprocess
import threading
import time
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
import torch
from demo import free_port

pytest.importorskip("uvicorn", reason="needs the extra [sites]")
import httpx
from cryptography import x509
from direct import Raw, raw

from polyfed.base.errors import ConfigError, RunError
from polyfed_sites import attendance as site_end
from polyfed_sites import envelope as envelope_py
from polyfed_sites import gate as gate_py
from polyfed_sites import hub as hub_py
from polyfed_sites import keys as keys_py
from polyfed_sites.attendance import Attendance, Unheard
from polyfed_sites.audit import SERVER, Audit, mark, read
from polyfed_sites.envelope import Denied, opened, seal
from polyfed_sites.hub import LONG, REFUSED, Channel, Hub
from polyfed_sites.keys import Address, Keys, full_fingerprint, sign, site_key


class Site:
    """A site's end whose calls are made one by one."""

    def __init__(self, key, said):
        self.end = Attendance(key, lambda run, data: b"", lambda: False, Path(), said)
        self.client = self.end._connected()
        self.asked = self.run = ""

    def enter(self) -> "Site":
        self.end._enter(self.client)
        return self

    def pull(self) -> bytes | None:
        says, data = self.end._call(self.client, "ask")
        if says["say"] == "nothing":
            return None
        self.run, self.asked = says["run"], mark(data)
        return data

    def reply(self, message: Raw | bytes, **other: str) -> str:
        about = {"run": self.run, "asked": self.asked} | other
        body = message if isinstance(message, bytes) else message.pack()
        return self.end._call(self.client, "reply", body, **about)[0]["say"]


class There:
    """A server's port, its keys, one run's transport, and what its operator sees."""

    def __init__(self, folder: Path):
        self.folder, self.said, self.sites = folder, [], []
        self.keys = Keys(folder / "keys")
        self.keys.make(f"127.0.0.1:{free_port()}")
        self.given = {name: site_key(self.keys.add(name, folder)) for name in ("bern", "oslo")}
        self.hub = Hub(self.keys, self.said.append, "127.0.0.1")
        self.transport = self.run("run")

    def run(self, name: str) -> Channel:
        (self.folder / name).mkdir()
        found = Channel(self.hub, self.folder / name, 1 << 20)
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
    assert said(site.pull()) == said(site.pull()) == {"n": 1}
    assert site.reply(Raw({"found": 0}), asked="0" * 64) == site.reply(Raw({"found": 0}), run="other") == "unwanted"
    assert site.reply(Raw({"found": 1})) == "taken"
    assert said(there.transport.pull(["riga"])["riga"]) == {"found": 1}
    assert site.reply(Raw({"found": 2})) == "unwanted"
    there.transport.push({"riga": Raw({"n": 2})})
    assert said(site.pull()) == {"n": 2}


def raw_call(site: Site, do: str, body: bytes = b"", **says) -> httpx.Request:
    """A call as it would be sent, for whoever changes or repeats it."""
    site.end._n += 1
    about = {"do": do, "key": full_fingerprint(site.end.key.public), "session": site.end._session, "n": site.end._n}
    headers = seal("site", partial(sign, site.end.key.private), about | says, body)
    return site.client.build_request("POST", f"https://{site.end.server}/v1/{do}", headers=headers, content=body)


def answered(site: Site, request: httpx.Request) -> dict:
    return dict(opened(site.client.send(request).headers).says)


def test_a_reply_that_was_cut_off_is_begun_anew(there):
    site = there.site().enter()
    there.transport.push({"bern": Raw({"n": 1})})
    site.pull()
    whole = bytes(6 << 20)
    there.transport.most = 6 << 20
    sent = raw_call(site, "reply", whole, run=site.run, asked=site.asked)
    head = "".join(f"{key}: {value}\r\n" for key, value in sent.headers.items())
    context = ssl.create_default_context(cafile=str(there.keys.authority))
    with socket.create_connection(("127.0.0.1", there.hub.port)) as plain:
        secure = context.wrap_socket(plain, server_hostname="127.0.0.1")
        secure.sendall(f"POST {sent.url.path} HTTP/1.1\r\n{head}\r\n".encode() + whole[: 1 << 20])
    secure.close()
    assert there.transport.pull(["bern"], seconds=0.2) == {}
    assert site.reply(Raw({"found": 1})) == "taken"
    assert said(there.transport.pull(["bern"])["bern"]) == {"found": 1}


def test_what_something_in_between_changes_repeats_or_invents_is_refused(there):
    """Whoever holds all bytes of both ways in his hands, as a proxy that ends TLS does, can only keep them back."""
    site, oslo = there.site().enter(), there.site("oslo").enter()
    there.transport.push({"bern": Raw({"n": 1})})
    site.pull()
    reply = Raw({"found": 1}).pack()
    sent = raw_call(site, "reply", reply, run=site.run, asked=site.asked)
    says, signature = sent.headers["polyfed-says"], sent.headers["polyfed-signature"]
    others = raw_call(oslo, "reply", reply, run=site.run, asked=site.asked).headers
    changed = [
        ({}, reply[:-1] + b"x"), ({"polyfed-signature": others["polyfed-signature"]}, reply),
        ({"polyfed-says": says[:-9]}, reply),
        ({"polyfed-says": others["polyfed-says"], "polyfed-signature": signature}, reply),
    ]  # fmt: skip
    for headers, body in changed:
        again = site.client.build_request("POST", sent.url, headers={**sent.headers, **headers}, content=body)
        answer = site.client.send(again)
        assert answer.status_code == 400 or opened(answer.headers).says["status"] == 400
    url = str(sent.url).replace("reply", "bye")
    elsewhere = site.client.build_request("POST", url, headers=sent.headers, content=reply)
    assert answered(site, elsewhere)["status"] == 400
    assert there.transport.pull(["bern"], seconds=0) == {}
    assert site.reply(reply) == "taken"
    assert said(there.transport.pull(["bern"])["bern"]) == {"found": 1}
    there.transport.push({"bern": Raw({"n": 1})})  # the same question, for which the old reply is no answer
    site.pull()
    assert answered(site, sent)["status"] == 400
    assert there.transport.pull(["bern"], seconds=0) == {}
    earlier = site.client.send(raw_call(site, "beat"))
    repeating = SimpleNamespace(stream=lambda *_, **__: nullcontext(earlier))
    with pytest.raises(Unheard, match="has not given to this question"):
        site.end._call(repeating, "beat")


def test_a_question_is_held_until_there_is_a_message_and_none_is_lost_when_its_site_hangs_up(there):
    site, found = there.site().enter(), []
    waits = threading.Thread(target=lambda: found.append(site.pull()))
    waits.start()
    time.sleep(0.3)
    assert not found
    there.transport.push({"bern": Raw({"n": 1})})
    waits.join(5)
    assert said(found[0]) == {"n": 1}
    site.reply(Raw({}))
    question = raw_call(site, "ask")
    context = ssl.create_default_context(cafile=str(there.keys.authority))
    with socket.create_connection(("127.0.0.1", there.hub.port)) as plain:
        secure = context.wrap_socket(plain, server_hostname="127.0.0.1")
        head = "".join(f"{key}: {value}\r\n" for key, value in question.headers.items())
        secure.sendall(f"POST {question.url.path} HTTP/1.1\r\n{head}\r\n".encode())
        time.sleep(0.3)
    secure.close()
    time.sleep(0.3)
    there.transport.push({"bern": Raw({"n": 2})})
    assert said(site.pull()) == {"n": 2}


def test_of_a_sites_processes_the_newest_is_talked_to_and_the_other_one_ends_and_says_so(there):
    site = there.site().enter()
    there.site().enter()
    with pytest.raises(Denied) as e:
        site.pull()
    assert e.value.status == 409
    with pytest.raises(RunError, match="another process has connected with this site's key"):
        site.end._try(site.client)


def test_a_site_cannot_fill_the_servers_memory_nor_answer_for_another(there):
    """Whatever it says, no more than twice the largest reply is read of it; only its own message is answered by it."""
    bern, oslo = there.site().enter(), there.site("oslo").enter()
    there.transport.most = 100
    there.transport.push({"bern": Raw({"n": 1}), "oslo": Raw({"n": 2})})
    bern.pull(), oslo.pull()
    assert oslo.reply(b"little", asked=bern.asked) == "unwanted"
    short = raw_call(oslo, "reply", b"little", run=oslo.run, asked=oslo.asked)
    del short.headers["content-length"]
    more = oslo.client.build_request("POST", short.url, headers=short.headers, content=iter([b"little"] * 1000))
    assert answered(oslo, more)["status"] == 400, "more than it has said"
    assert there.transport.pull(["bern", "oslo"], seconds=0) == {}
    assert bern.reply(bytes(201)) == "unwanted"
    assert there.transport.pull(["bern"]) == {"bern": LONG}
    assert oslo.reply(bytes(200)) == "taken", "what it is is for others to say"


def test_who_has_no_key_any_more_is_refused_and_its_runs_hear_it(there):
    site = there.site().enter()
    there.transport.push({"bern": Raw({"n": 1})})
    there.keys.revoke("bern")
    assert there.transport.pull(["bern"], seconds=10) == {"bern": REFUSED}
    assert "bern's key is no longer accepted" in there.said
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
    assert new.reply(Raw({"kind": "stored"})) == "taken"
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
    real = Hub._give
    monkeypatch.setattr(Hub, "_give", lambda *a: pulls.append(0) or real(*a))

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
        end = Attendance(key, answer(name), lambda name=name: name in done, there.folder / name, there.said.append)
        ends.append(threading.Thread(target=end.run))
        ends[-1].start()
    while len(there.transport.sites()) < 2:
        time.sleep(0.01)
    monkeypatch.setattr(site_end.time, "sleep", lambda seconds: pytest.fail("a sleep"))
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
    """A site's end, and `said`, what it has said."""
    keys, said = Keys(tmp_path), []
    keys.make("127.0.0.1:8000")
    for name in ("PAUSE", "AGAIN"):
        monkeypatch.setattr(site_end, name, 0.0)
    key = site_key(keys.add("bern", tmp_path))
    found = Attendance(key, lambda run, data: data, lambda: False, tmp_path, said.append)
    found.said, found.keys = said, keys
    return found


def tried(end, times: int = 1) -> list[str]:
    """What is said of attempts."""
    with end._connected() as client:
        for _ in range(times):
            end._try(client)
    return end.said


@contextmanager
def answering(end, serve, tls=False):
    """The site's server is a port at which `serve` answers, in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as plain, ExitStack() as stack:
        end.server = Address("127.0.0.1", plain.getsockname()[1])
        door = stack.enter_context(certified(end.keys).wrap_socket(plain, server_side=True)) if tls else plain
        threading.Thread(target=serve, args=(door,), daemon=True).start()
        yield


def certified(keys) -> ssl.SSLContext:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(keys.certificate, keys.private)
    return tls


def saying(text: bytes, times: int = 9):
    """Answers every request so, after it has been read."""

    def serve(door):
        for _ in range(times):
            with suppress(OSError), door.accept()[0] as taken:
                taken.recv(1 << 16)
                taken.sendall(text)

    return serve


HTML = b"HTTP/1.1 %s\r\nContent-Type: text/html\r\nContent-Length: 9\r\n\r\n<html>..."


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (HTML % b"200 OK", r"does not answer as a server of polyfed does \(200 OK, text/html\); is the address right"),
        (HTML % b"404 Not Found", r"\(404 Not Found, text/html\)"), (HTML % b"302 Found", "302 Found"),
        (HTML % b"413 Too Large", r"refuses messages of this size \(413"),
        (HTML % b"502 Bad Gateway", "something before it says 502"),
        (HTML % b"503 Busy", "something before it says 503"), (b"HTTP/1.1 200 OK\r\nContent-Le", "no answer from"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "no answer from"), (b"", "no answer from"),
    ],
)  # fmt: skip
def test_what_answers_in_the_servers_place_is_said_in_a_line(attendance, answer, said):
    """Before the first word of the server a site ends with what it can not wait for; later it waits, whatever it is."""
    with answering(attendance, saying(answer), tls=True):
        try:
            tried(attendance, 2)
        except RunError as e:
            attendance.said.append(str(e))
        assert re.search(said, attendance.said[-1]), attendance.said
        attendance._reached = True
        tried(attendance, 2)
    assert attendance.said[-1].endswith("waiting for it")
    assert not any("\n" in line for line in attendance.said)


THROUGH = r"no answer from fed\.example\.org:8000 through the proxy"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (HTML % b"200 OK", THROUGH), (b"HTTP/1.1 200 Connection estab", THROUGH), (b"SSH-2.0-OpenSSH_9.6\r\n", THROUGH),
        (b"", THROUGH), (HTML % b"407 Authenticate", r"wants a name and a password, .*\(407 .*--proxy"),
        (HTML % b"302 Found", r"does not let this machine reach fed\.example\.org:8000 \(302"),
        (HTML % b"500 Oops", r"does not reach fed\.example\.org:8000 \(500"),
        (HTML % b"504 Late", r"does not reach fed\.example\.org:8000 \(504"),
    ],
)  # fmt: skip
def test_whatever_a_proxy_answers_is_said_with_its_name_and_where_it_should_lead(attendance, answer, said):
    """What a site cannot wait for ends it before it has heard its server once, and is waited for later."""
    with answering(attendance, saying(answer)):
        attendance.proxy = urlsplit(f"http://bern:s3cret@{attendance.server}")
        name, attendance.server = f"the proxy http://{attendance.server}", Address("fed.example.org", 8000)
        try:
            tried(attendance, 2)
        except RunError as e:
            attendance.said.append(str(e))
        attendance._reached = True
        tried(attendance, 2)
    assert attendance.said[-1].endswith("waiting for it")
    for line in attendance.said:
        assert re.search(said, line)
        assert name in line
        assert "\n" not in line


def test_a_proxys_address_is_taken_as_people_write_it(monkeypatch):
    """Also from the environment, and where it is wrong without its password."""
    for text in ("http://bern:s3c@ret@proxy:3128", "bern:s3c@ret@proxy:3128", "https://proxy", "http://[::1]:3128"):
        found = site_end._proxy(text, "fed.example.org")
        assert (found.hostname, found.port) in {("proxy", 3128), ("proxy", None), ("::1", 3128)}
        monkeypatch.setenv("HTTPS_PROXY", text)
        assert site_end._proxy(None, "fed.example.org") == found
    for text in (
        "http://",
        "socks5://proxy:1080",
        "http://bern:s3cret@proxy:99999",
        "http://[::1:3128",
        "http://proxy:0",
    ):
        with pytest.raises(
            ConfigError, match=r"^--proxy, or HTTPS_PROXY: found .* expected http://\[NAME:WORD@\]HOST"
        ) as e:
            site_end._proxy(text, "fed.example.org")
        assert "s3cret" not in str(e.value)


def test_a_host_that_does_not_exist_is_said_and_not_waited_for(attendance, monkeypatch):
    unknown, later = (socket.gaierror(n, "said so") for n in (socket.EAI_NONAME, socket.EAI_AGAIN))
    errors = [later, later, unknown]
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: (_ for _ in ()).throw(errors.pop(0)))
    attendance.server = Address("fed.exmaple.org", 8000)
    with pytest.raises(RunError, match=r"no host is known by the name 'fed\.exmaple\.org'.*--server"):
        tried(attendance, 3)
    assert len(attendance.said) == 1


def foreign(keys, monkeypatch, tmp_path):
    other = Keys(tmp_path / "other")
    other.make("127.0.0.1:8000")
    return other


def expired(keys, monkeypatch, tmp_path):
    keys.make("127.0.0.1:8000", days=-1)
    return keys


def early(keys, monkeypatch, tmp_path):
    """As a clock that is three days behind has it."""
    monkeypatch.setattr(keys_py, "_now", lambda: datetime.now(UTC) + timedelta(days=3))
    keys.make("127.0.0.1:8000")
    monkeypatch.undo()
    return keys


def elsewhere(keys, monkeypatch, tmp_path):
    monkeypatch.setattr(keys_py, "_named", lambda host: x509.DNSName("fed.example.org"))
    keys.make("fed.example.org:8000")
    return keys


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (foreign, "is not the server of this key: .*certificate.*policy's tls-ends-at"),
        (expired, "has expired .*clock says 20.*polyfed keys init"),
        (early, "is not valid yet .*clock says 20"), (elsewhere, "is for another name .*127.0.0.1.*--server"),
    ],
)  # fmt: skip
def test_a_certificate_that_will_not_do_is_said_with_what_to_do(attendance, monkeypatch, tmp_path, make, says):
    attendance.keys = make(attendance.keys, monkeypatch, tmp_path)

    def serve(door):
        for _ in range(9):
            with suppress(OSError):
                door.accept()

    with answering(attendance, serve, tls=True), pytest.raises(RunError, match=says):
        tried(attendance)


def test_a_site_waits_for_a_server_behind_something_that_takes_connections_for_it(attendance):
    """A forwarder hangs up while the server is down; only who answers with something else ends the wait."""

    def forward(door):
        for _ in range(3):
            taken = door.accept()[0]
            taken.recv(1 << 16)
            taken.close()
        door.accept()[0].sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with answering(attendance, forward), pytest.raises(RunError, match="does not speak TLS"):
        tried(attendance, 4)
    assert len(attendance.said) == 1
    assert attendance.said[0].startswith(
        f"no answer from {attendance.server} (it hangs up, as to who shows no certificate"
    )


def test_clocks_that_differ_are_said_and_hinder_nobody(there, monkeypatch):
    """Certificates alone look at a clock."""
    there.transport.push({"bern": Raw({"n": 1})})
    real = time.time
    site = there.site()
    monkeypatch.setattr(site_end, "time", SimpleNamespace(time=lambda: real() - 2 * 86400, sleep=time.sleep))
    site.enter()
    assert any(re.search(r"this machine's clock is 2\.0 days behind the server's", line) for line in there.said)
    assert said(site.pull()) == {"n": 1}


def test_a_server_of_another_version_is_said_with_both(there, monkeypatch):
    monkeypatch.setattr(envelope_py, "PROTOCOL", 2)
    monkeypatch.setattr(hub_py, "PROTOCOL", 2)
    site = there.site()
    monkeypatch.setattr(site_end, "PROTOCOL", 1)
    with pytest.raises(
        RunError, match=r"has polyfed .*, this site .*, with messages of protocols 2 and 1; install the same"
    ):
        site.enter()


def test_who_only_connects_does_not_close_the_port_to_sites(there):
    """300 silent connections, more than an address may hold: its sites, older and newer, are answered meanwhile."""
    site, idle = there.site().enter(), []
    try:
        for _ in range(300):
            idle.append(socket.create_connection(("127.0.0.1", there.hub.port)))
        for name, end in (("oslo", there.site("oslo").enter()), ("bern", site)):
            there.transport.push({name: Raw({"n": 1})})
            assert said(end.pull()) == {"n": 1}
        assert len(there.hub.gate._socket.open["127.0.0.1"]) <= 256
    finally:
        for one in idle:
            one.close()


def test_a_port_speaks_tls_alone_and_its_certificate_is_one_that_can_be_used(there, tmp_path):
    plain = http.client.HTTPConnection("127.0.0.1", there.hub.port)
    plain.request("GET", "/health")
    with pytest.raises((http.client.HTTPException, OSError)):
        plain.getresponse()
    there.keys.certificate = tmp_path / "gone.pem"
    with pytest.raises(ConfigError, match=r"gone\.pem: cannot be used"):
        gate_py.tls(there.keys, None, None)


def test_a_file_that_is_no_certificate_is_named_at_either_end(attendance, tmp_path):
    """Nobody is asked for a passphrase: a service has no terminal."""
    pem, key = (path.read_bytes() for path in (attendance.keys.certificate, attendance.keys.private))
    locked = keys_py.pem(keys_py.s.load_pem_private_key(key, None), b"word")
    other = Keys(tmp_path / "other")
    other.make("127.0.0.1")
    both = {"empty": b"", "der": x509.load_pem_x509_certificate(pem).public_bytes(keys_py.s.Encoding.DER)}
    pair = {"alone": pem, "locked": pem + locked, "stranger": pem + other.private.read_bytes()}
    for name, data in (both | pair).items():
        file = tmp_path / name
        file.write_bytes(data)
        calls = [lambda f=file: gate_py.tls(attendance.keys, f, None)]
        attendance.certificate, attendance.ends = file, None
        calls.append(attendance._connected)
        for call in calls:
            with pytest.raises(ConfigError, match=rf"^{file}: cannot be used \(.*expected PEM with its key") as e:
                call()
            assert "\n" not in str(e.value)
        if name in both:
            attendance.certificate, attendance.ends = None, str(file)
            for call in (lambda f=file: gate_py.tls(attendance.keys, None, f), attendance._connected):
                with pytest.raises(ConfigError, match=f"^{file}: found no certificates of authorities"):
                    call()


def test_a_head_that_comes_slowly_holds_no_connection(there, monkeypatch):
    """Neither a first one nor a later one; a site that waits for its message is not meant."""
    monkeypatch.setattr(gate_py, "HEADERS", 0.4)
    context, found = ssl.create_default_context(cafile=str(there.keys.authority)), []
    site = there.site().enter()
    waits = threading.Thread(target=lambda: found.append(site.pull()))
    waits.start()
    for first in (b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"):
        plain = socket.create_connection(("127.0.0.1", there.hub.port))
        with context.wrap_socket(plain, server_hostname="127.0.0.1") as secure:
            secure.sendall(first)
            begun, said_first = time.monotonic(), first and secure.recv(1 << 16)
            assert (b"200" in said_first) == bool(first)
            with suppress(OSError):
                while time.monotonic() < begun + 5:
                    secure.sendall(b"G")
                    time.sleep(0.1)
            assert time.monotonic() - begun < 3
    there.transport.push({"bern": Raw({"n": 1})})
    waits.join(5)
    assert said(found[0]) == {"n": 1}
