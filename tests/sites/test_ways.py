"""The ways from a site to its server: proxies, also those that end TLS, one's own authorities, mutual TLS, sockets."""

import os
import re
import socket
import subprocess
import sys
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
import torch
from demo import free_port
from direct import Raw, raw

pytest.importorskip("uvicorn", reason="needs the extra [sites]")
from proxies import Proxy

from polyfed.base.errors import RunError
from polyfed_sites import attendance as site_end
from polyfed_sites.attendance import Attendance
from polyfed_sites.hub import Channel, Hub
from polyfed_sites.keys import Keys, site_key, split


class Way:
    """A server, a site's key, and an authority that has nothing to do with either."""

    def __init__(self, folder: Path, stack: ExitStack):
        self.folder, self.stack, self.said = folder, stack, []
        self.keys, own = Keys(folder / "keys"), Keys(folder / "own")
        self.keys.make(f"127.0.0.1:{free_port()}")
        own.make("127.0.0.1")
        self.authority, self.pem = own.authority, folder / "own.pem"
        self.pem.write_bytes(own.certificate.read_bytes() + own.private.read_bytes())
        self.site_pem, theirs = folder / "site.pem", site_key(own.add("bern", folder / "theirs"))
        self.site_pem.write_text(theirs.certificate + site_end.pem(theirs.private).decode())

    def served(self, host: str = "127.0.0.1", **more) -> Hub:
        self.key = site_key(self.keys.add("bern", self.folder))
        self.hub = self.stack.enter_context(closing(Hub(self.keys, self.said.append, host, **more)))
        self.channel = Channel(self.hub, self.folder)
        self.channel.run = "run"
        return self.hub

    def proxy(self, *args, **how) -> Proxy:
        return self.stack.enter_context(closing(Proxy(*args, **how)))

    def exchange(self, times: int = 1, **how) -> list[str]:
        """What the site has said of as many attempts; each of the server's messages is answered with itself."""
        said = []
        end = Attendance(self.key, lambda run, data: data, lambda: False, self.folder, said.append, **how)
        with end._connected() as client:
            for _ in range(times):
                self.channel.push({"bern": Raw({"n": 7})})
                end._try(client)
        return said

    def came(self) -> dict:
        return {name: raw(data).head["n"] for name, data in self.channel.pull(["bern"], seconds=1).items()}


@pytest.fixture
def way(tmp_path, monkeypatch):
    for name in ("PAUSE", "AGAIN"):
        monkeypatch.setattr(site_end, name, 0.0)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with ExitStack() as stack:
        yield Way(tmp_path, stack)


def test_a_site_goes_through_a_proxy_that_wants_a_password(way, monkeypatch):
    way.served()
    proxy = way.proxy("bern:s3cret")
    for words in ("", "bern:wrong@"):
        with pytest.raises(RunError, match=rf"the proxy http://127\.0\.0\.1:{proxy.port} wants a name .*\(407") as e:
            way.exchange(proxy=f"http://{words}127.0.0.1:{proxy.port}")
        assert "wrong" not in str(e.value)
    way.exchange(proxy=f"http://bern:s3cret@127.0.0.1:{proxy.port}")
    assert way.came() == {"bern": 7}
    monkeypatch.setenv("HTTPS_PROXY", f"http://bern:s3cret@127.0.0.1:{proxy.port}")
    way.exchange()
    assert way.came() == {"bern": 7}
    assert proxy.asked == [str(way.hub.keys.address)] * len(proxy.asked)
    assert len(proxy.asked) == 2
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    way.exchange()
    assert len(proxy.asked) == 2


def test_a_proxy_that_does_not_open_the_way_is_said(way):
    way.served()
    proxy = f"http://127.0.0.1:{way.proxy().port}"
    with pytest.raises(RunError, match=r"does not let this machine reach forbidden\.org:8000 \(403 .*its operator"):
        way.exchange(proxy=proxy, server="forbidden.org")
    away = f"127.0.0.1:{free_port()}"
    assert way.exchange(2, proxy=proxy, server=away)[-1].startswith(f"the proxy {proxy} does not reach {away} (502")
    said = way.exchange(2, proxy=f"http://{away}")
    assert said == [f"no answer from the proxy http://{away} (Connection refused); waiting for it"]
    with pytest.raises(RunError, match=r"no host is known by the name 'proxy\.invalid' .*--proxy"):
        way.exchange(3, proxy="http://proxy.invalid:3128")


def test_a_proxy_that_ends_tls_is_let_in_by_the_policy_alone_and_changes_nothing(way):
    way.served()
    proxy = way.proxy(keys=way.pem)
    how = {"proxy": f"http://127.0.0.1:{proxy.port}"}
    with pytest.raises(RunError, match=r"is not the server of this key: .*policy's tls-ends-at"):
        way.exchange(**how)
    how["ends"] = str(way.authority)
    way.exchange(**how)
    assert way.came() == {"bern": 7}
    for what, other in ((b'\\"n\\": 7', b'\\"n\\": 8'), (b"polyfed-says: ey", b"polyfed-says: eX")):
        proxy.change = lambda data, both=(what, other): data.replace(*both)
        said = []
        with suppress(RunError):  # from before the server is heard, a word that is damaged is not its own
            said += way.exchange(3, **how)
        assert all("on its way" in line or "connected to" in line for line in said)
        assert way.came() == {}
    proxy.change = lambda data: data
    way.exchange(**how)
    assert way.came() == {"bern": 7}


def test_half_a_message_and_half_a_reply_are_carried_anew(way):
    """A proxy that hangs up amid a megabyte, on its way down and then on its way up."""
    way.served()
    proxy, said, left = way.proxy(keys=way.pem), [], [0.0]
    how = {"proxy": f"http://127.0.0.1:{proxy.port}", "ends": str(way.authority)}

    def cut(data: bytes) -> bytes:
        left[0] -= len(data)
        if left[0] < 0:
            raise ConnectionError
        return data

    proxy.change = cut
    way.channel.push({"bern": Raw({"n": 7}, {"w": torch.zeros(250_000)})})
    end = Attendance(way.key, lambda run, data: data, lambda: False, way.folder, said.append, **how)
    with end._connected() as client:
        for left[0] in (5e5, 1.5e6, float("inf")):
            assert way.came() == {}
            end._try(client)
    assert way.came() == {"bern": 7}
    assert [line.partition(" (")[0] for line in said[1:]] == ["a reply did not reach the server"]


def test_who_has_no_certificate_does_not_connect_where_the_server_asks_for_one(way):
    """The key's own, or one of an authority that the hospital has."""
    way.served(clients=way.keys.authority)
    way.exchange()
    assert way.came() == {"bern": 7}
    mine, way.key = way.key, way.key._replace(certificate="")
    for how in ({}, {"certificate": way.site_pem}):
        assert re.search("refused the connection|who shows no certificate", way.exchange(2, **how)[-1])
    assert way.came() == {}
    way.hub.close()
    way.key = mine
    way.keys.make(f"127.0.0.1:{free_port()}")
    way.hub = way.stack.enter_context(closing(Hub(way.keys, way.said.append, "127.0.0.1", clients=way.authority)))
    way.channel.hub = way.hub
    way.exchange(certificate=way.site_pem, server=way.keys.address)
    assert way.came() == {"bern": 7}


def test_a_server_shows_a_certificate_of_its_own_authority(way):
    way.served(certificate=way.pem)
    with pytest.raises(RunError, match="is not the server of this key"):
        way.exchange()
    way.exchange(ends=str(way.authority))
    assert way.came() == {"bern": 7}


def test_a_server_behind_a_proxy_of_its_machine_has_a_path_and_a_socket(way, tmp_path):
    """The proxy ends TLS with the hospital's certificate; the server listens at no port."""
    place = tmp_path / "sock"

    def to() -> socket.socket:
        server = socket.socket(socket.AF_UNIX)
        server.connect(str(place))
        return server

    before = way.proxy(keys=way.pem, to=to)
    way.keys.make(f"https://127.0.0.1:{before.port}/fed")
    way.served(f"unix:{place}")
    assert way.hub.gate.where == f"unix:{place}"
    assert (place.stat().st_mode & 0o777) == 0o660
    assert str(split(way.key.server)) == f"127.0.0.1:{before.port}/fed"
    way.exchange(ends=str(way.authority))
    assert way.came() == {"bern": 7}
    with pytest.raises(RunError, match=r"does not answer as a server of polyfed does \(404"):
        way.exchange(ends=str(way.authority), server=f"https://127.0.0.1:{before.port}/wrong")
    way.hub.close()
    again = way.stack.enter_context(closing(Hub(way.keys, way.said.append, f"unix:{place}")))
    assert again.gate.where == f"unix:{place}", "a socket that nobody listens at is no hindrance"


def test_a_socket_that_systemd_has_opened_is_taken(tmp_path):
    script = "from polyfed_sites.listening import listening; print(listening('0.0.0.0', 1).getsockname()[1])"
    with socket.create_server(("127.0.0.1", 0)) as door:
        os.set_inheritable(door.fileno(), True)
        command = f'LISTEN_PID=$$ LISTEN_FDS=1 exec {sys.executable} -c "{script}" 3<&{door.fileno()}'
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, close_fds=False, check=True)
        assert int(done.stdout) == door.getsockname()[1]
