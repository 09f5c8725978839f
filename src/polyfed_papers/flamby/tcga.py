"""Fed-TCGA-BRCA: survival with breast cancer in six regions, linear Cox model, concordance.

The user brings the data: a folder tcga_brca with FLamby's brca.csv and train_test_split.csv.
"""

from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn

from polyfed.algorithms import FedAdagrad, FedAdam, FedAvg, FedProx, FedYogi, Scaffold
from polyfed.base.errors import DataError
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
    place,
    regression,
)  # fmt: skip
from polyfed_papers.flamby import protocol as by_protocol
from polyfed_papers.flamby.heart import ADAPTIVE
from polyfed_papers.recipes.recipe import Bench, Outcome, Size, recipe
from polyfed_papers.recipes.said import Setting

# result files of owkin/FLamby at edacf54, means of five seeds, by region
PRINTED = {
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


def settings(scale: Size) -> tuple[Setting, ...]:
    return common_settings((
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
    ), scale)  # fmt: skip


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


def patients(folder: Path | str | None) -> tuple[list, list, list[str]]:
    """(training, test patients of every region, columns) from the user's folder."""
    files = [place(folder, name) for name in ("brca.csv", "train_test_split.csv")]
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
    train, test, columns = patients(folder)
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
        found = regression(sites, "cox")
        model = nn.Linear(len(columns), 1, bias=False)
        with torch.no_grad():
            model.weight.zero_()
            model.weight[0, kept] = torch.tensor(found)
        return model

    return Case(
        "fed-tcga-brca", tuple(f"region {k}" for k in range(6)), train, test, "concordance", None, "none", (1, 1),
        (within_batch, over_all), False, batch=8, rounds=5, epochs=30, adam=0.1, federated=federated,
        printed=PRINTED, exact=exact,
    )  # fmt: skip


@recipe("flamby/tcga", "FLamby's Fed-TCGA-BRCA, by its protocol and trained to the end", minutes=(6, 150),
        settings=settings, data=("tcga_brca",), seeds=5, recorded=False)  # fmt: skip
def run(bench: Bench) -> Outcome:
    """Do FLamby's concordances on six regions tell methods apart, once there are intervals over patients and every
    method is trained to its end, and how near is each to the exact stratified Cox model?
    """
    case = tcga(bench.data_dir)
    first, *apart = by_protocol(bench, case)
    second, steps = converged(bench, case)
    tables = [
        level_table("By FLamby's protocol: concordance on its test patients", case, [first, *apart], PRINTED),
        gain_table("By FLamby's protocol: gain over the own model", case, first),
        level_table("Trained to the end: concordance on the same test patients", case, [second], {}, steps),
        gain_table("Trained to the end: gain over the own model", case, second),
    ]
    claims = claims_of(first, (("FedAvg", OWN), ("FedAdam", OWN), ("FedAdam", "FedAvg"), (POOLED, "FedAdam")))
    claims += claims_of(second, (("FedAvg", OWN), ("exact", OWN), ("FedAdam", "exact"), ("Ditto", "FedAvg")))
    events = [int(y[:, 1].sum()) for _, y in case.test]
    notes = [
        "FLamby: means of five seeds by its result files, averaged by us; its deviations over seeds are chance in "
        "training and say nothing about other patients. Intervals here are over test patients and seeds.",
        f"Deaths among the test patients, by region: {', '.join(map(str, events))}. Where there is one, the score "
        "rests on that patient, whose own chance no interval holds.",
        "cyclic training is not in polyfed; the row has FLamby's figures alone.",
        "FLamby's batch loss is not read from its code; ties within a batch are Breslow's here.",
        "No recalibrated row: a Cox model has no intercept, and concordance asks for order alone. It would be "
        "FedAvg's.",
        "TCGA: no attempt to identify a participant; the GDC's policies hold. Nothing of the data ships with polyfed.",
    ]
    return Outcome(tables, claims=claims, notes=notes)
