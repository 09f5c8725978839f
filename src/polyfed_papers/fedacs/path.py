"""The quantile, which the paper does not give: accuracy and groups against it, on validation data."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from torch import nn

from polyfed.algorithms.fedacs import FedACS
from polyfed.data import load
from polyfed.data.federation import Federation
from polyfed.models import build
from polyfed.report.table import Cell, Table
from polyfed_papers.fedacs import clients, net, work
from polyfed_papers.recipes.recipe import Bench, Outcome, Size, recipe
from polyfed_papers.recipes.said import Claim, Setting, ordered, ours

GRID = (0.0, 0.25, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 0.95, 1.0)
GROUPS = 4
EXACT = 1 - 1 / GROUPS  # the share of pairs of different groups, when all are of one size
Rows = list[list[dict[str, Any]]]  # [seed][quantile] of `Tuned.table`


def settings(scale: Size) -> Sequence[Setting]:
    small = scale == "small"
    lr, rounds = ("0.1", "30") if small else ("0.05", "100")
    return (
        Setting("planted groups", f"FPFC's S1: {GROUPS} groups of {5 if small else 25} clients, softmax tasks", "ours"),
        Setting("planted groups: work", "200 rounds of 10 full-batch steps, lr 0.1, all clients", "ours"),
        Setting("Fashion-MNIST: clients", "40", "ours") if small else Setting("Fashion-MNIST: clients", "100", "paper"),
        Setting("Fashion-MNIST", "50 images each, Dirichlet(0.5)", "paper"),
        Setting("Fashion-MNIST: model", "softmax regression" if small else "CNN, 5x5x32, 5x5x64, dense 512", "ours"),
        Setting("Fashion-MNIST: work", f"{rounds} rounds of 5 epochs of batches of 10, lr {lr}", "ours"),
        Setting("validation", "S1: 16 % of the samples; Fashion-MNIST: a fifth of the training images", "ours"),
        Setting("groups", "connected components of who mixes with whom", "ours"),
    )


def planted(bench: Bench):
    """seed -> FPFC's scenario S1: groups of one size, unequal numbers of samples, no order among the classes."""

    def make(seed: int) -> Federation:
        return load("fpfc-s1", scale=bench.pick("small", "full"), seed=seed).partition(seed=seed)

    return make


def softmax(seed: int) -> nn.Module:
    """The common start of the planted groups."""
    return build("linear", (60,), 10, seed=seed, init="normal")


def path(bench: Bench, key: str, model, federation, lr: float, **settings) -> Rows:
    """All quantiles from the common start, by seed."""

    def search(seed: int) -> list[dict[str, Any]]:
        found = bench.tune(
            model(seed), federation(seed), FedACS(lr), setting="quantile", regime="cold",
            grid=GRID[:1] if bench.rehearse else GRID, tolerance=0.0, train_on=0, seed=seed,
            check_every=settings["rounds"], **settings,
        )  # fmt: skip
        return found.rows

    return bench.by_seed(key, search)


def column(rows: Rows, name: str) -> np.ndarray:
    """[quantile, seeds]"""
    return np.array([[float(r[name]) for r in of_seed] for of_seed in rows]).T


def table(title: str, rows: Rows) -> Table:
    accuracy, groups = column(rows, "validation"), column(rows, "clusters")
    agreement = column(rows, "ari") if "ari" in rows[0][0] else None
    body = []
    for k, row in enumerate(rows[0]):
        cells = [Cell(f"{row['quantile']:g}"), ours(accuracy[k], 100), ours(groups[k], decimals=1)]
        body.append(tuple(cells if agreement is None else [*cells, ours(agreement[k])]))
    heads = ("quantile", "validation accuracy, %", "groups", "ARI")
    return Table(title, heads[: len(body[0])], tuple(body))


def figure(parts: Mapping[str, Rows]) -> Figure:
    """Validation accuracy above, number of groups below, against the quantile; a line per seed's range."""
    from polyfed.report.style import BLUE, QUIET, VERMILLION, styled

    with styled():
        drawn = Figure(figsize=(7.2, 4.4), layout="constrained")
        axes = drawn.subplots(2, len(parts), sharex=True, squeeze=False)
        for (top, low), (title, rows) in zip(axes.T, parts.items(), strict=True):
            at = [r["quantile"] for r in rows[0]]
            for ax, values, colour in (
                (top, 100 * column(rows, "validation"), BLUE), (low, column(rows, "clusters"), VERMILLION),
            ):  # fmt: skip
                ax.plot(at, values.mean(1), "o-", color=colour)
                ax.fill_between(at, values.min(1), values.max(1), color=colour, alpha=0.15, linewidth=0)
            if "ari" in rows[0][0]:
                for ax, text in ((top, f"1 - 1/{GROUPS}"), (low, "")):
                    ax.axvline(EXACT, color=QUIET, linewidth=0.8, linestyle=(0, (2, 2)))
                    ax.annotate(text, (EXACT, 0.02), xycoords=("data", "axes fraction"), xytext=(-3, 0),
                                textcoords="offset points", ha="right", fontsize=8, color=QUIET)  # fmt: skip
            top.set_title(title)
            low.set_ylim(bottom=0)
            low.set_xlabel("quantile")
        axes[0, 0].set_ylabel("validation accuracy, %")
        axes[1, 0].set_ylabel("groups")
    return drawn


def exact(rows: Rows) -> Claim:
    """At 1 - 1/G the planted groups are found, and nowhere else is the accuracy higher."""
    at = [r["quantile"] for r in rows[0]]
    scores = column(rows, "ari")[at.index(EXACT)] if EXACT in at else np.array([np.nan])
    evidence = "ARI per seed: " + ", ".join(f"{s:.2f}" for s in scores)
    return Claim(f"the planted groups are found at quantile 1 - 1/{GROUPS}", bool((scores == 1).all()), evidence)


def gain(title: str, rows: Rows) -> list[Claim]:
    """The right quantile against hardly any threshold, and against training alone (quantile 1)."""
    at, accuracy = [r["quantile"] for r in rows[0]], column(rows, "validation")
    best = int(accuracy.mean(1).argmax())
    text = f"{title}: quantile {at[best]:g} is better than "
    return [
        ordered(f"{text}quantile {at[k]:g}", accuracy[best], accuracy[k], 100, " points")
        for k in (0, len(at) - 1)
        if k != best
    ]


@recipe("fedacs/quantile-path", "Accuracy and groups against the quantile", minutes=(1.3, 240), settings=settings,
        machine="one large GPU", data=("fashion_mnist",))  # fmt: skip
def quantile_path(bench: Bench) -> Outcome:
    """For which quantile are the groups found, where there are some, and is the accuracy best there?"""
    s1 = {"rounds": bench.rounds(200, 200), "local_steps": 10, "batch_size": None}
    parts = {
        "planted groups": path(bench, "planted", softmax, planted(bench), 0.1, **s1),
        "Fashion-MNIST": path(bench, "images", net(bench), clients(bench), bench.pick(0.1, 0.05), **work(bench)),
    }
    claims = [exact(parts["planted groups"]), *(c for title, rows in parts.items() for c in gain(title, rows))]
    notes = [
        "the paper gives no quantile; a client keeps about (1 - quantile) m - 1 of its m - 1 peers, at quantile 1 none",
        "with G groups of one size the exact structure needs a quantile within about 1/m^2 of 1 - 1/G: below it groups "
        "mix, above it peers of the same group are lost",
        "the best quantile is picked on the data that it is compared on: the gains are a little too high",
    ]
    return Outcome([table(t, rows) for t, rows in parts.items()], {"quantile": figure(parts)}, claims, notes)
