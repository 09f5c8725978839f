"""Tables 1 and 2, Figures 2 to 5: thirteen methods, their accuracy, what they send and how large their models are."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from polyfed.algorithms.apfl import APFL
from polyfed.algorithms.ditto import Ditto
from polyfed.algorithms.fedavg import FedAvg
from polyfed.algorithms.fedavgft import FedAvgFT
from polyfed.algorithms.feddyn import FedDyn
from polyfed.algorithms.fedper import FedPer
from polyfed.algorithms.fedrep import FedRep
from polyfed.algorithms.fedspa import FedSpa
from polyfed.algorithms.lgfedavg import LGFedAvg
from polyfed.algorithms.local import Local
from polyfed.algorithms.perfedavg import PerFedAvg
from polyfed.algorithms.scaffold import Scaffold
from polyfed.core.algorithm import Algorithm
from polyfed.report.table import Table
from polyfed.studies.compare import Comparison
from polyfed_papers.fedslr import (
    DATA,
    GKR,
    LABELS,
    MACHINE,
    MIXED,
    NEEDS,
    OTHER_DATA,
    PAPER_MINUTES,
    SEEDS,
    SMALL,
    TRIALS,
    UNKNOWN,
    Choice,
    gigabytes,
    last,
    method,
    settings,
    train,
    tuned,
)
from polyfed_papers.fedslr.figures import PERSONAL, SETTINGS, figure2, figure3, figure4, figure5, hidden, joined
from polyfed_papers.recipes.recipe import Bench, Outcome, Size, metric_of, recipe
from polyfed_papers.recipes.said import Claim, Setting, beside, ordered, ours
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
    Setting(
        "tuned", "one setting of each of eight methods; SCAFFOLD, FedAvg, LG-FedAvg, FedPer, Local have none", "ours"
    ),
    Setting(
        "tuning",
        f"{TRIALS} trials of each, per column: the values below, beyond them while the first or the last is "
        "best, then between",
        "ours",
    ),
    Setting("tuned on", "two other draws of clients, a sixth of the training images their test set", "ours"),
    *(
        Setting(f"{label}: {name} from", ", ".join(f"{v:g}" for v in values), "ours")
        for label, (name, values) in OWN.items()
    ),
    Setting("Ditto", "1 personal epoch", "paper"),
    Setting("Per-FedAvg's gradient", "first order", "ours"),
    Setting("FedSpa's search", "100 rounds, more than there are at small size", "ours"),
    Setting("FedAvg-FT", "not in the paper; one epoch of fine-tuning from the common model", "ours"),
    Setting("FedRep", "1 epoch of the body; released: both together, that is FedPer", "ours"),
)


def rates(scale: Size) -> Sequence[Setting]:
    """The common settings, and those of the methods."""
    beta = Setting("Per-FedAvg's beta", "1e-3", "paper")
    if scale != "paper":
        beta = Setting("Per-FedAvg's beta", "0.1 like the others' lr; the paper's 1e-3 is for 1000 rounds", "ours")
    return settings(beta, *RATES, *SETTINGS)(scale)


def methods(bench: Bench) -> dict[str, Algorithm]:
    """All, with the paper's settings."""
    return {
        "SCAFFOLD": Scaffold(0.1),
        "FedDyn": FedDyn(0.1, alpha=0.1),
        "FedAvg": FedAvg(0.1),
        "Per-FedAvg": PerFedAvg(BETA[bench.scale], alpha=0.01),
        "FedAvg-FT": FedAvgFT(0.1),
        "LG-FedAvg": LGFedAvg(0.1),
        "FedRep": FedRep(0.1),
        "FedPer": FedPer(0.1),
        "Ditto": Ditto(0.1, lam=0.1),
        "APFL": APFL(0.1, alpha=0.5),
        "Local": Local(0.1),
        "FedSpa": FedSpa(0.1, density=0.5),
        "FedSLR": method(bench),
    }


def all_tuned(bench: Bench, data: str, iid: bool) -> dict[str, Algorithm]:
    """All, for one column: what a method has of its own is chosen on clients that do not count."""
    usual = methods(bench)

    def at(label: str, value: float) -> Algorithm:
        ladder, name = choices[label].ladder, OWN[label][0]
        return replace(usual[label], **{name: int(value) if ladder.whole else value})

    choices = {
        label: Choice(Ladder.of(usual[label], name, values), partial(at, label))
        for label, (name, values) in OWN.items()
    }
    return usual | tuned(bench, key(data, iid), choices, model_data(bench, data), iid)


def accuracy(found: Comparison, row: str) -> np.ndarray:
    """[seeds] of a row of the table."""
    return last(found, "FedSLR") if row == GKR else metric_of(found, LABELS.get(row, row))


@recipe("fedslr/table1", "Tables 1 and 2, Figures 2, 3, 4 and 5: accuracy, gigabytes and sizes of thirteen methods",
        minutes=(5, 5 * 6 * 13 * PAPER_MINUTES), settings=rates, machine=MACHINE, data=("fashion_mnist",),
        seeds=SEEDS, also=tuple(f"fedslr/figure{k}" for k in (2, 3, 4, 5)), middle=True)  # fmt: skip
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
    heads = [f"{data} {'IID' if iid else 'non-IID'}" for data, iid in columns]
    tables = [beside("Table 1, accuracy in per cent", heads, rows)]
    claims: list[Claim] = []
    for (data, iid), own in found.items():
        printed = {row: values[at[data, iid]] for row, values in PRINTED.items()}
        if not iid:
            tables.append(sizes(data, own))
        claims += [
            ordered(f"{data}, {'IID' if iid else 'non-IID'}: {a} above {b}", accuracy(own, a), accuracy(own, b), 100,
                    " points")
            for a, b in (iid_pairs if iid else pairs)(printed)
        ]  # fmt: skip
    first = [f"{SMALL}: the paper's figures are those of CIFAR-10; {OTHER_DATA}"] if bench.small else []
    notes = [
        *first, UNKNOWN, NEEDS,
        *(f"{head}, chosen: {listed(contenders[column])}" for head, column in zip(heads, columns, strict=True)),
        "the released FedRep trains head and body together, so the printed row is FedPer's; FedRep itself is beside it",
        "Per-FedAvg with a small alpha is nearly FedAvg: where clients are alike, above it says above a common model",
        "APFL's clients deploy one mixed model; the paper counts the two models that it is mixed from",
    ]  # fmt: skip
    whole = Outcome(tables, {}, claims, notes)
    parts = [whole, figure2({f"{data}, {'IID' if iid else 'non-IID'}": f for (data, iid), f in found.items()})]
    data = SMALL if bench.small else "CIFAR-100"
    own = found[data, False]
    of = inside(bench, own, data)
    return joined([*parts, figure3(own, of), figure4(of), figure5(bench, own)])


def listed(chosen: Mapping[str, Algorithm]) -> str:
    """The choice, in a line."""
    return ", ".join(f"{label} {name} {getattr(chosen[label], name):g}" for label, (name, _) in OWN.items())


def key(data: str, iid: bool) -> str:
    """The folder of one column's runs."""
    return f"{data.lower().replace(' ', '-')}-{'iid' if iid else 'own-prior'}"


def model_data(bench: Bench, data: str) -> str:
    """The data set whose model and augmentation are used; at small size all have the same."""
    return "CIFAR-10" if bench.small else data


def inside(bench: Bench, found: Comparison, data: str) -> list[dict[str, Any]]:
    """Per seed what `hidden` finds in the finished run of FedSLR."""
    rows = []
    for seed, where in ((r.seed, r.folder) for r in found.results if r.label == "FedSLR"):
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


def sizes(data: str, found: Comparison) -> Table:
    """Table 2's columns of our runs."""
    from polyfed_papers.fedslr.table2 import GIGABYTES, MILLIONS

    column = {SMALL: 0}.get(data, list(DATA).index(data) if data in DATA else 0)
    factor, unit = (1e3, "MB") if data == SMALL else (1.0, "GB")
    rows = {}
    for row in PRINTED:
        label = LABELS.get(row, row)
        numbers = last(found, label, "gkr_parameters" if row == GKR else "parameters")
        gb, m = (t[row][column] if row in t else None for t in (GIGABYTES, MILLIONS))
        share = gigabytes(found, label, "down").sum() / max(gigabytes(found, "FedAvg", "down").sum(), 1e-30)
        rows[row] = [
            (None if gb is None else f"{gb:.2f} GB", ours(gigabytes(found, label), factor)),
            (None, ours([100 * share], decimals=1)),
            (None if m is None else f"{m:.2f} M", ours(numbers / (1e3 if data == SMALL else 1e6))),
        ]
    heads = (f"sent, {unit}", "down, % of FedAvg", f"parameters, {'thousand' if data == SMALL else 'M'}")
    return beside(f"Table 2, {data} non-IID", heads, rows)
