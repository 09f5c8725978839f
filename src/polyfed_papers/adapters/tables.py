"""The recipes on pretrained models: all kinds of methods on heads and on adapters, and groups of tasks to be found."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import NamedTuple

from polyfed.base.errors import DataError
from polyfed.report.pairs import mean_of
from polyfed.report.read import read
from polyfed_papers.adapters import NEEDED, PICTURES, PIXELS, RANK, SENTENCES, TOKENS, Place, absent, versions
from polyfed_papers.board import HELD, MORE, WORK, cell, contenders, ladders, score
from polyfed_papers.board.board import Budget, compared, one
from polyfed_papers.recipes.recipe import Bench, Outcome, Size, case, grouping_of, recipe
from polyfed_papers.recipes.said import Claim, Setting

OTHERS = ("local", "fedavg-ft", "ditto", "fpfc", "ifca", "fedacs", "fedslr", "scaffold")
FACTORS = (
    "fedavg",
    "ffa-lora",
    "fedsa-lora",
    "rolora",
    "fedex-lora",
    "flora",
    "flexlora",
    "hetlora",
    "fedrpca",
    "feddpa",
)
FOUND: Mapping[str, tuple[tuple[float, ...], ...]] = {  # and where their searches begin: the step size, and a second
    "local": ((0.1, 0.3, 1.0),),
    "fedavg": ((0.1, 0.3, 1.0),),
    "fedavg-ft": ((0.1, 0.3, 1.0), (0.1, 0.3, 1.0)),
    "ifca": ((0.1, 0.3, 1.0), (1, 2, 3)),
    "fpfc": ((0.1, 0.3, 1.0), (0.5, 1.0, 2.0)),
}
SEARCHED = Budget(2000, 14)  # of groups: clusters take more rounds than models
COUNTED = range(1, 6)  # seed 0 was looked at when the recipe was made
BATCH = 10
EACH = {"sentences": 48, "images": 60}  # samples of a client: with most clients all that there are


class Depth(NamedTuple):
    """The trained part; settings are chosen with the first number of clients of a size."""

    methods: Sequence[str]
    few: Sequence[str]  # methods of a rehearsal
    budgets: Mapping[Size, Budget]
    clients: Mapping[Size, Sequence[int]]


DEPTHS = {
    "probe": Depth(
        (*OTHERS, "fedavg", "cfl", "apfl", "fedprox", "pacfl"),
        ("local", "fedavg", "fedavg-ft", "ifca"),
        {"small": Budget(200, 10), "paper": Budget(500, 12)},
        {"small": (20, 3, 50), "paper": (20, 3, 50)},
    ),
    "lora": Depth(
        (*FACTORS, *OTHERS),
        ("local", "fedavg", "fedavg-ft", "fedex-lora"),
        {"small": Budget(50, 5), "paper": Budget(300, 12)},
        {"small": (20, 3, 50), "paper": (20, 3, 50)},
    ),
}


def place(data: str, depth: str, clients: int, folder: str | None = None) -> Place:
    training = ("batch_size", BATCH), ("chunk", clients)
    return Place(
        data, None, clients, folder=folder, training=training, depth=depth, each=EACH[data], draws=1, usual=True
    )


TASKS = replace(place("sentences", "probe", 20), among=(2, 3), each=60, alike=True)


def places(data: str, depth: str, scale: Size, folder: str | None = None) -> dict[str, Place]:
    """The settings of a table: numbers of clients, with the first of which methods are tuned."""
    n, *rest = DEPTHS[depth].clients[scale]
    first = place(data, depth, n, folder)
    return {str(n): first} | {str(k): replace(place(data, depth, k, folder), chosen=(str(n), first)) for k in rest}


def settings(data: str, depth: str, scale: Size) -> tuple[Setting, ...]:
    budget = DEPTHS[depth].budgets[scale]
    samples, backbone, adapted = {
        "sentences": (
            f"{SENTENCES} sentences of docstrings of scipy, scikit-learn, pandas and torch each, {TOKENS} tokens",
            "MiniLM, the state of its first token",
            "the last linear layer",
        ),
        "images": (
            f"{PICTURES} images of CIFAR-10 a class, enlarged to {PIXELS} x {PIXELS}",
            "EfficientNet-Lite0",
            "the last convolution",
        ),
    }[data]
    lora = f"rank {RANK}, in {adapted}; A and B where the method trains both (FedAvg: FedIT), else B, on a chart"
    return (
        Setting("samples", f"{samples}; half of a client's are for the test", "ours"),
        Setting("backbone", f"{backbone}; computed once", "ours"),
        *(Setting(f"{name} clients", at.said, "ours") for name, at in places(data, depth, scale).items()),
        Setting("groups", "labels of every other client are moved on by half of the classes", "ours"),
        *((Setting("LoRA", lora, "ours"),) if depth == "lora" else ()),
        Setting("budget",
                f"{budget.gradients} gradients a client; {WORK['local_steps']} steps a round, batches of {BATCH}, SGD",
                "ours"),
        Setting(
            "trials",
            f"{budget.trials} of every method, with {DEPTHS[depth].clients[scale][0]} clients of a draw that does not "
            f"count, by {100 * HELD:.0f} % of the training samples; all get {MORE} more while a choice is at an edge",
            "ours",
        ),
        Setting("packages", ", ".join(NEEDED[data]), "ours"),
    )  # fmt: skip


ASKED = (
    "Which methods are told apart on {} of a pretrained {} model, when clients have two tasks and shares of classes of "
    "their own?"
)


def table(bench: Bench, data: str, depth: str) -> Outcome:
    """Tables, pictures and notes of one backbone, with what they were made with."""
    here(data)
    part, folder = DEPTHS[depth], None if bench.data_dir is None else str(bench.data_dir)
    some = places(data, depth, size_of(bench), folder)
    some = dict(islice(some.items(), 1)) if bench.rehearse else some
    outcome = compared(bench, some, part.budgets[size_of(bench)], contenders(bench, part.methods, part.few))
    return replace(outcome, notes=[*outcome.notes, made_with(data)])


for data, depth, times in (
    ("sentences", "probe", (10, 40)), ("images", "probe", (10, 40)),
    ("sentences", "lora", (20, 300)), ("images", "lora", (60, 900)),
):  # fmt: skip
    what, end, title = ("heads", "heads", "Personal") if depth == "probe" else ("adapters", "lora", "Adapter, personal")
    recipe(
        f"adapters/{data}-{end}", f"{title} and clustered methods on {'heads' if end == 'heads' else 'LoRA'}, {data}",
        minutes=times, settings=partial(settings, data, depth), data=("cifar10",) if data == "images" else (), seeds=5,
        scored=True,
    )(case(ASKED.format(what, "image" if data == "images" else "language"), table, data, depth))  # fmt: skip


GROUPS_SETTINGS = (
    Setting("samples", f"{SENTENCES} sentences of docstrings of pandas and torch each", "ours"),
    Setting("clients", TASKS.said, "ours"),
    Setting("budget", f"{SEARCHED.gradients} gradients a client; batches of {BATCH}, plain SGD", "ours"),
    Setting("trials", f"{SEARCHED.trials} of every method, by {100 * HELD:.0f} % of the training samples of a draw "
            "that does not count", "ours"),
)  # fmt: skip


@recipe("adapters/groups", "Groups of tasks on real sentences: are they found?", minutes=(4, 4),
        settings=GROUPS_SETTINGS, seeds=COUNTED, scored=True)  # fmt: skip
def groups(bench: Bench) -> Outcome:
    """Does FPFC find two groups of clients whose labels are exchanged, where one common model can only guess?"""
    here("sentences")
    methods, (budget, trials) = contenders(bench, tuple(FOUND), tuple(FOUND)), SEARCHED
    for name, cls in methods.items():
        lines = [replace(ladder, values=v) for ladder, v in zip(ladders(cls).values(), FOUND[name], strict=True)]
        bench.choose(f"tasks-{name}-by-1-draws", partial(score, bench, "tasks", TASKS, cls, budget), lines, trials)
    parts = {k: cell(bench, "tasks", TASKS, cls, trials, budget) for k, cls in methods.items()}
    study = read([r.folder for part in parts.values() for r in part.results if r.folder is not None])
    scores = grouping_of(parts["fpfc"], "fpfc")[1]
    common = list(study.verdicts.grids["fedavg"].per_seed().values())
    claims = [
        Claim(
            "FPFC finds the two groups of tasks under every seed",
            bool((scores == 1).all()),
            "ARI " + ", ".join(f"{s:.2f}" for s in scores),
        ),
        Claim(
            "one common model is at chance, within 5 points of a half",
            abs(mean_of(common) - 0.5) <= 0.05,
            "accuracy, % " + ", ".join(f"{100 * a:.1f}" for a in common),
        ),
    ]
    return Outcome([one(bench, "tasks", study, methods, parts)], claims=claims, notes=[made_with("sentences")])


def size_of(bench: Bench) -> Size:
    return bench.pick("small", "paper")


def here(kind: str) -> None:
    """Refuse in one line where packages are missing."""
    if missing := absent(kind):
        raise DataError(f"adapters: found no packages {', '.join(missing)}, expected them installed")


def made_with(kind: str) -> str:
    """Origin of the samples and features, beside the seed."""
    return f"Made with {versions(kind)}. Pre-training may have seen such samples: orders and ratios only."
