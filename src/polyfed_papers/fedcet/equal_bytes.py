"""Beyond the paper: unlike Hessians, every method at its best step, all at the same number of bytes."""

from typing import Any

import numpy as np

from polyfed.algorithms.fedavg import FedAvg
from polyfed.algorithms.fedcet import FedCET
from polyfed.algorithms.fedlin import FedLin
from polyfed.algorithms.fedtrack import FedTrack
from polyfed.algorithms.scaffold import Scaffold
from polyfed.core.algorithm import Algorithm
from polyfed.recipes.recipe import Bench, Outcome, Setting, ordered, ours, recipe
from polyfed.report.table import Cell, Table
from polyfed_papers.fedcet import Problem, best, distances, error_figure, hospitals, linear_regression, series

TAUS = (2, 5, 10)
GRID = {
    "small": (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0),
    "paper": tuple(2.0**-k for k in range(8, -5, -1)),
}
WEIGHTS = {"small": (0.25, 0.5, 0.75, 0.9), "paper": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)}
BUDGET = 120  # few enough that most methods have not come down to rounding, 1e-14
KEEP = 0.1
PROBLEMS = {"least-squares": linear_regression, "logistic": hospitals}
OTHERS = ("FedTrack", "SCAFFOLD", "FedLin, sparse down", "FedLin, sparse both")


def settings(scale):
    grid, weights = (", ".join(f"{g:g}" for g in values[scale]) for values in (GRID, WEIGHTS))
    return (
        Setting("least squares", "10 clients, 50 samples, dimension 20, own solutions and input scales", "ours"),
        Setting("logistic", "Heart Disease, 4 hospitals, softmax with l2 0.01; optimum by a trust region", "ours"),
        Setting("tau", "2, 5, 10 full-batch steps", "ours"),
        Setting("budget", f"{BUDGET} vectors per client, up and down together", "ours"),
        Setting("steps", f"a L in {grid}; the best at the budget per method, on average over seeds", "ours"),
        Setting("FedCET, tuned", f"the best step and the best c a together: {weights} of 4/(tau + 2)", "ours"),
        Setting("FedCET, fixed", "the best step, c a = min(1/2, 3.5/(tau + 2))", "ours"),
        Setting("FedCET, paper", "a from Algorithm 1, c = mu / (2 mu a + 8)", "paper"),
        Setting("FedLin", f"{KEEP:g} of the gradient's entries sent down, or down and up", "ours"),
    )


def methods(
    problem: Problem, tau: int, grid: tuple[float, ...], weights: tuple[float, ...]
) -> dict[str, dict[str, Algorithm]]:
    """label -> step -> method. FedLin's step is that of a whole round."""
    L, mu = problem.smoothness, problem.convexity
    tuned = {f"a L = {g:g}": g / L for g in grid}
    return {
        "FedCET, paper": {"Algorithm 1": FedCET(lr="paper", smoothness=L, convexity=mu)},
        "FedCET, adaptive": {"measured": FedCET()},
        "FedCET, tuned": {
            f"{s}, {w:g}": FedCET(lr=a, weight=w * 4 / (tau + 2)) for s, a in tuned.items() for w in weights
        },
        "FedCET, fixed": {s: FedCET(lr=a) for s, a in tuned.items()},
        "FedTrack": {s: FedTrack(a) for s, a in tuned.items()},
        "SCAFFOLD": {s: Scaffold(a) for s, a in tuned.items()},
        "FedLin, sparse down": {s: FedLin(tau * a, keep_down=KEEP) for s, a in tuned.items()},
        "FedLin, sparse both": {s: FedLin(tau * a, keep_down=KEEP, keep_up=KEEP) for s, a in tuned.items()},
        "FedAvg": {s: FedAvg(a, weighted=False) for s, a in tuned.items()},
    }


def all_runs(bench: Bench, name: str, tau: int) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """label -> step -> one run per seed, kept seed by seed."""
    grid, weights = (v[bench.scale][:1] if bench.rehearse else v[bench.scale] for v in (GRID, WEIGHTS))

    def one(seed: int) -> dict[str, Any]:
        problem = PROBLEMS[name](seed)
        budget, rounds = BUDGET * 8 * len(problem.optimum), bench.rounds(BUDGET, BUDGET)
        return {
            label: {step: distances(problem, a, tau, rounds, budget, seed=seed) for step, a in steps.items()}
            for label, steps in methods(problem, tau, grid, weights).items()
        }

    kept = bench.by_seed(f"{name}-tau{tau}", one)
    return {label: {step: [k[label][step] for k in kept] for step in steps} for label, steps in kept[0].items()}


@recipe("fedcet/equal-bytes", "Beyond the paper: error at equal bytes, unlike Hessians", minutes=(3, 20),
        settings=settings)  # fmt: skip
def equal_bytes(bench: Bench) -> Outcome:
    """Where clients do drift and every method has its best step, how near does each come for the same bytes?"""
    tables, figures, claims = [], {}, []
    for name in PROBLEMS:
        ends: dict[str, list[tuple[str, np.ndarray]]] = {}
        for tau in TAUS:
            runs = all_runs(bench, name, tau)
            chosen = {label: best(steps) for label, steps in runs.items()}
            for label, found in chosen.items():
                ends.setdefault(label, []).append(found)
            claims += [
                ordered(
                    f"{name}, tau {tau}: FedCET (tuned) ends nearer than {other}",
                    chosen[other][1], chosen["FedCET, tuned"][1], unit=" decades",
                )
                for other in OTHERS
            ]  # fmt: skip
            if tau == 5:
                curves = {label: series(runs[label][step], 1e3) for label, (step, _) in chosen.items()}
                figures[f"{name}-tau5"] = error_figure(curves, "kB per client, up and down")
        tables.append(_table(name, ends))
    notes = [
        "FedLin with everything sent is FedTrack when all clients take tau steps, so it has no row of its own: what is "
        "said of FedTrack is said of it.",
        "With sparse uploads FedLin is not exact; FedAvg is not either. Relative errors end at 1e-14, rounding.",
        "FedTrack and FedLin compute one full gradient more per round than the others.",
        "L of the logistic problem is a bound, half the largest eigenvalue of the inputs' second moments; the "
        "curvature on the way is smaller, so steps beyond 2/L can be stable.",
    ]
    return Outcome(tables, figures, claims, notes)


def _table(name: str, ends: dict[str, list[tuple[str, np.ndarray]]]) -> Table:
    heads = ("method<", *(text for tau in TAUS for text in (f"tau {tau}: log10 error", "step")))
    lead = [min(values.mean() for values in (found[k][1] for found in ends.values())) for k in range(len(TAUS))]
    rows = []
    for label, found in ends.items():
        cells = [Cell(label, {"method": label})]
        for k, (step, values) in enumerate(found):
            cells += [ours(values, mark="gain" if values.mean() <= lead[k] else ""), Cell(step, {}, "quiet")]
        rows.append(tuple(cells))
    note = "log10 of ||mean_i x_i - x*|| / ||x*|| at the budget, mean and deviation over seeds; –: diverged"
    return Table(name, heads, tuple(rows), (note,))
