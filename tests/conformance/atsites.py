"""Every client at a site of its own, in this process: the loop, its clients' private tensors, and when two loops are
the same."""

import numpy as np
import torch
from direct import Direct
from instances import BATCH, federation, kind_of, model, steps

from polyfed.compute.batches import Work
from polyfed.compute.task import Task
from polyfed.core.algorithm import Algorithm
from polyfed.core.rounds import Loop
from polyfed.core.schedule import Schedule
from polyfed.engines.local import LocalEngine
from polyfed_sites.client import Client
from polyfed_sites.engine import RemoteEngine
from polyfed_sites.vault import Vault
from polyfed_sites.wire import Train, request
from polyfed_testing.stage import NAMES

N, MOST = len(NAMES), 1 << 24


def at_sites(method: Algorithm, folder, schedule: Schedule, transport=Direct, quorum: int | None = None) -> Loop:
    """The event loop with every client at a site that is made anew, from its vault, for every message."""
    fed, work = federation(), Work(epochs=2, steps=steps(method), batch_size=BATCH)

    def site(name: str) -> Client:
        i = NAMES.index(name)
        task = Task(model(kind_of(method)), device="cpu")
        data = {"train": fed.train.select(np.array([i])), "test": fed.test.select(np.array([i]))}
        vault = Vault(folder / name, "run", name)
        return Client(name, task, data, method, work, 3, vault)

    counts = fed.train.counts

    def answer(name: str, data: bytes) -> bytes:
        (asked, tensors), client = request(data, MOST, "the server"), site(name)
        return (client.train if isinstance(asked, Train) else client.evaluate)(asked, tensors).pack()

    carried = transport(NAMES, answer)
    carried.site = site
    engine = RemoteEngine(NAMES, counts, carried, work, 3, quorum=quorum)
    return Loop(Task(model(kind_of(method)), device="cpu"), counts, NAMES, method, schedule, engine, 3)


def private(the_loop: Loop) -> list[dict[str, torch.Tensor]]:
    """Every client's private tensors, wherever they are."""
    engine = the_loop.engine
    if isinstance(engine, LocalEngine):
        return [{k: t[i] for k, t in engine.rows.tensors.items()} for i in range(N)]
    found = []
    for i, name in enumerate(NAMES):
        version = tuple(engine.save()["base"][i].tolist())
        start = the_loop.algorithm.init_client(the_loop.task, the_loop.task.w0)
        load = engine.transport.site(name).vault.load
        found.append(start if version == (-1, -1) else {k: t[0] for k, t in load(version).items()})
    return found


def same(a: Loop, b: Loop) -> None:
    assert a.server.keys() == b.server.keys()
    for name in a.server:
        assert torch.equal(a.server[name], b.server[name]), f"server {name}"
    for i, (mine, yours) in enumerate(zip(private(a), private(b), strict=True)):
        assert mine.keys() == yours.keys()
        for name in mine:
            assert torch.equal(mine[name], yours[name]), f"{NAMES[i]} {name}"


def balanced(the_loop: Loop) -> None:
    """The sums that the method rests on hold, to some rounding errors of their terms."""
    each = private(the_loop)
    clients = {k: torch.stack([c[k] for c in each]) for k in each[0]}
    for what, gap in the_loop.algorithm.conserved(the_loop.server, clients).items():
        size = max(1.0, *(float(t.abs().max()) for t in clients.values()))
        assert gap.abs().max() <= 1000 * torch.finfo(gap.dtype).eps * size, what
