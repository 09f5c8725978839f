"""Choosing lambda: by the tuner alone on every scenario; Table 2 and Figure 6, on a warm path and by separate runs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from sklearn.metrics import adjusted_rand_score
from torch import nn

from polyfed.algorithms.local import Local
from polyfed.report.table import Cell, Table
from polyfed_papers.fpfc import IMAGE_TITLES, Problem, hbf, images, softmax, synthetic
from polyfed_papers.fpfc.stated import HBF_BESIDE, HBF_CAVEAT, HBF_GRID, SYNTHETIC, image_settings, sizes
from polyfed_papers.recipes.drawing import Panel, curve_panels
from polyfed_papers.recipes.recipe import Bench, Outcome, Size, recipe
from polyfed_papers.recipes.said import Claim, Setting, beside, listed, ordered, ours

GRIDS = {"cold": (0.4, 0.5, 0.6, 0.7, 0.8, 0.9), "warm": (0.0, 1.0, 2.0, 3.0, 4.0)}
HBF_GRIDS = {"cold": (0.0, 1.0, 2.0, 3.0, 4.0, 5.0), "warm": (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)}
PATIENCE = {"check_every": 25, "patience": 4}  # a cold start stands still for a while before devices fuse


def tuner_settings(scale: Size):
    return (
        *(sizes(scale, name) for name in ("s1", "s3", "s4", "s5")),
        Setting("rounds per lambda, at most", *(("600", "ours") if scale == "small" else ("2000", "code"))),
        Setting("chosen model", "trained on for at most as many rounds again", "ours"),
        Setting("grid, common start", ", ".join(map(str, GRIDS["cold"])), "ours"),
        Setting("grid, warm path", ", ".join(map(str, GRIDS["warm"])), "ours"),
        Setting("beyond the grid", "while its first (common start) or last value is the best", "ours"),
        Setting("H&BF, rounds per lambda", "100", "ours"),
        Setting("a lambda is done", "validation moves by less than 1e-4, every 25 rounds, 4 in a row", "ours"),
        *SYNTHETIC,
        Setting("S1, normal features", "60 standard normal features, as in the text", "paper"),
        Setting("S1, normal features, start", "from zero", "ours"),
        *HBF_BESIDE,
    )  # fmt: skip


def from_zero(seed: int) -> nn.Module:
    """Softmax regression from zero."""
    model = softmax(seed)
    for q in model.parameters():
        nn.init.zeros_(q)
    return model


def tuned(bench: Bench, seed: int, problem: Problem, grids):
    """The tuner's choice and its run, and Local for as many rounds."""
    data, rounds = problem.federation(seed), problem.rounds
    common = {"seed": seed, **problem.work}
    search_result = bench.tune(
        problem.model(seed), data, problem.fpfc, grid={k: v[:1] for k, v in grids.items()} if bench.rehearse else grids,
        rounds=rounds, train_on=rounds, extend=0 if bench.rehearse else 6, **PATIENCE, **common,
    )  # fmt: skip
    run = search_result.run
    assert run is not None
    assert run.clusters is not None
    local = problem.fit(bench, seed, Local(problem.fpfc.lr), rounds=run.rounds, fraction=1.0)
    return {
        "regime": search_result.best["regime"],
        "lam": search_result.best["lam"],
        "edges": search_result.edges,
        "clusters": len(set(run.clusters.tolist())),
        "ari": float(adjusted_rand_score(data.clusters, run.clusters)),
        "test": float(run.final["test"][run.metric.name].mean()),
        "local": float(local.final["test"][local.metric.name].mean()),
        "path": [{k: row[k] for k in ("regime", "lam", "validation", "clusters", "ari")} for row in search_result.rows],
    }


@recipe("fpfc/tuner", "Clusters found by the tuner alone, on every scenario", minutes=(8, 600), settings=tuner_settings,
        data=("housing_bodyfat",))  # fmt: skip
def tuner(bench: Bench) -> Outcome:
    """With lambda chosen on validation data alone, are the true clusters found, and is training alone beaten?"""
    normal = replace(synthetic(bench, features="normal"), model=from_zero)
    problems = [synthetic(bench), normal, *(synthetic(bench, name) for name in ("s3", "s4", "s5")), hbf(bench)]
    rows, claims, paths, edges = [], [], [], 0
    tasks = []
    for problem in problems:
        grids = HBF_GRIDS if problem.error else GRIDS
        for seed in bench.seeds:
            one = partial(tuned, bench, seed, problem, grids)
            tasks.append((problem.key, seed, partial(bench.once, f"{problem.key}-seed{seed}", one)))
    results = iter(bench.all_of(tasks))
    for problem in problems:
        searches = [next(results) for _ in bench.seeds]
        edges += sum(f["edges"] for f in searches)
        name, factor, sign = problem.title, problem.factor, problem.sign
        ari, gain = [f["ari"] for f in searches], [factor * sign * (f["test"] - f["local"]) for f in searches]
        chosen = ", ".join(f"{f['regime']} {f['lam']:g}" for f in searches)
        numbers, scores = ", ".join(str(f["clusters"]) for f in searches), ", ".join(f"{a:.2f}" for a in ari)
        metrics = (ours((f[k] for f in searches), factor) for k in ("test", "local"))
        rows.append((*map(Cell, (name, chosen, numbers, scores)), *metrics))
        claims.append(Claim(f"{name}: ARI 1 under every seed", min(ari) >= 1 - 1e-9, f"ARI {scores}"))
        if name != "S5":
            evidence = ", ".join(f"{g:+.2f}" for g in gain) + (" RMSE" if problem.error else " points")
            claims.append(Claim(f"{name}: better than training alone under every seed", min(gain) > 0, evidence))
        for seed, f in zip(bench.seeds, searches, strict=True):
            for p in f["path"]:
                score = f"{factor * p['validation']:.2f}"
                texts = (name, seed, p["regime"], f"{p['lam']:g}", score, p["clusters"], f"{p['ari']:.2f}")
                paths.append(tuple(Cell(str(text)) for text in texts))
    tables = [
        Table("What the tuner chose, per seed",
              ("scenario<", "regime and lambda<", "clusters", "ARI", "test metric", "Local"), tuple(rows)),
        Table("Every lambda that was tried",
              ("scenario<", "seed", "regime<", "lambda", "validation metric", "clusters", "ARI"), tuple(paths)),
    ]  # fmt: skip
    notes = [
        HBF_CAVEAT,
        "test metric: mean over devices of accuracy in per cent, and of RMSE for H&BF; after training on",
        "Local trains as many rounds as the search's chosen path and its training on",
        "S5 has no cluster of two devices: the best that can be found is every device for itself",
        f"edges left: {edges}",
    ]
    return Outcome(tables, claims=claims, notes=notes)


IMAGE_GRID = (0.0, 0.1, 0.2, 0.4, 0.6, 0.8)
TABLE2_GRIDS = {
    "s1": {"warm": (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5), "cold": (0.0, 0.5, 0.6, 0.7, 0.8, 1.0, 2.0, 3.0)},
    "hbf": dict.fromkeys(("warm", "cold"), HBF_GRID),
} | dict.fromkeys(("mnist", "fashion-mnist"), dict.fromkeys(("warm", "cold"), IMAGE_GRID))
PRINTED = {
    "s1": {"cold": ("0.5", "4.02 h"), "warm": ("3", "0.46 h")},
    "hbf": {"cold": ("4", "39 s"), "warm": ("4", "15 s")},
    "mnist": {"cold": ("0.1", "3.94 h"), "warm": ("0.4", "0.58 h")},
    "fashion-mnist": {"cold": ("0.1", "2.80 h"), "warm": ("0.6", "0.59 h")},
}
RULES = (
    Setting("warm path, a lambda is done", "validation changes by less than 1e-4 once", "paper"),
    Setting("separate runs", "in full, without early stop", "paper"),
    Setting("looks at validation", "every 10 rounds on S1, every round on H&BF and images", "ours"),
    Setting("beyond the grid", "while its first (separate runs) or last value is the best", "ours"),
    Setting("path ends", "where validation drops by more than two standard errors", "ours"),
    Setting("chosen model", "the path's trained on to as many rounds in all as a separate run has", "ours"),
)
NAMES = {"cold": "separate", "warm": "warm-up"}


def settings(scale: Size):
    return (
        sizes(scale),
        Setting("rounds per lambda, at most, S1", "2000", "code"),
        Setting("grid, S1", "warm 0 to 3.5 by 0.5 (the paper's); separate 0, 0.5 to 0.8 by 0.1, 1, 2, 3 (ours)",
                "ours"),
        Setting("grid, H&BF", "0 to 5 by 1", "ours"),
        *RULES,
        *SYNTHETIC,
        *HBF_BESIDE,
    )  # fmt: skip


def search(bench: Bench, problem: Problem, regime, seed: int) -> dict:
    """A search's "path", a row per lambda, and "test", the chosen model's curve over rounds.

    The curve of a warm path has all lambdas up to the chosen one, trained on to a separate run's rounds.
    """
    rounds, own, key = problem.rounds, problem.work, problem.key
    look = max(1, rounds // 200)  # rounds between looks at the validation data
    rule = {"tolerance": 1e-4, "patience": 1} if regime == "warm" else {"tolerance": 0.0}
    tuned = bench.tune(
        problem.model(seed), problem.federation(seed), problem.fpfc, regime=regime, rounds=rounds,
        extend=0 if bench.rehearse else 6, check_every=look, train_on=0, seed=seed,
        grid=TABLE2_GRIDS[key][regime][: 2 if bench.rehearse else None],
        **rule, **own,
    )  # fmt: skip
    legs = [(row["lam"], row["rounds"]) for row in tuned.rows[: tuned.rows.index(tuned.best) + 1]]
    if regime == "cold":
        legs = legs[-1:]
    legs.append((tuned.best["lam"], max(rounds - sum(r for _, r in legs), 0)))
    run, at, test = None, [], []
    for lam, count in legs:
        if not count:
            continue
        before = run.rounds if run is not None else 0
        run = bench.fit(problem.model(seed), problem.federation(seed), replace(problem.fpfc, lam=lam), rounds=count,
                        start=run, seed=seed, evaluate_every=look, **own)  # fmt: skip
        new = [r for r in run.records if r.split == "test" and r.round > before]
        at += [r.round for r in new]
        test += [r[run.metric.name] for r in new]
    path = [{k: row[k] for k in ("lam", "validation", "rounds", "seconds")} for row in tuned.rows]
    kept = {"lam": tuned.best["lam"], "ari": tuned.best["ari"], "edges": tuned.edges}
    return kept | {"path": path, "at": at, "test": test} | tuned.costs[regime]


def compared(bench: Bench, problems: Sequence[Problem]) -> Outcome:
    """A table, a column of Figure 6 and the claims for each data set."""
    outcome, columns, edges = Outcome(), {}, 0
    for problem in problems:
        key, title, metric, factor = problem.key, problem.title, problem.metric, problem.factor
        rows, cost, test, column = {}, {}, {}, {}
        for regime, name in NAMES.items():
            searches = bench.by_seed(f"{key}-{regime}", lambda seed, p=problem, r=regime: search(bench, p, r, seed))
            edges += sum(f["edges"] for f in searches)
            cost[regime] = {k: np.array([f[k] for f in searches], dtype=float) for k in ("rounds", "seconds")}
            test[regime] = np.array([f["test"][-1] for f in searches])
            column[name] = searches
            lam, took = PRINTED[key][regime]
            rows[name] = [
                (lam, ours(f["lam"] for f in searches)),
                (None, ours(cost[regime]["rounds"], decimals=0)),
                (took, ours(cost[regime]["seconds"], decimals=1)),
                (None, ours([f["bytes"] / 4e6 for f in searches])),
                (None, ours([f["ari"] for f in searches])),
                (None, ours(test[regime], factor)),
            ]
        columns[title] = (metric, factor, column)
        heads = ("lambda", "rounds", "time (ours in seconds)", "million numbers sent", "ARI", metric)
        outcome.tables.append(beside(title, heads, rows, first="search"))
        outcome.claims += [
            *(ordered(f"{title}: the warm path takes fewer {k}", np.log10(cost["cold"][k]), np.log10(cost["warm"][k]),
                      unit=" decades") for k in ("rounds", "seconds")),
            problem.better("the warm path's model is better", test["warm"], test["cold"]),
        ]  # fmt: skip
    outcome.figures["figure6"] = figure6(columns)
    outcome.notes = [*NOTES, f"edges left: {edges}"]
    return outcome


def figure6(columns: Mapping[str, tuple[str, float, dict[str, list[dict]]]]) -> Figure:
    """A column per data set: validation over lambda with bars of seconds, and the test metric over rounds."""
    from polyfed.report.style import styled

    above, below = [], []
    for title, (metric, factor, by_search) in columns.items():
        firsts = {name: searches[0] for name, searches in by_search.items()}
        validation = {name: ([p["lam"] for p in first["path"]], [[factor * p["validation"] for p in first["path"]]])
                      for name, first in firsts.items()}  # fmt: skip
        above.append(Panel(title, "lambda", f"validation {metric}", validation))
        test = {name: (first["at"], [[factor * v for v in first["test"]]]) for name, first in firsts.items()}
        below.append(Panel(title, "round", f"test {metric}", test))
    figure = curve_panels([*above, *below], len(columns), 2.6)
    with styled():
        for ax, (_, _, by_search) in zip(figure.axes, columns.values(), strict=False):
            right: Any = ax.twinx()
            for k, (searches, line) in enumerate(zip(by_search.values(), ax.lines, strict=True)):
                at = np.array([p["lam"] for p in searches[0]["path"]])
                wide = max(0.4 * min(np.diff(at), default=1.0), np.ptp(at) / 40)
                seconds = [p["seconds"] for p in searches[0]["path"]]
                right.bar(at + (k - 0.5) * wide, seconds, wide, color=line.get_color(), alpha=0.25)
            right.grid(False)
            right.spines["right"].set_visible(True)
            right.set_ylabel("seconds (bars)")
            ax.set_zorder(right.get_zorder() + 1)  # lines before bars
    return figure


NOTES = [
    "lambda acts differently from a common start and on a path: the two columns' values cannot be exchanged",
    "rounds are what is compared first: seconds depend on what else the machine does",
    "the paper's warm path on S1 took 781 rounds, its eight separate runs 2000 each",
    "the paper does not say whether the path keeps the duals; here it does",
    "the figure shows the first seed",
]


@recipe("fpfc/table2", "Table 2 and Figure 6: lambda by a warm path and by separate runs", minutes=(4, 600),
        settings=settings, data=("housing_bodyfat",), also=("fpfc/figure6",))  # fmt: skip
def table2(bench: Bench) -> Outcome:
    """Does a warm path find a lambda as good as separate runs do, in less time?"""
    outcome = compared(bench, [replace(synthetic(bench), rounds=bench.rounds(2000, 2000)), hbf(bench)])
    outcome.notes.insert(0, HBF_CAVEAT)
    return outcome


def settings_of_images(scale: Size):
    return (
        Setting("rounds per lambda, at most", "as many as of a run", "ours"),
        Setting("grid", listed(IMAGE_GRID), "ours"),
        Setting("validation", "a fifth of a device's training images", "ours"),
        *RULES,
        *image_settings(scale, ("lambda, images",)),
    )


@recipe("fpfc/table2-images", "Table 2 and Figure 6: the same on label-swapped images", minutes=(1, 1700),
        settings=settings_of_images, data=("mnist", "fashion_mnist"),
        also=("fpfc/figure6-images",), between=("middle",))  # fmt: skip
def table2_images(bench: Bench) -> Outcome:
    """Does the warm path pay on images too?"""
    both = [images(bench, title, validation=0.2) for title in IMAGE_TITLES]
    return compared(bench, both)
