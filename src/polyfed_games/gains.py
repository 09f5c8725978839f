"""Results of a folder of coalitions, from its run folders alone: every number is a combination of scores in them."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from polyfed.metrics.metric import Metric, mean_of
from polyfed.report import intervals
from polyfed.report.pairs import Evidence, Interval, jointly
from polyfed_games import values as game
from polyfed_games.found import Found, names_of, needed
from polyfed_games.values import FEWEST

G = TypeVar("G", bound="Gains")


@dataclass(frozen=True, eq=False)
class Gains:
    """The numbers of `Coalitions`."""

    names: tuple[str, ...]
    seeds: tuple[int, ...]
    metric: Metric
    method: str
    sampled: int | None
    trainings: int
    seconds: float
    values: pd.DataFrame
    help: pd.DataFrame
    clients: pd.DataFrame
    partitions: pd.DataFrame
    agreement: pd.DataFrame
    folder: Path | None = None
    split: str = "test"
    notes: tuple[str, ...] = ()

    @property
    def matrix(self) -> pd.DataFrame:
        """[n, n] Shapley values: what the client of a row gets from that of a column."""
        table = self.help.pivot_table(index="client", columns="from", values="shapley", dropna=False, sort=False)
        return table.reindex(index=list(self.names), columns=list(self.names))


def gains_of(f: Found, cls: type[G]) -> G:
    """The numbers of a folder."""
    return cls(
        f.names, f.seeds, f.metric, f.label, f.count, f.trainings, f.seconds, _values(f), _help(f), _clients(f),
        _partitions(f), _agreement(f), f.folder, f.split, f.notes,
    )  # fmt: skip


def _values(f: Found) -> pd.DataFrame:
    rows = []
    for s, seed in enumerate(f.seeds):
        for c, k in f.place.items():
            label = names_of(c, f.names)
            for i in game.members(c):
                own = f.test[s, f.place[1 << i], i]
                rows.append({
                    "seed": seed, "coalition": said(c, f.names), "size": c.bit_count(), "client": f.names[i],
                    "validation": f.validation[s, k, i], "test": f.raw[s, k, i], "gain": f.test[s, k, i] - own,
                    "run": f"runs/{label}-seed{seed}",
                })  # fmt: skip
    return pd.DataFrame(rows)


def said(c: int, names: Sequence[str]) -> str:
    """A coalition in words."""
    return " + ".join(names[i] for i in game.members(c))


def _limits(prefix: str, interval: Interval) -> dict[str, Any]:
    return {f"{prefix}low": interval.low, f"{prefix}high": interval.high, f"{prefix}clear": interval.clear}


def _widened(e: Evidence, error: float, drawn: int) -> Interval:
    """The interval with the chance of `drawn` sampled joinings, if they show it, and freedom by Satterthwaite."""
    gain, splits = e.spread.gain, len(e.spread.means)
    var, freedom = intervals.variance(e.spread, e.share)
    if drawn < FEWEST or not error > 0 or not math.isfinite(var):
        return Interval(gain, math.nan, math.nan, splits)
    both = var + error**2, (var + error**2) ** 2 / (var**2 / freedom + error**4 / (drawn - 1))
    half, p = intervals.half_width(*both), intervals.p_value(gain, *both)
    low, high = max(gain - half, -e.range), min(gain + half, e.range)
    return Interval(gain, low, high, splits, p, abs(gain) > half)


def _help(f: Found) -> pd.DataFrame:
    rows, values, without = [], [], []
    whole = game.everyone(f.n)
    for i in range(f.n):
        for j in range(f.n):
            if i == j:
                continue
            error, drawn = f.sampling(i, j) if f.orders else (0.0, 0)
            weights, rest = f.weights(i, j), whole & ~(1 << j)
            e = f.evidence(i, f.row(weights)) if weights else None
            if e is None:
                values.append(Interval(math.nan, math.nan, math.nan, 0))
            else:
                values.append(_widened(e, error, drawn) if f.orders else e.interval())
            without.append(f.evidence(i, f.row({whole: 1.0, rest: -1.0})).interval())
            rows.append({"client": f.names[i], "from": f.names[j], "error": error, "drawn": drawn})
    pairs = zip(rows, jointly(values), jointly(without), strict=True)
    return pd.DataFrame(
        {"client": r["client"], "from": r["from"], "shapley": v.mean} | _limits("", v)
        | ({"error": r["error"], "drawn": r["drawn"]} if f.orders else {})
        | {"leave_one_out": w.mean} | _limits("leave_one_out_", w)
        for r, v, w in pairs
    )  # fmt: skip


def _clients(f: Found) -> pd.DataFrame:
    rows, alls, afters = [], [], []
    whole, order = game.everyone(f.n), sorted(f.place, key=lambda c: (c.bit_count(), c))
    for i, name in enumerate(f.names):
        mine, own = [c for c in order if c >> i & 1], f.place[1 << i]
        at = [f.place[c] for c in mine]
        weights, chosen = np.zeros((len(f.seeds), len(f.place))), []
        for s in range(len(f.seeds)):
            merits = f.metric.merit(f.validation[s, at, i])
            best = mine[int(np.nanargmax(merits))] if np.isfinite(merits).any() else 1 << i  # of equals the smallest
            chosen.append(best)
            weights[s, f.place[best]] += 1
            weights[s, own] -= 1
        usual, times = Counter(chosen).most_common(1)[0]
        hindsight = max(mine, key=lambda c: f.gains[c][i])
        alls.append(f.evidence(i, f.row(f.gain(i, whole))).interval())
        afters.append(f.evidence(i, weights).interval())
        rows.append({
            "client": name, "tested": f.tested[i], "own": mean_of(f.raw[:, own, i]),
            "all": mean_of(f.raw[:, f.place[whole], i]),
            "chosen": said(usual, f.names), "chosen_in": times,
            "after_choice": mean_of(np.array([f.raw[s, f.place[c], i] for s, c in enumerate(chosen)])),
            "hindsight": said(hindsight, f.names), "hindsight_gain": float(f.gains[hindsight][i]),
        })  # fmt: skip
    for row, a, b in zip(rows, jointly(alls), jointly(afters), strict=True):
        row |= {"all_gain": a.mean} | _limits("all_", a) | {"chosen_gain": b.mean} | _limits("chosen_", b)
    return pd.DataFrame(rows)


def _partitions(f: Found) -> pd.DataFrame:
    """The partition that holds best, all together, each alone, and what other methods found most often."""
    n = f.n
    shown: dict[str, tuple[int, ...]] = {"found": f.settled[0], "together": (game.everyone(n),)}
    shown["alone"] = tuple(1 << i for i in range(n))
    for label, runs in f.against.items():
        if clusters := [tuple(_clustered(r["clusters"])) for r in runs.values() if r.get("clusters")]:
            shown[label] = Counter(clusters).most_common(1)[0][0]
    rows = []
    for name, p in shown.items():
        row: dict[str, Any] = {"partition": name, "coalitions": " | ".join(said(c, f.names) for c in p)}
        if all(c in f.place for c in [*p, *needed(p)]):
            held = game.stability(p, f.gains, n)
            row |= {"gain": game.mean_gain(f.gains, p, f.counted)}
            row |= {"nash": held.nash, "individual": held.individual, "core": held.core}
            each = [game.stability(p, _of_seed(f, s), n) for s in range(len(f.seeds))]
            row["individual_share"] = float(np.mean([e.individual for e in each]))
            move = held.against.get("core") or held.against.get("individual") or held.against.get("nash")
            if move is not None:
                of = {i: c for c in p for i in game.members(c)}
                gains = [f.evidence(i, f.row({move.coalition: 1.0, of[i]: -1.0})).interval() for i in move.movers]
                row |= {"movers": " + ".join(f.names[i] for i in move.movers), "to": said(move.coalition, f.names)}
                row |= {"mover_gain": min(g.mean for g in gains), "mover_clear": all(g.sign == 1 for g in gains)}
        rows.append(row)
    return pd.DataFrame(rows)


def _of_seed(f: Found, s: int) -> dict[int, np.ndarray]:
    """`Found.gains` of one seed alone."""
    one = replace(
        f, seeds=f.seeds[s : s + 1], test=f.test[s : s + 1], raw=f.raw[s : s + 1], validation=f.validation[s : s + 1]
    )
    return one.gains


def _clustered(labels: Sequence[int]) -> list[int]:
    """The partition that cluster labels say."""
    return sorted(game.coalition(np.flatnonzero(np.array(labels) == k).tolist()) for k in set(labels))


def _agreement(f: Found) -> pd.DataFrame:
    """Methods' clusters against the best partition (adjusted Rand index), and mixing against Shapley values (ranks)."""
    from sklearn.metrics import adjusted_rand_score

    best, rows = game.labels(f.settled[0], f.n), []
    off = ~np.eye(f.n, dtype=bool) & np.isfinite(f.shapley)
    for label, runs in f.against.items():
        row: dict[str, Any] = {"method": label, "seeds": len(runs)}
        clusters = [r["clusters"] for r in runs.values() if r.get("clusters")]
        if clusters:
            score = [float(adjusted_rand_score(best, c)) for c in clusters]
            row |= {
                "clusters": mean_of(np.array([len(set(c)) for c in clusters], float)),
                "rand_index": mean_of(np.array(score)),
            }
        mixing = [np.array(r["mixing"], float) for r in runs.values() if r.get("mixing")]
        if mixing:
            mixing = [m for m in mixing if m.shape == off.shape and np.ptp(m[off]) > 0]
            ranks = [_rank_correlation(m[off], f.shapley[off]) for m in mixing]
            row["rank_correlation"] = mean_of(np.array(ranks)) if ranks else math.nan
        rows.append(row)
    return pd.DataFrame(rows)


def _rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's; equal values share their mean rank."""
    spearman: Any = import_module("scipy.stats").spearmanr  # slow to import
    return float(spearman(x, y).statistic)
