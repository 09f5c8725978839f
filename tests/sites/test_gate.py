"""What the outside may ask of the server's port."""

import asyncio
import importlib
import sys
from types import SimpleNamespace as Some

import pytest

from polyfed.base.errors import ConfigError

pytest.importorskip("uvicorn", reason="needs the extra [sites]")
from polyfed_sites.envelope import LONGEST, SAYS, SIGNATURE, Denied, opened, seal
from polyfed_sites.gate import Gate

SEALED = seal("site", lambda text: b"signature", {"do": "ask"})


def ask(path: str, method: str = "POST", body: bytes | None = None, **headers: str) -> int:
    """The status of an answer, as it is signed where it is. Without a body none may be read."""
    said = []

    async def receive():
        assert body is not None, "read before it was let through"
        return {"type": "http.request", "body": body}

    async def send(event):
        said.append(event)

    def admit(do, envelope, address):
        raise Denied(403)

    given = [(key.replace("_", "-").encode(), value.encode()) for key, value in headers.items()]
    scope = {"type": "http", "path": path, "method": method, "headers": given, "client": ("there", 1)}
    there = Some(page=lambda path: None, admit=admit, sign=lambda text: b"", certificate=b"")
    gate = Gate(there, said.append, "/fed")
    asyncio.run(gate(scope, receive, send))
    answer = {key.decode(): value.decode() for key, value in said[0]["headers"]}
    return opened(answer).says["status"] if SAYS in answer else said[0]["status"]


NOTHING = [
    "/v1/register", "/v1/", "/v1", "/ask", "/docs", "/", "//v1/ask", "/v1/../v1/ask", "/v2/ask", "/v1/ask/",
    "/fed/fed/v1/ask",
]  # fmt: skip


@pytest.mark.parametrize("path", NOTHING)
def test_sites_may_fetch_and_send_messages_with_a_key_and_nothing_else(path):
    assert ask(path, **SEALED) == ask(path, "GET", **SEALED) == 404
    for base in ("", "/fed"):  # as a proxy takes the path away, or leaves it
        assert (ask(f"{base}/v1/ask", **SEALED), ask(f"{base}/v1/ask", "GET"), ask(f"{base}/health", "GET")) == (
            403,
            404,
            200,
        )


@pytest.mark.parametrize("call", ["hello", "ask", "reply", "beat", "bye"])
def test_without_a_signature_nothing_is_read_and_nothing_done(call):
    text, signature = SEALED[SAYS], SEALED[SIGNATURE]
    for headers in ({}, {SAYS: text}, {SAYS: text[:-3], SIGNATURE: signature}, {SAYS: "é", SIGNATURE: signature}):
        wrong = 403 if headers == {SAYS: text} else 400
        assert ask(f"/v1/{call}", **headers) == wrong
    assert ask(f"/v1/{call}", **{SAYS: "e30=", SIGNATURE: signature}) == 400, "no size"
    assert ask(f"/v1/{call}", **{SAYS: "A" * (LONGEST + 4), SIGNATURE: signature}) == 400
    assert ask(f"/v1/{call}", **SEALED) == 403


def test_without_its_packages_one_line_says_what_to_install(monkeypatch, cli):
    for missing, module in (("uvicorn", "gate"), ("httpx", "attendance")):
        monkeypatch.setitem(sys.modules, missing, None)
        monkeypatch.delitem(sys.modules, f"polyfed_sites.{module}", raising=False)
        with pytest.raises(ConfigError, match=r"pip install 'polyfed\[sites\]'"):
            importlib.import_module(f"polyfed_sites.{module}")
    monkeypatch.setitem(sys.modules, "cryptography.x509", None)
    for loaded in ("polyfed_sites.keys", "polyfed_sites.cli.keys"):
        monkeypatch.delitem(sys.modules, loaded, raising=False)
    cli("keys", "list").line(2, "polyfed[sites]")
