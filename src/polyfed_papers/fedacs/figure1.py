"""Figure 1: seven methods with many and with few samples per client."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from polyfed.report.style import BLUE, INK, VERMILLION
from polyfed.report.table import Cell, Table
from polyfed_papers.fedacs import apart, chosen, clients, net, tuned, work
from polyfed_papers.fedacs.stated import HALVED, NOT_TO_BE_MATCHED, model_setting, work_settings
from polyfed_papers.recipes.drawing import panes
from polyfed_papers.recipes.recipe import Bench, Outcome, Size, metric_of, recipe
from polyfed_papers.recipes.said import Claim, Setting, ordered, ours, points

METHODS = ("FedAvg", "Ditto", "PerAvg", "pFedMe", "APFL", "FedAMP", "FedACS")
NAMES = {"fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}


class Panel(NamedTuple):
    """One panel: [small, paper] each."""

    title: str
    partition: tuple[str, str]
    clients: tuple[int, int]
    fraction: tuple[float, float] = (1.0, 1.0)
    rounds: tuple[int, int] = (8, 40)
    trials: int = 3  # draws of clients that settings are chosen on


MANY = 200  # training images per client in (a) and (b), small size
FEW = "dirichlet-prior:0.5,samples=50"
PANELS = {
    "a": Panel("a: many samples, 2 classes", ("pathological:2", "pathological:2"), (20, 100)),
    "b": Panel(
        "b: many samples, Dirichlet(0.5)", (f"dirichlet-prior:0.5,samples={MANY}", "dirichlet-prior:0.5"), (20, 100)
    ),
    "c": Panel("c: 50 samples, Dirichlet(0.5)", (FEW, FEW), (40, 100), rounds=(30, 100)),
    "d": Panel(
        "d: all data among more clients, 10 % take part",
        ("dirichlet-prior:0.5,samples=120", "dirichlet-prior:0.5"),
        (100, 500),
        (0.1, 0.1),
        (40, 500),
        trials=1,  # of many clients
    ),
}


def shown(scale: Size) -> dict[str, Panel]:
    """The panels of a size: (d) at middle size is `fedacs/figure1-d`."""
    return {key: panel for key, panel in PANELS.items() if scale != "middle" or key != "d"}


def settings(scale: Size) -> Sequence[Setting]:
    small, panels = scale == "small", shown(scale)
    count = ", ".join(f"({key}) {p.clients[0 if small else 1]}" for key, p in panels.items())
    rounds = ", ".join(f"({key}) {p.rounds[1 if scale == 'paper' else 0]}" for key, p in panels.items())
    many = Setting("training images per client, (a) and (b)", str(MANY) if small else "all, shared equally", "ours")
    return (
        Setting("clients", count, "ours" if small else "paper"),
        Setting("partition", "(a) 2 classes per client, else class priors from Dirichlet(0.5)", "paper"),
        many,
        Setting("training images per client, (c)", "50", "paper"),
        Setting("training images per client, (d)", "120, as 60 000 images make for 500 clients", "ours")
        if small
        else Setting("training images per client, (d)", "all, shared equally", "paper"),
        Setting("participation", "(d) a part: the paper; 10 %: ours", "ours"),
        Setting("FedACS: pool", "all clients", "paper"),
        Setting("test set per client", "100 images in the class ratio of its training images", "ours"),
        model_setting(scale),
        *([HALVED] if scale != "paper" else []),
        Setting("rounds", rounds, "ours"),
        *(s for s in work_settings(scale, "3 ((d): 1)") if s.key not in ("rounds",)),
        Setting("tuned", "for every panel and data set apart", "ours"),
    )


def run(bench: Bench, name: str, key: str) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """method -> [seeds] accuracy of one panel, and what was chosen for it."""
    panel, k = PANELS[key], bench.pick(0, 1)
    n = panel.clients[k]
    at_most = MANY * n if bench.small and key == "a" else None
    model = net(bench, name, bench.scale != "paper")
    federation = clients(bench, name, panel.partition[k], n, at_most, bench.scale != "paper")
    rounds = bench.rounds(*panel.rounds, panel.rounds[0])
    given: dict[str, Any] = {**work(bench), "rounds": rounds, "fraction": panel.fraction[k]}
    methods = tuned(bench, f"{name}-{key}", METHODS, model, federation, panel.trials, **given)
    runs = bench.compare(f"{name}-{key}", model, federation, methods, evaluate_every=0, **given)
    return {m: metric_of(runs, m) for m in METHODS}, {m: chosen(m, method) for m, method in methods.items()}


def claims(name: str, key: str, accuracy: dict[str, np.ndarray]) -> list[Claim]:
    """Claims of the text about the panel."""
    where, mine, unit = f"{NAMES[name]} ({key})", accuracy["FedACS"], " points"
    made = [ordered(f"{where}: PerAvg is better than pFedMe", accuracy["PerAvg"], accuracy["pFedMe"], 100, unit)]
    others = {m: a for m, a in accuracy.items() if m != "FedACS"}
    best = max(others, key=lambda m: np.nanmean(others[m]))
    if key == "a":
        made.append(ordered(f"{where}: APFL is better than FedACS", accuracy["APFL"], mine, 100, unit))
    if key in "cd":
        made.append(ordered(f"{where}: FedACS is better than the best other, {best}", mine, others[best], 100, unit))
    usual = np.mean([apart(a) for a in others.values()], 0)
    text = f"{where}: FedACS varies less over seeds than the others do on average"
    return [*made, ordered(text, usual, apart(mine), 100, " points from the mean")]


def figure(by_data: dict[str, dict[str, dict[str, np.ndarray]]]) -> Figure:
    """Bars of the mean over seeds with its standard deviation: a row per data set, a column per panel."""
    columns = len(next(iter(by_data.values())))
    with panes(10.4, 2.5 * len(by_data) + 0.6, len(by_data), columns, sharey=True) as (drawn, axes):
        for row, (name, accuracy) in zip(axes, by_data.items(), strict=True):
            for ax, (key, found) in zip(row, accuracy.items(), strict=True):
                v = 100 * np.array(list(found.values()))
                spread = np.nanstd(v, axis=1, ddof=1) if v.shape[1] > 1 else None
                colours = [VERMILLION if method == "FedACS" else BLUE for method in found]
                mean = np.where(np.isnan(v).all(1), 0, np.nan_to_num(v).mean(1))
                ax.barh(range(len(found)), mean, xerr=spread, color=colours, ecolor=INK, capsize=2)
                ax.set_yticks(range(len(found)), list(found))
                ax.set_title(f"{NAMES[name]} ({key})")
                ax.grid(axis="y", visible=False)
        axes[0, 0].invert_yaxis()  # shared by all
        for ax in axes[-1]:
            ax.set_xlabel("test accuracy, %")
    return drawn


@recipe("fedacs/figure1", "Figure 1: seven methods with many and with few samples", minutes=(9, 3600),
        settings=settings, machine="one large GPU", data=("fashion_mnist", "cifar10"), between=("middle",))  # fmt: skip
def figure1(bench: Bench) -> Outcome:
    """Which methods pay when clients have many samples, and which when they have few?"""
    outcome = Outcome(notes=[
        "the paper shows Figure 1 as an image without figures; the claims are those of its text",
        "FedAvg and PerAvg are judged as in the paper's tables, PerAvg after its personal step; in (d) a client is "
        "judged by the model that it has, which was updated when it last took part",
        *NOT_TO_BE_MATCHED,
    ])  # fmt: skip
    by_data = {}
    for name in NAMES:
        panels = {key: run(bench, name, key) for key in shown(bench.scale)}
        accuracy = {key: values for key, (values, _) in panels.items()}
        rows = [(Cell(m), *(ours(values[m], 100) for values, _ in panels.values())) for m in METHODS]
        heads = ("method<", *(f"({key})" for key in panels))
        outcome.tables.append(Table(f"Figure 1, {NAMES[name]}, accuracy in %", heads, tuple(rows)))
        rows = [(Cell(m), *(Cell(best[m]) for _, best in panels.values())) for m in METHODS]
        heads = ("method<", *(f"({key})<" for key in panels))
        outcome.tables.append(Table(f"Chosen on other clients, {NAMES[name]}", heads, tuple(rows)))
        by_data[name] = accuracy
        outcome.claims += [c for key in panels for c in claims(name, key, accuracy[key])]
    outcome.figures["figure1"] = figure(by_data)
    return outcome


LARGE, CONTENDERS = 500, ("FedAvg", "Ditto", "APFL", "FedACS")


def settings_of_d(scale: Size) -> Sequence[Setting]:
    return (
        Setting("clients", f"{LARGE}, among which all training images of Fashion-MNIST are shared", "paper"),
        Setting("partition", "class priors from Dirichlet(0.5)", "paper"),
        Setting("participation", "10 %", "ours"),
        Setting("FedACS: pool", "all clients", "paper"),
        Setting("test set per client", "100 images in the class ratio of its training images", "ours"),
        model_setting(scale, "LeNet: 5x5x6, 5x5x16, 2x2 pools, 6,582 numbers"),
        Setting("rounds", "500" if scale == "paper" else "100", "ours"),
        *(s for s in work_settings(scale, "1") if s.key != "rounds"),
    )


@recipe("fedacs/figure1-d", "Figure 1 (d) with the paper's 500 clients, against the best others", minutes=(20, 1500),
        settings=settings_of_d, machine="one large GPU", data=("fashion_mnist",), seeds=5,
        between=("middle",))  # fmt: skip
def figure1_d(bench: Bench) -> Outcome:
    """Is FedACS the best with many clients, of which a tenth takes part in a round?"""
    model, federation = (
        net(bench, middle="lenet"),
        clients(bench, partition=PANELS["d"].partition[0 if bench.rehearse else 1], n=LARGE),
    )
    given: dict[str, Any] = {**work(bench), "rounds": bench.rounds(100, 500, 100), "fraction": 0.1}
    methods = tuned(bench, "d", CONTENDERS, model, federation, 1, **given)
    runs = bench.compare("d", model, federation, methods, evaluate_every=0, **given)
    accuracy = {m: metric_of(runs, m) for m in CONTENDERS}
    rows = [(Cell(m), ours(accuracy[m], 100), Cell(chosen(m, methods[m]))) for m in CONTENDERS]
    claims = [points(f"FedACS is better than {m}", accuracy["FedACS"], accuracy[m]) for m in CONTENDERS[:-1]]
    table = Table("Figure 1 (d), 500 clients, Fashion-MNIST", ("method<", "accuracy, %", "chosen<"), tuple(rows))
    return Outcome([table], claims=claims, notes=list(NOT_TO_BE_MATCHED))
