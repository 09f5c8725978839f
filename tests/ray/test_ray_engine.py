"""Clients on Ray actors: the same numbers as on one machine, and the same bits for every number of actors."""

import itertools
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.base.errors import ConfigError, RunError
from polyfed.base.randomness import client_keys
from polyfed.compute.batches import Work
from polyfed.compute.task import Task
from polyfed.core.engine import Lost, Silent
from polyfed.core.rounds import Loop
from polyfed.core.schedule import Uniform
from polyfed.core.worker import Plan
from polyfed.engines.local import LocalEngine, make_rows
from polyfed.runs.rehearsal import sums

ray = pytest.importorskip("ray", reason="needs the extra [ray]")
engine_module = pytest.importorskip("polyfed_ray.engine")
grown = pytest.importorskip("polyfed_ray.cluster")

N = 7
NAMES = [f"site{i}" for i in range(N)]
PLAN = Plan(1, 1, "cpu", "closed form")


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))


def task() -> Task:
    return Task(net(), device="cpu")


def federation() -> pf.Federation:
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(m, 6)).astype(np.float32), rng.integers(3, size=m)) for m in (9, 20, 14, 30, 5, 11, 8)]
    return pf.Federation.from_arrays(clients, names=NAMES, classes=3, test_fraction=0.2)


def loop(method, workers: int | None, fraction=1.0, folder=None) -> Loop:
    fed, work = federation(), Work(epochs=2, batch_size=4)
    data = {"train": fed.train, "test": fed.test}
    if workers is None:
        rows = make_rows(method, task(), N, N, None)
        engine = LocalEngine(task(), data, rows, client_keys(NAMES), work, 3, PLAN)
    else:
        engine = engine_module.RayEngine(task, data, NAMES, method, work, 3, PLAN, workers=workers, folder=folder)
        OPEN.append(engine)
    wanted, _ = sums(method, task(), (6,), 3, 3)
    return Loop(task(), fed.train.counts, NAMES, method, Uniform(fraction), engine, 3, sums=wanted)


OPEN = []


@pytest.fixture(autouse=True)
def closed():
    yield
    while OPEN:
        OPEN.pop().close()


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=6, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    engine_module.IDLE.clear()
    ray.shutdown()


def test_sums_have_the_same_bits_whatever_the_number_of_actors():
    """What they are, and that of every method, tests/conformance/test_ray.py shows with two."""
    here, *there = (loop(pf.Scaffold(0.1), workers, 0.6) for workers in (None, 1, 3))
    for one in (here, *there):
        for _ in range(2):
            one.step()
    for one in there:
        for name in here.server:
            assert torch.equal(one.server[name], there[0].server[name]), name
        assert torch.equal(one.personal(np.arange(N)), there[0].personal(np.arange(N)))
        assert np.allclose(one.scored("test")["loss"], here.scored("test")["loss"], atol=1e-5)


def of_the_column(output, target):
    return (output[:, 0] - target).square().mean()


@pytest.mark.parametrize(
    ("outputs", "settings"), [(3, {"class_weights": "balanced"}), (1, {"loss": of_the_column})], ids=["weights", "loss"]
)
def test_actors_train_the_task_that_was_checked(outputs, settings):
    """With its class weights, and what its own loss wants its outputs to be."""
    clients = [(x, y if outputs > 1 else x.sum(1)) for x, y in map(federation().train.client, range(N))]
    fed = pf.Federation.from_arrays([(x.numpy(), y.numpy()) for x, y in clients], classes=3 if outputs > 1 else None)
    start = nn.Linear(6, outputs)
    here, there = (
        pf.fit(start, fed, pf.FedAvg(0.1), rounds=2, workers=2, engine=engine, **settings).personal
        for engine in ("local", "ray")
    )
    torch.testing.assert_close(here, there)


def test_only_sums_travel_where_sums_are_enough():
    """An actor sends one vector for its clients and no rows."""
    one = loop(pf.FedAvg(0.1), 2)
    answers = []
    got = one.engine._got
    one.engine._got = lambda jobs: answers.append(got(jobs)) or answers[-1]
    one.step()
    done = answers[0]
    assert [d.rows for d in done] == [{}, {}]
    sent = sum(t.numel() for d in done for sums in d.sums.values() for t in sums.values())
    assert sent == 2 * one.task.p


def kill(one: Loop, k: int, by: int = signal.SIGKILL) -> None:
    os.kill(ray.get(one.engine._ask(k, "pid")), by)


def test_an_actor_that_hangs_costs_a_round_and_not_the_run(monkeypatch):
    """It is given up after a while, though it is alive."""
    expected, found = loop(pf.FedAvg(0.1), 2), loop(pf.FedAvg(0.1), 2)
    for one in (expected, found):
        one.step()
    monkeypatch.setattr(engine_module, "HANGS", 2.0)
    found.engine._longest = 0.0
    kill(found, 1, signal.SIGSTOP)
    for one in (expected, found):
        one.step()
    assert torch.equal(found.server["w"], expected.server["w"])


def test_ray_on_one_machine_listens_to_nobody_else():
    """All sockets of its processes, started in a process of their own, are those of the loopback interface."""
    script = """
import ray, psutil
from polyfed_ray.engine import connect
connect(1, None, {"CPU": 1}, [])
ray.get(ray.remote(lambda: None).remote())
me = psutil.Process()
for p in (me, *me.children(recursive=True)):
    print(*{c.laddr.ip for c in p.net_connections() if c.status == "LISTEN"})
"""
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    assert {ip.removeprefix("::ffff:") for ip in done.stdout.split()} == {"127.0.0.1"}


@pytest.mark.parametrize("method", [pf.Ditto(0.1), pf.FedCET(0.05)], ids=lambda m: m.name)
def test_a_lost_actor_costs_a_round_and_not_the_run(method, tmp_path):
    expected, found = loop(method, 2), loop(method, 2, folder=tmp_path)
    for t in range(2):
        expected.step()
        if t == 1:
            kill(found, 1)
        found.step()
    for name, value in expected.server.items():
        assert torch.equal(found.server[name], value), name
    assert torch.equal(found.personal(np.arange(N)), expected.personal(np.arange(N)))


def test_an_actor_lost_between_rounds_changes_no_answer(tmp_path):
    """Nothing is trained again for it: metrics, models and rows are read from the rows of the last commit."""
    expected, found = loop(pf.Ditto(0.1), 2), loop(pf.Ditto(0.1), 2, folder=tmp_path)
    expected.step(), found.step()
    for ask in (
        lambda one: torch.as_tensor(one.scored("test")["loss"]),
        lambda one: one.personal(np.arange(N)),
        lambda one: one.engine.save()["w"],
    ):
        kill(found, 0)
        assert torch.equal(ask(found), ask(expected))


def test_an_actor_lost_after_its_replies_were_used_ends_the_run_and_does_not_count_the_round_twice(tmp_path):
    one = loop(pf.Ditto(0.1), 2, folder=tmp_path)
    one.step()
    commit = one.engine.commit

    def dying():
        kill(one, 1)
        commit()

    one.engine.commit = dying
    with pytest.raises(RunError, match=r"worker 1 is gone while .* resume the run"):
        one.step()
    assert not one.whole


def test_an_actor_that_dies_of_every_question_is_not_asked_for_ever(monkeypatch):
    one, asked = loop(pf.FedAvg(0.1), 1), []
    monkeypatch.setattr(one.engine, "_got", lambda jobs: (_ for _ in ()).throw(Lost("worker 0")))
    with pytest.raises(Silent, match="worker 0 died 3 times in a row"):
        one.engine._read(lambda: asked.append(1))
    assert len(asked) == 3
    monkeypatch.undo()


def test_rows_in_memory_are_lost_with_their_actor_and_it_is_said():
    one = loop(pf.Ditto(0.1), 2)
    one.step()
    kill(one, 0)
    with pytest.raises(RunError, match=r"worker 0 is gone.*resume the run"):
        one.step()


def test_more_actors_than_processors_or_graphics_cards_are_refused_and_not_waited_for():
    for workers, said in ((7, "expected at most"), (8, "expected 1 to 7")):
        with pytest.raises(ConfigError, match=f"workers: found {workers}, {said}"):
            loop(pf.FedAvg(0.1), workers)
    assert engine_module.needs("cpu") == {"CPU": 1}
    assert engine_module.needs("cuda:0") == {"CPU": 1, "GPU": 1}
    with pytest.raises(ConfigError, match="expected at most 0, the cluster's free graphics cards"):
        engine_module.connect(1, None, {"GPU": 1}, [])
    blocks = {1: 64, 1000: 64, 2047: 64, 2048: 128, 10_000: 512, 10**6: 1024}  # enough for a thousand actors
    assert {n: engine_module.blocks(n) for n in blocks} == blocks


def test_a_cluster_at_an_address_may_grow_to_what_is_asked_of_it(monkeypatch):
    """More actors than it has processors now are waited for; one that does not grow is said, and asked no more."""
    at = ray.get_runtime_context().gcs_address
    assert grown.connect(100, at, {"CPU": 1}, []) == grown.GROWS > grown.PATIENCE
    monkeypatch.setattr(grown, "GROWS", 1.0)
    fed, work = federation(), Work(epochs=2, batch_size=4)
    data = {"train": fed.train, "test": fed.test}
    with pytest.raises(RunError, match="7 Ray actors have not started within 1 seconds; the cluster has 6 processors"):
        engine_module.RayEngine(task, data, NAMES, pf.FedAvg(0.1), work, 3, PLAN, workers=7, address=at)
    monkeypatch.setattr(grown, "JOINED", ["there:6379"])
    with pytest.raises(ConfigError, match=f"engine: found {at}, and this process has joined there:6379"):
        grown.connect(1, at, {"CPU": 1}, [])


def test_the_tree_of_sums_is_the_same_however_blocks_are_dealt_out():
    rng = np.random.default_rng(1)
    for size in [64] * 40 + [1024]:
        present = rng.choice(size, rng.integers(1, 40), replace=False)
        blocks = {(int(b), 1): {("w", "plain"): torch.tensor(rng.normal(size=3))} for b in present}
        whole = engine_module.total(blocks, 0, size)
        for workers in (2, 3, 5, 64):
            edges = np.arange(workers + 1) * size // workers
            nodes = {}
            for first, end in itertools.pairwise(edges):
                covered = engine_module.cover(int(first), int(end), size)
                assert sum(k for _, k in covered) == end - first
                nodes |= {n: s for n in covered if (s := engine_module.total(blocks, *n)) is not None}
            assert torch.equal(engine_module.total(nodes, 0, size)["w", "plain"], whole["w", "plain"])
