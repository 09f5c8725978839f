"""The rows "as released" of FPFC's tables: results of its authors' code under others' names (docs/released.md)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MethodType

import numpy as np
from torch import nn

from polyfed import CFL, IFCA, PACFL, Algorithm, FedAvg, LGFedAvg, PerFedAvg, Uniform, setting
from polyfed.studies.compare import Comparison
from polyfed_papers.fpfc import Problem
from polyfed_papers.recipes.recipe import Bench
from polyfed_papers.recipes.said import Setting

SETTINGS = (
    Setting("FedAvg, Per-FedAvg, as released", "10 epochs of batches of 100; Per-FedAvg from the personal models, and "
            "all devices once more in a last round, to be scored on its model", "code"),
    Setting("LG-FedAvg, as released", "FedAvg, scored before the mean", "code"),
    Setting("IFCA, as released", "one step a round, 20 000 rounds (small: 3000); every start N(0, 1); models shrink",
            "code"),
    Setting("CFL, as released", "eps1 0.5, eps2 1; one epoch of batches of 50; absent devices as updates of zero; "
            "splits from round 21, by complete linkage", "code"),
    Setting("CFL, as released: rounds", "4340 (follows from the printed cost; small: 2000)", "ours"),
    Setting("PACFL, as released", "5 vectors per class, entries of U_i' U_j, threshold 4, all devices clustered first; "
            "scored on the devices' own models", "code"),
)  # fmt: skip
NOTES = (
    "as released: what the authors' code computes under a method's name, see docs/released.md",
    "Per-FedAvg, as released: its numbers sent are those of a round more, with all devices",
)
CFL_ROUNDS = (2000, 4340)  # small, full


@dataclass(frozen=True)
class Finally(Uniform):
    """A share of the clients in every round, and all of them in the last."""

    rounds: int = setting(1, ge=1, doc="Rounds of the run.")

    def cohort(self, seed: int, t: int, keys: np.ndarray) -> np.ndarray:
        return np.arange(len(keys)) if t == self.rounds - 1 else super().cohort(seed, t, keys)


def independent(model: Callable[[int], nn.Module]) -> Callable[[int], nn.Module]:
    """The model of a seed, of which further starts are drawn from N(0, 1) too."""

    def made(seed: int) -> nn.Module:
        net = model(seed)
        vars(net)["reset_parameters"] = MethodType(_normal, net)  # the layer stays a Linear, which the kernel trains
        return net

    return made


def _normal(layer: nn.Module) -> None:
    for q in layer.parameters():
        nn.init.normal_(q)


def released(bench: Bench, key: str, problem: Problem, rounds: int, of_cfl: int) -> list[Comparison]:
    """The rows that every table has: LG-FedAvg, Per-FedAvg, CFL and PACFL. rounds, of_cfl: of each, and of CFL"""
    lr, epochs = problem.fpfc.lr, problem.work["local_steps"]
    work = {k: v for k, v in problem.work.items() if k not in ("local_steps", "batch_size")}
    without = {k: v for k, v in work.items() if k != "fraction"}
    last = Finally(work["fraction"], rounds=rounds + 1)
    by_hundreds = {"local_epochs": epochs, "batch_size": 100}
    kinds: Mapping[str, tuple[dict[str, Algorithm], dict]] = {
        "steps": (
            {
                "LG-FedAvg": LGFedAvg(lr, weighted=True, deployed="before"),
                "PACFL": PACFL(lr, basis=5, threshold=4.0, angle="entries", linkage="weighted", everyone_first=True,
                               deployed="own"),
            },
            {"local_steps": epochs, "batch_size": None, "rounds": rounds, **work},
        ),
        "epochs": (
            {"Per-FedAvg": PerFedAvg(lr, alpha=lr, start="personal", weighted=True)},
            {"schedule": last, "rounds": rounds + 1, **by_hundreds, **without},
        ),
        "batches": (
            {"CFL": CFL(lr, eps1=0.5, eps2=1.0, gamma_max=None, linkage="complete", min_size=3, first_round=21,
                        absent="zero")},
            {"local_epochs": 1, "batch_size": 50, "rounds": of_cfl, **work},
        ),
    }  # fmt: skip
    return [
        bench.compare(f"{key}-as-released-{kind}", problem.model, problem.federation,
                      {f"{label}-released": method for label, method in methods.items()}, evaluate_every=0, **settings)
        for kind, (methods, settings) in kinds.items()
    ]  # fmt: skip


def longer(bench: Bench, key: str, problem: Problem) -> list[Comparison]:
    """The two rows of the synthetic scenarios alone: FedAvg by epochs, and IFCA's many rounds of one step."""
    lr, work, model, data = problem.fpfc.lr, {"fraction": 0.3, "evaluate_every": 0}, problem.model, problem.federation
    epochs = {"local_epochs": 10, "batch_size": 100, "rounds": bench.rounds(300, 2000), **work}
    step = {"local_steps": 1, "batch_size": None, "rounds": bench.rounds(3000, 20000), **work}

    def ifca(seed: int) -> dict[str, Algorithm]:
        return {"IFCA-released": IFCA(lr, k=problem.clusters, averaging="shrinking", seed=seed)}

    return [
        bench.compare(f"{key}-epochs", model, data, {"FedAvg-released": FedAvg(lr)}, **epochs),
        bench.compare(f"{key}-as-released-one-step", independent(model), data, ifca, **step),
    ]
