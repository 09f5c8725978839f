"""Table 2 without training: what the methods send at the paper's scale follows from the models' sizes."""

from typing import Any

import numpy as np
import torch

from polyfed.algorithms.apfl import APFL
from polyfed.algorithms.fedavg import FedAvg
from polyfed.algorithms.fedrep import FedRep
from polyfed.algorithms.fedspa import FedSpa
from polyfed.algorithms.lgfedavg import LGFedAvg
from polyfed.algorithms.scaffold import Scaffold
from polyfed.compute.task import Task
from polyfed.core.algorithm import Algorithm, Round, started
from polyfed.core.ledger import down_bytes
from polyfed.report.table import Cell, Table
from polyfed_papers.fedslr import DATA, resnet
from polyfed_papers.recipes.recipe import Bench, Outcome, Size, recipe
from polyfed_papers.recipes.said import Claim, Setting, paper

GIGABYTES = {  # CIFAR-10, CIFAR-100, Tiny ImageNet; non-IID
    "SCAFFOLD": (1787.83, 1787.83, 1787.83),
    "FedDyn": (893.92, 893.92, 893.92),
    "FedAvg": (893.92, 893.92, 893.92),
    "FedSLR, GKR": (626.89, 722.60, 730.00),
    "LG-FedAvg": (0.41, 4.08, 8.13),
    "FedRep": (893.51, 889.84, 885.78),
    "APFL": (893.92, 893.92, 893.92),
    "FedSpa": (446.96, 446.96, 446.96),
    "FedSLR, mixed": (626.89, 722.60, 730.00),
}
MILLIONS = {
    "FedAvg": (11.17, 11.17, 11.17),
    "FedSLR, GKR": (3.51, 5.54, 5.34),
    "APFL": (22.35, 22.35, 22.35),
    "FedSpa": (5.59, 5.59, 5.59),
    "FedSLR, mixed": (3.96, 6.69, 7.59),
}
METHODS: dict[str, Algorithm] = {
    "FedAvg": FedAvg(), "SCAFFOLD": Scaffold(), "LG-FedAvg": LGFedAvg(), "FedRep": FedRep(), "APFL": APFL(),
    "FedSpa": FedSpa(),
}  # fmt: skip
ROUNDS, PARTICIPANTS = 1000, 10


def settings(scale: Size):
    return (
        Setting("model", "ResNet-18 with GroupNorm, as released for each of the three data sets", "code"),
        Setting("rounds, participants", "1000, 10", "paper"),
        Setting("a number", "4 bytes; 1 GB = 1e9 bytes", "code"),
        Setting("up", "as much as down; FedSpa's masks, one bit per parameter, are left out as in the paper", "paper"),
    )


def message(algorithm: Algorithm, task: Task) -> int:
    """Bytes of the first message to one client, as the ledger weighs it."""
    one = Round(0, 1, 0, torch.tensor([0]), torch.ones(1), torch.tensor([0]))
    return down_bytes(algorithm.downlink(started(algorithm, task, 1).whole(), one))


def volumes(data: str) -> dict[str, Any]:
    """Parameters of the paper's model, and method -> gigabytes of a whole run."""
    task = Task(resnet(data))
    sent = {name: 2 * ROUNDS * PARTICIPANTS * message(a, task) / 1e9 for name, a in METHODS.items()}
    return {"parameters": task.p, "sent": sent}


@recipe("fedslr/table2", "Table 2: gigabytes at paper scale, from the models' sizes", minutes=(0.3, 0.3),
        settings=settings, seeds=1)  # fmt: skip
def table2(bench: Bench) -> Outcome:
    """Do the printed gigabytes follow from the models and the methods' messages?"""
    found = {data: bench.once(data.replace(" ", "-"), lambda data=data: volumes(data)) for data in DATA}
    rows = []
    for name in METHODS:
        cells = [Cell(name, {"method": name})]
        for k, (data, v) in enumerate(found.items()):
            sent = v["sent"][name]
            cells += [paper(f"{GIGABYTES[name][k]:.2f}"), Cell(f"{sent:.2f}", {f"{data} GB": sent})]
        rows.append(tuple(cells))
    heads = ("method<", *(text for data in found for text in (f"{data}, paper", f"{data}, by the ledger")))
    sizes = "; ".join(f"{data} {v['parameters']:,}".replace(",", " ") for data, v in found.items())
    notes = [f"parameters: {sizes}", "measured sizes and bytes, FedSLR's too, are in fedslr/table1"]
    return Outcome(
        [Table("Gigabytes of a run, both ways", heads, tuple(rows)), savings(found)], {}, checks(found), notes
    )


def savings(found: dict[str, Any]) -> Table:
    """FedSLR's printed gigabytes split: the uplink is dense, the rest went down."""
    rows = []
    for k, (data, v) in enumerate(found.items()):
        dense = v["sent"]["FedAvg"] / 2
        total = GIGABYTES["FedSLR, mixed"][k]
        saved = 1 - (total - dense) / dense
        rows.append((Cell(data), paper(f"{total:.2f}"), Cell(f"{dense:.2f}"), Cell(f"{total - dense:.2f}"),
                     Cell(f"{100 * saved:.2f}", {"saved": saved})))  # fmt: skip
    heads = ("data<", "FedSLR, GB, paper", "up (dense)", "so down", "saved of the downlink, %")
    return Table("What FedSLR's printed gigabytes mean", heads, tuple(rows))


def checks(found: dict[str, Any]) -> list[Claim]:
    """Printed against computed, to the last printed digit."""
    claims = []
    for k, (data, v) in enumerate(found.items()):
        off = {n: f"{n} {g[k]:.2f} (computed {v['sent'][n]:.2f})" for n, g in GIGABYTES.items()
               if n in METHODS and abs(g[k] - v["sent"][n]) > 0.0051}  # fmt: skip
        claims.append(Claim(f"{data}: the printed gigabytes are those of the released model", not off,
                            "all agree" if not off else "differ: " + ", ".join(off.values())))  # fmt: skip
    volume = found["CIFAR-100"]["sent"]["FedAvg"]
    dense, saved = np.array([893.92, volume]), 722.60
    shares = 100 * (2 - 2 * saved / dense)
    evidence = f"{shares[0]:.2f} % of 893.92 GB, {shares[1]:.2f} % of the true {volume:.2f} GB"
    return [
        *claims,
        Claim("FedSLR sends 38.34 % less down on CIFAR-100", bool(abs(shares[1] - 38.34) < 0.05), evidence),
    ]
