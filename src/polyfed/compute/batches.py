"""The samples of each client's local steps: keyed by (seed, round, client), ragged, padded with weight zero."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyfed.base.arguments import answer
from polyfed.base.errors import ConfigError
from polyfed.base.randomness import Rekeyed, generator_key, key_of, mix
from polyfed.base.settings import found
from polyfed.base.values import COUNTED, Limits, Misfit, fitted
from polyfed.compute.augment import Augmentation, Draws
from polyfed.compute.split import Split, trained

BLOCK = 1 << 18  # samples whose order is drawn at a time: steps are made as they are needed
STEPS = Annotated[int, Limits(ge=1, le=COUNTED)]
PADDING = 1.3  # clients are padded to a common size only when their sizes are within this factor


class Batch(NamedTuple):
    """One step's samples of the first m clients.

    Attributes
    ----------
    x, y : Tensor
        [m, b, ...] inputs and targets.
    weight : Tensor or None
        [m, b] 1/b_i on the b_i real samples of client i, times their `Split.shares`, 0 on padding; None: all 1/b.
    sizes : list of int or None
        [m] b_i; None: all b.
    live : Tensor or None
        [m, 1] 0/1 float; None: every row still has a step to take.
    seed : callable or None
        () -> [m] uint64 that identify (round, client, step), for keyed draws inside a model (dropout).
    weighted, native : bool
        True where real samples may weigh other than 1/b_i, and where the compiled kernel may make gradients.
    places : array or None
        [m, b] rows of the split, of which client i's are the first sizes[i]; None: all of each client's.
    purpose : str
        Of its local solve, see `Batches.again`.
    """

    x: Tensor
    y: Tensor
    weight: Tensor | None = None
    sizes: list[int] | None = None
    live: Tensor | None = None
    seed: Callable[[], np.ndarray] | None = None
    weighted: bool = False
    native: bool = False
    places: np.ndarray | None = None
    purpose: str = "batches"

    @property
    def rows(self) -> int:
        """Number of clients, m."""
        return len(self.x)

    def mean(self, values: Tensor) -> Tensor:
        """[m, ...] the mean of [m, b, ...] numbers over each client's samples, weighted as their losses are."""
        if self.weight is None:
            return values.mean(1)
        return (values * self.weight.view(*self.weight.shape, *[1] * (values.dim() - 2))).sum(1)

    def row(self, i: int, b: int) -> "Batch":
        """Client i's first b samples as a batch of one row."""
        weight = self.weight[i : i + 1, :b] if self.weighted and self.weight is not None else None
        places = None if self.places is None else self.places[i : i + 1, :b]
        return Batch(self.x[i : i + 1, :b], self.y[i : i + 1, :b], weight, places=places)


class Each(ABC):
    """A number of local steps that may differ between clients; `str` is its word in config.toml."""

    @property
    @abstractmethod
    def equal(self) -> bool:
        """True where every client takes the same number in a round."""

    @abstractmethod
    def __call__(self, seed: int, round: int, keys: np.ndarray) -> np.ndarray:
        """[s] steps of the clients with these keys in this round."""


@dataclass(frozen=True)
class Work:
    """A client's amount of work in a round that it takes part in."""

    epochs: int = 1  # passes over its data
    steps: int | Callable[[int], int] | Each | None = None  # local steps instead: a number, by round, or per client
    batch_size: int | None = 32  # samples per step; None: all
    augment: Augmentation | None = None  # applied to every training batch

    def per_epoch(self, counts: np.ndarray) -> np.ndarray:
        """[s] steps in one pass; a client with fewer samples than a batch takes one step on all it has."""
        return np.ones_like(counts) if self.batch_size is None else -(-counts // self.batch_size)

    def per_step(self, counts: np.ndarray) -> float:
        """Samples that a client sees in one step, on average over clients."""
        return float(np.minimum(counts, self.batch_size or counts.max(initial=0)).mean())

    def taken(self, counts: np.ndarray, round: int, keys: np.ndarray | None = None, seed: int = 0) -> np.ndarray:
        """[s] local steps in this round of clients with `counts` samples."""
        if self.steps is None:
            return self.epochs * self.per_epoch(counts)
        if isinstance(self.steps, Each):
            # without keys equal numbers, which are enough to put clients in an order
            return np.ones_like(counts) if keys is None else self.steps(seed, round, keys)
        steps = answer("local_steps", self.steps, round) if callable(self.steps) else self.steps
        try:
            return np.full_like(counts, fitted(steps, STEPS))
        except Misfit:
            raise ConfigError(f"local_steps: {found(steps, 'an integer of at least 1')} (in round {round})") from None


class Batches:
    """The samples of the s clients of one call, step by step. Iterating twice gives the same batches twice.

    Clients are ordered by their number of steps, longest first: those still at work are always the first rows, and a
    client that has finished drops out of the batch.
    """

    def __init__(
        self,
        split: Split,
        clients: np.ndarray,
        keys: np.ndarray,
        work: Work,
        seed: int,
        round: int,
        purpose: str = "batches",
        native: bool = False,
    ):
        self.split, self.clients, self.work, self.native = split, clients, work, native
        # native: the compiled kernel may take the steps and make gradients
        self._keys, self._seed, self._round, self._purpose = keys, seed, round, purpose
        self._counts = split.counts[clients]
        self._steps = work.taken(self._counts, round, keys, seed)
        self._padded: Batch | None = None
        self.taken = np.zeros_like(self._steps)  # [s] steps so far, those of `again` included
        self.together = [False]  # True once a batch of several clients was asked for, here or of what is made of them
        self.steps = torch.as_tensor(self._steps, device=split.x.device)
        self.samples = torch.as_tensor(self._counts, device=split.x.device)

    def again(
        self,
        purpose: str,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        batch_size: int | str | None = "same",
    ) -> "Batches":
        """The same clients with another amount of work and their own keyed order (a method's second local solve)."""
        size = self.work.batch_size if batch_size == "same" else batch_size
        assert not isinstance(size, str)
        work = replace(self.work, batch_size=size)
        if epochs is not None:
            work = replace(work, epochs=epochs, steps=None)
        if steps is not None:
            work = replace(work, steps=steps)
        other = Batches(self.split, self.clients, self._keys, work, self._seed, self._round, purpose, self.native)
        other.taken, other.together = self.taken, self.together
        if self._padded is not None:
            other._padded = self._padded._replace(purpose=purpose)
        return other

    def left_out(self, steps: Tensor) -> None:
        """Take back [s] steps that were counted and not taken."""
        self.taken -= steps.cpu().numpy().astype(self.taken.dtype)

    def on(self, x: Tensor) -> "Batches":
        """The same batches with other inputs: `x: [N, ...]`, all of the first client's, then the second's, ..."""
        at = np.arange(len(self.clients))
        split = self.split.given(self.clients, x)
        other = Batches(split, at, self._keys, self.work, self._seed, self._round, self._purpose, self.native)
        other.taken, other.together = self.taken, self.together
        return other

    @property
    def seen(self) -> int:
        """Samples of all steps of all clients; one that is seen twice counts twice."""
        return int((self._steps * np.minimum(self._counts, self.work.batch_size or self._counts)).sum())

    @property
    def full_batch(self) -> bool:
        """True where every step sees all of a client's samples."""
        return self.work.batch_size is None

    @property
    def equal_steps(self) -> bool:
        """True where every client of the federation takes the same number of steps, as the work is stated."""
        if isinstance(self.work.steps, Each):
            return self.work.steps.equal
        return self.full_batch or self.work.steps is not None

    @property
    def total(self) -> int:
        """Steps of the client with most."""
        return int(self._steps.max(initial=0))

    @property
    def same(self) -> Batch | None:
        """The batch of every step, where all clients take the same steps on all they have; else None."""
        same = self.full_batch and self.work.augment is None and (self._steps == self.total).all()
        return self.whole() if same and self.total > 1 else None

    def whole(self) -> Batch:
        """All training samples of every client, as one batch of s rows."""
        self.together[0] = True
        if self._padded is None:
            self._padded = padded(self.split, self.clients)._replace(
                seed=self._seeds(-1), native=self.native, purpose=self._purpose
            )
        return self._padded

    def counts(self, classes: int) -> Tensor:
        """[s, classes] training samples of each class, a weighted one as its weight over its client's mean weight."""
        split, sizes = self.split, self._counts
        rows = np.concatenate(
            [np.arange(int(a), int(a + b)) for a, b in zip(split.offsets[self.clients], sizes, strict=True)]
        )
        at = on_device(rows, split.x.device)
        place = on_device(np.repeat(np.arange(len(sizes)) * classes, sizes), split.x.device) + split.y[at]
        share = torch.ones(len(at), dtype=torch.float64, device=at.device) if split.shares is None else split.shares[at]
        return share.new_zeros(len(sizes) * classes).index_add_(0, place, share).view(-1, classes)

    def apart(self, share: float) -> tuple["Batches", "Batches"]:
        """The same work on part of each client's samples, and on the rest, a share drawn once for all rounds."""
        keys = np.stack(np.broadcast_arrays(*generator_key(self._seed, "apart", 0, self._keys)), -1)
        parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        for n, start, key in zip(self._counts.tolist(), self.split.offsets[self.clients].tolist(), keys, strict=True):
            # each part has a sample at least; of a client with a single one, both have it
            order, kept = start + Rekeyed()(key).permutation(n), min(max(1, round((1 - share) * n)), max(1, n - 1))
            parts[0].append(np.sort(order[:kept]))
            parts[1].append(np.sort(order[kept:] if n > 1 else order))
        clients, made = np.arange(len(keys)), list[Batches]()
        for rows in parts:
            split = self.split.at(self.clients, rows)
            one = Batches(split, clients, self._keys, self.work, self._seed, self._round, self._purpose, self.native)
            one.taken, one.together = self.taken, self.together
            made.append(one)
        return made[0], made[1]

    def repeat(self) -> range:
        """One number per step, for a solver that needs no batch but `same`; the steps count as those of iterating."""
        self.taken += self._steps
        return range(self.total)

    def __iter__(self) -> Iterator[Batch]:
        self.repeat()
        return self._on_all() if self.work.batch_size is None else self._on_parts()

    def _on_all(self) -> Iterator[Batch]:
        every = self.whole()
        x, y, weight, sizes = every[:4]
        if (self._steps == self.total).all() and self.work.augment is None:  # every step is the same but for dropout
            for k in range(self.total):
                yield every._replace(seed=self._seeds(k))
            return
        for first, at_work, rows in self._blocks(1):
            waiting = (at_work.sum(1) < rows).tolist()
            live = self._live(at_work) if any(waiting) else None
            for k, m in enumerate(rows.tolist()):
                yield Batch(
                    self._augmented(x[:m], first + k),
                    y[:m],
                    None if weight is None else weight[:m],
                    None if sizes is None else sizes[:m],
                    live[k, :m] if live is not None and waiting[k] else None,
                    self._seeds(first + k, m),
                    every.weighted,
                    self.native,
                    purpose=self._purpose,
                )

    def _on_parts(self) -> Iterator[Batch]:
        """Steps on `batch_size` samples or fewer."""
        self.together[0] = True
        width = int(min(self.work.batch_size or 0, self._counts.max(initial=1)))
        keyed, keys = Rekeyed(), self.order_keys()
        orders = [self._order(i, width, keyed, keys[i]) for i in range(len(self.clients))]
        for first, at_work, rows in self._blocks(width):
            index, sizes = self._drawn(orders, first, len(at_work), width)
            real = np.arange(width) < sizes[:, :, None]
            full = (sizes == width) | ~at_work
            # decided for all steps at once: a step of a small model is so short that even this would show
            at, weighted = on_device(index, self.split.x.device), self.split.weight is not None
            weights = None if full.all() and not weighted else _weights(self.split, real, at)
            ragged, waiting = (~full.all(1)).tolist(), (at_work.sum(1) < rows).tolist()
            live = self._live(at_work) if any(waiting) else None
            for k, m in enumerate(rows.tolist()):
                x, y = _take(self.split, at[k, :m], self.clients[:m])
                yield Batch(
                    self._augmented(x, first + k, index[k, :m]),
                    y,
                    weights[k, :m] if weights is not None and (weighted or ragged[k]) else None,
                    sizes[k, :m].tolist() if ragged[k] else None,
                    live[k, :m] if live is not None and waiting[k] else None,
                    self._seeds(first + k, m),
                    weighted,
                    self.native,
                    index[k, :m],
                    self._purpose,
                )

    def _blocks(self, width: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """The steps, in blocks: the first step, who is at work [k, s], and up to which row somebody is [k]."""
        steps, most = self._steps, max(1, BLOCK // max(1, len(self._steps) * width))
        for first in range(0, self.total, most):
            at_work = steps[None, :] > np.arange(first, min(first + most, self.total))[:, None]
            yield first, at_work, len(steps) - np.argmax(at_work[:, ::-1], axis=1)

    def _augmented(self, x: Tensor, k: int, rows: np.ndarray | None = None) -> Tensor:
        """The inputs of step k, x: [m, b, ...], augmented. rows: [m, b] of the split; None: all of each client's"""
        augment = self.work.augment
        if augment is None:
            return x
        m, b = x.shape[:2]
        # a sample is known by its place among its client's own, which no other client changes
        own = np.arange(b) if rows is None else rows - self.split.offsets[self.clients[:m], None]
        purpose = key_of(f"augment {self._purpose}")
        keys = np.broadcast_to(mix(self._seed, purpose, self._round, self._keys[:m, None], k, own), (m, b))
        flat = x.flatten(0, 1) if rows is not None else x.flatten(0, 1).clone()  # which it may write to
        changed = answer("augment", augment, flat, Draws(keys.reshape(-1), x.device), takes=Tensor)
        if changed.shape != flat.shape or changed.dtype != flat.dtype:
            made, of = ([*t.shape, str(t.dtype).removeprefix("torch.")] for t in (changed, flat))
            raise ConfigError(f"augment: made {made} of {of}, expected the same shape and type")
        return changed.reshape(x.shape)

    def _seeds(self, k: int, m: int | None = None) -> Callable[[], np.ndarray]:
        return lambda: mix(self._seed, self._round, self._keys[:m], k)

    def step_seeds(self) -> np.ndarray:
        """[s, steps] uint64, `Batch.seed` of every step."""
        return mix(self._seed, self._round, self._keys[:, None], np.arange(self.total))

    def _live(self, at_work: np.ndarray) -> Tensor:
        """[k, s] -> [k, s, 1], copied to the device once for all steps."""
        dtype = self.split.x.dtype if self.split.x.is_floating_point() else torch.float32
        return on_device(at_work[:, :, None], self.split.x.device).to(dtype)

    def _drawn(
        self, orders: list[Iterator[np.ndarray]], first: int, count: int, width: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """For `count` steps from `first`: [count, s, b] rows of the split, and [count, s] real samples."""
        index = np.empty((count, len(orders), width), dtype=np.int64)
        sizes = np.zeros((count, len(orders)), dtype=np.int64)
        for i, order in enumerate(orders):
            index[:, i] = min(self.split.offsets[self.clients[i]], len(self.split.x) - 1)  # it may have no sample
            for k in range(min(count, int(self._steps[i]) - first)):
                part = next(order)
                index[k, i, : len(part)] = part
                sizes[k, i] = len(part)
        return index, sizes

    def order_keys(self) -> np.ndarray:
        """[s, 2] keys of the generators that draw the clients' orders."""
        return np.stack(np.broadcast_arrays(*generator_key(self._seed, self._purpose, self._round, self._keys)), -1)

    def _order(self, i: int, width: int, keyed: Rekeyed, key: np.ndarray) -> Iterator[np.ndarray]:
        """The rows of the split that client i takes, step after step: epochs in a keyed order."""
        n, start = int(self._counts[i]), int(self.split.offsets[self.clients[i]])
        epochs = range(-(-int(self._steps[i]) // max(1, -(-n // width))))
        few = len(epochs) * n <= BLOCK  # then all are drawn before another client has the generator
        rng = (keyed if few else Rekeyed())(key)
        drawn = (rng.permutation(n) for _ in epochs)
        for order in list(drawn) if few else drawn:
            order += start
            for j in range(0, max(1, n), width):  # a client without samples takes its steps on none
                yield order[j : j + width]


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on a device; to CUDA from pinned memory, without waiting for the work there."""
    t = torch.from_numpy(array)
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t.to(device)


def padded(split: Split, clients: np.ndarray) -> Batch:
    """All samples of `clients: [s]` as one batch of s rows; for one client a view without a copy."""
    counts, offsets, weighted = split.counts[clients], split.offsets[clients], split.weight is not None
    column = np.arange(int(counts.max()))
    if len(clients) == 1 and not weighted:
        x, y = split.client(int(clients[0]))
        return Batch(x[None], trained(y, split.units(clients))[None])
    real = column < counts[:, None]
    index = np.where(real, offsets[:, None] + column, np.minimum(offsets, len(split.x) - 1)[:, None])
    at = on_device(index, split.x.device)
    x, y = _take(split, at, clients)
    weight = None if real.all() and not weighted else _weights(split, real, at)
    return Batch(x, y, weight, None if real.all() else counts.tolist(), weighted=weighted)


def alike(counts: np.ndarray, most: int, order: np.ndarray) -> list[np.ndarray]:
    """Cut clients, taken in `order`, into chunks of at most `most` whose sizes are within PADDING of the first's."""
    chunks: list[list[int]] = []
    for i in order.tolist():
        if chunks and len(chunks[-1]) < most and counts[chunks[-1][0]] <= PADDING * counts[i]:
            chunks[-1].append(i)
        else:
            chunks.append([i])
    return [np.array(c) for c in chunks]


def _take(split: Split, index: Tensor, clients: np.ndarray) -> tuple[Tensor, Tensor]:
    """Inputs and training targets [m, b, ...] at rows `index: [m, b]` of the split, which `clients: [m]` own."""
    flat = index.reshape(-1)
    x, y = split.x.index_select(0, flat), split.y.index_select(0, flat)
    unit = split.units(clients[:, None])
    return x.view(index.shape + x.shape[1:]), trained(y.view(index.shape + y.shape[1:]), unit)


def _weights(split: Split, real: np.ndarray, at: Tensor) -> Tensor:
    """`Batch.weight` [..., b] of rows `at: [..., b]` of the split, where `real` is True."""
    size = np.maximum(real.sum(-1, keepdims=True), 1)
    dtype = split.x.dtype if split.x.is_floating_point() else torch.float64  # for tokens, until the model's is known
    mean = on_device(real / size, split.x.device)
    return (mean if split.shares is None else mean * split.shares[at]).to(dtype)
