"""The runs of a folder of coalitions: every client's score in every coalition, and the partition that holds."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from polyfed.base.errors import RunError
from polyfed.base.randomness import key_of
from polyfed.metrics.metric import Metric, mean_of
from polyfed.report.pairs import Evidence, evidence
from polyfed.report.verdicts import bearing
from polyfed.runs import ownership as files
from polyfed.runs.numbers import Numbers
from polyfed_games import values as game
from polyfed_games.values import Stability, Walk, Weights

HEAD = "coalitions.toml"
ALL = "all"  # label of the coalition of all
PLAIN = re.compile(r"[A-Za-z0-9._-]+")


def names_of(c: int, names: Sequence[str]) -> str:
    """The label of a coalition's runs: its members where that makes a folder's name, else a key of them."""
    who = [names[i] for i in game.members(c)]
    if len(who) == len(names):
        return ALL
    text = "+".join(who) if len(who) > 1 else f"own-{who[0]}"
    plain = len(text) <= 100 and all(PLAIN.fullmatch(name) for name in who)
    return text if plain else f"{len(who)}-clients-{key_of(chr(0).join(who)):016x}"


def walks_of(n: int, samples: int | None, seed: int) -> list[Walk]:
    """The walks in which every client joins every other `samples` times on average; none: every coalition is there."""
    return [] if samples is None else game.walks(n, samples * n, seed)


@dataclass(frozen=True, eq=False)
class Found:
    """The scores in all runs of a folder: S seeds, K coalitions, n clients."""

    folder: Path
    names: tuple[str, ...]
    seeds: tuple[int, ...]
    label: str  # of the coalitions' method
    count: int | None
    metric: Metric
    split: str
    place: dict[int, int]  # coalition -> its row below
    test: np.ndarray  # [S, K, n] merits, NaN where there is none
    raw: np.ndarray  # [S, K, n] scores
    validation: np.ndarray  # [S, K, n] scores
    added: dict[tuple[int, int], np.ndarray]  # (seed's row, client) -> [K, m] each test sample's part
    ids: dict[tuple[int, int], np.ndarray]  # the same -> [m] the samples
    samples: list[tuple[float, int]]  # (share tested, number) of each client
    tested: list[int]  # the samples that each client is judged on
    against: dict[str, dict[int, dict[str, Any]]]  # label -> seed -> the method's findings
    seconds: float
    trainings: int
    notes: tuple[str, ...]

    @cached_property
    def counted(self) -> tuple[int, ...]:
        """The clients that means are over."""
        return bearing(dict(enumerate(self.tested)))

    @property
    def n(self) -> int:
        return len(self.names)

    @cached_property
    def orders(self) -> list[Walk]:
        return walks_of(self.n, self.count, self.seeds[0])

    @classmethod
    def read(cls, folder: Path) -> "Found":
        """Raises RunError for a folder that is not one of coalitions, or not complete."""
        head = folder / HEAD
        if not head.is_file():
            raise RunError(f"{folder}: holds no coalitions (no {HEAD})")
        config = files.unsealed(head)
        told, seeds = config["coalitions"], tuple(config["seeds"])
        names, labels = tuple(told["clients"]), told["labels"]
        n, at = len(names), {name: i for i, name in enumerate(names)}
        places = [p for p in sorted((folder / "runs").glob("*-seed*")) if (p / "summary.json").exists()]
        runs = [Numbers.of(p, p.name.rpartition("-seed")[0]) for p in places]
        runs = [r for r in runs if r.status != "interrupted"]
        against = {
            k: {r.seed: r.findings.written() if r.status == "finished" else {} for r in runs if r.label == k}
            for k in labels[1:]
        }
        own = {(r.label, r.seed): r for r in runs if r.label not in against}
        over = {key: r for key, r in own.items() if r.status == "finished"}
        wanted = [*(1 << i for i in range(n)), game.everyone(n)]
        if told.get("samples") is None:
            wanted = list(range(1, 1 << n))
        if not over or any((names_of(c, names), s) not in own for c in wanted for s in seeds):
            raise RunError(f"{folder}: is not finished; finish it with: polyfed resume {folder}")
        first, shares = next(iter(over.values())), [r.shares() for r in over.values()]
        judged = {name: k for r in over.values() for name, k in r.judged(first.split).items()}
        masks = {game.coalition(at[name] for name in r.about.names) for r in own.values()}
        place = {c: k for k, c in enumerate(sorted(masks, key=lambda c: (c.bit_count(), c)))}
        spent = sum(r.summary.seconds for r in runs if math.isfinite(r.summary.seconds))
        metric, scores = first.summary.leads, _scores(over, names, seeds, place, first)
        return cls(
            folder, names, seeds, labels[0], told.get("samples"), metric, first.split, place, metric.merit(scores[0]),
            *scores, [next(of[name] for of in shares if name in of) for name in names], [judged[k] for k in names],
            against, spent, len(runs), tuple(dict.fromkeys(note for r in own.values() for note in r.about.notes)),
        )  # fmt: skip

    # combinations of scores

    def row(self, weights: Weights) -> np.ndarray:
        """[K] weights by row."""
        weight = np.zeros(len(self.place))
        for c, w in weights.items():
            weight[self.place[c]] += w
        return weight

    def evidence(self, client: int, weights: np.ndarray) -> Evidence:
        """Evidence on a combination of one client's scores; weights are [K], or [S, K] where they differ by seed."""
        w = np.broadcast_to(weights, (len(self.seeds), len(self.place)))
        means, parts = [], []
        for s in range(len(self.seeds)):
            used = np.flatnonzero(w[s])
            mean = float(w[s, used] @ self.test[s, used, client])
            if not math.isfinite(mean):
                continue
            means.append(mean)
            if (s, client) in self.added and self.split == "test":
                parts.append((self.ids[s, client], w[s, used] @ self.added[s, client][used]))
        level = abs(mean_of(self.raw[:, self.place[1 << client], client]))
        return evidence(self.metric, means, parts, self.samples[client], level)

    def gain(self, client: int, c: int) -> Weights:
        """The client's gain over its own model in a coalition."""
        return {c: 1.0, 1 << client: -1.0} if c != 1 << client else {}

    @cached_property
    def settled(self) -> tuple[tuple[int, ...], Stability]:
        """The partition that holds best, see `settle`."""
        return settle(self)

    @cached_property
    def gains(self) -> dict[int, np.ndarray]:
        """{coalition: [n] gains over the own models, mean over seeds}."""
        own = np.stack([self.test[:, self.place[1 << i], i] for i in range(self.n)], 1)
        lost = np.isnan(own).all(0)
        gains = {}
        for c, k in self.place.items():
            # a coalition whose run diverged is the worst; a client without any score is indifferent
            change = np.where(np.isnan(self.test[:, k]) & ~np.isnan(own), -math.inf, self.test[:, k] - own)
            mean = np.array([mean_of(column) for column in change.T])
            gains[c] = np.where(lost, 0.0, np.where(np.isnan(mean), -math.inf, mean))
        return gains

    @cached_property
    def shapley(self) -> np.ndarray:
        """[n, n] Shapley values, row: receives; NaN on the diagonal and where no sample was drawn."""
        phi = np.full((self.n, self.n), math.nan)
        for i in range(self.n):
            for j in range(self.n):
                if i != j and (w := self.weights(i, j)):
                    used = [(x, self.place[c]) for c, x in w.items() if x]
                    phi[i, j] = mean_of(sum(x * self.test[:, k, i] for x, k in used))  # pyrefly: ignore[bad-argument-type]
        return phi

    def weights(self, receiver: int, giver: int) -> Weights:
        """The Shapley value of one client for another, exact or sampled."""
        return game.sampled(self.orders, receiver, giver) if self.orders else game.shapley(self.n, receiver, giver)

    def sampling(self, receiver: int, giver: int) -> tuple[float, int]:
        """(standard error that the sampling of coalitions adds, steps that it rests on)."""
        steps = game.joinings(self.orders, receiver, giver)
        at = [(self.place[a], self.place[b]) for a, b in steps]
        changes = np.array([mean_of(self.test[:, a, receiver] - self.test[:, b, receiver]) for a, b in at])
        return game.standard_error(np.round(changes, 12)), len(steps)  # equal but for rounding is equal


Scores = tuple[np.ndarray, np.ndarray, dict[tuple[int, int], np.ndarray], dict[tuple[int, int], np.ndarray]]


def _scores(
    runs: Mapping[tuple[str, int], Numbers], names: Sequence[str], seeds: Sequence[int], place: Mapping[int, int],
    first: Numbers,
) -> Scores:  # fmt: skip
    """`raw`, `validation`, `added` and `ids` of `Found`."""
    shape = (len(seeds), len(place), len(names))
    raw, validation, added, ids = np.full(shape, math.nan), np.full(shape, math.nan), {}, {}
    for s, seed in enumerate(seeds):
        for i, name in enumerate(names):
            alone = runs.get((names_of(1 << i, names), seed))
            if alone is not None and alone.added and name in alone.added:
                ids[s, i] = alone.added[name][0]
                added[s, i] = np.full((len(place), len(ids[s, i])), math.nan)
        for c, k in place.items():
            run = runs.get((names_of(c, names), seed))
            if run is None:
                continue
            held = run.values("validation") if "validation" in run.summary.final else {}
            tested, parts = run.values(first.split), run.added or {}
            for i in game.members(c):
                raw[s, k, i] = tested.get(names[i], math.nan)
                validation[s, k, i] = held.get(names[i], math.nan)
                mine = parts.get(names[i])
                if mine is not None and (s, i) in added and len(mine[1]) == len(ids[s, i]):
                    added[s, i][k] = first.summary.leads.sign * mine[1]
    return raw, validation, added, ids


def settle(trained: Found, train: Callable[[list[int]], None] | None = None) -> tuple[tuple[int, ...], Stability]:
    """(the partition that holds best, its stability); `train` makes coalitions that are still needed."""
    n = trained.n
    if not trained.orders:
        return game.most_stable(trained.gains, n, trained.counted)
    # Not every coalition is known: from the groups that the Shapley values suggest clients move, one at a time, to
    # where they would rather be and nobody would lose by it, until nobody would or everybody has once on average.
    partition = game.grouped(np.nan_to_num(trained.shapley))
    held = Stability(False, False, None, {})
    for _ in range(n + 1):
        if missing := [c for c in needed(partition) if c not in trained.place]:
            if train is None:
                raise RunError(f"{trained.folder}: is not finished; finish it with: polyfed resume {trained.folder}")
            train(missing)
            trained = Found.read(trained.folder)
        held = game.stability(partition, trained.gains, n)
        if held.individual:
            break
        move = held.against["individual"]
        rest = [c & ~(1 << move.movers[0]) for c in partition if c != move.coalition & ~(1 << move.movers[0])]
        partition = tuple(sorted(c for c in [*rest, move.coalition] if c))
    return partition, held


def needed(partition: Sequence[int]) -> list[int]:
    """The coalitions, single clients aside, that decide whether anybody would rather move."""
    everyone = sum(partition)
    coalitions = [c | 1 << i for c in partition for i in game.members(everyone)]
    return list(dict.fromkeys(c for c in coalitions if c.bit_count() > 1))
