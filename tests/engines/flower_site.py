"""One site of the tests' federation, as a process of its own: python flower_site.py KEY FOLDER.

It answers for every method of the conformance table: a message's head says for which.
"""

import os
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path += [str(Path(__file__).parents[1] / name) for name in ("conformance", "algorithms")]

from instances import BATCH, METHODS, federation, kind_of, model, steps

from polyfed.core.batches import Work
from polyfed.core.task import Task
from polyfed.engines.flower_site import Attendance
from polyfed.sites import Message, Site, Vault, pack, unpack
from polyfed.sites.keys import site_key


class Member:
    """What `polyfed client` has in its place."""

    def __init__(self, name: str, folder: Path):
        self.name, self.folder, self.finished = name, folder, False
        self.sites: dict[str, Site] = {}

    def site(self, head: dict) -> Site:
        label, key = head["label"], head["label"] + head["mark"]
        if key not in self.sites:
            method, fed = METHODS[label], federation()
            i = np.array([fed.names.index(self.name)])
            data = {"train": fed.train.select(i), "test": fed.test.select(i)}
            work = Work(epochs=2, steps=steps(method), batch_size=BATCH)
            vault = Vault(self.folder / key, "run", self.name)
            task = Task(model(kind_of(method)), device="cpu")
            self.sites[key] = Site(self.name, task, data, method, work, 3, vault)
        return self.sites[key]

    def answer(self, data: bytes) -> bytes:
        message = unpack(data, 1 << 30, "the server")
        do = message.head["do"]
        if do == "end":
            self.finished = True
            return pack(Message({}))
        if do == "private":
            return pack(Message({}, self.site(message.head).state(tuple(message.head["base"]))))
        if do == "echo":
            print("echo", flush=True)
            time.sleep(message.head.get("seconds", 0))
            return pack(Message({"n": message.head.get("n")}, message.tensors))
        if do == "die":
            os._exit(1)
        return pack(self.site(message.head).answer(message))


def main(key: str, folder: str) -> None:
    torch.set_num_threads(1)
    given, folder = site_key(Path(key)), Path(folder)
    member = Member(given.site, folder)
    say = lambda line: print(line, flush=True)  # noqa: E731
    Attendance(given, member.answer, lambda: member.finished, folder / "flower", say).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
