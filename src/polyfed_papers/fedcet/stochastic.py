"""Beyond the paper: stochastic gradients, on least squares and on a small net. No theory covers this."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from polyfed import Algorithm, FedAvg, FedCET, FedLin, FedTrack, Progress, Scaffold
from polyfed.base.errors import Diverged
from polyfed.base.values import Limits
from polyfed.data import load
from polyfed.models import build
from polyfed.report.table import Cell, Table
from polyfed.runs.trainer import fit
from polyfed_papers.fedcet import (
    TRIALS,
    UNCOUNTED,
    Problem,
    Rule,
    Tuned,
    all_tuned,
    error_figure,
    linear_regression,
    series,
)
from polyfed_papers.fedcet.equal_bytes import chosen_cell
from polyfed_papers.recipes.drawing import curve_figure
from polyfed_papers.recipes.recipe import Bench, Outcome, recipe
from polyfed_papers.recipes.said import Claim, Setting, listed, ordered, ours, points
from polyfed_tuning.ladder import At, Ladder

TAU, BATCH, LAST = 5, 10, 0.1
GRID = {"small": (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4), "paper": tuple(2.0**-k for k in range(9, 0, -1))}
ACTIVATIONS = ("relu", "tanh")
OTHERS = ("FedTrack", "SCAFFOLD", "FedLin, sparse down", "FedAvg")
NET_TRIALS = 8
RATES = {"small": (0.03, 0.1, 0.3, 1.0), "paper": (0.01, 0.03, 0.1, 0.3, 1.0)}


def settings(scale):
    return (
        Setting("least squares", "that of fedcet/equal-bytes, batches of 10 of 50 samples, tau 5", "ours"),
        Setting("net",
                "64-32-10 perceptron (ReLU, or tanh) on digits, 10 clients, Dirichlet(0.3), batches of 10, tau 10",
                "ours"),
        Setting("budget", f"{_budget(scale)} vectors per client (net: {_net_budget(scale)}), up and down", "ours"),
        Setting("tuning", f"{TRIALS} trials of every method (net: {NET_TRIALS}), under three seeds that do not count: "
                "the values below, beyond them while the first or the last is best, then between", "ours"),
        Setting("steps", "a L from " + listed(GRID[scale]) + ", by the error", "ours"),
        Setting("steps of the net", "from " + listed(RATES[scale]) + ", by validation accuracy",
                "ours"),
        Setting("FedLin", "0.1 of the gradient's entries sent down, all of them up", "ours"),
    )  # fmt: skip


def _budget(scale: str) -> int:
    return 600 if scale == "small" else 8000


def _net_budget(scale: str) -> int:
    return 120 if scale == "small" else 1200


Rules = dict[str, Callable[[Problem | None, At], Algorithm]]


def by_step(tau: int, unit: Callable[[Any], float]) -> Rules:
    """label -> the method at a step, in units of the problem's."""
    return {
        "FedCET, fixed": lambda p, at: FedCET(lr=at[0] * unit(p)),
        "FedTrack": lambda p, at: FedTrack(at[0] * unit(p)),
        "FedLin, sparse down": lambda p, at: FedLin(tau * at[0] * unit(p), keep_down=0.1),
        "SCAFFOLD": lambda p, at: Scaffold(at[0] * unit(p)),
        "FedAvg": lambda p, at: FedAvg(at[0] * unit(p), weighted=False),
    }


def regression(bench: Bench) -> dict[str, Tuned]:
    """Every method at its best step on least squares with mini-batches."""
    step = (Ladder(GRID[bench.scale], Limits(gt=0)),)
    rules = {
        "FedCET, paper": Rule((), lambda p, _: FedCET(lr="paper", smoothness=p.smoothness, convexity=p.convexity)),
        "FedCET, adaptive": Rule((), lambda *_: FedCET()),
        **{label: Rule(step, make) for label, make in by_step(TAU, lambda p: 1 / p.smoothness).items()},
    }
    budget = _budget(bench.scale)
    work = {"tau": TAU, "rounds": bench.rounds(budget, budget), "budget": budget, "batch_size": BATCH}
    return all_tuned(bench, "least-squares", rules, linear_regression, LAST, **work)


def perceptron(bench: Bench, activation: str, algorithm: Algorithm, seed: int) -> dict[str, Any]:
    """A run on digits: bytes, validation and test accuracy, and whether it diverged."""
    tau, budget = 10, bench.rounds(_net_budget("small"), _net_budget("paper"))
    data = load("digits", flat=True).partition("dirichlet:0.3", 10, seed=seed, validation_fraction=0.2)
    model = build("mlp", data.input_shape, 10, seed=seed, hidden=32, activation=activation)
    size, looks = 4 * sum(q.numel() for q in model.parameters()), []

    def note(progress: Progress) -> bool:
        spent = sum(progress.run.trained.ledger.totals()) / data.n / size
        if progress.records:
            told = {r.split: r["accuracy"] for r in progress.records}
            looks.append((spent, told["validation"], told["test"]))
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
    at, validation, test = zip(*looks, strict=True)
    return {"at": at, "validation": validation, "test": test, "diverged": diverged}


def net(bench: Bench, activation: str) -> dict[str, tuple[At, list[dict[str, Any]]]]:
    """label -> the step of the best validation accuracy under seeds that do not count, and a run per seed that does."""

    def one(k: int, make: Callable[[At], Algorithm], ladders: Sequence[Ladder]) -> tuple[At, list[dict[str, Any]]]:
        def score(at: At) -> float:
            seeds = range(UNCOUNTED, UNCOUNTED + (1 if bench.rehearse else 3))
            runs = [perceptron(bench, activation, make(at), seed) for seed in seeds]
            return float(np.mean([-np.inf if r["diverged"] else r["validation"][-1] for r in runs]))

        key = f"net-{activation}-{k}"
        at = bench.choose(f"{key}-choice", score, ladders, NET_TRIALS) if ladders else ()
        run = partial(perceptron, bench, activation, make(at))
        return at, [bench.once(f"{key}-seed{seed}", partial(run, seed)) for seed in bench.seeds]

    step = (Ladder(RATES[bench.scale], Limits(gt=0)),)
    rules: dict[str, Any] = {"FedCET, adaptive": (lambda _: FedCET(), ())}
    rules |= {label: (partial(make, None), step) for label, make in by_step(10, lambda _: 1.0).items()}
    tasks = [(f"net-{activation}", k, partial(one, k, *rule)) for k, rule in enumerate(rules.values())]
    return dict(zip(rules, bench.all_of(tasks), strict=True))


@recipe("fedcet/stochastic", "Beyond the paper: stochastic gradients", minutes=(1.4, 90), settings=settings)
def stochastic(bench: Bench) -> Outcome:
    """What happens to FedCET with mini-batches, for which it has no theory: a noise floor, or divergence?"""
    tuned = regression(bench)
    rows = [(Cell(label, {"method": label}), ours(mine.ends), chosen_cell(mine.at)) for label, mine in tuned.items()]
    note = "root mean square over the last tenth of the rounds, relative to the start; the same bytes for all"
    heads = ("method<", "log10 error", "step")
    tables = [Table("Least squares, mini-batches", heads, tuple(rows), (note,))]
    curves = {label: series(mine.runs, 1e3) for label, mine in tuned.items()}
    figures = {"least-squares": error_figure(curves, "kB per client, up and down")}
    claims = [
        ordered(f"least squares: FedCET (fixed) ends nearer than {m}", tuned[m].ends, tuned["FedCET, fixed"].ends,
                unit=" decades")
        for m in OTHERS
    ]  # fmt: skip
    for activation in ACTIVATIONS:
        table, figures[f"net-{activation}"], more = _net(bench, activation)
        tables.append(table)
        claims += more
    return Outcome(tables, figures, claims, NOTES)


def _net(bench: Bench, activation: str) -> tuple[Table, Any, list[Claim]]:
    """Every method at its step."""
    trained = net(bench, activation)
    ends = {m: np.array([np.nan if r["diverged"] else r["test"][-1] for r in runs]) for m, (_, runs) in trained.items()}
    rows = [
        (Cell(m), ours(ends[m], 100), Cell(f"{at[0]:g}" if at else "–", {}, "quiet")) for m, (at, _) in trained.items()
    ]
    figure = curve_figure(
        {m: _accuracy(runs) for m, (_, runs) in trained.items()}, "vectors per client, up and down", "test accuracy, %",
        width=5.6, height=4.0,
    )  # fmt: skip
    claims = [
        points(f"{activation} net: FedCET (fixed) is more accurate than {m}", ends["FedCET, fixed"], ends[m])
        for m in OTHERS
    ]  # fmt: skip
    heads = ("method<", "test accuracy, %", "step")
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
