"""Fed-Heart-Disease: four hospitals, logistic regression, accuracy."""

import numpy as np
import torch
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from polyfed.algorithms import FedAdagrad, FedAdam, FedAvg, FedProx, FedYogi, Scaffold
from polyfed.data import load
from polyfed.data.federation import Federation
from polyfed_papers.flamby import (
    OWN,
    POOLED,
    Case,
    claims_of,
    common_settings,
    converged,
    gain_table,
    level_table,
    regression,
)
from polyfed_papers.flamby import protocol as by_protocol
from polyfed_papers.recipes.recipe import Bench, Outcome, Size, recipe
from polyfed_papers.recipes.said import Setting

ADAPTIVE = {"beta1": 0.9, "tau": 1e-8, "v0": 0.0, "weighted": True}
# result files of owkin/FLamby at edacf54, means of five seeds, by centre: Cleveland, Hungary, Switzerland, Long Beach
PRINTED = {
    OWN: (0.746, 0.746, 0.725, 0.702),
    "FedAvg": (0.731, 0.719, 0.650, 0.640),
    "FedProx": (0.731, 0.719, 0.650, 0.640),
    "SCAFFOLD": (0.727, 0.719, 0.650, 0.640),
    "FedAdam": (0.752, 0.746, 0.738, 0.667),
    "FedYogi": (0.760, 0.753, 0.738, 0.676),
    "FedAdagrad": (0.760, 0.753, 0.738, 0.676),
    "cyclic": (0.758, 0.762, 0.713, 0.640),
    POOLED: (0.783, 0.764, 0.750, 0.644),
}


def settings(scale: Size) -> tuple[Setting, ...]:
    return common_settings((
        Setting("centres", "Cleveland, Hungary, Switzerland, Long Beach; 486 patients train, 254 are tested", "code"),
        Setting("inputs", "13: slope, ca, thal dropped, then rows with a gap; cp and restecg as dummies", "code"),
        Setting("split", "scikit-learn's, 66 % train, seed 43, stratified where both classes have three", "code"),
        Setting("protocol, inputs", "standardised by centre; pooled training by the pooled training part", "code"),
        Setting("protocol, model", "logistic regression, batches of 4", "code"),
        Setting("protocol, own and pooled", "Adam, lr 0.001, 50 epochs", "code"),
        Setting("protocol, federated", "15 rounds of 100 SGD steps", "code"),
        Setting("protocol, lr", "0.001; FedProx mu 0.01, SCAFFOLD server 1; FedAdagrad 0.003162 and server 0.316228, "
                "FedYogi 0.003162 and 0.01, FedAdam 0.01 and 0.01; beta 0.9, 0.999, tau 1e-8", "code"),
        Setting("exact", "logistic regression on all centres' patients by Newton's method", "ours"),
    ), scale)  # fmt: skip


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of one output."""
    return nn.functional.binary_cross_entropy_with_logits(output.reshape(-1), target.to(output.dtype))


def patients() -> tuple[list[tuple[np.ndarray, np.ndarray]], list[tuple[np.ndarray, np.ndarray]], tuple[str, ...]]:
    """(training, test patients of every centre as FLamby splits them, names)."""
    data = load("heart-disease", standardise=None)
    x = np.asarray(data.x, dtype=np.float64)
    dummies = [x[:, [k]] == np.unique(x[:, k])[1:] for k in (2, 6)]
    x, y = np.concatenate([np.delete(x, (2, 6), axis=1), *dummies], axis=1), np.asarray(data.y)
    train, test = [], []
    assert data.groups is not None
    for centre in range(4):
        at = np.flatnonzero(data.groups == centre)
        strata = y[at] if np.bincount(y[at]).min() > 2 else None
        cut = train_test_split(
            np.arange(len(at)), train_size=0.66, test_size=0.34, random_state=43, shuffle=True, stratify=strata
        )
        for part, rows in zip((train, test), cut, strict=True):
            part.append((x[at[rows]], y[at[rows]]))
    return train, test, tuple(data.group_names or ())


def exact(data: Federation) -> nn.Module:
    """The logistic regression of all training patients, as a model of two outputs."""
    found = regression(data, "logistic")
    model = nn.Linear(data.train.x.shape[1], 2)
    with torch.no_grad():
        for parameter, value in ((model.weight, found[1:]), (model.bias, found[0])):
            parameter[0] = 0
            parameter[1] = torch.tensor(value)
    return model


def heart() -> Case:
    train, test, names = patients()
    federated = {
        "FedAvg": FedAvg(0.001),
        "FedProx": FedProx(0.001, mu=0.01),
        "SCAFFOLD": Scaffold(0.001, server_lr=1.0),
        "FedAdam": FedAdam(0.01, server_lr=0.01, beta2=0.999, **ADAPTIVE),
        "FedYogi": FedYogi(0.003162, server_lr=0.01, beta2=0.999, **ADAPTIVE),
        "FedAdagrad": FedAdagrad(0.003162, server_lr=0.316228, **ADAPTIVE),
    }
    return Case(
        "fed-heart-disease", names, train, test, "accuracy", 2, "centre", (1, 2), (cross_entropy, None), True,
        batch=4, rounds=15, epochs=50, adam=0.001, federated=federated, printed=PRINTED, exact=exact,
    )  # fmt: skip


@recipe("flamby/heart", "FLamby's Fed-Heart-Disease, by its protocol and trained to the end", minutes=(3, 30),
        settings=settings, seeds=5, recorded=False)  # fmt: skip
def run(bench: Bench) -> Outcome:
    """Is FedAvg below the own models at all four hospitals, as FLamby's result files say, and still so when every
    method is trained to its end at a step chosen on validation patients?
    """
    case = heart()
    first, *apart = by_protocol(bench, case)
    second, steps = converged(bench, case)
    tables = [
        level_table("By FLamby's protocol: accuracy on its test patients", case, [first, *apart], PRINTED),
        gain_table("By FLamby's protocol: gain over the own model", case, first),
        level_table("Trained to the end: accuracy on the same test patients", case, [second], {}, steps),
        gain_table("Trained to the end: gain over the own model", case, second),
    ]
    claims = claims_of(first, (("FedAvg", OWN), ("FedAdam", OWN), ("FedAdam", "FedAvg")))
    claims += claims_of(second, (("FedAvg", OWN), ("exact", OWN), ("Ditto", OWN), ("Ditto", "FedAvg")))
    notes = [
        "FLamby: means of five seeds by its result files, averaged by us; its deviations over seeds are chance in "
        "training and say nothing about other patients. Intervals here are over test patients and seeds.",
        "cyclic training is not in polyfed; the row has FLamby's figures alone.",
        "16 test patients in Switzerland, 15 of them ill: accuracy there tells how well a site's prevalence is met.",
        "Each interval holds for itself at 95 %; about one in twenty leaves zero out by chance.",
    ]
    return Outcome(tables, claims=claims, notes=notes)
