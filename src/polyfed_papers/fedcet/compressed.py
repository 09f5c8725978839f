"""Beyond the paper: FedCET with compressed uploads and error feedback, at equal bytes; full batches and small ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from polyfed.algorithms.fedcet import FedCET
from polyfed.algorithms.fedlin import FedLin, dense, top_k
from polyfed.base.settings import setting
from polyfed.base.values import Limits
from polyfed.core.algorithm import Server
from polyfed.report.table import Cell, Table
from polyfed_papers.fedcet import TRIALS, Rule, Tuned, error_figure, linear_regression, series, tuned
from polyfed_papers.fedcet.equal_bytes import chosen_cell
from polyfed_papers.recipes.recipe import Bench, Outcome, recipe
from polyfed_papers.recipes.said import Setting, ordered, ours
from polyfed_tuning.ladder import Ladder

TAU, KEEPS, BATCH = 5, {"half": 0.5, "tenth": 0.1}, 10
GRID = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0)
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


def settings(scale):
    return (
        Setting("problem", "least squares: 10 clients, 50 samples, dimension 20, own solutions, input scales", "ours"),
        Setting("local work", f"{TAU} steps, on all 50 samples or on batches of {BATCH}", "ours"),
        Setting("budget", ", ".join(f"{label}: {case[0]} vectors" for label, case in CASES.items()) + ", up and down",
                "ours"),
        Setting("compression", "the half or tenth of the entries that are largest; values, 4-byte positions", "ours"),
        Setting("error feedback", "of FedCET: differences to what the server knows; FedLin: its own", "ours"),
        Setting("tuning", f"{TRIALS} trials of every method, under three seeds that do not count: a L from "
                + ", ".join(f"{g:g}" for g in GRID), "ours"),
        *(Setting(f"tuning, compressed, {case}", "a L from " + ", ".join(f"{g:g}" for g in steps) + "; c a from "
                  + "; ".join(f"{share}: " + ", ".join(f"{w:g}" for w in own) for share, own in weights.items())
                  + " of 4/(tau + 2)", "ours")
          for case, (steps, weights) in BOTH.items()),
    )  # fmt: skip


def rules(case: str) -> dict[str, Rule]:
    """label -> what is tuned of a method."""
    step, (steps, weights) = Ladder(GRID, Limits(gt=0)), BOTH[case]
    few = Ladder(steps, Limits(gt=0))  # that trials are left for both

    def sparse(share: str) -> Rule:
        make, weight = partial(Compressed, keep=KEEPS[share]), Ladder(weights[share], Limits(gt=0, le=1))
        return Rule((few, weight), lambda p, at: make(lr=at[0] / p.smoothness, weight=at[1] * 4 / (TAU + 2)))

    return {
        "FedCET": Rule((step,), lambda p, at: FedCET(lr=at[0] / p.smoothness)),
        **{f"FedCET, {share} up": sparse(share) for share in KEEPS},
        "FedLin, tenth up": Rule((step,), lambda p, at: FedLin(TAU * at[0] / p.smoothness, keep_up=0.1)),
    }


def all_tuned(bench: Bench, case: str) -> dict[str, Tuned]:
    """Every method at its best values."""
    budget, batch, last = CASES[case]
    work = {"tau": TAU, "rounds": bench.rounds(2 * budget, 2 * budget), "budget": budget, "batch_size": batch}
    key = case.replace(" ", "-")
    tasks = [
        (key, k, partial(tuned, bench, f"{key}-{k}", rule, linear_regression, last, **work))
        for k, rule in enumerate(rules(case).values())
    ]
    return dict(zip(rules(case), bench.all_of(tasks), strict=True))


@recipe("fedcet/compressed", "Beyond the paper: compressed uploads with error feedback", minutes=(2, 2),
        settings=settings, seeds=5)  # fmt: skip
def compressed(bench: Bench) -> Outcome:
    """Does FedCET end nearer for the same bytes when a tenth of its upload is sent?"""
    found = {case: all_tuned(bench, case) for case in CASES}
    rows: list[Sequence[Cell]] = []
    for label in rules("full batches"):
        cells = (cell for case in CASES for cell in (ours(found[case][label].ends), chosen_cell(found[case][label].at)))
        rows.append((Cell(label, {"method": label}), *cells))
    heads = ("method<", *(text for case in CASES for text in (f"{case}: log10 error", "step, c a")))
    note = "log10 of ||mean_i x_i - x*|| / ||x*|| at the budget; of batches the last tenth of the rounds"
    claims = [
        ordered(f"{case}: {label} ends nearer than {other}", mine[other].ends, mine[label].ends, unit=" decades")
        for case, mine in found.items()
        for label, other in (
            *((f"FedCET, {share} up", "FedCET") for share in KEEPS), ("FedCET, tenth up", "FedLin, tenth up"),
        )
    ]  # fmt: skip
    curves = {label: series(mine.runs, 1e3) for label, mine in found["full batches"].items()}
    figures = {"compressed": error_figure(curves, "kB per client, up and down")}
    return Outcome([Table("Least squares", heads, tuple(map(tuple, rows)), (note,))], figures, claims, NOTES)


NOTES = [
    "FedCET's download is whole: were the mean compressed too, the clients' exchanges would not add up to zero",
    "an entry that is sent alone has 12 bytes in place of 8: a round has .875 and .575 of FedCET's bytes",
    "FedLin computes one full gradient more per round, and sends the model and the gradient's mean down",
]
