"""What the outside may ask of the server's port."""

import asyncio
import importlib
import sys
from types import SimpleNamespace as Some

import pytest

from polyfed.base.errors import ConfigError

pytest.importorskip("flwr", reason="needs the extra [flower]")
from polyfed_sites import flower_api as flwr
from polyfed_sites.gate import FEW, PIECE, SESSION, Gate


def ask(path: str, method: str = "POST", body: bytes | None = None, **headers: str) -> int:
    """The status of an answer. Without a body none may be read."""
    said = []

    async def receive():
        assert body is not None, "read before it was let through"
        return {"type": "http.request", "body": body}

    async def send(event):
        said.append(event)

    given = [(key.replace("_", "-").encode(), value.encode()) for key, value in headers.items()]
    scope = {"type": "http", "path": path, "method": method, "headers": given, "client": ("there", 1)}
    gate = Gate(Some(page=lambda path: None, nodes=None), said.append)
    asyncio.run(gate(scope, receive, send))
    return said[0]["status"]


NOTHING = [
    "/v1/fleet/register-node", "/v1/fleet/get-fab", "/v1/control/start-run", "/v1/control/register-node",
    "/v1/runtime/acquire-task", "/docs", "/v1/fleet", "//v1/fleet/pull-messages", "/v1/fleet/../fleet/pull-messages",
]  # fmt: skip


@pytest.mark.parametrize("path", NOTHING)
def test_sites_may_fetch_and_send_messages_with_a_key_and_nothing_else(path):
    assert ask(path, body=b"", content_length="0") == ask(path, content_length="0") == ask(path, "GET") == 404
    pull = "/v1/fleet/pull-messages"
    assert (ask(pull, body=b"", content_length="0"), ask(pull, "GET"), ask("/health", "GET")) == (401, 404, 200)


@pytest.mark.parametrize(
    ("call", "size", "status"),
    [
        ("push-object", str(PIECE), 401), ("push-object", str(PIECE + 1), 413), ("push-messages", str(FEW), 401),
        ("push-messages", str(FEW + 1), 413), ("push-object", "-1", 411), ("push-object", "many", 411),
    ],
)  # fmt: skip
def test_a_body_that_is_too_large_is_refused_before_it_is_read(call, size, status):
    body = b"" if status == 401 else None
    assert ask(f"/v1/fleet/{call}", body=body, content_length=size) == status
    assert ask("/v1/fleet/push-object", transfer_encoding="chunked") == 411
    assert ask("/v1/fleet/push-object", body=b"\xff" * 10, content_length="10") == 400


def test_flowers_own_client_says_what_is_looked_at():
    """Names of calls, of their fields, and the header by which the server tells a site's processes apart."""
    from polyfed_sites.gate import CALLS

    for path, (kind, _) in CALLS.items():
        call = "".join(word.title() for word in path.rpartition("/")[2].split("-"))
        assert hasattr(flwr.FleetHttpClient, call)
        assert kind == f"{call}Request"
        assert {"node", "node_id", "public_key"} & {*getattr(flwr, kind).DESCRIPTOR.fields_by_name}
    assert SESSION == "polyfed-session"


def test_without_flower_one_line_says_what_to_install(monkeypatch, cli):
    monkeypatch.setitem(sys.modules, "flwr", None)
    monkeypatch.delitem(sys.modules, "polyfed_sites.flower_api", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'polyfed\[flower\]'"):
        importlib.import_module("polyfed_sites.flower_api")
    monkeypatch.setitem(sys.modules, "cryptography.x509", None)
    for loaded in ("polyfed_sites.keys", "polyfed_sites.cli.keys"):
        monkeypatch.delitem(sys.modules, loaded, raising=False)
    cli("keys", "list").line(2, "polyfed[flower]")
