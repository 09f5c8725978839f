"""Sites over Flower: real processes, TLS and keys; the same bits as on one machine."""

import http.client
import json
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra [flower]")
from direct import Raw
from network import SITES, Federation, loops, private

from polyfed.core.schedule import Asynchronous, Delays, Uniform
from polyfed_sites.keys import Keys, split


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    found = Federation(tmp_path_factory.mktemp("federation"))
    yield found
    found.close()


@pytest.mark.long
@pytest.mark.parametrize(
    "label", ["fedavg", "scaffold", "fpfc", "fedacs", "fedslr", "fedcet", "pacfl", "fedspa", "fedbuff"]
)
def test_real_sites_compute_the_same_bits_as_one_machine(there, label):
    """Server state and private tensors; and the ledger has the bytes that one machine bills."""
    schedule = Asynchronous(Delays("uniform", 1, 9)) if label == "fedbuff" else Uniform()
    here, far = loops(there, label, schedule)
    for _ in range(5 if label == "fedbuff" else 2):
        assert np.array_equal(here.step(), far.step())
    assert here.ledger.totals() == far.ledger.totals()
    for name in here.server:
        assert torch.equal(here.server[name], far.server[name]), f"server {name}"
    for i, mine in enumerate(private(there, label, far)):
        for name, t in here.engine.rows.tensors.items():
            assert torch.equal(t[i], mine[name]), f"{SITES[i]} {name}"


def attending(there, key, folder, seconds=240) -> str:
    """What the operator of a site sees that comes with this key."""
    command = [sys.executable, str(Path(__file__).parent / "flower_site.py"), str(key), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    assert done.returncode
    return done.stdout + done.stderr


@pytest.mark.long
def test_who_has_no_valid_key_is_refused_and_told_so(there, tmp_path):
    """A key of another federation, whose server it takes this for; one that has ended; a port without TLS."""
    other = Keys(tmp_path / "other")
    other.make(there.keys.address)
    foreign = other.add("oslo", tmp_path)
    assert "is not the server of this key" in attending(there, foreign, tmp_path / "a")
    ended = there.keys.add("riga", tmp_path, days=-1)
    assert "its key is revoked, expired or unknown" in attending(there, ended, tmp_path / "b")
    with socket.socket() as plain:
        plain.bind(("127.0.0.1", 0))
        plain.listen()
        says = json.loads(ended.read_text()) | {"server": f"127.0.0.1:{plain.getsockname()[1]}"}
        ended.write_text(json.dumps(says))
        threading.Thread(
            target=lambda: plain.accept()[0].sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"), daemon=True
        ).start()
        assert "does not speak TLS" in attending(there, ended, tmp_path / "c")


@pytest.mark.long
def test_the_port_gives_outsiders_nothing(there):
    """No run can be started, no key registered, no work taken; in plain text nothing is answered at all."""
    host, port = split(there.keys.address)
    context = ssl.create_default_context(cafile=str(there.keys.authority))
    for path, body, status in (
        ("/v1/control/start-run", b"", 404),
        ("/v1/control/register-node", b"", 404),
        ("/v1/runtime/acquire-task", b"", 404),
        ("/v1/fleet/register-node", b"", 404),
        ("/v1/fleet/pull-messages", b"", 401),
    ):
        there_ = http.client.HTTPSConnection(host, port, context=context)
        there_.request("POST", path, body, {"content-type": "application/protobuf"})
        assert there_.getresponse().status == status, path
    huge = http.client.HTTPSConnection(host, port, context=context)
    huge.putrequest("POST", "/v1/fleet/push-object")
    huge.putheader("content-length", str(1 << 40))
    huge.endheaders()
    assert huge.getresponse().status == 413  # although nothing of it was sent
    plain = http.client.HTTPConnection(host, port)
    plain.request("GET", "/health")
    with pytest.raises((http.client.HTTPException, OSError)):
        plain.getresponse()


@pytest.mark.long
def test_a_site_is_one_process_and_listens_nowhere(there):
    there.ask(kind="echo")
    listening = [line.split() for file in ("tcp", "tcp6") for line in Path("/proc/net", file).read_text().splitlines()]
    inodes = {f"socket:[{words[9]}]" for words in listening if words[3] == "0A"}
    for process in there.processes.values():
        files = Path(f"/proc/{process.pid}/fd").iterdir()
        assert not inodes & {str(file.readlink()) for file in files}
        assert not [p for p in Path(f"/proc/{process.pid}/task").glob("*/children") if p.read_text()]


@pytest.mark.long
def test_a_revoked_site_is_dropped_from_a_run_that_is_under_way(there):
    name = SITES[2]
    there.transport.push({name: Raw({"kind": "echo", "seconds": 30})})
    there.keys.revoke(name)
    assert "its key is not accepted" in there.transport.pull([name], seconds=30)[name]
    assert name not in there.transport.sites()
