"""Tables 1 and 2, Figures 2 to 5: thirteen methods, their accuracy, what they send and how large their models are."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

import polyfed as pf
from polyfed.core.algorithm import started
from polyfed.core.ledger import down_bytes
from polyfed.report.table import Cell, Table
from polyfed.studies.compare import Comparison
from polyfed_papers.fedslr import TRIALS, Choice, gigabytes, last, method, resnet, train, tuned
from polyfed_papers.fedslr.figures import PERSONAL, SETTINGS, figure2, figure3, figure4, figure5, hidden
from polyfed_papers.fedslr.stated import (
    DATA,
    GKR,
    LABELS,
    MIXED,
    NOTES,
    OTHER_DATA,
    RUNS,
    SMALL,
    settings,
    several,
)
from polyfed_papers.recipes.recipe import Bench, Outcome, Size, metric_of, recipe
from polyfed_papers.recipes.said import Claim, Setting, beside, listed, ours, paper, points
from polyfed_tuning.ladder import Ladder

PRINTED = {  # accuracy in per cent: CIFAR-10 IID and not, CIFAR-100, Tiny ImageNet
    "SCAFFOLD": (91.33, 82.91, 66.68, 59.48, 43.13, 34.11),
    "FedDyn": (92.61, 90.14, 68.68, 64.29, 43.52, 38.02),
    "FedAvg": (90.25, 82.89, 61.92, 55.78, 35.17, 30.56),
    GKR: (91.73, 87.52, 66.40, 64.22, 41.32, 35.13),
    "Per-FedAvg": (89.57, 91.55, 57.10, 63.73, 34.41, 37.52),
    "FedAvg-FT": (None, None, None, None, None, None),
    "LG-FedAvg": (38.32, 81.35, 12.96, 49.90, 5.34, 35.68),
    "FedRep": (None, None, None, None, None, None),
    "FedRep, released": (89.28, 93.41, 15.36, 60.42, 5.48, 46.42),
    "Ditto": (89.16, 94.39, 59.36, 78.67, 34.78, 58.30),
    "APFL": (75.11, 87.11, 30.99, 61.14, 20.16, 48.02),
    "Local": (38.30, 82.17, 10.97, 47.99, 3.86, 34.28),
    "FedSpa": (88.31, 93.19, 48.00, 73.87, 30.39, 53.76),
    MIXED: (89.72, 95.30, 64.95, 82.19, 38.20, 59.13),
}
BETA = {"small": 0.1, "middle": 0.1, "paper": 0.001}  # Per-FedAvg's step size
OWN: Mapping[str, tuple[str, tuple[float, ...]]] = {  # the setting that is chosen of each, and the first values
    "FedDyn": ("alpha", (0.01, 0.03, 0.1, 0.3)),
    "Per-FedAvg": ("alpha", (0.003, 0.01, 0.03, 0.1)),
    "FedAvg-FT": ("finetune_lr", (0.01, 0.03, 0.1, 0.3)),
    "FedRep": ("head_epochs", (1, 2, 5, 10)),
    "Ditto": ("lam", (0.03, 0.1, 0.3, 1.0)),
    "APFL": ("alpha", (0.25, 0.5, 0.75)),
    "FedSpa": ("density", (0.3, 0.5, 0.7)),
    "FedSLR": ("mu", (1e-4, 1e-3, 1e-2)),
}
RATES = (
    Setting("tuned", "one setting of each of eight methods; SCAFFOLD, FedAvg, LG-FedAvg, FedPer, Local have none",
            "ours"),
    Setting("tuning",
            f"{TRIALS} trials of each, per column: the values below, beyond them while the first or the last is "
            "best, then between", "ours"),
    Setting("tuned on", "two other draws of clients, a sixth of the training images their test set", "ours"),
    *(Setting(f"{label}: {name} from", listed(values), "ours") for label, (name, values) in OWN.items()),
    Setting("Ditto", "1 personal epoch", "paper"),
    Setting("Per-FedAvg's gradient", "first order", "ours"),
    Setting("FedSpa's search", "100 rounds, more than there are at small size", "ours"),
    Setting("FedAvg-FT", "not in the paper; one epoch of fine-tuning from the common model", "ours"),
    Setting("FedRep", "1 epoch of the body; released: both together, that is FedPer", "ours"),
)  # fmt: skip


def rates(scale: Size) -> Sequence[Setting]:
    """The common settings, and those of the methods."""
    beta = Setting("Per-FedAvg's beta", "1e-3", "paper")
    if scale != "paper":
        beta = Setting("Per-FedAvg's beta", "0.1 like the others' lr; the paper's 1e-3 is for 1000 rounds", "ours")
    return settings(beta, *RATES, *SETTINGS)(scale)


def methods(bench: Bench) -> dict[str, pf.Algorithm]:
    """All, with the paper's settings."""
    return {
        "SCAFFOLD": pf.Scaffold(0.1),
        "FedDyn": pf.FedDyn(0.1, alpha=0.1),
        "FedAvg": pf.FedAvg(0.1),
        "Per-FedAvg": pf.PerFedAvg(BETA[bench.scale], alpha=0.01),
        "FedAvg-FT": pf.FedAvgFT(0.1),
        "LG-FedAvg": pf.LGFedAvg(0.1),
        "FedRep": pf.FedRep(0.1),
        "FedPer": pf.FedPer(0.1),
        "Ditto": pf.Ditto(0.1, lam=0.1),
        "APFL": pf.APFL(0.1, alpha=0.5),
        "Local": pf.Local(0.1),
        "FedSpa": pf.FedSpa(0.1, density=0.5),
        "FedSLR": method(bench),
    }


def all_tuned(bench: Bench, data: str, iid: bool) -> dict[str, pf.Algorithm]:
    """All, for one column: what a method has of its own is chosen on clients that do not count."""
    usual = methods(bench)

    def at(label: str, value: float) -> pf.Algorithm:
        ladder, name = choices[label].ladder, OWN[label][0]
        return replace(usual[label], **{name: int(value) if ladder.whole else value})

    choices = {
        label: Choice(Ladder.of(usual[label], name, values), partial(at, label))
        for label, (name, values) in OWN.items()
    }
    return usual | tuned(bench, key(data, iid), choices, model_data(bench, data), iid)


def accuracy(runs: Comparison, row: str) -> np.ndarray:
    """[seeds] of a row of the table."""
    return last(runs, "FedSLR") if row == GKR else metric_of(runs, LABELS.get(row, row))


@recipe("fedslr/table1", "Tables 1 and 2, Figures 2, 3, 4 and 5: accuracy, gigabytes and sizes of thirteen methods",
        minutes=(5, several(6 * 13)), settings=rates, also=tuple(f"fedslr/figure{k}" for k in (2, 3, 4, 5)),
        between=("middle",), **RUNS)  # fmt: skip
def table1(bench: Bench) -> Outcome:
    """Is a common low-rank model with sparse personal parts better than other personal models, and its common part
    better than other common models?"""
    sets = bench.pick((SMALL,), tuple(DATA), ("CIFAR-100",))
    columns = [(data, iid) for data in sets for iid in ((False,) if bench.rehearse else (True, False))]
    contenders = {column: all_tuned(bench, *column) for column in columns}
    found = {
        (data, iid): train(bench, key(data, iid), contenders[data, iid], model_data(bench, data), iid,
                           evaluate_every=bench.pick(2, 10))
        for data, iid in columns
    }  # fmt: skip
    of_data = {data: list(DATA).index(data) if data in DATA else 0 for data in sets}  # whose printed columns
    at = {(data, iid): 2 * of_data[data] + (not iid) for data, iid in found}
    rows = {
        row: [
            (None if (value := printed[at[column]]) is None else f"{value:.2f}", ours(accuracy(f, row), 100))
            for column, f in found.items()
        ]
        for row, printed in PRINTED.items()
    }
    heads = [f"{data}, {'IID' if iid else 'non-IID'}" for data, iid in columns]
    plain = [head.replace(",", "") for head in heads]
    tables = [beside("Table 1, accuracy in per cent", plain, rows)]
    claims: list[Claim] = []
    for (data, iid), own in found.items():
        printed = {row: values[at[data, iid]] for row, values in PRINTED.items()}
        if not iid:
            tables.append(sizes(data, own))
        claims += [
            points(f"{data}, {'IID' if iid else 'non-IID'}: {a} above {b}", accuracy(own, a), accuracy(own, b))
            for a, b in (iid_pairs if iid else pairs)(printed)
        ]  # fmt: skip
    first = [f"{SMALL}: the paper's figures are those of CIFAR-10; {OTHER_DATA}"] if bench.small else []
    notes = [
        *first, *NOTES,
        *(f"{head}, chosen: {settled(contenders[column])}" for head, column in zip(plain, columns, strict=True)),
        "the released FedRep trains head and body together, so the printed row is FedPer's; FedRep itself is beside it",
        "Per-FedAvg with a small alpha is nearly FedAvg: where clients are alike, above it says above a common model",
        "APFL's clients deploy one mixed model; the paper counts the two models that it is mixed from",
    ]  # fmt: skip
    whole = Outcome(tables, {}, claims, notes) + figure2(dict(zip(heads, found.values(), strict=True)))
    data = SMALL if bench.small else "CIFAR-100"
    own = found[data, False]
    of = inside(bench, own, data)
    return whole + figure3(own, of) + figure4(of) + figure5(bench, own)


def settled(chosen: Mapping[str, pf.Algorithm]) -> str:
    """The choice, in a line."""
    return ", ".join(f"{label} {name} {getattr(chosen[label], name):g}" for label, (name, _) in OWN.items())


def key(data: str, iid: bool) -> str:
    """The folder of one column's runs."""
    return f"{data.lower().replace(' ', '-')}-{'iid' if iid else 'own-prior'}"


def model_data(bench: Bench, data: str) -> str:
    """The data set whose model and augmentation are used; at small size all have the same."""
    return "CIFAR-10" if bench.small else data


def inside(bench: Bench, runs: Comparison, data: str) -> list[dict[str, Any]]:
    """Per seed what `hidden` finds in the finished run of FedSLR."""
    rows = []
    for seed, where in ((r.seed, r.folder) for r in runs.results if r.label == "FedSLR"):
        if where is None:
            continue
        show = seed == bench.seeds[0]
        value = bench.once(
            f"hidden-seed{seed}",
            lambda where=where, seed=seed, show=show: hidden(bench, where, seed, model_data(bench, data), show),
        )
        rows.append(value)
    return rows


def pairs(printed: dict[str, float | None]) -> list[tuple[str, str]]:
    """The orders that the printed figures show: the mixed model above all others, and the common models."""
    common = [(GKR, "FedAvg"), (GKR, "SCAFFOLD"), ("FedDyn", GKR)]
    return [(MIXED, GKR), *common, *((MIXED, row) for row in printed if row not in (MIXED, GKR))]


def iid_pairs(printed: dict[str, float | None]) -> list[tuple[str, str]]:
    """Pairs for IID clients: the mixed model above other personal ones (text), and beside common ones as printed."""
    common = [(GKR, "FedAvg"), (GKR, "SCAFFOLD"), ("FedDyn", GKR), (GKR, MIXED)]
    shown = [(a, b) if (printed[a] or 0) > (printed[b] or 0) else (b, a) for a, b in common]
    return [*shown, *((MIXED, row) for row in printed if row in PERSONAL and row != MIXED)]


def sizes(data: str, runs: Comparison) -> Table:
    """Table 2's columns of our runs."""
    column = {SMALL: 0}.get(data, list(DATA).index(data) if data in DATA else 0)
    factor, unit = (1e3, "MB") if data == SMALL else (1.0, "GB")
    rows = {}
    for row in PRINTED:
        label = LABELS.get(row, row)
        numbers = last(runs, label, "gkr_parameters" if row == GKR else "parameters")
        gb, m = (t[row][column] if row in t else None for t in (GIGABYTES, MILLIONS))
        share = gigabytes(runs, label, "down").sum() / max(gigabytes(runs, "FedAvg", "down").sum(), 1e-30)
        rows[row] = [
            (None if gb is None else f"{gb:.2f} GB", ours(gigabytes(runs, label), factor)),
            (None, ours([100 * share], decimals=1)),
            (None if m is None else f"{m:.2f} M", ours(numbers / (1e3 if data == SMALL else 1e6))),
        ]
    heads = (f"sent, {unit}", "down, % of FedAvg", f"parameters, {'thousand' if data == SMALL else 'M'}")
    return beside(f"Table 2, {data} non-IID", heads, rows)


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
SENDERS: dict[str, pf.Algorithm] = {
    "FedAvg": pf.FedAvg(), "SCAFFOLD": pf.Scaffold(), "LG-FedAvg": pf.LGFedAvg(), "FedRep": pf.FedRep(),
    "APFL": pf.APFL(), "FedSpa": pf.FedSpa(),
}  # fmt: skip
ROUNDS, PARTICIPANTS = 1000, 10


SETTINGS_OF_TABLE2 = (
    Setting("model", "ResNet-18 with GroupNorm, as released for each of the three data sets", "code"),
    Setting("rounds, participants", "1000, 10", "paper"),
    Setting("a number", "4 bytes; 1 GB = 1e9 bytes", "code"),
    Setting("up", "as much as down; FedSpa's masks, one bit per parameter, are left out as in the paper", "paper"),
)


def message(algorithm: pf.Algorithm, task: pf.Task) -> int:
    """Bytes of the first message to one client, as the ledger weighs it."""
    one = pf.Round(0, 1, 0, torch.tensor([0]), torch.ones(1), torch.tensor([0]))
    return down_bytes(algorithm.downlink(started(algorithm, task, 1).whole(), one))


def volumes(data: str) -> dict[str, Any]:
    """Parameters of the paper's model, and method -> gigabytes of a whole run."""
    task = pf.Task(resnet(data))
    sent = {name: 2 * ROUNDS * PARTICIPANTS * message(a, task) / 1e9 for name, a in SENDERS.items()}
    return {"parameters": task.p, "sent": sent}


@recipe("fedslr/table2", "Table 2: gigabytes at paper scale, from the models' sizes", minutes=(0.3, 0.3),
        settings=SETTINGS_OF_TABLE2, seeds=1)  # fmt: skip
def table2(bench: Bench) -> Outcome:
    """Do the printed gigabytes follow from the models and the methods' messages?"""
    computed = {data: bench.once(data.replace(" ", "-"), lambda data=data: volumes(data)) for data in DATA}
    rows = []
    for name in SENDERS:
        cells = [Cell(name, {"method": name})]
        for k, (data, v) in enumerate(computed.items()):
            sent = v["sent"][name]
            cells += [paper(f"{GIGABYTES[name][k]:.2f}"), Cell(f"{sent:.2f}", {f"{data} GB": sent})]
        rows.append(tuple(cells))
    heads = ("method<", *(text for data in computed for text in (f"{data}, paper", f"{data}, by the ledger")))
    sizes = "; ".join(f"{data} {v['parameters']:,}".replace(",", " ") for data, v in computed.items())
    notes = [f"parameters: {sizes}", "measured sizes and bytes, FedSLR's too, are in fedslr/table1"]
    return Outcome(
        [Table("Gigabytes of a run, both ways", heads, tuple(rows)), savings(computed)], {}, checks(computed), notes
    )


def savings(computed: dict[str, Any]) -> Table:
    """FedSLR's printed gigabytes split: the uplink is dense, the rest went down."""
    rows = []
    for k, (data, v) in enumerate(computed.items()):
        dense = v["sent"]["FedAvg"] / 2
        total = GIGABYTES["FedSLR, mixed"][k]
        saved = 1 - (total - dense) / dense
        rows.append((Cell(data), paper(f"{total:.2f}"), Cell(f"{dense:.2f}"), Cell(f"{total - dense:.2f}"),
                     Cell(f"{100 * saved:.2f}", {"saved": saved})))  # fmt: skip
    heads = ("data<", "FedSLR, GB, paper", "up (dense)", "so down", "saved of the downlink, %")
    return Table("What FedSLR's printed gigabytes mean", heads, tuple(rows))


def checks(computed: dict[str, Any]) -> list[Claim]:
    """Printed against computed, to the last printed digit."""
    claims = []
    for k, (data, v) in enumerate(computed.items()):
        off = {n: f"{n} {g[k]:.2f} (computed {v['sent'][n]:.2f})" for n, g in GIGABYTES.items()
               if n in SENDERS and abs(g[k] - v["sent"][n]) > 0.0051}  # fmt: skip
        claims.append(Claim(f"{data}: the printed gigabytes are those of the released model", not off,
                            "all agree" if not off else "differ: " + ", ".join(off.values())))  # fmt: skip
    volume = computed["CIFAR-100"]["sent"]["FedAvg"]
    dense, saved = np.array([893.92, volume]), 722.60
    shares = 100 * (2 - 2 * saved / dense)
    evidence = f"{shares[0]:.2f} % of 893.92 GB, {shares[1]:.2f} % of the true {volume:.2f} GB"
    return [
        *claims,
        Claim("FedSLR sends 38.34 % less down on CIFAR-100", bool(abs(shares[1] - 38.34) < 0.05), evidence),
    ]
