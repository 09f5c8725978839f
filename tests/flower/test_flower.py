"""polyfed over Flower's messages, in this process: the bits of one machine, who is asked, and what is refused."""

import threading
import time
import tomllib
from importlib.metadata import version

import numpy as np
import pandas as pd
import pytest
import secured
import torch
from direct import raw
from hospitals import NAMES, POOLED, experiment, folder, on_one_machine
from safetensors.torch import load_file

pytest.importorskip("flwr.app", reason="needs the extra [flower]")
from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp
from nodes import Nodes, context

from polyfed.base.errors import ConfigError, PolyfedError
from polyfed.cli import call
from polyfed_flower import client as own
from polyfed_flower import process, server
from polyfed_flower.client import answered, client, packed
from polyfed_flower.node import node_of, written
from polyfed_sites.audit import compare, read

DITTO, FPFC, FEDAVG = 'name = "ditto"\nlr = 0.1', 'name = "fpfc"', 'name = "fedavg"\nlr = 0.1'
OPEN = "least-rows = 1\nleast-batch = 1\nleast-count = 1\npooled = 'medians'\ndigits = 17\nseparable = true\n"


@pytest.fixture(autouse=True)
def _(monkeypatch):
    monkeypatch.setattr(server, "PAUSE", 0.001)
    monkeypatch.setattr(server, "LOOK", 0.001)
    monkeypatch.setattr(process, "_simulated", {})
    monkeypatch.setattr(server.report, "write_report", lambda _: None)  # has tests of its own


def simulation(place, data, n=3, **config):
    """The nodes of Flower's simulation."""
    nodes = {k + 10: (client(), {"partition-id": k, "num-partitions": n}) for k in range(n)}
    return Nodes(nodes, {"sites": "3", "out": str(place / "out"), "data": str(data)} | config)


def deployment(place, data, names=NAMES, **config):
    """SuperNodes, each with a file, a vault and a process that here is a thread."""
    (place / "policy.toml").write_text(OPEN)
    nodes = {}
    for k, name in enumerate(names):
        given = {
            "data": str(data / f"{name}.csv"),
            "vault": str(place / name),
            "yes": "policy",
            "allow": "pooled,labels",
        }
        nodes[k + 10] = client(), given | {"policy": str(place / "policy.toml")} | config
    return Nodes(nodes, {"sites": str(len(names)), "out": str(place / "out")})


@pytest.fixture
def here(monkeypatch):
    """The processes of sites are in this one."""
    there = {}

    def ask_own(node, head, data=b""):
        found = there.setdefault(node, process.answers(node, lambda _: None))
        return ({}, found.answer(head["run"], data)) if "run" in head else (found.who(), b"")

    monkeypatch.setattr(own, "ask_own", ask_own)
    return there


def same(found, one, place):
    assert all(torch.equal(t, found.server[name]) for name, t in one.server.items())
    for i, name in enumerate(NAMES):
        mine = one.trained.task.layout.named(one.personal[i])
        (path,) = place.glob(f"**/{name}/study-*/model.safetensors")
        assert all(torch.equal(t, load_file(path)[key]) for key, t in mine.items()), name


def test_a_simulation_has_the_bits_of_one_machine_and_its_metrics_are_flowers_too(tmp_path):
    data = folder(tmp_path / "data")
    file = experiment(tmp_path / "study.toml", FPFC, POOLED)
    grid = simulation(tmp_path, data, 5)  # more nodes than sites
    found, state = grid.run(file)
    same(found, on_one_machine(file, data), tmp_path)
    told = [reply.content["metrics"] for _, m, reply in grid.heard if m.metadata.message_type == "evaluate"]
    assert told
    assert all({"loss", "accuracy"} <= t.keys() for t in told)
    assert state["polyfed"]["test_accuracy"] == found.clients["test_accuracy"].tolist()
    assert {m.metadata.message_type for _, m, _ in grid.heard} == {"query", "train", "evaluate"}


def test_supernodes_that_are_killed_and_come_back_as_other_nodes_change_no_bit(tmp_path, here):
    data = folder(tmp_path / "data")
    file = experiment(tmp_path / "study.toml", DITTO, POOLED)
    grid = deployment(tmp_path, data)

    def killed(k, message):
        """A site's second training kills its node, which comes back under another number."""
        trained = sum(m.metadata.message_type == "train" and k == who for who, m, _ in grid.heard)
        if k < 20 and trained == 1 and message.metadata.message_type == "train":
            grid.gone.add(k)
            here.clear()
            grid.nodes[k + 10] = grid.nodes[k]

    grid.before = killed
    found, _ = grid.run(file)
    same(found, on_one_machine(file, data), tmp_path)
    assert grid.gone == {10, 11, 12}
    for name in NAMES:
        (log,) = (tmp_path / name).glob("study-*/audit.jsonl")
        assert "the same at both ends" in compare(read(tmp_path / "out/7"), read(log))


def test_a_server_that_was_stopped_goes_on_and_a_quorum_does_without_a_site(tmp_path, here):
    data = folder(tmp_path / "data")
    file = experiment(tmp_path / "study.toml", DITTO, POOLED)
    grid = deployment(tmp_path, data)

    def stopped(k, message):
        if "t 2" in message.metadata.group_id:
            raise KeyboardInterrupt

    grid.before = stopped
    with pytest.raises(KeyboardInterrupt):
        grid.run(file)
    grid.before = lambda k, message: None
    found, _ = grid.run(file, resume="7")
    same(found, on_one_machine(file, data), tmp_path)
    lines = []
    again = deployment(tmp_path, data)
    again.before = lambda k, message: again.gone.add(11) if "train" in message.metadata.group_id else None
    found, _ = again.run(file, lines, resume="", out=str(tmp_path / "other"), wait=0.2, quorum=2)
    assert found.status == "finished"
    assert any("oslo is missing: no answer within 0.2 s" in line for line in lines)


def test_asked_again_a_site_answers_the_same_without_training_again(tmp_path, here, monkeypatch):
    data = folder(tmp_path / "data")
    grid = deployment(tmp_path, data)
    grid.run(experiment(tmp_path / "study.toml", FEDAVG, POOLED, rounds=1))
    asked = [(k, m, r) for k, m, r in grid.heard if m.metadata.message_type == "train"]
    here.clear()
    monkeypatch.setattr(process.Runs, "answer", None)
    for k, message, reply in asked:
        app, config = grid.nodes[k]
        assert app(message, context(k, config, {})).content["message"] == reply.content["message"]


def test_a_process_that_listens_answers_and_ends_where_settings_are_others(tmp_path):
    data = folder(tmp_path / "data")
    (tmp_path / "policy.toml").write_text(OPEN)
    node = node_of({"data": str(data / "bern.csv"), "vault": str(tmp_path / "vault"), "yes": "policy"})
    thread = threading.Thread(target=process.listen, args=(node.socket, process.answers(node, lambda _: None)))
    thread.start()
    while not node.socket.exists():
        time.sleep(0.01)
    message = Message(packed({}), dst_node_id=3, message_type="query")
    asked = [answered(message, context(3, {"site": str(node.socket)}, {})) for _ in range(2)]
    assert asked[0] == asked[1]
    assert asked[0]["polyfed"]["site"] == "bern"
    assert asked[0]["polyfed"]["key"].startswith("ecdsa-sha2-nistp256 ")
    with pytest.raises(FileNotFoundError):
        own.ask(tmp_path / "nobody", {})
    assert own.ask(node.socket, {"node": [*node._replace(yes="")]}) == ({"ends": True, "bytes": 0}, b"")
    thread.join(10)
    assert not thread.is_alive()


def test_consent_is_the_digest_that_a_refusal_names(tmp_path, here):
    data = folder(tmp_path / "data")
    file = experiment(tmp_path / "study.toml", FEDAVG, POOLED, rounds=1)
    with pytest.raises(PolyfedError) as e:
        deployment(tmp_path, data, yes="").run(file)
    said = str(e.value)
    for name in NAMES:
        assert f"{name}: its operator has agreed to nothing, and the terms are " in said
        digest = said.partition(f"{name}: its operator")[2].partition("terms are ")[2][:16]
        assert f'read terms.txt in its vault, then agree with yes="{digest}" in its --node-config' in said
        assert f"all of this is {digest}" in (tmp_path / name / "terms.txt").read_text()
    grid = deployment(tmp_path, data)
    for k, name in zip(grid.nodes, NAMES, strict=True):
        grid.nodes[k][1]["yes"] = said.partition(f"{name}: its operator")[2].partition("terms are ")[2][:16]
    found, _ = grid.run(file, out=str(tmp_path / "agreed"))
    assert found.status == "finished"


def test_sums_are_secure_by_keys_that_nodes_make(tmp_path, here):
    data = secured.folder(tmp_path / "data")
    file = experiment(tmp_path / "study.toml", FEDAVG, secured.COLUMNS + secured.SECURE, rounds=1)
    keys = []
    for name in secured.FOUR:
        node = node_of({"data": str(data / f"{name}.csv"), "vault": str(tmp_path / name)})
        keys.append(secured.fingerprint(process.answers(node).who()["key"]))
    grid = deployment(tmp_path, data, secured.FOUR)
    (tmp_path / "policy.toml").write_text(f"{OPEN}peers = {keys}\n")
    found, _ = grid.run(file)
    assert found.status == "finished"
    told = [r.content["message"]["bytes"].data for _, m, r in grid.heard if m.metadata.message_type == "train"]
    assert {raw(data).head["kind"] for data in told} == {"masked"}
    carried = server.Carried(grid, None, print)
    carried.nodes = {"bern": server.Node(3, "")}
    with pytest.raises(ConfigError, match=r"privacy\.sums: found secure, and bern has no key"):
        carried.register()


def test_rows_may_be_made_in_python(tmp_path):
    x, y = np.arange(12.0, dtype=np.float32).reshape(6, 2), np.array([0, 1, 0, 1, 1, 0])
    first = written({"x": torch.as_tensor(x), "y": y}, tmp_path)
    before = first.stat().st_mtime_ns
    assert written({"x": x, "y": y}, tmp_path) == first
    assert first.stat().st_mtime_ns == before
    assert written(pd.DataFrame({"a": [1, 2], "ill": ["y", "n"]}), tmp_path).read_text() == "a,ill\n1,y\n2,n\n"
    assert node_of({"vault": str(tmp_path), "name": "bern"}, {"x": x, "y": y}).data == str(first)


@pytest.mark.parametrize(("config", "line"), [
    ({}, "has no data: start its SuperNode with --node-config 'data=\"FILE\" vault=\"DIR\"'"),
    ({"data": "rows.csv"}, "has no vault, a folder for what the site keeps"),
    ({"data": "absent.csv", "vault": "v"}, "absent.csv is not there"),
    ({"data": "rows.csv", "vault": "v", "yes": "y"}, "yes: found 'y', expected the digest of the terms, or policy"),
    ({"data": "rows.csv", "vault": "v", "metrics": "all"}, "metrics: found 'all', expected own, aggregate, none"),
    ({"data": "rows.csv", "vault": "v", "name": "a/b"}, "name: found 'a/b'"),
    ({"data": "rows.csv", "vault": "v" * 120}, "is too long a path for the socket in it"),
    ({"site": "nobody.sock"}, "its site does not answer (FileNotFoundError"),
])  # fmt: skip
def test_a_node_that_cannot_answer_says_why_in_one_line(config, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    grid, lines = Nodes({3: (client(), config)}, {"sites": "1", "out": "out"}), []

    carried = server.Carried(grid, None, lines.append)
    assert carried.sites() == []
    (found,) = lines
    assert found.startswith("node 3: ")
    assert line in found
    assert "\n" not in found


def test_two_nodes_with_one_name_are_refused_by_their_numbers(tmp_path, here):
    data = folder(tmp_path / "data")
    grid = deployment(tmp_path, data)
    grid.nodes[11][1]["name"] = "bern"
    with pytest.raises(PolyfedError, match="two nodes are called bern, 10 and 11; give each SuperNode a name") as e:
        grid.run(experiment(tmp_path / "study.toml", FEDAVG, POOLED))
    assert "\n" not in str(e.value)


def test_what_a_node_has_not_installed_is_said_by_name(tmp_path, here):
    data = folder(tmp_path / "data")
    grid = deployment(tmp_path, data)
    grid.run(experiment(tmp_path / "study.toml", FEDAVG, POOLED, rounds=1))
    k, join, _ = next(heard for heard in grid.heard if heard[1].metadata.group_id == "join")
    app, config = grid.nodes[k]
    asked = join.content["message"]["bytes"].data
    same = raw(asked).head["versions"]
    for change, line in (
        ({"algorithm": {"name": "fed-mine"}}, "is asked for the method 'fed-mine', which is not installed here"),
        (
            {"versions": same | {"polyfed": "9"}},
            f"has polyfed {version('polyfed')}, the server has 9; install the same",
        ),
        ({"versions": same | {"mine": "1"}}, "mine is not installed, the server has 1; install the same"),
    ):
        join.content["message"] = packed({}, raw(asked).saying(**change).pack())["message"]
        reply = app(join, context(k, config, {})).content["message"]["bytes"].data
        assert raw(reply).head["error"] == f"bern: {line}"
    said = Message(packed({"run": "study"}), dst_node_id=k, message_type="query")
    assert "polyfed" in answered(said, context(k, config, {}))
    said.content = RecordDict()
    assert server._said(said) == "not a message (KeyError)"
    assert answered(said, context(k, config, {}))["polyfed"]["error"].startswith("its site does not answer (KeyError")


def test_an_app_is_written_once_and_its_files_are_apps(tmp_path, capsys, monkeypatch):
    data = folder(tmp_path / "data")
    file = experiment(tmp_path / "study.toml", DITTO, f'name = "./{data.name}"\n{POOLED}')
    app = tmp_path / "My App"
    assert call(["flower", "new", str(file), str(app)]) == 0
    assert "flwr run" in capsys.readouterr().out
    assert call(["flower", "new", str(file), str(app)]) == 2
    assert "already exists; nothing was written" in capsys.readouterr().err
    spaces = {}
    for name in ("server_app", "client_app"):
        spaces[name] = {"__file__": str(app / f"{name}.py")}
        exec((app / f"{name}.py").read_text(), spaces[name])
    assert isinstance(spaces["server_app"]["app"], ServerApp)
    says = tomllib.loads((app / "pyproject.toml").read_text())
    assert says["project"]["name"] == "my-app"
    assert says["tool"]["flwr"]["app"]["config"] == {
        "sites": "3", "out": str(app / "runs"), "resume": "", "wait": 0.0, "quorum": 0, "data": str(data),
    }  # fmt: skip
