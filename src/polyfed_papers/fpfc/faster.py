"""Beyond the paper: rounds that FPFC takes to find the clusters, and what shortens them; on S1."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from sklearn.metrics import adjusted_rand_score

from polyfed import FPFC, Local, Progress
from polyfed.report.table import Cell
from polyfed_papers.fpfc import synthetic
from polyfed_papers.fpfc.stated import SYNTHETIC, rounds_of, sizes
from polyfed_papers.recipes.recipe import Bench, Outcome, Size, recipe
from polyfed_papers.recipes.said import Setting, ordered, ours, points, told_by, without

LAM, EVERY, ALONE, FIRST = 0.8, 20, 50, 100
SEEDS = range(3, 8)  # seeds 0 to 2 were looked at when the variants were chosen


class Variant(NamedTuple):
    """FPFC's settings, local steps, rounds of training alone that it starts from, lambda of 100 rounds after those."""

    fpfc: FPFC
    steps: int = 10
    alone: int = 0
    first: float | None = None


VARIANTS = {
    "usual": Variant(FPFC(0.1, lam=LAM)),
    "rho 0.5": Variant(FPFC(0.1, lam=LAM, rho=0.5)),
    "20 steps": Variant(FPFC(0.1, lam=LAM), 20),
    "rho 0.5, 20 steps": Variant(FPFC(0.1, lam=LAM, rho=0.5), 20),
    "from models alone": Variant(FPFC(0.1, lam=1.5), alone=ALONE),
    "from models alone, then 0.8": Variant(FPFC(0.1, lam=LAM), alone=ALONE, first=1.5),
}


def settings(scale: Size) -> Sequence[Setting]:
    return (
        sizes(scale),
        rounds_of(scale, 600, 2000),
        Setting("lambda", f"{LAM:g}; from models alone 1.5, throughout or for {FIRST} rounds", "ours"),
        Setting("from models alone", f"{ALONE} rounds of Local first, which are counted; then zeta_i = w_i", "ours"),
        Setting("looked at", f"every {EVERY} rounds; a run that has not come to ARI 1 counts as its last round",
                "ours"),
        Setting("seeds", "0 to 2 were looked at when the variants were chosen and do not count", "ours"),
        *without(SYNTHETIC, "local work", "rho, a, xi"),
        Setting("a, xi, lr", "3.7, 1e-4, 0.1", "paper"),
    )  # fmt: skip


def train(bench: Bench, variant: Variant, seed: int) -> dict[str, Any]:
    """ARI at every look, accuracy at the half and at the end."""
    problem, scores, accuracy = synthetic(bench), list[float](), list[float]()
    data, model, rounds = problem.federation(seed), problem.model(seed), problem.rounds
    work, start = {**problem.of(variant.steps).work, "seed": seed, "evaluate_every": 0}, None
    first = 0 if variant.first is None or bench.rehearse else FIRST
    if variant.alone:
        start = bench.fit(model, data, Local(0.1), rounds=1 if bench.rehearse else variant.alone, **work)
    at = max(1, min(EVERY, rounds))
    looks = {max(at, rounds // 2), rounds}

    def look(progress: Progress, before: int) -> None:
        now = before + progress.round
        if progress.round and now % at == 0:
            scores.append(float(adjusted_rand_score(data.clusters, progress.run.clusters)))
        if progress.round and now in looks:
            accuracy.append(float(progress.run.evaluate(progress.run.personal)["accuracy"].mean()))

    if first and variant.first is not None:
        early = replace(variant.fpfc, lam=variant.first)
        start = bench.fit(model, data, early, rounds=first, start=start, callbacks=[partial(look, before=0)], **work)
    bench.fit(model, data, variant.fpfc, rounds=rounds - first, start=start, callbacks=[partial(look, before=first)],
              **work)  # fmt: skip
    return {"ari": scores, "every": at, "accuracy": accuracy, "before": variant.alone}


def arrived(run: dict[str, Any]) -> int:
    """The first look after which ARI stays 1, in rounds; the last round where it never does."""
    wrong = [k for k, score in enumerate(run["ari"]) if score < 1]
    look = min((wrong[-1] + 2) if wrong else 1, len(run["ari"]))
    return run["before"] + look * run["every"]


@recipe("fpfc/faster", "Beyond the paper: rounds until the clusters are found", minutes=(2, 60), settings=settings,
        seeds=SEEDS)  # fmt: skip
def faster(bench: Bench) -> Outcome:
    """How many rounds does FPFC take to find the clusters, and what shortens them?"""
    runs: dict[str, list[dict[str, Any]]] = {}
    for label, variant in VARIANTS.items():
        runs[label] = bench.by_seed(label.replace(", ", "-").replace(" ", "-"), partial(train, bench, variant))
    rounds = {label: np.array([arrived(r) for r in results], dtype=float) for label, results in runs.items()}
    rows, claims = [], []
    for label, results in runs.items():
        ends = ", ".join(f"{r['ari'][-1]:.2f}" for r in results)
        half, last = (ours((r["accuracy"][k] for r in results), 100) for k in (0, -1))
        rows.append((Cell(label), ours(rounds[label], decimals=0), Cell(ends), half, last))
        if label != "usual":
            claims.append(ordered(f"{label}: fewer rounds to ARI 1", rounds["usual"], rounds[label], unit=" rounds"))
            for k, when in ((0, "half way"), (-1, "at the end")):
                mine, usual = (np.array([r["accuracy"][k] for r in runs[name]]) for name in (label, "usual"))
                claims.append(points(f"{label}: better models {when}", mine, usual))
    heads = ("variant<", "rounds to ARI 1", "ARI at the end", "accuracy half way, %", "at the end, %")
    return Outcome([told_by("S1", heads, rows)], claims=claims)
