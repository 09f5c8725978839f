"""Keys and certificates: who gets in, until when, and what the files hold."""

import json
import re
import socket
import ssl
import stat
import threading

import pytest

pytest.importorskip("cryptography", reason="needs the extra [flower]")
from polyfed.base.errors import ConfigError, RunError
from polyfed.sites.keys import Keys, site_key, split, warning


@pytest.fixture
def keys(tmp_path):
    found = Keys(tmp_path / "keys")
    found.make("localhost:8123")
    return found


def handshake(keys: Keys, authority: str, host: str = "localhost") -> None:
    """A TLS connection to a server with these keys, by a site that trusts an authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keys.certificate, keys.private)
    ours, theirs = socket.socketpair()

    def serve():
        try:
            context.wrap_socket(ours, server_side=True).close()
        except OSError:
            ours.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        ssl.create_default_context(cadata=authority).wrap_socket(theirs, server_hostname=host).close()
    finally:
        theirs.close()
        thread.join()


def test_a_site_trusts_the_server_that_its_key_is_for_and_no_other(keys, tmp_path):
    given = site_key(keys.add("bern", tmp_path))
    assert (given.site, given.server) == ("bern", "localhost:8123")
    handshake(keys, given.authority)
    with pytest.raises(ssl.SSLCertVerificationError, match=r"Hostname mismatch|not valid for"):
        handshake(keys, given.authority, "example.org")
    other = Keys(tmp_path / "other")
    other.make("localhost:8123")
    with pytest.raises(ssl.SSLCertVerificationError, match=r"unable to get local issuer|self-signed"):
        handshake(other, given.authority)


def test_a_certificate_that_has_ended_is_refused_until_it_is_renewed(keys, tmp_path):
    given = site_key(keys.add("bern", tmp_path))
    keys.make("localhost:8123", days=-1)
    assert keys.warnings()[0].startswith("the server's certificate has ended")
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        handshake(keys, given.authority)
    keys.make("localhost:8123")
    assert keys.warnings() == []
    handshake(keys, given.authority)  # with the key that the site has had


def test_only_keys_that_are_valid_now_are_accepted(keys, tmp_path):
    for name in ("bern", "oslo"):
        keys.add(name, tmp_path)
    keys.add("riga", tmp_path, days=-1)
    keys.revoke("oslo")
    assert sorted(keys.accepted().values()) == ["bern"]
    assert keys.warnings()[0].startswith("riga's key has ended")
    (tmp_path / "oslo.key").unlink()
    keys.add("oslo", tmp_path)
    assert sorted(keys.accepted().values()) == ["bern", "oslo"]


def test_private_keys_are_for_one_user_and_leave_with_the_site(keys, tmp_path):
    path = keys.add("bern", tmp_path)
    secret = json.loads(path.read_text())["key"].splitlines()[1]
    for file in (path, keys.private, keys.folder / "ca.key"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    assert not any(secret in file.read_text() for file in keys.folder.iterdir())


@pytest.mark.parametrize(
    ("do", "says"),
    [
        (lambda k, p: k.add("../x", p), "cannot be the name of a site"),
        (lambda k, p: [k.add("bern", p), k.add("bern", p)], "bern has a key, good until"),
        (lambda k, p: k.revoke("bren"), "no site 'bren'"),
        (lambda k, p: k.make("a b:1"), "is not an address"),
        (lambda k, p: k.make("a:99999"), "is not an address"),
        (lambda k, p: site_key(k.authority), "not a site's key"),
        (lambda k, p: Keys(p / "none").sites(), "no keys of a federation"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(keys, tmp_path, do, says):
    with pytest.raises(ConfigError, match=re.escape(says)) as e:
        do(keys, tmp_path)
    assert "\n" not in str(e.value)


def test_a_damaged_register_is_said_to_be_damaged(keys):
    (keys.folder / "sites.json").write_text('{"address": 3}')
    with pytest.raises(RunError, match=r"sites\.json is damaged"):
        keys.sites()


@pytest.mark.parametrize(
    ("text", "found"), [("a.org", ("a.org", 8000)), ("a.org:1", ("a.org", 1)), ("[::1]:9", ("::1", 9))]
)
def test_addresses(text, found):
    assert split(text) == found


def test_what_ends_soon_is_said(keys, tmp_path):
    until = site_key(keys.add("bern", tmp_path, days=10)).until
    assert warning("this site's key", until, "ask for another").startswith("this site's key ends on ")
    assert keys.warnings()


def test_the_commands(cli, tmp_path):
    folder = str(tmp_path / "keys")
    assert cli("keys", "init", "fed.example.org", "--keys", folder).status == 0
    assert cli("keys", "add", "bern", "--keys", folder, "--out", str(tmp_path)).status == 0
    assert cli("keys", "revoke", "bern", "--keys", folder).status == 0
    out = cli("keys", "list", "--keys", folder).out
    assert "server fed.example.org:8000" in out
    assert re.search(r"bern\s+revoked", out)
    assert cli("keys", "revoke", "oslo", "--keys", folder).status == 2
