"""Keys and certificates: who gets in, until when, and what the files hold."""

import io
import json
import re
import shutil
import socket
import ssl
import stat
import threading
from datetime import UTC, datetime

import pytest

pytest.importorskip("cryptography", reason="needs the extra [sites]")
from polyfed.base.errors import ConfigError, RunError
from polyfed_sites.keys import SOON, Keys, site_key, split, warning


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
    theirs = shutil.copy(keys.certificate, tmp_path / "theirs.pem")  # as of another authority
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        handshake(keys, given.authority)
    keys.make("localhost:8123")
    assert keys.warnings() == []
    assert [line.partition(" on ")[0] for line in keys.warnings(theirs)] == [f"the certificate {theirs} has ended"]
    handshake(keys, given.authority)  # with the key that the site has had


def test_only_keys_that_are_valid_now_are_accepted(keys, tmp_path):
    until = site_key(keys.add("soon", tmp_path, days=10)).until
    assert warning("this site's key", until, "ask for another").startswith("this site's key ends on ")
    assert keys.warnings()
    keys.revoke("soon")
    for name in ("bern", "oslo"):
        keys.add(name, tmp_path)
    keys.add("riga", tmp_path, days=-1)
    keys.revoke("oslo")
    assert [name for name, _ in keys.accepted().values()] == ["bern"]
    assert keys.warnings()[0].startswith("riga's key has ended")
    (tmp_path / "oslo.key").unlink()
    keys.add("oslo", tmp_path)
    assert sorted(name for name, _ in keys.accepted().values()) == ["bern", "oslo"]


def test_private_keys_are_for_one_user_and_leave_with_the_site(keys, tmp_path):
    path = keys.add("bern", tmp_path)
    secret = json.loads(path.read_text())["key"].splitlines()[1]
    for file in (path, keys.private, keys.folder / "ca.key"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    assert not any(secret in file.read_text() for file in keys.folder.iterdir())


def damaged(k, p, text):
    path = k.add("bern", p)
    path.write_text(text)
    return site_key(path)


SAYS = dict.fromkeys(("site", "server", "authority", "key"), "x")
NO_KEYS = ["[]", "[" * 5000, "{}", '{"site": 1}']
NO_KEYS += [json.dumps(SAYS | until) for until in ({}, {"until": "soon"}, {"until": 3})]


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
        *((lambda k, p, text=text: damaged(k, p, text), "not a site's key") for text in NO_KEYS),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(keys, tmp_path, do, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        do(keys, tmp_path)


SITE = '{"address": "a.org:1", "sites": {"bern": [%s]}}'
DAMAGE = [
    "[]", "[" * 5000, '{"address": 3}', SITE % '{"public": "x"}', SITE % '{"public": "x", "until": "soon"}',
    SITE % '{"public": 3, "until": "2030-01-01"}', SITE % '{"public": "x", "until": "2030-01-01", "revoked": null}',
    "\udcff",
]  # fmt: skip
INIT, ADD = ("init", "b.org"), ("add", "oslo", "--out", "out")
REGISTERS = [("sites.json", text, [INIT, ADD, ("list",), ("revoke", "bern")]) for text in DAMAGE]
REGISTERS += [("ca.key", None, [INIT]), ("ca.pem", None, [INIT, ADD])]


@pytest.mark.parametrize(("file", "damage", "commands"), REGISTERS, ids=range(len(REGISTERS)))
def test_a_damaged_register_and_a_lost_authority_are_said_and_no_certificate_is_replaced(
    cli, keys, file, damage, commands
):
    """A running certificate is that of its name until all was read, and the sites trust no other authority."""
    path = keys.folder / file
    path.unlink() if damage is None else path.write_text(damage, errors="surrogateescape")
    before = {path: path.read_bytes() for path in keys.folder.iterdir()}
    for words in commands:
        said = cli("keys", *words, "--keys", keys.folder)
        said.line(1)
        wanted = [f"polyfed: {path}: "] if damage is None else [f"{path} is damaged", "restore it from a copy"]
        assert all(word in said.err for word in wanted)
        assert {path: path.read_bytes() for path in keys.folder.iterdir()} == before


ADDRESSES = {
    "a.org": ("a.org", 8000), "a.org:1": ("a.org", 1), "[::1]:9": ("::1", 9), "::1": ("::1", 8000),
    "[fe80::2]": ("fe80::2", 8000), "10.0.0.7:65535": ("10.0.0.7", 65535), "db_1.a-b.c0": ("db_1.a-b.c0", 8000),
}  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ["", ":", ".", "a.", "0.95", "*", "*.org", "é.org", "a b", "a//b", "-a.org", "256.1.1.1", "a:b", "a:0", "a:65536",
     "a:-1", "[::1", "::1::", "fe80::1%eth0", "a" * 64, "a." * 127 + "ab", "a\n"],
)  # fmt: skip
def test_what_no_site_could_reach_is_no_address(cli, keys, text, tmp_path):
    """For `keys init` and its --also, and for a client's --server; the é has a spelling that works."""
    for good, found in ADDRESSES.items():
        assert split(good)[:2] == found
    before = {path: path.read_bytes() for path in keys.folder.iterdir()}
    with pytest.raises(ConfigError, match="is not an address") as e:
        split(text)
    assert ("xn--9ca.org" in str(e.value)) == ("é" in text)
    if ":" not in text:
        with pytest.raises(ConfigError, match="is not an address"):
            keys.make("a.org", [text])
    assert {path: path.read_bytes() for path in keys.folder.iterdir()} == before


def test_a_site_has_two_valid_keys_while_it_changes_and_never_three(cli, keys, tmp_path):
    old = site_key(keys.add("bern", tmp_path / "old"))
    said = cli("keys", "add", "bern", "--rotate", "--keys", keys.folder, "--out", tmp_path / "new").out
    assert f"polyfed keys revoke bern --key {keys.sites()['bern'][0].mark}" in " ".join(said.split())
    new = site_key(tmp_path / "new" / "bern.key")
    assert len(keys.accepted()) == 2
    first, second = keys.sites()["bern"]
    assert (first.until - datetime.now(UTC)).days < SOON, "the older one ends soon"
    assert second.until == new.until > old.until
    with pytest.raises(ConfigError, match=rf"two valid keys, {first.mark} and {second.mark}"):
        keys.add("bern", tmp_path / "third", rotate=True)
    keys.revoke("bern", first.mark)
    assert [mark for _, mark in keys.accepted().values()] == [second.mark]
    keys.add("bern", tmp_path / "third", rotate=True)
    assert len(keys.accepted()) == 2


def test_what_was_revoked_stays_with_when_why_and_where_it_came_from(cli, keys, tmp_path):
    keys.add("bern", tmp_path)
    (mark,) = (e.mark for e in keys.sites()["bern"])
    assert keys.came(mark, "10.0.0.7") == [] == keys.came(mark, "10.0.0.7")
    assert keys.came(mark, "10.0.0.9") == ["10.0.0.7"], "a new address"
    assert cli("keys", "revoke", "bern", "--why", "laptop stolen", "--keys", keys.folder).status == 0
    assert "was revoked before" in cli("keys", "revoke", "bern", "--keys", keys.folder).out
    keys.add("bern", tmp_path / "new")
    revoked, valid = keys.sites()["bern"]
    assert (revoked.mark, revoked.why, valid.revoked) == (mark, "laptop stolen", None)
    assert revoked.revoked is not None
    said = cli("keys", "list", "--keys", keys.folder).out
    assert re.search(rf"bern +revoked +until \S+ +key {mark} +from 10.0.0.7, 10.0.0.9 +\(laptop stolen\)", said)
    assert re.search(rf"bern +valid +until \S+ +key {valid.mark}", said)
    cli("keys", "revoke", "bern", "--key", "f" * 12, "--keys", keys.folder).line(2)


def test_a_folder_that_cannot_be_written_is_no_hindrance(keys, monkeypatch):
    """As one that a container is given to read: addresses are known as long as the server runs."""

    def refuse(path, data):
        raise RunError(f"cannot write {path}")

    monkeypatch.setattr("polyfed_sites.keys.write", refuse)
    assert len(keys.word()) == 32 != keys.word()
    assert (keys.came("x", "10.0.0.7"), keys.came("x", "10.0.0.9")) == ([], ["10.0.0.7"])


def test_a_key_with_a_passphrase_is_of_no_use_without_it(keys, tmp_path):
    path = keys.add("bern", tmp_path, passphrase=b"a word")
    assert site_key(path, lambda: b"a word").site == "bern"
    for given, said in ((None, "has a passphrase"), (lambda: b"another", "its passphrase is another one")):
        with pytest.raises(ConfigError, match=said):
            site_key(path, given)
    assert "ENCRYPTED" in json.loads(path.read_text())["key"]


def test_the_passphrase_is_asked_for_twice_and_read_from_a_file(cli, keys, tmp_path, monkeypatch):
    words = iter([b"a word", b"a word", b"one", b"other"])
    monkeypatch.setattr("polyfed_sites.cli.keys.asked", lambda what: next(words))
    assert cli("keys", "add", "bern", "--passphrase", "--keys", keys.folder, "--out", tmp_path).status == 0
    done = cli("keys", "add", "oslo", "--passphrase", "--keys", keys.folder, "--out", tmp_path)
    assert (done.status, "two different ones" in done.err) == (2, True)
    for name, text in (("right", "a word\n"), ("wrong", "word\n"), ("bern.csv", "age,ill\n1,0\n")):
        (tmp_path / name).write_text(text)
    client = ["client", "--key", tmp_path / "bern.key", "--data", tmp_path / "bern.csv", "--vault", tmp_path / "vault"]
    assert "its passphrase is another one" in cli(*client, "--passphrase", tmp_path / "wrong").err
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert "no terminal to ask for a passphrase at; --passphrase FILE" in cli(*client).err
