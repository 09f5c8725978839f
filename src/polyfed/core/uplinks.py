"""Uplinks: what the clients of one exchange sent, as a method's `aggregate` sees it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from polyfed.base.errors import RunError
from polyfed.base.typed import plain, weighted_sum
from polyfed.compute.task import Task
from polyfed.core.ledger import row_bytes
from polyfed.core.messages import Round, State, mean

Wanted = Mapping[str, set[str]]  # name -> the sums that are made of an uplink, "plain" and "weighted"
Forge = Callable[[State, State, Round], State]  # (uplinks, what was received, round) of some clients -> what they send


class Rule(Protocol):
    """Base of rules that take the place of a mean."""

    def __call__(self, values: Tensor) -> Tensor:
        """values: [s, p] -> [p]."""
        ...


class Door(Protocol):
    """The guard of a run's messages, polyfed_privacy's: training and uplinks pass it, and the server has sums only."""

    def enter(self, task: Task, received: State, round: Round) -> Task:
        """The task with which the clients `round.ids`, who have received this [s, ...], train."""
        ...

    def leave(
        self, up: State, received: State, round: Round, wanted: Wanted, cohort: int
    ) -> dict[tuple[str, str], Tensor]:
        """The sums of these clients' uplinks [s, ...], as integers, by the keys of `wanted`."""
        ...

    def opened(
        self, sums: Mapping[tuple[str, str], Tensor], received: State, round: Round
    ) -> dict[tuple[str, str], Tensor]:
        """The sums over the whole cohort as numbers, "weighted" by samples over all samples."""
        ...


class Uplinks(Mapping[str, Tensor]):
    """The uplinks of the clients `round.ids`, by name.

    A method asks for means and sums where those are enough, and for rows where it needs every client's own. So robust
    rules act in one place, a method's needs are observed and not declared, and rows that are only summed are never all
    in memory.

    Parameters
    ----------
    rows : dict of Tensor
        [m, ...] each.
    round : Round
        The exchange they belong to.
    sums : dict of Tensor or None
        (name, "plain" or "weighted") -> the rows' sum, plain or weighted by samples, of names without rows.
    rule : callable or None
        Replaces every mean.
    sent : dict of Tensor or None
        [...] the downlink that all of these clients received; a rule sees uploads of the same name and shape relative
        to it.

    Attributes
    ----------
    used : dict of set of str
        Requests so far: name -> "mean", "sum", "mean within groups", "rows".
    """

    def __init__(
        self,
        rows: State,
        round: Round,
        sums: Mapping[tuple[str, str], Tensor] | None = None,
        rule: Rule | None = None,
        sent: Mapping[str, Tensor] | None = None,
    ):
        self._rows, self._round, self._sums = rows, round, dict(sums or {})
        self._rule, self._sent = rule, sent or {}
        self.means = State()  # that were asked for
        self._names = list(dict.fromkeys([*rows, *(name for name, _ in self._sums)]))
        self.used: dict[str, set[str]] = {}
        self.kinds: dict[
            str, set[str]
        ] = {}  # as `used`, in the words of `Tally.added`; "rows" where that is too little

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> Tensor:
        """[m, ...]: every client's own, in the order of `round.ids`. The method is then known to need them."""
        if name not in self._names:
            raise KeyError(name)
        self._note(name, "rows", "rows")
        return self._kept(name)

    def mean(
        self, name: str, weights: Tensor | None = None, within: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """The mean over clients, or what a robust rule takes in its place.

        Parameters
        ----------
        name : str
            Name of the tensor.
        weights : Tensor or None
            [m], such as `round.samples`; None: all clients count the same. A robust rule ignores them: a number of
            samples is a claim that an attacker may make.
        within : Tensor or None
            [m] group of each client, from 0, for one mean per group.
        out : Tensor or None
            [c, ...] needed with `within`: the groups' means are written into it; a group without a client keeps its
            row.

        Returns
        -------
        Tensor
            [...], or [c, ...] with `within`.
        """
        if within is not None:
            assert out is not None, "within needs out, the rows of groups without a client"
            self._note(name, "mean within groups", "rows")
            return self._means(self._kept(name), weights, within, out)
        self.means[name] = self._mean(name, weights)
        return self.means[name]

    def _mean(self, name: str, weights: Tensor | None) -> Tensor:
        kind = self._note(name, "mean", self._kind(weights))
        if (total := self._sums.get((name, kind))) is not None:
            return total / len(self._round.ids) if kind == "plain" else total
        values = self._kept(name)
        if self._rule is None:
            return mean(values, weights)
        base = self._base(name, values)
        flat = (values if base is None else values - base).flatten(1)
        robust = self._rule(flat).view(values.shape[1:])
        return robust if base is None else base + robust

    def sum(self, name: str, weights: Tensor | None = None) -> Tensor:
        """The sum over clients; under a robust rule, its mean times the number of clients or their weight.

        Parameters
        ----------
        name : str
            Name of the tensor.
        weights : Tensor or None
            [m] factors; None: 1 each.

        Returns
        -------
        Tensor
            [...].
        """
        kind = self._note(name, "sum", "plain" if weights is None else "rows")
        if (total := self._sums.get((name, kind))) is not None:
            return total
        if self._rule is not None:
            return (len(self._round.ids) if weights is None else weights.sum()) * self.mean(name)
        values = self._kept(name)
        return values.sum(0) if weights is None else weighted_sum(weights, values)

    def _means(self, values: Tensor, weights: Tensor | None, within: Tensor, out: Tensor) -> Tensor:
        present = torch.bincount(within).nonzero()[:, 0]
        group = torch.searchsorted(present, within)
        if self._rule is not None:
            own = [values[group == k].flatten(1) for k in range(len(present))]
            return out.index_copy_(0, present, torch.stack([self._rule(some) for some in own]).view(-1, *out.shape[1:]))
        member = one_hot(group).T.to(values.dtype if weights is None else weights.dtype)
        if weights is not None:
            member = member * weights
        mass = member.sum(1, keepdim=True)
        share = (member / torch.where(mass > 0, mass, 1)).to(values.dtype)
        means = torch.where(mass > 0, share @ values, out[present])
        return out.index_copy_(0, present, means)

    def _base(self, name: str, values: Tensor) -> Tensor | None:
        base = self._sent.get(name)
        return base if base is not None and base.shape == values.shape[1:] else None

    def _kept(self, name: str) -> Tensor:
        if name not in self._rows and name in self._names:
            raise RunError(
                f"uplink {name!r}: the method asks for every client's own, and took sums only when it was rehearsed; "
                f"ask for up[{name!r}] in every round"
            )
        return self._rows[name]

    def _kind(self, weights: Tensor | None) -> str:
        return "plain" if weights is None else "weighted" if weights is self._round.samples else "rows"

    def _note(self, name: str, use: str, kind: str) -> str:
        self.used.setdefault(name, set()).add(use)
        self.kinds.setdefault(name, set()).add(kind)
        return kind


class Part(NamedTuple):
    """A chunk's uplinks, reduced."""

    rows: State  # [s, ...], of the uplinks that are kept
    sums: dict[tuple[str, str], Tensor]
    bytes: int  # of one client
    bad: int | None  # the first row that is not finite


class Tally:
    """Takes the replies of one exchange chunk by chunk and makes their `Uplinks`."""

    def __init__(
        self,
        round: Round,
        received: State,
        added: Wanted | None = None,
        forge: Forge | None = None,
        rule: Rule | None = None,
        total: Tensor | None = None,
        door: Door | None = None,
        cohort: int | None = None,
    ):
        # cohort: clients of the exchange, where this has some of them
        self.door, self.cohort = door, cohort or len(round.ids)
        # received: [m, ...] in this exchange and those before it in the round
        self.round, self.received, self.forge, self.rule = round, received, forge, rule
        self.added: Wanted = added or {}  # rows of these uplinks are not kept
        self.bytes = 0
        # total: the samples of the whole cohort, where this is a part of one
        self._share = round.samples / (round.samples.sum() if total is None else total)
        self._parts: list[tuple[Tensor, State]] = []
        self._sums: dict[tuple[str, str], Tensor] = {}

    def reduce(self, up: State, at: Tensor, apart: bool = False) -> Part:
        """The part of a chunk's uplinks [s, ...] that is kept; from any thread. at: [s] positions in the cohort"""
        # apart: `add` adds the rows one by one, so that no bit depends on where the cohort is cut
        apart = apart or len(at) == 1
        if self.forge is not None:
            up = self.forge(up, self._at(at), self.round.take(at))
        if self.door is not None:
            if (bad := diverged(up.values())) is not None:
                return Part({}, {}, 0, bad)
            left = self.door.leave(up, self._at(at), self.round.take(at), self.added, self.cohort)
            return Part({}, left, sum(t.nbytes for t in left.values()), None)
        sums: dict[tuple[str, str], Tensor] = {}
        for name in () if apart else self.added.keys() & up.keys():
            if "plain" in self.added[name]:
                sums[name, "plain"] = up[name].sum(0)
            if "weighted" in self.added[name]:
                sums[name, "weighted"] = weighted_sum(self._share[at], up[name])
        kept = {name: t for name, t in up.items() if apart or name not in self.added}
        finite = {name for (name, _), total in sums.items() if torch.isfinite(total.sum())}  # as its rows then are
        finite |= self.added.keys() if apart else set()  # as far as `add` can tell
        return Part(kept, sums, row_bytes(up), diverged(t for name, t in up.items() if name not in finite))

    def _at(self, at: Tensor) -> State:
        return {name: rows_of(t, at) for name, t in self.received.items()}

    def add(self, part: Part, at: Tensor) -> int | None:
        """Take a chunk in; returns its first row that is not finite. The order of calls decides the last bits."""
        self.bytes = part.bytes
        mine = {} if self.door is not None else {name: part.rows[name] for name in self.added.keys() & part.rows.keys()}
        self._parts.append((at, {name: t for name, t in part.rows.items() if name not in mine}))
        for key, value in part.sums.items():
            self._sums[key] = self._sums[key].add_(value) if key in self._sums else value
        for name, rows in mine.items():
            for kind in self.added[name]:
                shares = self._share[at] if kind == "weighted" else None
                self._sums[name, kind] = total = _chained(self._sums.get((name, kind)), rows, shares)
                if (
                    total.is_floating_point()
                    and not torch.isfinite(total.sum())
                    and (bad := diverged([rows])) is not None
                ):
                    return bad
        return None

    def part(self) -> Part:
        """Everything taken in, as one part with rows in the order of the cohort."""
        rows = joined([part for _, part in self._parts], [at for at, _ in self._parts])
        return Part(rows, self._sums, self.bytes, None)

    def uplinks(self) -> Uplinks:
        """Everything taken in, as `aggregate` has it."""
        rows = self.part().rows
        shared = {name: t[0] for name, t in self.received.items() if len(t) and t.stride(0) == 0}
        sums = self._sums if self.door is None else self.door.opened(self._sums, self.received, self.round)
        return Uplinks(rows, self.round, sums, self.rule, shared)


def diverged(tensors: Iterable[Tensor]) -> int | None:
    """The first row of [s, ...] tensors that holds a number that is not finite."""
    for values in tensors:
        if values.is_floating_point() and not torch.isfinite(values.sum()):
            bad = ~torch.isfinite(values.reshape(len(values), -1)).all(1)
            if bad.any():
                return int(bad.nonzero()[0])
    return None


def _chained(total: Tensor | None, rows: Tensor, weights: Tensor | None) -> Tensor:
    """total + weights_1 rows_1 + weights_2 rows_2 + ..., from the left, written into `total` (None: nothing yet)."""
    if not rows.is_floating_point():  # integers have no last bits
        more = rows.sum(0) if weights is None else weighted_sum(weights, rows)
        return more if total is None else total + more
    factors: list[float] = [1.0] * len(rows) if weights is None else plain(weights)
    for row, weight in zip(rows.unbind(0), factors, strict=True):
        total = row * weight if total is None else total.add_(row, alpha=weight)
    assert total is not None
    return total


def rows_of(t: Tensor, at: Tensor) -> Tensor:
    """Rows of [m, ...]; rows of a shared message stay views of it."""
    return t[: len(at)] if t.stride(0) == 0 else t.index_select(0, at)


def joined(parts: list[State], places: list[Any]) -> State:
    """Chunks' tensors [s, ...] as one tensor [m, ...] in the cohort's order; places: [s] positions of each chunk."""
    m = sum(len(at) for at in places)
    # not copied; elsewhere it would cost more to look
    if len(parts) == 1 and places[0].device.type == "cpu" and torch.equal(places[0], torch.arange(m)):
        return dict(parts[0])
    out = {name: t.new_empty(m, *t.shape[1:]) for name, t in parts[0].items()} if parts else {}
    for at, part in zip(places, parts, strict=True):
        for name, t in part.items():
            out[name].index_copy_(0, at, t)
    return out
