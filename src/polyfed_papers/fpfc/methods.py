"""The nine methods of FPFC's tables and figures, and the choice of their own settings on validation data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from polyfed.algorithms.cfl import CFL
from polyfed.algorithms.fedavg import FedAvg
from polyfed.algorithms.ifca import IFCA
from polyfed.algorithms.lgfedavg import LGFedAvg
from polyfed.algorithms.local import Local
from polyfed.algorithms.pacfl import PACFL
from polyfed.algorithms.perfedavg import PerFedAvg
from polyfed.core.algorithm import Algorithm
from polyfed.data.federation import Federation
from polyfed.recipes.recipe import Bench, Setting, metric_of
from polyfed_papers.fpfc import Problem

METHODS = ("Local", "FedAvg", "LG-FedAvg", "Per-FedAvg", "IFCA", "CFL", "PACFL", "FPFC-l1", "FPFC")
LG = "LG-FedAvg shares its top layers; a model of one layer makes it FedAvg, so it has no line of its own there"
L1 = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
EPS1, RATIOS = (0.2, 0.5, 1.0), (2.0, 10.0)
QUANTILES = (0.02, 0.05, 0.1, 0.2, 0.5)
RIVALS = (
    Setting("IFCA", "k given; other starts w0 + N(0, I), one try", "ours"),
    Setting("tuned", "by validation data, per seed; ranges are the paper's, values ours", "ours"),
    Setting("FPFC-l1: lambda from", ", ".join(f"{v:g}" for v in L1) + " (the paper's [0, 1])", "ours"),
    Setting("CFL: eps1, eps2", f"eps1 from {EPS1}, eps2 = {RATIOS[0]:g} or {RATIOS[1]:g} times it (the paper's "
            "[0, 1] and [eps1, 10 eps1])", "ours"),
    Setting("PACFL", "3 vectors per class; smallest angle or sum of all, thresholds at the quantiles "
            f"{', '.join(f'{q:g}' for q in QUANTILES)} of the devices' angles", "ours"),
)  # fmt: skip
ONCE = tuple(s._replace(value=s.value.replace("per seed", "under the first seed, for all")) for s in RIVALS)
IMAGE_LAMBDAS = (0.2, 0.3, 0.4, 0.5, 0.7)  # of FPFC, where it is tuned on images
Candidates = Mapping[str, Algorithm]


def nine(problem: Problem) -> dict[str, Algorithm]:
    """The nine methods with the step size and shared layers of the problem's FPFC."""
    fpfc = problem.fpfc
    lr, shared = fpfc.lr, fpfc.shared_layers
    found: dict[str, Algorithm] = {
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
    return found if shared else {label: method for label, method in found.items() if label != "LG-FedAvg"}


def tuned_nine(
    bench: Bench, key: str, problem: Problem, lambdas: tuple[float, ...], l1: tuple[float, ...] = L1
) -> Callable[[int], dict[str, Algorithm]]:
    """seed -> the nine methods, with what the paper tunes chosen on the validation data of that seed.

    lambdas, l1: values of lambda for FPFC and FPFC-l1
    """

    def methods(seed: int) -> dict[str, Algorithm]:
        usual, data, fpfc = nine(problem), problem.federation(seed), problem.fpfc
        if data.validation is None or not len(data.validation.x):
            data = data.with_validation(0.2, seed)

        def best(label: str, candidates: Candidates) -> Algorithm:
            some = dict(list(candidates.items())[:1]) if bench.rehearse else candidates
            return candidates[by_validation(bench, f"{key}-{label}", problem, data, some, seed)["best"]]

        cfl, group = usual["CFL"], usual["FPFC-l1"]
        return usual | {
            "CFL": best("CFL", {f"{e:g}, {r * e:g}": replace(cfl, eps1=e, eps2=r * e) for e in EPS1 for r in RATIOS}),
            "PACFL": best("PACFL", by_angle(bench, f"{key}-angles", problem, data, PACFL(fpfc.lr, basis=3), seed)),
            "FPFC-l1": best("FPFC-l1", {f"{v:g}": replace(group, lam=v) for v in l1}),
            "FPFC": best("FPFC", {f"{v:g}": replace(fpfc, lam=v) for v in lambdas}),
        }

    return methods


def by_validation(
    bench: Bench, key: str, problem: Problem, data: Federation, candidates: Candidates, seed: int
) -> dict:
    """{"best": the candidate with the best validation metric, "scores": all of them}; higher is better."""
    labels = {name: name.replace(", ", "-").replace(" ", "-") for name in candidates}
    found = bench.compare(
        f"{key}-seed{seed}", problem.model(seed), data, {labels[name]: a for name, a in candidates.items()},
        seeds=[seed], rounds=problem.rounds, evaluate_every=0, **problem.work,
    )  # fmt: skip
    column = f"validation_{found.metric.name}"
    merits = {name: found.metric.merit(metric_of(found, label, column)) for name, label in labels.items()}
    scores = {name: float(np.nan_to_num(m, nan=-np.inf)[0]) for name, m in merits.items()}  # NaN: diverged
    return {"best": max(scores, key=lambda name: scores[name]), "scores": scores}


def by_angle(bench: Bench, key: str, problem: Problem, data: Federation, method: PACFL, seed: int) -> dict[str, PACFL]:
    """PACFL with thresholds from the angles between the devices, of which it takes the smallest or the sum."""
    trials = {angle: replace(method, angle=angle) for angle in ("smallest", "sum")}

    def thresholds(trial: PACFL) -> list[float]:
        loss = problem.work.get("loss", "cross-entropy")
        run = bench.fit(problem.model(seed), data, trial, rounds=1, local_steps=1, batch_size=None, loss=loss,
                        seed=seed, evaluate_every=0)  # fmt: skip
        angles = run.trained.server["angles"].cpu().numpy()[np.triu_indices(data.n, 1)]
        return np.unique(np.quantile(angles, QUANTILES).round(3)).tolist()

    found = bench.once(f"{key}-seed{seed}", lambda: {angle: thresholds(trial) for angle, trial in trials.items()})
    return {f"{angle} {value:g}": replace(trials[angle], threshold=value) for angle in trials for value in found[angle]}


def chosen(seeds: Sequence[int], methods: Callable[[int], Mapping[str, Algorithm]]) -> str:
    """What was chosen, per seed, in a line."""
    parts = [methods(seed) for seed in seeds]

    def listed(label: str, *names: str) -> str:
        values = (" and ".join(str(getattr(p[label], name)) for name in names) for p in parts)
        return f"{label} {', '.join(names)}: {'; '.join(values)}"

    return "chosen per seed: " + ". ".join(
        (listed("FPFC", "lam"), listed("FPFC-l1", "lam"), listed("CFL", "eps1", "eps2"),
         listed("PACFL", "angle", "threshold"))
    )  # fmt: skip
