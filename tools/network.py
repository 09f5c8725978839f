"""A server's transport in this process, and sites in processes of their own, which `torture_network.py` disturbs."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from demo import free_port
from direct import Raw, raw
from instances import BATCH, CLASSES, METHODS, federation, kind_of, model, steps
from torch import Tensor

from polyfed.base.randomness import client_keys
from polyfed.compute.batches import Work
from polyfed.compute.task import Task
from polyfed.core.rounds import Loop
from polyfed.engines.local import LocalEngine, make_plan, make_rows
from polyfed.runs.rehearsal import forms
from polyfed_sites.engine import RemoteEngine
from polyfed_sites.hub import Channel, Hub
from polyfed_sites.keys import Keys
from polyfed_testing.stage import NAMES

HERE = Path(__file__).parent
SITES = NAMES[:3]


class Federation:
    """A server's transport in this process, and sites in theirs."""

    def __init__(self, folder: Path, names=SITES):
        self.folder, self.names, self.said = folder, names, []
        self.keys = Keys(folder / "keys")
        self.keys.make(f"127.0.0.1:{free_port()}")
        for name in names:
            self.keys.add(name, folder)
        self.hub = Hub(self.keys, self.said.append, host="127.0.0.1")
        self.transport = Channel(self.hub, folder / "server")
        self.transport.run = "run"
        self.faults: dict[str, str] = {}  # by site: what goes wrong there with the replies to what is sent now
        self.processes = {name: self.start(name) for name in names}

    def server(self, name: str) -> str:
        """Where a site finds the server."""
        return self.keys.address

    def start(self, name: str) -> subprocess.Popen:
        words = (HERE / "network_site.py", self.folder / f"{name}.key", self.folder / name, self.server(name))
        command, env = [sys.executable, *map(str, words)], os.environ | {"OMP_NUM_THREADS": "1"}
        with (self.folder / f"{name}.txt").open("ab") as out:
            return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env)

    def told(self, name: str) -> str:
        """What the operator of a site has seen."""
        return (self.folder / f"{name}.txt").read_text()

    def ask(self, names=None, seconds=120, **head) -> dict[str, Raw | str]:
        names = self.names if names is None else names
        self.transport.push({n: Raw(head) for n in names})
        found = self.transport.pull(names, seconds=seconds)
        return {n: reply if isinstance(reply, str) else raw(reply) for n, reply in found.items()}

    def close(self) -> None:
        try:
            self.ask(kind="end", seconds=20)
        finally:
            for p in self.processes.values():
                p.terminate()
            for p in self.processes.values():
                p.wait()
            self.hub.close()


class Labelled:
    """The transport, for one method."""

    def __init__(self, there: Federation, label: str, mark: str):
        self.there, self.transport, self.most, self.run = there, there.transport, there.transport.most, "run"
        self.more = {"label": label, "mark": mark}

    def push(self, messages) -> None:
        more = {n: self.more | {"fault": self.there.faults.get(n, "")} for n in messages}
        self.transport.push({n: Raw(m.head.model_dump() | more[n], m.tensors) for n, m in messages.items()})

    def pull(self, names, enough=None, seconds=None):
        return self.transport.pull(names, enough, seconds)

    def close(self) -> None:
        pass


def loops(there: Federation, label: str, schedule, mark: str = "", quorum: int | None = None) -> tuple[Loop, Loop]:
    """The same run here and at the sites. mark: tells runs of one method apart"""
    method, fed = METHODS[label], federation()
    at = np.arange(len(SITES))
    work = Work(epochs=2, steps=steps(method), batch_size=BATCH)
    task = Task(model(kind_of(method)), device="cpu")
    splits = {"train": fed.train, "test": fed.test}
    data = {name: split.select(at).to(task.device, task.dtype) for name, split in splits.items()}
    rows, plan = make_rows(method, task, len(at), len(at), None), make_plan(task, len(at), 8, chunk=1, workers=1)
    here = LocalEngine(task, data, rows, client_keys(SITES), work, 3, plan)
    counts = data["train"].counts
    other = Task(model(kind_of(method)), device="cpu")
    up = forms(method, other, data["train"].x.shape[1:], CLASSES, CLASSES)
    remote = RemoteEngine(
        SITES, counts, Labelled(there, label, mark), work, 3, quorum=quorum, say=there.said.append,
        expected=lambda t, phase: up.of(method.needs.phases(t), phase), seconds=None if quorum is None else 300,
    )  # fmt: skip
    pairs = ((task, here), (other, remote))
    return tuple(Loop(of, counts, SITES, method, schedule, engine, 3) for of, engine in pairs)


def private(there: Federation, label: str, loop: Loop, mark: str = "") -> list[dict[str, Tensor]]:
    base = loop.engine.save()["base"].tolist()
    start = loop.algorithm.init_client(loop.task, loop.task.w0)
    base, head = dict(zip(SITES, base, strict=True)), {"kind": "private", "label": label, "mark": mark}
    there.transport.push({n: Raw(head | {"base": b}) for n, b in base.items()})
    found = there.transport.pull(SITES)
    none = [-1, -1]
    return [start if base[n] == none else {k: t[0] for k, t in raw(found[n]).tensors.items()} for n in SITES]
