"""Table 3: devices that come after training."""

import numpy as np

import polyfed as pf
from polyfed.algorithms.fedavg import FedAvg
from polyfed.algorithms.fpfc import FPFC
from polyfed.algorithms.ifca import IFCA
from polyfed.papers.fpfc import SYNTHETIC, WORK, rounds_of, scenario, sizes, softmax
from polyfed.papers.recipe import Bench, Outcome, Setting, Size, beside, curve_figure, ordered, ours, recipe

PRINTED = {"alone": "79.00", "FPFC": "79.31", "IFCA": "33.57"}


def settings(scale: Size):
    return (
        sizes(scale),
        rounds_of(scale, 600, 2000),
        Setting("newcomers", "every fifth device, none of them in training", "paper"),
        Setting("exchanges", "20 (small), 100 (paper), with as much local work as in training", "ours"),
        Setting("old devices", "frozen", "ours"),
        Setting(
            "entry", "v = 0, theta = w_i - w_j; start: the best of the clusters' models, or the common start", "ours"
        ),
        Setting("lambda", "0.7", "ours"),
        *SYNTHETIC,
    )


def taken_in(bench: Bench, seed: int, rounds: int, exchanges: int) -> dict[str, list[float]]:
    """label -> mean accuracy of the newcomers after 0, 1, ... exchanges."""
    everyone = scenario(bench)(seed)
    late = np.arange(everyone.n) % 5 == 4
    old, new = everyone.reorder(np.flatnonzero(~late)), everyone.reorder(np.flatnonzero(late))
    methods = {
        "FPFC": (FPFC(0.1, lam=0.7), "offered"), "FPFC, from the start": (FPFC(0.1, lam=0.7), "common"),
        "IFCA": (IFCA(0.1, k=4, init_scale=1.0), "offered"), "FedAvg": (FedAvg(0.1), "offered"),
    }  # fmt: skip
    out, runs = {}, {}
    for label, (method, start) in methods.items():
        if method not in runs:
            runs[method] = pf.fit(
                softmax(seed), old, method, rounds=rounds, seed=seed, evaluate_every=0, device=bench.device, **WORK
            )
        history = pf.admit(runs[method], new, exchanges, start=start).history
        out[label] = history["accuracy"].tolist()
        out["alone"] = history["alone"].tolist()
    return out


@recipe("fpfc/table3", "Table 3: newcomers on S1", minutes=(1, 40), settings=settings)
def table3(bench: Bench) -> Outcome:
    """Does a device that comes after training gain from the clusters that were found?"""
    rounds, exchanges = bench.rounds(600, 2000), bench.rounds(20, 100)
    found = [
        bench.once(f"newcomers-seed{seed}", lambda seed=seed: taken_in(bench, seed, rounds, exchanges))
        for seed in bench.seeds
    ]
    labels = list(found[0])
    at = {label: np.array([f[label] for f in found]) for label in labels}
    marks = sorted({0, exchanges // 4, exchanges})
    heads = tuple(f"accuracy after {k} exchanges, %" for k in marks)
    rows = {
        label: [(PRINTED.get(label) if k == exchanges else None, ours(at[label][:, k], 100)) for k in marks]
        for label in ("alone", *(x for x in labels if x != "alone"))
    }
    claims = [
        ordered(f"FPFC is better for a newcomer than {other}", at["FPFC"][:, -1], at[other][:, -1], 100, " points")
        for other in ("alone", "IFCA", "FedAvg")
    ]
    series = {k: (list(range(exchanges + 1)), (100 * v).tolist()) for k, v in at.items()}
    notes = ["the paper does not say how many exchanges newcomers take part in, nor whether the others move"]
    figure = curve_figure(series, "exchanges", "newcomers' accuracy, %")
    return Outcome([beside("Newcomers, S1", heads, rows)], {"newcomers": figure}, claims, notes)
