"""What a method states because the machinery cannot see it: its needs, and what its state shows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

IN_ROUND = "needs replies in the round they were asked for"


@dataclass(frozen=True)
class Needs:
    """A method's needs of the machinery.

    Parameters
    ----------
    exchanges : int
        Exchanges with the cohort in a round.
    first : int or None
        Exchanges of the first round; None: as many.
    unmet_first : bool
        The first exchange of a round is with those of the cohort whom the server has not met.
    everyone_first : bool
        The first exchange of the first round is with all clients, whoever takes part in that round.
    synchronous : bool or str
        Every reply must be taken in the round of its message. A text says why, to go behind the method's name; {n} in
        it is the number of clients.
    beyond : int
        `synchronous` holds for more clients than this.
    plain_sgd : str
        The reason why local steps must be those of plain SGD, not clipped; empty: any local optimiser will do.
    discloses : dict of str
        Uplinks that are made of samples and not of training, with their descriptions, by name.
    apart : bool
        It sets part of every client's training samples apart, drawn at random.
    everyone, uniform : str
        The reason why all clients must take part in every round, or as many in each, drawn uniformly; empty: no need.
    clients : int
        Fewest clients of a federation.
    """

    exchanges: int = 1
    first: int | None = None
    unmet_first: bool = False
    everyone_first: bool = False
    synchronous: bool | str = False
    beyond: int = 0
    plain_sgd: str = ""
    discloses: Mapping[str, str] = field(default_factory=dict[str, str])
    apart: bool = False
    everyone: str = ""
    uniform: str = ""
    clients: int = 1

    def phases(self, t: int) -> int:
        """Count the exchanges of a round.

        Parameters
        ----------
        t : int
            The round, from 0.

        Returns
        -------
        int
            Exchanges with the cohort in round `t`.
        """
        return self.exchanges if t or self.first is None else self.first

    def in_step(self, n: int, t: int = 0) -> str:
        """Say why a method cannot run asynchronously.

        Parameters
        ----------
        n, t : int
            Number of clients, and the first round that would be asynchronous.

        Returns
        -------
        str
            The reason, to go behind the method's name; empty if it can.
        """
        if (phases := self.phases(t)) > 1:
            return f"needs {phases} exchanges a round"
        why = IN_ROUND if self.synchronous is True else self.synchronous or ""
        return why.replace("{n}", str(n)) if n > self.beyond else ""


if TYPE_CHECKING:

    def by_settings(function: Callable[[Any], Needs]) -> Needs:
        """Needs that depend on a method's settings."""
        ...
else:
    by_settings = property


class Portrait(NamedTuple):
    """Description of a method's state, for reports.

    Attributes
    ----------
    common, clusters : Tensor or None
        [p] the one model that all clients have in common, and [n] each client's group.
    factors : dict of tuple of Tensor, or None
        The common model's low-rank layers as ([d1, r], [r, d2]), by name; None if the method makes none.
    findings : dict
        Other results worth a line: mixing matrix, ranks, step sizes. JSON-able values, or tensors.
    """

    common: Tensor | None = None
    clusters: Tensor | None = None
    factors: Mapping[str, tuple[Tensor, Tensor]] | None = None
    findings: Mapping[str, Any] = {}

    def found(self) -> dict[str, Any]:
        """The clusters and the findings."""
        return ({} if self.clusters is None else {"clusters": self.clusters}) | dict(self.findings)
