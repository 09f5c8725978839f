"""What the paper names and does not try: a threshold that moves with the round, smooth attention, own starts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from polyfed import Algorithm, FedACS, Federation
from polyfed.base.values import Limits
from polyfed.models import build
from polyfed.report.table import Cell, Table
from polyfed_papers.fedacs import TRIAL, Make, best, clients, net, work
from polyfed_papers.fedacs.gap import WORK, planted
from polyfed_papers.fedacs.stated import STEPS, TUNED, common_settings
from polyfed_papers.recipes.recipe import Bench, Outcome, Size, metric_of, recipe
from polyfed_papers.recipes.said import Claim, Setting, listed, ours, points
from polyfed_tuning.ladder import At, Ladder

FIRST, SIGMAS = 0.95, (0.1, 1.0, 10.0, 100.0, 1000.0)
PLAIN = "as printed"
WAYS: Mapping[str, FedACS] = {
    PLAIN: FedACS(),
    f"p from {FIRST:g}, down": FedACS(first=FIRST),
    "smooth attention": FedACS(sigma=SIGMAS[2]),
    "own starts": FedACS(start_seed=0),
}


def ladders(way: FedACS) -> dict[str, Ladder]:
    """Ladders of a way, by setting."""
    found = {"lr": Ladder(STEPS, Limits(gt=0)), "quantile": Ladder.of(way, *TUNED["FedACS"])}
    return found if way.sigma is None else found | {"sigma": Ladder.of(way, "sigma", SIGMAS)}


def settings(scale: Size) -> Sequence[Setting]:
    rivals = TUNED.keys() - {"FedACS"}
    return (
        Setting("few samples", "Fashion-MNIST, each client's class prior from Dirichlet(0.5)", "paper"),
        Setting("planted groups", "FPFC's S1, 200 rounds of 10 full-batch steps, all clients; tuned on other draws",
                "ours"),
        *(s for s in common_settings(scale) if s.key.split(":")[0] not in rivals),
        Setting("p", f"from {FIRST:g} to the chosen quantile in ten equal steps", "ours"),
        Setting("smooth attention", f"sigma from {listed(SIGMAS)}", "ours"),
        Setting("own starts", "each client's model drawn for itself, as line 3 has it", "paper"),
    )  # fmt: skip


def made(label: str, at: At) -> Algorithm:
    """A way at values of its settings."""
    values: dict[str, Any] = dict(zip(ladders(WAYS[label]), at, strict=True))
    return replace(WAYS[label], **values)


def part(bench: Bench, title: str, model, federation: Make, **how) -> tuple[Table, list[Claim]]:
    """All ways on one kind of clients, each at its best settings."""
    keys = {label: f"{title}-{k}".replace(" ", "-") for k, label in enumerate(WAYS)}
    tasks = [
        (keys[label], TRIAL, partial(best, bench, keys[label], partial(made, label), [*ladders(way).values()], model,
                                     federation, 1 if bench.rehearse else 3, **how))
        for label, way in WAYS.items()
    ]  # fmt: skip
    at = dict(zip(WAYS, bench.all_of(tasks), strict=True))
    methods = {keys[label]: made(label, at[label]) for label in WAYS}
    runs = bench.compare(title.replace(" ", "-"), model, federation, methods, evaluate_every=0, **how)
    accuracy = {label: metric_of(runs, key) for label, key in keys.items()}
    rows = [
        (Cell(label), ours(values, 100), *(Cell(f"{v:g}") for v in at[label]), *[Cell("–")] * (3 - len(at[label])))
        for label, values in accuracy.items()
    ]
    table = Table(title.capitalize(), ("FedACS<", "accuracy, %", "lr", "quantile", "sigma"), tuple(rows))
    return table, [
        points(f"{title}: {label} is better than {PLAIN}", values, accuracy[PLAIN])
        for label, values in accuracy.items()
        if label != PLAIN
    ]


@recipe("fedacs/options", "A threshold that moves with the round, smooth attention, own starts", minutes=(4, 480),
        settings=settings, machine="one large GPU", data=("fashion_mnist",), seeds=5)  # fmt: skip
def options(bench: Bench) -> Outcome:
    """Do the paper's asides pay: a p that changes, attention 1 - exp(-x^2 / sigma) after selection, own starts?"""

    def groups(seed: int, trial: bool = False) -> Federation:  # draws of other seeds are other data
        return planted(bench, "s1", seed)

    rounds, start = bench.rounds(200, 200), partial(build, "linear", (60,), 10)
    parts = [
        part(bench, "few samples", net(bench), clients(bench), **work(bench)),
        part(bench, "planted groups", start, groups, rounds=rounds, **WORK),
    ]
    return Outcome([table for table, _ in parts], claims=[c for _, claims in parts for c in claims])
