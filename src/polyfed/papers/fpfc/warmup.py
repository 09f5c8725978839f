"""Table 2: choosing lambda on one warm path, and by separate runs."""

from collections.abc import Mapping
from functools import partial

import numpy as np

from polyfed.algorithms.fpfc import FPFC
from polyfed.experiment.tune import tune
from polyfed.papers.fpfc import (
    EPOCHS,
    HBF,
    HBF_CAVEAT,
    HBF_TESTED,
    HBF_WORK,
    IMAGE_LR,
    SYNTHETIC,
    WORK,
    hbf,
    image_settings,
    image_work,
    images,
    lenet,
    linear,
    rounds_of,
    scenario,
    sizes,
    softmax,
)
from polyfed.papers.recipe import Bench, Claim, Outcome, Setting, Size, beside, ordered, ours, recipe
from polyfed.report.table import Table

IMAGE_GRID = (0.0, 0.4, 0.8, 1.2)
GRIDS = {
    "s1": {"warm": (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5), "cold": (0.0, 0.5, 0.6, 0.7, 0.8, 1.0, 2.0, 3.0)},
    "hbf": dict.fromkeys(("warm", "cold"), (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)),
} | dict.fromkeys(("mnist", "fashion-mnist"), dict.fromkeys(("warm", "cold"), IMAGE_GRID))
PRINTED = {
    "s1": {"cold": ("0.5", "4.02 h"), "warm": ("3", "0.46 h")},
    "hbf": {"cold": ("4", "39 s"), "warm": ("4", "15 s")},
    "mnist": {"cold": ("0.1", "3.94 h"), "warm": ("0.4", "0.58 h")},
    "fashion-mnist": {"cold": ("0.1", "2.80 h"), "warm": ("0.6", "0.59 h")},
}
TITLES = {"s1": "S1", "mnist": "MNIST", "fashion-mnist": "Fashion-MNIST"}
RULES = (
    Setting("a lambda is done", "when validation changes by less than 1e-4 (warm-up; here for both)", "paper"),
    Setting("looks at validation", "every 10 rounds (5 on small images), 3 in a row", "ours"),
    Setting("path ends", "where validation drops by more than two standard errors", "ours"),
)
NAMES = {"cold": "separate", "warm": "warm-up"}


def settings(scale: Size):
    rounds = ("400 (S1), 100 (H&BF)", "ours") if scale == "small" else ("2000 (S1), 100 (H&BF)", "paper")
    return (
        sizes(scale),
        Setting("rounds per lambda, at most", *rounds),
        Setting(
            "grid, S1", "warm 0 to 3.5 by 0.5 (the paper's); separate 0, 0.5 to 0.8 by 0.1, 1, 2, 3 (ours)", "ours"
        ),
        Setting("grid, H&BF", "0 to 5 by 1", "ours"),
        *RULES,
        *SYNTHETIC,
        *(Setting(f"H&BF, {s.key}", s.value, s.source) for s in HBF),
    )


def search(bench: Bench, key: str, regime, seed: int, model, federation, method: FPFC, rounds: int, work):
    """The chosen lambda, the cost of the search, and the chosen model's test metric after training on."""
    found = tune(
        model(seed), federation(seed), method, regime=regime, rounds=rounds,
        grid=GRIDS[key][regime][:2] if bench.rehearse else GRIDS[key][regime], train_on=rounds, seed=seed,
        device=bench.device, **work,
    )  # fmt: skip
    run = found.run
    row = {"lam": found.best["lam"], "ari": found.best["ari"], **found.costs[regime]}
    return row | {"test": float(run.final["test"][run.metric.name].mean()) if run is not None else float("nan")}


def compared(bench: Bench, parts: Mapping[str, tuple]) -> tuple[list[Table], list[Claim]]:
    """A table and the claims for each data set; parts: model, federation, method, rounds per lambda and work."""
    tables, claims = [], []
    for key, part in parts.items():
        title, metric, factor = ("H&BF", "RMSE", 1.0) if key == "hbf" else (TITLES[key], "accuracy, %", 100.0)
        rows, cost, test = {}, {}, {}
        for regime, name in NAMES.items():
            found = [
                bench.once(f"{key}-{regime}-seed{seed}", partial(search, bench, key, regime, seed, *part))
                for seed in bench.seeds
            ]
            cost[regime] = np.array([f["seconds"] for f in found])
            test[regime] = np.array([f["test"] for f in found])
            lam, took = PRINTED[key][regime]
            rows[name] = [
                (lam, ours(f["lam"] for f in found)),
                (took, ours(cost[regime], decimals=1)),
                (None, ours([f["rounds"] for f in found], decimals=0)),
                (None, ours([f["bytes"] / 4e6 for f in found])),
                (None, ours([f["ari"] for f in found])),
                (None, ours(test[regime], factor)),
            ]
        heads = ("lambda", "seconds", "rounds", "million numbers sent", "ARI", metric)
        tables.append(beside(title, heads, rows, first="search"))
        sign = 1 if factor == 100 else -1
        claims += [
            ordered(f"{title}: the warm path takes less time", cost["cold"], cost["warm"], 1, " s"),
            ordered(f"{title}: the warm path's model is better", sign * test["warm"],
                    sign * test["cold"], factor, share=0.0 if factor == 100 else HBF_TESTED),
        ]  # fmt: skip
    return tables, claims


NOTES = [
    "lambda acts differently from a common start and on a path: the two columns' values cannot be exchanged",
    "metric: the chosen model, trained on for at most as many rounds as one lambda had",
    "the paper does not say whether the path keeps the duals; here it does",
]


@recipe("fpfc/table2", "Table 2: lambda by a warm path and by separate runs", minutes=(3, 200), settings=settings,
        data=("housing_bodyfat",))  # fmt: skip
def table2(bench: Bench) -> Outcome:
    """Does a warm path find a lambda as good as separate runs do, in less time?"""
    parts = {
        "s1": (softmax, scenario(bench), FPFC(0.1), bench.rounds(400, 2000), WORK),
        "hbf": (linear, hbf(bench), FPFC(0.01, nu=4.0), bench.rounds(100, 100), HBF_WORK),
    }
    tables, claims = compared(bench, parts)
    return Outcome(tables, claims=claims, notes=[HBF_CAVEAT, *NOTES])


def settings_of_images(scale: Size):
    return (
        rounds_of(scale, 15, 200),
        EPOCHS[scale],
        Setting("grid", "0, 0.4, 0.8, 1.2", "ours"),
        Setting("validation", "a fifth of a device's training images", "ours"),
        *RULES,
        *(s for s in image_settings(scale) if not s.key.startswith("lambda")),
    )


@recipe("fpfc/table2-images", "Table 2: the same on label-swapped images", minutes=(12, 1400),
        settings=settings_of_images, machine="two cores", data=("mnist", "fashion_mnist"))  # fmt: skip
def table2_images(bench: Bench) -> Outcome:
    """Does the warm path pay on images too?"""
    work = image_work(bench) | {"local_epochs": bench.pick(5, 10), "check_every": bench.pick(5, 10)}
    method, rounds = FPFC(IMAGE_LR[bench.scale], shared_layers="body"), bench.rounds(15, 200)
    parts = {
        name: (lenet, images(bench, name, validation=0.2), method, rounds, work) for name in ("mnist", "fashion-mnist")
    }
    tables, claims = compared(bench, parts)
    return Outcome(tables, claims=claims, notes=NOTES)
