"""Figure 1: FedCET, FedTrack and SCAFFOLD on the estimation problem, each with its proven step size."""

from typing import Any

import numpy as np

from polyfed import Algorithm, FedAvg, FedCET, FedTrack, Scaffold
from polyfed.algorithms.fedcet import paper_step
from polyfed_papers.fedcet import Problem, distances, error_figure, series, zeros
from polyfed_papers.generated import fedcet_quadratics
from polyfed_papers.recipes.recipe import Bench, Outcome, recipe
from polyfed_papers.recipes.said import Claim, Setting, beside, ordered, ours

L, TAU, VECTOR = 4.0, 2, 60 * 8
STEPS = {
    "FedCET": paper_step(L, L, TAU),
    "FedTrack": 1 / (18 * TAU * L),
    "SCAFFOLD": 1 / (81 * TAU * L),
    "FedTrack, same step": paper_step(L, L, TAU),
    "FedAvg, same step": paper_step(L, L, TAU),
}


SETTINGS = (
    Setting("clients, measurements, dimension", "10, 10, 60", "paper"),
    Setting("tau", "2 full-batch steps", "paper"),
    Setting("FedCET", f"Algorithm 1: a = {STEPS['FedCET']:.5f}, c = mu / (2 mu a + 8)", "paper"),
    Setting("FedTrack", "a = 1/(18 tau L)", "paper"),
    Setting("SCAFFOLD", "a_g = 1, a_l = 1/(81 tau L)", "paper"),
    Setting("x(-2)", "0", "ours"),
    Setting("last two rows", "FedTrack and FedAvg at FedCET's step", "ours"),
    Setting("rounds", "150", "ours"),
)


def method(label: str) -> Algorithm:
    if label == "FedCET":
        return FedCET(lr="paper", smoothness=L, convexity=L)
    if label == "SCAFFOLD":
        return Scaffold(lr=STEPS[label], server_lr=1.0)
    return FedTrack(STEPS[label]) if label.startswith("FedTrack") else FedAvg(STEPS[label], weighted=False)


def contraction(run: dict[str, Any]) -> float:
    """Per round, between rounds 20 and 100."""
    e = run["error"]
    first, last = (20, 100) if len(e) > 100 else (0, len(e) - 1)
    return float((e[last] / e[first]) ** (1 / (last - first)))


@recipe("fedcet/figure1", "Figure 1: error over rounds and over bytes", minutes=(0.2, 0.2), settings=SETTINGS,
        seeds=5)  # fmt: skip
def figure1(bench: Bench) -> Outcome:
    """Does FedCET converge linearly with one vector each way, faster than FedTrack and SCAFFOLD with two?"""

    def run(label: str, seed: int) -> dict[str, Any]:
        federation = fedcet_quadratics(seed=seed)
        problem = Problem(federation, zeros(60, 1, bias=False), "mse", 0.0, federation.meta["optimum"].ravel(), L, L)
        return distances(problem, method(label), TAU, bench.rounds(150, 150), seed=seed)

    def kept(label: str, seed: int) -> dict[str, Any]:
        return bench.once(f"{label.replace(', ', '-').replace(' ', '-')}-seed{seed}", lambda: run(label, seed))

    runs = {label: [kept(label, seed) for seed in bench.seeds] for label in STEPS}
    rates = {label: np.array([contraction(r) for r in rs]) for label, rs in runs.items()}
    vectors = {label: rs[0]["bytes"][-1] - rs[0]["bytes"][-2] for label, rs in runs.items()}
    rows = {
        label: [
            (f"{(1 - L * a) ** TAU:.4f}", ours(rates[label], decimals=4)),
            (None, ours(np.log10([r["error"][min(100, len(r["error"]) - 1)] for r in runs[label]]))),
            (
                "2" if label.startswith("Fed") and "Track" not in label else "4",
                ours([vectors[label] / VECTOR], decimals=0),
            ),
        ]
        for label, a in STEPS.items()
    }
    table = beside(
        "Figure 1", ("contraction per round", "log10 error, round 100", "vectors per round"), rows,
        ["in the paper's columns: (1 - a L)^tau, which the mean of the models follows exactly when all Hessians are "
         "L I, and the vectors stated, up and down together"],
    )  # fmt: skip
    lead = [label for label in STEPS if "same" not in label]
    over_rounds = {m: (list(range(len(runs[m][0]["error"]))), series(runs[m], 1, 10**6)[1]) for m in lead}
    over_bytes = {m: series(runs[m], 1e3, 10**6) for m in STEPS}
    cut = min(x[-1] for x, _ in over_bytes.values())
    over_bytes = {
        m: ([b for b in x if b <= cut], [e[: sum(b <= cut for b in x)] for e in y]) for m, (x, y) in over_bytes.items()
    }
    deviation = max(abs(rates[m].mean() / (1 - L * a) ** TAU - 1) for m, a in STEPS.items())
    claims = [
        ordered("FedCET contracts faster than FedTrack", rates["FedTrack"], rates["FedCET"]),
        ordered("FedTrack contracts faster than SCAFFOLD", rates["SCAFFOLD"], rates["FedTrack"]),
        Claim(
            "FedCET needs one vector each way, FedTrack and SCAFFOLD two",
            all(np.isclose(vectors[m], (2 if m == "FedCET" else 4) * VECTOR) for m in lead),
            f"{', '.join(f'{m} {vectors[m]:.0f}' for m in lead)} bytes per client and round",
        ),
        Claim(
            "FedCET's lead is more than that of its larger step",
            bool(deviation > 1e-2),
            f"all five contract as (1 - a L)^tau, to within {100 * deviation:.2g} %",
        ),
    ]
    figures = {
        "error-over-rounds": error_figure(over_rounds, "round"),
        "error-over-bytes": error_figure(over_bytes, "kB per client, up and down", ("FedAvg, same step",)),
    }
    spread = max(float(r.std(ddof=1)) for r in rates.values()) if len(bench.seeds) > 1 else 0.0
    same = f"Seeds draw other measurements, but the same contraction: its deviation over them is at most {spread:.0e}."
    return Outcome([table], figures, claims, [*NOTES, same])


NOTES = [
    "All clients have the Hessian L I here, so no client drifts: with sum_i d_i = 0 the mean of the models takes exact "
    "gradient steps, and so does FedAvg's. The order in Figure 1 is the order of the proven step sizes; the last two "
    "rows show FedTrack and FedAvg at FedCET's step. fedcet/equal-bytes has unlike Hessians.",
    "The paper prints no numbers for Figure 1.",
]
