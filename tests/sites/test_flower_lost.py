"""What gets lost between server and site is asked for again: Flower's part is played here, without its processes."""

import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from email.utils import formatdate
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="needs the extra [flower]")
from direct import Raw, raw

from polyfed.base.errors import RunError
from polyfed.sites import flower, flower_site
from polyfed.sites.keys import Keys, site_key


class Grid:
    """Sends nothing; `answers` are what pulls give, by the number of the message that they answer."""

    def __init__(self):
        self.sent, self.answers = [], {}

    def push_messages(self, messages):
        self.sent += [flower.opened(m.content) for m in messages]
        return [str(len(self.sent))]

    def pull_messages(self, ids):
        return [self.answers.pop(i) for i in ids if i in self.answers]

    def answer(self, number: str, message: Raw | None):
        """None: Flower's word that the reply is lost."""
        self.answers[number] = SimpleNamespace(
            metadata=SimpleNamespace(reply_to_message_id=number),
            has_error=lambda: message is None,
            content=message and flower.enveloped(message.pack()),
        )


def said(data: bytes) -> dict:
    head = raw(data).head
    del head["format"]
    return head


def connect(there: flower.Flower) -> None:
    """As the real one, everything that was asked is open again."""
    there._grid = Grid()
    for asked in there._asked.values():
        asked.ids = []


@pytest.fixture
def there(tmp_path, monkeypatch):
    """A transport with one site, bern, that is connected; `said` is what it has said. Its seconds pass in no time."""
    keys, now = Keys(tmp_path), [0.0]
    keys.make("127.0.0.1:8000")
    sleep = lambda seconds: now.__setitem__(0, now[0] + seconds)  # noqa: E731
    monkeypatch.setattr(flower, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(flower.flwr, "Message", lambda content, **_: SimpleNamespace(content=content))
    monkeypatch.setattr(flower.Flower, "_connect", connect)
    monkeypatch.setattr(flower.Flower, "_look", lambda self: None)
    monkeypatch.setattr(flower.Flower, "_drop", lambda self: None)
    said = []
    found = flower.Flower(keys, tmp_path / "server", said.append)
    found.said, found._online = said, {"bern": (1, "now")}
    return found


def test_a_site_that_does_not_answer_is_asked_the_same_again_ever_more_rarely(there):
    there.push({"bern": Raw({"n": 1})})
    for seconds, asked in ((110, 1), (20, 2), (210, 2), (30, 3), (440, 3), (50, 4)):  # after 2, 6 and 14 minutes
        assert there.pull(["bern"], seconds=seconds) == {}
        assert len(there._grid.sent) == asked
    assert {*there._grid.sent} == {Raw({"n": 1}).pack()}
    assert there.said == [f"bern has not answered for {seconds} s; asked again" for seconds in (120, 240, 480)]


@pytest.mark.parametrize("number", ["1", "2"])
def test_whichever_time_it_answers_is_its_answer_and_a_second_one_is_passed_over(there, number):
    there.push({"bern": Raw({"n": 1})})
    there.pull(["bern"], seconds=130)
    there._grid.answer(number, Raw({"found": 1}))
    assert said(there.pull(["bern"])["bern"]) == {"found": 1}
    there.push({"bern": Raw({"n": 2})})
    there._grid.answer("12"[number == "1"], Raw({"found": 1}))
    assert there.pull(["bern"], seconds=10) == {}
    there._grid.answer("3", Raw({"found": 2}))
    assert said(there.pull(["bern"])["bern"]) == {"found": 2}


def test_a_reply_that_flower_has_lost_is_asked_for_again_at_once(there):
    there.push({"bern": Raw({"n": 1})})
    there._grid.answer("1", None)
    there.pull(["bern"], seconds=10)
    assert len(there._grid.sent) == 2
    there._grid.answer("2", Raw({"found": 1}))
    assert said(there.pull(["bern"])["bern"]) == {"found": 1}


@pytest.mark.parametrize("end", ["push_messages", "pull_messages"])
def test_a_server_that_cannot_hand_a_message_over_begins_anew_with_flower(there, end):
    """Flower's SuperLink has forgotten what was to come with the message, or has a part of the reply only."""
    grid = there._grid
    setattr(grid, end, lambda _: (_ for _ in ()).throw(flower.flwr.ObjectPushError("2", 1, "0")))
    there.push({"bern": Raw({"n": 1})})
    there.pull(["bern"], seconds=10)
    assert there._grid is not grid
    assert there._grid.sent == [Raw({"n": 1}).pack()]


def test_a_site_that_has_come_anew_is_asked_again_at_once_and_one_that_is_away_when_it_is_back(there):
    there.push({"bern": Raw({"n": 1})})
    there._online = {}
    assert there.pull(["bern"], seconds=300) == {}
    assert len(there._grid.sent) == 1
    there._online = {"bern": (1, "later")}
    there.pull(["bern"], seconds=10)
    assert len(there._grid.sent) == 2


def test_the_rest_of_a_reply_is_not_waited_for_when_its_site_has_gone(there):
    def pull(part: str) -> bytes:
        if part == "1":
            return b"one"
        there._online = {"bern": (1, "later")}
        raise flower.flwr.ObjectUnavailableError("2")

    there.push({"bern": Raw({"n": 1})})
    with pytest.raises(flower.flwr.ObjectPullError, match="bern has gone"):
        there._objects(object_ids=["1", "2"], pull_object_fn=pull)


@pytest.mark.parametrize("number", ["1", "2"])
def test_what_is_no_message_of_flowers_is_its_sites_answer_and_costs_nobody_else_theirs(there, number):
    """Flower's grid takes what it pulls for a message, and fails otherwise."""
    there._online["oslo"] = (2, "now")
    there.push({"bern": Raw({"n": 1}), "oslo": Raw({"n": 1})})
    for answer in ("1", "2"):
        there._grid.answer(answer, Raw({"found": 1}))
    there._grid.answers[number] = SimpleNamespace()
    found = there.pull(["bern", "oslo"])
    assert sorted(found) == ["bern", "oslo"]
    spoilt = found.pop("bern" if number == "1" else "oslo")
    assert spoilt.startswith("not a message (AttributeError: ")
    assert said(next(iter(found.values()))) == {"found": 1}
    assert there.said == []


@pytest.fixture
def attendance(tmp_path, monkeypatch):
    """A site's end that has a SuperNode; `said` is what it has said, `stopped` how often it has stopped that."""
    keys = Keys(tmp_path)
    keys.make("127.0.0.1:8000")
    said, stopped = [], []
    monkeypatch.setattr(flower_site, "PAUSE", 0.0)
    key = site_key(keys.add("bern", tmp_path))
    found = flower_site.Attendance(key, lambda data: data, lambda: False, tmp_path / "flower", said.append)
    found._node = SimpleNamespace(stop=lambda at_once: stopped.append(at_once))
    found.said, found.stopped, found.keys = said, stopped, keys
    return found


FAULTS = [ConnectionResetError(), flower.flwr.ObjectPushError("2", 1, "0"), flower.flwr.ObjectPullError("2", "gone")]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("lost", ["pull_task_input", "push_message", "push_task_output"])
def test_a_supernode_that_waits_for_a_reply_which_cannot_come_is_started_again(attendance, monkeypatch, lost, fault):
    """Otherwise it would take no message any more: neither the same, asked again, nor another."""
    question = SimpleNamespace(content=flower.enveloped(b"question"))
    monkeypatch.setattr(flower.flwr, "Message", lambda content, **_: content)
    for name in ("pull_task_input", "push_message", "push_task_output"):
        monkeypatch.setitem(vars(flower.flwr), name, lambda *_: (question, None, None, None))
    monkeypatch.setitem(vars(flower.flwr), lost, lambda *_: (_ for _ in ()).throw(fault))
    monkeypatch.setattr(flower.Task, "_beat", lambda self: None)
    client = SimpleNamespace(close=lambda: None)
    attendance._serve(flower.Task(client, ""))
    assert attendance.stopped == [True]
    assert attendance.said[0].endswith(f"whole ({type(fault).__name__}); the server will ask again")
    monkeypatch.setitem(vars(flower.flwr), lost, lambda *_: (question, None, None, None))
    attendance._serve(flower.Task(client, ""))
    assert attendance.stopped == [True]


def test_a_site_waits_for_a_server_behind_something_that_takes_connections_for_it(attendance):
    """A forwarder hangs up while the server is down; only who answers with something else ends the wait."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        attendance.server = "127.0.0.1", door.getsockname()[1]

        def forward():
            for _ in range(2):
                taken = door.accept()[0]
                taken.recv(1 << 16)
                taken.close()
            door.accept()[0].sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=forward, daemon=True).start()
        with pytest.raises(RunError, match="does not speak TLS"):
            attendance._reach()
    assert attendance.said == ["no answer from {}:{} (it hangs up); waiting for it".format(*attendance.server)]


@pytest.mark.parametrize(("off", "said"), [(6, "4 s or more ahead of"), (-306, "304 s or more behind"), (None, "")])
def test_a_site_whose_clock_the_server_would_refuse_says_so_and_waits(attendance, off, said):
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(attendance.keys.certificate, attendance.keys.private)
    with socket.create_server(("127.0.0.1", 0)) as plain, tls.wrap_socket(plain, server_side=True) as door:
        attendance.server = "127.0.0.1", door.getsockname()[1]

        def serve():
            for seconds in (off, 0):
                with door.accept()[0] as taken:
                    taken.recv(1 << 16)
                    date = "" if seconds is None else f"Date: {formatdate(time.time() - seconds, usegmt=True)}\r\n"
                    taken.sendall(f"HTTP/1.1 200 OK\r\n{date}Content-Length: 0\r\n\r\n".encode())

        threading.Thread(target=serve, daemon=True).start()
        attendance._reach()
    line = f"this machine's clock is {said} the server's, which refuses that; waiting for it to be set"
    assert attendance.said == [line] * (off is not None)


@pytest.mark.parametrize("end", ["", "raise ValueError"])
def test_a_process_of_flowers_that_does_nothing_any_more_is_ended(tmp_path, end):
    """Its main part returns where it has met an error that it does not repeat; a thread is left."""
    place = tmp_path / "flwr" / "supernode" / "cli"
    place.mkdir(parents=True)
    for package in (place, *place.parents[:2]):
        (package / "__init__.py").touch()
    body = f"threading.Thread(target=time.sleep, args=(60,)).start()\n    {end}"
    (place / "flower_supernode.py").write_text(f"import threading, time\ndef flower_supernode():\n    {body}\n")
    command = [sys.executable, "-m", "polyfed.sites.flower_child", "supernode", str(os.getpid()), os.devnull]
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, timeout=50, capture_output=True, text=True)
    assert done.returncode == 1
    assert ("ValueError" in done.stderr) == bool(end)
