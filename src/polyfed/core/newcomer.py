"""Newcomer: a server's side of one client that was not there in training, while all that were there stay as they are.

The default is the method's own rule on the server's state with room for one client more: the newcomer takes part in
rounds to which the others bring what the server has of them, and only its own rows are kept. Newcomers do not see each
other, so their order and number do not matter.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyfed.core.algorithm import Algorithm, Down, Round, State
from polyfed.core.errors import ConfigError
from polyfed.core.uplinks import Uplinks

if TYPE_CHECKING:
    from polyfed.core.task import Task


class Newcomer:
    """One newcomer, at position n behind the n clients of the run.

    samples: [n] the others' training samples

    before: the server's state as the run left it     axes: per tensor of it the axes along clients
    rows: what the server has of the newcomer: its rows, or (where clients are on two axes) the tensor with them
    trains: False where the newcomer has its model once it has downloaded it, and more exchanges would change nothing

    Attributes are replaced, never written into: a copy of a newcomer is another newcomer.
    """

    def __init__(self, algorithm: Algorithm, task: "Task", server: State, samples: Tensor):
        self.algorithm, self.task, self.samples, self.n = algorithm, task, samples, len(samples)
        self.before = server
        self.axes: dict[str, tuple[int, ...]] = {}
        self.rows: State = {}
        two, three = (algorithm.init_server(task, task.w0.clone(), n) for n in (2, 3))
        for name, t in three.items():
            axes = tuple(k for k in range(t.dim()) if t.shape[k] != two[name].shape[k])
            if any((two[name].shape[k], t.shape[k]) != (2, 3) for k in axes):
                raise ConfigError(
                    f"admit: {algorithm.name} keeps {name!r} in a form that has no row for one client more; the method "
                    "needs an `admit` of its own"
                )
            if axes:
                self.axes[name] = axes
                self.rows[name] = t[2:].clone() if axes == (0,) else _grown(server[name], t, axes)
        self.trains = bool(self.axes) or type(algorithm).personal is not Algorithm.personal
        self._known = False

    @property
    def server(self) -> State:
        """The server's state with the newcomer in it."""
        return self.before | {
            name: torch.cat([self.before[name], t]) if self.axes[name] == (0,) else t for name, t in self.rows.items()
        }

    # entry: before the first exchange

    def offered(self) -> Tensor | None:
        """[c, p]: the models that the newcomer downloads at once, to take the one with the least training loss."""
        return None if self.trains else self.before["w"][None]

    def enter(self, choice: int, samples: float) -> State:
        """The newcomer has taken `choice` of what was offered: its private state, as training would start it there.

        A common model stands in for the common start.
        """
        w = self.before.get("w")
        common = w is not None and "w" not in self.axes and w.shape == self.task.w0.shape
        return self.algorithm.init_client(self.task, w if w is not None and common else self.task.w0)

    # exchanges; rounds are those of the newcomer alone, `round.ids` is n

    def asked(self, round: Round) -> bool:
        """Whether this phase of a round is with the newcomer."""
        return (
            type(self.algorithm).audience is Algorithm.audience or len(self.algorithm.audience(self.server, round)) > 0
        )

    def downlink(self, round: Round) -> Down:
        """What the newcomer is sent; while the server has no model of it, in a method that keeps one per client, what
        a federation of one would be sent."""
        if "w" in self.axes and not self._known:
            alone = self.algorithm.init_server(self.task, self.task.w0.clone(), 1)
            return self.algorithm.downlink(alone, round._replace(n=1, ids=torch.zeros_like(round.ids)))
        if not self.axes:
            return self.algorithm.downlink(self.before, round)
        everyone = round._replace(
            ids=torch.arange(self.n + 1, device=round.ids.device),
            samples=torch.cat([self.samples, round.samples]),
            sent=round.sent.expand(self.n + 1),
        )
        down = self.algorithm.downlink(self.server, everyone)
        return down._replace(each={k: t[self.n :] for k, t in down.each.items()})

    def aggregate(self, up: State, round: Round) -> None:
        """Take the newcomer's uplink; of what the server makes of it only the newcomer's rows are kept."""
        self._known = True
        if self.axes:
            # copies, as an aggregate may write in place; those grown by a row are new already
            mine = {k: t if self.axes.get(k) == (0,) else t.clone() for k, t in self.server.items()}
            self.keep(self.algorithm.aggregate(mine, Uplinks(up, round), round))

    def keep(self, after: State) -> None:
        """Take the newcomer's rows of `after`."""
        rows = {}
        for name, axes in self.axes.items():
            if axes == (0,):
                rows[name] = after[name][self.n :].clone()
            else:
                old = tuple(slice(self.n) if k in axes else slice(None) for k in range(after[name].dim()))
                rows[name] = after[name].clone()
                rows[name][old] = self.before[name]
        self.rows = rows

    # what it has

    def deployment(self, round: Round) -> Down:
        """What the newcomer receives to deploy a model now."""
        return self.algorithm.deployment(self.server, round)

    def cluster(self, labels: Tensor) -> int | None:
        """Its group, as the label of the old clients that it is with (labels: [n]); -1 where it is with none.

        None where the method does not tell with one client more.
        """
        report = self.algorithm.report(self.server)
        if "clusters" not in report:
            return None
        found = torch.as_tensor(report["clusters"])
        peers = (found[: self.n] == found[self.n]).nonzero()[:, 0]
        return int(labels[peers[0]]) if len(peers) else -1


def _grown(t: Tensor, three: Tensor, axes: tuple[int, ...]) -> Tensor:
    """A tensor of n clients with one more, as it is set up; three: the same for three clients."""
    for axis in axes:
        last = three.narrow(axis, 2, 1)
        for other in axes:
            last = last if other == axis else last.narrow(other, 0, 1)
        t = torch.cat([t, last.expand(*(1 if k == axis else size for k, size in enumerate(t.shape)))], axis)
    return t
