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
    """Replies so far."""

    ids: np.ndarray  # positions of the clients that answered
    missing: dict[int, str]  # the reason, in words, for each that did not
    bytes: Mapping[int, int] = {}  # by client, of replies that may be dropped because others are missing


class Lost(Exception):
    """Some clients' work of this round is gone; their private rows are as of the last commit. Repeat the round."""


class Silent(RunError):
    """Too few clients have answered. The state reached before is whole: it can be saved and continued."""


def died(event: str, lost: Lost) -> str:
    """The reason that ends a run whose workers die again and again."""
    return f"{event}: {lost} died {TRIES} times in a row; the machine may be out of memory, try fewer workers"


class Engine(Protocol):
    """Carries messages to clients, runs them and carries the replies back. Knows no method.

    The clients' samples and private rows are behind it, and the server never sees them. A reply changes a private row
    only at `commit`; until then it can be dropped, and asked for again.
    """

    plan: Plan  # part of what a run must repeat to come out again
    here: bool  # True where this process can read the clients' samples and private rows

    @property
    def parameters(self) -> Mapping[int, int]: ...  # numbers of each client's model, by position; where not `here`

    def send(self, down: Down, round: Round) -> None:
        """Give the clients `round.ids` their messages. Does not wait."""
        ...

    def wait(self, ids: np.ndarray, first: bool = False) -> Answers:
        """Wait for replies of `ids`, as long as the engine was told to; with `first`, until the first one."""
        ...

    def exchange(self, algorithm: Algorithm, received: State, round: Round, tally: Tally) -> Reply:
        """Put the replies of the clients `round.ids`, who received these messages [m, ...], into `tally`."""
        ...

    def commit(self) -> None:
        """The replies since the last commit have been used: the private rows that came of them hold."""
        ...

    def abandon(self) -> None:
        """The exchanges since the last `commit` count for nothing: private rows are as they were then."""
        ...

    def evaluate(self, algorithm: Algorithm, down: Down, split: str) -> dict[str, np.ndarray]:
        """Each client's metrics [n] for the model it would deploy after `down`, empty where it needs no message."""
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
        """The clients' tensors for a checkpoint, by name."""
        ...

    def keep(self, kept: State | None = None) -> State:
        """The clients' tensors of now, or those of before a resume: `restore` goes back to them until the next call."""
        ...

    def saved(self) -> None:
        """The checkpoint with the last `save` is safe."""
        ...

    def restore(self, state: State) -> None: ...

    def close(self) -> "Engine":
        """Release what runs clients. Returns an engine that still answers for models, metrics and rows."""
        ...
