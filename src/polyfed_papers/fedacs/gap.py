"""The quantile, which the paper does not give: accuracy against it, and an estimate from the gap in similarities."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy import stats
from sklearn.metrics import adjusted_rand_score
from torch import nn

from polyfed import FedACS, Federation, Local
from polyfed.algorithms._shared.clusters import components
from polyfed.algorithms._shared.similarity import similarity
from polyfed.data import load
from polyfed.models import build
from polyfed.report.style import BLUE, QUIET, VERMILLION
from polyfed.report.table import Cell, Table
from polyfed_papers.fedacs import clients, net, work
from polyfed_papers.recipes.drawing import panes
from polyfed_papers.recipes.recipe import Bench, Outcome, Size, metric_of, recipe
from polyfed_papers.recipes.said import Claim, Setting, ours, points

GRID = (0.0, 0.25, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 0.95, 1.0)
PLANTED = 4
EXACT = 1 - 1 / PLANTED  # the share of pairs of different groups, when all are of one size
Rows = list[list[dict[str, Any]]]  # [seed][quantile] of `Tuned.table`


def path_settings(scale: Size) -> Sequence[Setting]:
    small = scale == "small"
    lr, rounds = ("0.1", "30") if small else ("0.05", "100")
    return (
        Setting("planted groups", f"FPFC's S1: {PLANTED} groups of {5 if small else 25} clients, softmax tasks",
                "ours"),
        Setting("planted groups: work", "200 rounds of 10 full-batch steps, lr 0.1, all clients", "ours"),
        Setting("Fashion-MNIST: clients", "40", "ours") if small else Setting("Fashion-MNIST: clients", "100", "paper"),
        Setting("Fashion-MNIST", "50 images each, Dirichlet(0.5)", "paper"),
        Setting("Fashion-MNIST: model", "softmax regression" if small else "CNN, 5x5x32, 5x5x64, dense 512", "ours"),
        Setting("Fashion-MNIST: work", f"{rounds} rounds of 5 epochs of batches of 10, lr {lr}", "ours"),
        Setting("validation", "S1: 16 % of the samples; Fashion-MNIST: a fifth of the training images", "ours"),
        Setting("groups", "connected components of who mixes with whom", "ours"),
    )  # fmt: skip


def softmax(seed: int) -> nn.Module:
    """The common start of the planted groups."""
    return build("linear", (60,), 10, seed=seed, init="normal")


def path(bench: Bench, key: str, model, federation, lr: float, **given) -> Rows:
    """All quantiles from the common start, by seed."""

    def search(seed: int) -> list[dict[str, Any]]:
        tuned = bench.tune(
            model(seed), federation(seed), FedACS(lr), setting="quantile", regime="cold",
            grid=GRID[:1] if bench.rehearse else GRID, tolerance=0.0, train_on=0, seed=seed,
            check_every=given["rounds"], **given,
        )  # fmt: skip
        return tuned.rows

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
    with panes(7.2, 4.4, 2, len(parts), sharex=True) as (drawn, axes):
        for (top, low), (title, rows) in zip(axes.T, parts.items(), strict=True):
            at = [r["quantile"] for r in rows[0]]
            for ax, values, colour in (
                (top, 100 * column(rows, "validation"), BLUE), (low, column(rows, "clusters"), VERMILLION),
            ):  # fmt: skip
                ax.plot(at, values.mean(1), "o-", color=colour)
                ax.fill_between(at, values.min(1), values.max(1), color=colour, alpha=0.15, linewidth=0)
            if "ari" in rows[0][0]:
                for ax, text in ((top, f"1 - 1/{PLANTED}"), (low, "")):
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
    return Claim(f"the planted groups are found at quantile 1 - 1/{PLANTED}", bool((scores == 1).all()), evidence)


def gain(title: str, rows: Rows) -> list[Claim]:
    """The right quantile against hardly any threshold, and against training alone (quantile 1)."""
    at, accuracy = [r["quantile"] for r in rows[0]], column(rows, "validation")
    best = int(accuracy.mean(1).argmax())
    text = f"{title}: quantile {at[best]:g} is better than "
    return [points(f"{text}quantile {at[k]:g}", accuracy[best], accuracy[k]) for k in (0, len(at) - 1) if k != best]


@recipe("fedacs/quantile-path", "Accuracy and groups against the quantile", minutes=(1.3, 240), settings=path_settings,
        machine="one large GPU", data=("fashion_mnist",))  # fmt: skip
def quantile_path(bench: Bench) -> Outcome:
    """For which quantile are the groups found, where there are some, and is the accuracy best there?"""
    s1 = {"rounds": bench.rounds(200, 200), "local_steps": 10, "batch_size": None}
    parts = {
        "planted groups": path(bench, "planted", softmax, partial(planted, bench, "s1"), 0.1, **s1),
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


GROUPS = {"s1": "4 of 5", "s2": "2, 8, 2 and 8", "s3": "2 of 8", "s4": "one of 12", "s5": "12 clients alone"}
SEEDS = range(3, 23)  # seeds 0 to 2 were looked at when the rule was made
WARM = 20  # rounds of training alone before the similarities are looked at
CLEAR = 3.0  # times the second widest gap
USED, FEW = ("s1", "s2"), 5  # where the estimate is put to use, and under how many seeds
WORK = {"local_steps": 10, "batch_size": None}


def widest(S: np.ndarray) -> tuple[float, float]:
    """(quantile of all elements of S [m, m] in the widest gap between similarities, that gap over the next one)."""
    pairs = np.sort(S[np.triu_indices(len(S), 1)])
    gaps = np.diff(pairs)
    below = int(gaps.argmax()) + 1
    second = np.delete(gaps, below - 1).max(initial=0.0)
    ratio = float(gaps[below - 1] / second) if second else np.inf
    return (2 * below - 0.5) / (S.size - 1), ratio


def grouped(S: np.ndarray, quantile: float) -> np.ndarray:
    """[m] labels: connected components of the pairs more similar than the quantile of all elements of S."""
    near = torch.from_numpy(S > np.quantile(S, quantile))
    return components(len(S), *near.nonzero().T).numpy()


def planted(bench: Bench, name: str, seed: int) -> Federation:
    """One of FPFC's scenarios, in which groups of clients have one task."""
    return load(f"fpfc-{name}", scale=bench.pick("small", "full"), seed=seed).partition(seed=seed)


def looked(bench: Bench, name: str, seed: int) -> dict[str, float]:
    """The gap after a few rounds of training alone: its quantile, ratio, groups and ARI."""
    data = planted(bench, name, seed)
    run = bench.fit(
        softmax(seed), data, Local(0.1), rounds=bench.rounds(WARM, WARM), seed=seed, evaluate_every=0, **WORK
    )
    S = similarity(run.personal).numpy()
    quantile, ratio = widest(S)
    labels = grouped(S, quantile)
    score = adjusted_rand_score(data.clusters, labels)
    return {"quantile": quantile, "ratio": ratio, "groups": len(set(labels)), "ari": float(score)}


def settings(scale: Size) -> Sequence[Setting]:
    sizes = "; ".join(f"{name.upper()}: {groups}" for name, groups in GROUPS.items())
    return (
        Setting("planted groups", sizes if scale == "small" else "FPFC's S1 to S5 in full", "ours"),
        Setting("similarities", f"cosines of models after {WARM} rounds of 10 full-batch steps alone, lr 0.1", "ours"),
        Setting("estimate", "the middle of the widest gap between neighbours among the pairs' cosines", "ours"),
        Setting("a clear gap", f"{CLEAR:g} times as wide as the next; without one no threshold, one group", "ours"),
        Setting("seeds", "of data and start; 0 to 2 were looked at when the rule was made and do not count", "ours"),
        Setting("put to use", f"S1 and S2, {FEW} seeds, 100 rounds of 10 full-batch steps, all clients", "ours"),
    )  # fmt: skip


def share(wrong: np.ndarray) -> Cell:
    """Share of the seeds, in per cent, with Clopper and Pearson's interval."""
    low, high = stats.binomtest(int(wrong.sum()), len(wrong)).proportion_ci()
    return Cell(f"{100 * wrong.mean():.0f} ({100 * low:.0f} to {100 * high:.0f})", {"share": float(wrong.mean())})


@recipe("fedacs/gap", "Beyond the paper: the quantile from the gap in the similarities", minutes=(2, 30),
        settings=settings, seeds=SEEDS)  # fmt: skip
def gap(bench: Bench) -> Outcome:
    """How often does the widest gap give the planted groups, and what is the estimate worth?"""
    rows, used, claims, estimates = [], [], [], {}
    for name in GROUPS:
        found = bench.by_seed(name, lambda seed, name=name: looked(bench, name, seed))
        clear = np.array([f["ratio"] >= CLEAR for f in found])
        gaps = np.array([f["quantile"] for f in found])
        estimates[name] = {"gap": gaps, "clear": np.where(clear, gaps, 0.0)}
        wrong = np.array([f["ari"] < 1 for f in found])
        one = name == "s4"  # where the groups are the planted ones without a threshold
        middle = np.median([f["ratio"] for f in found])
        rows.append((Cell(name.upper()), Cell(GROUPS[name]), share(wrong), share(~clear), share(clear & wrong),
                     share(np.where(clear, wrong, not one)), Cell(f"{middle:.1f}")))  # fmt: skip
    few = bench.under(bench.seeds[:FEW])
    for name in USED:
        exact = 0.75 if name == "s1" else 1 - (2 * 2**2 + 2 * 8**2) / 20**2
        of = estimates[name] | {"exact": np.full(len(bench.seeds), exact), "none": np.zeros(len(bench.seeds))}
        methods = {kind: dict(zip(bench.seeds, map(float, values), strict=True)) for kind, values in of.items()}
        accuracy = {}
        for kind, quantile in methods.items():
            found = few.compare(
                f"{name}-{kind}", softmax, lambda seed, name=name: planted(bench, name, seed),
                lambda seed, kind=kind, quantile=quantile: {kind: FedACS(0.1, quantile=quantile[seed])},
                rounds=bench.rounds(100, 100), evaluate_every=0, **WORK,
            )  # fmt: skip
            accuracy[kind] = metric_of(found, kind)
        for kind, text in (
            ("none", "no threshold"),
            ("exact", "the planted groups' quantile"),
            ("clear", "a clear one's"),
        ):
            text = f"{name.upper()}: the gap's quantile is better than {text}"
            claims.append(points(text, accuracy["gap"], accuracy[kind]))
        used.append((Cell(name.upper()), *(ours(accuracy[kind], 100) for kind in methods)))
    heads = ("scenario<", "groups<", "widest gap is not the groups, %", "not clear, %", "clear and wrong, %",
             "error of the rule, %", "ratio, median")  # fmt: skip
    tables = [
        Table("Planted groups from the widest gap", heads, tuple(rows)),
        Table(
            "Test accuracy, %",
            ("scenario<", "quantile of the gap", "of a clear gap", "of the planted groups", "0"),
            tuple(used),
        ),
    ]
    notes = [
        "with groups of unequal size one quantile of all pairs still parts them: it is a threshold of the cosine",
        "where every client is alone (S5) there is no gap to find: any threshold is wrong there, but for 1",
    ]
    return Outcome(tables, claims=claims, notes=notes)
