"""What the outside may ask of the server's port."""

import asyncio
import importlib
import sys

import pytest

from polyfed.core.errors import ConfigError
from polyfed.engines.flower_child import HEADER, MOST, Gate

SECRET = b"0123"


def ask(path: str, method: str = "POST", **headers: str) -> int:
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
    asyncio.run(Gate(app, SECRET)(scope, receive, send))
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


def test_a_body_of_unknown_size_is_refused():
    assert ask("/v1/fleet/push-object", transfer_encoding="chunked") == 411


def test_the_header_is_the_one_that_is_sent():
    assert HEADER == b"polyfed-secret"


def test_without_flower_one_line_says_what_to_install(monkeypatch, cli):
    monkeypatch.setitem(sys.modules, "flwr", None)
    monkeypatch.delitem(sys.modules, "polyfed.engines.flower_api", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'polyfed\[flower\]'"):
        importlib.import_module("polyfed.engines.flower_api")
    monkeypatch.setitem(sys.modules, "cryptography.x509", None)
    monkeypatch.delitem(sys.modules, "polyfed.sites.keys", raising=False)
    done = cli("keys", "list")
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert "polyfed[flower]" in done.err
