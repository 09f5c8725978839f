"""Table 3: devices that come after training, with all nine methods."""

from collections.abc import Mapping

import numpy as np
from scipy import stats

import polyfed as pf
from polyfed.core.algorithm import Algorithm
from polyfed.papers.fpfc import (
    EPOCHS,
    IMAGE_TITLES,
    SYNTHETIC,
    Problem,
    image_settings,
    images,
    rounds_of,
    sizes,
    synthetic,
)
from polyfed.papers.fpfc.methods import METHODS, nine
from polyfed.papers.fpfc.panels import Panel, curve_panels
from polyfed.papers.recipe import Bench, Outcome, Setting, Size, beside, ours, recipe

PRINTED = {  # in the order of METHODS
    "S1": ("79.00 ± .08", "38.73 ± .29", "66.22 ± .11", "43.26 ± .26", "33.57 ± .28", "69.43 ± .33", "71.88 ± .30",
           "67.72 ± .10", "79.31 ± .08"),
    "MNIST": ("90.81 ± .06", "73.67 ± .04", "95.71 ± .03", "96.62 ± .01", "96.65 ± .01", "95.46 ± .02", "74.45 ± .05",
              "92.73 ± .05", "93.51 ± .06"),
    "Fashion-MNIST": ("75.29 ± .06", "66.26 ± .06", "80.25 ± .07", "77.94 ± .06", "73.93 ± .10", "70.66 ± .07",
                      "66.42 ± .06", "75.54 ± .08", "75.73 ± .07"),
}  # fmt: skip
RANKS = ("4.67", "8.67", "3.33", "3.67", "5.33", "5.00", "6.33", "5.00", "3.00")


def settings(scale: Size):
    small = scale == "small"
    return (
        sizes(scale),
        rounds_of(scale, 600, 2000),
        Setting("rounds on images", "15" if small else "200", "ours" if small else "code"),
        Setting("newcomers", "every fifth device, none of them in training", "paper"),
        Setting("old devices", "frozen", "ours"),
        Setting("exchanges", f"{200 if small else 2000} (S1), {20 if small else 200} (images), as much local work as "
                "in training: the paper says 'until convergence'", "ours"),
        Setting("FedAvg; LG-FedAvg, Per-FedAvg", "the final model; the same, trained on by the newcomer", "paper"),
        Setting("IFCA", "the model with the least training loss", "paper"),
        Setting("FPFC", "v = 0, theta = w_i - w_j; start: the best of the clusters' models", "ours"),
        Setting("lambda", "0.7 (S1)", "ours"),
        Setting("rivals", "FPFC-l1 lambda 0.1; CFL eps1 0.5, eps2 1; PACFL 3 vectors, threshold 4", "ours"),
        EPOCHS[scale],
        *SYNTHETIC,
        *image_settings(scale),
    )  # fmt: skip


def taken_in(
    bench: Bench, seed: int, problem: Problem, methods: Mapping[str, Algorithm], exchanges: int
) -> dict[str, list[float]]:
    """label -> mean accuracy of the newcomers after 0, 1, ... exchanges, FPFC's also from the common start."""
    everyone = problem.federation(seed)
    late = np.arange(everyone.n) % 5 == 4
    old, new = everyone.reorder(np.flatnonzero(~late)), everyone.reorder(np.flatnonzero(late))
    out = {}
    for label, method in methods.items():
        run = pf.fit(problem.model(seed), old, method, rounds=problem.rounds, seed=seed, evaluate_every=0,
                     device=bench.device, **problem.work)  # fmt: skip
        history = pf.admit(run, new, exchanges).history
        out[label] = history[run.metric.name].tolist()
        if label == "FPFC":
            history = pf.admit(run, new, exchanges, start="common").history
            out[f"{label}, from the start"] = history[run.metric.name].tolist()
        out["Local"] = history["alone"].tolist()
    if "LG-FedAvg" not in out and "FedAvg" in out:  # one layer
        out["LG-FedAvg"] = out["FedAvg"]
    return out


@recipe("fpfc/table3", "Table 3: newcomers on S1 and on label-swapped images", minutes=(40, 2500), settings=settings,
        machine="two cores", data=("mnist", "fashion_mnist"), also=("fpfc/table3-images",))  # fmt: skip
def table3(bench: Bench) -> Outcome:
    """Does a device that comes after training gain from the clusters that were found?"""
    many, few = (3, 3) if bench.rehearse else (bench.pick(200, 2000), bench.pick(20, 200))
    parts = [(synthetic(bench), many), *((images(bench, title), few) for title in IMAGE_TITLES)]
    claims, panels, at = [], [], {}
    for problem, exchanges in parts:
        title, methods = problem.title, {m: a for m, a in nine(problem).items() if m != "Local"}
        some = dict(list(methods.items())[-1:]) if bench.rehearse else methods
        found = bench.by_seed(
            f"newcomers-{problem.key}", lambda seed, p=problem, m=some, e=exchanges: taken_in(bench, seed, p, m, e)
        )
        at[title] = {label: np.array([f[label] for f in found]) for label in found[0]}
        mine = at[title]["FPFC"][:, -1]
        claims += [
            problem.better(f"FPFC is better for a newcomer than {m}", mine, at[title][m][:, -1])
            for m in METHODS[:-1] if m in at[title]
        ]  # fmt: skip
        series = {m: (list(range(v.shape[1])), (100 * v).tolist()) for m, v in at[title].items()}
        panels.append(Panel(title, "exchanges", "newcomers' accuracy, %", series))
    labels = [m for m in METHODS if all(m in of for of in at.values())]
    ranks = np.mean([stats.rankdata([-of[m][:, -1].mean() for m in labels]) for of in at.values()], 0)
    rows = {
        m: [*((PRINTED[t][METHODS.index(m)], ours(at[t][m][:, -1], 100)) for t in at),
            (RANKS[METHODS.index(m)], ours([ranks[labels.index(m)]]))]
        for m in labels
    }  # fmt: skip
    first = {m: [(None, ours(of[m][:, 0], 100)) for of in at.values()] for m in [*labels, "FPFC, from the start"]}
    tables = [
        beside("Table 3: newcomers' accuracy after all exchanges, %", (*at, "rank"), rows),
        beside("Before any exchange", tuple(at), first),
    ]
    notes = [
        "Local: the newcomer alone, with as many rounds of local work",
        "the paper does not say how many exchanges newcomers take part in, nor whether the others move",
        "rank: of the means, averaged over the three data sets",
    ]
    return Outcome(tables, {"newcomers": curve_panels(panels, 3)}, claims, notes)
