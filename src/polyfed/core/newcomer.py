"""Newcomer: the server's side of one client added after training, by the method's own rule with room for one client
more. Existing clients stay frozen, and newcomers do not see each other: their order and number do not matter."""

import torch
from torch import Tensor

from polyfed.base.errors import ConfigError
from polyfed.compute.task import Task
from polyfed.core.algorithm import KNOWN, Algorithm, Down, Round, State, started
from polyfed.core.uplinks import Uplinks


class Newcomer:
    """One newcomer, at position n behind the n clients of the run: the server's copies stand in for those.

    Attributes are replaced, never written into: a shallow copy of a newcomer is another newcomer.
    """

    def __init__(self, algorithm: Algorithm, task: Task, server: State, samples: Tensor):
        self.algorithm, self.task, self.samples, self.n = algorithm, task, samples, len(samples)  # samples: [n]
        self.before = server  # as the run left it
        start = started(algorithm, task, 2)
        for name, t in start.shared.items():
            if name not in server or t.shape != server[name].shape:
                raise ConfigError(
                    f"admit: cannot extend server tensor {name!r} of {algorithm.name} by one client; say its axes with "
                    "Server(...) in init_server, or give it an `admit`"
                )
        # names of tensors with a row, or a row and a column, per client; rows: the newcomer's, and of pairs the whole
        self.each, self.pairs = tuple(start.each), tuple(start.pairs)
        self.rows: State = {name: t[1:].clone() for name, t in start.each.items()}
        self.rows |= {name: _grown(server[name], t) for name, t in start.pairs.items()}
        # False where the newcomer has its model once it has downloaded it: more exchanges would change nothing
        self.trains = len(self.each) > 1 or type(algorithm).personal is not Algorithm.personal  # than KNOWN

    @property
    def server(self) -> State:
        """The server's state with the newcomer in it."""
        grown = {name: torch.cat([self.before[name], self.rows[name]]) for name in self.each}
        return self.before | grown | {name: self.rows[name] for name in self.pairs}

    # entry: before the first exchange

    def offered(self) -> Tensor | None:
        """[c, p]: the models to download at once; the newcomer takes the one with the least training loss."""
        return None if self.trains else self.before["w"][None]

    def enter(self, choice: int, samples: float) -> State:
        """The private state of a newcomer that took `choice` of the offered models; a common model is its start."""
        w = self.before.get("w")
        common = w is not None and "w" not in self.each and w.shape == self.task.w0.shape
        return self.algorithm.init_client(self.task, w if w is not None and common else self.task.w0)

    # exchanges; rounds are those of the newcomer alone, `round.ids` is n

    def downlink(self, round: Round) -> Down:
        """The message for the newcomer."""
        # the server, which keeps a model per client, has none of this one yet: it answers as to a federation of one
        if "w" in self.each and not self.rows[KNOWN].any():
            alone = started(self.algorithm, self.task, 1).whole()
            return self.algorithm.downlink(alone, round._replace(n=1, ids=torch.zeros_like(round.ids)))
        everyone = round._replace(
            ids=torch.arange(self.n + 1, device=round.ids.device),
            samples=torch.cat([self.samples, round.samples]),
            sent=round.sent.expand(self.n + 1),
        )
        down = self.algorithm.downlink(self.server, everyone)
        return down._replace(each={k: t[self.n :] for k, t in down.each.items()})

    def aggregate(self, up: State, round: Round) -> None:
        """Take the newcomer's uplink, and keep only the newcomer's rows of the server's next state."""
        # copies, as an aggregate may write in place; those grown by a row are new already
        mine = {k: t if k in self.each else t.clone() for k, t in self.server.items()}
        after = self.algorithm.aggregate(mine, Uplinks(up, round), round)
        self.keep(after | {KNOWN: torch.cat([self.before[KNOWN], round.samples])})

    def keep(self, after: State) -> None:
        """Take the newcomer's rows of `after`."""
        self.rows = {name: after[name][self.n :].clone() for name in self.each}
        for name in self.pairs:
            self.rows[name] = after[name].clone()
            self.rows[name][: self.n, : self.n] = self.before[name]

    # what it has

    def deployment(self, round: Round) -> Down:
        """The message that the newcomer receives to deploy a model now."""
        return self.algorithm.deployment(self.server, round)

    def cluster(self, labels: Tensor) -> int | None:
        """The label of its group, out of the old clients' [n]; -1: a group of its own, None: not known."""
        clusters = self.algorithm.describe(self.server).clusters
        if clusters is None:
            return None
        peers = (clusters[: self.n] == clusters[self.n]).nonzero()[:, 0]
        return int(labels[peers[0]]) if len(peers) else -1


def _grown(t: Tensor, two: Tensor) -> Tensor:
    """A tensor of n x n clients with one client more, its row and column as in `two`, set up for two clients."""
    n = len(t)
    new = t.new_empty(n + 1, n + 1, *t.shape[2:])
    new[:n, :n], new[n, :n], new[:n, n], new[n, n] = t, two[1, 0], two[0, 1], two[1, 1]
    return new
