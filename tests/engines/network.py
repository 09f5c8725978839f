"""A server's transport in this process, and sites in processes of their own: what the tests of Flower share."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
from torch import Tensor

sys.path += [str(Path(__file__).parents[1] / "conformance")]

from instances import BATCH, METHODS, NAMES, federation, kind_of, model, steps

from polyfed.core.batches import Work
from polyfed.core.randomness import client_keys
from polyfed.core.rounds import Loop
from polyfed.core.task import Task
from polyfed.engines import flower
from polyfed.engines.local import LocalEngine, make_plan, make_rows
from polyfed.engines.remote import RemoteEngine
from polyfed.sites import Message
from polyfed.sites.keys import Keys

HERE = Path(__file__).parent
SITES = NAMES[:3]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Federation:
    """A server's transport in this process, and sites in theirs."""

    def __init__(self, folder: Path, names=SITES):
        self.folder, self.names, self.said = folder, names, []
        self.keys = Keys(folder / "keys")
        self.keys.make(f"127.0.0.1:{free_port()}")
        for name in names:
            self.keys.add(name, folder)
        self.transport = flower.Flower(self.keys, folder / "server", self.said.append, host="127.0.0.1")
        self.processes = {name: self.start(name) for name in names}

    def start(self, name: str) -> subprocess.Popen:
        command = [
            sys.executable,
            str(HERE / "flower_site.py"),
            str(self.folder / f"{name}.key"),
            str(self.folder / name),
        ]
        with (self.folder / f"{name}.txt").open("ab") as out:
            return subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"}
            )

    def told(self, name: str) -> str:
        """What the operator of a site has seen."""
        return (self.folder / f"{name}.txt").read_text()

    def ask(self, names=None, seconds=120, **head) -> dict[str, Message | str]:
        names = self.names if names is None else names
        self.transport.push({n: Message(head) for n in names})
        return self.transport.pull(names, seconds=seconds)

    def close(self) -> None:
        try:
            self.ask(do="end", seconds=20)
        finally:
            for p in self.processes.values():
                p.terminate()
            for p in self.processes.values():
                p.wait()
            self.transport.close()


class Labelled:
    """The transport, for one method."""

    def __init__(self, transport, label: str, mark: str):
        self.transport, self.label, self.mark, self.most = transport, label, mark, transport.most

    def push(self, messages) -> None:
        self.transport.push(
            {n: Message(m.head | {"label": self.label, "mark": self.mark}, m.tensors) for n, m in messages.items()}
        )

    def pull(self, names, enough=None, seconds=None):
        return self.transport.pull(names, enough, seconds)

    def close(self) -> None:
        pass


def loops(there: Federation, label: str, schedule, mark: str = "") -> tuple[Loop, Loop]:
    """The same run here and at the sites. mark: tells runs of one method apart"""
    method, fed = METHODS[label], federation()
    at = np.arange(len(SITES))
    work = Work(epochs=2, steps=steps(method), batch_size=BATCH)
    task = Task(model(kind_of(method)), device="cpu")
    data = {
        name: split.select(at).to(task.device, task.dtype) for name, split in (("train", fed.train), ("test", fed.test))
    }
    rows, plan = make_rows(method, task, len(at), len(at), None), make_plan(task, len(at), 8, chunk=1, workers=1)
    here = LocalEngine(task, data, rows, client_keys(SITES), work, 3, plan)
    counts = data["train"].counts
    remote = RemoteEngine(SITES, counts, Labelled(there.transport, label, mark), work, 3)
    other = Task(model(kind_of(method)), device="cpu")
    return (
        Loop(task, counts, SITES, method, schedule, here, 3),
        Loop(other, counts, SITES, method, schedule, remote, 3),
    )


def private(there: Federation, label: str, loop: Loop, mark: str = "") -> list[dict[str, Tensor]]:
    base = loop.engine.save()["base"].tolist()
    start = loop.algorithm.init_client(loop.task, loop.task.w0)
    there.transport.push(
        {
            n: Message({"do": "private", "label": label, "mark": mark, "base": b})
            for n, b in zip(SITES, base, strict=True)
        }
    )
    found = there.transport.pull(SITES)
    return [
        start if b == [-1, -1] else {k: t[0] for k, t in found[n].tensors.items()}
        for n, b in zip(SITES, base, strict=True)
    ]
