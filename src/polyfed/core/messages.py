"""Messages: what server and clients say to each other about one exchange, and the axes of what the server keeps."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyfed.base.arguments import checked
from polyfed.base.errors import ConfigError
from polyfed.base.typed import weighted_sum

State = dict[str, Tensor]


class Round(NamedTuple):
    """Facts about one exchange that both sides may know.

    Attributes
    ----------
    t : int
        Round, from 0.
    n : int
        Clients in the federation.
    phase : int
        Exchange within the round, from 0.
    ids : Tensor
        [s] positions of the clients.
    samples : Tensor
        [s] their training samples, as floats.
    sent : Tensor
        [s] round in which their downlink left: earlier than `t` only when replies arrive late.
    seed : int
        Of the run, for draws that both sides make, keyed by it, a purpose and `t`.
    """

    t: int
    n: int
    phase: int
    ids: Tensor
    samples: Tensor
    sent: Tensor
    seed: int = 0

    def take(self, rows: Tensor) -> "Round":
        """The same exchange for some of its clients.

        Parameters
        ----------
        rows : Tensor
            Their positions in `ids`.

        Returns
        -------
        Round
            With `ids`, `samples` and `sent` of those clients.
        """
        return self._replace(ids=self.ids[rows], samples=self.samples[rows], sent=self.sent[rows])


class Down(NamedTuple):
    """The messages of one downlink.

    Attributes
    ----------
    shared, each : dict of Tensor
        The same for every client; and [s, ...], one row per client.
    """

    shared: State = {}  # noqa: RUF012  (never written to)
    each: State = {}  # noqa: RUF012


class Server(NamedTuple):
    """The server's tensors before the first round, by their axes; a method then sees them all under their names.

    One more client is one more row of `each`, and one more row and column of `pairs`.

    Attributes
    ----------
    shared : dict of Tensor
        Of no client in particular.
    each : dict of Tensor
        [n, ...], one row per client.
    pairs : dict of Tensor
        [n, n, ...], one row and one column per client.
    free : dict of Tensor
        Tensors whose shape changes in training.
    drawn : dict of callable
        Further tensors of `each`, drawn by the clients' names: [n] uint64 keys of the names -> [n, ...].
    """

    shared: State = {}  # noqa: RUF012  (never written to)
    each: State = {}  # noqa: RUF012
    pairs: State = {}  # noqa: RUF012
    free: State = {}  # noqa: RUF012
    drawn: Mapping[str, Callable[[np.ndarray], Tensor]] = {}

    def whole(self) -> State:
        """All tensors but those still to be drawn."""
        return {**self.shared, **self.each, **self.pairs, **self.free}


class Form(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int | None, ...]  # None where a size differs from message to message
    most: int  # numbers in all
    optional: bool = False  # messages may come without it

    @property
    def bytes(self) -> int:
        """Bytes of the largest message."""
        return self.most * torch.empty((), dtype=self.dtype).element_size()

    def __str__(self) -> str:
        sizes = ", ".join("..." if k is None else str(k) for k in self.shape)
        return f"{str(self.dtype).removeprefix('torch.')} [{sizes}]"


def size(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of tensors."""
    return sum(t.nbytes for t in tensors.values())


def copied(state: State) -> State:
    return {name: t.clone() for name, t in state.items()}


def form_of(t: Tensor) -> Form:
    return Form(t.dtype, tuple(t.shape), t.numel())


# [n] in every server's state, kept by the loop: training samples of the clients met so far, 0 for one not met
KNOWN = "known"


@checked
def mean(values: Tensor, weights: Tensor | None = None) -> Tensor:
    """Mean over the clients, plain or weighted.

    Parameters
    ----------
    values : Tensor
        [s, ...] one row per client.
    weights : Tensor or None
        [s], such as sample counts; None: all clients count the same.

    Returns
    -------
    Tensor
        [...] in the precision of `values`.
    """
    if weights is None:
        return values.mean(0)
    if weights.shape != values.shape[:1]:
        raise ConfigError(f"weights of mean: found shape {[*weights.shape]}, expected {[*values.shape[:1]]}")
    return weighted_sum(weights / weights.sum(), values)
