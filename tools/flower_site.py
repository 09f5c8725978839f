"""One site of the federation of `network.py`, as a process of its own: python flower_site.py KEY FOLDER [SERVER].

It answers for every method of the conformance table: a message's head says for which, and what is to go wrong with the
reply.
"""

import os
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path += [str(Path(__file__).parents[1] / "tests" / name) for name in ("conformance", "algorithms", "sites")]

from direct import Raw, raw
from instances import BATCH, METHODS, federation, kind_of, model, steps

from polyfed.compute.batches import Work
from polyfed.compute.task import Task
from polyfed_sites import flower_api
from polyfed_sites.client import Client
from polyfed_sites.flower_site import Attendance
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
            return Raw({}, self.site(message.head).state(tuple(message.head["base"]))).pack()
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

    def _serve(self, client) -> None:
        super()._serve(Calls(client, self.member))


class Calls:
    """Flower's client, whose calls a member spoils."""

    def __init__(self, client, member: Member):
        self.client, self.member, self.rng = client, member, random.Random(member.name)

    def __getattr__(self, name: str):
        call = getattr(self.client, name)
        return (lambda request: self._in_storm(call, request)) if (self.member.folder / "storm").exists() else call

    def _in_storm(self, call, request):
        """A call that may come late, twice, not at all, or whose answer is lost: as long as the folder has `storm`."""
        late, twice, lost, unheard = (self.rng.random() < p for p in (0.3, 0.1, 0.03, 0.03))
        time.sleep(self.rng.uniform(0, 0.5) if late else 0)
        if lost:
            raise flower_api.HTTPError("the connection was cut")
        if twice:
            call(request)
        answer = call(request)
        if unheard:
            raise flower_api.HTTPError("the answer was lost")
        return answer

    def PushMessages(self, request):  # noqa: N802  (as Flower calls it)
        if self.member.fault.startswith("up"):
            (self.member.folder / "spoil").write_text(self.member.fault)  # see `Wire`
            self.member.fault = ""
        return self.__getattr__("PushMessages")(request)

    def PushObject(self, request):  # noqa: N802
        fault, self.member.fault = self.member.fault, ""
        if fault == "cut":  # the server gets the announcement of a reply, and no more
            raise flower_api.HTTPError("the connection was cut")
        if fault == "doubled":
            self.client.PushObject(request)
        return self.__getattr__("PushObject")(request)


def main(key: str, folder: str, server: str | None = None) -> None:
    torch.set_num_threads(1)
    given, folder = site_key(Path(key)), Path(folder)
    member = Member(given.site, folder)
    folder.mkdir(exist_ok=True)
    say = lambda line: print(line, flush=True)  # noqa: E731
    there = Faulty(given, lambda _, data: member.answer(data), lambda: member.finished, folder, say, server)
    there.member = member
    there.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
