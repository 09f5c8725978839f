"""Three terminals by the operators' guide, with its own commands: a server that shows the hospital's certificate, a
site behind a proxy that wants a password, and one behind a proxy that opens TLS.
"""

import json
import re
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import demo
import pytest

pytest.importorskip("uvicorn", reason="needs the extra [sites]")
from proxies import Proxy
from test_demo_network import compare, short

from polyfed_sites.keys import Keys

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "sites.md").read_text(encoding="utf-8")
NAMES = ("bern", "oslo")
TERMINALS = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import demo
demo.load()
going = []
for status, folder, command in json.loads(sys.argv[2]):
    os.chdir(folder)
    if status is None:
        going.append(demo.start(*command))
    elif demo.run(*command) != status:
        sys.exit(f"expected exit status {status}")
for p in reversed(going):
    p.join(120)
sys.exit(max(1 if p.exitcode is None else abs(p.exitcode) for p in going))
"""


def option(text: str, **put: object) -> list[str]:
    """Words of the guide's table, with these in place of its examples."""
    assert text in PAGE
    for example, own in put.items():
        text = text.replace(example, str(own))
    return text.split()


def test_a_hospital_has_its_model_by_the_guide_with_its_own_authority_and_proxies(tmp_path, cli):
    there, own, port = tmp_path / "server", Keys(tmp_path / "own"), demo.free_port()
    there.mkdir()
    own.make("127.0.0.1")
    pem, files = tmp_path / "server.pem", demo.hospitals(tmp_path / "hospitals", 2).values()
    pem.write_bytes(own.certificate.read_bytes() + own.private.read_bytes())
    short(there / "experiment.toml", 2)
    for name, file in zip(NAMES, files, strict=True):
        (tmp_path / name).mkdir()
        shutil.move(file, tmp_path / name / f"{name}.csv")
        shutil.copy(own.authority, tmp_path / name / "authority.pem")
    section = PAGE.partition("## From an empty machine")[2].partition("\n## ")[0]
    init, *adds, server, client = (line.split()[1:] for line in re.findall(r"(?m)^polyfed .*$", section))
    assert [words[0] for words in (init, *adds, server, client)] == ["keys", "keys", "keys", "server", "client"]
    steps = [[0, there, [word.replace("fed.example.org:8000", f"127.0.0.1:{port}") for word in init]]]
    steps += [[0, there, [*add, "--out", f"../{name}"]] for add, name in zip(adds, NAMES, strict=True)]
    shown = option("--certificate server.pem", **{"server.pem": pem})
    steps.append([None, there, [*server, "--host", "127.0.0.1", *shown]])
    with closing(Proxy(keys=pem)) as opens, closing(Proxy("oslo:s3cret")) as asks:
        seen = []
        opens.change = lambda data: (seen.append(data), data)[1]
        ways = {"bern": f"127.0.0.1:{opens.port}", "oslo": f"oslo:s3cret@127.0.0.1:{asks.port}"}
        for name, way in ways.items():
            site = [word.replace("bern", name) for word in client] + ["--yes", "policy"]
            proxy = option("--proxy http://NAME:WORD@HOST:PORT", **{"NAME:WORD@HOST:PORT": way})
            wrong = [*site, "--proxy", f"http://{way.rpartition('@')[2]}"]
            steps.append([1, tmp_path / name, [*wrong, "--policy", "none.toml"]])
            steps.append([None, tmp_path / name, [*site, *proxy]])
            assert 'tls-ends-at = "authority.pem"' in PAGE
            (tmp_path / name / "policy.toml").write_text('tls-ends-at = "authority.pem"\n')
            (tmp_path / name / "none.toml").write_text("")
        words = (sys.executable, "-c", TERMINALS, Path(demo.__file__).parent, json.dumps(steps, default=str))
        done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr
        address = f"127.0.0.1:{port}"
        assert (opens.asked, asks.asked) == ([address] * len(opens.asked), [address] * len(asks.asked))
    lines = [line for line in done.stderr.splitlines() if line.startswith("polyfed: ")]
    assert len(lines) == 2
    assert re.search(r"is not the server of this key: .* the policy's tls-ends-at", lines[0])
    assert re.search(r"wants a name and a password, .*\(407 .*--proxy", lines[1])
    assert b"polyfed-says" in b"".join(seen), "the proxy has read what went through it"
    for name in NAMES:
        shutil.copytree(tmp_path / name / "vault", tmp_path / "models" / name)
        (tmp_path / "models" / "hospitals").mkdir(exist_ok=True)
        shutil.copy(tmp_path / name / f"{name}.csv", tmp_path / "models" / "hospitals")
        assert cli("audit-log", there / "runs" / "first", tmp_path / name / "vault").status == 0
    compare(tmp_path / "models", there / "experiment.toml", tmp_path / "data")
