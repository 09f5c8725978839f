"""Table 3: devices that come after training."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

import polyfed as pf
from polyfed.algorithms.fedavg import FedAvg
from polyfed.algorithms.fpfc import FPFC
from polyfed.algorithms.ifca import IFCA
from polyfed.core.algorithm import Algorithm
from polyfed.papers.fpfc import (
    EPOCHS,
    IMAGE_LAMBDA,
    IMAGE_LR,
    SYNTHETIC,
    WORK,
    image_settings,
    image_work,
    images,
    lenet,
    rounds_of,
    scenario,
    sizes,
    softmax,
)
from polyfed.papers.recipe import Bench, Claim, Outcome, Setting, Size, beside, curve_figure, ordered, ours, recipe
from polyfed.report.table import Table

PRINTED = {
    "S1": {"alone": "79.00", "FPFC": "79.31", "IFCA": "33.57"},
    "MNIST": {"alone": "90.81", "FPFC": "93.51", "IFCA": "96.65"},
    "Fashion-MNIST": {"alone": "75.29", "FPFC": "75.73", "IFCA": "73.93"},
}
SAME = (
    Setting("newcomers", "every fifth device, none of them in training", "paper"),
    Setting("old devices", "frozen", "ours"),
    Setting("entry", "v = 0, theta = w_i - w_j; start: the best of the clusters' models, or the common start", "ours"),
)


def exchanges_of(scale: Size, small: int, paper: int) -> Setting:
    """How often a newcomer takes part, which the paper does not say."""
    return Setting(
        "exchanges", f"{small if scale == 'small' else paper}, with as much local work as in training", "ours"
    )


def settings(scale: Size):
    own = (rounds_of(scale, 600, 2000), exchanges_of(scale, 20, 100), Setting("lambda", "0.7", "ours"))
    return (sizes(scale), *own, *SAME, *SYNTHETIC)


def settings_of_images(scale: Size):
    return (rounds_of(scale, 15, 200), exchanges_of(scale, 10, 50), EPOCHS[scale], *SAME, *image_settings(scale))


def taken_in(
    bench: Bench, seed: int, model, federation, methods: Mapping[str, Algorithm], rounds: int, exchanges: int, work
) -> dict[str, list[float]]:
    """label -> mean accuracy of the newcomers after 0, 1, ... exchanges, FPFC's also from the common start."""
    everyone = federation(seed)
    late = np.arange(everyone.n) % 5 == 4
    old, new = everyone.reorder(np.flatnonzero(~late)), everyone.reorder(np.flatnonzero(late))
    out = {}
    for label, method in methods.items():
        run = pf.fit(model(seed), old, method, rounds=rounds, seed=seed, evaluate_every=0, device=bench.device, **work)
        history = pf.admit(run, new, exchanges).history
        out[label] = history["accuracy"].tolist()
        if label == "FPFC":
            history = pf.admit(run, new, exchanges, start="common").history
            out[f"{label}, from the start"] = history["accuracy"].tolist()
        out["alone"] = history["alone"].tolist()
    return out


def newcomers(bench: Bench, name: str, rounds: int, exchanges: int, *part) -> tuple[Table, Figure, list[Claim]]:
    """One data set's newcomers; part: model, federation, methods and work as in `taken_in`."""
    model, federation, methods, work = part
    kept = name.lower()
    found = bench.by_seed(
        f"newcomers-{kept}", lambda seed: taken_in(bench, seed, model, federation, methods, rounds, exchanges, work)
    )
    labels = list(found[0])
    at = {label: np.array([f[label] for f in found]) for label in labels}
    marks = sorted({0, exchanges // 4, exchanges})
    heads = tuple(f"accuracy after {k} exchanges, %" for k in marks)
    printed = PRINTED[name]
    rows = {
        label: [(printed.get(label) if k == exchanges else None, ours(at[label][:, k], 100)) for k in marks]
        for label in ("alone", *(x for x in labels if x != "alone"))
    }
    claims = [
        ordered(f"{name}: FPFC is better for a newcomer than {other}", at["FPFC"][:, -1], at[other][:, -1], 100,
                " points")
        for other in ("alone", "IFCA", "FedAvg")
    ]  # fmt: skip
    series = {k: (list(range(exchanges + 1)), (100 * v).tolist()) for k, v in at.items()}
    figure = curve_figure(series, "exchanges", "newcomers' accuracy, %")
    return beside(f"Newcomers, {name}", heads, rows), figure, claims


NOTES = ["the paper does not say how many exchanges newcomers take part in, nor whether the others move"]


@recipe("fpfc/table3", "Table 3: newcomers on S1", minutes=(1, 40), settings=settings)
def table3(bench: Bench) -> Outcome:
    """Does a device that comes after training gain from the clusters that were found?"""
    methods = {"FPFC": FPFC(0.1, lam=0.7), "IFCA": IFCA(0.1, k=4, init_scale=1.0), "FedAvg": FedAvg(0.1)}
    part = (softmax, scenario(bench), methods, WORK)
    table, figure, claims = newcomers(bench, "S1", bench.rounds(600, 2000), bench.rounds(20, 100), *part)
    return Outcome([table], {"newcomers": figure}, claims, NOTES)


@recipe("fpfc/table3-images", "Table 3: newcomers on label-swapped images", minutes=(3, 1200),
        settings=settings_of_images, machine="two cores", data=("mnist", "fashion_mnist"))  # fmt: skip
def table3_images(bench: Bench) -> Outcome:
    """The same on digits and clothing whose labels are exchanged."""
    lr, tables, figures, claims = IMAGE_LR[bench.scale], [], {}, []
    methods = {
        "FPFC": FPFC(lr, lam=IMAGE_LAMBDA[bench.scale], shared_layers="body"),
        "IFCA": IFCA(lr, k=4, shared_layers="body"),
        "FedAvg": FedAvg(lr),
    }
    work = image_work(bench) | {"local_epochs": bench.pick(5, 10)}
    for name in ("MNIST", "Fashion-MNIST"):
        part = (lenet, images(bench, name.lower()), methods, work)
        table, figure, more = newcomers(bench, name, bench.rounds(15, 200), bench.rounds(10, 50), *part)
        tables.append(table)
        figures[f"newcomers-{name.lower()}"] = figure
        claims += more
    return Outcome(tables, figures, claims, NOTES)
