"""Held-out splits and scaling; nothing here looks at a test or validation sample to prepare a training one."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, SupportsInt

import numpy as np
from torch import Tensor

from polyfed.base.errors import DataError, few
from polyfed.base.part import CHECK
from polyfed.base.settings import shown
from polyfed.data.flat import Ragged
from polyfed.data.flat import held as held_of

POOLED = (
    "{what} standardised with the pooled mean and variance of all clients' training rows: every client reveals its "
    "sums to the others"
)
TEST, VALIDATION, OFFICIAL, ASSIGN, RATIO, NOISE = 11, 12, 13, 14, 15, 16  # purposes of the draws
GIVEN = ("train", "validation", "test")  # numbers of parts, where rows say theirs
PURPOSES = {"test": TEST, "validation": VALIDATION}


def keyed(seed: int, purpose: int, name: str = "") -> np.random.Generator:
    """A generator for one seed, purpose and client name, the same on every machine."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise DataError(f"seed: found {seed!r}, expected an integer of at least 0")
    word = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
    return np.random.default_rng([int(seed), purpose, word])


def check_fraction(value: float, name: str) -> float:
    """`value` as a float in [0, 1), or DataError naming `name`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise DataError(f"{name}: found {value!r}, expected a number from 0 to below 1")
    return float(value)


def positions(given: Iterable[SupportsInt], n: int, subject: str) -> list[int]:
    """Positions of some of n clients. Raises DataError for none, and for one that there is not."""
    chosen = [int(i) for i in given]
    if not chosen or not all(-n <= i < n for i in chosen):
        raise DataError(f"{subject}: found {shown(chosen)}, expected positions of the {n} clients, one or more")
    return chosen


def held_out(
    n: int,
    fraction: float,
    rng: np.random.Generator,
    times: np.ndarray | None = None,
    whose: np.ndarray | None = None,
    strata: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Positions of `n` samples in (kept, held), ascending, at least one kept, and one held if n >= 2 and fraction > 0.

    Draws at random; with `times` [n] the latest are held, equal times together; with `whose` [n] groups are drawn. With
    `strata` [n] all this holds in each stratum, so that one of a single sample, or group, stays whole.
    """
    if whose is not None:
        groups, first, at = np.unique(whose, return_index=True, return_inverse=True)
        of = None if strata is None else strata[first]
        if strata is not None and of is not None and (strata != of[at]).any():
            raise DataError('split = "stratified" cannot hold: the rows of one group are of several classes')
        kept = np.isin(at, held_out(len(groups), fraction, rng, strata=of)[0])
        return np.flatnonzero(kept), np.flatnonzero(~kept)
    if strata is not None:
        rows = [np.flatnonzero(strata == k) for k in np.unique(strata)]
        out = [at[held_out(len(at), fraction, rng)[1]] for at in rows]
        held = np.sort(np.concatenate([np.zeros(0, dtype=np.int64), *out]))
        return np.setdiff1d(np.arange(n), held, assume_unique=True), held
    count = 0 if fraction == 0 or n < 2 else min(max(1, round(n * fraction)), n - 1)
    if times is None:
        held = np.sort(rng.permutation(n)[:count])
    else:
        order = np.argsort(times, kind="stable")
        cut = n - count
        borders = np.flatnonzero(np.diff(times[order])) + 1
        if count and len(borders):
            cut = int(borders[np.abs(borders - cut).argmin()])
        held = np.sort(order[cut:])
    kept = np.setdiff1d(np.arange(n), held, assume_unique=True)
    return kept, held


def uneven(names: Sequence[str], rows: Any, held: Any, fraction: float, part: str) -> list[str]:
    """A note on clients with more than twice or less than half of `fraction` held out; `rows` and `held` are [n]."""
    n, k = np.asarray(rows), np.asarray(held)
    share = k / np.maximum(n, 1)
    odd = np.flatnonzero((share < fraction / 2) | (share > 2 * fraction)) if fraction else []
    wrong = [f"{names[i]} {k[i]} of {n[i]}" for i in map(int, odd)]
    wanted = f"{part} fraction: {fraction:g} of each client's rows"
    if fraction and not k.any() and n.max() > 1:
        then = "a client needs two groups, or two times, to hold one out"
        raise DataError(f"{wanted} cannot be held out ({few(wrong)}); {then}")
    return [f"{CHECK}{wanted} were to be held out, and are not: {few(wrong)}"] if wrong else []


@dataclass(frozen=True)
class Cut:
    """Division of each client's rows in parts: draws keyed by its name, test rows first."""

    seed: int
    test: float = 0.0
    validation: float = 0.0

    def _steps(self, held: bool) -> list[tuple[str, float]]:
        return [("test", self.test)] * held + [("validation", self.validation)] * (self.validation > 0)

    def of(
        self, n: int, name: str, held: bool = True, given: np.ndarray | None = None, **by: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        """The rows of each part, of `n`, by `held_out`, or as `given` [n]; test rows only if `held`.

        by: times, whose and strata [n]
        """
        train, parts = np.arange(n), {"test": np.zeros(0, dtype=np.int64)}
        if given is not None:
            train, *rest = (np.flatnonzero(given == k) for k in range(len(GIVEN)))
            parts = {part: rows for part, rows in zip(GIVEN[1:], rest, strict=True) if len(rows) or part == "test"}
            if not len(train):
                raise DataError(f"client {name!r}: no row is for training, expected some")
        for part, fraction in self._steps(held and given is None):
            if part != "test" and part in parts:
                continue
            some = {key: None if of is None else of[train] for key, of in by.items()}
            try:
                kept, out = held_out(len(train), fraction, keyed(self.seed, PURPOSES[part], name), **some)
            except DataError as e:
                raise DataError(f"client {name!r}: {e}") from None
            parts[part], train = train[out], train[kept]
        return {"train": train} | {part: parts[part] for part in ("validation", "test") if part in parts}

    def flat(self, names: Sequence[str], counts: np.ndarray, held: bool = True) -> tuple[dict[str, Ragged], list[str]]:
        """The rows of each part of clients with `counts` [n] rows, end to end; what `each` gives, by arrays."""
        total, notes = int(counts.sum()), list[str]()
        train = np.arange(total, dtype=np.int32 if total < 1 << 31 else np.int64)
        parts = {"test": Ragged(train[:0], counts * 0)}
        for part, fraction in self._steps(held):
            keyed(self.seed, PURPOSES[part])  # which checks the seed
            out = held_of(self.seed, PURPOSES[part], names, counts, fraction)
            took = np.bincount(np.repeat(np.arange(len(counts)), counts)[out], minlength=len(counts))
            notes += uneven(names, counts, took, fraction, part)
            parts[part], train, counts = Ragged(train[out], took), train[~out], counts - took
        parts["train"] = Ragged(train, counts)
        return {part: parts[part] for part in GIVEN if part in parts}, notes

    def each(
        self, names: Sequence[str], rows: Sequence[np.ndarray], held: bool = True, **columns: np.ndarray | None
    ) -> tuple[dict[str, list[np.ndarray]], list[str]]:
        """Every client's `rows` by part, and notes by `uneven`; `columns` has times and groups of all rows."""
        if all(of is None for of in columns.values()):
            whole = np.concatenate(rows)
            flat, notes = self.flat(names, np.array([*map(len, rows)]), held)
            return {part: [whole[at] for at in places] for part, places in flat.items()}, notes
        cuts: list[dict[str, np.ndarray]] = []
        for name, mine in zip(names, rows, strict=True):
            some = {key: None if of is None else of[mine] for key, of in columns.items()}
            cuts.append({part: mine[at] for part, at in self.of(len(mine), name, held, **some).items()})
        there = [part for part in GIVEN if any(part in cut for cut in cuts)]
        parts = {part: [cut.get(part, np.zeros(0, dtype=np.int64)) for cut in cuts] for part in there}
        counts, notes = np.array([*map(len, rows)]), list[str]()
        for part, fraction in self._steps(held) if columns.get("given") is None else ():
            out = np.array([*map(len, parts[part])])
            notes += uneven(names, counts, out, fraction, part)
            counts = counts - out
        return parts, notes


def largest_remainder(counts: np.ndarray, total: int) -> np.ndarray:
    """Split `total` seats in the ratio of `counts` [C], exactly (Hamilton's method)."""
    counts = np.asarray(counts, dtype=np.int64)
    whole, rest = np.divmod(counts * total, counts.sum())
    order = np.lexsort((np.arange(len(counts)), -counts, -rest))  # a tie: the larger count, then the lower index
    whole[order[: total - int(whole.sum())]] += 1
    return whole


def ratio_quota(counts: np.ndarray, available: np.ndarray, total: int) -> np.ndarray:
    """`largest_remainder` of the largest size up to `total` at which no class needs more than `available: [C]`."""
    held = counts > 0
    size = min(total, int(((available[held] + 1) * counts.sum() // counts[held]).min()))
    while (quota := largest_remainder(counts, size))[held].sum() and (quota > available).any():
        size -= 1
    return quota


def floor_quota(counts: np.ndarray, total: int) -> np.ndarray:
    """floor(share * total) per class: mostly fewer than `total` in all, as in FedSLR's released code."""
    # rounding included: a share of 0.29 of 100 gives 28
    return np.floor(counts / counts.sum() * total).astype(np.int64)


def standardise(train: Tensor, others: Sequence[Tensor], constant: np.ndarray, method: str) -> tuple[Tensor, Tensor]:
    """Scale inputs in place by the training rows `train` [N, ...] alone, except where `constant` [...]; (shift, scale).

    `others` [*, ...] are scaled likewise. "z-score"; "minmax" scales training rows to [-1, 1], "unit" to [0, 1].
    """
    x = train.double()
    if method == "z-score":
        shift, scale = x.mean(0), x.var(0, unbiased=False).sqrt()
    else:
        low, high = x.amin(0), x.amax(0)
        shift, scale = (low, high - low) if method == "unit" else ((low + high) / 2, (high - low) / 2)
    scale[scale < 1e-12] = 1  # a column that is constant in `train` alone is only centred
    shift[constant], scale[constant] = 0, 1
    for t in (train, *others):
        scale_with(t, shift, scale)
    return shift, scale


def scale_with(x: Tensor, shift: Tensor, scale: Tensor) -> None:
    """Scale inputs `x: [N, ...]` in place."""
    x.copy_((x.double() - shift) / scale)
