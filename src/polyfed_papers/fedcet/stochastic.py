"""Beyond the paper: stochastic gradients, on least squares and on a small net. No theory covers this."""

from typing import Any

import numpy as np

from polyfed.algorithms.fedavg import FedAvg
from polyfed.algorithms.fedcet import FedCET
from polyfed.algorithms.fedlin import FedLin
from polyfed.algorithms.fedtrack import FedTrack
from polyfed.algorithms.scaffold import Scaffold
from polyfed.base.errors import Diverged
from polyfed.core.algorithm import Algorithm
from polyfed.data import load
from polyfed.models import build
from polyfed.recipes.recipe import Bench, Claim, Outcome, Setting, curve_figure, ordered, ours, recipe
from polyfed.report.table import Cell, Table
from polyfed.runs.fit import fit
from polyfed.runs.watching import Progress
from polyfed_papers.fedcet import best, distances, error_figure, final, linear_regression, series

TAU, BATCH, LAST = 5, 10, 0.1
GRID = {"small": (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4), "paper": tuple(2.0**-k for k in range(9, 0, -1))}
COMMON = 1 / 16
ACTIVATIONS = ("relu", "tanh")
OTHERS = ("FedTrack", "SCAFFOLD", "FedLin, sparse down", "FedAvg")
RATES = {"small": (0.03, 0.1, 0.3, 1.0), "paper": (0.01, 0.03, 0.1, 0.3, 1.0)}


def settings(scale):
    return (
        Setting("least squares", "that of fedcet/equal-bytes, batches of 10 of 50 samples, tau 5", "ours"),
        Setting(
            "net",
            "64-32-10 perceptron (ReLU, or tanh) on digits, 10 clients, Dirichlet(0.3), batches of 10, tau 10",
            "ours",
        ),
        Setting("budget", f"{_budget(scale)} vectors per client (net: {_net_budget(scale)}), up and down", "ours"),
        Setting("steps", "grid a L = " + ", ".join(f"{g:g}" for g in GRID[scale]), "ours"),
        Setting("steps of the net", ", ".join(f"{g:g}" for g in RATES[scale]) + "; best validation accuracy", "ours"),
        Setting("FedLin", "0.1 of the gradient's entries sent down, all of them up", "ours"),
    )


def _budget(scale: str) -> int:
    return 600 if scale == "small" else 8000


def _net_budget(scale: str) -> int:
    return 120 if scale == "small" else 1200


def tuned(steps: dict[str, float], tau: int) -> dict[str, dict[str, Algorithm]]:
    return {
        "FedCET, fixed": {s: FedCET(lr=a) for s, a in steps.items()},
        "FedTrack": {s: FedTrack(a) for s, a in steps.items()},
        "FedLin, sparse down": {s: FedLin(tau * a, keep_down=0.1) for s, a in steps.items()},
        "SCAFFOLD": {s: Scaffold(a) for s, a in steps.items()},
        "FedAvg": {s: FedAvg(a, weighted=False) for s, a in steps.items()},
    }


def regression(bench: Bench) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """label -> step -> one run per seed on least squares with mini-batches."""
    grid = (COMMON,) if bench.rehearse else GRID[bench.scale]

    def one(seed: int) -> dict[str, Any]:
        problem = linear_regression(seed)
        L, mu = problem.smoothness, problem.convexity
        budget = _budget(bench.scale) * 8 * len(problem.optimum)
        rounds = bench.rounds(_budget("small"), _budget("paper"))
        rules = {
            "FedCET, paper": {"Algorithm 1": FedCET(lr="paper", smoothness=L, convexity=mu)},
            "FedCET, adaptive": {"measured": FedCET()},
            **tuned({f"a L = {g:g}": g / L for g in grid}, TAU),
        }
        return {
            label: {s: distances(problem, a, TAU, rounds, budget, BATCH, seed) for s, a in steps.items()}
            for label, steps in rules.items()
        }

    kept = bench.by_seed("least-squares", one)
    return {label: {s: [k[label][s] for k in kept] for s in steps} for label, steps in kept[0].items()}


def net(bench: Bench, activation: str) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """label -> step -> one run per seed of a perceptron on digits: bytes, validation and test accuracy."""
    rates = RATES[bench.scale][1:2] if bench.rehearse else RATES[bench.scale]
    tau, budget = 10, bench.rounds(_net_budget("small"), _net_budget("paper"))

    def train(algorithm: Algorithm, seed: int) -> dict[str, Any]:
        data = load("digits", flat=True).partition("dirichlet:0.3", 10, seed=seed, validation_fraction=0.2)
        model = build("mlp", data.input_shape, 10, seed=seed, hidden=32, activation=activation)
        size, seen = 4 * sum(q.numel() for q in model.parameters()), []

        def note(progress: Progress) -> bool:
            spent = sum(progress.run.trained.ledger.totals()) / data.n / size
            if progress.records:
                told = {r["split"]: r["accuracy"] for r in progress.records}
                seen.append((spent, told["validation"], told["test"]))
            return spent >= budget

        vectors = 2 if isinstance(algorithm, FedCET | FedAvg) else 4
        diverged = False
        try:
            fit(
                model, data, algorithm, rounds=max(1, budget // vectors), local_steps=tau, batch_size=BATCH, seed=seed,
                device=bench.device, evaluate_every=max(1, budget // vectors // 15), callbacks=[note],
            )  # fmt: skip
        except Diverged:
            diverged = True
        at, validation, test = zip(*seen, strict=True)
        return {"at": at, "validation": validation, "test": test, "diverged": diverged}

    def one(seed: int) -> dict[str, Any]:
        rules = {"FedCET, adaptive": {"measured": FedCET()}, **tuned({f"{a:g}": a for a in rates}, tau)}
        return {label: {s: train(a, seed) for s, a in steps.items()} for label, steps in rules.items()}

    kept = bench.by_seed(f"net-{activation}", one)
    return {label: {s: [k[label][s] for k in kept] for s in steps} for label, steps in kept[0].items()}


@recipe("fedcet/stochastic", "Beyond the paper: stochastic gradients", minutes=(1.4, 90), settings=settings)
def stochastic(bench: Bench) -> Outcome:
    """What happens to FedCET with mini-batches, for which it has no theory: a noise floor, or divergence?"""
    runs = regression(bench)
    chosen = {label: best(steps, LAST) for label, steps in runs.items()}
    rows = []
    for label, steps in runs.items():
        step, ends = chosen[label]
        same = steps.get(f"a L = {COMMON:g}")
        away = sum(run["diverged"] for over_seeds in steps.values() for run in over_seeds)
        total = sum(map(len, steps.values()))
        rows.append(
            (
                Cell(label, {"method": label}), ours(ends), Cell(step, {}, "quiet"),
                ours([] if same is None else [final(run, LAST) for run in same]), Cell(f"{away} of {total}"),
            )
        )  # fmt: skip
    heads = ("method<", "log10 error, best step", "step", f"log10 error, a L = {COMMON:g}", "diverged")
    note = "root mean square over the last tenth of the rounds, relative to the start; the same bytes for all"
    tables = [Table("Least squares, mini-batches", heads, tuple(rows), (note,))]
    figures = {
        "least-squares": error_figure(
            {label: series(runs[label][step], 1e3) for label, (step, _) in chosen.items()},
            "kB per client, up and down",
        )
    }
    claims = [
        ordered(f"least squares: FedCET (fixed) ends nearer than {m}", chosen[m][1], chosen["FedCET, fixed"][1],
                unit=" decades")
        for m in OTHERS
    ]  # fmt: skip
    for activation in ACTIVATIONS:
        table, figures[f"net-{activation}"], said = _net(bench, activation)
        tables.append(table)
        claims += said
    return Outcome(tables, figures, claims, NOTES)


def _net(bench: Bench, activation: str) -> tuple[Table, Any, list[Claim]]:
    """Every method at the step of the best mean validation accuracy."""
    found, picked = net(bench, activation), {}
    for label, steps in found.items():
        mean = {s: np.mean([0 if r["diverged"] else r["validation"][-1] for r in rs]) for s, rs in steps.items()}
        step = max(mean, key=lambda s: mean[s])
        picked[label] = (step, np.array([np.nan if r["diverged"] else r["test"][-1] for r in steps[step]]))
    rows = []
    for label, (step, accuracy) in picked.items():
        away = sum(r["diverged"] for rs in found[label].values() for r in rs)
        total = sum(map(len, found[label].values()))
        rows.append((Cell(label), ours(accuracy, 100), Cell(step, {}, "quiet"), Cell(f"{away} of {total}")))
    heads = ("method<", "test accuracy, %", "step", "diverged")
    figure = curve_figure(
        {m: _accuracy(found[m][step]) for m, (step, _) in picked.items()}, "vectors per client, up and down",
        "test accuracy, %", width=5.6, height=4.0,
    )  # fmt: skip
    claims = [
        ordered(f"{activation} net: FedCET (fixed) is more accurate than {m}", picked["FedCET, fixed"][1],
                picked[m][1], 100, " points")
        for m in OTHERS
    ]  # fmt: skip
    return Table(f"Perceptron on digits, {activation}", heads, tuple(rows)), figure, claims


def _accuracy(runs: list[dict[str, Any]]) -> tuple[list[float], list[list[float]]]:
    length = min(len(run["at"]) for run in runs)
    return list(runs[0]["at"][:length]), [[100 * a for a in run["test"][:length]] for run in runs]


NOTES = [
    "Outside of the theory: it needs full-batch gradients of strongly convex losses. The adaptive rule takes both "
    "gradients of a ratio on the same batch, which costs a second gradient per step; its step follows the largest "
    "curvature of any batch.",
    "With ReLU the adaptive rule fails: across a kink the gradient jumps however short the move, so the measured ratio "
    "grows as the step shrinks, and the step shrinks with it. With tanh it converges, more slowly than a tuned step.",
    "Algorithm 1 needs L and mu, so the paper's rule has no row for the net.",
    "FedTrack and FedLin take the gradients of their first exchange over all of a client's samples: one full pass "
    "more per round.",
]
