"""The leaderboard's two Fashion-MNIST columns: two classes per client, and Dirichlet(0.1)."""

import numpy as np
import pandas as pd

from polyfed_papers.pfllib import BATCH, PRINTED, federation, methods, model, settings
from polyfed_papers.recipes.drawing import curve_figure
from polyfed_papers.recipes.recipe import Bench, Outcome, case, curves, metric_of, recipe
from polyfed_papers.recipes.said import beside, ours, points


def _column(bench: Bench, partition: str) -> Outcome:
    contenders = methods(bench.scale)
    runs = bench.compare(
        partition, model(bench), federation(bench, partition), contenders, rounds=bench.rounds(30, 2000, 500),
        local_epochs=1, batch_size=BATCH, evaluate_every=1,
    )  # fmt: skip
    history, column = curves(runs), ("pathological", "dirichlet").index(partition)
    top = {m: best(history, m, bench.seeds) for m in contenders}
    last = {m: metric_of(runs, m) for m in contenders}
    rows = {
        m: [(PRINTED[m][column] if m in PRINTED else None, ours(top[m], 100)), (None, ours(last[m], 100))]
        for m in contenders
    }
    note = "best round: of the test accuracy over all samples, as on the leaderboard; last round: mean over clients"
    table = beside(f"Fashion-MNIST, {partition}", ("best round, %", "last round, %"), rows, (note,))
    tested = bench.pick(0.02, 0.25)  # of the 70 000
    claims = [
        points(f"best round: {a} above {b}", top[a], top[b], tested)
        for a, b in (
            ("FedPer", "FedAvg"), ("FedRep", "FedPer"), ("FedRep", "FedBABU"), ("Ditto", "pFedMe"),
            ("Per-FedAvg", "FedAvg"), ("FedPer", "Per-FedAvg"),
        )
    ]  # fmt: skip
    shown = ("FedAvg", "Ditto", "FedRep", "FedACS", "FPFC", "FedSLR", "Local")
    figure = curve_figure({m: _curve(history, m) for m in shown}, "round", "mean test accuracy, %", width=5.6, height=4)
    figure.axes[0].set_ylim(60, 101)  # where methods differ
    notes = [
        "Followed: merged data cut 75/25, both partitions, all clients every round, SGD without momentum or weight "
        "decay, batches of 10, one epoch, rounds + 1 evaluations (the start too), and their best accuracy over all "
        "test samples. That choice by test accuracy is optimistic; the last column does not make it.",
        "Not followed: PFLlib drops the remainder of an epoch that is smaller than a batch, so that a client with less "
        "than a batch never trains; here it is a smaller batch. Its Per-FedAvg trains twice a round.",
        "Several of its methods deviate from their papers (Ditto's and FedProx's proximal weight is 0 by default, "
        "pFedMe is evaluated at the common model), so that equal figures are not to be expected.",
        "The page states no hyper-parameters, not even the learning rate.",
    ]
    if bench.small:
        notes.append(
            "Small size: 6000 samples instead of 70 000, a perceptron instead of the CNN, 30 rounds instead of 2000 "
            "and a learning rate of 0.05. These numbers cannot be compared with the leaderboard's."
        )
    return Outcome([table], {partition: figure}, claims, notes)


def best(history: pd.DataFrame, label: str, seeds: list[int]) -> np.ndarray:
    """[seeds] the leaderboard's figure: the largest accuracy over all samples of any round; NaN if diverged."""
    mine = history[history["label"] == label]
    return np.array([mine.loc[mine["seed"] == s, "pooled"].max() for s in seeds], dtype=float)


def _curve(history: pd.DataFrame, label: str) -> tuple[list[float], list[list[float]]]:
    """Rounds, and accuracy in percent per seed."""
    wide = history[history["label"] == label].pivot(index="seed", columns="round", values="accuracy")
    return [float(t) for t in wide.columns], (100 * wide.to_numpy()).tolist()


for partition, title, text in (
    ("pathological", "two classes per client", "two classes per client"), ("dirichlet", *["Dirichlet(0.1)"] * 2)
):  # fmt: skip
    recipe(f"pfllib/fashion-mnist-{partition}", f"Leaderboard, Fashion-MNIST, {title}", minutes=(2, 4200),
           settings=settings, machine="one large GPU", data=("fashion_mnist",), between=("middle",))(case(
        f"What does the leaderboard's protocol report with {text}{' classes' * (partition == 'dirichlet')}, and what a "
        "last round that is not chosen by test accuracy?", _column, partition))  # fmt: skip
