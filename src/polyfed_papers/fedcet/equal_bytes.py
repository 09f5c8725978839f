"""Beyond the paper, all at the same number of bytes: unlike Hessians; and compressed uploads with error feedback."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from polyfed import FedAvg, FedCET, FedLin, FedTrack, Scaffold, Server, setting
from polyfed.algorithms._shared.topk import dense, top_k
from polyfed.base.values import Limits
from polyfed.report.table import Cell, Table
from polyfed_exact.led import LED
from polyfed_exact.scaffnew import Scaffnew
from polyfed_papers.fedcet import TRIALS, Rule, Tuned, all_tuned, error_figure, hospitals, linear_regression, series
from polyfed_papers.recipes.recipe import Bench, Outcome, recipe
from polyfed_papers.recipes.said import Setting, listed, ordered, ours
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
OTHERS = ("Scaffnew", "LED", "FedTrack", "SCAFFOLD", "FedLin, sparse down", "FedLin, sparse both")


def settings(scale):
    grid, weights = (listed(values[scale]) for values in (GRID, WEIGHTS))
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
        "Scaffnew": Rule((step,), lambda p, at: Scaffnew(at[0] / p.smoothness)),
        "LED": Rule((step,), lambda p, at: LED(at[0] / p.smoothness)),
        "FedTrack": Rule((step,), lambda p, at: FedTrack(at[0] / p.smoothness)),
        "SCAFFOLD": Rule((step,), lambda p, at: Scaffold(at[0] / p.smoothness)),
        "FedLin, sparse down": Rule((step,), lambda p, at: FedLin(tau * at[0] / p.smoothness, keep_down=KEEP)),
        "FedLin, sparse both": Rule((step,), lambda p, at: FedLin(tau * at[0] / p.smoothness, **both)),
        "FedAvg": Rule((step,), lambda p, at: FedAvg(at[0] / p.smoothness, weighted=False)),
    }


@recipe("fedcet/equal-bytes", "Beyond the paper: error at equal bytes, unlike Hessians", minutes=(7, 40),
        settings=settings, seeds=10)  # fmt: skip
def equal_bytes(bench: Bench) -> Outcome:
    """Where clients do drift and every method has its best step, how near does each come for the same bytes?"""
    tables, figures, claims = [], {}, []
    for name in PROBLEMS:
        ends: dict[str, list[Tuned]] = {}
        for tau in TAUS:
            work = {"tau": tau, "rounds": bench.rounds(BUDGET, BUDGET), "budget": BUDGET}
            methods = rules(tau, GRID[bench.scale], WEIGHTS[bench.scale])
            of_tau = all_tuned(bench, f"{name}-tau{tau}", methods, PROBLEMS[name], **work)
            for label, mine in of_tau.items():
                ends.setdefault(label, []).append(mine)
            claims += [
                ordered(
                    f"{name}, tau {tau}: FedCET (tuned) ends nearer than {other}",
                    of_tau[other].ends, of_tau["FedCET, tuned"].ends, unit=" decades",
                )
                for other in OTHERS
            ]  # fmt: skip
            if tau == 5:
                curves = {label: series(mine.runs, 1e3) for label, mine in of_tau.items()}
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
    lead = [min(by_tau[k].ends.mean() for by_tau in ends.values()) for k in range(len(TAUS))]
    rows = []
    for label, by_tau in ends.items():
        cells = [Cell(label, {"method": label})]
        for k, mine in enumerate(by_tau):
            cells += [ours(mine.ends, mark="gain" if mine.ends.mean() <= lead[k] else ""), chosen_cell(mine.at)]
        rows.append(tuple(cells))
    note = "log10 of ||mean_i x_i - x*|| / ||x*|| at the budget, mean and deviation over seeds; –: diverged"
    return Table(name, heads, tuple(rows), (note,))


def chosen_cell(at: At) -> Cell:
    """The choice: the step times L, and the weight's share of its bound."""
    return Cell(", ".join((f"a L = {at[0]:g}", *(f"{v:g}" for v in at[1:]))) if at else "–", {}, "quiet")


TAU, KEEPS, BATCH = 5, {"half": 0.5, "tenth": 0.1}, 10
FIRST = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0)
BOTH = {  # case -> first steps a L and first weights, shares of the bound 4/(tau + 2), of FedCET, compressed
    "full batches": ((1 / 16, 1 / 4, 1.0), {"half": (0.1, 0.3, 1.0), "tenth": (0.01, 0.03, 0.1)}),
    "batches of 10": ((1 / 32, 1 / 8, 1 / 2), {"half": (0.003, 0.01, 0.03), "tenth": (0.0007, 0.002, 0.006)}),
}
CASES: Mapping[str, tuple[int, int | None, float]] = {  # budget in vectors, batch size, share of the rounds judged
    "full batches": (80, None, 0.0),
    "batches of 10": (600, BATCH, 0.1),
}


@dataclass(frozen=True)
class Compressed(FedCET, abstract=True):
    """FedCET whose clients send the largest entries of how far z_i is from what the server knows of it, h_i.

        uplink      q_i = C(z_i - h_i),   h_i <- h_i + q_i       at the client and at the server
        exchange    d_i <- d_i + c (h_i - hbar),   x_i <- z_i - c a (h_i - hbar)

    What C leaves out stays in z_i - h_i and is sent later: error feedback. sum_i d_i = 0 as before, and in a fixed
    point z_i = h_i, so that the end is FedCET's own.
    """

    name: ClassVar[str] = "fedcet-compressed"

    keep: float = setting(0.1, gt=0, le=1, doc="Share of the entries that a client sends.")

    def init_server(self, task, w0, n):
        return Server({"w": w0}, each={"h": w0.expand(n, -1).clone()})

    def init_client(self, task, w0):
        return super().init_client(task, w0) | {"h": w0}

    def local_update(self, task, client, down, data, round):
        if round.phase % 2:
            moved = self._exchange({name: client[name] for name in ("a", "d")} | {"w": client["h"]}, down, data)
            return {"w": client["w"] + moved["w"] - client["h"], "d": moved["d"]}, {}
        state, up = super().local_update(task, client, down, data, round)
        q = top_k(up["z"] - client["h"], self.keep)
        return state | {"h": client["h"] + dense(q, task.p)}, q

    def aggregate(self, server, up, round):
        if round.phase % 2:
            return server
        h = server["h"].index_add(0, round.ids, dense(dict(up), len(server["w"])))
        return {"w": h[round.ids].mean(0), "h": h}


COMPRESSED_SETTINGS = (
    Setting("problem", "least squares: 10 clients, 50 samples, dimension 20, own solutions, input scales", "ours"),
    Setting("local work", f"{TAU} steps, on all 50 samples or on batches of {BATCH}", "ours"),
    Setting("budget", ", ".join(f"{label}: {case[0]} vectors" for label, case in CASES.items()) + ", up and down",
            "ours"),
    Setting("compression", "the half or tenth of the entries that are largest; values, 4-byte positions", "ours"),
    Setting("error feedback", "of FedCET: differences to what the server knows; FedLin: its own", "ours"),
    Setting("tuning", f"{TRIALS} trials of every method, under three seeds that do not count: a L from "
            + listed(FIRST), "ours"),
    *(Setting(f"tuning, compressed, {case}", "a L from " + listed(steps) + "; c a from "
              + "; ".join(f"{share}: " + listed(own) for share, own in weights.items())
              + " of 4/(tau + 2)", "ours")
      for case, (steps, weights) in BOTH.items()),
)  # fmt: skip


def compressed_rules(case: str) -> dict[str, Rule]:
    """label -> what is tuned of a method."""
    step, (steps, weights) = Ladder(FIRST, Limits(gt=0)), BOTH[case]
    few = Ladder(steps, Limits(gt=0))  # that trials are left for both

    def sparse(share: str) -> Rule:
        make, weight = partial(Compressed, keep=KEEPS[share]), Ladder(weights[share], Limits(gt=0, le=1))
        return Rule((few, weight), lambda p, at: make(lr=at[0] / p.smoothness, weight=at[1] * 4 / (TAU + 2)))

    return {
        "FedCET": Rule((step,), lambda p, at: FedCET(lr=at[0] / p.smoothness)),
        **{f"FedCET, {share} up": sparse(share) for share in KEEPS},
        "FedLin, tenth up": Rule((step,), lambda p, at: FedLin(TAU * at[0] / p.smoothness, keep_up=0.1)),
    }


def compressed_tuned(bench: Bench, case: str) -> dict[str, Tuned]:
    """Every method at its best values."""
    budget, batch, last = CASES[case]
    work = {"tau": TAU, "rounds": bench.rounds(2 * budget, 2 * budget), "budget": budget, "batch_size": batch}
    return all_tuned(bench, case.replace(" ", "-"), compressed_rules(case), linear_regression, last, **work)


@recipe("fedcet/compressed", "Beyond the paper: compressed uploads with error feedback", minutes=(2, 2),
        settings=COMPRESSED_SETTINGS, seeds=5)  # fmt: skip
def compressed(bench: Bench) -> Outcome:
    """Does FedCET end nearer for the same bytes when a tenth of its upload is sent?"""
    tuned = {case: compressed_tuned(bench, case) for case in CASES}
    rows: list[Sequence[Cell]] = []
    for label in compressed_rules("full batches"):
        cells = (cell for case in CASES for cell in (ours(tuned[case][label].ends), chosen_cell(tuned[case][label].at)))
        rows.append((Cell(label, {"method": label}), *cells))
    heads = ("method<", *(text for case in CASES for text in (f"{case}: log10 error", "step, c a")))
    note = "log10 of ||mean_i x_i - x*|| / ||x*|| at the budget; of batches the last tenth of the rounds"
    claims = [
        ordered(f"{case}: {label} ends nearer than {other}", mine[other].ends, mine[label].ends, unit=" decades")
        for case, mine in tuned.items()
        for label, other in (
            *((f"FedCET, {share} up", "FedCET") for share in KEEPS), ("FedCET, tenth up", "FedLin, tenth up"),
        )
    ]  # fmt: skip
    curves = {label: series(mine.runs, 1e3) for label, mine in tuned["full batches"].items()}
    figures = {"compressed": error_figure(curves, "kB per client, up and down")}
    return Outcome([Table("Least squares", heads, tuple(map(tuple, rows)), (note,))], figures, claims, NOTES)


NOTES = [
    "FedCET's download is whole: were the mean compressed too, the clients' exchanges would not add up to zero",
    "an entry that is sent alone has 12 bytes in place of 8: a round has .875 and .575 of FedCET's bytes",
    "FedLin computes one full gradient more per round, and sends the model and the gradient's mean down",
]
