"""Does the tuner alone find the clusters? Validation data only, both regimes, on every scenario of known clusters."""

from dataclasses import replace
from functools import partial

from sklearn.metrics import adjusted_rand_score
from torch import nn

from polyfed.algorithms.local import Local
from polyfed.report.table import Cell, Table
from polyfed_papers.fpfc import HBF_BESIDE, HBF_CAVEAT, SYNTHETIC, Problem, hbf, sizes, softmax, synthetic
from polyfed_papers.recipes.recipe import Bench, Outcome, Size, recipe
from polyfed_papers.recipes.said import Claim, Setting, ours

GRIDS = {"cold": (0.4, 0.5, 0.6, 0.7, 0.8, 0.9), "warm": (0.0, 1.0, 2.0, 3.0, 4.0)}
HBF_GRIDS = {"cold": (0.0, 1.0, 2.0, 3.0, 4.0, 5.0), "warm": (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)}
PATIENCE = {"check_every": 25, "patience": 4}  # a cold start stands still for a while before devices fuse


def settings(scale: Size):
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


def search(bench: Bench, seed: int, problem: Problem, grids):
    """The tuner's choice and its run, and Local for as many rounds."""
    data, rounds = problem.federation(seed), problem.rounds
    common = {"seed": seed, **problem.work}
    found = bench.tune(
        problem.model(seed), data, problem.fpfc, grid={k: v[:1] for k, v in grids.items()} if bench.rehearse else grids,
        rounds=rounds, train_on=rounds, extend=0 if bench.rehearse else 6, **PATIENCE, **common,
    )  # fmt: skip
    run = found.run
    assert run is not None
    assert run.clusters is not None
    local = bench.fit(
        problem.model(seed), data, Local(problem.fpfc.lr), rounds=run.rounds, **{**common, "fraction": 1.0}
    )
    return {
        "regime": found.best["regime"],
        "lam": found.best["lam"],
        "edges": found.edges,
        "clusters": len(set(run.clusters.tolist())),
        "ari": float(adjusted_rand_score(data.clusters, run.clusters)),
        "test": float(run.final["test"][run.metric.name].mean()),
        "local": float(local.final["test"][local.metric.name].mean()),
        "path": [{k: row[k] for k in ("regime", "lam", "validation", "clusters", "ari")} for row in found.rows],
    }


@recipe("fpfc/tuner", "Clusters found by the tuner alone, on every scenario", minutes=(8, 600), settings=settings,
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
            one = partial(search, bench, seed, problem, grids)
            tasks.append((problem.key, seed, partial(bench.once, f"{problem.key}-seed{seed}", one)))
    results = iter(bench.all_of(tasks))
    for problem in problems:
        found = [next(results) for _ in bench.seeds]
        edges += sum(f["edges"] for f in found)
        name, factor, sign = problem.title, problem.factor, problem.sign
        ari, gain = [f["ari"] for f in found], [factor * sign * (f["test"] - f["local"]) for f in found]
        chosen = ", ".join(f"{f['regime']} {f['lam']:g}" for f in found)
        numbers, scores = ", ".join(str(f["clusters"]) for f in found), ", ".join(f"{a:.2f}" for a in ari)
        metrics = (ours((f[k] for f in found), factor) for k in ("test", "local"))
        rows.append((*map(Cell, (name, chosen, numbers, scores)), *metrics))
        claims.append(Claim(f"{name}: ARI 1 under every seed", min(ari) >= 1 - 1e-9, f"ARI {scores}"))
        if name != "S5":
            evidence = ", ".join(f"{g:+.2f}" for g in gain) + (" RMSE" if problem.error else " points")
            claims.append(Claim(f"{name}: better than training alone under every seed", min(gain) > 0, evidence))
        for seed, f in zip(bench.seeds, found, strict=True):
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
