"""polyfed on Flower as it is installed, on loopback: `flwr run` in its simulation and on a SuperLink with SuperNodes,
with the digests of `polyfed run --set chunk=1` and the same personal models."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import demo
import pytest
import torch
from hospitals import CLIENT, NAMES, experiment, folder, on_one_machine
from safetensors.torch import load_file
from secured import COLUMNS, SECURE, fingerprint

from polyfed.cli import call
from polyfed.runs.folder import digests
from polyfed_flower import process
from polyfed_flower.node import Node, ask, node_of

BIN = Path(sys.executable).parent
POLICY = "least-rows = 1\nleast-batch = 1\nleast-count = 1\npooled = 'medians'\ndigits = 17\nseparable = true\n"
pytestmark = pytest.mark.skipif(
    not (BIN / "flower-superlink").exists() or version("flwr") < "1.41",
    reason="needs flwr from 1.41 on, whose SuperLink has one port",
)


class Flower:
    """A SuperLink of a test's own, in a home of its own; what it starts ends with it."""

    def __init__(self, place: Path, *words: str):
        self.place, self.stack, self.port = place, contextlib.ExitStack(), str(demo.free_port())
        self.home = os.environ | {
            "FLWR_HOME": str(place / "home"), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "RAY_USAGE_STATS_ENABLED": "0",
        }  # fmt: skip
        (place / "home").mkdir()
        text = f'[superlink.mine]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        (place / "home/config.toml").write_text(f'[superlink]\ndefault = "mine"\n\n{text}')
        self.start("flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", self.port, *words)
        while socket.socket().connect_ex(("127.0.0.1", int(self.port))):
            time.sleep(0.1)

    def start(self, name: str, *words: str) -> None:
        with (self.place / f"{name}.log").open("ab") as log:
            process = subprocess.Popen([BIN / name, *words], stdout=log, stderr=log, env=self.home)
        self.stack.callback(process.wait, 60)
        self.stack.callback(process.terminate)

    def node(self, **config: str) -> None:
        """A SuperNode."""
        given = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        own = "--port", str(demo.free_port())
        self.start(
            "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{self.port}", *own, "--node-config", given
        )

    def run(self, app: Path, *words: str) -> Path:
        """The folder of a run that has finished."""
        command = [BIN / "flwr", "run", app, "mine", "--stream", *words]
        done = subprocess.run(command, env=self.home, capture_output=True, text=True, timeout=900)
        assert "finished: " in done.stdout, done.stdout + done.stderr
        return Path(done.stdout.partition("finished: ")[2].split()[0])


@pytest.fixture
def flower(tmp_path):
    with contextlib.ExitStack() as stack:

        def begin(*words):
            there = Flower(tmp_path, *words)
            stack.callback(there.stack.close)
            return there

        yield begin


def app_of(place: Path, data: Path, method: str, columns: str = CLIENT) -> Path:
    text = f'name = "{method}"\nlr = 0.1', f'name = "./{data.name}"\n{columns}'
    file = experiment(place / "study.toml", *text, rounds=2, **{"evaluate-every": 2})
    assert call(["flower", "new", str(file), str(place / "app")]) == 0
    return place / "app"


def same(run: Path, app: Path, data: Path, vaults: Path, names=NAMES) -> None:
    """A run on Flower has the digest of one on this machine, and the sites its personal models; scores of models of
    clients' own are the same too, where a common one is scored on everybody's rows at once here."""
    one = on_one_machine(app / "experiment.toml", data)
    there, here = json.loads((run / "summary.json").read_text())["digest"], digests(one)
    assert there["server"] == here["server"]
    assert there["history"] == here["history"] or one.trained.algorithm.name not in ("ditto", "fedacs")
    for i, name in enumerate(names):
        mine = one.trained.task.layout.named(one.personal[i])
        (path,) = vaults.glob(f"{name}/experiment-*/model.safetensors")
        assert all(torch.equal(t, load_file(path)[key]) for key, t in mine.items()), name


@pytest.mark.parametrize("method", ["ditto", "fedcet", "fpfc"])
def test_a_simulation_has_the_digest_of_one_machine(flower, tmp_path, method):
    pytest.importorskip("ray", reason="Flower simulates with Ray")
    data = folder(tmp_path / "data")
    app = app_of(tmp_path, data, method)
    run = flower("--simulation").run(app, "--federation-config", "num-supernodes=3")
    same(run, app, data, app / "runs/vaults")


def ended(node: Node) -> None:
    """The process of a node's site ends where it is given other settings."""
    if node.socket.exists():
        ask(node.socket, {"node": [*node._replace(yes="")]})


def deployed(flower, place: Path, data: Path, app: Path, names, pins: str = "") -> Path:
    """The folder of a run on a SuperLink. The first site is a process of its own; SuperNodes start the others'."""
    there, first = flower(), place / "first.sock"
    (place / "policy.toml").write_text(POLICY + pins)
    how = {"policy": str(place / "policy.toml"), "yes": "policy", "allow": "pooled,labels"}
    words = [word for key, value in how.items() for word in (f"--{key}", value)]
    at = [{"data": str(data / f"{name}.csv"), "vault": str(place / name)} for name in names]
    there.start("polyfed", "flower", "site", str(first), "--data", at[0]["data"], "--vault", at[0]["vault"], *words)
    there.node(site=str(first))
    for config in at[1:]:
        there.node(**config, **how)
        there.stack.callback(ended, node_of({**config, **how}))
    return there.run(app)


@pytest.mark.parametrize("method", ["scaffold", "fedacs"])
def test_a_superlink_with_two_supernodes_has_the_digest_of_one_machine(flower, tmp_path, method):
    data = folder(tmp_path / "data")
    (data / f"{NAMES[2]}.csv").unlink()
    app = app_of(tmp_path, data, method)
    run = deployed(flower, tmp_path, data, app, NAMES[:2])
    same(run, app, data, tmp_path, NAMES[:2])


def test_sums_are_secure_on_a_superlink(flower, tmp_path):
    data, keys = folder(tmp_path / "data"), []
    for name in NAMES:
        node = node_of({"data": str(data / f"{name}.csv"), "vault": str(tmp_path / name)})
        keys.append(fingerprint(process.answers(node).who()["key"]))
    app = app_of(tmp_path, data, "fedavg", COLUMNS + SECURE)
    run = deployed(flower, tmp_path, data, app, NAMES, f"peers = {keys}\n")
    told = [json.loads(line) for line in (run / "audit.jsonl").read_text().splitlines()]
    kinds = {line["kind"].split()[0] for line in told if line.get("kind")}
    assert "masked" in kinds
    assert not kinds & {"trained", "statistics"}
