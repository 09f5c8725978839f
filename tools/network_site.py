"""One site of the federation of `network.py`, as a process of its own: python network_site.py KEY FOLDER [SERVER].

It answers for every method of the conformance table: a message's head says for which, and what is to go wrong with the
reply.
"""

import os
import random
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import torch

sys.path += [str(Path(__file__).parents[1] / "tests" / name) for name in ("conformance", "algorithms", "sites")]

from direct import Raw, raw
from instances import BATCH, METHODS, federation, kind_of, model, steps

from polyfed.compute.batches import Work
from polyfed.compute.task import Task
from polyfed_sites.attendance import Attendance, Unheard
from polyfed_sites.client import Client
from polyfed_sites.keys import site_key
from polyfed_sites.vault import Vault
from polyfed_sites.wire import REQUEST


def spoiled(reply: bytes, fault: str) -> bytes:
    """The reply of a program that is wrong."""
    if fault == "garbled":
        return bytes([reply[0] ^ 1]) + reply[1:]
    message = raw(reply)
    name, t = next((name, t) for name, t in message.tensors.items() if t.is_floating_point())
    t = torch.full_like(t, torch.nan) if fault == "nan" else t.flatten()[1:]
    return message._replace(tensors=message.tensors | {name: t}).pack()


class Member:
    """What `polyfed client` has in its place.

    fault: what goes wrong with the next reply, on its way from this process
    """

    def __init__(self, name: str, folder: Path):
        self.name, self.folder, self.finished, self.fault = name, folder, False, ""
        self.sites: dict[str, Client] = {}

    def site(self, head: dict) -> Client:
        label, key = head["label"], head["label"] + head["mark"]
        if key not in self.sites:
            method, fed = METHODS[label], federation()
            i = np.array([fed.names.index(self.name)])
            data = {"train": fed.train.select(i), "test": fed.test.select(i)}
            work = Work(epochs=2, steps=steps(method), batch_size=BATCH)
            vault = Vault(self.folder / key, "run", self.name)
            task = Task(model(kind_of(method)), device="cpu")
            self.sites[key] = Client(self.name, task, data, method, work, 3, vault)
        return self.sites[key]

    def answer(self, data: bytes) -> bytes:
        message = raw(data)
        do = message.head["kind"]
        if do == "end":
            self.finished = True
            return Raw({"kind": "stored"}).pack()
        if do == "private":
            rows = self.site(message.head)._rows(tuple(message.head["base"]))
            return Raw({}, rows.snapshot()).pack()
        if do == "echo":
            print("echo", flush=True)
            time.sleep(message.head.get("seconds", 0))
            return Raw({"n": message.head.get("n")}, message.tensors).pack()
        if do == "die":
            os._exit(1)
        more = {key: message.head.pop(key, "") for key in ("label", "mark", "fault", "format")}
        asked, self.fault = REQUEST.validate_python(message.head), more["fault"]
        reply = self.site(more).train(asked, message.tensors).pack()
        return spoiled(reply, self.fault) if self.fault in ("nan", "shape", "garbled") else reply


class Faulty(Attendance):
    """A site's end, with which something goes wrong as `Member.fault` says."""

    member: Member
    rng = random.Random()

    def _call(self, client, do: str, body: bytes = b"", **says):
        call = lambda: super(Faulty, self)._call(client, do, body, **says)  # noqa: E731
        if do == "reply":
            fault, self.member.fault = self.member.fault, ""
            if fault.startswith("up"):
                (self.member.folder / "spoil").write_text(fault)  # see `Wire`
            if fault == "cut":
                return super()._call(Cut(client), do, body, **says)
            if fault == "doubled":
                call()
        return self._in_storm(call) if (self.member.folder / "storm").exists() else call()

    def _in_storm(self, call):
        """A call that may come late, twice, not at all, or whose answer is lost: as long as the folder has `storm`."""
        late, twice, lost, unheard = (self.rng.random() < p for p in (0.3, 0.1, 0.03, 0.03))
        time.sleep(self.rng.uniform(0, 0.5) if late else 0)
        if lost:
            raise Unheard("the connection was cut")
        if twice:
            call()
        answer = call()
        if unheard:
            raise Unheard("the answer was lost")
        return answer


class Cut:
    """A client that breaks off amid what it sends."""

    def __init__(self, client):
        self.client = client

    def stream(self, method: str, url: str, headers, content: bytes):
        def half():
            yield content[: len(content) // 2]
            raise httpx.WriteError("the connection was cut")

        return self.client.stream(method, url, headers=headers | {"content-length": str(len(content))}, content=half())


def main(key: str, folder: str, server: str | None = None) -> None:
    torch.set_num_threads(1)
    given, folder = site_key(Path(key)), Path(folder)
    member = Member(given.site, folder)
    folder.mkdir(exist_ok=True)
    say = lambda line: print(line, flush=True)  # noqa: E731
    there = Faulty(given, lambda _, data: member.answer(data), lambda: member.finished, folder, say, server)
    there.member, there.rng = member, random.Random(given.site)
    there.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
