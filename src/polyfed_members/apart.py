"""Newcomers of one run, each with a server of its own: the method that the event loop of `admit` trains."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from polyfed.compute.batches import Batches
from polyfed.compute.task import Task
from polyfed.core.algorithm import Algorithm, Down, Needs, Personal, Round, State, by_settings
from polyfed.core.newcomer import Newcomer
from polyfed.core.uplinks import Uplinks


def newcomer(algorithm: Algorithm, task: Task, server: State, samples: Tensor) -> Newcomer:
    """One client added to the run's server state, by the method's own `admit` if it has one. samples: [n]"""
    own = getattr(algorithm, "admit", None)
    return Newcomer(algorithm, task, server, samples) if own is None else own(task, server, samples)


@dataclass(frozen=True)
class Apart(Algorithm, abstract=True):
    """A method among newcomers."""

    name: ClassVar[str] = "newcomers"

    method: Algorithm
    newcomers: list[Newcomer]  # in the order of the loop's clients; each is replaced by its next state

    @by_settings
    def needs(self) -> Needs:
        return self.method.needs

    def _each(self, round: Round) -> Iterator[tuple[int, Newcomer, Round]]:
        """(row, newcomer, the exchange as its own server sees it), for every client of `round`."""
        for row in range(len(round.ids)):
            new = self.newcomers[int(round.ids[row])]
            own = round.take(torch.tensor([row], device=round.ids.device))
            yield row, new, own._replace(n=new.n + 1, ids=torch.full_like(own.ids, new.n))

    def init_server(self, task: Task, w0: Tensor, n: int) -> State:
        return {}

    def downlink(self, server: State, round: Round) -> Down:
        return _together([new.downlink(own) for _, new, own in self._each(round)])

    def local_update(self, task: Task, client: State, down: State, data: Batches, round: Round) -> tuple[State, State]:
        return self.method.local_update(task, client, down, data, round._replace(n=self.newcomers[0].n + 1))

    def aggregate(self, server: State, up: Uplinks, round: Round) -> State:
        sent = {name: up[name] for name in up}
        for row, new, own in self._each(round):
            new.aggregate({name: t[row : row + 1] for name, t in sent.items()}, own)
        return server

    def deployment(self, server: State, round: Round) -> Down:
        if isinstance(self.method, Personal):
            return Down()
        return _together([new.deployment(own) for _, new, own in self._each(round)])

    def personal(self, task: Task, client: State, down: State) -> Tensor:
        return self.method.personal(task, client, down)


def _together(downs: list[Down]) -> Down:
    """The newcomers' messages as one downlink; a message that all of them have in memory once stays shared."""
    first = downs[0]
    shared = {name: t for name, t in first.shared.items() if all(d.shared[name] is t for d in downs)}
    own = [{**{k: t[None] for k, t in d.shared.items() if k not in shared}, **d.each} for d in downs]
    return Down(shared, {name: _rows([each[name] for each in own]) for name in own[0]})


def _rows(parts: list[Tensor]) -> Tensor:
    """[m, ...] from m of [1, ...]; where one server has more groups than another, zeros that are never read."""
    most = max((t.shape[1] for t in parts if t.dim() > 1), default=0)
    return torch.cat([
        t if t.dim() < 2 or t.shape[1] == most else torch.cat([t, t.new_zeros(1, most - t.shape[1], *t.shape[2:])], 1)
        for t in parts
    ])  # fmt: skip
