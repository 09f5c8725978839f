"""One client's numbers at its site: it trains, evaluates, and keeps its private tensors in its vault."""

import math
import time
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from polyfed.base.errors import Refusal
from polyfed.base.randomness import client_keys
from polyfed.compute import evaluation
from polyfed.compute.batches import Work
from polyfed.compute.compiled import path_of
from polyfed.compute.split import Split
from polyfed.compute.task import Task
from polyfed.core.algorithm import Algorithm, Round, State, decayed
from polyfed.core.rows import MemoryRows
from polyfed.core.uplinks import Tally, Wanted
from polyfed.core.worker import Plan, Worker
from polyfed_privacy.guard import Guard
from polyfed_sites import journal
from polyfed_sites import wire as m
from polyfed_sites.vault import START, Vault, Version
from polyfed_sites.wire import Message

METRICS = "metrics.jsonl"  # in the vault: the site's own scores


class Client:
    """One client's numbers in a run."""

    def __init__(
        self,
        name: str,
        task: Task,
        data: Mapping[str, Split],
        algorithm: Algorithm,
        work: Work,
        seed: int,
        vault: Vault,
        guard: Guard | None = None,  # what its uplinks pass through under [privacy]
        sums: Mapping[tuple[int, int], Wanted] | None = None,  # which alone are then sent, by kind of exchange
    ):
        self.guard, self.sums = guard, sums or {}
        self.name, self.task, self.data, self.algorithm, self.vault = name, task, data, algorithm, vault
        self.device = task.device
        plan = Plan(1, 1, str(self.device), path_of(task.net, work, data["train"]))
        self.worker = Worker(task, data["train"], client_keys([name]), work, seed, plan)
        self.start = algorithm.init_client(task, task.w0)
        self._here = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._counts = torch.as_tensor(data["train"].counts, dtype=task.dtype, device=self.device)

    def train(self, asked: m.Train, tensors: State) -> Message[m.Exchanged]:
        """One exchange: the uplink that answers these downlinks. The private tensors that come of it are kept."""
        t, phase, begun = asked.t, asked.phase, time.perf_counter()
        round = Round(t, asked.n, phase, self._here, self._counts, torch.full_like(self._here, t), self.worker.seed)
        rows, down = self._rows(asked.base), self._one(tensors)
        tally = Tally(round, down)
        if self.guard is not None:
            wanted = self.sums.get((self.algorithm.needs.phases(t), phase), {})
            self.guard.factor = lambda t: asked.scale
            tally = Tally(round, down, wanted, door=self.guard, cohort=len(asked.cohort))
        reply, private = self.worker.run(decayed(self.algorithm, asked.scale), rows, down, round, tally)
        if reply.bad is not None:
            return Message(m.Diverged(t=t, phase=phase))
        for at, mine in private:
            rows.scatter(self._here[at], mine)
        if self.guard is None:
            up = tally.uplinks()
            sent = {name: up[name][0] for name in up}
        else:
            sent = {f"{name}.{kind}": words for (name, kind), words in tally.part().sums.items()}
        self.vault.save((t, phase), rows.snapshot(), asked.keep)
        seconds = math.ceil(10 * (time.perf_counter() - begun)) / 10  # finer ones would tell of the rows
        return Message(m.Trained(t=t, phase=phase, steps=int(reply.steps[0]), seconds=seconds), sent)

    def evaluate(self, asked: m.Evaluate, tensors: State) -> Message[m.Measured]:
        """How good the model is that this client would deploy."""
        if asked.split not in self.data:
            raise Refusal(f"has no rows for {asked.split}")
        w, parameters = self.personal(asked.base, tensors)
        scores = evaluation.metrics(self.task, w, self.data[asked.split], np.arange(1))
        metrics = {name: float(values[0]) for name, values in scores.items()}
        return Message(m.Measured(metrics=metrics, parameters=parameters))

    def personal(self, base: Version, tensors: State) -> tuple[Tensor, int]:
        """[1, p]: the model that it would deploy, and how many numbers describe it. tensors: what it received"""
        mine, down = self._rows(base).gather(self._here), self._one(tensors)
        w = self.algorithm.personal(self.task, mine, down)
        parameters = self.algorithm.parameters(self.task, mine, down)
        return w, self.task.p if parameters is None else int(torch.as_tensor(parameters).reshape(-1)[0])

    def report(self) -> str:
        """The client's own numbers, round by round: those of the model that it would have deployed then."""
        scores = {
            (r["round"], r["split"]): r for r in journal.lines(self.vault.folder / METRICS)
        }  # the last word on each
        names = list(dict.fromkeys(key for r in scores.values() for key in r if key not in ("round", "split")))
        counts = ", ".join(f"{len(split.x)} {key}" for key, split in self.data.items())
        rows = [
            [str(t), split, *("" if r.get(key) is None else f"{r[key]:.4g}" for key in names)]
            for (t, split), r in sorted(scores.items())
        ]
        table = [["round", "rows of", *names], ["---"] * (2 + len(names)), *rows]
        head = f"# {self.name}: {self.algorithm.name}, run {self.vault.run}\n\nRows: {counts}.\n\n"
        return head + "".join(f"| {' | '.join(row)} |\n" for row in table)

    def _rows(self, base: Version) -> MemoryRows:
        rows = MemoryRows(1, self.start)
        if base != START:
            rows.restore(self.vault.load(base))
        return rows

    def _one(self, tensors: State) -> State:
        """Messages with the clients' axis in front."""
        return {name: t.to(self.device)[None] for name, t in tensors.items()}
