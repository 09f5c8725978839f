"""Beyond the paper: unlike Hessians, every method at its best step, all at the same number of bytes."""

from functools import partial

from polyfed.algorithms.fedavg import FedAvg
from polyfed.algorithms.fedcet import FedCET
from polyfed.algorithms.fedlin import FedLin
from polyfed.algorithms.fedtrack import FedTrack
from polyfed.algorithms.scaffold import Scaffold
from polyfed.base.values import Limits
from polyfed.report.table import Cell, Table
from polyfed_papers.fedcet import TRIALS, Rule, Tuned, error_figure, hospitals, linear_regression, series, tuned
from polyfed_papers.recipes.recipe import Bench, Outcome, recipe
from polyfed_papers.recipes.said import Setting, ordered, ours
from polyfed_tuning.ladder import At, Ladder

TAUS = (2, 5, 10)
GRID = {
    "small": (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0),
    "paper": tuple(2.0**-k for k in range(8, -5, -1)),
}
WEIGHTS = {"small": (0.5, 0.9, 1.0), "paper": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)}
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
        Setting("tuning", f"{TRIALS} trials of every method, under three seeds that do not count: the values below, "
                "beyond them while the first or the last is best, then between", "ours"),
        Setting("steps", f"a L from {grid}", "ours"),
        Setting("FedCET, tuned", f"every other step, and c a from {weights} of 4/(tau + 2), together", "ours"),
        Setting("FedCET, fixed", "the best step, c a = min(1/2, 3.5/(tau + 2))", "ours"),
        Setting("FedCET, paper", "a from Algorithm 1, c = mu / (2 mu a + 8)", "paper"),
        Setting("FedLin", f"{KEEP:g} of the gradient's entries sent down, or down and up", "ours"),
    )  # fmt: skip


def rules(tau: int, grid: tuple[float, ...], weights: tuple[float, ...]) -> dict[str, Rule]:
    """label -> what is tuned, and the method. FedLin's step is that of a whole round."""
    step = Ladder(grid, Limits(gt=0))
    few, share = Ladder(grid[::2], Limits(gt=0)), Ladder(weights, Limits(gt=0, le=1))  # that trials are left for both
    both = {"keep_down": KEEP, "keep_up": KEEP}
    return {
        "FedCET, paper": Rule((), lambda p, _: FedCET(lr="paper", smoothness=p.smoothness, convexity=p.convexity)),
        "FedCET, adaptive": Rule((), lambda *_: FedCET()),
        "FedCET, tuned": Rule(
            (few, share), lambda p, at: FedCET(lr=at[0] / p.smoothness, weight=at[1] * 4 / (tau + 2))
        ),
        "FedCET, fixed": Rule((step,), lambda p, at: FedCET(lr=at[0] / p.smoothness)),
        "FedTrack": Rule((step,), lambda p, at: FedTrack(at[0] / p.smoothness)),
        "SCAFFOLD": Rule((step,), lambda p, at: Scaffold(at[0] / p.smoothness)),
        "FedLin, sparse down": Rule((step,), lambda p, at: FedLin(tau * at[0] / p.smoothness, keep_down=KEEP)),
        "FedLin, sparse both": Rule((step,), lambda p, at: FedLin(tau * at[0] / p.smoothness, **both)),
        "FedAvg": Rule((step,), lambda p, at: FedAvg(at[0] / p.smoothness, weighted=False)),
    }


def all_tuned(bench: Bench, name: str, tau: int) -> dict[str, Tuned]:
    """Every method at its best values."""
    work = {"tau": tau, "rounds": bench.rounds(BUDGET, BUDGET), "budget": BUDGET}
    found = rules(tau, GRID[bench.scale], WEIGHTS[bench.scale])
    tasks = [
        (f"{name}-tau{tau}", k, partial(tuned, bench, f"{name}-tau{tau}-{k}", rule, PROBLEMS[name], **work))
        for k, rule in enumerate(found.values())
    ]
    return dict(zip(found, bench.all_of(tasks), strict=True))


@recipe("fedcet/equal-bytes", "Beyond the paper: error at equal bytes, unlike Hessians", minutes=(3, 20),
        settings=settings)  # fmt: skip
def equal_bytes(bench: Bench) -> Outcome:
    """Where clients do drift and every method has its best step, how near does each come for the same bytes?"""
    tables, figures, claims = [], {}, []
    for name in PROBLEMS:
        ends: dict[str, list[Tuned]] = {}
        for tau in TAUS:
            found = all_tuned(bench, name, tau)
            for label, mine in found.items():
                ends.setdefault(label, []).append(mine)
            claims += [
                ordered(
                    f"{name}, tau {tau}: FedCET (tuned) ends nearer than {other}",
                    found[other].ends, found["FedCET, tuned"].ends, unit=" decades",
                )
                for other in OTHERS
            ]  # fmt: skip
            if tau == 5:
                curves = {label: series(mine.runs, 1e3) for label, mine in found.items()}
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


def _table(name: str, ends: dict[str, list[Tuned]]) -> Table:
    heads = ("method<", *(text for tau in TAUS for text in (f"tau {tau}: log10 error", "step")))
    lead = [min(found[k].ends.mean() for found in ends.values()) for k in range(len(TAUS))]
    rows = []
    for label, found in ends.items():
        cells = [Cell(label, {"method": label})]
        for k, mine in enumerate(found):
            cells += [ours(mine.ends, mark="gain" if mine.ends.mean() <= lead[k] else ""), chosen_cell(mine.at)]
        rows.append(tuple(cells))
    note = "log10 of ||mean_i x_i - x*|| / ||x*|| at the budget, mean and deviation over seeds; –: diverged"
    return Table(name, heads, tuple(rows), (note,))


def chosen_cell(at: At) -> Cell:
    """The choice: the step times L, and the weight's share of its bound."""
    return Cell(", ".join((f"a L = {at[0]:g}", *(f"{v:g}" for v in at[1:]))) if at else "–", {}, "quiet")
