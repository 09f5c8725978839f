"""What the outside may ask of the server's port."""

import asyncio
import gc
import importlib
import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace as Some

import pytest

from polyfed.base.errors import ConfigError
from polyfed.sites.flower_child import COLLECT, FEW, HEADER, MOST, SIZE, Bound, Gate

SECRET = b"0123"


def ask(path: str, method: str = "POST", bound: Bound | None = None, **headers: str) -> int:
    """The status of an answer; 200 where the request was let through."""
    said = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})

    async def receive():
        raise AssertionError("read before it was let through")

    async def send(event):
        said.append(event)

    given = [(key.replace("_", "-").encode(), value.encode()) for key, value in headers.items()]
    scope = {"type": "http", "path": path, "method": method, "headers": given}
    asyncio.run(Gate(app, SECRET, bound)(scope, receive, send))
    return said[0]["status"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/fleet/pull-messages", 200),
        ("/v1/control/start-run", 404),
        ("/v1/control/register-node", 404),
        ("/v1/runtime/acquire-task", 404),
        ("/docs", 404),
        ("/v1/fleet", 404),
        ("//v1/fleet/x", 404),
    ],
)
def test_sites_may_fetch_and_send_messages_and_nothing_else(path, status):
    assert ask(path, content_length="10") == status
    assert ask(path, content_length="10", polyfed_secret="guess") == status
    assert ask(path, content_length="10", polyfed_secret=SECRET.decode()) == 200


def test_whether_the_server_is_well_may_be_asked():
    assert ask("/health", "GET") == 200


@pytest.mark.parametrize(("size", "status"), [(str(MOST), 200), (str(MOST + 1), 413), ("-1", 411), ("many", 411)])
def test_a_body_that_is_too_large_is_refused_before_it_is_read(size, status):
    assert ask("/v1/fleet/push-object", content_length=size) == status


@pytest.mark.parametrize(("size", "status"), [(FEW, 200), (FEW + 1, 413)])
def test_what_is_no_piece_of_a_message_is_small(size, status):
    """The server's own requests may be larger: it announces messages to many sites at once."""
    assert ask("/v1/fleet/push-messages", content_length=str(size)) == status
    assert ask("/v1/runtime/push-messages", content_length=str(size), polyfed_secret=SECRET.decode()) == 200


class Store:
    """Flower's handlers, as far as they matter here: one reply to each message, its pieces are held."""

    def __init__(self, asked):
        self.asked, self.held = set(asked), 0

    def push_messages(self, request, state):
        return Some(objects_to_push=["a"] * (request.messages_list[0].metadata.reply_to_message_id in self.asked))

    def push_object(self, request, state):
        self.held += len(request.object_content)
        return Some(stored=True)


def announced(to: str, source: int = 7, size: int = 300, messages: int = 1, pieces: bytes = b"") -> Some:
    metadata = Some(reply_to_message_id=to, src_node_id=source)
    message, tree = Some(metadata=metadata, ByteSize=lambda: size), Some(SerializeToString=lambda: pieces)
    return Some(messages_list=[message] * messages, message_object_trees=[tree] * messages, node=Some(node_id=7))


def bounded(store: "Store") -> Bound:
    return Bound(store, lambda: Some(stored=False), lambda: Some(objects_to_push=[]))


def piece(size: int, node: int = 7) -> Some:
    return Some(object_content=bytes(size), node=Some(node_id=node))


def test_a_site_cannot_fill_the_superlinks_memory():
    """Whatever it announces, what is held of it is two of the largest replies for each message that it was sent."""
    store = Store(asked=["first", "second"])
    bound = bounded(store)
    sent = {SIZE.decode(): "100", "content_length": "10"}
    assert ask("/v1/fleet/pull-messages", bound=bound, **sent) == 200
    assert bound.most == MOST, "nobody but the server says how large a reply may be"
    assert ask("/v1/runtime/x", bound=bound, polyfed_secret=SECRET.decode(), **sent) == 200
    for _ in range(5):
        for to in ("first", "second", "never sent"):
            store.push_messages(announced(to), None)
            for _ in range(5):
                store.push_object(piece(90), None)
    assert store.held <= 2 * 2 * 100
    assert store.push_object(piece(90, node=8), None).stored, "other sites have room"


def test_a_reply_that_fits_is_taken_and_the_next_one_too():
    store = Store(asked=["first", "second"])
    bound = bounded(store)
    bound.most = 100
    for to in ("first", "second"):
        store.push_messages(announced(to), None)
        assert all(store.push_object(piece(50), None).stored for _ in range(2))
    assert store.held == 200


@pytest.mark.parametrize(
    "what",
    [{"to": ""}, {"source": 1}, {"size": 8193}, {"messages": 0}, {"messages": 2}],
    ids=["a question", "another's", "a long head", "none", "two"],
)
def test_a_site_announces_replies_of_its_own_and_nothing_else(what):
    """What is no reply would go to another site, as from the server, and stay in memory where nobody asks for it."""
    store, reached = Store(asked=["first"]), []
    taken = store.push_messages
    store.push_messages = lambda request, state: reached.append(request) or taken(request, state)
    bounded(store)
    assert store.push_messages(announced(**{"to": "first"} | what), None).objects_to_push == []
    assert not reached
    assert store.push_messages(announced("first"), None).objects_to_push
    assert len(reached) == 1


def test_a_reply_that_is_announced_again_has_the_same_pieces():
    store = Store(asked=["first"])
    bounded(store)
    for pieces, taken in ((b"a", True), (b"b", False), (b"a", True)):
        assert bool(store.push_messages(announced("first", pieces=pieces), None).objects_to_push) == taken


def test_flowers_own_requests_have_what_is_looked_at():
    protobuf = pytest.importorskip("flwr.proto.fleet_pb2", reason="needs the extra [flower]")
    messages = importlib.import_module("flwr.proto.message_pb2")
    metadata = messages.Metadata(reply_to_message_id="first", src_node_id=7)
    node = importlib.import_module("flwr.proto.node_pb2").Node(node_id=7)
    tree = messages.ObjectTree(object_id="0")
    message = messages.Message(metadata=metadata)
    request = protobuf.PushMessagesRequest(node=node, messages_list=[message], message_object_trees=[tree])
    store = Store(asked=["first"])
    bounded(store)
    assert store.push_messages(request, None).objects_to_push


class Remains:
    own: "Remains"


def test_what_is_left_of_requests_is_freed_before_it_fills_the_memory():
    """It refers to itself, and Python alone looks for that by number of objects, not by their size."""

    async def app(scope, receive, send):
        remains = Remains()
        remains.own = remains
        left.append(weakref.ref(remains))

    headers = [(b"content-length", b"%d" % FEW), (HEADER, SECRET)]
    gate, left = Gate(app, SECRET), []
    gc.disable()
    try:
        for _ in range(200):
            scope = {"type": "http", "path": "/v1/fleet/push-messages", "method": "POST", "headers": headers}
            asyncio.run(gate(scope, None, None))
        assert sum(one() is not None for one in left) * FEW <= 2 * COLLECT
    finally:
        gc.enable()


def test_a_body_of_unknown_size_is_refused():
    assert ask("/v1/fleet/push-object", transfer_encoding="chunked") == 411


def test_the_header_is_the_one_that_is_sent():
    assert HEADER == b"polyfed-secret"


def test_packages_that_are_hidden_from_tests_are_hidden_from_their_processes(tmp_path, request, monkeypatch):
    for name in ("a_package", "another"):
        (tmp_path / f"{name}.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    plugin = request.config.pluginmanager.getplugin(str(Path(__file__).parents[1] / "conftest.py"))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    plugin.hide(request.config, ["a_package"])
    say = "import importlib.util as u; print(*(n for n in ('a_package', 'another') if u.find_spec(n)))"
    assert subprocess.run([sys.executable, "-c", say], capture_output=True, text=True).stdout.split() == ["another"]


def test_without_flower_one_line_says_what_to_install(monkeypatch, cli):
    monkeypatch.setitem(sys.modules, "flwr", None)
    monkeypatch.delitem(sys.modules, "polyfed.sites.flower_api", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'polyfed\[flower\]'"):
        importlib.import_module("polyfed.sites.flower_api")
    monkeypatch.setitem(sys.modules, "cryptography.x509", None)
    for loaded in ("polyfed.sites.keys", "polyfed.cli.keys"):
        monkeypatch.delitem(sys.modules, loaded, raising=False)
    done = cli("keys", "list")
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert "polyfed[flower]" in done.err
