"""The nine methods of FPFC's tables and figures, and the choice of their own settings on validation data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from polyfed import CFL, IFCA, PACFL, Algorithm, FedAvg, Federation, LGFedAvg, Local, PerFedAvg
from polyfed.base.values import Limits
from polyfed_papers.fpfc import Problem
from polyfed_papers.recipes.recipe import Bench, metric_of
from polyfed_papers.recipes.said import Setting, listed
from polyfed_tuning.ladder import At, Ladder

METHODS = ("Local", "FedAvg", "LG-FedAvg", "Per-FedAvg", "IFCA", "CFL", "PACFL", "FPFC-l1", "FPFC")
LG = "LG-FedAvg shares its top layers; a model of one layer makes it FedAvg, so it has no line of its own there"
L1 = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
EPS1, RATIOS = (0.0, 0.2, 0.5, 1.0), (1.0, 2.0, 5.0, 10.0)
ANGLES: tuple[Literal["smallest", "sum", "entries"], ...] = ("smallest", "sum", "entries")
QUANTILES = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0)
ALPHAS = (0.01, 0.03, 0.1, 0.3)
TRIALS = 12  # of every method that has something to choose
UNCOUNTED = 1000  # the seed of devices that settings are chosen by; added to a seed: no trial has a start that counts
SHARE = Limits(ge=0, le=1)


RIVALS = (
    Setting("tuned", f"{TRIALS} trials each of Per-FedAvg, IFCA, CFL, PACFL, FPFC-l1 and FPFC; Local, FedAvg and "
            "LG-FedAvg have nothing to choose", "ours"),
    Setting("tuned by", "validation data of devices that do not count, once for all seeds", "ours"),
    Setting("tuning", "the values below, beyond them while the first or the last is best, then between; twice and four "
            "times as many trials while the best is at an edge", "ours"),
    Setting("Per-FedAvg: alpha from", listed(ALPHAS), "ours"),
    Setting("IFCA", f"k given; other starts w0 + N(0, I); {TRIALS} sets of them tried", "ours"),
    Setting("FPFC-l1: lambda from", listed(L1) + " (the paper's [0, 1])", "ours"),
    Setting("CFL: eps1, eps2", f"eps1 from {listed(EPS1)} (0: one cluster), eps2 = {listed(RATIOS)} times it (the "
            "paper's [0, 1] and [eps1, 10 eps1])", "ours"),
    Setting("PACFL", "3 vectors per class; smallest angle, sum of all, or the authors' entries, thresholds at the "
            f"quantiles {listed(QUANTILES)} of the devices' angles (0: each alone, 1: one cluster)", "ours"),
)  # fmt: skip
IMAGE_LAMBDAS = (0.2, 0.3, 0.4, 0.5, 0.7)  # of FPFC, where it is tuned on images


def nine(problem: Problem) -> dict[str, Algorithm]:
    """The nine methods with the step size and shared layers of the problem's FPFC."""
    fpfc = problem.fpfc
    lr, shared = fpfc.lr, fpfc.shared_layers
    methods: dict[str, Algorithm] = {
        "Local": Local(lr),
        "FedAvg": FedAvg(lr),
        "LG-FedAvg": LGFedAvg(lr),
        "Per-FedAvg": PerFedAvg(lr, alpha=lr),
        "IFCA": IFCA(lr, k=problem.clusters, shared_layers=shared, init_scale=None if shared else 1.0),
        "CFL": CFL(lr, eps1=0.5, eps2=1.0, first_round=problem.first_round),
        "PACFL": PACFL(lr, basis=3, threshold=4.0),
        "FPFC-l1": replace(fpfc, penalty="l1", lam=0.1, nu=0.5),
        "FPFC": fpfc,
    }
    return methods if shared else {label: method for label, method in methods.items() if label != "LG-FedAvg"}


class Choice(NamedTuple):
    """Ladders of a method's settings, and the method at their values."""

    ladders: tuple[Ladder, ...]
    make: Callable[[At], Algorithm]


def tuned_nine(
    bench: Bench, key: str, problem: Problem, lambdas: tuple[float, ...], l1: tuple[float, ...] = L1,
    seed: int = UNCOUNTED,
) -> dict[str, Algorithm]:  # fmt: skip
    """The nine methods, with the paper's tuned settings chosen on the validation data of a seed's devices."""
    usual, data = nine(problem), validated(problem, seed)
    angles = bench.once(f"{key}-angles-seed{seed}", lambda: angles_of(bench, problem, data, seed))
    some = choices(usual, angles, lambdas, l1)
    tasks = [(f"{key}-{k}", seed, partial(tuned_one, bench, f"{key}-{k}", problem, choice, seed))
             for k, choice in some.items()]  # fmt: skip
    return usual | dict(zip(some, bench.all_of(tasks), strict=True))


def tuned_one(bench: Bench, key: str, problem: Problem, choice: Choice, seed: int = UNCOUNTED) -> Algorithm:
    """The method at the values that are best on validation data, from another start and with other cohorts."""
    key, data = f"{key}-seed{seed}", validated(problem, seed)
    score = partial(by_validation, bench, key, problem, data, choice.make, seed + UNCOUNTED)
    return choice.make(bench.choose(key, score, choice.ladders, TRIALS, 2 * TRIALS, 4 * TRIALS))


def validated(problem: Problem, seed: int) -> Federation:
    """The devices of a seed, with samples for validation."""
    data = problem.federation(seed)
    return data if data.validation is not None and len(data.validation.x) else data.with_validation(0.2, seed)


def choices(
    methods: Mapping[str, Any], angles: Mapping[str, Sequence[float]], lambdas: Sequence[float],
    l1: Sequence[float],
) -> dict[str, Choice]:  # fmt: skip
    """The choices of each method; `angles` between devices are by kind, rising, in degrees."""
    per, ifca, cfl, pacfl, group, fpfc = (
        methods[label] for label in ("Per-FedAvg", "IFCA", "CFL", "PACFL", "FPFC-l1", "FPFC")
    )

    def cut(at: At) -> Algorithm:
        kind, quantile = ANGLES[int(at[1])], at[0]
        threshold = float(np.quantile(angles[kind], quantile)) if quantile else 0.0
        return replace(pacfl, angle=kind, threshold=1.001 * threshold if quantile == 1 else threshold)

    return {
        "Per-FedAvg": Choice((Ladder(ALPHAS, Limits(ge=0)),), lambda at: replace(per, alpha=at[0])),
        "IFCA": Choice((Ladder.options(TRIALS),), lambda at: replace(ifca, seed=int(at[0]))),
        "CFL": Choice(
            (Ladder(EPS1, Limits(ge=0)), Ladder(RATIOS, Limits(ge=1))),
            lambda at: replace(cfl, eps1=at[0], eps2=at[0] * at[1]),
        ),
        "PACFL": Choice((Ladder(QUANTILES, SHARE), Ladder.options(len(ANGLES))), cut),
        "FPFC-l1": lam_of(group, l1),
        "FPFC": lam_of(fpfc, lambdas),
    }


def lam_of(fpfc: Any, lambdas: Sequence[float]) -> Choice:
    """FPFC's lambda."""
    return Choice((Ladder.of(fpfc, "lam", lambdas),), lambda at: replace(fpfc, lam=at[0]))


def by_validation(
    bench: Bench, key: str, problem: Problem, data: Federation, make: Callable[[At], Algorithm], seed: int, at: At
) -> float:
    """The validation metric of a method at these values, the higher the better; minus infinity if it diverged."""
    label = "-".join(f"{value:g}" for value in at)
    runs = bench.compare(f"{key}/{label}", problem.model(seed), data, {label: make(at)}, seeds=[seed],
                          rounds=problem.rounds, evaluate_every=0, **problem.work)  # fmt: skip
    merit = runs.metric.merit(metric_of(runs, label, f"validation_{runs.metric.name}"))
    return float(np.nan_to_num(merit, nan=-np.inf)[0])


def angles_of(bench: Bench, problem: Problem, data: Federation, seed: int) -> dict[str, list[float]]:
    """{kind: the angles between the devices' data, rising, in degrees}."""
    loss, angles_by_kind = problem.work.get("loss", "cross-entropy"), dict[str, list[float]]()
    for kind in ANGLES:
        run = bench.fit(
            problem.model(seed), data, PACFL(problem.fpfc.lr, basis=3, angle=kind), rounds=1, local_steps=1,
            batch_size=None, loss=loss, seed=seed, evaluate_every=0,
        )  # fmt: skip
        angles = run.trained.server["angles"].cpu().numpy()[np.triu_indices(data.n, 1)]
        angles_by_kind[kind] = np.sort(angles).tolist()
    return angles_by_kind


def chosen(methods: Mapping[str, Algorithm]) -> str:
    """The choice, in a line."""

    def each(label: str, *names: str) -> str:
        return f"{label} {', '.join(names)} {' and '.join(_short(getattr(methods[label], name)) for name in names)}"

    return "chosen: " + "; ".join(
        (each("FPFC", "lam"), each("FPFC-l1", "lam"), each("CFL", "eps1", "eps2"), each("PACFL", "angle", "threshold"),
         each("Per-FedAvg", "alpha"), each("IFCA", "seed"))
    )  # fmt: skip


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
