"""A site: one client behind a boundary that only messages cross. It keeps its samples and its private tensors.

A message's head says what to do:

    {"do": "train", "t": round, "phase": exchange, "n": clients, "scale": factor of the step sizes,
     "base": [round, phase] of the private state to start from, "keep": the oldest one that may still be asked for}
    {"do": "evaluate", "split": name, "base": ...}

and its tensors are what the method sends. The answer to "train" holds the uplink, the answer to "evaluate" metrics.
Asked again, a site answers the same bits again. What comes before the first round and after the last is in `Member`.
"""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyfed.base.errors import RunError
from polyfed.base.randomness import client_keys
from polyfed.compute import evaluation
from polyfed.compute.batches import Work
from polyfed.compute.compiled import path_of
from polyfed.compute.split import Split
from polyfed.compute.task import Task
from polyfed.core.algorithm import Algorithm, Round, State, decayed
from polyfed.core.rows import MemoryRows
from polyfed.core.uplinks import Tally
from polyfed.core.worker import Plan, Worker
from polyfed.sites.message import Message
from polyfed.sites.vault import START, Vault, Version


class Site:
    """One client's side of a run.

    data: its samples by split, of which "train" is trained on     vault: where its private tensors are kept
    """

    def __init__(
        self,
        name: str,
        task: Task,
        data: Mapping[str, Split],
        algorithm: Algorithm,
        work: Work,
        seed: int,
        vault: Vault,
    ):
        self.name, self.task, self.data, self.algorithm, self.vault = name, task, data, algorithm, vault
        plan = Plan(1, 1, str(task.device), path_of(task, work, data["train"]))
        self.worker = Worker(task, data["train"], client_keys([name]), work, seed, plan)
        self.start = algorithm.init_client(task, task.w0)

    def answer(self, message: Message) -> Message:
        """Do what a message asks for. Raises RunError for one that this site cannot follow."""
        try:
            do, base = message.head["do"], version(message.head["base"])
            if do == "train":
                return self._train(message, base)
            if do == "evaluate":
                return self._evaluate(message, base)
        except (KeyError, TypeError, ValueError) as e:
            raise RunError(f"{self.name}: a message without {e}") from None
        raise RunError(f"{self.name}: found a message that asks for {do!r}, expected train or evaluate")

    def state(self, version: Version) -> State:
        """The private tensors of a version."""
        return self.vault.load(version, self.start)

    def _train(self, message: Message, base: Version) -> Message:
        head, begun = message.head, time.perf_counter()
        t, phase = int(head["t"]), int(head["phase"])
        here = torch.zeros(1, dtype=torch.int64, device=self.task.device)
        counts = torch.as_tensor(self.data["train"].counts, dtype=self.task.dtype, device=self.task.device)
        round = Round(t, int(head["n"]), phase, here, counts, torch.full_like(here, t))
        down = self._one(message.tensors)
        rows = self._rows(base)
        tally = Tally(round, down)
        reply, private = self.worker.run(decayed(self.algorithm, float(head["scale"])), rows, down, round, tally)
        told: dict[str, Any] = {"t": t, "phase": phase}
        if reply.bad is not None:
            return Message(told | {"diverged": True})
        for at, mine in private:
            rows.scatter(here[at], mine)
        self.vault.save((t, phase), rows.snapshot(), version(head["keep"]))
        up = tally.uplinks()
        told |= {"steps": int(reply.steps[0]), "seconds": time.perf_counter() - begun}
        return Message(told, {name: up[name][0] for name in up})

    def _evaluate(self, message: Message, base: Version) -> Message:
        w, parameters = self.personal(base, message.tensors)
        found = evaluation.metrics(self.task, w, self.data[str(message.head["split"])], np.arange(1))
        metrics = {name: float(values[0]) for name, values in found.items()}
        return Message({"metrics": metrics, "parameters": parameters})

    def personal(self, base: Version, tensors: State) -> tuple[Tensor, int]:
        """[1, p]: the model that the site would deploy, and how many numbers describe it. tensors: what it received"""
        here, down = torch.zeros(1, dtype=torch.int64, device=self.task.device), self._one(tensors)
        mine = self._rows(base).gather(here)
        w = self.algorithm.personal(self.task, mine, down)
        found = self.algorithm.parameters(self.task, mine, down)
        return w, self.task.p if found is None else int(torch.as_tensor(found).reshape(-1)[0])

    def _rows(self, base: Version) -> MemoryRows:
        rows = MemoryRows(1, self.start)
        if base != START:
            rows.restore(self.state(base))
        return rows

    def _one(self, tensors: State) -> State:
        """Messages with the clients' axis in front."""
        return {name: t.to(self.task.device)[None] for name, t in tensors.items()}


def version(given: Any) -> Version:
    """A version as a message says it."""
    t, phase = given
    return int(t), int(phase)
