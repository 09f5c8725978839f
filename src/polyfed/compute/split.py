"""The samples of n clients, laid end to end: one tensor for inputs, one for targets, and where clients begin."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from polyfed.base.errors import DataError


@dataclass(frozen=True, eq=False)
class Split:
    """The samples of `n` clients; everything that trains or evaluates reads them from here."""

    x: Tensor  # [N, ...] inputs of all clients, client 0 first
    y: Tensor  # [N] int64 class labels, [N, T] of every token, or [N, ...] float targets
    offsets: np.ndarray  # [n+1]: client i owns rows offsets[i] to offsets[i+1]
    unit: Tensor | None = None  # [n, 2] shift and scale of targets, which train models as (y - shift) / scale
    weight: Tensor | None = None  # [N] of each sample in its client's training loss, see `shares`; None: all the same

    def __post_init__(self):
        object.__setattr__(self, "offsets", np.asarray(self.offsets, dtype=np.int64))
        if len(self.x) != len(self.y):
            raise DataError(f"found {len(self.x)} inputs and {len(self.y)} targets, expected the same number")
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.x) or (np.diff(self.offsets) < 0).any():
            raise DataError("offsets must rise from 0 to the number of samples")

    @classmethod
    def of(cls, clients: Sequence[tuple[Tensor, Tensor]]) -> "Split":
        """One (x, y) pair per client, in order; y of one dimension or more."""
        offsets = np.concatenate([[0], np.cumsum([len(y) for _, y in clients])])
        return cls(torch.cat([x for x, _ in clients]), torch.cat([y for _, y in clients]), offsets)

    @property
    def n(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def counts(self) -> np.ndarray:
        """[n] samples per client."""
        return np.diff(self.offsets)

    @cached_property
    def shares(self) -> Tensor | None:
        """[N] float64: the weights over their mean at their client, so that they are 1 on average there; or None."""
        if self.weight is None:
            return None
        weight, owner = self.weight.double(), torch.repeat_interleave(torch.as_tensor(self.counts)).to(self.x.device)
        total = weight.new_zeros(self.n).index_add_(0, owner, weight)
        return weight / (total / torch.as_tensor(self.counts, device=self.x.device))[owner]

    def rows(self, i: int) -> slice:
        """The rows of client i's samples."""
        return slice(int(self.offsets[i]), int(self.offsets[i + 1]))

    @cached_property
    def targets(self) -> Tensor:
        """[N, ...] targets as models are trained on them."""
        unit = self.units(np.repeat(np.arange(self.n), self.counts))
        return trained(self.y, unit if unit is None else unit.view(-1, *[1] * (self.y.dim() - 1), 2))

    def client(self, i: int) -> tuple[Tensor, Tensor]:
        """Client i's (x, y): views, not copies."""
        return self.x[self.rows(i)], self.y[self.rows(i)]

    def of_all(self, clients: np.ndarray) -> list[Callable[[slice], Tensor]]:
        """Inputs and targets of some clients, end to end, as functions of a slice."""
        counts, first = self.counts[clients], self.offsets[clients]
        if len(clients) and (np.diff(clients) == 1).all():
            rows = slice(int(first[0]), int(first[-1] + counts[-1]))
            # clients that follow one another are read where they lie
            return [t[rows].__getitem__ for t in (self.x, self.y)]
        at = self._places(clients)
        return [lambda some, t=t: t.index_select(0, at[some]) for t in (self.x, self.y)]

    def _places(self, clients: Sequence[int] | np.ndarray) -> Tensor:
        """The rows of some clients, end to end."""
        counts, first = self.counts[np.asarray(clients)], self.offsets[np.asarray(clients)]
        index = np.arange(int(counts.sum())) + np.repeat(first - np.cumsum(counts) + counts, counts)
        return torch.as_tensor(index, device=self.x.device)

    def select(self, clients: Sequence[int] | np.ndarray) -> "Split":
        """The samples of the named clients only, in the order given."""
        return self.given(clients, self.x.index_select(0, self._places(clients)))

    def given(self, clients: Sequence[int] | np.ndarray, x: Tensor) -> "Split":
        """The named clients' targets with other inputs `x`, in the order given."""
        at = self._places(clients)
        y, weight = self.y.index_select(0, at), None if self.weight is None else self.weight[at]
        offsets = np.concatenate([[0], np.cumsum(self.counts[np.asarray(clients)])])
        return Split(x, y, offsets, self.units(clients), weight)

    def at(self, clients: np.ndarray, rows: Sequence[np.ndarray]) -> "Split":
        """Some samples of the named clients: the rows to take, client by client."""
        at = torch.as_tensor(np.concatenate(rows), device=self.x.device)
        offsets = np.concatenate([[0], np.cumsum([len(some) for some in rows])])
        weight = None if self.weight is None else self.weight[at]
        return Split(self.x[at], self.y[at], offsets, self.units(clients), weight)

    def units(self, clients: int | Sequence[int] | np.ndarray) -> Tensor | None:
        """Shift and scale of the targets of some clients, [..., 2]; None where targets are trained on as they are."""
        return None if self.unit is None else self.unit[torch.as_tensor(clients, device=self.unit.device)]

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "Split":
        """The same samples on `device`; floating inputs and targets become `dtype`."""

        def move(t: Tensor) -> Tensor:
            return t.to(device, dtype) if t.is_floating_point() else t.to(device)

        unit, weight = (None if t is None else t.to(device) for t in (self.unit, self.weight))
        return Split(move(self.x), move(self.y), self.offsets, unit, weight)


def trained(y: Tensor, unit: Tensor | None) -> Tensor:
    """Targets as a model is trained on them. unit: [..., 2] shift and scale, of as many dimensions as y, or None."""
    return y if unit is None else ((y.double() - unit[..., 0]) / unit[..., 1]).to(y.dtype)


def restored(output: Tensor, unit: Tensor | None) -> Tensor:
    """A model's outputs [..., b, 1] or [..., b] in the unit of the targets. unit: [..., b or 1, 2], or None."""
    if unit is None:
        return output
    flat = output.squeeze(-1) if output.dim() == unit.dim() else output
    return (flat.double() * unit[..., 1] + unit[..., 0]).to(output.dtype).view(output.shape)
