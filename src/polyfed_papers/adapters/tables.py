"""The recipes on pretrained models: two tables of all kinds of methods, and groups of tasks that are there to be found."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import islice


from polyfed.base.errors import DataError
from polyfed.recipes.recipe import Bench, Outcome, Size, recipe
from polyfed.recipes.said import Claim, Setting
from polyfed.report.pairs import mean_of
from polyfed.report.read import read
from polyfed_papers.adapters import NEEDED, RANK, SENTENCES, TOKENS, Place, absent, versions
from polyfed_papers.board import HELD, MORE, WORK, cell, contenders, tuned_to
from polyfed_papers.board.board import Budget, compared, grouping_of, one

FACTORS = ("fedavg", "ffa-lora", "fedsa-lora", "rolora", "fedex-lora", "flora", "flexlora", "hetlora")
OTHERS = ("local", "fedavg-ft", "ditto", "fpfc", "ifca", "cfl", "fedacs", "fedslr", "scaffold")
HEADS = ("local", "fedavg", *OTHERS[1:], "apfl", "fedprox", "pacfl")
FOUND = ("local", "fedavg", "fedavg-ft", "ifca", "fpfc")
BUDGETS: Mapping[Size, Budget] = {"small": Budget(100, 10), "paper": Budget(300, 12)}
SIZES = (20, 3, 50)  # clients; settings are chosen with the first
BATCH = 10
EACH = {"sentences": 48, "images": 60}  # samples of a client: with most clients all that there are
MINUTES = {"sentences": (20, 150), "images": (25, 200), "groups": (2, 5)}
TASKS = Place("sentences", None, 20, batch=BATCH, depth="probe", among=(2, 3), each=60, alike=True)


def places(data: str, depth: str) -> dict[str, Place]:
    """The settings of a table: three numbers of clients, whose methods are tuned with the first."""
    first = Place(data, None, SIZES[0], batch=BATCH, depth=depth, each=EACH[data])
    name = f"{depth}-{SIZES[0]}"
    more = {f"{depth}-{n}": replace(first, clients=n, chosen=(name, first)) for n in SIZES[1:]}
    return {name: first} | more


def settings(data: str, scale: Size) -> tuple[Setting, ...]:
    budget = BUDGETS[scale]
    backbone, sample = {
        "sentences": ("MiniLM (six layers), its first token; adapters in the last layer, behind its attention",
                      f"{SENTENCES} sentences of docstrings of scipy, scikit-learn, pandas and torch each, {TOKENS} tokens"),
        "images": ("EfficientNet-Lite0; adapters in the last convolution",
                   "300 images of CIFAR-10 a class, enlarged to 64 x 64"),
    }[data]  # fmt: skip
    return (
        Setting("samples", f"{sample}; half of a client's are for the test", "ours"),
        Setting("backbone", f"{backbone}; what lies below is computed once", "ours"),
        *(Setting(name, place.said, "ours") for depth in ("probe", "lora") for name, place in places(data, depth).items()),
        Setting("groups", "labels of every other client are moved on by half of the classes", "ours"),
        Setting("budget", f"{budget.gradients} gradients a client; {WORK['local_steps']} steps a round, batches of "
                f"{BATCH}, plain SGD", "ours"),
        Setting("trials", f"{budget.trials} of every method, with {SIZES[0]} clients of a draw that does not count, by "
                f"{100 * HELD:.0f} % of the training samples; all get {MORE} more while a choice is at an edge", "ours"),
        Setting("LoRA", f"rank {RANK}; A and B where the method trains both (FedAvg: FedIT), else B, on a chart", "ours"),
        Setting("packages", ", ".join(NEEDED[data]), "ours"),
    )  # fmt: skip


@recipe("adapters/sentences", "Adapter methods and personal, clustered methods on real sentences",
        minutes=MINUTES["sentences"], settings=partial(settings, "sentences"), seeds=5, scored=True)  # fmt: skip
def sentences(bench: Bench) -> Outcome:
    """Which methods are told apart on adapters of a pretrained language model, when clients have two tasks and classes
    of their own?
    """
    return table(bench, "sentences")


@recipe("adapters/images", "Adapter methods and personal, clustered methods on real images", minutes=MINUTES["images"],
        settings=partial(settings, "images"), data=("cifar10",), seeds=5, scored=True)  # fmt: skip
def images(bench: Bench) -> Outcome:
    """Which methods are told apart on adapters of a pretrained image model, when clients have two tasks and classes of
    their own?
    """
    return table(bench, "images")


def table(bench: Bench, data: str) -> Outcome:
    """Heads, then adapters: tables, pictures and notes of both."""
    here(data)
    found = list[Outcome]()
    for depth, methods in (("probe", HEADS), ("lora", (*FACTORS, *OTHERS))):
        some = {k: at_hand(bench, p) for k, p in places(data, depth).items()}
        few = ("local", "fedavg", "fedavg-ft", *(("fedex-lora",) if depth == "lora" else ("ifca",)))
        some = dict(islice(some.items(), 1)) if bench.rehearse else some
        found.append(compared(bench, some, BUDGETS[bench.pick("small", "paper")], contenders(bench, methods, few)))
    return Outcome(
        [t for each in found for t in each.tables],
        {k: f for each in found for k, f in each.figures.items()},
        notes=list(dict.fromkeys(n for each in found for n in each.notes)) + [said(data)],
        captions={k: c for each in found for k, c in each.captions.items()},
    )


def groups_settings(scale: Size) -> tuple[Setting, ...]:
    return (
        Setting("samples", f"{SENTENCES} sentences of docstrings of pandas and torch each; the same number of both a client",
                "ours"),
        Setting("clients", TASKS.said, "ours"),
        Setting("budget", f"{BUDGETS[scale].gradients * 3} gradients a client; batches of {BATCH}, plain SGD", "ours"),
        Setting("trials", f"{BUDGETS[scale].trials} of every method, as in adapters/sentences", "ours"),
    )  # fmt: skip


@recipe("adapters/groups", "Groups of tasks on real sentences: are they found?", minutes=MINUTES["groups"],
        settings=groups_settings, seeds=5, scored=True)  # fmt: skip
def groups(bench: Bench) -> Outcome:
    """Does FPFC find two groups of clients whose labels are exchanged, where one common model can only guess?"""
    here("sentences")
    budget = BUDGETS[bench.pick("small", "paper")]
    methods = contenders(bench, FOUND, FOUND)
    parts = {k: cell(bench, "tasks", TASKS, cls, budget.trials, 3 * budget.gradients) for k, cls in methods.items()}
    study = read([r.folder for part in parts.values() for r in part.results if r.folder is not None])
    scores = grouping_of(parts["fpfc"], "fpfc")[1]
    common = list(study.verdicts.grids["fedavg"].per_seed().values())
    claims = [
        Claim("FPFC finds the two groups of tasks under every seed", bool((scores == 1).all()),
              "ARI " + ", ".join(f"{s:.2f}" for s in scores)),
        Claim("one common model is at chance, within 5 points of a half", abs(mean_of(common) - 0.5) <= 0.05,
              "accuracy, % " + ", ".join(f"{100 * a:.1f}" for a in common)),
    ]  # fmt: skip
    edges = [k for k, cls in methods.items() if tuned_to(bench, "tasks", cls)[1]]
    notes = [said("sentences"), *([f"choices at an edge: {', '.join(edges)}"] if edges else [])]
    return Outcome([one(bench, "tasks", study, methods, parts)], claims=claims, notes=notes)


def here(kind: str) -> None:
    """Refuse in one line where packages are missing."""
    if missing := absent(kind):
        raise DataError(f"adapters: found no packages {', '.join(missing)}, expected them installed")


def at_hand(bench: Bench, place: Place) -> Place:
    """The place with the folder of data, which the one that settings are chosen in has too."""
    folder = None if bench.data_dir is None else str(bench.data_dir)
    chosen = place.chosen and (place.chosen[0], replace(place.chosen[1], folder=folder))
    return replace(place, folder=folder, chosen=chosen)


def said(kind: str) -> str:
    """What the samples and features follow from, beside the seed."""
    return f"Made with {versions(kind)}. Pre-training may have seen such samples: orders and ratios only."
