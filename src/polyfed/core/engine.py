"""Engine: what the event loop asks of whoever runs the clients: this machine, other machines or real sites."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from polyfed.base.errors import RunError
from polyfed.core.algorithm import Algorithm, Down, Round, State
from polyfed.core.uplinks import Tally
from polyfed.core.worker import Plan, Reply

TRIES = 3  # times that a round is begun, or a question asked, whose workers are lost over it


class Answers(NamedTuple):
    """Replies so far: positions of the clients that answered, and the reason, in words, for each that did not.

    bytes: of the replies, by client, where they may be dropped because others are missing
    """

    ids: np.ndarray
    missing: dict[int, str]
    bytes: Mapping[int, int] = {}


class Lost(Exception):
    """Some clients' work of this round is gone, and their private rows are as of the last commit: repeat the round."""


class Silent(RunError):
    """Too few clients have answered. What was reached before is whole, and can be saved and gone on with."""


def died(what: str, lost: Lost) -> str:
    """Why a run ends whose workers die again and again."""
    return f"{what}: {lost} died {TRIES} times in a row; the machine may be out of memory, try fewer workers"


class Engine(Protocol):
    """Carries messages to clients, runs them and carries the replies back. Knows no method.

    The clients' samples and private rows are behind it: the server side never sees them. A reply changes a private row
    only once it has been used, which `commit` says; until then it can be dropped, and asked for again.

    plan: how clients are run, part of what makes a run come out again     here: whether this process can read the
    clients' samples and private rows     parameters: where it cannot, what describes each client's model, by position
    """

    plan: Plan
    here: bool

    @property
    def parameters(self) -> Mapping[int, int]: ...

    def send(self, down: Down, round: Round) -> None:
        """Give the clients `round.ids` their messages. Does not wait."""
        ...

    def wait(self, ids: np.ndarray, first: bool = False) -> Answers:
        """Wait for replies of `ids`, as long as the engine was told to; with `first`, until the first one."""
        ...

    def exchange(self, algorithm: Algorithm, received: State, round: Round, tally: Tally) -> Reply:
        """Put the replies of the clients `round.ids` into `tally`.

        received: [m, ...] what they were sent
        """
        ...

    def commit(self) -> None:
        """The replies of the last exchanges were used: the private rows that came of them hold."""
        ...

    def abandon(self) -> None:
        """The exchanges since the last `commit` count for nothing: private rows are as they were then."""
        ...

    def evaluate(self, algorithm: Algorithm, down: Down, split: str) -> dict[str, np.ndarray]:
        """Each client's metrics [n] for the model it would deploy.

        down: what all of them receive to deploy it; empty for methods that need no message
        """
        ...

    def personal(self, algorithm: Algorithm, down: Down, ids: np.ndarray) -> Tensor:
        """[s, p]: the models that `ids` would deploy, where the engine may see them."""
        ...

    def private(self, ids: Tensor) -> State:
        """The private rows [s, ...] of `ids`, where the engine may see them."""
        ...

    def place(self, ids: Tensor, rows: State) -> None:
        """Put private rows [s, ...] in place, before the first round."""
        ...

    def save(self) -> State:
        """Tensors that a checkpoint must hold of the clients, by name."""
        ...

    def saved(self) -> None:
        """The checkpoint with the last `save` is safe."""
        ...

    def restore(self, state: State) -> None:
        """Continue from what `save` returned."""
        ...

    def close(self) -> "Engine":
        """Let go of what runs clients. Returns what can still be asked for models, metrics and rows."""
        ...
