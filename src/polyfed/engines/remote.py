"""The engine for clients that are elsewhere: it turns exchanges into messages and replies into uplinks.

It knows of each client only its name, its number of samples, and which of its private states counts.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from polyfed.core.algorithm import Algorithm, Down, Round, State
from polyfed.core.batches import Work
from polyfed.core.engine import Answers
from polyfed.core.errors import RunError
from polyfed.core.optimizers import StepSizes
from polyfed.core.randomness import client_keys
from polyfed.core.uplinks import Tally, added_up
from polyfed.core.worker import Plan, Reply, chunks, expand
from polyfed.sites.message import Message, fits, pack, unpack
from polyfed.sites.site import Site
from polyfed.sites.vault import START


class Transport(Protocol):
    """Carries messages to sites, by name."""

    def push(self, messages: Mapping[str, Message]) -> None:
        """Send; an earlier message to the same site that has not been answered is then of no use."""
        ...

    def pull(self, names: Sequence[str]) -> dict[str, Message | str]:
        """Replies of these sites, or why there is none. Waits for as long as it was told to."""
        ...

    def close(self) -> None: ...


class Direct:
    """Sites in this process, with which every message is exchanged as bytes: what a network would carry, without one.

    sites: gives the site of a name, such as one made anew from its vault     most: bytes of tensors in a message
    moved: bytes of tensors so far, down and up
    """

    def __init__(self, site: Callable[[str], Site], most: int = 1 << 32):
        self.site, self.most, self.moved = site, most, [0, 0]
        self._asked: dict[str, bytes] = {}

    def push(self, messages: Mapping[str, Message]) -> None:
        self._asked |= {name: pack(message) for name, message in messages.items()}
        self.moved[0] += sum(message.bytes for message in messages.values())

    def pull(self, names: Sequence[str]) -> dict[str, Message | str]:
        return {name: self._answer(name, self._asked.pop(name)) for name in names}

    def _answer(self, name: str, data: bytes) -> Message:
        site = self.site(name)
        answer = unpack(pack(site.answer(unpack(data, self.most, "the server"))), self.most, name)
        self.moved[1] += answer.bytes
        return answer

    def close(self) -> None:
        self._asked.clear()


class RemoteEngine:
    """Runs clients through a transport.

    counts: [n] training samples     work, seed: of the run, which decide in which order replies are added up
    """

    def __init__(
        self,
        names: Sequence[str],
        counts: np.ndarray,
        transport: Transport,
        work: Work,
        seed: int,
        step_sizes: StepSizes = StepSizes(),  # noqa: B008  (immutable)
    ):
        self.names, self.counts, self.transport = names, counts, transport
        self.work, self.seed, self.step_sizes = work, seed, step_sizes
        self.plan = Plan(1, len(names), "at the sites", "at the sites")
        self._keys = client_keys(names)
        self._base = np.full((len(names), 2), START)  # the private state [n] that the next message builds on
        self._held = self._base.copy()  # as of the last commit
        self._safe, self._saving = self._base.copy(), self._base.copy()  # as of the last checkpoint, and of its draft
        self._replies: dict[int, Message] = {}

    def send(self, down: Down, round: Round) -> None:
        self.transport.push({self.names[i]: m for i, m in self._messages(down, round).items()})

    def _messages(self, down: Down, round: Round) -> dict[int, Message]:
        head = {"do": "train", "phase": round.phase, "n": round.n}
        found: dict[int, Message] = {}
        ids, sent = round.ids.cpu().numpy(), round.sent.cpu().numpy()
        for row, (i, t) in enumerate(zip(map(int, ids), map(int, sent), strict=True)):
            mine = {"t": t, "scale": self.step_sizes.at(t)} | self._state(i)
            found[i] = Message(head | mine, down.shared | {name: each[row] for name, each in down.each.items()})
        return found

    def _state(self, i: int) -> dict[str, Any]:
        return {"base": self._base[i].tolist(), "keep": self._safe[i].tolist()}

    def wait(self, ids: np.ndarray) -> Answers:
        found = self.transport.pull([self.names[int(i)] for i in ids])
        told = {int(i): found[self.names[int(i)]] for i in ids}
        self._replies = {i: m for i, m in told.items() if isinstance(m, Message)}
        return Answers(np.array(sorted(self._replies)), {i: why for i, why in told.items() if isinstance(why, str)})

    def exchange(
        self, algorithm: Algorithm, received: State, round: Round, tally: Tally, server: State | None = None
    ) -> Reply:
        ids = [int(i) for i in round.ids.cpu().numpy()]
        seconds, steps = np.zeros(len(ids)), np.zeros(len(ids), dtype=np.int64)
        diverged = [row for row, i in enumerate(ids) if self._replies[i].head.get("diverged")]
        if diverged:
            return Reply(seconds, steps, diverged[0])
        first = self._replies[ids[0]].tensors
        for k, row in enumerate(self._order(round)):
            reply, at = self._replies[ids[row]], torch.tensor([row], device=round.ids.device)
            fits(reply, first, self.names[ids[row]])
            up = {name: t.to(round.samples.device)[None] for name, t in reply.tensors.items()}
            if server is not None and k == 0:
                tally.added |= added_up(algorithm.aggregate, server, up, round.take(at))
            part = tally.reduce(up, at)
            if part.bad is not None:
                return Reply(seconds, steps, row)
            tally.add(part, at)
            seconds[row], steps[row] = float(reply.head["seconds"]), int(reply.head["steps"])
            self._base[ids[row]] = int(round.sent[row]), round.phase
        return Reply(seconds, steps)

    def _order(self, round: Round) -> list[int]:
        """The rows, in the order in which one machine would run the clients one by one: sums then have its bits."""
        ids, sent = round.ids.cpu().numpy(), round.sent.cpu().numpy()
        found: list[int] = []
        for t in sorted(set(sent.tolist())):
            at = np.flatnonzero(sent == t)
            who = ids[at]
            found += [int(at[c[0]]) for c in chunks(self.work, self.counts[who], self._keys[who], self.seed, t, 1)]
        return found

    def commit(self) -> None:
        self._held = self._base.copy()
        self._replies = {}

    def abandon(self) -> None:
        self._base = self._held.copy()
        self._replies = {}

    def evaluate(self, algorithm: Algorithm, down: Down, split: str) -> dict[str, np.ndarray]:
        head = {"do": "evaluate", "split": split}
        each = expand(down, len(self.names))
        self.transport.push(
            {
                name: Message(head | self._state(i), {key: t[i] for key, t in each.items()})
                for i, name in enumerate(self.names)
            }
        )
        found = self.transport.pull(self.names)
        missing = {name: why for name, why in found.items() if isinstance(why, str)}
        if missing:
            raise RunError("; ".join(f"{name}: {why}" for name, why in missing.items()))
        metrics = [m.head["metrics"] for m in (found[name] for name in self.names) if isinstance(m, Message)]
        return {key: np.array([m[key] for m in metrics]) for key in metrics[0]}

    def personal(self, algorithm: Algorithm, down: Down, ids: np.ndarray) -> Tensor:
        raise RunError("the models of this run are at its sites; they are exported there")

    def private(self, ids: Tensor) -> State:
        raise RunError("the private state of this run is at its sites")

    def place(self, ids: Tensor, rows: State) -> None:
        raise RunError("the private state of this run is at its sites")

    def save(self) -> State:
        self._saving = self._held.copy()
        return {"base": torch.as_tensor(self._held.copy())}

    def saved(self) -> None:
        self._safe = self._saving

    def restore(self, state: State) -> None:
        self._base = state["base"].numpy().copy()
        self._held, self._safe = self._base.copy(), self._base.copy()

    def close(self) -> "RemoteEngine":
        self.transport.close()
        return self
