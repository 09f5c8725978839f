"""Several runs at one port: each site takes part in all of them, with the bits that each has alone; the status page."""

import re
import ssl
import threading
import urllib.error
import urllib.request
from dataclasses import replace
from types import SimpleNamespace as Some

import pytest
import torch
from demo import free_port
from direct import Raw, raw
from safetensors.torch import load_file

pytest.importorskip("uvicorn", reason="needs the extra [sites]")
from hospitals import ALL, NAMES, OPEN, experiment, folder, on_one_machine

from polyfed.base.errors import ConfigError, RunError
from polyfed.runs import stop
from polyfed_sites import wire as m
from polyfed_sites.attendance import Attendance
from polyfed_sites.audit import SERVER, Audit
from polyfed_sites.cli import server
from polyfed_sites.hub import Channel, Hub
from polyfed_sites.keys import Keys, site_key
from polyfed_sites.runs import OPEN as HELD
from polyfed_sites.runs import Runs
from polyfed_sites.server import is_over, serve
from polyfed_sites.site import Site
from polyfed_sites.status import status_page
from polyfed_sites.wire import Message

RUNS = {"two": ('name = "scaffold"', ("bern", "riga")), "three": ('name = "ditto"\nlam = 0.1', NAMES)}


@pytest.fixture
def port(tmp_path):
    keys = Keys(tmp_path / "keys")
    keys.make(f"127.0.0.1:{free_port()}")
    for name in NAMES:
        keys.add(name, tmp_path)
    hub = Hub(keys, lambda _: None, "127.0.0.1", shown=status_page)
    yield keys, hub
    hub.close()


def attending(tmp_path, name, data) -> threading.Thread:
    def site(run):
        policy = replace(OPEN, methods=["scaffold", "ditto"])
        return Site(name, data / f"{name}.csv", tmp_path / name / run, ALL, policy=policy)

    runs, key = Runs(name, site, many=True), site_key(tmp_path / f"{name}.key")

    def done() -> bool:
        return len([*(tmp_path / name).glob("*/report.md")]) == sum(name in who for _, who in RUNS.values())

    found = threading.Thread(target=Attendance(key, runs.answer, done, tmp_path / name, lambda _: None).run)
    found.start()
    return found


def test_runs_at_once_have_the_bits_that_each_has_alone(port, tmp_path):
    """And one that the sites' policies do not allow is refused by name, and costs the others nothing."""
    _, hub = port
    data, ended = folder(tmp_path / "data"), {}

    def train(name, method, who):
        file = experiment(tmp_path / f"{name}.toml", method, rounds=2)
        there = Channel(hub, tmp_path / "runs" / name)
        try:
            ended[name] = serve(file, there, tmp_path / "runs" / name, sites=who)
        except RunError as e:
            ended[name] = str(e)
        there.close()

    (tmp_path / "runs").mkdir()
    wanted = {"refused": ('name = "fedavg"', NAMES), **RUNS}
    going = [threading.Thread(target=train, args=(name, *of)) for name, of in wanted.items()]
    for thread in going:
        thread.start()
    for thread in (*going, *[attending(tmp_path, name, data) for name in NAMES]):
        thread.join(60)
    assert ended.keys() == wanted.keys()
    assert "riga: is asked for the method 'fedavg'; its policy has methods = scaffold, ditto" in ended["refused"]
    for name, (_, who) in RUNS.items():
        assert is_over(tmp_path / "runs" / name)
        (alone := tmp_path / f"alone-{name}").mkdir()
        for site in who:
            (alone / f"{site}.csv").write_bytes((data / f"{site}.csv").read_bytes())
        here = on_one_machine(tmp_path / f"{name}.toml", alone)
        for key, t in here.server.items():
            assert torch.equal(t, ended[name].server[key]), (name, key)
        for i, site in enumerate(who):
            (mine,) = (tmp_path / site).glob(f"{name}-*/model.safetensors")
            for key, t in here.trained.task.layout.named(here.personal[i]).items():
                assert torch.equal(t, load_file(mine)[key]), (name, site, key)


def test_a_site_holds_few_runs_in_memory_and_no_run_names_another_folder(tmp_path):
    made = []

    def site(run):
        made.append(run)
        answer = lambda data: Message(m.Stored()).pack()  # noqa: E731
        return Some(vault=tmp_path / run, answer=answer, finished=run == "over", terms="")

    runs = Runs("bern", site, many=True)
    for name in ("../x", "", "a/b", ".", "x" * 65, "a\n"):
        assert "has no name" in raw(runs.answer(name, b"")).head["error"]
    assert made == []
    names = [f"run-{k}" for k in range(HELD + 1)]
    for name in (*names, *names[1:], "over", names[0]):
        assert raw(runs.answer(name, b"")).head["kind"] == "stored"
    assert made == [*names, "over", names[0]]
    assert not runs.over()


def get(hub: Hub, path: str) -> tuple[int, str]:
    context = ssl.create_default_context(cafile=hub.keys.authority)
    try:
        with urllib.request.urlopen(f"https://127.0.0.1:{hub.port}{path}", context=context, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, ""


def test_the_status_page_says_who_which_round_what_has_left_and_what_is_waited_for(port, tmp_path):
    _, hub = port
    run = Channel(hub, tmp_path / "heart<b>")
    run.run, run.said = "heart-1", "3 sites have joined <script>"
    turn = {"run": "heart-1", "base": (3, 0), "keep": (2, 0)}
    run.rounds = 10
    run.push({n: Message(m.Train(**turn, t=4, phase=0, n=3, scale=1.0)) for n in ("bern", "oslo")})
    hub.online = {"bern": "10.0.0.7"}
    run._count("bern", 12_345, "trained t 3 phase 0")
    hub.queued.append("lung")
    for path in (f"{hub.path}x", hub.path[:-1], "/status", "/status/", "/status/é"):
        assert get(hub, urllib.request.quote(path))[0] == 404
    status, page = get(hub, hub.path)
    assert status == 200
    away = {name for name, _ in hub.keys.accepted().values()} - {"bern"}
    assert away
    assert f"Connected: bern. Not connected: {', '.join(sorted(away))}." in page, "who is missing has a name"
    for said in (
        "Round 5 of 10; waiting for bern, oslo", "10.0.0.7", "12.3 kB", "trained t 3 phase 0", "not connected", "lung",
        "heart&lt;b&gt;", "joined &lt;script&gt;",
    ):  # fmt: skip
        assert said in page, said
    assert len(re.findall(r">[\d.]+ m?s<", page)) == 2, "since when"
    run.over = "Finished"
    assert "0 going, 1 over" in get(hub, hub.path)[1]


def test_the_page_counts_on_after_the_server_was_killed(tmp_path):
    hub = Some(runs=[])
    for _ in range(2):
        there = Channel(hub, tmp_path, audit=Audit(tmp_path, SERVER))
        there.note_answered("bern", Some(digest="x"), Raw({"kind": "stored"}).pack())
    assert there.left["bern"].answers == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("a.toml x/a.toml", "a second experiment named 'a'"), ("a.toml b.toml --sites c=2", "no run 'c'"),
        ("a.toml --sites a=bern,ols", "'ols' has no valid key"),
    ],
)  # fmt: skip
def test_runs_that_cannot_be_told_apart_are_refused(cli, port, words, said):
    cli("server", *words.split(), "--keys", port[0].folder, "--port", str(free_port())).line(2, said)


def test_a_folder_is_a_queue_of_runs_of_which_some_go_at_once(tmp_path, monkeypatch):
    """One that is put there later is taken too; one that fails ends alone; one that is over is left alone."""
    (tmp_path / "queue").mkdir()
    for name in ("a", "b", "done"):
        (tmp_path / "queue" / f"{name}.toml").touch()
    (tmp_path / "runs" / "done").mkdir(parents=True)
    (tmp_path / "runs" / "done" / "sites.json").write_text('{"over": true}')
    going, most, trained, said, asked = [], [], [], [], threading.Event()

    def train(o, file, folder, sites, hub, say):
        going.append(file.stem)
        most.append(len(going))
        asked.wait(0.1)
        going.remove(file.stem)
        trained.append((file.stem, folder.name, sites))
        if file.stem == "a":
            raise ConfigError("rounds: found -1, expected more")
        if file.stem == "b":
            (tmp_path / "queue" / "later.toml").touch()
        if file.stem == "later":
            asked.set()
        return 0

    monkeypatch.setattr(server, "train", train)
    monkeypatch.setattr(server, "LOOK", 0.02)
    o = Some(experiment=[tmp_path / "queue"], at_once=1, resume=True, force=False, quiet=True)
    hub = Some(queued=[], say=said.append)
    assert server.Queue(o, hub, tmp_path / "runs", lambda run: 2).run(asked) == stop.STOPPED
    assert trained == [("a", "a", 2), ("b", "b", 2), ("later", "later", 2)]
    assert set(most) == {1}
    assert said == ["a: rounds: found -1, expected more", "done: is over"]
