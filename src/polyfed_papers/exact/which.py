"""Which exact method is nearer, by vectors and by bytes, at provable and at tuned settings."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from polyfed import LED, TAMUNA, CompressedScaffnew, FedAvg, FedCET, LoCoDL, Scaffnew, Scaffold
from polyfed.base.values import Limits
from polyfed.report.table import Cell, Table
from polyfed_papers.exact import CLIENTS, quadratics
from polyfed_papers.fedcet import (
    TRIALS,
    Rule,
    Tuned,
    all_tuned,
    distances,
    final,
    hospitals,
    linear_regression,
)
from polyfed_papers.fedcet.equal_bytes import GRID, WEIGHTS, chosen_cell
from polyfed_papers.recipes.drawing import panes
from polyfed_papers.recipes.recipe import Bench, Outcome, recipe
from polyfed_papers.recipes.said import Setting, listed, ordered, ours
from polyfed_tuning.ladder import Ladder

BUDGET, PROVEN = 120, 200
KAPPAS = {"shared": (10, 100, 1000, 10000), "rotated": (100, 10000)}
TUNED = {
    "least squares": (linear_regression, (2, 5, 10, 20)),
    "logistic": (hospitals, (2, 5, 10)),
    "shared, kappa 100": (partial(quadratics, kappa=100, rotated=False), (50,)),
    "rotated, kappa 100": (partial(quadratics, kappa=100, rotated=True), (50,)),
}
CASES: Mapping[str, tuple[int, float, dict[str, Any]]] = {  # budget in vectors, share of the rounds judged, more
    "half of the clients": (120, 0.0, {"fraction": 0.5}),
    "batches of 10": (240, 0.1, {"batch_size": 10}),
}


SPECTRA = (
    f"{CLIENTS} clients, dimension 20, spectra from 1/kappa to 1: on common axes, inner ones times uniform(.5, 1); "
    "or on axes of each client's own"
)
STEPS = (
    f"a L from {listed(GRID['small'])}; FedCET every other step, and c a from {listed(WEIGHTS['small'])} of 4/(tau + 2)"
)


def settings(scale: str) -> tuple[Setting, ...]:
    return (
        Setting("least squares, logistic", "those of fedcet/equal-bytes", "ours"),
        Setting("shared, rotated", SPECTRA, "ours"),
        Setting(
            "provable",
            f"kappa {listed(KAPPAS['shared'])}; rotated {listed(KAPPAS['rotated'])}; each method's `theory`, FedCET's "
            "Algorithm 1 with tau = 2",
            "paper",
        ),
        Setting("budgets", f"{PROVEN} vectors per client, up and down together; tuned {BUDGET}", "ours"),
        Setting("half, batches", "least squares, 5 local steps; 5 of 10 clients; or 10 of 50 samples a step, 240 "
                "vectors, error over the last tenth of the rounds", "ours"),
        Setting("tuning", f"{TRIALS} trials of every method under three seeds that do not count: {STEPS}", "ours"),
    )  # fmt: skip


def proven(L: float, mu: float) -> dict[str, tuple[Any, int]]:
    """label -> (method at its provable settings, local steps)."""
    return {
        "gradient descent": (FedAvg(1 / L, weighted=False), 1),
        "FedCET": (FedCET(lr="paper", smoothness=L, convexity=mu), 2),
        "Scaffnew": (Scaffnew.theory(L, mu), 1),
        "LoCoDL, half": (LoCoDL.theory(L, mu, CLIENTS, 0.5), 1),
        "CompressedScaffnew, half": (CompressedScaffnew.theory(L, mu, CLIENTS, 0.5), 1),
    }


@recipe("exact/which", "Beyond the papers: which exact method is nearer", minutes=(12, 12), settings=settings, seeds=10)
def which(bench: Bench) -> Outcome:
    """At provable and at tuned settings, which exact method ends nearest to the optimum for as many vectors?"""
    cells: dict[tuple[str, int], dict[str, Tuned]] = {}
    for name, (problem, taus) in TUNED.items():
        for tau in taus:
            work = {"tau": tau, "rounds": bench.rounds(2 * BUDGET, 2 * BUDGET), "budget": BUDGET}
            cells[name, tau] = all_tuned(
                bench, f"{name.replace(', ', '-').replace(' ', '-')}-tau{tau}", rules(tau), problem, **work
            )
    other: dict[str, dict[str, Tuned]] = {}
    for case, (budget, last, more) in CASES.items():
        work = {"tau": 5, "rounds": bench.rounds(2 * budget, 2 * budget), "budget": budget} | more
        key = case.replace(" ", "-")
        other[case] = all_tuned(bench, key, rules(5, **more), linear_regression, last, **work)
    found: dict[tuple[str, int], dict[str, np.ndarray]] = {}
    for kind, kappas in KAPPAS.items():
        for kappa in kappas:
            found[kind, kappa] = {}
            for k, label in enumerate(proven(1.0, 0.5)):
                one = partial(_proven, kappa, kind == "rotated", label, bench.rounds(PROVEN, PROVEN))
                runs = bench.by_seed(f"{kind}-{kappa}-{k}", one)
                found[kind, kappa][label] = np.array([final(run) for run in runs])
    claims = [
        ordered(f"provable, {kind}, kappa {kappa}: Scaffnew ends nearer than {other}", ends[other], ends["Scaffnew"],
                unit=" decades")
        for (kind, kappa), ends in found.items() for other in ends if other != "Scaffnew"
    ]  # fmt: skip
    heads = ("method<", *(f"{kind}, kappa {kappa}" for kind, kappa in found))
    rows = [
        (Cell(label, {"method": label}), *(ours(ends[label], mark=_lead(ends, label)) for ends in found.values()))
        for label in proven(1.0, 0.5)
    ]
    note = f"log10 of the relative error after {PROVEN} vectors per client, mean and deviation over seeds"
    tables = [Table("Provable settings", heads, tuple(rows), (note,))]
    tables += [_table(cells), *(_table({(case, 5): of}) for case, of in other.items())]
    for (name, tau), of in cells.items():
        pairs = (("Scaffnew", "FedCET"), ("Scaffnew", "LED"), ("FedCET", "LED"))
        claims += [
            ordered(f"tuned, {name}, tau {tau}: {a} ends nearer than {b}", of[b].ends, of[a].ends, unit=" decades")
            for a, b in pairs
        ]
    for case, of in other.items():
        first, *rest = [label for label in ("Scaffnew", "TAMUNA", "FedCET", "LED", "SCAFFOLD") if label in of]
        claims += [
            ordered(f"{case}: {first} ends nearer than {b}", of[b].ends, of[first].ends, unit=" decades") for b in rest
        ]
    return Outcome(tables, {"who": _who(found, cells)}, claims, NOTES)


NOTES = [
    "With all clients Scaffnew with p = 1/tau and LED differ in the number of steps alone: random, or always tau.",
    "LED of one step and mixing 1 is gradient descent, as Scaffnew with p = 1 is.",
]


def _proven(kappa: int, rotated: bool, label: str, rounds: int, seed: int) -> dict[str, Any]:
    problem = quadratics(seed, kappa, rotated)
    method, tau = proven(problem.smoothness, problem.convexity)[label]
    run = distances(problem, method, tau, rounds, PROVEN * 8 * len(problem.optimum), seed=seed)
    return {**run, "bytes": run["bytes"][-1:], "error": [run["error"][0], run["error"][-1]]}


def rules(tau: int, fraction: float = 1.0, **_: Any) -> dict[str, Rule]:
    """label -> what is tuned of a method."""
    step, few = (Ladder(values, Limits(gt=0)) for values in (GRID["small"], GRID["small"][::2]))
    share = Ladder(WEIGHTS["small"], Limits(gt=0, le=1))
    fedcet = Rule((few, share), lambda p, at: FedCET(lr=at[0] / p.smoothness, weight=at[1] * 4 / (tau + 2)))
    if fraction < 1:
        return {
            "FedCET": fedcet,
            "TAMUNA": Rule((step,), lambda p, at: TAMUNA(lr=at[0] / p.smoothness)),
            "SCAFFOLD": Rule((step,), lambda p, at: Scaffold(lr=at[0] / p.smoothness)),
        }
    return {
        "FedCET": fedcet,
        "Scaffnew": Rule((step,), lambda p, at: Scaffnew(lr=at[0] / p.smoothness)),
        "LED": Rule((step,), lambda p, at: LED(lr=at[0] / p.smoothness)),
    }


def _lead(ends: Mapping[str, np.ndarray], label: str) -> str:
    return "gain" if ends[label].mean() <= min(v.mean() for v in ends.values()) else ""


def _table(cells: Mapping[tuple[str, int], Mapping[str, Tuned]]) -> Table:
    rows: list[Sequence[Cell]] = []
    for (name, tau), of in cells.items():
        ends = {label: mine.ends for label, mine in of.items()}
        pairs = ((ours(v, mark=_lead(ends, label)), chosen_cell(of[label].at)) for label, v in ends.items())
        rows.append((Cell(f"{name}, tau {tau}", {"problem": name}), *(cell for pair in pairs for cell in pair)))
    heads = ("problem<", *(text for label in next(iter(cells.values())) for text in (label, "step")))
    note = "log10 of the relative error at the budget, every method at its best settings"
    return Table("Tuned settings", heads, tuple(map(tuple, rows)), (note,))


def _who(found: Mapping[tuple[str, int], Mapping[str, np.ndarray]], cells: Mapping[tuple[str, int], Any]) -> Any:
    """Decades by which Scaffnew is nearer: than gradient descent over kappa, and than FedCET over tau."""
    with panes(7.0, 2.9, 1, 2) as (figure, axes):
        for kind, kappas in KAPPAS.items():
            gaps = [found[kind, k]["gradient descent"] - found[kind, k]["Scaffnew"] for k in kappas]
            axes[0, 0].errorbar(kappas, [g.mean() for g in gaps], [g.std() for g in gaps], marker="o", label=kind)
        axes[0, 0].set_xscale("log")
        axes[0, 0].set(title="Provable: nearer than gradient descent by", xlabel="kappa", ylabel="decades")
        for name in TUNED:
            taus = TUNED[name][1]
            gaps = [cells[name, tau]["FedCET"].ends - cells[name, tau]["Scaffnew"].ends for tau in taus]
            axes[0, 1].errorbar(taus, [g.mean() for g in gaps], [g.std() for g in gaps], marker="o", label=name)
        axes[0, 1].set(title="Tuned: nearer than FedCET by", xlabel="local steps", ylabel="decades")
        for ax in axes.flat:
            ax.axhline(0, color="grey", linewidth=0.8)
            ax.legend()
    return figure
