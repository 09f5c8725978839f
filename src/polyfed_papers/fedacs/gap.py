"""Beyond the paper: the quantile estimated from the widest gap in the similarities, on planted groups."""

from collections.abc import Sequence

import numpy as np
import torch
from scipy import stats
from sklearn.metrics import adjusted_rand_score

from polyfed.algorithms._shared.clusters import components
from polyfed.algorithms._shared.similarity import similarity
from polyfed.algorithms.fedacs import FedACS
from polyfed.algorithms.local import Local
from polyfed.data import load
from polyfed.data.federation import Federation
from polyfed.report.table import Cell, Table
from polyfed_papers.fedacs.path import softmax
from polyfed_papers.recipes.recipe import Bench, Outcome, Size, metric_of, recipe
from polyfed_papers.recipes.said import Setting, ordered, ours

GROUPS = {"s1": "4 of 5", "s2": "2, 8, 2 and 8", "s3": "2 of 8", "s4": "one of 12", "s5": "12 clients alone"}
SEEDS = range(3, 23)  # seeds 0 to 2 were looked at when the rule was made
WARM = 20  # rounds of training alone before the similarities are looked at
CLEAR = 3.0  # times the second widest gap
USED, FEW = ("s1", "s2"), 5  # where the estimate is put to use, and under how many seeds
WORK = {"local_steps": 10, "batch_size": None}


def widest(S: np.ndarray) -> tuple[float, float]:
    """(quantile of all elements of S [m, m] in the widest gap between similarities, that gap over the next one)."""
    pairs = np.sort(S[np.triu_indices(len(S), 1)])
    gaps = np.diff(pairs)
    below = int(gaps.argmax()) + 1
    second = np.delete(gaps, below - 1).max(initial=0.0)
    ratio = float(gaps[below - 1] / second) if second else np.inf
    return (2 * below - 0.5) / (S.size - 1), ratio


def grouped(S: np.ndarray, quantile: float) -> np.ndarray:
    """[m] labels: connected components of the pairs more similar than the quantile of all elements of S."""
    near = torch.from_numpy(S > np.quantile(S, quantile))
    return components(len(S), *near.nonzero().T).numpy()


def planted(bench: Bench, name: str, seed: int) -> Federation:
    """One of FPFC's scenarios, in which groups of clients have one task."""
    return load(f"fpfc-{name}", scale=bench.pick("small", "full"), seed=seed).partition(seed=seed)


def looked(bench: Bench, name: str, seed: int) -> dict[str, float]:
    """The gap after a few rounds of training alone: its quantile, ratio, groups and ARI."""
    data = planted(bench, name, seed)
    run = bench.fit(
        softmax(seed), data, Local(0.1), rounds=bench.rounds(WARM, WARM), seed=seed, evaluate_every=0, **WORK
    )
    S = similarity(run.personal).numpy()
    quantile, ratio = widest(S)
    found = grouped(S, quantile)
    score = adjusted_rand_score(data.clusters, found)
    return {"quantile": quantile, "ratio": ratio, "groups": len(set(found)), "ari": float(score)}


def settings(scale: Size) -> Sequence[Setting]:
    sizes = "; ".join(f"{name.upper()}: {groups}" for name, groups in GROUPS.items())
    return (
        Setting("planted groups", sizes if scale == "small" else "FPFC's S1 to S5 in full", "ours"),
        Setting("similarities", f"cosines of models after {WARM} rounds of 10 full-batch steps alone, lr 0.1", "ours"),
        Setting("estimate", "the middle of the widest gap between neighbours among the pairs' cosines", "ours"),
        Setting("a clear gap", f"{CLEAR:g} times as wide as the next; without one no threshold, one group", "ours"),
        Setting("seeds", "of data and start; 0 to 2 were looked at when the rule was made and do not count", "ours"),
        Setting("put to use", f"S1 and S2, {FEW} seeds, 100 rounds of 10 full-batch steps, all clients", "ours"),
    )  # fmt: skip


def share(wrong: np.ndarray) -> Cell:
    """Share of the seeds, in per cent, with Clopper and Pearson's interval."""
    low, high = stats.binomtest(int(wrong.sum()), len(wrong)).proportion_ci()
    return Cell(f"{100 * wrong.mean():.0f} ({100 * low:.0f} to {100 * high:.0f})", {"share": float(wrong.mean())})


@recipe("fedacs/gap", "Beyond the paper: the quantile from the gap in the similarities", minutes=(2, 30),
        settings=settings, seeds=SEEDS)  # fmt: skip
def gap(bench: Bench) -> Outcome:
    """How often does the widest gap give the planted groups, and what is the estimate worth?"""
    rows, used, claims, estimates = [], [], [], {}
    for name in GROUPS:
        found = bench.by_seed(name, lambda seed, name=name: looked(bench, name, seed))
        clear = np.array([f["ratio"] >= CLEAR for f in found])
        gaps = np.array([f["quantile"] for f in found])
        estimates[name] = {"gap": gaps, "clear": np.where(clear, gaps, 0.0)}
        wrong = np.array([f["ari"] < 1 for f in found])
        one = name == "s4"  # where the groups are the planted ones without a threshold
        middle = np.median([f["ratio"] for f in found])
        rows.append((Cell(name.upper()), Cell(GROUPS[name]), share(wrong), share(~clear), share(clear & wrong),
                     share(np.where(clear, wrong, not one)), Cell(f"{middle:.1f}")))  # fmt: skip
    few = bench.under(bench.seeds[:FEW])
    for name in USED:
        exact = 0.75 if name == "s1" else 1 - (2 * 2**2 + 2 * 8**2) / 20**2
        of = estimates[name] | {"exact": np.full(len(bench.seeds), exact), "none": np.zeros(len(bench.seeds))}
        methods = {kind: dict(zip(bench.seeds, map(float, values), strict=True)) for kind, values in of.items()}
        accuracy = {}
        for kind, quantile in methods.items():
            found = few.compare(
                f"{name}-{kind}", softmax, lambda seed, name=name: planted(bench, name, seed),
                lambda seed, kind=kind, quantile=quantile: {kind: FedACS(0.1, quantile=quantile[seed])},
                rounds=bench.rounds(100, 100), evaluate_every=0, **WORK,
            )  # fmt: skip
            accuracy[kind] = metric_of(found, kind)
        for kind, text in (
            ("none", "no threshold"),
            ("exact", "the planted groups' quantile"),
            ("clear", "a clear one's"),
        ):
            text = f"{name.upper()}: the gap's quantile is better than {text}"
            claims.append(ordered(text, accuracy["gap"], accuracy[kind], 100, " points"))
        used.append((Cell(name.upper()), *(ours(accuracy[kind], 100) for kind in methods)))
    heads = ("scenario<", "groups<", "widest gap is not the groups, %", "not clear, %", "clear and wrong, %",
             "error of the rule, %", "ratio, median")  # fmt: skip
    tables = [
        Table("Planted groups from the widest gap", heads, tuple(rows)),
        Table(
            "Test accuracy, %",
            ("scenario<", "quantile of the gap", "of a clear gap", "of the planted groups", "0"),
            tuple(used),
        ),
    ]
    notes = [
        "with groups of unequal size one quantile of all pairs still parts them: it is a threshold of the cosine",
        "where every client is alone (S5) there is no gap to find: any threshold is wrong there, but for 1",
    ]
    return Outcome(tables, claims=claims, notes=notes)
