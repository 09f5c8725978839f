"""Tables 3 to 8: what lambda, mu, eta_g and the local epochs do, and either part alone."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from polyfed import Algorithm, FedAvg
from polyfed.report.table import Cell, Table
from polyfed.studies.compare import Comparison
from polyfed_papers.fedslr import falling, few, gigabytes, last, method, train
from polyfed_papers.fedslr.stated import NOTES, OTHER_DATA, RUNS, settings, several
from polyfed_papers.recipes.recipe import Bench, Outcome, metric_of, recipe
from polyfed_papers.recipes.said import Claim, Setting, beside, ours, points

LAMBDAS = {
    "small": (1e-3, 2e-3, 4e-3, 1e-2, 2e-2), "middle": (2.5e-5, 1.25e-4, 2.5e-4, 1.25e-3, 2.5e-3),
    "heads": (1e-3, 3e-3, 1e-2, 3e-2, 1e-1), "paper": (1e-5, 5e-5, 1e-4, 5e-4, 1e-3),
}  # fmt: skip
MUS = {"small": (1e-5, 1e-4, 1e-3, 1e-2, 5e-2), "paper": (1e-4, 5e-4, 1e-3, 5e-3, 1e-2)}
MUS |= dict.fromkeys(("middle", "heads"), MUS["paper"])
ETAS = (2.0, 10.0, 20.0, 100.0)
EPOCHS = (1, 2, 3, 4)
Runs = Mapping[float, tuple[Comparison, str]]  # value -> the runs, and the label of its own
Printed = Mapping[float, tuple[str | None, ...]]  # accuracy GKR, GB, M GKR, accuracy mixed, M mixed
TABLE3: Printed = {
    1e-5: ("63.63", "819.44", "7.33", "81.89", "8.54"),
    5e-5: ("64.27", "770.39", "6.56", "81.20", "7.83"),
    1e-4: ("64.22", "722.60", "5.54", "82.19", "6.69"),
    5e-4: ("61.81", "568.43", "3.09", "80.10", "4.04"),
    1e-3: ("54.26", "498.20", "1.27", "74.33", "2.24"),
}
TABLE4: Printed = {  # ± over clients
    1e-4: ("64.22", "722.60", "5.54", "79.15", "8.50 ± 0.79"),
    5e-4: ("64.22", "722.60", "5.54", "81.78", "7.12 ± 0.65"),
    1e-3: ("64.22", "722.60", "5.54", "82.19", "6.69 ± 0.56"),
    5e-3: ("64.22", "722.60", "5.54", "81.82", "5.78 ± 0.17"),
    1e-2: ("64.22", "722.60", "5.54", "80.81", "5.56 ± 0.08"),
}
TABLE5: Printed = {
    2.0: ("60.74", "894.06", "10.65", "80.37", "12.36"),
    10.0: ("64.22", "722.60", "5.54", "82.19", "6.69"),
    20.0: ("61.02", "668.94", "5.16", "80.60", "6.15"),
    100.0: ("58.69", "559.88", "2.99", "78.33", "3.90"),
}
TABLE6: Printed = {
    epochs: (gkr, None, None, mixed, None)
    for epochs, gkr, mixed in zip(
        EPOCHS, ("58.20", "64.51", "63.86", "64.17"), ("78.82", "81.46", "81.97", "82.20"), strict=True
    )
}
LIGHT = ("small", "heads")  # sizes with models of thousands of numbers
LONGER = 120  # rounds at small size where 40 leave a claim open
FOREIGN = f"columns of the paper: ResNet-18 on CIFAR-100, non-IID; {OTHER_DATA}"


def vary(bench: Bench, key: str, values: Sequence[Any]) -> Runs:
    """FedSLR with one setting at several values, in a rehearsal the first two."""
    labels = {v: f"{key}-{v:g}" for v in few(bench, values)}
    runs = train(bench, key, {label: method(bench, **{key: v}) for v, label in labels.items()})
    return {v: (runs, label) for v, label in labels.items()}


def table(bench: Bench, title: str, first: str, runs: Runs, printed: Printed) -> Table:
    """One row per value; `runs` maps it to (comparison, label)."""
    amount, unit, of, numbers = (1e3, "MB", 1e3, "thousand") if bench.scale in LIGHT else (1.0, "GB", 1e6, "M")
    scaled = list(printed) != list(runs) and len(printed) == len(runs)
    rows = {}
    for k, (value, (found, label)) in enumerate(runs.items()):
        theirs = list(printed.values())[k] if scaled else printed.get(value, (None,) * 5)
        name = f"{value:g}" + (f" (paper {list(printed)[k]:g})" if scaled else "")
        rows[name] = [
            (theirs[0], ours(last(found, label), 100)),
            (theirs[3], ours(metric_of(found, label), 100)),
            (theirs[1] and f"{theirs[1]} GB", ours(gigabytes(found, label), amount)),
            (theirs[2] and f"{theirs[2]} M", ours(last(found, label, "gkr_parameters") / of)),
            (theirs[4] and f"{theirs[4]} M", ours(last(found, label, "parameters") / of)),
        ]
    heads = ("GKR, %", "mixed, %", f"sent, {unit}", f"GKR, {numbers}", f"mixed, {numbers}")
    return beside(title, heads, rows, first=first)


def per_value(runs: Runs, value: Callable[[Comparison, str], np.ndarray]) -> dict[str, np.ndarray]:
    """value of the setting -> [seeds], for `falling`."""
    return {f"{v:g}": value(*run) for v, run in runs.items()}


def smaller(setting: str, runs: Runs):
    """Sizes and bytes fall as a setting grows."""
    return [
        falling(f"the GKR has fewer parameters as {setting} grows",
                per_value(runs, lambda f, k: last(f, k, "gkr_parameters")), 1e-3, " thousand"),
        falling(f"the mixed model has fewer parameters as {setting} grows",
                per_value(runs, lambda f, k: last(f, k, "parameters")), 1e-3, " thousand"),
        falling(f"fewer bytes are sent as {setting} grows", per_value(runs, gigabytes), 1e3, " MB"),
    ]  # fmt: skip


@recipe("fedslr/table3", "Table 3: lambda", minutes=(1, several(5)), **RUNS,
        between=("middle", "heads"), settings=settings(
            {"small": Setting("lambda", "1e-3 to 2e-2, where ranks fall in 40 rounds; beside them the paper's", "ours"),
             "middle": Setting("lambda", "2.5 times the paper's, which are beside them", "ours"),
             "heads": Setting("lambda", "1e-3 to 1e-1, where ranks fall in 200 rounds", "ours"),
             "paper": Setting("lambda", "1e-5, 5e-5, 1e-4, 5e-4, 1e-3", "paper")},
            but=["lambda"],
        ))  # fmt: skip
def table3(bench: Bench) -> Outcome:
    """How do accuracy, size and communication trade off over the weight of the nuclear norm?"""
    runs = vary(bench, "lam", LAMBDAS[bench.scale])
    first, middle, end = (list(runs.values())[k] for k in (0, len(runs) // 2, -1))
    both = {"GKR": last, "mixed model": metric_of}.items()
    low, high = "better at the middle lambda than at the smallest", "the largest lambda costs accuracy of the"
    claims = smaller("lambda", runs)
    claims += [points(f"the {model} is {low}", value(*middle), value(*first)) for model, value in both]
    claims += [points(f"{high} {model}", value(*middle), value(*end)) for model, value in both]
    return Outcome([table(bench, "Table 3", "lambda", runs, TABLE3)], {}, claims, [FOREIGN, *NOTES])


@recipe("fedslr/table4", "Table 4: mu", minutes=(2, several(5)), **RUNS,
        between=("middle", "heads"), settings=settings(
            {"small": Setting("mu", "1e-5 to 5e-2, a wider range than the paper's; the smallest and the middle one "
                              f"again with {LONGER} rounds", "ours"),
             **dict.fromkeys(("middle", "heads", "paper"), Setting("mu", "1e-4, 5e-4, 1e-3, 5e-3, 1e-2", "paper"))},
        ))  # fmt: skip
def table4(bench: Bench) -> Outcome:
    """How sparse should the personal parts be?"""
    runs = vary(bench, "mu", MUS[bench.scale])
    nonzeros = per_value(runs, lambda f, k: last(f, k, "parameters") - last(f, k, "gkr_parameters"))
    smallest, middle, largest = ([*runs][k] for k in (0, len(runs) // 2, -1))
    own = {v: metric_of(*run) for v, run in runs.items()}
    claims = [
        falling("the personal parts have fewer nonzeros as mu grows", nonzeros, 1e-3, " thousand"),
        points("the mixed model is better at the middle mu than at the smallest", own[middle], own[smallest]),
        points("the mixed model is better at the middle mu than at the largest", own[middle], own[largest]),
    ]
    spread = "ours over clients, thousand: " + ", ".join(
        f"{v:g}: {last(*run, 'spread').mean() / 1e3:.1f}" for v, run in runs.items()
    )
    printed = {**TABLE4} if not bench.small else {v: TABLE4.get(v, (None,) * 5) for v in MUS["small"]}
    tables = [table(bench, "Table 4", "mu", runs, printed)]
    below, above = claims[1:]
    if bench.small:  # 40 rounds leave it open
        mus = {f"mu-{v:g}": method(bench, mu=v) for v in (smallest, middle)}
        longer = train(bench, "longer", mus, rounds=bench.rounds(LONGER, LONGER))
        at = {v: metric_of(longer, k) for v, k in zip((smallest, middle), mus, strict=True)}
        rows = tuple((Cell(f"{v:g}"), ours(a, 100)) for v, a in at.items())
        tables.append(Table(f"{LONGER} rounds", ("mu", "mixed, %"), rows))
        below = points(f"{LONGER} rounds: {below.text}", at[middle], at[smallest])
        claims.append(below)
    claims.append(peak(middle, below, above))
    notes = [FOREIGN, f"the paper's ± is over the clients of a run, ours over seeds; {spread}", *NOTES]
    return Outcome(tables, {}, claims, notes)


def peak(middle: float, below: Claim, above: Claim) -> Claim:
    """The claim that accuracy is highest at a middle mu, from its two halves."""
    verdicts = (below.holds, above.holds)
    holds = False if False in verdicts else None if None in verdicts else True
    evidence = f"{middle:g} against the smallest: {below.evidence}; against the largest: {above.evidence}"
    return Claim("the mixed model's accuracy peaks at a middle mu", holds, evidence)


@recipe("fedslr/table5", "Table 5: eta_g", minutes=(1, several(4)), **RUNS, between=("middle",),
        settings=settings(Setting("eta_g", "2, 10, 20, 100", "paper")))  # fmt: skip
def table5(bench: Bench) -> Outcome:
    """What does the global step size do?"""
    runs = vary(bench, "eta_g", ETAS)
    claims = smaller("eta_g", runs)
    for model, value in (("mixed model", metric_of), ("GKR", last)):
        own = {v: value(*run) for v, run in runs.items()}
        claims += [
            points(f"the {model} is better at eta_g 10 than at {v:g}", own[10.0], own[v]) for v in own if v != 10
        ]
    return Outcome([table(bench, "Table 5", "eta_g", runs, TABLE5)], {}, claims, [FOREIGN, *NOTES])


@recipe("fedslr/table6", "Table 6: local epochs", minutes=(1, several(4)), **RUNS, between=("middle",),
        settings=settings(Setting("epochs", "1, 2, 3, 4 for the common part", "paper")))  # fmt: skip
def table6(bench: Bench) -> Outcome:
    """How much local work does the common part need?"""
    values = few(bench, EPOCHS)
    runs = {v: (train(bench, f"epochs-{v}", {"FedSLR": method(bench)}, local_epochs=v), "FedSLR") for v in values}
    common, mixed = (per_value(runs, value) for value in (last, lambda f, k: metric_of(f, k)))
    claims = [
        points("2 epochs are better than 1 for the GKR", common["2"], common["1"]),
        points("2 epochs are better than 1 for the mixed model", mixed["2"], mixed["1"]),
        points("the last is better than 2 for the mixed model", mixed[str(values[-1])], mixed["2"]),
    ]
    note = "the paper's row of 2 epochs (64.51, 81.46) is another run than that of its Table 1 (64.22, 82.19)"
    return Outcome([table(bench, "Table 6", "epochs", runs, TABLE6)], {}, claims, [FOREIGN, note, *NOTES])


@recipe("fedslr/table7", "Tables 7 and 8: either part alone", minutes=(2, several(8)), **RUNS,
        between=("middle", "heads"), also=("fedslr/table8",),
        settings=settings(
            Setting("pure personal", "lambda 10, which makes w zero", "paper"),
            Setting("pure personal, start", "p at the initial weights", "code"),
            Setting("pure personal, mu", "1e-3, 1e-4, 1e-5", "paper"),
            Setting("pure global", "no personal part", "paper"),
            {"paper": Setting("pure global, lambda", "Table 3's last, third and first", "paper"),
             **dict.fromkeys(("small", "middle", "heads"),
                             Setting("pure global, lambda", "the last, third and first of our Table 3's", "ours"))},
        ))  # fmt: skip
def table7(bench: Bench) -> Outcome:
    """Does it take both parts?"""
    mus, lambdas = (1e-3, 1e-4, 1e-5), [LAMBDAS[bench.scale][k] for k in (4, 2, 0)]
    methods: dict[str, Algorithm] = {"mixed": method(bench), "FedAvg": FedAvg(0.1)}
    methods |= {f"personal-{mu:g}": method(bench, lam=10.0, mu=mu, p_init="weights") for mu in few(bench, mus)}
    methods |= {f"global-{v:g}": method(bench, lam=v, deploy="gkr", personal_epochs=0) for v in few(bench, lambdas)}
    runs = train(bench, "runs", methods)
    printed = dict(zip([*(f"personal-{mu:g}" for mu in mus), *(f"global-{v:g}" for v in lambdas)],
                       ("37.14", "44.16", "44.54", "54.26", "64.22", "63.63"), strict=True))  # fmt: skip
    rows = {
        label: [
            ({"mixed": "82.19", "FedAvg": "55.78"}.get(label, printed.get(label)), ours(metric_of(runs, label), 100)),
            (None, ours(last(runs, label, "parameters") / 1e3)),
        ]
        for label in methods
    }
    whole = metric_of(runs, "mixed")
    claims = [points(f"the mixed model is better than {k}", whole, metric_of(runs, k)) for k in methods
              if k != "mixed"]  # fmt: skip
    alone, common = ({k: metric_of(runs, k) for k in methods if k.startswith(kind)} for kind in ("personal", "global"))
    most, *_, least = common.values()  # of lambda
    local, shared = (max(part, key=lambda k: part[k].mean()) for part in (alone, common))
    claims += [
        points(f"pure global, best of three ({shared}), is better than pure personal, best of three ({local})",
                common[shared], alone[local]),
        points("too large a lambda costs pure global accuracy", least, most),
    ]  # fmt: skip
    zero = last(runs, f"personal-{mus[0]:g}", "gkr_parameters")
    notes = [
        FOREIGN,
        f"numbers left in the common part at lambda 10, biases: {zero.mean():.0f}; from p = 0 beside w = 0 most "
        "gradients are zero and nothing would be learnt, so that p's start matters here and only here",
        *NOTES,
    ]
    return Outcome([beside("Tables 7 and 8", ("accuracy, %", "thousand numbers"), rows)], {}, claims, notes)
