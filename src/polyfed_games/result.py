"""Results of a folder of coalitions, from its run folders alone: every number is a combination of scores in them."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from polyfed import report
from polyfed.base.arguments import checked
from polyfed.base.errors import RunError
from polyfed.metrics.metric import Metric, mean_of
from polyfed.report import intervals
from polyfed.report.pairs import Evidence, Interval, jointly
from polyfed.runs import schema as reading
from polyfed.runs.folder import RunFolder, csv_text
from polyfed_games import values as game
from polyfed_games.found import Found, names_of, needed
from polyfed_games.values import FEWEST

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from polyfed.report import Table


@checked
@dataclass(frozen=True, eq=False)
class Coalitions:
    """Result of `coalitions`: each client's gain from the others.

    Parameters
    ----------
    names : tuple of str
        [n] the clients.
    seeds : tuple of int
        The splits and starts.
    metric : Metric
        The leading metric.
    method : str
        Label of the coalitions' method.
    sampled : int or None
        Joinings of each pair in the coalitions drawn, on average; None: every coalition was trained.
    trainings : int
        Runs in the folder.
    seconds : float
        Seconds of training in all runs.
    values : DataFrame
        One row per seed, coalition and member: seed, coalition, size, client, validation, test, gain (over the own
        model, positive when better), run (its folder).
    help : DataFrame
        One row per pair: client (receives), from, shapley, low, high, clear (jointly over all pairs), error and drawn
        (standard error of the sampling and its samples), leave_one_out (the loss when only the other is left out) and
        its limits.
    clients : DataFrame
        One row per client: its own score and that with all; the coalition most often chosen by validation, the number
        of those seeds, the score after choosing in every seed; gains with limits; the best coalition in hindsight.
    partitions : DataFrame
        One row per partition: its name and coalitions, stability, the share of seeds with it, who would move.
    agreement : DataFrame
        One row per method compared with the coalitions.
    folder : Path or None
        Folder of the runs and results.
    split : str
        The split measured.
    notes : tuple of str
        Caveats of the data.
    """

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

    def __repr__(self) -> str:
        return f"<Coalitions of {', '.join(self.names)}: {self.method}, {len(self.seeds)} seeds, {self.trainings} runs>"

    @staticmethod
    def open(folder: str | Path) -> "Coalitions":
        """The results of a folder, from its runs.

        Parameters
        ----------
        folder : str or Path
            A folder that `coalitions` wrote.

        Returns
        -------
        Coalitions
            The results.
        """
        f = Found.read(Path(folder))
        return Coalitions(
            f.names, f.seeds, f.metric, f.label, f.count, f.trainings, f.seconds, _values(f), _help(f), _clients(f),
            _partitions(f), _agreement(f), f.folder, f.split, f.notes,
        )  # fmt: skip

    @property
    def matrix(self) -> pd.DataFrame:
        """[n, n] Shapley values: what the client of a row gets from that of a column."""
        found = self.help.pivot_table(index="client", columns="from", values="shapley", dropna=False, sort=False)
        return found.reindex(index=list(self.names), columns=list(self.names))

    def tables(self) -> "list[Table]":
        """Tables as they are printed: who helps whom, the clients, the partitions and the methods held against them."""
        from polyfed_games.show import tables

        return tables(self)

    def figure(self) -> "Figure":
        """The matrix as a picture."""
        from polyfed_games.show import figure

        return figure(self)

    def save(self) -> Path:
        """Write the tables, the picture and the page into the folder; returns the page, report.html."""
        from polyfed_games.show import page

        if self.folder is None:
            raise RunError("these coalitions have no folder; give one with out=...")
        out = RunFolder(self.folder)
        with out.locked():
            for name in ("values", "help", "clients", "partitions", "agreement"):
                out.write(f"coalitions-{name}.csv", csv_text(getattr(self, name)))
            for form in ("png", "svg", "pdf"):
                report.save(self.figure(), self.folder / f"coalitions.{form}")
            out.write("coalitions.json", json.dumps(reading.finite(self._json()), indent=1))
            out.write("report.html", page(self))
        return self.folder / "report.html"

    def _json(self) -> dict[str, Any]:
        keys = ("names", "seeds", "method", "sampled", "trainings", "seconds", "split", "notes")
        tables = ("help", "clients", "partitions", "agreement")
        return {
            **{k: list(v) if isinstance(v := getattr(self, k), tuple) else v for k in keys},
            "metric": self.metric.name,
            **{k: json.loads(getattr(self, k).to_json(orient="records")) for k in tables},
        }


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


def _limits(prefix: str, found: Interval) -> dict[str, Any]:
    return {f"{prefix}low": found.low, f"{prefix}high": found.high, f"{prefix}clear": found.clear}


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
    found = zip(rows, jointly(values), jointly(without), strict=True)
    return pd.DataFrame(
        {"client": r["client"], "from": r["from"], "shapley": v.mean} | _limits("", v)
        | ({"error": r["error"], "drawn": r["drawn"]} if f.orders else {})
        | {"leave_one_out": w.mean} | _limits("leave_one_out_", w)
        for r, v, w in found
    )  # fmt: skip


def _clients(f: Found) -> pd.DataFrame:
    rows, alls, afters = [], [], []
    whole, order = game.everyone(f.n), sorted(f.place, key=lambda c: (c.bit_count(), c))
    for i, name in enumerate(f.names):
        mine, own = [c for c in order if c >> i & 1], f.place[1 << i]
        at = [f.place[c] for c in mine]
        weights, chosen = np.zeros((len(f.seeds), len(f.place))), []
        for s in range(len(f.seeds)):
            seen = f.metric.merit(f.validation[s, at, i])
            best = mine[int(np.nanargmax(seen))] if np.isfinite(seen).any() else 1 << i  # of equals the smallest
            chosen.append(best)
            weights[s, f.place[best]] += 1
            weights[s, own] -= 1
        usual, times = Counter(chosen).most_common(1)[0]
        hindsight = max(mine, key=lambda c: f.gains[c][i])
        alls.append(f.evidence(i, f.row(f.gain(i, whole))).interval())
        afters.append(f.evidence(i, weights).interval())
        rows.append({
            "client": name, "own": mean_of(f.raw[:, own, i]), "all": mean_of(f.raw[:, f.place[whole], i]),
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
            row |= {"gain": sum(float(f.gains[c][i]) for c in p for i in game.members(c)) / n}
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
        found = [r["clusters"] for r in runs.values() if r.get("clusters")]
        if found:
            score = [float(adjusted_rand_score(best, c)) for c in found]
            row |= {
                "clusters": mean_of(np.array([len(set(c)) for c in found], float)),
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
