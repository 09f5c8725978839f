"""Fed-Heart-Disease: four hospitals, accuracy; Fed-TCGA-BRCA: survival in six regions, of data that the user brings."""

from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from polyfed import FedAdagrad, FedAdam, FedAvg, Federation, FedProx, FedYogi, Scaffold
from polyfed.base.errors import DataError
from polyfed.data import load
from polyfed_papers.flamby import OWN, POOLED, Case, common_settings, regression, reported
from polyfed_papers.recipes.recipe import Bench, Outcome, recipe
from polyfed_papers.recipes.said import Setting

ADAPTIVE = {"beta1": 0.9, "tau": 1e-8, "v0": 0.0, "weighted": True}
# result files of owkin/FLamby at edacf54, means of five seeds, by centre: Cleveland, Hungary, Switzerland, Long Beach
HEART = {
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
HEART_STATED = (
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
)  # fmt: skip


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of one output."""
    return nn.functional.binary_cross_entropy_with_logits(output.reshape(-1), target.to(output.dtype))


def in_hospitals() -> tuple[list[tuple[np.ndarray, np.ndarray]], list[tuple[np.ndarray, np.ndarray]], tuple[str, ...]]:
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


def logistic(data: Federation) -> nn.Module:
    """The logistic regression of all training patients, as a model of two outputs."""
    coefficients = regression(data, "logistic")
    model = nn.Linear(data.train.x.shape[1], 2)
    with torch.no_grad():
        for parameter, value in ((model.weight, coefficients[1:]), (model.bias, coefficients[0])):
            parameter[0] = 0
            parameter[1] = torch.tensor(value)
    return model


def heart() -> Case:
    train, test, names = in_hospitals()
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
        batch=4, rounds=15, epochs=50, adam=0.001, federated=federated, printed=HEART, exact=logistic,
    )  # fmt: skip


@recipe("flamby/heart", "FLamby's Fed-Heart-Disease, by its protocol and trained to the end", minutes=(3, 30),
        settings=partial(common_settings, HEART_STATED), seeds=5, recorded=False)  # fmt: skip
def run_heart(bench: Bench) -> Outcome:
    """Is FedAvg below the own models at all four hospitals, as FLamby's result files say, and still so when every
    method is trained to its end at a step chosen on validation patients?
    """
    return reported(
        bench, heart(), (("FedAvg", OWN), ("FedAdam", OWN), ("FedAdam", "FedAvg")),
        (("FedAvg", OWN), ("exact", OWN), ("Ditto", OWN), ("Ditto", "FedAvg")),
        "cyclic training is not in polyfed; the row has FLamby's figures alone.",
        "16 test patients in Switzerland, 15 of them ill: accuracy there tells how well a site's prevalence is met.",
        "Each interval holds for itself at 95 %; about one in twenty leaves zero out by chance.",
    )  # fmt: skip


# result files of owkin/FLamby at edacf54, means of five seeds, by region
TCGA = {
    OWN: (0.644, 0.527, 0.850, 0.596, 0.851, 0.667),
    "FedAvg": (0.745, 0.627, 0.691, 0.675, 0.787, 0.867),
    "FedProx": (0.715, 0.668, 0.667, 0.667, 0.791, 0.867),
    "SCAFFOLD": (0.593, 0.755, 0.676, 0.454, 0.911, 0.733),
    "FedAdam": (0.849, 0.655, 0.881, 0.604, 0.902, 1.000),
    "FedYogi": (0.849, 0.655, 0.881, 0.604, 0.902, 1.000),
    "FedAdagrad": (0.848, 0.623, 0.872, 0.679, 0.855, 1.000),
    "cyclic": (0.530, 0.818, 0.704, 0.425, 0.872, 0.600),
    POOLED: (0.773, 0.582, 0.706, 0.629, 0.766, 0.600),
}
# of pairs of columns that are (nearly) the same the second; the last two have no events, so no finite estimate
LEFT_OUT = (
    "primary_diagnosis_Infiltrating duct carcinoma, NOS", "primary_diagnosis_Lobular carcinoma, NOS",
    "tumor_stage_stage ia", "tumor_stage_stage iia", "tumor_stage_stage iib", "tumor_stage_stage iiia",
    "tumor_stage_stage iiic", "race_white", "synchronous_malignancy_Not Reported",
)  # fmt: skip
TCGA_STATED = (
    Setting("centres", "six regions; 866 patients train (119 died), 222 are tested (32 died)", "code"),
    Setting("inputs", "39: age and one-hot columns", "code"),
    Setting("split", "FLamby's file", "code"),
    Setting("protocol, inputs", "as in the file, age in years", "code"),
    Setting("protocol, model", "linear Cox model, batches of 8, partial likelihood within the batch", "code"),
    Setting("protocol, own and pooled", "Adam, lr 0.1, 30 epochs", "code"),
    Setting("protocol, federated", "5 rounds of 100 SGD steps", "code"),
    Setting("protocol, lr", "0.1; FedProx mu 0.1; SCAFFOLD 0.01, server 1; FedAdam and FedYogi 0.01, server 0.1; "
            "FedAdagrad 0.01, server 1; beta 0.9, 0.999, tau 1e-8", "code"),
    Setting("second part, loss", "Cox's partial likelihood (Breslow) over all patients of a region", "ours"),
    Setting("exact", f"stratified Cox by Newton's method, without {len(LEFT_OUT)} columns", "ours"),
)  # fmt: skip


def within_batch(output: Tensor, target: Tensor) -> Tensor:
    """Minus a batch's log partial likelihood by Breslow, in fewer operations than `polyfed_clinical` takes."""
    risk, (time, died) = output.reshape(-1), target.to(output.dtype).T
    among = torch.where(time >= time[:, None], risk, -torch.inf).logsumexp(1)
    return ((among - risk) * died).sum() / len(risk)


def over_all(output: Tensor, target: Tensor) -> Tensor:
    """The same of a region's patients, sorted by time: faster than all pairs of them."""
    risk, (time, died) = output.reshape(-1), target.to(output.dtype).T
    order = time.argsort(descending=True)
    last = torch.searchsorted(-time[order], -time, right=True) - 1  # of those who are at risk
    return ((risk[order].logcumsumexp(0)[last] - risk) * died).sum() / len(risk)


def in_regions(folder: Path | str | None) -> tuple[list, list, list[str]]:
    """(training, test patients of every region, columns) from the user's folder."""
    root, names = Path(folder or "."), ("brca.csv", "train_test_split.csv")
    places = [[root / "tcga_brca" / name, root / name] for name in names]
    files = [next((p for p in both if p.is_file()), both[0]) for both in places]
    if missing := [f for f in files if not f.is_file()]:
        raise DataError(
            f"{missing[0]}: not there; put brca.csv and train_test_split.csv of FLamby's fed_tcga_brca into that "
            "folder, or say by --data-dir where they are. Terms: those of the GDC for TCGA"
        )
    table = pd.read_csv(files[0]).merge(pd.read_csv(files[1]), on="pid")
    columns = [c for c in table.columns if c not in ("pid", "E", "T", "fold", "fold2")]
    sets: list[list] = []
    for part in ("train", "test"):
        rows = [table[table["fold2"] == f"{part}_{k}"] for k in range(6)]
        sets.append([(r[columns].to_numpy(float), r[["T", "E"]].to_numpy(float)) for r in rows])
    return sets[0], sets[1], columns


def tcga(folder: Path | str | None) -> Case:
    train, test, columns = in_regions(folder)
    federated = {
        "FedAvg": FedAvg(0.1),
        "FedProx": FedProx(0.1, mu=0.1),
        "SCAFFOLD": Scaffold(0.01, server_lr=1.0),
        "FedAdam": FedAdam(0.01, server_lr=0.1, beta2=0.999, **ADAPTIVE),
        "FedYogi": FedYogi(0.01, server_lr=0.1, beta2=0.999, **ADAPTIVE),
        "FedAdagrad": FedAdagrad(0.01, server_lr=1.0, **ADAPTIVE),
    }
    kept = [k for k, name in enumerate(columns) if name not in LEFT_OUT]

    def exact(data: Federation) -> nn.Module:
        sites = [(data.train.client(i)[0][:, kept], *data.train.client(i)[1].T) for i in range(data.n)]
        coefficients = regression(sites, "cox")
        model = nn.Linear(len(columns), 1, bias=False)
        with torch.no_grad():
            model.weight.zero_()
            model.weight[0, kept] = torch.tensor(coefficients)
        return model

    return Case(
        "fed-tcga-brca", tuple(f"region {k}" for k in range(6)), train, test, "concordance", None, "none", (1, 1),
        (within_batch, over_all), False, batch=8, rounds=5, epochs=30, adam=0.1, federated=federated,
        printed=TCGA, exact=exact,
    )  # fmt: skip


@recipe("flamby/tcga", "FLamby's Fed-TCGA-BRCA, by its protocol and trained to the end", minutes=(6, 150),
        settings=partial(common_settings, TCGA_STATED), data=("tcga_brca",), seeds=5, recorded=False)  # fmt: skip
def run_tcga(bench: Bench) -> Outcome:
    """Do FLamby's concordances on six regions tell methods apart, once there are intervals over patients and every
    method is trained to its end, and how near is each to the exact stratified Cox model?
    """
    case = tcga(bench.data_dir)
    events = [int(y[:, 1].sum()) for _, y in case.test]
    return reported(
        bench, case, (("FedAvg", OWN), ("FedAdam", OWN), ("FedAdam", "FedAvg"), (POOLED, "FedAdam")),
        (("FedAvg", OWN), ("exact", OWN), ("FedAdam", "exact"), ("Ditto", "FedAvg")),
        f"Deaths among the test patients, by region: {', '.join(map(str, events))}. Where there is one, the score "
        "rests on that patient, whose own chance no interval holds.",
        "cyclic training is not in polyfed; the row has FLamby's figures alone.",
        "FLamby's batch loss is not read from its code; ties within a batch are Breslow's here.",
        "No recalibrated row: a Cox model has no intercept, and concordance asks for order alone. It would be "
        "FedAvg's.",
        "TCGA: no attempt to identify a participant; the GDC's policies hold. Nothing of the data ships with polyfed.",
    )  # fmt: skip
