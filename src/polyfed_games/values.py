"""The numbers of a federation seen as a game; a coalition is an integer whose bit i is set if player i is in it.

Receiver i plays u_i(T): the score of its model when T and i federate, minus that of its own model.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from polyfed.base.randomness import generator

FEWEST = 3  # joinings that an interval rests on: of two it would cover 89 % where it says 95

Weights = dict[int, float]  # coalition -> the weight of the receiver's score in it
Walk = tuple[int, ...]  # players in the order in which they join


def members(coalition: int) -> list[int]:
    """The players of a coalition, ascending."""
    return [i for i in range(coalition.bit_length()) if coalition >> i & 1]


def coalition(players: Iterable[int]) -> int:
    """The coalition of some players."""
    return sum(1 << i for i in set(players))


def everyone(n: int) -> int:
    """The coalition of all n players."""
    return (1 << n) - 1


def shapley(n: int, receiver: int, giver: int) -> Weights:
    """The Shapley value of `giver` j for `receiver` i as weights of the receiver's scores in all coalitions.

    phi_ij = sum_T |T|! (n - 2 - |T|)! / (n - 1)! (u_i(T + j) - u_i(T)), T without i and j; sum_j phi_ij = u_i(all). It
    is linear in the scores, so that intervals follow from each test sample's part.
    """
    others, weights = [k for k in range(n) if k not in (receiver, giver)], Weights()
    for pattern in range(1 << len(others)):
        t = pattern.bit_count()
        base = coalition([receiver, *(others[k] for k in members(pattern))])
        weight = math.factorial(t) * math.factorial(n - 2 - t) / math.factorial(n - 1)
        weights[base | 1 << giver], weights[base] = weight, -weight
    return weights


# sampling


def walks(n: int, count: int, seed: int) -> list[Walk]:
    """Random orders in which players join, cut so that every pair sees coalitions of all sizes equally often."""
    # Newcomer p + 1 is seen by the p who are there. An order goes on beyond p newcomers with probability p / (p + 1)
    # and reaches the p-th with 1/p: a given j joins a given i in step p with probability 1/p * 1/n * p/(n - 1), the
    # same for every p, so what j's joining changes for i is an unbiased sample of the Shapley value. Lengths are drawn
    # systematically: v = (k + U)/count, floor(1/v) steps.
    rng = generator(seed, "coalitions")
    start, orders = rng.random(), list[Walk]()
    for k in range(count):
        steps = min(n - 1, math.floor(count / (k + start))) if k + start > 0 else n - 1
        orders.append(tuple(int(i) for i in rng.permutation(n)[: steps + 1]))
    return orders


def visited(orders: Iterable[Walk]) -> list[int]:
    """The coalitions of two and more on the way of the walks, each once."""
    steps = (coalition(w[: p + 1]) for w in orders for p in range(1, len(w)))
    return list(dict.fromkeys(steps))


def joinings(orders: Iterable[Walk], receiver: int, giver: int) -> list[tuple[int, int]]:
    """(coalition with the giver, coalition before) of every step in which the giver joins the receiver."""
    pairs = []
    for w in orders:
        if receiver in w and giver in w and w.index(receiver) < (p := w.index(giver)):
            pairs.append((coalition(w[: p + 1]), coalition(w[:p])))
    return pairs


def sampled(orders: Sequence[Walk], receiver: int, giver: int) -> Weights:
    """The mean change over the steps in which the giver joins the receiver; empty where there was none."""
    steps, weights = joinings(orders, receiver, giver), Weights()
    for after, before in steps:
        weights[after] = weights.get(after, 0.0) + 1 / len(steps)
        weights[before] = weights.get(before, 0.0) - 1 / len(steps)
    return weights


def standard_error(changes: np.ndarray) -> float:
    """Standard error of a mean of sampled changes, exactly 0 where all are equal; NaN for fewer than two."""
    return float((changes - changes[0]).std(ddof=1) / math.sqrt(len(changes))) if len(changes) > 1 else math.nan


# stability


@dataclass(frozen=True)
class Deviation:
    """A coalition that some players would rather be in: `movers`, and those they would join."""

    movers: tuple[int, ...]
    coalition: int


@dataclass(frozen=True)
class Stability:
    """Stability of a partition, as in Donahue and Kleinberg, "Model-sharing games" (AAAI 2021)."""

    nash: bool  # nobody would rather be alone or in another coalition of the partition
    individual: bool  # nobody would rather move to where nobody would lose by it
    core: bool | None  # no set of players would all rather be a coalition; None: not all coalitions are known
    # for each notion that fails, the deviation that gains most (for a set: for the one who gains least)
    against: Mapping[str, Deviation]


# coalition -> [n] every member's gain over its own model; others' entries say nothing
Scores = Mapping[int, np.ndarray] | Mapping[int, list[float]]


def stability(partition: Sequence[int], gains: Scores, n: int) -> Stability:
    """Judge a partition by gains of its coalitions, with one player more, and of single players; `core` needs all."""
    of = {i: c for c in partition for i in members(c)}
    best: dict[str, tuple[float, Deviation]] = {}

    def wished(notion: str, gain: float, movers: tuple[int, ...], joined: int) -> None:
        if notion not in best or gain > best[notion][0]:
            best[notion] = gain, Deviation(movers, joined)

    for i, here in of.items():
        for there in (0, *partition):
            joined = there | 1 << i
            if joined in (there, here) or not gains[joined][i] > gains[here][i]:
                continue
            gain = gains[joined][i] - gains[here][i]
            wished("nash", gain, (i,), joined)
            if all(gains[joined][j] >= gains[there][j] for j in members(there)):
                wished("individual", gain, (i,), joined)
    all_known = len(gains) >= everyone(n)
    for c in gains if all_known else ():
        who = members(c)
        if all(gains[c][i] > gains[of[i]][i] for i in who):
            wished("core", min(gains[c][i] - gains[of[i]][i] for i in who), tuple(who), c)
    against = {notion: deviation for notion, (_, deviation) in best.items()}
    core = "core" not in against if all_known else None
    return Stability("nash" not in against, "individual" not in against, core, against)


def partitions(n: int) -> Iterator[tuple[int, ...]]:
    """Every partition of n players, as ascending coalitions."""

    def grow(i: int, blocks: list[int]) -> Iterator[tuple[int, ...]]:
        if i == n:
            yield tuple(blocks)
            return
        for k in range(len(blocks)):
            yield from grow(i + 1, [*blocks[:k], blocks[k] | 1 << i, *blocks[k + 1 :]])
        yield from grow(i + 1, [*blocks, 1 << i])

    yield from grow(0, [])


def most_stable(gains: Mapping[int, np.ndarray], n: int, counted: Collection[int]) -> tuple[tuple[int, ...], Stability]:
    """The partition that holds best, when all coalitions are known; means are over the players `counted`."""
    best: tuple[tuple[int, float, int], tuple[int, ...], Stability] | None = None
    listed = {c: held.tolist() for c, held in gains.items()}  # plain numbers are quicker to look up
    for p in partitions(n):
        held = stability(p, listed, n)
        mean = mean_gain(listed, p, counted)
        # core and individually stable, core, individually stable, any; then the mean gain, then few coalitions
        rank = (2 * bool(held.core) + held.individual, mean, -len(p))
        if best is None or rank > best[0]:
            best = rank, p, held
    assert best is not None
    return best[1], best[2]


def mean_gain(
    gains: Mapping[int, Sequence[float] | np.ndarray], partition: Sequence[int], counted: Collection[int]
) -> float:
    """Mean over the players `counted` of what each gains in its coalition."""
    return sum(float(gains[c][i]) for c in partition for i in members(c) if i in counted) / len(counted)


def grouped(help: np.ndarray) -> tuple[int, ...]:
    """A partition from the pairs' help [n, n] (row: receives), for when not every coalition can be tried."""
    groups = [[i] for i in range(len(help))]
    while True:
        pairs = [
            (min(float(help[np.ix_(a, b)].mean()), float(help[np.ix_(b, a)].mean())), x, y)
            for x, a in enumerate(groups)
            for y, b in enumerate(groups[:x])
        ]
        most, x, y = max(pairs, default=(0.0, 0, 0))  # the groups that give each other most are merged
        if most <= 0:
            return tuple(sorted(coalition(g) for g in groups))
        groups[y] += groups.pop(x)


def labels(partition: Sequence[int], n: int) -> list[int]:
    """[n] the number of each player's coalition."""
    return [next(k for k, c in enumerate(partition) if c >> i & 1) for i in range(n)]
